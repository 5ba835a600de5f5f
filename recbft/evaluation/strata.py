"""Which users belong together, and how every arm does among them, by itself and against a baseline.

Users are put together by how often their target occurs in training, how active they are, how long ago it was.

    edges of K quantiles: the least values with shares of 1/K ... (K-1)/K of a population at or below   (a)
    stratum of a value = number of edges below it; "new" of a count of 0, before all others              (b)

Item frequency takes its edges from the training counts of the distinct items that have training events, so that each
stratum holds equal numbers of items as far as ties allow (Q0 rarest), or from another population: the targets' counts,
or the different counts that targets have, each once. The last is what the paper's edges follow: on ML-1M it gives
187 / 383 / 632 / 999 where the paper prints 187 / 396 / 642 / 1029. User activity takes its edges from the users' own
training lengths (Q0 shortest), recency from the users' own gaps between the target and the event before it (Q0 most
recent). Equal values are never split, so strata can be unequal, and one between two equal edges is empty: it is left
out.

    level of arm a in stratum g      mean over the users of g, then over seeds; of several targets of a
                                     user in g, the user's mean first                                       (c)
    interval of a level              t interval over seeds; with one seed, bootstrap over the users of g     (d)
                                     none where one set of ranks stands for all seeds
    difference from the baseline     paired over seeds; with one seed, paired over the users of g            (e)
    Holm                             over all tests of one table: its strata times its arms                  (f)

A stratum is too small to say anything where it has fewer than ``MIN_USERS`` users, or where even the best arm puts
fewer than ``MIN_HITS`` targets among the first k (mean over seeds; k = 10 for a metric without one): one user more or
less would then move the metric by a fifth.

Shapes: S seeds, N targets, as many as users unless the split gives them several; V items, K quantiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recbft.errors import UserError
from recbft.evaluation.metrics import check_metric, cutoff, hit_rate, one_from_ranks, owner_of
from recbft.evaluation.paired import (
    SeedComparison,
    UserComparison,
    bootstrap_interval,
    compare_seeds,
    compare_users,
    holm,
    seed_interval,
)

QUANTILES = 5
Equal = Literal["items", "targets", "counts"]  # what strata of item frequency hold equal numbers of
NEW = "new"  # without a training event
MIN_USERS = 30  # fewer are too few to say anything of others: resamples of them are too much alike
Number = TypeVar("Number", bound=np.number[Any])
_DURATIONS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
MIN_HITS = 5
SAMPLES = 2000  # resamples of the users of one stratum
IntArray = NDArray[np.int64]
Difference = SeedComparison | UserComparison


@dataclass(frozen=True, kw_only=True)
class Strata:
    """A partition of the users.

    Args:
        axis: what it is by, such as "item frequency".
        unit: what the bounds count, such as "training events of the target"; empty where names say it all.
        names: one per stratum, such as "Q0".
        bounds: smallest and largest value of each stratum, such as "5-7".
        member: stratum of each target, (N,), index into ``names``.
        empty: names of the strata without users, which are left out.
    """

    axis: str
    unit: str
    names: tuple[str, ...]
    bounds: tuple[str, ...]
    member: IntArray
    empty: tuple[str, ...] = ()

    def users(self, stratum: int) -> IntArray:
        """Row numbers of the targets in a stratum, and so of their users."""
        return np.flatnonzero(self.member == stratum)


class Confound(NamedTuple):
    """Pearson correlation of history length with the target's training count: do the two axes say the same?"""

    r: float
    p: float


