"""The GPU suite as far as a CPU can run it: what it checks, what it says of a wrong kernel, and of a missing GPU."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu_cases, gpu_suite
from recbft.errors import RunError, UserError

pytest.importorskip("triton")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


def small_cases(*, small):
    return [gpu_cases.vocabulary(5, 9, 16), gpu_cases.kriging(1, 1, 6, 16)]


def test_every_mechanism_with_a_triton_path_is_checked():
    names = " ".join(case.name for case in gpu_cases.all_cases(small=True))
    for mechanism in ("kriging", "SiLU", "cross-entropy", "robust filter", "Bayesian"):
        assert mechanism in names


@without_gpu
def test_a_right_kernel_passes_in_single_and_half_precision():
    for case in small_cases(small=True):
        for dtype in (torch.float32, torch.float16):
            row = gpu_suite.check(case, dtype, "cpu")
            assert row["right"] and row["repeats"], row


@without_gpu
def test_a_wrong_kernel_is_found_and_ends_the_command_with_an_error(tmp_path, monkeypatch, capsys):
    honest = gpu_cases.vocabulary(5, 9, 16)

    def wrong(x, impl):
        (loss,) = honest.run(x, impl)
        return (loss * (1.05 if impl == "triton" else 1.0),)

    monkeypatch.setattr(gpu_cases, "all_cases", lambda *, small: [gpu_cases.Case("wrong", honest.leaves, wrong)])
    for part in ("attention", "vocabulary", "steps"):
        monkeypatch.setattr(gpu_suite, part, lambda clock, *, small: [])
    with pytest.raises(RunError, match="2 of 2 checks failed, first wrong"):
        gpu_suite.main(["--out", str(tmp_path / "made"), "--dry-run"])
    rows = json.loads((tmp_path / "made" / "gpu_suite.json").read_text())["correctness"]
    assert [row["right"] for row in rows] == [False, False] and rows[0]["error"] > 1e-4


@without_gpu
@pytest.mark.slow
def test_the_dry_run_goes_through_all_parts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_cases, "all_cases", small_cases)
    assert gpu_suite.main(["--out", str(tmp_path), "--dry-run"]) == 0
    found = json.loads((tmp_path / "gpu_suite.json").read_text())
    assert {"correctness", "attention", "vocabulary", "steps"} <= set(found)
    assert {row["arm"] for row in found["steps"]} == {
        arm + autocast for arm in ("matched", "bft") for autocast in ("", "[training.autocast=bf16]")
    }


@without_gpu
def test_without_a_gpu_it_says_so(tmp_path):
    with pytest.raises(UserError, match="PyTorch sees no CUDA GPU; use --dry-run"):
        gpu_suite.main(["--out", str(tmp_path)])
