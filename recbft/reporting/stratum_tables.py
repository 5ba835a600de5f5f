"""Tables of strata, each with the confound check and the rule that calls a stratum too small."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from recbft.errors import UserError, did_you_mean
from recbft.evaluation import strata as partition
from recbft.evaluation.paired import SeedComparison, UserComparison, share_of
from recbft.evaluation.protocol import SETTINGS
from recbft.evaluation.strata import MIN_USERS, Strata, confound
from recbft.evaluation.stratified import MIN_HITS, SAMPLES, StratumResult, p_of, stratify
from recbft.experiments.lists import listed
from recbft.reporting.comparison_tables import out_of_reach, without_spread
from recbft.reporting.stratified_arms import Subject
from recbft.reporting.tables import Cell, Column, Table, digits_for, p_equals, slug

METRICS = ("ndcg@10", "hr@10")


@dataclass(frozen=True, kw_only=True)
class Stratified:
    """One partition of the users, one metric of the arms in it, and the table that shows it."""

    by: str
    metric: str
    strata: Strata
    results: list[StratumResult]
    table: Table


def stratified(
    subject: Subject, *, by: Sequence[str], metrics: Sequence[str] = METRICS, quantiles: int, setting: str
) -> list[Stratified]:
    """Every metric in every partition asked for.

    Raises:
        UserError: a partition is unknown or the data does not have it, or no arm has ranks in this setting.
    """
    made = []
    for name in by:
        strata = make_strata(subject, name, quantiles)
        for metric in metrics:
            results = stratify(
                strata,
                _ranks(subject, setting),
                baseline=subject.baseline,
                metric=metric,
                target=subject.target,
                target_frequency=subject.target_frequency,
            )
            table = _table(subject, name, strata, results, metric, setting)
            made.append(Stratified(by=name, metric=metric, strata=strata, results=results, table=table))
    return made


def make_strata(subject: Subject, name: str, quantiles: int) -> Strata:
    """The users of a subject, partitioned by one name of ``STRATA``."""
    if name not in STRATA:
        raise UserError(f"unknown strata {name!r}; {did_you_mean(name, STRATA)}")
    return STRATA[name](subject, quantiles)


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


def _recency(subject: Subject, quantiles: int) -> Strata:
    if subject.items is None:
        raise UserError(f"recency needs the data set: {subject.missing}")
    if subject.items.gap is None:
        raise UserError(f"recency needs real times, and {subject.dataset} has none; leave recency out of --by")
    ticks_per_second = subject.items.ticks_per_second
    return partition.recency(subject.items.gap, ticks_per_second=ticks_per_second, quantiles=quantiles)


STRATA: dict[str, Callable[[Subject, int], Strata]] = {
    "item-frequency": lambda subject, quantiles: partition.item_frequency(
        subject.target_frequency, _counts(subject), quantiles=quantiles
    ),
    "user-activity": lambda subject, quantiles: partition.user_activity(subject.training_length, quantiles=quantiles),
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
            Column(ours, "value", "terminal"), Column("difference", "signed", "terminal"),
            Column("relative", "percent"), Column("95 % interval", "interval", "terminal"),
            Column("p", "p", "terminal"), Column("p Holm", "p"),
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
        return f"Edges of item frequency from the training counts of all {counts.size:,} items, Q0 rarest."
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
