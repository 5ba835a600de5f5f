"""Metrics of a full ranking, functions of the targets' ranks alone, and how a number was made, kept beside it.

    HR@k = [rank <= k]      NDCG@k = [rank <= k] / log2(rank + 1)      MRR = 1 / rank      MRR@k = [rank <= k] / rank

Each is a value per target. A user's value is the mean over the user's targets, n of them, and the metric reported is
the mean over users (1). MRR without a k is not truncated. Where all targets of a user are ranked in one list, that list
is judged as a whole too:

    RECALL@k = #{targets : rank <= k} / min(k, n)                                                                (2)
    LIST_NDCG@k = sum of NDCG@k over the targets / sum_{j=1..min(k, n)} 1 / log2(j + 1)                          (3)

Both are 1 where the list begins with targets alone, as far as there are any; of one target they are HR@k and NDCG@k. By
(1) HR@k is the other recall, divided by n.

Source: Liang et al., Variational Autoencoders for Collaborative Filtering (2018), section 4.2, for (2) and (3).
Shapes: N targets, U users.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recbft.config.fields import check_range
from recbft.datasets.dataset import Dataset
from recbft.datasets.split import LEAVE_ONE_OUT
from recbft.datasets.split import counts_lines as split_lines
from recbft.errors import UserError
from recbft.system import recbft_version
from recbft.system.files import plain

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

KS = (5, 10, 20)
RANKING = "full: the target among all items of the vocabulary"
TIES = "against the target: rank = 1 + number of greater scores + number of other equal scores"
SETTINGS = {"unfiltered": "all items", "filtered": "seen masked"}


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


def recall(ranks: IntArray, k: int, owner: IntArray | None) -> FloatArray:
    """Equation (2), (..., N) -> (..., U); ``owner`` as in ``over_users``."""
    return _of_lists(hit_rate(ranks, k), np.ones(k), owner)


def list_ndcg(ranks: IntArray, k: int, owner: IntArray | None) -> FloatArray:
    """Equation (3), (..., N) -> (..., U); ``owner`` as in ``over_users``."""
    return _of_lists(ndcg(ranks, k), 1 / np.log2(np.arange(2.0, k + 2)), owner)


def _of_lists(gain: FloatArray, ideal: FloatArray, owner: IntArray | None) -> FloatArray:
    """Sum of the gains of a user's targets, divided by that of the best list; ``ideal`` has the gain of each place."""
    if owner is None:
        return gain
    size = np.bincount(owner)
    best: FloatArray = np.cumsum(ideal)[np.minimum(size, ideal.size) - 1]
    return over_users(gain, owner) * (size / best)


def over_users(values: FloatArray, owner: IntArray | None) -> FloatArray:
    """Equation (1): the mean of each user's values, (..., N) -> (..., U).

    Args:
        owner: each target's user, 0..U-1 in order, (N,); None where each user has one.
    """
    if owner is None:
        return values
    first = np.flatnonzero(np.append(True, owner[1:] != owner[:-1]))
    summed: FloatArray = np.add.reduceat(values, first, axis=-1)
    return summed / np.bincount(owner)


