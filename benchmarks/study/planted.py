"""Unreliable items or users planted in synthetic histories: is their precision found, and what does it bring?

    python -m benchmarks.study.planted --shares 0,0.3,0.6 --seeds 0-4 --json FILE
    python -m benchmarks.study.planted --of users --shares 0.3,0.6 --seeds 0-4 --json FILE

A share of the items has reliability 0.2: four of five events with them are noise, whatever the user's taste
(``datasets.synth``). Beside the arms, ``oracle`` is `bft` whose initial precision is fixed and true: lam0 for reliable
items and lam0 r^2 for items of reliability r. What it gains over `matched+recency` bounds what learning the precision
of items can bring; an arm's Spearman correlation says how near it comes to knowing them. With ``--of users`` it is the
users who are unreliable; the table then says how the reliable ones fare, and the correlation is of users.

Shapes: V items, U users.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from benchmarks import machine
from benchmarks.command import count, finish, parse, parse_shares, parser, recorded
from benchmarks.study.choose import relative_and_p
from recbft.datasets import Dataset, SyntheticConfig
from recbft.datasets.synth import generate
from recbft.evaluation.evaluate import evaluate
from recbft.evaluation.metrics import ndcg
from recbft.evaluation.paired import compare_seeds
from recbft.experiments.lists import parse_seeds
from recbft.experiments.plan import ArmSpec, parse_arms
from recbft.models.backbone import Backbone
from recbft.reporting.tables import markdown_table
from recbft.system.files import write_json
from recbft.training.one_run import begin
from recbft.training.process_settings import run_settings
from recbft.training.progress import Silent
from recbft.training.run_config import RunConfig

NAME = "study.planted"
UNRELIABLE = 0.2
K = 10
METRICS = {
    "items": {"ndcg@10": "NDCG@10 all items", "masked": "NDCG@10 seen masked"},
    "users": {"ndcg@10": "NDCG@10 all users", "of reliable users": "NDCG@10 reliable users"},
}
ORACLE = ArmSpec("oracle", "bft", ("core.initial=empirical_bayes",))
SETTINGS = ("training.batch_size=64", "backbone.dropout=0.3", "training.patience=10", "training.threads=1")


class Planted(NamedTuple):
    """A data set and the reliability of each of its items, (V + 1,), and users, (U,)."""

    dataset: Dataset
    items: Tensor
    users: Tensor


def planted(share: float, *, of: Literal["items", "users"] = "items", **settings: Any) -> Planted:
    """Histories of which a share of the items or users is unreliable."""
    mixed, sure = ((1.0, UNRELIABLE), (1 - share, share)), ((1.0,), (1.0,))
    items, users = (mixed, sure) if of == "items" else (sure, mixed)
    levels = {"item_reliabilities": items[0], "item_shares": items[1]}
    levels |= {"user_reliabilities": users[0], "user_shares": users[1]}
    made = generate(SyntheticConfig(**levels, **settings))
    dataset = Dataset.from_frame(made.events, name=f"planted-{share:g}", time="timestamp")
    items, users = (
        torch.from_numpy(table.set_index(name).loc[ids, "reliability"].to_numpy(copy=True)).float()
        for table, name, ids in ((made.items, "item_id", dataset.item_ids), (made.users, "user_id", dataset.user_ids))
    )
    return Planted(dataset, torch.cat((torch.ones(1), items)), users)


def measure(arm: ArmSpec, config: RunConfig, made: Planted) -> dict[str, float | None]:
    """Test NDCG@10 of a run, of all users and of the reliable ones, and what the run knows of the truth."""
    with tempfile.TemporaryDirectory() as folder, run_settings(config.training) as device:
        session = begin(config, Path(folder) / "run", made.dataset, device, Silent())
        model = session.model
        assert isinstance(model, Backbone)
        if arm == ORACLE:
            fix(model, made.items)
        run = session.finish()  # and the model has the weights of its best epoch
        metrics, rank = run.metrics["test"], pd.read_parquet(run.per_user_file)["rank_unfiltered"].to_numpy()
    gain = ndcg(rank, K)
    return {
        "ndcg@10": metrics["unfiltered"]["ndcg@10"],
        "masked": metrics["filtered"]["ndcg@10"],
        "of reliable users": float(gain[made.users.numpy() == 1].mean()),
        "found": None if arm == ORACLE else known(model, made),
    }


@torch.no_grad()
def known(model: Backbone, made: Planted) -> float | None:
    """Spearman's correlation of the truth and the precision of items as learned, or of the states of test users."""
    if model.item_precision is None:
        return None
    if made.items.unique().numel() > 1:
        items = torch.arange(1, made.dataset.num_items + 1)
        learned, truth = model.item_precision(items, model.item_embedding(items))[:, 0], made.items[1:]
    elif made.users.unique().numel() > 1:
        precision = evaluate(model, made.dataset, "test").precision
        assert precision is not None
        learned, truth = torch.from_numpy(precision), made.users
    else:
        return None
    if learned.unique().numel() == 1:  # all at a bound
        return None
    return float(stats.spearmanr(learned.numpy(), truth.numpy()).statistic)


