"""Where a metric comes from: every arm's level in every stratum, and each arm against a baseline there.

    level of arm a in stratum g      mean over the users of g, then over seeds                              (a)
    interval of a level              t interval over seeds; with one seed, bootstrap over the users of g     (b)
                                     none where one set of ranks stands for all seeds
    difference from the baseline     paired over seeds; with one seed, paired over the users of g            (c)
    Holm                             over all tests of one table: its strata times its arms                  (d)

A stratum is too small to say anything where it has fewer than ``MIN_USERS`` users, or where even the best arm puts
fewer than ``MIN_HITS`` targets among the first k (mean over seeds; k = 10 for a metric without one): one user more or
less would then move the metric by a fifth.

Shapes: S seeds, N users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recbft.evaluation.metrics import cutoff, hit_rate, one_from_ranks
from recbft.evaluation.paired import (
    SeedComparison,
    UserComparison,
    bootstrap_interval,
    compare_seeds,
    compare_users,
    holm,
    seed_interval,
)
from recbft.evaluation.strata import MIN_USERS, Strata

MIN_HITS = 5
SAMPLES = 2000  # resamples of the users of one stratum
IntArray = NDArray[np.int64]
Difference = SeedComparison | UserComparison


@dataclass(frozen=True, kw_only=True)
class Level:
    """One arm in one stratum; no interval where nothing varies: one seed and one user, or equal ranks in all seeds."""

    mean: float  # (a)
    interval: tuple[float, float] | None  # (b)


@dataclass(frozen=True, kw_only=True)
class StratumResult:
    """One stratum: who is in it, how the arms do there, and how they differ from the baseline."""

    name: str
    bounds: str
    num_users: int
    num_targets: int  # distinct
    mean_target_frequency: float  # training events
    levels: dict[str, Level]
    differences: dict[str, Difference]  # (c), of every arm but the baseline; none where nothing can be paired
    holm_p: dict[str, float]  # (d), of the t-test over seeds or of the sign flips over users
    too_small: str  # why, empty where the stratum is large enough


def stratify(
    strata: Strata,
    ranks: Mapping[str, ArrayLike],
    *,
    baseline: str | None,
    metric: str,
    target: ArrayLike,
    target_frequency: ArrayLike,
) -> list[StratumResult]:
    """Arms within each stratum.

    Args:
        ranks: of the targets by arm, (S, N), users in the order of ``strata``; seeds in one order for all arms.
        baseline: the arm that the others are compared with; None for levels alone.
        metric: a name such as "ndcg@10" or "mrr".
        target: of each user, (N,); counted, not read.
        target_frequency: training events of each target, (N,).
    """
    arrays = {arm: np.atleast_2d(np.asarray(of_arm, dtype=np.int64)) for arm, of_arm in ranks.items()}
    shapes = {of_arm.shape for of_arm in arrays.values()}
    assert len(shapes) == 1 and shapes.pop()[1] == strata.member.size, (
        "arms have seeds in common, and the strata's users"
    )
    values = {arm: one_from_ranks(of_arm, metric) for arm, of_arm in arrays.items()}
    hits = {arm: hit_rate(of_arm, cutoff(metric) or 10) for arm, of_arm in arrays.items()}
    alike = {arm: len(of_arm) > 1 and not (of_arm != of_arm[0]).any() for arm, of_arm in arrays.items()}
    targets, frequency = np.asarray(target), np.asarray(target_frequency)
    rows = []
    for stratum, name in enumerate(strata.names):
        users = strata.users(stratum)
        inside = {arm: of_arm[:, users] for arm, of_arm in values.items()}
        others = [arm for arm in values if baseline is not None and arm != baseline]
        differences = {arm: _difference(inside[str(baseline)], inside[arm]) for arm in others}
        rows.append(
            StratumResult(
                name=name,
                bounds=strata.bounds[stratum],
                num_users=users.size,
                num_targets=np.unique(targets[users]).size,
                mean_target_frequency=float(frequency[users].mean()),
                levels={arm: _level(of_arm, alike=alike[arm]) for arm, of_arm in inside.items()},
                differences={arm: found for arm, found in differences.items() if found is not None},
                holm_p={},
                too_small=_too_small(users.size, max(float(hit[:, users].sum()) / len(hit) for hit in hits.values())),
            )
        )
    return _adjusted(rows)


def p_of(difference: Difference) -> float:
    """The p that is adjusted and printed: the t-test's over seeds, the sign flips' over users."""
    return difference.p_t if isinstance(difference, SeedComparison) else difference.p_sign_flip


def _level(values: NDArray[np.float64], *, alike: bool) -> Level:
    """(a) and (b) of values (S, n), of an arm whose ranks are alike in all seeds or not."""
    per_seed = values.mean(axis=1)
    interval = None if alike else seed_interval(per_seed)
    if len(values) == 1 and values.shape[1] > 1:
        interval = bootstrap_interval(values[0], samples=SAMPLES)
    return Level(mean=float(per_seed.mean()), interval=interval)


def _difference(baseline: NDArray[np.float64], other: NDArray[np.float64]) -> Difference | None:
    """(c); None for one user in one seed, where nothing varies."""
    if baseline.shape[0] > 1:
        return compare_seeds(baseline.mean(axis=1), other.mean(axis=1))
    return compare_users(baseline[0], other[0], samples=SAMPLES) if baseline.shape[1] > 1 else None


def _adjusted(rows: list[StratumResult]) -> list[StratumResult]:
    """(d): the rows again with Holm's p of their differences."""
    family = [(row, arm) for row in rows for arm in row.differences]
    for (row, arm), p in zip(family, holm([p_of(row.differences[arm]) for row, arm in family]), strict=True):
        row.holm_p[arm] = p
    return rows


def _too_small(num_users: int, hits: float) -> str:
    if num_users < MIN_USERS:
        return f"{num_users} user{'s' * (num_users != 1)}"
    return f"{hits:.3g} hit{'s' * (hits != 1)}" if hits < MIN_HITS else ""
