"""The Triton kernels compile for a GPU that need not be there, and what they take of it is told."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", minversion="3.4")

from triton.backends.compiler import GPUTarget

from benchmarks import command
from benchmarks.gpu_registers import Usage, compiling, main
from recbft.errors import UserError
from recbft.kernels.softmax_moments import triton as kriging

KRIGING = ["spans_kernel", "columns_kernel", "forward_kernel", "query_kernel", "key_kernel"]
KERNELS = {
    "kriging moments, causal": KRIGING,
    "kriging with REML and a bias": KRIGING,
    "SiLU moments": ["forward_pass", "readers_pass", "keys_pass"],
    "robust filter attention": ["forward", "readers_backward", "keys_backward"],
    "Bayesian layer": ["forwards", "backwards"],
    "cross-entropy": ["_sums_of_parts", "_merge", "_gradient_of_items"],
}
SPILLS = {"Bayesian layer"}  # the rest keeps to registers at this width, or nearly


def told(tmp_path, *options, interpret="0"):
    settings = {"TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(tmp_path)}
    words = [sys.executable, "-m", "benchmarks.gpu_registers", *options]
    return subprocess.run(words, capture_output=True, text=True, env={**os.environ, **settings})


@pytest.mark.slow
def test_every_kernel_compiles_and_keeps_to_its_registers(tmp_path):
    run = told(tmp_path, "--widths", "32")
    assert run.returncode == 0, run.stderr
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in run.stdout.splitlines()[2:]]
    for mechanism, kernels in KERNELS.items():
        own = [row for row in rows if row[0] == mechanism]
        assert {row[3] for row in own} == set(kernels)
        for row in own:
            registers, spilled, programs = int(row[4]), int(row[5]), int(row[8])
            assert 0 < registers <= 255 and programs >= 1, row
            assert mechanism in SPILLS or spilled <= 160, row


def test_what_compiles_nothing_is_refused(tmp_path, monkeypatch):
    run = told(tmp_path, interpret="1")
    assert run.returncode == 2
    assert run.stderr == "error: TRITON_INTERPRET is set; unset it: the interpreter compiles nothing\n"
    monkeypatch.setattr(command, "interpreted", lambda: False)
    with pytest.raises(UserError, match="--only magic: no mechanism's name holds this; there are kriging"):
        main(["--only", "magic"])


@pytest.mark.parametrize("capability, other", [(80, 32), (90, 64), (100, 32), (120, 32)])
def test_tiles_are_those_of_the_gpu_that_is_compiled_for(capability, other):
    with compiling(GPUTarget("cuda", capability, 32)):
        assert kriging._tiles(200, 64, torch.zeros(1, dtype=torch.bfloat16))["OTHER"] == other


def test_a_program_that_no_multiprocessor_has_the_shared_memory_for_is_told():
    programs = [Usage("k", 128, 0, 100 * 1024, 4, capability).resident for capability in (80, 86, 90)]
    assert programs == [1, 0, 2]
