"""Histories of which a part is noise: does precision tracking lose less?

    python -m benchmarks.study.corrupted --dataset amazon-instruments --data-root DIR --seeds 0-4 --json FILE
    python -m benchmarks.study.corrupted --noise targets --dataset DATA --data-root DIR --seeds 0-19 --csv FILE
    python -m benchmarks.study.corrupted --noise distractors --dataset DATA --data-root DIR --seeds 0-19 --csv FILE

With probability p an event is replaced by an item drawn evenly from all items, independently of everything. Noise in
``histories``:

    training     the events that are trained on; what is read at the test is whole
    test         the events that are read at the test; trained on whole histories
    both         both, the same replacements

Targets of validation and test are never replaced, so all figures of a data set rank the same items. Early stopping
reads the histories that are trained on. The replacements depend on --noise-seed alone, so that all arms and seeds see
the same, and what is replaced at one share is replaced, alike, at every larger one.

Noise in ``targets``: the replaced events are what a model of the training events is asked for, and histories are read
as they are. Noise of ``distractors``: k - 1 events of other users stand around each event of a history, at the test
too; the event has any place among the k. After each k events a model is asked for the user's own next one, so that
targets are those without noise; a user's own items are never distractors. ``max_length`` is k times as large, so that
as much of a history is read. Both keep their runs in a file, with which the same command goes on.

Shapes: E events, k events of a block.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import machine
from benchmarks.command import finish, parse, parse_shares, recorded, training_parser
from benchmarks.study import by_noise
from benchmarks.study.by_noise import Cell, train_missing
from benchmarks.study.choose import relative_and_p
from recbft.datasets import Dataset, leave_one_out
from recbft.datasets.batches import Batch, EpochBatches
from recbft.errors import UserError
from recbft.evaluation.evaluate import evaluate
from recbft.evaluation.paired import compare_seeds
from recbft.experiments.lists import parse_seeds, split_list
from recbft.experiments.plan import parse_arms
from recbft.reporting.tables import markdown_table
from recbft.system.files import write_json
from recbft.training.bundle import load_trained
from recbft.training.one_run import train
from recbft.training.run_config import RunConfig

NAME = "study.corrupted"
ARMS = {
    "histories": "matched,matched+recency,bft",
    "targets": "matched+recency,bft,matched+recency[backbone.loss=focal]",
    "distractors": "matched+recency,bft",
}  # by where the noise is
METRICS = ("ndcg@10", "hr@10")


def corrupted(dataset: Dataset, share: float, noise_seed: int) -> Dataset:
    """The data set with a share of its events replaced, all but the last two of every history."""
    random = np.random.default_rng(noise_seed)
    hit = random.random(len(dataset.items)) < share
    drawn: NDArray[np.int64] = random.integers(1, dataset.num_items + 1, len(dataset.items))
    hit[dataset.offsets[1:] - 1] = hit[dataset.offsets[1:] - 2] = False
    return replace(dataset, name=f"{dataset.name}+{share:g}", items=np.where(hit, drawn, dataset.items))


class Retargeted(EpochBatches):
    """Batches with targets of their own: what ``read`` reads, and what another, packed alike, asks for."""

    def __init__(self, read: Any, targets: NDArray[np.int64]) -> None:
        """``targets`` are those in the place of the events, (E,), 0 where nothing is asked."""
        self.read, self.asked = read, copy.copy(read)
        self.asked.items = targets
        self.batch_size, self.seed, self.samples = read.batch_size, read.seed, read.samples

    @property
    def num_targets(self) -> float:
        """Those of ``read``."""
        return float(self.read.num_targets)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches of one epoch."""
        for own, other in zip(self.read.epoch(epoch), self.asked.epoch(epoch), strict=True):
            yield own._replace(target=other.target)


