"""Metrics of a full ranking: every one a function of the targets' ranks alone.

    HR@k = [rank <= k]      NDCG@k = [rank <= k] / log2(rank + 1)      MRR = 1 / rank      MRR@k = [rank <= k] / rank

Each is a value per user; the metric reported is the mean over users. MRR without a k is not truncated.

Shapes: N users.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recbft.config.fields import check_range
from recbft.errors import UserError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

KS = (5, 10, 20)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Full ranking of the target among all items."""

    filter_seen: bool = False  # which setting validation and the headline metrics use; both are always recorded
    ks: tuple[int, ...] = KS  # the K of HR@K, NDCG@K and MRR@K
    memory_mb: int = 256  # bound on the score buffers of a ranking; of seeds together on a GPU four are ranked at once

    def __post_init__(self) -> None:
        if not self.ks:
            raise UserError("ks is empty; give at least one cut-off, such as 10")
        for k in self.ks:
            check_range("ks", k, at_least=1)
        if len(set(self.ks)) < len(self.ks):
            raise UserError(f"ks is {list(self.ks)}; give each cut-off once")
        check_range("memory_mb", self.memory_mb, at_least=1)


def hit_rate(ranks: IntArray, k: int) -> FloatArray:
    """1 where the target is among the first ``k``, (N,)."""
    return (ranks <= k).astype(np.float64)


def ndcg(ranks: IntArray, k: int) -> FloatArray:
    """Discounted gain of the one target, 1 at rank 1 and 0 beyond ``k``, (N,)."""
    return np.where(ranks <= k, 1 / np.log2(ranks + 1.0), 0.0)


def reciprocal_rank(ranks: IntArray, k: int | None = None) -> FloatArray:
    """1 / rank, 0 beyond ``k`` where one is given, (N,)."""
    values = 1.0 / ranks
    return values if k is None else np.where(ranks <= k, values, 0.0)


def cutoff(name: str) -> int | None:
    """The k of a metric's name, None where it has none.

    >>> cutoff("ndcg@10"), cutoff("mrr")
    (10, None)
    """
    k = name.partition("@")[2]
    return int(k) if k else None


# By name: what a metric is of each rank and k, and in words.
METRICS: dict[str, tuple[Callable[[IntArray, int], FloatArray], str]] = {
    "hr": (hit_rate, "share of users whose target is among the first {k}"),
    "ndcg": (ndcg, "1 where the target comes first, 0.63 where second, less and less down to place {k}, then 0"),
    "mrr": (reciprocal_rank, "1 / rank of the target, and 0 beyond place {k}"),
}
METRIC = rf"({'|'.join(METRICS)})@[1-9][0-9]*|mrr"  # a metric's name, as a regular expression


def meaning(name: str) -> str:
    """What a metric's name stands for, as a phrase for a caption.

    >>> meaning("hr@10"), meaning("mrr")
    ('HR@10: share of users whose target is among the first 10', 'MRR: 1 / rank of the target')
    """
    k = cutoff(name)
    if k is None:
        return f"{name.upper()}: 1 / rank of the target"
    return f"{name.upper()}: {METRICS[name.partition('@')[0]][1].format(k=k)}"


def check_metric(name: str) -> None:
    """UserError unless this is a metric's name."""
    if not re.fullmatch(METRIC, name):
        names = ", ".join(f"{one}@K" for one in METRICS)
        raise UserError(f"unknown metric {name!r}; give {names} or mrr, such as 'ndcg@10'")


def values_from_ranks(ranks: IntArray, ks: Sequence[int] = KS) -> dict[str, FloatArray]:
    """Every metric's value per user, by name ("hr@10", "ndcg@10", "mrr@10", "mrr")."""
    assert ranks.size == 0 or ranks.min() >= 1, "the best rank is 1"
    values = {f"{name}@{k}": of(ranks, k) for name, (of, _) in METRICS.items() for k in ks}
    return values | {"mrr": reciprocal_rank(ranks)}


def one_from_ranks(ranks: ArrayLike, metric: str) -> FloatArray:
    """A metric of each rank by its name, in the ranks' shape; UserError where there is none of this name.

    >>> one_from_ranks([[1, 3], [11, 2]], "hr@10").tolist()
    [[1.0, 1.0], [0.0, 1.0]]
    """
    check_metric(metric)
    k = cutoff(metric)
    return values_from_ranks(np.asarray(ranks, dtype=np.int64), () if k is None else (k,))[metric]


def metrics_from_ranks(ranks: IntArray, ks: Sequence[int] = KS) -> dict[str, float]:
    """Every metric's mean over users, by name.

    Raises:
        UserError: there is no user.
    """
    if ranks.size == 0:
        raise UserError("no user to evaluate: the data set has no user with at least 3 events")
    return {name: float(values.mean()) for name, values in values_from_ranks(ranks, ks).items()}
