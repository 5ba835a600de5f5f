"""Instructions of a GPU, run here: what they compute; and one kernel as compiled for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from benchmarks import gpu_rehearsal
from benchmarks.ptx import arithmetic, movement  # noqa: F401  the instructions
from benchmarks.ptx.threads import Instruction, Memory, NotRunError, Program, Threads, grouped
from recbft.errors import UserError
from recbft.kernels import dispatch

HEAD = """
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid 64
{
    .reg .b32 %r<99>;
"""


def run(body, *, dtype=torch.int32):
    """What a kernel of 64 threads leaves in a tensor of the numbers 0 to 63.

    The thread is in %r1, the address of its number in %rd2, its shared memory at %r3.
    """
    begin = """
    ld.param.b64 %rd1, [kernel_param_0];
    mov.u32 %r1, %tid.x;
    mul.wide.s32 %rd3, %r1, 4;
    add.s64 %rd2, %rd1, %rd3;
    shl.b32 %r3, %r1, 2;
    """
    program = Program.parse(HEAD + begin + body + "ret;\n$L__func_end0:\n}")
    held, memory = torch.arange(64, dtype=dtype), Memory()
    memory.add(held)
    Threads(program, {"kernel_param_0": held.data_ptr()}, memory, 1024, (0, 0, 0), (1, 1, 1)).run()
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


def test_threads_of_other_warps_read_what_was_shared():
    swap = "st.shared.b32 [%r3], %r1;\nbar.sync 0;\nxor.b32 %r4, %r3, 128;\nld.shared.b32 %r20, [%r4];\n"
    assert run(swap + "st.global.b32 [%rd2], {%r20};").tolist() == [(x + 32) % 64 for x in range(64)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("st.global.b32 [%rd2 + 4], {%r1};", "outside of the memory that the launch was given"),
        ("ld.global.b32 {%r20}, [%rd2 + -4];", "outside of the memory that the launch was given"),
        ("st.global.v2.b32 [%rd2], {%r1, %r1};", "an address of 8 bytes is no multiple of that"),
        ("ld.shared.b32 %r20, [%r3 + 1020];", "outside of the memory that the launch was given"),
        ("div.s32 %r20, 1, %r1;", "a division by zero"),
        ("tcgen05.mma %r20, %r1;", "an instruction that is not run here"),
    ],
)
def test_what_cannot_be_run_ends_the_run_with_its_instruction(body, message):
    with pytest.raises(NotRunError, match=rf"kernel, program \(0, 0, 0\): .*{message}: {body[:8]}"):
        run(body)


def test_a_rehearsal_holds_a_compiled_kernel_against_its_reference(tmp_path):
    pytest.importorskip("triton", minversion="3.4")
    words = [sys.executable, "-m", "benchmarks.gpu_rehearsal", "--only", "layer norm"]
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **settings})
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| layer norm")]
    assert row[2:4] == ["float32", "True"] and int(row[7]) > 0


def test_a_rehearsal_of_nothing_says_what_there_is(monkeypatch):
    pytest.importorskip("triton", minversion="3.4")
    monkeypatch.setattr(dispatch, "interpreted", lambda: False)
    with pytest.raises(UserError, match="--only magic: no mechanism has this in its name; there are kriging"):
        gpu_rehearsal.main(["--only", "magic"])
    monkeypatch.setattr(dispatch, "interpreted", lambda: True)
    with pytest.raises(UserError, match=r"^TRITON_INTERPRET is set; unset it: the interpreter compiles nothing$"):
        gpu_rehearsal.main([])
    monkeypatch.setattr(dispatch, "release", lambda package: (3, 3))
    with pytest.raises(UserError, match=r"^needs Triton 3\.4 or later, got 3\.3$"):
        gpu_rehearsal.main([])