def distracted(dataset: Dataset, k: int, noise_seed: int) -> tuple[Dataset, NDArray[np.int64]]:
    """The data set with k events for each, and for ``Retargeted`` the targets in the place of its events, (k E,)."""
    if not dataset.splitting.is_plain:
        raise UserError("distractors are for plain leave-one-out; leave settings of the split out")
    E, plain = dataset.num_events, leave_one_out(dataset)
    items, owner = dataset.items, np.repeat(np.arange(dataset.num_users), dataset.lengths)
    place = (np.random.default_rng(noise_seed).random(E) * k).astype(np.int64)
    own = np.arange(k) == place[:, None]  # (E, k)
    block = np.empty((E, k), dtype=np.int64)
    block[own] = items
    block[~own] = _distractors(items, owner, plain.training_counts(dataset.num_items), k - 1, noise_seed).ravel()
    targets = np.zeros((E, k), dtype=np.int64)
    targets[:, 0] = items  # asked for after the last event of the block before

    def spread(times: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
        return None if times is None else np.repeat(times, k)

    made = replace(
        dataset,
        name=f"{dataset.name}+distractors-{k}",
        items=block.ravel(),
        offsets=dataset.offsets * k,
        times=spread(dataset.times),
        weights=None,
        reliability=None,
    )
    views = {
        part: view._replace(
            items=made.items,
            times=made.times,
            start=view.start * k,
            stop=view.stop * k,
            event=view.event * k + place[view.event],
            reliability=None,
        )
        for part, view in (("validation", plain.validation), ("test", plain.test))
    }
    vars(made)["split"] = plain._replace(  # a cached property
        items=made.items,
        times=made.times,
        training_start=plain.training_start * k,
        training_stop=plain.training_stop * k,
        training_length=plain.training_length * k,
        weights=None,
        reliability=None,
        **views,
    )
    return made, targets.ravel()


def _distractors(
    items: NDArray[np.int64], owner: NDArray[np.int64], counts: NDArray[np.int64], number: int, noise_seed: int
) -> NDArray[np.int64]:
    """For each event items of training events of others, (E, number): none that its user has anywhere.

    Those of a smaller number are the first of those of a larger one.
    """
    pool = np.repeat(np.arange(len(counts)), counts)
    taken, found = owner * len(counts) + items, np.empty((len(items), number), dtype=np.int64)
    for column in range(number):
        random, open_ones = np.random.default_rng([noise_seed, 1 + column]), np.arange(len(items))
        for _ in range(1000):
            drawn = pool[random.integers(len(pool), size=len(open_ones))]
            found[open_ones, column] = drawn
            open_ones = open_ones[np.isin(owner[open_ones] * len(counts) + drawn, taken)]
            if not len(open_ones):
                break
        else:
            raise UserError("a user has nearly all items, so that no event of others is a distractor; take other data")
    return found


def cells(
    noise: str, configs: Sequence[RunConfig], whole: Dataset, levels: Sequence[float], noise_seed: int
) -> Iterator[Cell]:
    """The runs of all levels of noise in targets, or of distractors."""
    for level in levels:
        if noise == "targets":
            dataset = replace(whole, name=f"{whole.name}+targets-{level:g}")
            targets = corrupted(whole, level, noise_seed).items
        else:
            dataset, targets = distracted(whole, int(level), noise_seed)
        for config in configs:
            if noise == "distractors":
                backbone = replace(config.backbone, max_length=config.backbone.max_length * int(level))
                config = replace(config, backbone=backbone)
            yield Cell(
                config=config, dataset=dataset, batches=lambda batches, targets=targets: Retargeted(batches, targets)
            )


def measure(config: RunConfig, trained: Dataset, read: Mapping[Any, Dataset]) -> dict[Any, dict[str, float]]:
    """Test metrics of a run trained on one data set, its best epoch read on others with the same targets."""
    with tempfile.TemporaryDirectory() as folder:
        *_, model = load_trained(train(config, Path(folder) / "run", dataset=trained).path)
    found = {}
    for name, dataset in read.items():
        metrics = evaluate(model, dataset, "test").metrics
        found[name] = {f"{m} {setting}": metrics[setting][m] for setting in ("unfiltered", "filtered") for m in METRICS}
    return found


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    seeds = parse_seeds(options.seeds)
    arms = parse_arms(options.arms or ARMS[options.noise])
    levels = _levels(options)
    named = {"model": options.model, "dataset": options.dataset, "data_root": options.data_root}
    configs = {arm.label: arm.config([*options.settings, "training.threads=1"], **named) for arm in arms}
    whole = next(iter(configs.values())).data.load()
    made = machine.header(recorded(NAME, arguments), whole)
    print("\n".join(machine.lines(made)), end="\n\n", flush=True)
    if options.noise != "histories":
        runs = [replace(config, seed=seed) for seed in seeds for config in configs.values()]
        _check(options.noise, runs[0])
        file = None if options.csv is None else Path(options.csv)
        lines = train_missing(cells(options.noise, runs, whole, levels, options.noise_seed), file)
        print("\n" + by_noise.table(lines, options.noise))
        return 0
    rows: list[dict[str, Any]] = []
    shares = levels
    noisy = {share: corrupted(whole, share, options.noise_seed) for share in shares}
    for seed in seeds:
        for label, config in configs.items():
            config = replace(config, seed=seed)
            found = measure(
                config, whole, {("nowhere", 0.0): whole} | {("test", share): noisy[share] for share in shares}
            )
            for share in shares:
                found |= measure(config, noisy[share], {("training", share): whole, ("both", share): noisy[share]})
            rows += [
                {"arm": label, "seed": seed, "where": where, "share": share} | metrics
                for (where, share), metrics in found.items()
            ]
            print(f"{label}, seed {seed}: done", flush=True)
    print("\n" + table(rows, list(configs)))
    if options.json is not None:
        write_json(options.json, machine.close(made) | {"corrupted": rows, "differences": differences(rows)})
    return 0


def values(rows: Sequence[dict[str, Any]], arm: str, cell: tuple[str, float], metric: str) -> list[float]:
    """A metric of an arm over seeds in one (where, share)."""
    return [row[metric] for row in rows if row["arm"] == arm and (row["where"], row["share"]) == cell]


def differences(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every arm against the first, paired by seed."""
    first, *others = dict.fromkeys(row["arm"] for row in rows)
    cells = dict.fromkeys((row["where"], row["share"]) for row in rows)
    return [
        {"arm": arm, "where": cell[0], "share": cell[1], "metric": metric}
        | asdict(compare_seeds(values(rows, first, cell, metric), values(rows, arm, cell, metric)))
        for cell in cells
        for metric in ("ndcg@10 unfiltered", "ndcg@10 filtered")
        for arm in others
        if len(values(rows, arm, cell, metric)) > 1
    ]


def table(rows: Sequence[dict[str, Any]], arms: Sequence[str], metric: str = "ndcg@10 unfiltered") -> str:
    """Means over seeds; every other arm with its relative difference from the first and p by paired t-test."""
    lines = []
    places = ("nowhere", "test", "training", "both")
    for cell in sorted({(row["where"], row["share"]) for row in rows}, key=lambda c: (places.index(c[0]), c[1])):
        base = values(rows, arms[0], cell, metric)
        cells = [cell[0], f"{cell[1]:g}", f"{np.mean(base):.4f}"]
        for arm in arms[1:]:
            own = values(rows, arm, cell, metric)
            text = f"{np.mean(own):.4f}"
            if len(own) > 1:
                text += f" ({relative_and_p(compare_seeds(base, own))})"
            cells.append(text)
        lines.append(cells)
    return markdown_table(["noise in", "share", *arms], lines)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = training_parser(NAME, "Arms on data of which a part is noise.")
    options.add_argument("--noise", choices=list(ARMS), default="histories", help="where it is")
    options.add_argument("--arms", help=f"unless given, {ARMS['histories']}, or of targets {ARMS['targets']}")
    options.add_argument("--seeds", default="0-4")
    options.add_argument("--shares", help="of events that are replaced; unless given, 0.1,0.2,0.4, of targets 0 too")
    options.add_argument("--ks", help="events of a block with its distractors; unless given, 1,2,3,5,10")
    options.add_argument("--noise-seed", type=int, default=0, metavar="N")
    options.add_argument("--csv", metavar="FILE", help="keep the runs of noise in targets or of distractors here")
    given = parse(options, arguments)
    keeps, other = ("json", "csv") if given.noise == "histories" else ("csv", "json")
    if getattr(given, other) is not None:
        raise UserError(f"--{other} has no effect with noise in {given.noise}; give --{keeps}")
    return given


def _levels(options: argparse.Namespace) -> list[float]:
    """The shares, or the numbers of events of a block."""
    level, other = ("ks", "shares") if options.noise == "distractors" else ("shares", "ks")
    if getattr(options, other) is not None:
        raise UserError(f"--{other} has no effect with noise in {options.noise}; give --{level}")
    if level == "shares":
        usual = "0,0.1,0.2,0.4" if options.noise == "targets" else "0.1,0.2,0.4"
        return parse_shares(options.shares or usual, or_none=options.noise == "targets")
    found = split_list(options.ks or "1,2,3,5,10")
    if not all(text.isdecimal() and int(text) >= 1 for text in found):
        raise UserError(f"--ks is {options.ks!r}; give whole numbers of at least 1, such as 1,2,5,10")
    return [float(text) for text in found]


def _check(noise: str, config: RunConfig) -> None:
    """Refuse runs whose targets are not those of the events that follow."""
    if noise == "distractors" and (config.model == "bert4rec" or config.training.samples == "prefixes"):
        raise UserError(
            "distractors are for models that predict the next event from windows: a mask or a prefix would ask for "
            "what stands amid a block; take sasrec or hstu with training.samples windows"
        )


if __name__ == "__main__":
    finish(main)