def owner_of(users: ArrayLike) -> IntArray | None:
    """``owner`` of ``over_users`` for users by their ids, (N,), those of one user side by side."""
    ids = np.asarray(users)
    is_next = ids[1:] == ids[:-1]
    return np.append(0, np.cumsum(~is_next)).astype(np.int64) if is_next.any() else None


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
LIST_METRICS: dict[str, tuple[Callable[[IntArray, int, IntArray | None], FloatArray], str]] = {
    "recall": (recall, "share of a user's targets, or of {k} where there are more, among the first {k}"),
    "list_ndcg": (list_ndcg, "gain of the first {k} places, which is less from place to place, against the best list"),
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
    return f"{name.upper()}: {(METRICS | LIST_METRICS)[name.partition('@')[0]][1].format(k=k)}"


def check_metric(name: str) -> None:
    """UserError unless this is a metric's name."""
    if not re.fullmatch(rf"{METRIC}|({'|'.join(LIST_METRICS)})@[1-9][0-9]*", name):
        names = ", ".join(f"{one}@K" for one in (*METRICS, *LIST_METRICS))
        raise UserError(f"unknown metric {name!r}; give {names} or mrr, such as 'ndcg@10'")


def values_from_ranks(ranks: IntArray, ks: Sequence[int] = KS) -> dict[str, FloatArray]:
    """Every metric's value per target, by name ("hr@10", "ndcg@10", "mrr@10", "mrr")."""
    assert ranks.size == 0 or ranks.min() >= 1, "the best rank is 1"
    values = {f"{name}@{k}": of(ranks, k) for name, (of, _) in METRICS.items() for k in ks}
    return values | {"mrr": reciprocal_rank(ranks)}


def one_from_ranks(ranks: ArrayLike, metric: str, owner: IntArray | None = None) -> FloatArray:
    """A metric of each user by its name, (..., N) -> (..., U); UserError where there is none of this name.

    Args:
        owner: as in ``over_users``.

    >>> one_from_ranks([[1, 3], [11, 2]], "hr@10").tolist()
    [[1.0, 1.0], [0.0, 1.0]]
    """
    check_metric(metric)
    k, found = cutoff(metric), np.asarray(ranks, dtype=np.int64)
    of_list = LIST_METRICS.get(metric.partition("@")[0])
    if of_list is not None and k is not None:
        return of_list[0](found, k, owner)
    return over_users(values_from_ranks(found, () if k is None else (k,))[metric], owner)


def metrics_from_ranks(
    ranks: IntArray, ks: Sequence[int] = KS, owner: IntArray | None = None, *, of_lists: bool = False
) -> dict[str, float]:
    """Every metric's mean over users, by name.

    Args:
        owner: as in ``over_users``.
        of_lists: (2) and (3) too, for targets that are ranked in one list of each user.

    Raises:
        UserError: there is no user.
    """
    if ranks.size == 0:
        raise UserError("no user to evaluate: the data set has no user with at least 3 events")
    values = {name: over_users(each, owner) for name, each in values_from_ranks(ranks, ks).items()}
    if of_lists:
        values |= {f"{name}@{k}": of(ranks, k, owner) for name, (of, _) in LIST_METRICS.items() for k in ks}
    return {name: float(each.mean()) for name, each in values.items()}


def protocol(
    dataset: Dataset,
    *,
    part: str,
    filter_seen: bool,
    max_length: int,
    seed: int,
    config: Mapping[str, Any],
    target_time: str = "no times are read",
    begun_from: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All that a reader needs to make a number again, ready for JSON.

    Args:
        part: "validation" or "test".
        filter_seen: whether the headline masks what the user has seen.
        max_length: events of a history that the model reads.
        config: the run's configuration as a plain mapping.
        target_time: whether the model is shown the time of the target.
        begun_from: the older run whose weights training began from, by ``run``, ``weights``, ``content_hash``,
            ``kept`` and ``known_items``; None, and no entry, where it began from scratch.
    """
    return {
        "dataset": dataset.name,
        "users": dataset.num_users,
        **({} if dataset.num_tested == dataset.num_users else {"users_tested": dataset.num_tested}),
        "items": dataset.num_items,
        "events": dataset.num_events,
        **dataset.hashes,
        "target_hash": dataset.target_hash,
        "preparation": dict(dataset.preparation),
        "split": dataset.split.text,
        **({} if dataset.split.counts is None else {"split_counts": dict(dataset.split.counts)}),
        "part": part,
        "ranking": RANKING,
        "ties": TIES,
        "filter_seen": filter_seen,
        "max_length": max_length,
        "target_time": target_time,
        "seed": seed,
        "recbft_version": recbft_version(),
        "config": dict(config),
        **({} if begun_from is None else {"begun_from": dict(begun_from)}),
    }


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of a configuration, whatever the order of its keys.

    What is None is left out: a later version with one more option, not set, has the same hash.
    """
    text = json.dumps(_set(config), sort_keys=True, separators=(",", ":"), default=plain)
    return hashlib.sha256(text.encode()).hexdigest()


def _set(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _set(value) if isinstance(value, Mapping) else value for key, value in config.items() if value is not None
    }


def headline_setting(filter_seen: bool) -> str:
    """The key of ``SETTINGS`` that ``filter_seen`` stands for: what comes first of the two that are always recorded."""
    return "filtered" if filter_seen else "unfiltered"


def protocol_lines(protocol: Mapping[str, Any]) -> list[str]:
    """The protocol as two lines of text, more of another split, and one of older weights or of two joined models."""
    p = protocol
    headline = SETTINGS[headline_setting(p["filter_seen"])]
    by = p.get("split", LEAVE_ONE_OUT).partition(":")[0]
    targets, them = (f"target of {by}", "it") if by == "leave-one-out" else (f"targets of {by}", "them")
    model = " ".join(str(p["config"][key]) for key in ("model", "arm") if p["config"].get(key))
    return [
        f"data: {p['dataset']}, {counted_users(p)}, {p['items']:,} items, {p['events']:,} events, "
        f"content {p['content_hash'][:12]}, targets {p['target_hash'][:12]}",
        f"protocol: {p['part']} {targets} among all items, ties against {them}, headline {headline} "
        f"(filter_seen {str(p['filter_seen']).lower()}), max length {p['max_length']}, seed {p['seed']}, "
        f"recbft {p['recbft_version']}, {model + ', ' if model else ''}config {config_hash(p['config'])[:12]}",
        *([f"split: {p['split']}", *split_lines(p["split_counts"])] if p.get("split_counts") else []),
        *([f"begun from {begun_from(p)}"] if p.get("begun_from") else []),
        *([f"joined from {joined_from(p)}"] if p.get("joined") else []),
    ]


def counted_users(protocol: Mapping[str, Any]) -> str:
    """The users of a protocol, and how many of them are tested where not all are, in words."""
    tested = f" ({protocol['users_tested']:,} tested)" if "users_tested" in protocol else ""
    return f"{protocol['users']:,} users{tested}"


def begun_from(protocol: Mapping[str, Any]) -> str:
    """The older run of a protocol that has one, in words."""
    older = protocol["begun_from"]
    return (
        f"{older['kept']:g} of the weights of {older['run']} ({older['weights'][:12]}, trained on content "
        f"{older['content_hash'][:12]}), which knew {older['known_items']:,} of the {protocol['items']:,} items"
        + (" and tracked no precision" if older.get("fresh_precision") else "")
    )


def joined_from(protocol: Mapping[str, Any]) -> str:
    """The runs of a protocol that a join was made of, in words."""
    joined = protocol["joined"]
    runs = " and ".join(f"{each['run']} ({each['weights'][:12]})" for each in joined["runs"])
    return f"{runs}, weights by {joined['targets']:,} validation targets"