def fix(model: Backbone, truth: Tensor) -> None:
    """Fix the initial precision at the truth."""
    assert model.item_precision is not None
    model.item_precision.base.copy_(model.item_precision.start * truth**2)


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    # What items are worth says nothing of users, so there is no oracle for them.
    arms = [*parse_arms(options.arms), *([ORACLE] if options.of == "items" else [])]
    seeds = parse_seeds(options.seeds)
    configs = {
        arm.label: arm.config([*SETTINGS, *options.settings], model="sasrec", dataset="synthetic") for arm in arms
    }
    made = machine.header(recorded(NAME, arguments))
    print("\n".join(machine.lines(made)), end="\n\n", flush=True)
    rows: list[dict[str, Any]] = []
    for share in parse_shares(options.shares, or_none=True):
        histories = planted(share, of=options.of, num_users=options.users)
        for seed in seeds:
            for arm in arms:
                found = measure(arm, replace(configs[arm.label], seed=seed), histories)
                data = histories.dataset.content_hash
                rows.append({"share": share, "arm": arm.label, "seed": seed, "data": data, **found})
                print(f"{share:g}, {arm.label}, seed {seed}: {found['ndcg@10']:.4f}", flush=True)
    print("\n" + table(rows, options.baseline, of=options.of))
    if options.json is not None:
        write_json(options.json, machine.close(made) | {"planted": rows})
    return 0


def table(rows: Sequence[dict[str, Any]], baseline: str, *, of: str) -> str:
    """Means over seeds, differences from the baseline of the same share, and the correlation with the truth."""
    if baseline not in {row["arm"] for row in rows}:
        baseline = rows[0]["arm"]
    lines = []
    for share, arm in dict.fromkeys((row["share"], row["arm"]) for row in rows):
        cells = [f"{share:g}", arm]
        for metric in METRICS[of]:
            own, base = (
                [row[metric] for row in rows if (row["share"], row["arm"]) == (share, name)] for name in (arm, baseline)
            )
            against = ""
            if arm != baseline and len(own) > 1:
                d = compare_seeds(base, own)
                against = f" ({relative_and_p(d)}, {d.wins} of {d.num_seeds})"
            cells.append(f"{statistics.mean(own):.4f}{against}")
        found = [
            row["found"] for row in rows if (row["share"], row["arm"]) == (share, arm) and row["found"] is not None
        ]
        cells.append(f"{statistics.mean(found):.2f} ({min(found):.2f} to {max(found):.2f})" if found else "")
        lines.append(cells)
    return markdown_table([f"noise {of}", "arm", *METRICS[of].values(), "rho with the truth"], lines)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = parser(NAME, "Planted unreliable items or users.")
    options.add_argument("--of", choices=list(METRICS), default="items", help="what is unreliable")
    options.add_argument("--arms", default="matched,matched+recency,bft,bft[core.initial=credibility]")
    options.add_argument("--baseline", default="matched+recency", metavar="ARM")
    options.add_argument("--shares", default="0,0.3,0.6", help="of the items or users that are unreliable")
    options.add_argument("--seeds", default="0-4")
    options.add_argument("--users", type=count, default=2000)
    options.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    return parse(options, arguments)


if __name__ == "__main__":
    finish(main)
