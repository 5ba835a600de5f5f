"""Tables of strata, each with the confound check and the rule that calls a stratum too small.

They are made of the arms' ranks on one test set, of who its users are, and of the data set where it is at hand. A
finished run gives one arm and no baseline, two runs an arm and its baseline, a comparison all of its arms. Counts of
the items and times of the events are not in a run's folder: they come from the data set, which is loaded once more and
must have the run's content hash.

Shapes: S seeds, N targets, which are as many as users unless the split gives them several; V items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recbft.comparing.comparison import DATA_FILE, FEATURES_FILE, Comparison
from recbft.comparing.finished_runs import Run, check_same, label_runs, read_run
from recbft.config.fields import from_dict, verbatim
from recbft.datasets.config import DataConfig
from recbft.datasets.dataset import Dataset
from recbft.datasets.events import TICKS_PER_SECOND
from recbft.errors import UserError, did_you_mean
from recbft.evaluation import strata as partition
from recbft.evaluation.metrics import SETTINGS, headline_setting
from recbft.evaluation.paired import SeedComparison, UserComparison, share_of
from recbft.evaluation.strata import (
    MIN_HITS,
    MIN_USERS,
    SAMPLES,
    Equal,
    Strata,
    StratumResult,
    confound,
    p_of,
    stratify,
)
from recbft.experiments.lists import listed
from recbft.reporting.comparison_tables import out_of_reach, without_spread
from recbft.reporting.tables import DIFFERENCE, Cell, Column, Table, digits_for, p_equals, slug

METRICS = ("ndcg@10", "hr@10")
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
    owner: IntArray | None = None  # (N,) each target's user, as ``over_users`` takes it


@dataclass(frozen=True, kw_only=True)
class Stratified:
    """One partition of the users, one metric of the arms in it, and the table that shows it."""

    by: str
    metric: str
    strata: Strata
    results: list[StratumResult]
    table: Table


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
            setting: {name: one.ranks(setting)[None] for name, one in zip(names, runs, strict=True)}
            for setting in SETTINGS
        },
        baseline=None if baseline is None else names[0],
        num_seeds=1,
        owner=run.owner,
        items=items,
        missing=missing,
        **run.of_users,
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
        owner=comparison.owner,
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
    tested = dataset.user_ids[dataset.split.test.user]
    if not np.array_equal(tested.astype(str), np.asarray(users).astype(str)):
        return None, f"{dataset.name} as loaded lists other users than the runs"
    return Items(counts=dataset.training_counts[1:], gap=_gap(dataset), ticks_per_second=_ticks_per_second(dataset)), ""


def stratified(
    subject: Subject,
    *,
    by: Sequence[str],
    metrics: Sequence[str] = METRICS,
    quantiles: int,
    setting: str,
    equal: Equal = "items",
    edges: Sequence[int] | None = None,
) -> list[Stratified]:
    """Every metric in every partition asked for; ``equal`` and ``edges`` as in ``strata.item_frequency``.

    Raises:
        UserError: a partition is unknown or the data does not have it, or no arm has ranks in this setting.
    """
    if (edges is not None or equal != "items") and not {"item-frequency", "grid"} & set(by):
        raise UserError("edges and equal have no effect without strata by item-frequency; leave them out")
    made = []
    for name in by:
        if name not in STRATA:
            raise UserError(f"unknown strata {name!r}; {did_you_mean(name, STRATA)}")
        strata = STRATA[name](subject, Cut(quantiles, equal, edges))
        for metric in metrics:
            results = stratify(
                strata,
                _ranks(subject, setting),
                baseline=subject.baseline,
                metric=metric,
                target=subject.target,
                target_frequency=subject.target_frequency,
                owner=subject.owner,
            )
            table = _table(subject, name, strata, results, metric, setting)
            made.append(Stratified(by=name, metric=metric, strata=strata, results=results, table=table))
    return made


def available(subject: Subject) -> tuple[list[str], list[str]]:
    """The partitions that a subject's data has, and a line for each that it has not."""
    if subject.items is not None and subject.items.gap is not None:
        return list(STRATA), []
    why = subject.missing if subject.items is None else f"{subject.dataset} has no real times"
    return [name for name in STRATA if name != "recency"], [f"recency is left out: {why}"]


