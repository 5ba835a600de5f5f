"""Instructions of a GPU, run here: what they compute, and what is told of programs that a GPU would leave to chance."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import command
from benchmarks.ptx import arithmetic, movement, products  # noqa: F401  the instructions
from benchmarks.ptx.memory import GlobalMemory, UndefinedError
from benchmarks.ptx.program import Instruction, Program, grouped
from benchmarks.ptx.threads import Threads, UnknownInstructionError
from recbft.errors import UserError

KERNELS, FAR_LOGITS = (Path(__file__).with_name(name) for name in ("ptx_kernels.py", "ptx_far_logits.py"))
HEAD = """
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid 64
{
    .reg .b32 %r<99>;
"""


def run(body, *, programs=1, dtype=torch.int32):
    """What a kernel of 64 threads leaves in a tensor of the numbers 0 to 63, which begins at %rd1.

    Thread and program are in %r1 and %r2, the address of the thread's number in %rd2, its shared memory at %r3.
    """
    begin = """
    ld.param.b64 %rd1, [kernel_param_0];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mul.wide.s32 %rd3, %r1, 4;
    add.s64 %rd2, %rd1, %rd3;
    shl.b32 %r3, %r1, 2;
    """
    program = Program.parse(HEAD + begin + body + "ret;\n$L__func_end0:\n}")
    held, memory = torch.arange(64, dtype=dtype), GlobalMemory()
    memory.add(held)
    for place in range(programs):
        Threads(program, {"kernel_param_0": held.data_ptr()}, memory, 1024, (place, 0, 0), (programs, 1, 1)).run()
    return held


def of(*operations, dtype=torch.int32):
    """What operations make of each thread's number in %r10, in %r20."""
    return run(
        "ld.global.b32 {%r10}, [%rd2];\n" + "".join(operations) + "st.global.b32 [%rd2 + 0], {%r20};", dtype=dtype
    )


def test_operands_are_split_where_no_brackets_are_open():
    operands = Instruction.parse("add.s32 { %r1, %r2 }, [ %rd1 + 4 ], 7").operands
    assert list(operands) == ["{ %r1, %r2 }", "[ %rd1 + 4 ]", "7"] and Instruction.parse("ret").operands == ()
    assert grouped("{ %r1, %r2 }") == ["%r1", "%r2"] and grouped("%r1") == ["%r1"]


LANE = np.arange(64)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("sub.s32 %r20, %r10, 40;", LANE - 40),
        ("mad.lo.s32 %r20, %r10, 3, 5;", 3 * LANE + 5),
        ("mul.hi.u32 %r20, %r10, 0x80000000;", LANE // 2),
        ("sub.s32 %r11, %r10, 40; div.s32 %r20, %r11, 7;", np.trunc((LANE - 40) / 7)),
        ("sub.s32 %r11, %r10, 40; rem.s32 %r20, %r11, 7;", np.fmod(LANE - 40, 7)),
        ("sub.s32 %r11, %r10, 40; shr.s32 %r20, %r11, 2;", (LANE - 40) >> 2),
        ("sub.s32 %r11, %r10, 40; shr.s32 %r20, %r11, 99;", np.where(LANE < 40, -1, 0)),
        ("shl.b32 %r20, %r10, 32;", 0 * LANE),
        ("bfe.u32 %r20, %r10, 2, 3;", LANE >> 2 & 7),
        ("bfe.s32 %r20, %r10, 2, 3;", np.where(LANE >> 2 & 4, (LANE >> 2 & 7) - 8, LANE >> 2 & 7)),
        ("lop3.b32 %r20, %r10, 12, 5, 0x96;", LANE ^ 12 ^ 5),
        ("prmt.b32 %r20, %r10, 258, 0x5140;", LANE | 2 << 8 | 1 << 24),
        ("setp.gt.s32 %p1, %r10, 9; selp.b32 %r20, 1, 2, %p1;", np.where(LANE > 9, 1, 2)),
        ("setp.gt.s32 %p1, %r10, 9; mov.b32 %r20, 3; @!%p1 mov.b32 %r20, 4;", np.where(LANE > 9, 3, 4)),
        ("shfl.sync.bfly.b32 %r20, %r10, 3, 31, -1;", LANE ^ 3),
        ("shfl.sync.idx.b32 %r20, %r10, 5, 31, -1;", LANE // 32 * 32 + 5),
        ("shfl.sync.up.b32 %r20, %r10, 1, 0, -1;", np.where(LANE % 32, LANE - 1, LANE)),
        ("shfl.sync.down.b32 %r20, %r10, 2, 31, -1;", np.where(LANE % 32 < 30, LANE + 2, LANE)),
        ("redux.sync.max.s32 %r20, %r10, -1;", LANE // 32 * 32 + 31),
        ("mov.b32 {%rs1, %rs2}, %r10; mov.b32 %r20, {%rs2, %rs1};", LANE << 16),
        ("mov.b32 {%rs1, %rs2}, %r10; mov.b32 %r20, {%rs1, %rs9}; and.b32 %r20, %r20, 65535;", LANE),
        ("setp.lt.s32 %p1, %r10, 7;\n@%p1 bra $L__A;\nmov.b32 %r20, 1;\nbra.uni $L__B;\n$L__A:\nmov.b32 %r20, 2;\n"
         "$L__B:\n", np.where(LANE < 7, 2, 1)),
        ("mov.b32 %r20, 0;\n$L__A:\nadd.s32 %r20, %r20, 1;\nsetp.lt.s32 %p1, %r20, %r10;\n@%p1 bra $L__A;\n",
         np.maximum(LANE, 1)),
    ],
)  # fmt: skip
def test_an_instruction_computes_what_it_does_on_a_gpu(operation, expected):
    assert of(operation).tolist() == expected.astype(int).tolist()


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("fma.rn.f32 %r20, %r10, %r10, 0f3F800000;", lambda x: x * x + 1),
        ("ex2.approx.f32 %r20, %r10;", torch.exp2),
        ("sub.f32 %r11, %r10, 0f41200000; cvt.rzi.s32.f32 %r12, %r11; cvt.rn.f32.s32 %r20, %r12;", lambda x: x - 10),
        ("div.full.f32 %r11, %r10, 0f40E00000; cvt.rn.bf16.f32 %rs1, %r11; cvt.f32.bf16 %r20, %rs1;",
         lambda x: (x / 7).bfloat16().float()),
        ("div.full.f32 %r11, %r10, 0f40E00000; cvt.rn.f16.f32 %rs1, %r11; cvt.f32.f16 %r20, %rs1;",
         lambda x: (x / 7).half().float()),
        ("cvt.rn.bf16x2.f32 %r11, 0f40000000, %r10; fma.rn.bf16x2 %r12, %r11, %r11, %r11; mov.b32 {%rs1, %rs2}, %r12;"
         "cvt.f32.bf16 %r20, %rs1;", lambda x: (x * x + x).bfloat16().float()),
        ("neg.f32 %r11, 0f7FC00000; setp.ltu.f32 %p1, %r10, %r11; selp.f32 %r20, 0f3F800000, %r10, %p1;",
         torch.ones_like),
        ("max.f32 %r20, %r10, 0f7FC00000;", lambda x: x),
    ],
)  # fmt: skip
def test_so_does_one_of_floating_point(operation, expected):
    assert torch.equal(of(operation, dtype=torch.float32), expected(torch.arange(64.0)))


