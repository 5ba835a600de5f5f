"""A rating says how far an event can be trusted: as what is it best read?

    python -m benchmarks.study.reliable --dataset features/amazon-instruments-events.parquet --column rating \
        --data-root DIR --seeds 0-19 --csv FILE
    python -m benchmarks.study.reliable --dataset ml-latest-small/ratings.csv --column rating --data-root DIR \
        --set data.user=userId --set data.item=movieId --set data.time=timestamp --set data.k_core=5 --csv FILE

Arms that read it not at all, as a factor of precision, as an input, and as the weight of an event in the loss. All are
judged on the same targets, and none is shown a target's own rating. The same command goes on with its file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import machine
from benchmarks.command import finish, parse, recorded, training_parser
from benchmarks.study.by_noise import Cell, table, train_missing
from recbft.experiments.lists import parse_seeds
from recbft.experiments.plan import parse_arms
from recbft.training.run_config import RunConfig

NAME = "study.reliable"
ARMS = (
    "matched+recency,matched+recency[reads_reliability=input],matched+recency[data.weight={column}],bft,"
    "bft[reads_reliability=precision],bft[reads_reliability=input],bft[data.weight={column}]"
)


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    arms = parse_arms((options.arms or ARMS).replace("{column}", options.column))
    settings = [*options.settings, "training.threads=1", f"data.reliability={options.column}"]
    named = {"model": options.model, "dataset": _place(options), "data_root": options.data_root}
    configs = [arm.config(settings, **named) for arm in arms]
    made = machine.header(recorded(NAME, arguments))
    print("\n".join(machine.lines(made)), end="\n\n", flush=True)
    runs = [replace(config, seed=seed) for seed in parse_seeds(options.seeds) for config in configs]
    lines = train_missing(cells(runs, options.column), None if options.csv is None else Path(options.csv))
    print("\n" + table(lines, "reliability"))
    return 0


def cells(runs: Sequence[RunConfig], column: str) -> Iterator[Cell]:
    """The runs, each on its own data, which differ in their weights alone."""
    plain = replace(runs[0].data, weight=None).load()
    loaded = {None: plain}
    for config in runs:
        weight = config.data.weight
        if weight not in loaded:
            loaded[weight] = config.data.load()
        dataset = replace(loaded[weight], name=f"{plain.name}+reliability-{column}")
        yield Cell(config=config, dataset=dataset, content=plain.content_hash)


def _place(options: argparse.Namespace) -> str:
    """A data set's name, or a file in the data root or elsewhere."""
    there = Path(options.data_root or "") / options.dataset
    return str(there) if there.is_file() else str(options.dataset)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = training_parser(NAME, "The reliability of events, read in several ways.")
    options.add_argument("--column", default="rating", help="that holds it")
    options.add_argument("--arms", help="{column} stands for the column; unless given, all ways of both arms")
    options.add_argument("--seeds", default="0-4")
    options.add_argument("--csv", metavar="FILE", help="keep the runs here")
    return parse(options, arguments)


if __name__ == "__main__":
    finish(main)
