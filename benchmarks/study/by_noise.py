"""What arms differ by as noise grows: runs that are missing are trained, and their figures kept in one file.

A cell is a run on data with noise of one kind at one level, which the name of its data set says: DATA+KIND-LEVEL. The
file is that of ``benchmarks.study.ledger``; a run that it has is not trained again.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.study.choose import difference, percent_and_interval
from benchmarks.study.ledger import KEY, arms_of, check_alike, extended, line, opened
from recbft.comparing.finished_runs import Run, own_settings, read_run
from recbft.config.fields import to_dict
from recbft.datasets import Dataset
from recbft.datasets.batches import EpochBatches
from recbft.reporting.tables import markdown_table, p_text
from recbft.training.one_run import begin
from recbft.training.process_settings import run_settings
from recbft.training.progress import Silent
from recbft.training.run_config import RunConfig

BASELINE = "matched+recency"
DECAY = "backbone.recency_decay"
NDCG = "ndcg@10 all items"
PLACE = r"^(?P<data>.+)\+{kind}-(?P<level>[\w.]+)$"  # in the column ``dataset``


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A run: of ``config`` on ``dataset``."""

    config: RunConfig
    dataset: Dataset
    batches: Callable[[EpochBatches], EpochBatches] | None = None  # what it is trained on, made of the usual ones
    content: str | None = None  # the content hash of the events that its arm is compared on, if not its own

    @property
    def settings(self) -> dict[str, Any]:
        """Of the data, what makes it an arm of its own."""
        return {} if self.config.data.weight is None else {"data.weight": self.config.data.weight}

    @property
    def key(self) -> dict[str, Any]:
        """How the file calls it."""
        config = self.config
        run = Run(Path(), config.seed, {"config": to_dict(config)}, {}, pd.DataFrame(), [])
        return {
            "dataset": self.dataset.name,
            "targets": self.dataset.target_hash[:12],
            "content": (self.content or self.dataset.content_hash)[:12],
            "model": config.model,
            "arm": config.arm,
            "settings": json.dumps({**own_settings([run]), **self.settings}, sort_keys=True),
            "seed": config.seed,
        }

    def figures(self) -> dict[str, Any]:
        """Train it; its line of the file."""
        with tempfile.TemporaryDirectory() as folder, run_settings(self.config.training) as device:
            session = begin(self.config, Path(folder) / "run", self.dataset, device, Silent())
            if self.batches is not None and session.batches is not None:
                session.batches = self.batches(session.batches)
            return {**line(read_run(session.finish().path)), **self.key}


def train_missing(cells: Iterable[Cell], file: Path | None) -> pd.DataFrame:
    """The lines of all cells and of the file, to which each that was missing is added as it is done."""
    lines = opened(file)
    known = {tuple(row[name] for name in KEY) for row in lines.to_dict("records")}
    for cell in cells:
        key, label = tuple(cell.key.values()), f"{cell.dataset.name}, {cell.config.arm}, seed {cell.config.seed}"
        if key in known:
            print(f"{label}: in {file} already", flush=True)
            continue
        found = cell.figures()
        known.add(key)
        lines = extended(lines, [found], file)
        print(f"{label}: {found[NDCG]:.4f}", flush=True)
    return lines


def table(lines: pd.DataFrame, kind: str, baseline: str = BASELINE) -> str:
    """By model, data and level: the baseline's NDCG@10, and what every other arm differs by, in percent of it, with a
    95 % interval and p by paired t-test.
    """
    places = lines["dataset"].str.extract(PLACE.format(kind=kind))
    kept = lines.assign(data=places["data"], level=places["level"])[places["level"].notna()]
    groups, others = {}, {}
    for (model, data, level), own in kept.groupby(["model", "data", "level"]):
        check_alike(own, f"{data} with {kind} {level} ({model})")
        arms = arms_of(own, told=[DECAY])[1]
        groups[str(model), str(data), str(level)] = arms
        others |= dict.fromkeys(arms)
    rows = []
    for (model, data, level), arms in sorted(groups.items(), key=_order):
        base = arms.get(baseline)
        if base is None:
            continue
        cells = [model, data, level, str(len(base)), f"{base[NDCG].mean():.4f}"]
        rows.append(cells + [_lead(arms.get(arm), base) for arm in others if arm != baseline])
    head = ["model", "data", kind, "seeds", f"`{baseline}`", *(f"`{arm}`" for arm in others if arm != baseline)]
    return markdown_table(head, rows)


def _lead(own: pd.DataFrame | None, base: pd.DataFrame) -> str:
    lead = None if own is None else difference(own[NDCG].to_dict(), base[NDCG].to_dict())
    if lead is None:  # fewer than two seeds of both
        return "" if own is None else f"{own[NDCG].mean():.4f}"
    if not lead.mean_baseline:
        return f"{lead.difference:+.4f}, p {p_text(lead.p_t)}"
    return f"{percent_and_interval(lead)}, p {p_text(lead.p_t)}"


def _order(group: tuple[Sequence[str], Any]) -> tuple[str, str, float, str]:
    model, data, level = group[0]
    return model, data, float(level) if level.replace(".", "", 1).isdigit() else 0.0, level