def test_tf32_keeps_ten_bits_and_rounds_ties_away():
    found = of("cvt.rna.tf32.f32 %r20, %r10;", dtype=torch.float32)
    assert torch.equal(found, torch.arange(64.0))
    bits = run("ld.global.b32 {%r10}, [%rd2];\nor.b32 %r11, %r10, 0x3F801000;\ncvt.rna.tf32.f32 %r20, %r11;\n"
               "st.global.b32 [%rd2 + 0], {%r20};")  # fmt: skip
    assert set(bits.tolist()) == {0x3F802000}


SWAP = (
    "st.shared.b32 [%r3], %r1;\n{}xor.b32 %r4, %r3, 128;\nld.shared.b32 %r20, [%r4];\nst.global.b32 [%rd2], {{%r20}};"
)


def test_a_barrier_lets_warps_read_what_others_wrote():
    assert run(SWAP.format("bar.sync 0;\n")).tolist() == [(x + 32) % 64 for x in range(64)]
    with pytest.raises(UndefinedError, match=r"reads what another wrote without a barrier.*ld\.shared"):
        run(SWAP.format(""))


def test_a_warp_may_not_write_what_another_reads_without_a_barrier():
    again = SWAP.format("bar.sync 0;\n")
    run(again + "bar.sync 0;\nst.shared.b32 [%r3], %r2;")
    with pytest.raises(UndefinedError, match="a warp writes what another wrote or read without a barrier"):
        run(again + "st.shared.b32 [%r3], %r2;")


