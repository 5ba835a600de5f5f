"""Comparisons of several models on several data sets, each in a folder of its own: options, and one after another."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.command import parser
from recbft.api.compare import Compared, compare
from recbft.config.yaml_text import parse_setting
from recbft.experiments.lists import split_list


class Entry(NamedTuple):
    """What came of a model on a data set."""

    model: str
    dataset: str
    out: Path
    found: Compared


def grid_parser(name: str, description: str, *, models: str, arms: str, seeds: str) -> argparse.ArgumentParser:
    """A parser with the options that ``comparisons`` reads; models, arms and seeds have these defaults."""
    made = parser(name, description)
    made.add_argument("--out", required=True, metavar="DIR")
    made.add_argument("--datasets", default="amazon-instruments", metavar="A,B,...")
    made.add_argument("--models", default=models, metavar="A,B,...")
    made.add_argument("--arms", default=arms)
    made.add_argument("--seeds", default=seeds)
    made.add_argument("--jobs", type=int, metavar="N", help="runs trained at a time")
    made.add_argument("--batch-seeds", type=int, default=1, metavar="N", help="seeds trained together")
    made.add_argument("--data-root", metavar="DIR")
    made.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="a setting of every run"
    )
    return made


def comparisons(
    options: argparse.Namespace, how: Callable[[str], Mapping[str, Any]] = lambda model: {}
) -> Iterator[Entry]:
    """Train what is missing of each comparison; ``how`` gives further arguments of ``compare`` for a model."""
    settings = dict(parse_setting(text) for text in options.settings)
    if options.data_root is not None:
        settings["data_root"] = options.data_root
    for dataset in split_list(options.datasets):
        for model in split_list(options.models):
            out = Path(options.out) / f"{model}-{dataset}"
            found = compare(
                options.arms,
                dataset,
                out=out,
                model=model,
                seeds=options.seeds,
                jobs=options.jobs,
                batch_seeds=options.batch_seeds,
                **how(model),
                **settings,
            )
            yield Entry(model, dataset, out, found)
