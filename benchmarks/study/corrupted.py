"""Histories of which a part is noise: does precision tracking lose less?

    python -m benchmarks.study.corrupted --dataset amazon-instruments --data-root DIR --seeds 0-4 --json FILE

With probability p an event is replaced by an item drawn evenly from all items, independently of everything:

    training     the events that are trained on; what is read at the test is whole
    test         the events that are read at the test; trained on whole histories
    both         both, the same replacements

Targets of validation and test are never replaced, so all figures of a data set rank the same items. Early stopping
reads the histories that are trained on. The replacements depend on --noise-seed alone, so that all arms and seeds see
the same.

Shapes: E events.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import machine
from benchmarks.command import finish, parse, parse_shares, recorded, training_parser
from benchmarks.study.choose import relative_and_p
from recbft.datasets import Dataset
from recbft.evaluation.evaluate import evaluate
from recbft.evaluation.paired import compare_seeds
from recbft.experiments.lists import parse_seeds
from recbft.experiments.plan import parse_arms
from recbft.reporting.tables import markdown_table
from recbft.system.files import write_json
from recbft.training.bundle import load_trained
from recbft.training.one_run import train
from recbft.training.run_config import RunConfig

NAME = "study.corrupted"
METRICS = ("ndcg@10", "hr@10")


def corrupted(dataset: Dataset, share: float, noise_seed: int) -> Dataset:
    """The data set with a share of its events replaced, all but the last two of every history."""
    random = np.random.default_rng(noise_seed)
    hit = random.random(len(dataset.items)) < share
    drawn: NDArray[np.int64] = random.integers(1, dataset.num_items + 1, len(dataset.items))
    hit[dataset.offsets[1:] - 1] = hit[dataset.offsets[1:] - 2] = False
    return replace(dataset, name=f"{dataset.name}+{share:g}", items=np.where(hit, drawn, dataset.items))


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
    arms, seeds = parse_arms(options.arms), parse_seeds(options.seeds)
    shares = parse_shares(options.shares)
    named = {"model": options.model, "dataset": options.dataset, "data_root": options.data_root}
    configs = {arm.label: arm.config([*options.settings, "training.threads=1"], **named) for arm in arms}
    whole = next(iter(configs.values())).data.load()
    made = machine.header(recorded(NAME, arguments), whole)
    print("\n".join(machine.lines(made)), end="\n\n", flush=True)
    rows: list[dict[str, Any]] = []
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
    options = training_parser(NAME, "Arms on histories of which a part is noise.")
    options.add_argument("--arms", default="matched,matched+recency,bft")
    options.add_argument("--seeds", default="0-4")
    options.add_argument("--shares", default="0.1,0.2,0.4", help="of events that are replaced")
    options.add_argument("--noise-seed", type=int, default=0, metavar="N")
    return parse(options, arguments)


if __name__ == "__main__":
    finish(main)
