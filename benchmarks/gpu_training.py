"""Whole models on a GPU, for ``benchmarks.gpu_suite``: training steps of the arms, and twenty seeds trained together.

Steps: what happens once, or once an epoch, must not weigh more than in a run of hundreds of epochs. CUDA graphs are
recorded of the second batch of each shape, so all arms first go three times through the epoch that is timed; an arm's
turn is a whole epoch, with one refresh of what a model keeps from its weights.

Seeds: on generated histories as many and as short as those of Amazon Beauty. Both arms train at once, a process each
(``python -m benchmarks.gpu_training ARM``), as ``recbft compare --jobs 2 --batch-seeds 20`` does: while a GPU waits for
one of them it serves the other.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks import large_log, train_speed
from benchmarks.command import finish, parser
from benchmarks.gpu_clock import Clock
from benchmarks.sheltered import Row
from benchmarks.train_speed import Contestant
from recbft.datasets import Dataset
from recbft.experiments.plan import parse_arms
from recbft.training import one_run
from recbft.training.many_seeds import train_seeds
from recbft.training.progress import Silent

NAME = "gpu_training"
WARM_UP_EPOCHS = 3
EPOCHS = 8  # that are timed
EVALUATIONS = 3  # the first compiles what it is the first to call
ARMS = ("matched", "bft")
PATIENCE = 110.0  # seconds that an arm's seeds may take


def steps(clock: Clock, length: int, *, small: bool) -> Iterator[Row]:
    """A training step of each arm, and evaluation.

    ``x`` is the ratio to the first arm and ``x_matched`` that to ``matched`` in the same way, of steps side by side.
    What is done once an epoch, ``refresh_ms``, is in neither; with it in epochs as short as these ``x_matched`` is
    ``x_epoch``.
    """
    contestants, dataset = _made(clock, length, small=small)
    train_warm(contestants, warm_up=1 if small else WARM_UP_EPOCHS, epochs=1 if small else EPOCHS)
    train_speed.evaluate_in_turn(contestants, dataset, times=1 if small else EVALUATIONS)
    for contestant in contestants:
        yield row_of(contestant, contestants)


def kernels(clock: Clock, length: int, *, small: bool) -> Iterator[Row]:
    """How many milliseconds a GPU is at work in those steps, and by how many kernels: an epoch's, over its steps.

    For the end of a suite: what a profiler has opened once slows the process from then on.
    """
    for c in _made(clock, length, small=small)[0]:
        train_warm([c], warm_up=2, epochs=0)
        number = c.batches.num_batches
        seen = clock.kernels(partial(train_speed.train_steps, c, c.batches.epoch(0), number))
        busy_ms, launches = (None, None) if seen is None else (1e3 * seen[0] / number, round(seen[1] / number))
        yield {"arm": c.arm.label, "busy_ms": busy_ms, "kernels": launches}


def _made(clock: Clock, length: int, *, small: bool) -> tuple[list[Contestant], Dataset]:
    """The arms in each way, untrained, and generated histories that fill most of their rows."""
    ways = ["", "[training.autocast=bf16]", *([] if small else ["[training.cuda_graphs=true]"])]
    users, items = (60, 400) if small else (4096, 12_000)
    dataset = histories(users, items, mean_length=0.75 * length)
    narrow = ["hidden_size=16", "batch_size=32"] if small else []
    settings = [f"max_length={length}", f"device={clock.device}", "warmup_steps=0", *narrow]
    made = []
    for arm in parse_arms(",".join(f"matched{way},bft{way}" for way in ways)):
        config = arm.config(settings, model="sasrec", dataset="synthetic")
        made.append(train_speed.make_contestant(arm, config, dataset))
    return made, dataset


def train_warm(contestants: Sequence[Contestant], *, warm_up: int, epochs: int) -> None:
    """Train all through the same epoch again and again; what is kept are the times of the last so many.

    Each epoch another begins.
    """
    for turn in range(warm_up + epochs):
        if turn == warm_up:
            for c in contestants:
                c.chunks.clear()
                c.epochs.clear()
        first = turn % len(contestants)
        in_turn = [*contestants[first:], *contestants[:first]]
        train_speed.train_in_turn(in_turn, epochs=1, chunk_steps=contestants[0].batches.num_batches)


def row_of(contestant: Contestant, contestants: Sequence[Contestant]) -> Row:
    """The times of an arm beside those of the first, and of ``matched`` with the same settings."""
    c, number = contestant, contestant.batches.num_batches
    [plain] = [other for other in contestants if (other.arm.name, other.arm.settings) == ("matched", c.arm.settings)]
    seconds = statistics.median(c.chunks)  # a chunk is an epoch's steps
    refreshes = [whole - steps for whole, steps in zip(c.epochs, c.chunks, strict=True)]
    return {
        "arm": c.arm.label,
        "step_ms": 1e3 * seconds / number,
        "x": _ratio(c.chunks, contestants[0].chunks),
        "x_matched": _ratio(c.chunks, plain.chunks),
        "refresh_ms": 1e3 * statistics.median(refreshes),
        "x_epoch": _ratio(c.epochs, plain.epochs),
        "tokens_per_second": c.batches.num_tokens / seconds,
        "evaluation_s": statistics.median(c.evaluations),
    }


def _ratio(seconds: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(mine / its for mine, its in zip(seconds, others, strict=True))


def histories(num_users: int, num_items: int, *, mean_length: float) -> Dataset:
    """To be timed and made in a second: users with tastes, as ``synthetic_dataset`` has them, take up to a minute."""
    events = large_log.generate(num_users, round(num_users * mean_length), num_items).to_pandas()
    return Dataset.from_frame(events, name="made", user="user_id", item="item_id", time="timestamp")


class _Watch(Silent):
    """When the epochs of a run were over."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def epoch(self, row: Mapping[str, object]) -> None:
        self.ends.append(time.perf_counter())