COPY = "cp.async.ca.shared.global [%r3], [%rd2], 4;\ncp.async.commit_group;\n{}ld.shared.b32 %r20, [%r3];\n"


def test_a_copy_is_there_when_it_has_been_waited_for():
    run(COPY.format("cp.async.wait_group 0;\n"))
    with pytest.raises(UndefinedError, match="still being copied"):
        run(COPY.format("") + "cp.async.wait_group 0;\n")
    with pytest.raises(UndefinedError, match="ends with copies under way"):
        run("cp.async.ca.shared.global [%r3], [%rd2], 4;\n")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("st.global.b32 [%rd2 + 4], {%r1};", "outside of every tensor"),
        ("ld.global.b32 {%r20}, [%rd2 + -4];", "outside of every tensor"),
        ("st.global.v2.b32 [%rd2], {%r1, %r1};", "an address of 8 bytes is no multiple of that"),
        ("st.global.b32 [%rd1], {%r1};", "threads write different values to one address"),
        ("ld.shared.b32 %r20, [%r3 + 1020];", "outside of the 1024 bytes of shared memory"),
        ("div.s32 %r20, 1, %r1;", "a division by zero"),
    ],
)
def test_what_a_gpu_leaves_to_chance_ends_the_run(body, message):
    with pytest.raises(UndefinedError, match=f"kernel, program 0: .*{message}"):
        run(body)


def test_programs_may_not_touch_what_others_write():
    with pytest.raises(UndefinedError, match="program 1: a program writes what another wrote or read"):
        run("st.global.b32 [%rd2], {%r1};", programs=2)
    with pytest.raises(UndefinedError, match="program 1: a program reads what another wrote"):
        run("ld.global.b32 {%r10}, [%rd2];\nst.global.b32 [%rd2], {%r10};", programs=2)
    run("ld.global.b32 {%r10}, [%rd2];", programs=2)


def test_an_unknown_instruction_is_named():
    with pytest.raises(UnknownInstructionError, match=r"popc\.b32 %r20, %r10"):
        of("popc.b32 %r20, %r10;")


def python(*words, cache):
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": "."}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env={**os.environ, **settings})


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_products_of_tensor_cores_are_the_matrices_product(capability, tmp_path):
    pytest.importorskip("triton", minversion="3.4")
    done = python(str(KERNELS), capability, cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_a_softmax_bears_logits_far_from_0(capability, tmp_path):
    pytest.importorskip("triton", minversion="3.4")
    done = python(str(FAR_LOGITS), capability, cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanism", "widths", "types"),
    [
        ("kriging moments, causal, values", [16], ["float32", "float16", "bfloat16"]),
        ("GELU", [16], ["float32"]),
        ("Bayesian layer", [16, 32, 64], ["float32"]),
    ],
)
def test_a_rehearsal_holds_compiled_kernels_against_their_reference(mechanism, widths, types, tmp_path):
    pytest.importorskip("triton", minversion="3.4")
    done = python("-m", "benchmarks.gpu_rehearsal", "--only", mechanism, cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith(f"| {mechanism}")]
    assert [(row[1], row[2]) for row in rows] == [(str(width), name) for width in widths for name in types]
    assert all(row[3] == "True" for row in rows)


def test_a_rehearsal_has_the_widths_of_models_where_kernels_are_compiled_for_one():
    pytest.importorskip("triton", minversion="3.4")
    from benchmarks.gpu_rehearsal import cases

    for mechanism in ("kriging moments, causal", "SiLU moments", "robust filter attention", "Bayesian layer"):
        assert [width for width, case in cases() if case.name == mechanism] == [16, 32, 64]


def test_a_rehearsal_of_nothing_says_what_there_is(monkeypatch):
    pytest.importorskip("triton", minversion="3.4")
    from benchmarks.gpu_rehearsal import main

    monkeypatch.setattr(command, "interpreted", lambda: False)
    with pytest.raises(UserError, match="--only magic: no mechanism's name holds this; there are kriging"):
        main(["--only", "magic"])
    with pytest.raises(UserError, match=r"kriging with REML and a bias, SiLU moments$"):
        main(["--instructions", "16", "--only", "GELU"])
    monkeypatch.setattr(command, "interpreted", lambda: True)
    with pytest.raises(UserError, match=r"^TRITON_INTERPRET is set; unset it: the interpreter compiles nothing$"):
        main([])
