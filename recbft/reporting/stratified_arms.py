"""What strata are made of: the arms' ranks on one test set, who its users are, and the data set where it is at hand.

A finished run gives one arm and no baseline, two runs an arm and its baseline, a comparison all of its arms. Counts of
the items and times of the events are not in a run's folder: they come from the data set, which is loaded once more and
must have the run's content hash.

Shapes: S seeds, N users, V items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recbft.comparing.comparison import DATA_FILE, Comparison
from recbft.comparing.finished_runs import COLUMNS, Run, check_same, read_run
from recbft.comparing.labels import label_runs
from recbft.config.fields import from_dict, verbatim
from recbft.datasets.config import DataConfig
from recbft.datasets.dataset import Dataset
from recbft.datasets.events import TICKS_PER_SECOND
from recbft.errors import UserError
from recbft.evaluation.protocol import SETTINGS, headline_setting

IntArray = NDArray[np.int64]
# The middle of the times of a data set, counted since 1970, lies between the years 1980 and 2100.
_UNIX_SECONDS = (315_532_800, 4_102_444_800)


@dataclass(frozen=True, kw_only=True)
class Items:
    """What only the data set knows."""

    counts: IntArray  # (V,) training events of every item
    gap: IntArray | None  # (N,) time between the target and the event before it; None without real times
    ticks_per_second: int | None  # of the unit of ``gap``; None where it is not known


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Arms on one test set; ``items`` is None where the data set is not at hand, and ``missing`` says why."""

    dataset: str
    setting: str  # the headline: "unfiltered" or "filtered"
    ranks: Mapping[str, Mapping[str, IntArray]]  # setting -> arm -> (S, N)
    baseline: str | None
    num_seeds: int
    target: NDArray[Any]  # (N,) raw ids
    target_frequency: IntArray  # (N,)
    training_length: IntArray  # (N,)
    items: Items | None
    missing: str


def subject_of_runs(
    path: str | Path, *, baseline: str | Path | None = None, data_root: str | Path | None = None
) -> Subject:
    """One finished run, alone or against another."""
    run = read_run(path)
    runs = [run] if baseline is None else [read_run(baseline), run]
    check_same(runs)
    if len(runs) > 1 and runs[0].path.resolve() == run.path.resolve():
        raise UserError(f"{path} is its own baseline; give another run")
    names = [str(run.config["arm"])] if baseline is None else _names(runs)
    users = run.per_user["user"].to_numpy()
    items, missing = load_items(run.config, run.protocol["content_hash"], users, data_root)
    return Subject(
        dataset=run.protocol["dataset"],
        setting=headline_setting(run.protocol["filter_seen"]),
        ranks={
            setting: {
                name: one.per_user[COLUMNS[setting]].to_numpy(np.int64)[None]
                for name, one in zip(names, runs, strict=True)
            }
            for setting in SETTINGS
        },
        baseline=None if baseline is None else names[0],
        num_seeds=1,
        target=run.per_user[COLUMNS["target"]].to_numpy(),
        target_frequency=run.per_user[COLUMNS["target_count"]].to_numpy(np.int64),
        # The test is ranked from training and the validation event.
        training_length=run.per_user[COLUMNS["history_length"]].to_numpy(np.int64) - 1,
        items=items,
        missing=missing,
    )


def subject_of_comparison(comparison: Comparison, *, data_root: str | Path | None = None) -> Subject:
    """All arms of a comparison over the seeds they share; an arm joins the settings that it has ranks for."""
    config = next((arm.config for arm in comparison.arms.values() if arm.config.get("data")), {})
    config = {**config, "data": _where_it_lies(config.get("data", {}), comparison.path)}
    content = comparison.protocol["content_hash"]
    items, missing = load_items(config, content, comparison.users, data_root)
    return Subject(
        dataset=comparison.protocol["dataset"],
        setting=headline_setting(comparison.protocol["filter_seen"]),
        ranks={
            setting: {name: arm.ranks[setting] for name, arm in comparison.arms.items() if setting in arm.ranks}
            for setting in SETTINGS
        },
        baseline=comparison.baseline,
        num_seeds=len(comparison.seeds),
        target=comparison.target,
        target_frequency=comparison.target_frequency,
        training_length=comparison.training_length,
        items=items,
        missing=missing,
    )


def load_items(
    config: Mapping[str, Any], content_hash: str, users: NDArray[Any], data_root: str | Path | None
) -> tuple[Items | None, str]:
    """Counts and gaps of the data that a run was made on, or None and the reason in words."""
    try:
        data = from_dict(DataConfig, verbatim(config.get("data", {})), "data")
        dataset = (data if data_root is None else replace(data, data_root=str(data_root))).load()
    except UserError as error:
        return None, " ".join(str(error).split())
    if dataset.content_hash != content_hash:
        return None, (
            f"{dataset.name} as loaded has content {dataset.content_hash[:12]}, the runs were made on "
            f"{content_hash[:12]}; name the folder of theirs with --data-root"
        )
    if not np.array_equal(dataset.user_ids.astype(str), np.asarray(users).astype(str)):
        return None, f"{dataset.name} as loaded lists other users than the runs"
    return Items(counts=dataset.training_counts[1:], gap=_gap(dataset), ticks_per_second=_ticks_per_second(dataset)), ""


def _where_it_lies(data: Mapping[str, Any], folder: Path | None) -> Mapping[str, Any]:
    """Data that a comparison keeps by the place they have now: its folder may have moved, or be read from elsewhere."""
    if folder is None or Path(str(data.get("dataset"))).name != DATA_FILE:
        return data
    here = (place / DATA_FILE for place in (folder, folder.absolute().parent))
    return {**data, "dataset": next((str(file) for file in here if file.is_file()), data["dataset"])}


def _gap(dataset: Dataset) -> IntArray | None:
    if dataset.times is None:
        return None
    last = dataset.offsets[1:] - 1
    return dataset.times[last] - dataset.times[last - 1]


def _ticks_per_second(dataset: Dataset) -> int | None:
    """Of dates, of which the data set knows it, or of numbers that are dates of our time in one unit."""
    if dataset.times is None:
        return None
    if known := dataset.preparation.get("time_unit"):
        return TICKS_PER_SECOND[known]
    low, high = _UNIX_SECONDS
    middle = float(np.median(dataset.times))
    return next((ticks for ticks in TICKS_PER_SECOND.values() if low <= middle / ticks <= high), None)


def _names(runs: Sequence[Run]) -> list[str]:
    """Two runs by their arms, and by their seeds where these differ; by their folders where the arms are the same."""
    labels = {run.path: label for label, group in label_runs(runs).items() for run in group}
    if len(set(labels.values())) < len(runs):
        return [str(run.path) for run in runs]
    apart = len({run.seed for run in runs}) > 1
    return [f"{labels[run.path]} (seed {run.seed})" if apart else labels[run.path] for run in runs]