def side_by_side(device: str, *, small: bool) -> Iterator[Row]:
    """What ``train_together`` finds of both arms, trained at the same time; RuntimeError where a process fails."""
    command = [sys.executable, "-m", f"benchmarks.{NAME}", "--device", device, *(["--small"] if small else [])]
    began = time.monotonic()
    working = [subprocess.Popen([*command, arm], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for arm in ARMS]
    try:
        for process in working:
            said, error = process.communicate(timeout=max(1.0, began + PATIENCE - time.monotonic()))
            if process.returncode:
                raise RuntimeError(error.decode(errors="replace").strip()[-300:])
            yield json.loads(said.splitlines()[-1])
    finally:
        for process in working:
            process.kill()
            process.communicate()


def train_together(arm: str, device: str, *, small: bool) -> Row:
    """Seconds of an epoch of all seeds with what follows it, and of training alone beside one seed trained alone.

    A hundred epochs take what these took and more of the same. The first losses say how far the two ways are apart;
    on a GPU their dropout differs.
    """
    number, epochs, users, items = (2, 2, 60, 400) if small else (20, 3, 22_363, 12_101)
    dataset = histories(users, items, mean_length=8.9)
    settings = [f"epochs={epochs}", "patience=100", f"device={device}", *(["hidden_size=16"] if small else [])]
    config = parse_arms(arm)[0].config(settings, model="sasrec", dataset="synthetic")
    configs = [replace(config, seed=seed) for seed in range(number)]
    watches = [_Watch() for _ in configs]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        runs = train_seeds(configs, [Path(folder) / str(n) for n in range(number)], dataset=dataset, progresses=watches)
        whole = time.perf_counter() - began
        rows = [run.read_history() for run in runs]
        alone = one_run.train(configs[0], Path(folder) / "alone", dataset=dataset).read_history()
    ends = [max(watch.ends[epoch] for watch in watches) for epoch in range(epochs)]
    epoch_s = (ends[-1] - ends[0]) / (epochs - 1)  # the first compiles what it is the first to call
    training_s, alone_s = (
        statistics.median(sum(float(own[epoch]["seconds"]) for own in each) for epoch in range(1, epochs))
        for each in (rows, [alone])
    )
    return {
        "arm": arm,
        "seeds": number,
        "epoch_s": epoch_s,
        "training_s": training_s,
        "alone_s": alone_s,
        "x_alone": training_s / alone_s,
        "minutes_of_100_epochs": (whole + (100 - epochs) * epoch_s) / 60,
        "loss_apart": abs(float(rows[0][0]["loss"]) / float(alone[0]["loss"]) - 1),
    }


def main(arguments: Sequence[str]) -> int:
    options = parser(NAME, "Seeds of one arm trained together; prints a line of JSON.")
    options.add_argument("arm", help="such as bft")
    options.add_argument("--device", default="cuda")
    options.add_argument("--small", action="store_true", help="two seeds of a small model on few histories")
    chosen = options.parse_args(arguments)
    print(json.dumps(train_together(chosen.arm, chosen.device, small=chosen.small)))
    return 0


if __name__ == "__main__":
    finish(main)