def item_frequency(
    target_frequency: ArrayLike,
    item_counts: ArrayLike,
    *,
    quantiles: int = QUANTILES,
    new_apart: bool = True,
    equal: Equal = "items",
    edges: Sequence[int] | None = None,
) -> Strata:
    """Users by the training count of their target.

    Args:
        target_frequency: training events of each user's target, (N,).
        item_counts: training events of the distinct items, (V,), padding left out.
        new_apart: what has no training event is a stratum of its own; else one of the rarest.
        equal: what strata hold equal numbers of: items, targets, or different counts of targets.
        edges: the largest count of every stratum but the last, rising, in place of quantiles.
    """
    unit, made = "training events of the target", _counts if new_apart else _quantiles
    counts, population = _integers(target_frequency), _integers(item_counts)
    if equal != "items":
        population = counts if equal == "targets" else np.unique(counts)
    if edges is not None and equal != "items":
        raise UserError(f"equal {equal} has no effect with edges; leave one of them out")
    if edges is not None and (not len(edges) or min(edges) < 0 or list(edges) != sorted(set(edges))):
        raise UserError(f"edges are {list(edges)}; give rising training counts, such as 187,396,642,1029")
    return made("item frequency", unit, counts, population, quantiles, edges)


def user_activity(training_length: ArrayLike, *, owner: IntArray | None = None, quantiles: int = QUANTILES) -> Strata:
    """Users by the number of their training events, (N,); ``owner`` as in ``stratify``: each user counts once."""
    lengths = _integers(training_length)
    each = lengths if owner is None else lengths[np.flatnonzero(np.diff(owner, prepend=-1))]
    return _counts("user activity", "training events of the user", lengths, each, quantiles)


def first_time_items(target_frequency: ArrayLike) -> Strata:
    """Users whose target never occurs in training, and the others."""
    counts = _integers(target_frequency)
    seen = (counts > 0).astype(np.int64)
    often = _range(1, max(1, int(counts.max(initial=0))))
    unit = "training events of the target"
    return _compact("first-time items", unit, ["target never in training", "target in training"], ["0", often], seen)


def recency(gap: ArrayLike, *, ticks_per_second: int | None, quantiles: int = QUANTILES) -> Strata:
    """Users by the time between the target and the event before it.

    Args:
        gap: in the data's unit of time, (N,).
        ticks_per_second: of that unit, so that bounds can be said in days or hours; None where it is not known.
    """
    gaps = _integers(gap)

    def say(ticks: int) -> str:
        return str(ticks) if ticks_per_second is None else _duration(ticks / ticks_per_second)

    made = _quantiles("recency of the target", "time since the event before", gaps, gaps, quantiles)
    # The bounds that occur: between two edges there may be years without a value.
    inside = [gaps[made.users(n)] for n in range(len(made.names))]
    bounds = [_range(say(int(own.min())), say(int(own.max()))) for own in inside]
    return replace(made, bounds=tuple(bounds))


def grid(one: Strata, other: Strata) -> Strata:
    """Every pair of strata, those without users left out."""
    names = [f"{a} x {b}" for a in one.names for b in other.names]
    bounds = [f"{a} x {b}" for a in one.bounds for b in other.bounds]
    axis, unit = f"{one.axis} x {other.axis}", f"{one.unit} x {other.unit}"
    return _compact(axis, unit, names, bounds, one.member * len(other.names) + other.member)


def confound(training_length: ArrayLike, target_frequency: ArrayLike) -> Confound:
    """Whether active users have popular targets; r is 0 and p 1 of fewer than 3, or where one of them is constant."""
    lengths, counts = _integers(training_length), _integers(target_frequency)
    if lengths.size < 3 or np.ptp(lengths) == 0 or np.ptp(counts) == 0:
        return Confound(0.0, 1.0)
    from scipy import stats  # as in association: not for those who only recommend

    found = stats.pearsonr(lengths, counts)
    return Confound(float(found.statistic), float(found.pvalue))


