"""Unreliable items planted in synthetic histories: is their precision found, and what does it bring?

    python -m benchmarks.study.planted --shares 0,0.3,0.6 --seeds 0-4 --json FILE

A share of the items has reliability 0.2: four of five events with them are noise, whatever the user's taste
(``datasets.synth``). Beside the arms, ``oracle`` is `bft` whose initial precision is fixed and true: lam0 for reliable
items and lam0 r^2 for items of reliability r. What it gains over `matched+recency` bounds what learning the precision
of items can bring; an arm's Spearman correlation says how near it comes to knowing them.

Shapes: V items.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from benchmarks import machine
from benchmarks.command import check_folder_of, finish, parse_shares, recorded
from recbft.datasets import Dataset, SyntheticConfig
from recbft.datasets.synth import generate
from recbft.evaluation.paired import compare_seeds
from recbft.experiments.arms import ArmSpec, parse_arms
from recbft.experiments.lists import parse_seeds
from recbft.experiments.tables import markdown_table
from recbft.files import write_json
from recbft.models.backbone import Backbone
from recbft.run_config import RunConfig
from recbft.training.progress import Silent
from recbft.training.session import begin, run_settings

NAME = "study.planted"
UNRELIABLE = 0.2
ORACLE = ArmSpec("oracle", "bft", ("core.initial=empirical_bayes",))
SETTINGS = ("training.batch_size=64", "backbone.dropout=0.3", "training.patience=10", "training.threads=1")


def planted(share: float, **settings: Any) -> tuple[Dataset, Tensor]:
    """A data set of which a share of the items is unreliable, and the reliability of each item, (V + 1,)."""
    levels = {"item_reliabilities": (1.0, UNRELIABLE), "item_shares": (1 - share, share)}
    users = {"user_reliabilities": (1.0,), "user_shares": (1.0,)}
    made = generate(SyntheticConfig(**levels, **users, **settings))
    dataset = Dataset.from_frame(made.events, name=f"planted-{share:g}", time="timestamp")
    truth = made.items.set_index("item_id").loc[dataset.item_ids, "reliability"].to_numpy(copy=True)
    return dataset, torch.cat((torch.ones(1), torch.from_numpy(truth).float()))


def measure(arm: ArmSpec, config: RunConfig, dataset: Dataset, truth: Tensor) -> dict[str, float | None]:
    """Test NDCG@10 of a run, and Spearman's correlation of what it learned with the truth."""
    with tempfile.TemporaryDirectory() as folder, run_settings(config.training) as device:
        session = begin(config, Path(folder) / "run", dataset, device, Silent())
        model = session.model
        assert isinstance(model, Backbone)
        if arm == ORACLE:
            fix(model, truth)
        metrics = session.finish().metrics["test"]  # and the model has the weights of its best epoch
    found: float | None = None
    if model.item_precision is not None and arm != ORACLE and truth.unique().numel() > 1:
        items = torch.arange(1, dataset.num_items + 1)
        with torch.no_grad():
            learned = model.item_precision(items, model.item_embedding(items))[:, 0]
        found = float(stats.spearmanr(learned.numpy(), truth[1:].numpy()).statistic)
    return {"ndcg@10": metrics["unfiltered"]["ndcg@10"], "masked": metrics["filtered"]["ndcg@10"], "found": found}


def fix(model: Backbone, truth: Tensor) -> None:
    """Fix the initial precision at the truth."""
    assert model.item_precision is not None
    model.item_precision.base.copy_(model.item_precision.start * truth**2)


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    check_folder_of(options.json)
    arms, seeds = [*parse_arms(options.arms), ORACLE], parse_seeds(options.seeds)
    configs = {arm.label: arm.config([*SETTINGS, *options.settings], model="sasrec") for arm in arms}
    made = machine.header(recorded(NAME, arguments))
    print("\n".join(machine.lines(made)), end="\n\n", flush=True)
    rows: list[dict[str, Any]] = []
    for share in parse_shares(options.shares, or_none=True):
        dataset, truth = planted(share, num_users=options.users)
        for seed in seeds:
            for arm in arms:
                found = measure(arm, replace(configs[arm.label], seed=seed), dataset, truth)
                rows.append({"share": share, "arm": arm.label, "seed": seed, "data": dataset.content_hash, **found})
                print(f"{share:g}, {arm.label}, seed {seed}: {found['ndcg@10']:.4f}", flush=True)
    print("\n" + table(rows, options.baseline))
    if options.json is not None:
        write_json(options.json, machine.close(made) | {"planted": rows})
    return 0


def table(rows: Sequence[dict[str, Any]], baseline: str) -> str:
    """Means over seeds, differences from the baseline of the same share, and the correlation with the truth."""
    if baseline not in {row["arm"] for row in rows}:
        baseline = rows[0]["arm"]
    lines = []
    for share, arm in dict.fromkeys((row["share"], row["arm"]) for row in rows):
        cells = [f"{share:g}", arm]
        for metric in ("ndcg@10", "masked"):
            own, base = (
                [row[metric] for row in rows if (row["share"], row["arm"]) == (share, name)] for name in (arm, baseline)
            )
            against = ""
            if arm != baseline and len(own) > 1:
                d = compare_seeds(base, own)
                against = f" ({100 * (d.relative or 0):+.1f} %, p {d.p_t:.3f}, {d.wins} of {len(own)})"
            cells.append(f"{statistics.mean(own):.4f}{against}")
        found = [
            row["found"] for row in rows if (row["share"], row["arm"]) == (share, arm) and row["found"] is not None
        ]
        cells.append(f"{statistics.mean(found):.2f} ({min(found):.2f} to {max(found):.2f})" if found else "")
        lines.append(cells)
    return markdown_table(
        ["noise items", "arm", "NDCG@10 all items", "NDCG@10 seen masked", "rho with the truth"], lines
    )


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description="Planted unreliable items.")
    options.add_argument("--arms", default="matched,matched+recency,bft,bft[core.initial=log_table]")
    options.add_argument("--baseline", default="matched+recency", metavar="ARM")
    options.add_argument("--shares", default="0,0.3,0.6", help="of the items that are unreliable")
    options.add_argument("--seeds", default="0-4")
    options.add_argument("--users", type=int, default=2000)
    options.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    options.add_argument("--json", metavar="FILE", help="write the results here")
    return options.parse_args(arguments)


if __name__ == "__main__":
    finish(main)