def _ranks(subject: Subject, setting: str) -> dict[str, np.ndarray]:
    ranks = dict(subject.ranks.get(setting, {}))
    if not ranks or (subject.baseline is not None and subject.baseline not in ranks):
        raise UserError(f"there are no ranks {SETTINGS.get(setting, setting)}; choose the other --setting")
    if subject.baseline is not None and len(ranks) == 1:
        raise UserError(
            f"only {subject.baseline} has ranks {SETTINGS.get(setting, setting)}, and nothing to be compared with; "
            "choose the other --setting"
        )
    return ranks


class Cut(NamedTuple):
    """How an axis is cut; of what is not item frequency the number of strata alone."""

    quantiles: int
    equal: Equal = "items"
    edges: Sequence[int] | None = None


def _recency(subject: Subject, cut: Cut) -> Strata:
    if subject.items is None:
        raise UserError(f"recency needs the data set: {subject.missing}")
    if subject.items.gap is None:
        raise UserError(f"recency needs real times, and {subject.dataset} has none; leave recency out of --by")
    ticks_per_second = subject.items.ticks_per_second
    return partition.recency(subject.items.gap, ticks_per_second=ticks_per_second, quantiles=cut.quantiles)


STRATA: dict[str, Callable[[Subject, Cut], Strata]] = {
    "item-frequency": lambda subject, cut: partition.item_frequency(
        subject.target_frequency, _counts(subject), **cut._asdict()
    ),
    "user-activity": lambda subject, cut: partition.user_activity(
        subject.training_length, owner=subject.owner, quantiles=cut.quantiles
    ),
    "grid": lambda *given: partition.grid(STRATA["item-frequency"](*given), STRATA["user-activity"](*given)),
    "first-time": lambda subject, _: partition.first_time_items(subject.target_frequency),
    "recency": _recency,
}


def _counts(subject: Subject) -> np.ndarray:
    """Training counts of the items that edges are taken from; without the data set only targets are known."""
    if subject.items is not None:
        return subject.items.counts
    _, first = np.unique(subject.target.astype(str), return_index=True)
    return np.asarray(subject.target_frequency[first])


def _table(
    subject: Subject, name: str, strata: Strata, results: Sequence[StratumResult], metric: str, setting: str
) -> Table:
    who = [
        Column("stratum"), Column("bounds"), Column("users", "count", "terminal"),
        Column("mean frequency", "number", "terminal"),
    ]  # fmt: skip
    if subject.baseline is None:
        levels = [Column(metric.upper(), "value"), Column("95 % interval", "range")]
        more = [Column("targets", "count", "page")]
    else:
        others = [arm for arm in results[0].levels if arm != subject.baseline]
        ours = others[0] if len(others) == 1 else "the arm's"
        levels = [
            *([] if len(others) == 1 else [Column("arm")]), Column(subject.baseline, "value", "terminal"),
            Column(ours, "value", "terminal"), *DIFFERENCE,
        ]  # fmt: skip
        more = [
            Column("targets", "count", "page"), Column(f"{subject.baseline}: 95 %", "range", "page"),
            Column(f"{ours}: 95 %", "range", "page"),
        ]  # fmt: skip
    return Table(
        name=f"strata-{name}-{slug(metric)}",
        title=f"{metric.upper()} by {strata.axis}",
        caption=_caption(subject, name, strata, results, metric, setting),
        columns=[*who, *levels, Column("remark"), *more],
        rows=[cells for row in results for cells in _rows(subject, row)],
        digits=digits_for((one.difference, p_of(one)) for row in results for one in row.differences.values()),
    )


def _rows(subject: Subject, row: StratumResult) -> list[list[Cell]]:
    """One line for each arm that is compared, or for the one arm's level."""
    who: list[Cell] = [row.name, row.bounds, row.num_users, row.mean_target_frequency]
    if subject.baseline is None:
        return [[*who, level.mean, level.interval, _remark(row), row.num_targets] for level in row.levels.values()]
    base = row.levels[subject.baseline]
    others = [arm for arm in row.levels if arm != subject.baseline]
    lines = []
    for arm in others:
        level, found = row.levels[arm], row.differences.get(arm)
        test: list[Cell] = [None] * 5
        if found is not None:
            inside = None if isinstance(found, SeedComparison) and found.is_constant else found.interval
            relative = share_of(found.difference, base.mean)
            test = [found.difference, relative, inside, p_of(found), row.holm_p[arm]]
        named: list[Cell] = [] if len(others) == 1 else [arm]
        intervals = [base.interval, level.interval]
        lines.append([*who, *named, base.mean, level.mean, *test, _remark(row), row.num_targets, *intervals])
    return lines


