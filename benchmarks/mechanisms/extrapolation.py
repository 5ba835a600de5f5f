"""Train on short histories, read long ones: which mixers gain from context longer than any they were trained on?

    python -m benchmarks.mechanisms.extrapolation
    python -m benchmarks.mechanisms.extrapolation --dataset ml-1m --data-root DIR --seeds 0-2 --json FILE

SASRec without absolute positions, arm ``matched`` around each mixer, so that mixers alone differ, is trained on the
last ``--trained`` events of every history, early stopping included. Then the test targets of the users who have at
least the longest context before them are predicted from the last 50, 100, .. events:

    perplexity = exp(mean_u -ln p(target_u | last L events of u))            all contexts: the same users and targets

The authors measure perplexity of text at 512 to 4,096 tokens after training on 512 (table 1): RoPE's more than doubles,
ALiBi's falls, the coupled robust filter's falls at 1,024 tokens and is a third higher at 4,096. Texts are not
histories: what is compared is which mixers can be read beyond their training, not the figures.

Source: Robust Filter Attention, section 4.2 and table 1.
Shapes: N users.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from benchmarks.command import count, finish, parse, parser, recorded
from recbft.datasets import Dataset, SyntheticConfig, synthetic_dataset
from recbft.errors import UserError
from recbft.evaluation.metrics import metrics_from_ranks
from recbft.evaluation.probability import AS_TRAINED, predicted
from recbft.evaluation.ranks import full_ranks
from recbft.evaluation.views import evaluation_mode, states_of_view, view_of
from recbft.experiments.lists import parse_seeds, split_list
from recbft.models.backbone import Backbone
from recbft.reporting.tables import text_table
from recbft.system.files import write_json
from recbft.training.bundle import load_trained
from recbft.training.one_run import train
from recbft.training.run_config import RunConfig, load_run_config

NAME = "mechanisms.extrapolation"
MIXERS = ("attention", "rope", "alibi", "decayed_rope", "sc_rope", "rfa", "sc_rfa")
# Users with histories long enough to be read at every length; taste that drifts, so that the past fades.
LONG = SyntheticConfig(num_users=2000, num_items=2000, mean_length=200.0)
MEMORY_MB = 256.0


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    lengths = sorted(int(part) for part in split_list(options.lengths))
    if not lengths or lengths[0] < 1:
        raise UserError(f"--lengths {options.lengths}; give whole numbers of at least 1, such as 50,100,200")
    mixers, seeds = split_list(options.mixers), parse_seeds(options.seeds)
    configs = {mixer: _config(options, mixer) for mixer in mixers}  # refuses what cannot be, before any work
    dataset = _dataset(options)
    users = long_histories(dataset, lengths[-1])
    made = machine.header(recorded(NAME, arguments), dataset)
    print("\n".join(machine.lines(made)), end="\n\n", flush=True)
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        for mixer in mixers:
            model = fitted(configs[mixer], seed, dataset)
            for length in lengths:
                found = measure(model, dataset, users, length)
                rows.append({"mixer": mixer, "seed": seed, "length": length, **found})
            print(
                f"{mixer}, seed {seed}: " + ", ".join(f"{r['perplexity']:.1f}" for r in rows[-len(lengths) :]),
                flush=True,
            )
    print(f"\ntrained on the last {options.trained} events; {len(users)} users with {lengths[-1]} before the target")
    for measure_name, title in (("perplexity", "perplexity"), ("ndcg@10", "NDCG@10")):
        print("\n" + table(rows, mixers, lengths, measure_name, title))
    if options.json is not None:
        write_json(options.json, machine.close(made) | {"users": len(users), "extrapolation": rows})
    return 0


def long_histories(dataset: Dataset, length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The users who have so many events before their test target, as row numbers."""
    view = view_of(dataset, "test")
    events = view.stop - view.start
    users = np.flatnonzero(events >= length)
    if len(users) == 0:
        raise UserError(
            f"no user of {dataset.name!r} has {length} events before the target; the most is {events.max()}"
        )
    return users


def fitted(config: RunConfig, seed: int, dataset: Dataset) -> Backbone:
    """The model of a run at its best epoch."""
    config = replace(config, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        *_, model = load_trained(train(config, Path(folder) / "run", dataset=dataset).path)
    assert isinstance(model, Backbone)
    return model


def measure(
    model: Backbone, dataset: Dataset, users: np.ndarray[Any, np.dtype[np.int64]], length: int
) -> dict[str, float]:
    """Perplexity and NDCG@10 at the test targets of some users, read from their last ``length`` events."""
    view = view_of(dataset, "test", users)
    view = view._replace(start=view.stop - length)
    model.max_length = length
    with torch.inference_mode(), evaluation_mode(model):
        table = model.item_table()
        states, _ = states_of_view(model, dataset, view, table.weight.device)
        (said,) = predicted(states, table, view.target, calibrations=[AS_TRAINED], ks=[10], memory_mb=MEMORY_MB)
        nothing, offsets = np.zeros(0, np.int64), np.zeros(len(users) + 1, np.int64)
        ranks = full_ranks(states, table, view.target, nothing, offsets, memory_mb=MEMORY_MB)
    ndcg = metrics_from_ranks(ranks.unfiltered, (10,))["ndcg@10"]
    return {"perplexity": math.exp(float(said.nll.mean())), "ndcg@10": ndcg}


def table(rows: Sequence[dict[str, Any]], mixers: Sequence[str], lengths: Sequence[int], name: str, title: str) -> str:
    """Means over seeds by mixer and length, with the range where there are several seeds."""
    digits = 1 if name == "perplexity" else 4
    lines = []
    for mixer in mixers:
        cells = []
        for length in lengths:
            values = [row[name] for row in rows if row["mixer"] == mixer and row["length"] == length]
            cell = f"{statistics.fmean(values):.{digits}f}"
            cells.append(cell + (f" ({min(values):.{digits}f}-{max(values):.{digits}f})" if len(values) > 1 else ""))
        lines.append([mixer, *cells])
    return text_table([title, *(f"last {length}" for length in lengths)], lines)


def _config(options: argparse.Namespace, mixer: str) -> RunConfig:
    return load_run_config(
        None,
        ["absolute_positions=false", "batch_size=64", *options.settings],
        model="sasrec",
        arm="matched",
        mixer=mixer,
        max_length=options.trained,
        dataset=options.dataset,
        data_root=options.data_root,
    )


def _dataset(options: argparse.Namespace) -> Dataset:
    if options.dataset == "synthetic":
        return synthetic_dataset(LONG)
    return _config(options, "rope").data.load()


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = parser(NAME, "Perplexity beyond the length that was trained.")
    options.add_argument("--dataset", default="synthetic", help="a data set's name, or a file")
    options.add_argument("--data-root", metavar="DIR", help="folder that data sets lie in")
    options.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    options.add_argument("--mixers", default=",".join(MIXERS))
    options.add_argument("--trained", type=count, default=50, metavar="N", help="events that are read in training")
    options.add_argument("--lengths", default="50,100,200", help="events that are read afterwards")
    options.add_argument("--seeds", default="0")
    return parse(options, arguments)


if __name__ == "__main__":
    finish(main)