def quantile_edges(population: NDArray[Number], quantiles: int) -> NDArray[Number]:
    """Equation (a), (K - 1,); the population is not empty."""
    # In whole numbers: a share of 1/K is rounded, and its product with a size may lie above a whole number.
    last = -(-np.arange(1, quantiles) * population.size // quantiles) - 1
    edges: NDArray[Number] = np.sort(population)[last]
    return edges


def _quantiles(
    axis: str,
    unit: str,
    values: IntArray,
    population: IntArray,
    quantiles: int,
    edges: Sequence[int] | IntArray | None = None,
) -> Strata:
    if quantiles < 2:
        raise UserError(f"quantiles is {quantiles}; give 2 or more")
    if values.size == 0 or population.size == 0:
        raise UserError("there is no user to stratify; evaluate a data set with users first")
    edges = quantile_edges(population, quantiles) if edges is None else _integers(edges)
    quantiles = len(edges) + 1
    member = np.searchsorted(edges, values, side="left")  # (b)
    low = np.concatenate([[population.min()], edges + 1])
    high = np.concatenate([edges, [population.max()]])
    low[0], high[-1] = min(low[0], values.min()), max(high[-1], values.max())
    names = [f"Q{q}" for q in range(quantiles)]
    return _compact(axis, unit, names, [_range(int(low[q]), int(high[q])) for q in range(quantiles)], member)


def _counts(
    axis: str, unit: str, values: IntArray, population: IntArray, quantiles: int, edges: Sequence[int] | None = None
) -> Strata:
    """Quantiles of the counts above 0, and before them the stratum "new" where there is a value of 0."""
    is_new, counted = values == 0, population[population > 0]
    if not is_new.any():
        return _quantiles(axis, unit, values, counted, quantiles, edges)
    if is_new.all():
        return Strata(axis=axis, unit=unit, names=(NEW,), bounds=("0",), member=np.zeros(values.size, np.int64))
    others, member = _quantiles(axis, unit, values[~is_new], counted, quantiles, edges), np.zeros(values.size, np.int64)
    member[~is_new] = others.member + 1
    return replace(others, names=(NEW, *others.names), bounds=("0", *others.bounds), member=member)


def _compact(axis: str, unit: str, names: Sequence[str], bounds: Sequence[str], member: IntArray) -> Strata:
    """The same partition without its empty strata."""
    used, member = np.unique(member, return_inverse=True)
    kept = [int(stratum) for stratum in used]
    return Strata(
        axis=axis,
        unit=unit,
        names=tuple(names[stratum] for stratum in kept),
        bounds=tuple(bounds[stratum] for stratum in kept),
        member=member.astype(np.int64),
        empty=tuple(name for stratum, name in enumerate(names) if stratum not in kept),
    )


def _integers(values: ArrayLike) -> IntArray:
    return np.asarray(values, dtype=np.int64)


def _range(low: int | str, high: int | str) -> str:
    return str(low) if low == high else f"{low}-{high}"


def _duration(seconds: float) -> str:
    """In the largest unit that holds it once, to three digits.

    >>> _duration(0), _duration(5400), _duration(86400 * 12), _duration(0.25)
    ('0', '1.5 h', '12 d', '250 ms')
    """
    for name, size in _DURATIONS:
        if seconds >= size:
            return f"{seconds / size:.3g} {name}" if seconds < 100 * size else f"{seconds / size:.0f} {name}"
    return "0"


@dataclass(frozen=True, kw_only=True)
class Level:
    """One arm in one stratum; no interval where nothing varies: one seed and one user, or equal ranks in all seeds."""

    mean: float  # (c)
    interval: tuple[float, float] | None  # (d)


@dataclass(frozen=True, kw_only=True)
class StratumResult:
    """One stratum: who is in it, how the arms do there, and how they differ from the baseline."""

    name: str
    bounds: str
    num_users: int
    num_targets: int  # distinct
    mean_target_frequency: float  # training events
    levels: dict[str, Level]
    differences: dict[str, Difference]  # (e), of every arm but the baseline; none where nothing can be paired
    holm_p: dict[str, float]  # (f), of the t-test over seeds or of the sign flips over users
    too_small: str  # why, empty where the stratum is large enough


def stratify(
    strata: Strata,
    ranks: Mapping[str, ArrayLike],
    *,
    baseline: str | None,
    metric: str,
    target: ArrayLike,
    target_frequency: ArrayLike,
    owner: IntArray | None = None,
) -> list[StratumResult]:
    """Arms within each stratum.

    Args:
        ranks: of the targets by arm, (S, N), users in the order of ``strata``; seeds in one order for all arms.
        baseline: the arm that the others are compared with; None for levels alone.
        metric: a name such as "ndcg@10" or "mrr".
        target: of each user, (N,); counted, not read.
        target_frequency: training events of each target, (N,).
        owner: each target's user, as ``over_users`` takes it; None where each has one.
    """
    arrays = {arm: np.atleast_2d(np.asarray(of_arm, dtype=np.int64)) for arm, of_arm in ranks.items()}
    shapes = {of_arm.shape for of_arm in arrays.values()}
    assert len(shapes) == 1 and shapes.pop()[1] == strata.member.size, (
        "arms have seeds in common, and the strata's users"
    )
    check_metric(metric)
    hits = {arm: hit_rate(of_arm, cutoff(metric) or 10) for arm, of_arm in arrays.items()}
    alike = {arm: len(of_arm) > 1 and not (of_arm != of_arm[0]).any() for arm, of_arm in arrays.items()}
    targets, frequency = np.asarray(target), np.asarray(target_frequency)
    rows = []
    for stratum, name in enumerate(strata.names):
        users = strata.users(stratum)
        own = None if owner is None else owner_of(owner[users])
        inside = {arm: one_from_ranks(of_arm[:, users], metric, own) for arm, of_arm in arrays.items()}
        num_users = next(iter(inside.values())).shape[1]
        others = [arm for arm in arrays if baseline is not None and arm != baseline]
        differences = {arm: _difference(inside[str(baseline)], inside[arm]) for arm in others}
        rows.append(
            StratumResult(
                name=name,
                bounds=strata.bounds[stratum],
                num_users=num_users,
                num_targets=np.unique(targets[users]).size,
                mean_target_frequency=float(frequency[users].mean()),
                levels={arm: _level(of_arm, alike=alike[arm]) for arm, of_arm in inside.items()},
                differences={arm: found for arm, found in differences.items() if found is not None},
                holm_p={},
                too_small=_too_small(num_users, max(float(hit[:, users].sum()) / len(hit) for hit in hits.values())),
            )
        )
    return _adjusted(rows)


def p_of(difference: Difference) -> float:
    """The p that is adjusted and printed: the t-test's over seeds, the sign flips' over users."""
    return difference.p_t if isinstance(difference, SeedComparison) else difference.p_sign_flip


def _level(values: NDArray[np.float64], *, alike: bool) -> Level:
    """(c) and (d) of values (S, n), of an arm whose ranks are alike in all seeds or not."""
    per_seed = values.mean(axis=1)
    interval = None if alike else seed_interval(per_seed)
    if len(values) == 1 and values.shape[1] > 1:
        interval = bootstrap_interval(values[0], samples=SAMPLES)
    return Level(mean=float(per_seed.mean()), interval=interval)


def _difference(baseline: NDArray[np.float64], other: NDArray[np.float64]) -> Difference | None:
    """(e); None for one user in one seed, where nothing varies."""
    if baseline.shape[0] > 1:
        return compare_seeds(baseline.mean(axis=1), other.mean(axis=1))
    return compare_users(baseline[0], other[0], samples=SAMPLES) if baseline.shape[1] > 1 else None


def _adjusted(rows: list[StratumResult]) -> list[StratumResult]:
    """(f): the rows again with Holm's p of their differences."""
    family = [(row, arm) for row in rows for arm in row.differences]
    for (row, arm), p in zip(family, holm([p_of(row.differences[arm]) for row, arm in family]), strict=True):
        row.holm_p[arm] = p
    return rows


def _too_small(num_users: int, hits: float) -> str:
    if num_users < MIN_USERS:
        return f"{num_users} user{'s' * (num_users != 1)}"
    return f"{hits:.3g} hit{'s' * (hits != 1)}" if hits < MIN_HITS else ""