def _remark(row: StratumResult) -> str:
    if row.too_small:
        return f"too small: {row.too_small}"
    # Differences that cancel have a mean of 0 and a p of 1 too, but an interval of some width.
    same = row.differences and all(found.interval == (0, 0) for found in row.differences.values())
    return "no difference at all" if same else ""


def _caption(
    subject: Subject, name: str, strata: Strata, results: Sequence[StratumResult], metric: str, setting: str
) -> str:
    parts = [
        f"{metric.upper()} on {subject.dataset}, {SETTINGS[setting]}, ties against the target.",
        f"Bounds: {strata.unit}. Mean frequency: how often the targets of a stratum occur in training.",
        _edges(subject, name),
        _left_out(strata) if name != "grid" else "",
        _tests(subject, results),
        f"Too small: fewer than {MIN_USERS} users, or fewer than {MIN_HITS} hits in the best arm.",
    ]
    if name in ("item-frequency", "user-activity", "grid"):
        parts.append(confound_line(subject))
    return " ".join(part for part in parts if part)


def _edges(subject: Subject, name: str) -> str:
    if name not in ("item-frequency", "grid"):
        return ""
    counts = _counts(subject)
    if subject.items is not None:
        new = int((counts == 0).sum())
        apart = f", but for the {new:,} without a training event, whose targets are new" if new else ""
        return f"Edges of item frequency from the training counts of all {counts.size:,} items{apart}; Q0 rarest."
    return (
        f"Edges of item frequency from the {counts.size:,} distinct targets only, since the data set is not at hand "
        f"({subject.missing}); with --data-root they come from all items."
    )


def _left_out(strata: Strata) -> str:
    """The strata without users: where many values are equal, a stratum between two equal edges is empty."""
    if not strata.empty:
        return ""
    one = len(strata.empty) == 1
    return f"{listed(strata.empty)} {'has' if one else 'have'} no user and {'is' if one else 'are'} left out."


def _tests(subject: Subject, results: Sequence[StratumResult]) -> str:
    found = [difference for row in results for difference in row.differences.values()]
    if subject.baseline is None:
        return "Interval: bootstrap over users; one run, so nothing is tested."
    if not found:
        return "Nothing is tested: one seed, and no stratum with two users."
    if isinstance(found[0], SeedComparison):
        how = f"paired over {subject.num_seeds} seeds: t interval and two-sided t-test"
    else:
        how = "one seed, so paired over users: bootstrap interval and sign-flip test; it says nothing about other seeds"
    family = f"Holm over the {len(found)} tests of this table" if len(found) > 1 else "one test, so no adjustment"
    more = without_spread(isinstance(one, SeedComparison) and one.is_constant for one in found)
    if isinstance(found[0], UserComparison):
        more += out_of_reach(len(found), SAMPLES)
    return f"Difference from {subject.baseline}, {how}; {family}.{more}"


def confound_line(subject: Subject) -> str:
    """Whether the two main axes say the same, in words and numbers."""
    lengths, counts = subject.training_length, subject.target_frequency
    if lengths.size < 3:
        return "Confound check: fewer than three users have no correlation."
    if np.ptp(lengths) == 0 or np.ptp(counts) == 0:
        return "Confound check: training length or target frequency does not vary, so they cannot be confused."
    r, p = confound(lengths, counts)
    if abs(r) < 0.1:
        verdict = "the two axes are all but separate"
    elif p < 0.05:
        verdict = "the two axes partly say the same"
    else:
        verdict = "too few users to tell whether the two axes say the same"
    return (
        "Confound check, whether active users have popular targets: "
        f"Pearson r = {r:+.2f} of training length and target frequency (p {p_equals(p)}): {verdict}."
    )


def _where_it_lies(data: Mapping[str, Any], folder: Path | None) -> Mapping[str, Any]:
    """Data that a comparison keeps by the place they have now: its folder may have moved, or be read from elsewhere."""
    if folder is None or Path(str(data.get("dataset"))).name != DATA_FILE:
        return data
    here = (place / DATA_FILE for place in (folder, folder.absolute().parent))
    if (found := next((file for file in here if file.is_file()), None)) is None:
        return data
    items = {"items": [str(found.with_name(FEATURES_FILE))]} if data.get("items") else {}
    return {**data, "dataset": str(found), **items}


def _gap(dataset: Dataset) -> IntArray | None:
    if dataset.times is None:
        return None
    test = dataset.split.test
    assert test.times is not None
    return dataset.times[test.event] - test.times[test.stop - 1]


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
