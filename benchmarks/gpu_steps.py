"""Training steps of the arms as a run of hundreds of them has: the part of ``benchmarks.gpu_suite`` about whole models.

What happens once, or once an epoch, must not weigh more than it does in a run. CUDA graphs are recorded of the second
batch of each shape, so all arms first go three times through the epoch that is timed; and an arm's turn is a whole
epoch, with one refresh of what a model keeps from its weights and one look at whether these are finite.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from benchmarks import large_log, train_speed
from benchmarks.gpu_clock import Clock
from benchmarks.sheltered import Row
from benchmarks.train_speed import Contestant
from recbft.datasets import Dataset
from recbft.experiments.arms import parse_arms

WARM_UP_EPOCHS = 3
EPOCHS = 8  # that are timed
EVALUATIONS = 3  # the first compiles what it is the first to call


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
    """How long a GPU is at work in those steps, and by how many kernels.

    For the end of a suite: what a profiler has opened once slows the process from then on.
    """
    for contestant in _made(clock, length, small=small)[0]:
        train_warm([contestant], warm_up=2, epochs=0)
        yield {"arm": contestant.arm.label} | on_the_device(clock, contestant)


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


def on_the_device(clock: Clock, contestant: Contestant) -> Row:
    """Milliseconds that a GPU is at work in a step, and how many kernels that are: an epoch's, over its steps."""
    c, number = contestant, contestant.batches.num_batches
    seen = clock.kernels(lambda: train_speed.train_steps(c, c.batches.epoch(0), number))
    if seen is None:
        return {"busy_ms": None, "kernels": None}
    return {"busy_ms": 1e3 * seen.seconds / number, "kernels": round(seen.number / number)}


def _ratio(seconds: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(mine / its for mine, its in zip(seconds, others, strict=True))


def histories(num_users: int, num_items: int, *, mean_length: float) -> Dataset:
    """To be timed and made in a second: users with tastes, as ``synthetic_dataset`` has them, take up to a minute."""
    events = large_log.generate(num_users, round(num_users * mean_length), num_items).to_pandas()
    return Dataset.from_frame(events, name="made", user="user_id", item="item_id", time="timestamp")
