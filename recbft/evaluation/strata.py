"""Where a metric comes from: users grouped by how often their target occurs in training, and by how active they are.

    edges of K quantiles from a population: the values at the shares 1/K ... (K-1)/K, ties together      (1)
    stratum of a value = number of edges below it                                                        (2)

Item frequency takes its edges from the training counts of the distinct items, so that each stratum holds equal numbers
of items as far as ties allow (Q0 rarest); user activity takes them from the users' own history lengths (Q0 shortest). A
user belongs to the stratum of the target's count, or of the length of the history it is ranked from. Equal values are
never split, so strata can be unequal, and one between two equal edges is empty: it is left out.

Shapes: N users, V items, K quantiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from recbft.errors import UserError
from recbft.evaluation.metrics import metrics_from_ranks
from recbft.evaluation.paired import SeedComparison, compare_seeds

QUANTILES = 5


@dataclass(frozen=True, kw_only=True)
class Strata:
    """A partition of the users.

    Args:
        axis: what it is by, such as "item frequency".
        names: one per stratum, bounds included, such as "Q0 item frequency 5-7".
        member: stratum of each user, (N,), index into ``names``.
    """

    axis: str
    names: tuple[str, ...]
    member: NDArray[np.int64]

    def users(self, stratum: int) -> NDArray[np.int64]:
        """Row numbers of the users in a stratum."""
        return np.flatnonzero(self.member == stratum)


class StratumRow(NamedTuple):
    """One stratum of an arm against a baseline."""

    stratum: str
    num_users: int
    mean_target_count: float
    comparison: SeedComparison


class Confound(NamedTuple):
    """Pearson correlation of history length with the target's training count: do the two axes say the same?"""

    r: float
    p: float


def item_frequency(per_user: pd.DataFrame, training_counts: ArrayLike, *, quantiles: int = QUANTILES) -> Strata:
    """Users by the training count of their target.

    Args:
        per_user: as ``evaluate`` makes it, or read from ``per_user.parquet``.
        training_counts: of the distinct items, (V,), padding left out.
    """
    return _strata("item frequency", per_user["target_count"].to_numpy(), np.asarray(training_counts), quantiles)


def user_activity(per_user: pd.DataFrame, *, quantiles: int = QUANTILES) -> Strata:
    """Users by the length of the history they are ranked from."""
    lengths = per_user["history_length"].to_numpy()
    return _strata("history length", lengths, lengths, quantiles)


def first_time_items(per_user: pd.DataFrame) -> Strata:
    """Users whose target never occurs in training, and the others."""
    seen = per_user["target_count"].to_numpy() > 0
    return _compact("target in training", ["target never in training", "target in training"], seen.astype(np.int64))


def grid(one: Strata, other: Strata) -> Strata:
    """Every pair of strata, those without users left out."""
    names = [f"{a}, {b}" for a in one.names for b in other.names]
    return _compact(f"{one.axis} by {other.axis}", names, one.member * len(other.names) + other.member)


def compare_strata(
    strata: Strata,
    baseline: Mapping[int, pd.DataFrame],
    other: Mapping[int, pd.DataFrame],
    *,
    metric: str = "ndcg@10",
    filtered: bool = False,
) -> list[StratumRow]:
    """Two arms, paired by seed, stratum by stratum.

    Args:
        baseline, other: ``per_user`` tables by seed, all of the same users in the same order; seeds that both have are
            used.
        metric: a name that ``metrics_from_ranks`` knows, such as "hr@10" or "mrr".
        filtered: rank among unseen items instead of all.

    Raises:
        UserError: the tables list different users or targets, or fewer than two seeds are shared.
    """
    seeds = sorted(set(baseline) & set(other))
    tables = [arm[seed] for arm in (baseline, other) for seed in seeds]
    _check_same_users(tables, strata)
    rows = []
    for stratum, name in enumerate(strata.names):
        users = strata.users(stratum)
        values = [[_metric(arm[seed], users, metric, filtered) for seed in seeds] for arm in (baseline, other)]
        count = tables[0]["target_count"].to_numpy()[users].mean()
        rows.append(StratumRow(name, users.size, float(count), compare_seeds(*values)))
    return rows


def confound(per_user: pd.DataFrame) -> Confound:
    """Whether active users have popular targets; r is 0 and p 1 where one of the two does not vary."""
    lengths, counts = per_user["history_length"].to_numpy(), per_user["target_count"].to_numpy()
    if lengths.size < 3 or np.ptp(lengths) == 0 or np.ptp(counts) == 0:
        return Confound(0.0, 1.0)
    found = stats.pearsonr(lengths, counts)
    return Confound(float(found.statistic), float(found.pvalue))


def _strata(axis: str, values: NDArray[Any], population: NDArray[Any], quantiles: int) -> Strata:
    if quantiles < 2:
        raise UserError(f"quantiles is {quantiles}; give 2 or more")
    if values.size == 0 or population.size == 0:
        raise UserError("there is no user to stratify; evaluate a data set with users first")
    shares = np.arange(1, quantiles) / quantiles
    edges = np.quantile(population, shares, method="inverted_cdf")  # (1)
    member = np.searchsorted(edges, values, side="left")  # (2)
    low = np.concatenate([[population.min()], edges + 1])
    high = np.concatenate([edges, [population.max()]])
    low[0], high[-1] = min(low[0], values.min()), max(high[-1], values.max())
    names = [f"Q{q} {axis} {_bounds(int(low[q]), int(high[q]))}" for q in range(quantiles)]
    return _compact(axis, names, member)


def _bounds(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"


def _compact(axis: str, names: Sequence[str], member: NDArray[np.int64]) -> Strata:
    """The same partition without its empty strata."""
    used, member = np.unique(member, return_inverse=True)
    return Strata(axis=axis, names=tuple(names[int(q)] for q in used), member=member.astype(np.int64))


def _metric(per_user: pd.DataFrame, users: NDArray[np.int64], metric: str, filtered: bool) -> float:
    ranks = per_user["rank_filtered" if filtered else "rank_unfiltered"].to_numpy()[users]
    cutoff = metric.partition("@")[2]
    found = metrics_from_ranks(ranks, (int(cutoff),) if cutoff.isdigit() else ())
    if metric not in found:
        raise UserError(f"unknown metric {metric!r}; give hr@K, ndcg@K, mrr@K or mrr, such as 'ndcg@10'")
    return found[metric]


def _check_same_users(tables: Sequence[pd.DataFrame], strata: Strata) -> None:
    if not tables:
        raise UserError("the arms share no seed; compare runs of the same seeds")
    first = tables[0]
    for table in tables:
        if len(table) != strata.member.size:
            raise UserError(
                f"a run has {len(table):,} users and the strata {strata.member.size:,}; use runs on the same data"
            )
        for column in ("user", "target"):
            if not np.array_equal(table[column].to_numpy(), first[column].to_numpy()):
                raise UserError(
                    f"two runs list different values of {column!r}; compare runs on the same data and split"
                )
