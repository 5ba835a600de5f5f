"""The GPU suite as far as a CPU can run it: what it checks and times, and what it says of a wrong kernel."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu_cases, gpu_suite, gpu_training, train_speed
from benchmarks.gpu_clock import Clock, covered
from benchmarks.sheltered import Unit
from recbft.errors import RunError, UserError
from recbft.experiments.plan import parse_arms

pytest.importorskip("triton", minversion="3.3")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
HEADS = (1, 1, 6, 16)
TINY = [
    *(make(*HEADS) for make in (gpu_cases.kriging, gpu_cases.unread, gpu_cases.reml, gpu_cases.silu)),
    *(make(*HEADS) for make in (gpu_cases.robust_filter, gpu_cases.memory)),
    gpu_cases.vocabulary(5, 9, 16),
    gpu_cases.filter_step(5, 16),
    gpu_cases.gelu(5, 16, 4),
    gpu_cases.norm(2, 5, 16),
]


@without_gpu
@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_a_right_kernel_passes(case):
    for dtype in (torch.float32, torch.float16)[: 1 + case.half]:
        [row] = gpu_suite.check(case, dtype, "cpu")
        assert row["right"] and row["repeats"], row


def test_all_mechanisms_are_checked_and_timed():
    made = gpu_suite.units("cpu")
    checked = {unit.labels["kernel"] for unit in made if unit.part == "correctness"}
    assert {case.name for case in TINY} <= checked
    parts = list(dict.fromkeys(unit.part for unit in made))
    assert parts == ["correctness", "attention", "vocabulary", "steps", "seeds", "mechanisms", "kernels"]


@without_gpu
def test_what_is_wrong_or_fails_is_a_line_and_the_rest_is_told(tmp_path, monkeypatch, capsys):
    honest = TINY[6]

    def wrong(x, impl):
        (loss,) = honest.run(x, impl)
        return (loss * (1.05 if impl == "triton" else 1.0),)

    def infinite(x, impl):
        (loss,) = honest.run(x, impl)
        return (loss / (0.0 if impl == "triton" else 1.0),)

    def broken(x, impl):
        raise RuntimeError("no memory for the reference")

    cases = [gpu_cases.Case(run.__name__, honest.leaves, run, half=False) for run in (wrong, infinite, broken)]
    made = [
        Unit("correctness", {"kernel": c.name}, lambda c=c: gpu_suite.check(c, torch.float32, "cpu")) for c in cases
    ]
    made += [Unit("vocabulary", {}, lambda: iter([{"way": "two"}]))]
    monkeypatch.setattr(gpu_suite, "units", lambda device: made)
    with pytest.raises(RunError, match="3 of 3 checks failed, first wrong"):
        gpu_suite.main(["--out", str(tmp_path / "made"), "--dry-run"])
    found = json.loads((tmp_path / "made" / "gpu_suite.json").read_text())
    assert [row.get("right") for row in found["correctness"]] == [False, False, None]
    assert found["correctness"][0]["error"] > 1e-4 and found["correctness"][1]["error"] == "inf"
    assert found["correctness"][2]["failed"] == "RuntimeError: no memory for the reference"
    assert found["vocabulary"] == [{"way": "two"}] and "vocabulary" in capsys.readouterr().out


@without_gpu
def test_a_way_that_fails_is_timed_as_such_beside_the_others(monkeypatch):
    def fails():
        raise RuntimeError("out of registers")

    monkeypatch.setattr(gpu_cases, "attentions", lambda q, k, v, *, impl: {"stock": lambda: q * k * v, "ours": fails})
    monkeypatch.setattr(gpu_suite.Clock, "seconds", lambda self, work: work() or 0.5)
    stock, ours = gpu_suite.attention(Clock("cpu"), 2, 1, 20, 16, torch.float32)
    assert stock["both_ms"] == 500 and stock["both_x"] == 1
    assert ours["failed"] == "RuntimeError: out of registers" and "both_x" not in ours


@without_gpu
def test_parts_are_chosen_by_name_and_nothing_begins_after_its_time(tmp_path, monkeypatch, capsys):
    over = []
    monkeypatch.setattr(gpu_suite.time, "monotonic", lambda: 1e9 if over else 0.0)

    def counted():
        for number in range(3):
            over.append(number)
            yield {"number": number}

    monkeypatch.setattr(
        gpu_suite, "units", lambda device: [Unit(name, {}, counted) for name in ("one", "two", "three")]
    )
    assert gpu_suite.main(["--out", str(tmp_path), "--dry-run", "--parts", "three,two"]) == 0
    assert json.loads((tmp_path / "gpu_suite.json").read_text())["two"] == [{"number": 0}] and over == [0]
    assert "three: no time left for more" in capsys.readouterr().out
    with pytest.raises(UserError, match="--parts has 'four'; there are one, two, three"):
        gpu_suite.main(["--out", str(tmp_path / "other"), "--dry-run", "--parts", "one,four"])


@without_gpu
def test_what_it_cannot_run_on_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="PyTorch sees no CUDA GPU; use --dry-run"):
        gpu_suite.main(["--out", str(tmp_path)])
    monkeypatch.setattr(gpu_suite, "release", {"triton": (3, 6), "numpy": (2, 5)}.get)
    with pytest.raises(UserError, match=r"Triton 3\.6 fails with numpy 2\.5; install numpy<2\.4 or triton>=3\.7"):
        gpu_suite.main(["--out", str(tmp_path / "made"), "--dry-run"])


def test_an_arm_stands_beside_the_first_and_beside_matched_in_its_own_way(monkeypatch):
    arms = parse_arms("matched,bft,matched[training.autocast=bf16],bft[training.autocast=bf16]")
    dataset = gpu_training.histories(40, 60, mean_length=8.0)
    settings = ["max_length=10", "hidden_size=8", "batch_size=16", "device=cpu", "warmup_steps=0"]
    contestants = [
        train_speed.make_contestant(arm, arm.config(settings, model="sasrec", dataset="synthetic"), dataset)
        for arm in arms
    ]
    taken = []

    def told(contestant, batches, num_steps):
        taken.append((contestant.arm.label, len(list(batches))))
        return float(len(taken)), 0.5

    monkeypatch.setattr(train_speed, "train_steps", told)
    gpu_training.train_warm(contestants, warm_up=3, epochs=2)
    number = contestants[0].batches.num_batches
    assert [name for name, _ in taken[::4]] == [arms[n % 4].label for n in range(5)]  # another begins
    assert {steps for _, steps in taken} == {number}  # a turn is an epoch
    assert contestants[0].chunks == [14, 17] and contestants[0].epochs == [14.5, 17.5]
    for factor, c in zip((1.0, 1.25, 0.5, 0.75), contestants, strict=True):
        c.chunks, c.evaluations = [8 * factor, 2 * factor, 4 * factor], [1.0]
        c.epochs = [steps + factor * factor for steps in c.chunks]
    rows = [gpu_training.row_of(c, contestants) for c in contestants]
    assert [row["x"] for row in rows] == [1, 1.25, 0.5, 0.75]
    assert [row["x_matched"] for row in rows] == [1, 1.25, 1, 1.5]
    assert [row["step_ms"] for row in rows] == [4000 * factor / number for factor in (1.0, 1.25, 0.5, 0.75)]
    assert [row["x_epoch"] for row in rows] == pytest.approx([1, (5 + 1.25**2) / 5, 1, (3 + 0.75**2) / 2.25])
    assert Clock("cpu").kernels(list) is None


def test_work_of_streams_that_overlap_is_counted_once():
    assert covered([(3, 4), (0, 2), (1, 2), (1, 3)]) == 4 and covered([]) == 0


def test_seeds_trained_together_are_timed_beside_one(capsys):
    assert gpu_training.main(["bft", "--device", "cpu", "--small"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["seeds"] == 2 and row["loss_apart"] < 1e-5 and row["epoch_s"] > 0
