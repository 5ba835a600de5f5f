"""The GPU suite as far as a CPU can run it: what it checks, what it says of a wrong kernel, and of a missing GPU."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu_cases, gpu_suite
from benchmarks.sheltered import Unit
from recbft.errors import RunError, UserError

pytest.importorskip("triton", minversion="3.3")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


def small_cases(*, small):
    return [gpu_cases.vocabulary(5, 9, 16), gpu_cases.kriging(1, 1, 6, 16), gpu_cases.reml(1, 1, 6, 16)]


def keep_parts(monkeypatch, *names, others=()):
    """Leave the units of some parts, and put others after them."""
    whole = gpu_suite.units
    monkeypatch.setattr(
        gpu_suite, "units", lambda device: [*(unit for unit in whole(device) if unit.part in names), *others]
    )


def test_every_mechanism_with_a_triton_path_is_checked():
    names = " ".join(case.name for case in gpu_cases.all_cases(small=True))
    for mechanism in ("kriging", "REML", "SiLU", "cross-entropy", "robust filter", "Bayesian"):
        assert mechanism in names


@without_gpu
def test_a_right_kernel_passes_in_single_and_half_precision():
    for case in small_cases(small=True):
        for dtype in (torch.float32, torch.float16):
            [row] = gpu_suite.check(case, dtype, "cpu")
            assert row["right"] and row["repeats"], row


@without_gpu
def test_a_wrong_kernel_is_found_and_ends_the_command_with_an_error(tmp_path, monkeypatch, capsys):
    honest = gpu_cases.vocabulary(5, 9, 16)

    def wrong(x, impl):
        (loss,) = honest.run(x, impl)
        return (loss * (1.05 if impl == "triton" else 1.0),)

    monkeypatch.setattr(gpu_cases, "all_cases", lambda *, small: [gpu_cases.Case("wrong", honest.leaves, wrong)])
    keep_parts(monkeypatch, "correctness")
    with pytest.raises(RunError, match="2 of 2 checks failed, first wrong"):
        gpu_suite.main(["--out", str(tmp_path / "made"), "--dry-run"])
    rows = json.loads((tmp_path / "made" / "gpu_suite.json").read_text())["correctness"]
    assert [row["right"] for row in rows] == [False, False] and rows[0]["error"] > 1e-4


@without_gpu
def test_an_interpreter_that_this_numpy_breaks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_suite, "release", {"triton": (3, 6), "numpy": (2, 5)}.get)
    with pytest.raises(UserError, match=r"Triton 3\.6 fails with numpy 2\.5; install numpy<2\.4 or triton>=3\.7"):
        gpu_suite.main(["--out", str(tmp_path / "made"), "--dry-run"])
    assert not (tmp_path / "made").exists()


@without_gpu
def test_what_fails_is_a_line_and_the_rest_is_told(tmp_path, monkeypatch):
    honest = gpu_cases.vocabulary(5, 9, 16)

    def infinite(x, impl):
        (loss,) = honest.run(x, impl)
        return (loss / (0.0 if impl == "triton" else 1.0),)

    def broken(x, impl):
        raise RuntimeError("no such kernel" if impl == "triton" else "no memory for the reference")

    def breaks_off():
        yield {"way": "one", "forward_ms": float("nan")}
        raise RuntimeError("the next one is too large")

    cases = [gpu_cases.Case(run.__name__, honest.leaves, run) for run in (infinite, broken, honest.run)]
    monkeypatch.setattr(gpu_cases, "all_cases", lambda *, small: cases)
    others = [Unit("attention", {"T": 5}, breaks_off), Unit("vocabulary", {}, lambda: iter([{"way": "two"}]))]
    keep_parts(monkeypatch, "correctness", others=others)
    with pytest.raises(RunError, match="4 of 6 checks failed, first infinite"):
        gpu_suite.main(["--out", str(tmp_path), "--dry-run"])
    found = json.loads((tmp_path / "gpu_suite.json").read_text())
    assert [row.get("right", False) for row in found["correctness"]] == [False] * 4 + [True] * 2
    assert found["correctness"][0]["error"] == "inf"
    assert found["correctness"][2]["failed"] == "RuntimeError: no memory for the reference"
    assert found["attention"] == [
        {"T": 5, "way": "one", "forward_ms": "nan"},
        {"T": 5, "failed": "RuntimeError: the next one is too large"},
    ]
    assert found["vocabulary"] == [{"way": "two"}]


@without_gpu
def test_a_way_that_fails_is_timed_as_such_beside_the_others(monkeypatch):
    def fails(q, k, v):
        raise RuntimeError("out of registers")

    ways = {"stock": gpu_cases.stock_attention, "ours": fails}
    monkeypatch.setattr(gpu_cases, "contestants", lambda B, T, device, *, impl: ways)
    monkeypatch.setattr(gpu_suite.Clock, "seconds", lambda self, work: work() or 0.5)
    stock, ours = gpu_suite.attention(gpu_suite.Clock("cpu"), 2, 1, 20, 16, torch.float32)
    assert stock["both_ms"] == 500 and stock["both_x"] == 1
    assert ours["failed"] == "RuntimeError: out of registers" and "both_x" not in ours


@without_gpu
def test_nothing_begins_after_its_time(tmp_path, monkeypatch, capsys):
    began, over = [], []
    monkeypatch.setattr(gpu_suite.time, "monotonic", lambda: 1e9 if over else 0.0)

    def counted():
        for number in range(3):
            began.append(number)
            over.append(True)
            yield {"number": number}

    keep_parts(monkeypatch, others=[Unit("attention", {}, counted), Unit("steps", {}, counted)])
    assert gpu_suite.main(["--out", str(tmp_path), "--dry-run"]) == 0
    assert began == [0]
    assert json.loads((tmp_path / "gpu_suite.json").read_text())["attention"] == [{"number": 0}]
    told = capsys.readouterr().out
    assert "steps: no time left for more" in told and "\nsteps\n" not in told


@without_gpu
def test_parts_are_chosen_by_name(tmp_path, monkeypatch):
    keep_parts(monkeypatch, others=[Unit(part, {}, lambda: iter([{"number": 1}])) for part in ("one", "two", "three")])
    assert gpu_suite.main(["--out", str(tmp_path), "--dry-run", "--parts", "three,one"]) == 0
    found = json.loads((tmp_path / "gpu_suite.json").read_text())
    assert [part for part in ("one", "two", "three") if part in found] == ["one", "three"]
    with pytest.raises(UserError, match="--parts has 'four'; there are one, two, three"):
        gpu_suite.main(["--out", str(tmp_path / "other"), "--dry-run", "--parts", "one,four"])
    assert not (tmp_path / "other").exists()


@without_gpu
@pytest.mark.slow
def test_the_dry_run_goes_through_all_parts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_cases, "all_cases", small_cases)
    assert gpu_suite.main(["--out", str(tmp_path), "--dry-run"]) == 0
    found = json.loads((tmp_path / "gpu_suite.json").read_text())
    assert {"correctness", "attention", "vocabulary", "steps", "seeds", "mechanisms", "kernels"} <= set(found)
    assert {row["kernel"] for row in found["mechanisms"] if row["way"] == "recbft" and row["both_ms"] > 0} == {
        "SiLU moments", "robust filter attention", "Bayesian layer", "update and prediction", "GELU with its slope",
        "layer norm",
    }  # fmt: skip
    assert all(row["seeds"] == 2 and row["loss_apart"] < 1e-5 for row in found["seeds"])
    arms = {arm + autocast for arm in ("matched", "bft") for autocast in ("", "[training.autocast=bf16]")}
    assert {row["arm"] for row in found["steps"]} == {row["arm"] for row in found["kernels"]} == arms


@without_gpu
def test_without_a_gpu_it_says_so(tmp_path):
    with pytest.raises(UserError, match="PyTorch sees no CUDA GPU; use --dry-run"):
        gpu_suite.main(["--out", str(tmp_path)])
