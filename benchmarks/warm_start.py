"""What is it worth to begin from an older model's weights when the data have grown?

    python -m benchmarks.warm_start --dataset amazon-instruments --data-root DIR --share 0.9 --keeps 1,0.4 --json FILE

The first share of the events, by their time over all users, are the older data; a run is trained on them, then others
on all events: ``afresh``, and from so much of the older run's best weights as ``--keeps`` names. ``as it was`` are
these weights on the grown data without a step, new items beginning as in any run. All stop by validation; seconds are
those of training epochs, up to the best one, so they grow with what else the machine does, and epochs do not.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks import machine
from benchmarks.command import finish, parse, recorded, training_parser
from benchmarks.study.choose import relative_and_p
from recbft.datasets import Dataset
from recbft.errors import UserError
from recbft.evaluation.evaluate import evaluate
from recbft.evaluation.paired import compare_seeds
from recbft.evaluation.views import Part
from recbft.experiments.lists import parse_seeds, split_list
from recbft.reporting.tables import markdown_table
from recbft.system.files import write_json
from recbft.training.build import make_parts
from recbft.training.one_run import train
from recbft.training.process_settings import run_settings
from recbft.training.run_config import RunConfig, load_run_config

NAME = "warm_start"
AS_IT_WAS, AFRESH = "as it was", "afresh"
Measured = dict[str, dict[str, float]]
PARTS: tuple[Part, ...] = ("validation", "test")
METRICS = {
    "validation": "validation NDCG@10",
    "unfiltered": "test NDCG@10, all items",
    "filtered": "test NDCG@10, seen masked",
}


def earlier(dataset: Dataset, share: float) -> Dataset:
    """The data as they were when the first share of the events had happened."""
    if dataset.times is None:
        raise UserError(f"data set {dataset.name!r} has no times, by which it could have grown; name their column")
    events = pd.DataFrame(
        {
            "user_id": np.repeat(dataset.user_ids, dataset.lengths),
            "item_id": dataset.decode(dataset.items),
            "timestamp": dataset.times,
        }
    )
    before = events[events.timestamp <= events.timestamp.quantile(share)]
    return Dataset.from_frame(before, name=f"{dataset.name}-earlier", time="timestamp")


def measure(config: RunConfig, older: Dataset, dataset: Dataset, keeps: Sequence[float]) -> Measured:
    """Epochs and seconds to the best weights, and NDCG@10 on validation and test, of each way to begin."""
    with tempfile.TemporaryDirectory() as folder:
        first = train(config, Path(folder) / "older", dataset=older)

        def warm(keep: float) -> RunConfig:
            begun = replace(config.training, warm_start=str(first.path), warm_start_keep=keep)
            return replace(config, training=begun)

        with run_settings(config.training) as device:
            model: Any = make_parts(warm(1.0), dataset, device).model
            model.refresh()
            unchanged = {part: evaluate(model, dataset, part).metrics for part in PARTS}
        found: Measured = {AS_IT_WAS: {"epochs": 0, "seconds": 0.0} | _ndcg(unchanged)}
        for start, asked in {AFRESH: config, **{f"{keep:g} kept": warm(keep) for keep in keeps}}.items():
            run = train(asked, Path(folder) / start, dataset=dataset)
            best = run.metrics["best_epoch"]
            seconds = sum(float(row["seconds"]) for row in run.read_history()[:best])
            found[start] = {"epochs": best, "seconds": seconds} | _ndcg(run.metrics)
    return found


def _ndcg(metrics: dict[str, Any]) -> dict[str, float]:
    test = {setting: metrics["test"][setting]["ndcg@10"] for setting in ("unfiltered", "filtered")}
    return {"validation": metrics["validation"]["unfiltered"]["ndcg@10"], **test}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Means over seeds, with the paired differences from ``afresh``."""
    head = ["begun", "epochs to the best", "seconds to the best", *METRICS.values()]
    lines = []
    for start in [key for key in rows[0] if key != "seed"]:
        values = {key: [row[start][key] for row in rows] for key in rows[0][start]}
        cells = [start, f"{statistics.mean(values['epochs']):.1f}", f"{statistics.mean(values['seconds']):.1f}"]
        for setting in METRICS:
            cell = f"{statistics.mean(values[setting]):.4f}"
            if start != AFRESH and len(rows) > 1:
                found = compare_seeds([row[AFRESH][setting] for row in rows], values[setting])
                cell += f" ({relative_and_p(found)}, {found.wins} of {found.num_seeds})"
            cells.append(cell)
        lines.append(cells)
    return markdown_table(head, lines)


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    settings = {"model": options.model, "dataset": options.dataset, "data_root": options.data_root, "arm": options.arm}
    config = load_run_config(options.config, options.settings, **settings)
    dataset = config.data.load()
    older = earlier(dataset, options.share)
    made = machine.header(recorded(NAME, arguments), dataset)
    print("\n".join(machine.lines(made)))
    print(
        f"older: {older.num_users:,} of {dataset.num_users:,} users, {older.num_items:,} of {dataset.num_items:,} "
        f"items, {older.num_events:,} of {dataset.num_events:,} events",
        end="\n\n",
        flush=True,
    )
    rows: list[dict[str, Any]] = []
    for seed in parse_seeds(options.seeds):
        rows.append({"seed": seed} | measure(replace(config, seed=seed), older, dataset, options.keeps))
        told = (f"{start} {row['unfiltered']:.4f}" for start, row in rows[-1].items() if start != "seed")
        print(f"seed {seed}: {', '.join(told)}", flush=True)
        if options.json:
            write_json(Path(options.json), machine.close(made) | {"share": options.share, "seeds": rows})
    print()
    print(table(rows))
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = training_parser(NAME, (__doc__ or "").split("\n")[0])
    options.add_argument("--arm", default="bft")
    options.add_argument("--config", metavar="FILE", help="YAML with settings of every run")
    options.add_argument("--share", type=float, default=0.9, help="of the events that are the older data")
    options.add_argument("--keeps", default="1,0.4", help="shares of the older weights to begin from")
    options.add_argument("--seeds", default="0-9", help="such as 0-9 or 0,3")
    made = parse(options, arguments)
    if not 0 < made.share < 1:
        raise UserError(f"--share is {made.share:g}; give a share between 0 and 1, such as 0.9")
    try:
        made.keeps = [float(keep) for keep in split_list(made.keeps)]
    except ValueError:
        raise UserError(f"--keeps is {made.keeps!r}; give shares such as 1,0.4") from None
    return made


if __name__ == "__main__":
    finish(main)
