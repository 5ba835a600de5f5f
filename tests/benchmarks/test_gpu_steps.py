"""Steps of whole models for the GPU suite, as far as a CPU can take them."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import gpu_clock, gpu_steps, train_speed
from benchmarks.gpu_clock import Clock, covered
from recbft.experiments.arms import parse_arms

SETTINGS = ["max_length=10", "hidden_size=8", "batch_size=16", "device=cpu", "warmup_steps=0"]
ARMS = "matched,bft,matched[training.autocast=bf16],bft[training.autocast=bf16]"


@pytest.fixture
def contestants():
    dataset = gpu_steps.histories(40, 60, mean_length=8.0)
    configured = [(arm, arm.config(SETTINGS, model="sasrec", dataset="synthetic")) for arm in parse_arms(ARMS)]
    return [train_speed.make_contestant(arm, config, dataset) for arm, config in configured]


def test_the_clock_starts_when_every_shape_has_been_met_twice_and_a_turn_is_an_epoch(contestants, monkeypatch):
    taken = []

    def told(contestant, batches, num_steps):
        taken.append((contestant.arm.label, [len(batch.items) for batch in batches]))
        assert len(taken[-1][1]) == num_steps
        return float(len(taken)), 0.5

    monkeypatch.setattr(train_speed, "train_steps", told)
    gpu_steps.train_warm(contestants, warm_up=3, epochs=2)
    shapes = {label: [found for name, found in taken if name == label] for label, _ in taken}
    assert all(found == [found[0]] * 5 for found in shapes.values()) and set(shapes) == set(ARMS.split(","))
    assert [name for name, _ in taken[::4]] == [ARMS.split(",")[n % 4] for n in range(5)]  # another begins
    assert contestants[0].chunks == [14, 17] and contestants[0].epochs == [14.5, 17.5]


def test_an_arm_stands_beside_the_first_and_beside_matched_in_its_own_way(contestants):
    for factor, c in zip((1.0, 1.25, 0.5, 0.75), contestants, strict=True):
        c.chunks, c.evaluations = [8 * factor, 2 * factor, 4 * factor], [1.0]
        c.epochs = [steps + factor * factor for steps in c.chunks]
    rows = [gpu_steps.row_of(c, contestants) for c in contestants]
    assert [row["x"] for row in rows] == [1, 1.25, 0.5, 0.75]
    assert [row["x_matched"] for row in rows] == [1, 1.25, 1, 1.5]
    number = contestants[0].batches.num_batches
    assert [row["step_ms"] for row in rows] == [4000 * factor / number for factor in (1.0, 1.25, 0.5, 0.75)]
    assert [row["refresh_ms"] for row in rows] == pytest.approx([1000, 1562.5, 250, 562.5])
    assert [row["x_epoch"] for row in rows] == pytest.approx([1, (5 + 1.25**2) / 5, 1, (3 + 0.75**2) / 2.25])


def test_without_a_gpu_nothing_is_said_of_one(contestants):
    assert gpu_steps.on_the_device(Clock("cpu"), contestants[0]) == {"busy_ms": None, "kernels": None}


class Profile:
    """Stands for a profiler that has seen a GPU."""

    def __init__(self, activities):
        assert activities == [torch.profiler.ProfilerActivity.CUDA]

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        return None

    def events(self):
        def event(start, end, device=DeviceType.CUDA, named=False):
            span = SimpleNamespace(start=start, end=end)
            return SimpleNamespace(time_range=span, device_type=device, is_user_annotation=named)

        kernels = [event(0.0, 2000.0), event(5000.0, 6000.0), event(1000.0, 3000.0)]
        return [*kernels, event(0.0, 9000.0, named=True), event(0.0, 9000.0, DeviceType.CPU)]


def test_the_work_of_a_gpu_is_counted_once_where_streams_overlap(contestants, monkeypatch):
    monkeypatch.setattr(gpu_clock, "profile", Profile)
    clock = Clock("cuda")
    monkeypatch.setattr(clock, "_wait", lambda: None)
    number = contestants[0].batches.num_batches
    assert gpu_steps.on_the_device(clock, contestants[0]) == {
        "busy_ms": pytest.approx(4 / number),
        "kernels": round(3 / number),
    }
    monkeypatch.setattr(Profile, "events", lambda self: [])  # a profiler that may not look at the GPU
    assert clock.kernels(lambda: None) is None


def test_spans_are_joined():
    assert covered([(3, 4), (0, 2), (1, 2), (1, 3)]) == 4 and covered([]) == 0


def test_histories_to_time_are_made_at_once():
    began = time.process_time()
    made = gpu_steps.histories(22_363, 12_101, mean_length=8.9)
    assert time.process_time() - began < 10 and made.num_users == 22_363 and made.times is not None
    assert 8 < len(made.items) / made.num_users < 11 and 11_000 < made.num_items <= 12_101
