"""How new items, which have no training event, stand beside known ones, and at whose cost.

A model that lists new items may do so at the cost of known ones, and a constant added to the scores of all new items
does that without knowing anything. So each figure stands beside what the constant b does:

    s_ui + b [i is new]                                                                                        (1)

    as it is    b = 0              never listed    b = -inf: new items come last, as of a model that knows none
    new items' gain                HR@k of new targets as it is; never listed it is 0
    known items' loss              a metric of known targets as it is, less the same with new items never listed  (2)
    sweep                          b at which new items hold a share q of all users' first k places, q from 0 to 1:
                                   the q-quantile, over users and j = 1..k, of known_(k-j+1) - new_(j), the scores of
                                   either kind of item in falling order                                        (3)

A gain that is worth more than a constant lies above the curve that the sweep draws: more hits of new targets for equal
hits of known ones. Whether a model knows one new item from another shows among new items alone, where b says nothing:

    AUC     share of the other new items that score less than the target, those that tie counted half          (4)
    HR@k    target among the first k of the new items; by chance k / (number of new items)

Ties count against the target, as in all ranks; metrics of several targets of a user are averaged first (``metrics``).

Shapes: N targets, n of them in a block, V items, B values of b.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recbft.datasets.dataset import Dataset
from recbft.datasets.split import View
from recbft.evaluation.metrics import hit_rate, ndcg, over_users, owner_of
from recbft.evaluation.paired import bootstrap_interval, compare_users
from recbft.evaluation.score_blocks import Candidates, Excluded, NanWatch, align, score_block, user_blocks
from recbft.evaluation.views import Part, evaluation_mode, seen_of, some_users, states_of_view, view_of
from recbft.models.contract import SequenceModel

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
K = 10
SHARES = tuple(n / 20 for n in range(21))  # q of (3)
SAMPLES = 2000  # of the bootstrap over users
JUDGED_SCORES = 500_000_000  # so many users by items are looked at,
JUDGED_USERS = 1000  # or so many users where that is more


def new_items(
    model: SequenceModel,
    dataset: Dataset,
    part: Part = "test",
    *,
    filter_seen: bool = False,
    users: IntArray | None = None,
    memory_mb: float = 256.0,
) -> dict[str, Any] | None:
    """The figures above, ready for JSON; None where no target is of a new item.

    Args:
        filter_seen: mask what a user has seen.
        users: row numbers of users; all unless given, or some, drawn from a fixed seed, where users by items are more
            than ``JUDGED_SCORES``.
    """
    is_new = dataset.training_counts == 0
    is_new[0] = False
    view = view_of(dataset, part)
    number = view.owner if view.owner is not None else np.arange(len(view.target))
    if users is None:
        users = some_users(int(number[-1]) + 1, dataset.num_items, scores=JUDGED_SCORES, at_least=JUDGED_USERS)
    view = view.rows(np.flatnonzero(np.isin(number, users)))
    of_new = is_new[view.target]
    if not of_new.any():
        return None
    with torch.inference_mode(), evaluation_mode(model):
        table = model.item_table()
        states, _ = states_of_view(model, dataset, view, table.weight.device)
        states, candidates = align(states, table)
    scores = ShiftedScores(states, candidates, view, is_new[1:], filter_seen, memory_mb)
    constants = scores.constants()
    ranks, among_new, auc = scores.ranks(np.concatenate([[-np.inf, 0.0], constants]))
    scores.watch.close(dataset.user_ids[view.user])
    rows = {"all": np.arange(of_new.size), "known": np.flatnonzero(~of_new), "new": np.flatnonzero(of_new)}
    owners = {name: owner_of(view.user[which]) for name, which in rows.items()}

    def values(name: str, at: int) -> dict[str, FloatArray]:
        own = ranks[at, rows[name]]
        return {f"{key}@{K}": over_users(of(own, K), owners[name]) for key, of in (("hr", hit_rate), ("ndcg", ndcg))}

    def levels(at: int) -> dict[str, dict[str, float] | None]:
        return {
            name: {key: float(each.mean()) for key, each in values(name, at).items()} if rows[name].size else None
            for name in rows
        }

    num_new = int(is_new.sum())
    return {
        "part": part,
        "k": K,
        "filter_seen": filter_seen,
        "num_users": int(np.unique(view.user).size),
        "num_new_items": num_new,
        "num_known_items": dataset.num_items - num_new,
        "targets": {name: int(which.size) for name, which in rows.items()},
        "users": {name: int(np.unique(view.user[which]).size) for name, which in rows.items()},
        "as_is": levels(1),
        "never_listed": levels(0),
        "known_loss": _differences(values("known", 0), values("known", 1)) if rows["known"].size else None,
        "all_gain": _differences(values("all", 0), values("all", 1)),
        "among_new": {
            **_mean("auc", over_users(auc, owners["new"])),
            **_mean("hr", over_users(hit_rate(among_new, K), owners["new"])),
            "hr_by_chance": min(1.0, K / num_new),
        },
        "sweep": [
            {"share": share, "constant": float(b), **levels(at)}
            for at, (share, b) in enumerate(zip(SHARES, constants, strict=True), start=2)
        ],
    }


class ShiftedScores:
    """Scores of the rows of a view, in blocks of users by all items, to some of which a constant is added.

    Args:
        states: of the rows, (N, D).
        is_new: the items that the constant is for, (V,).
        filter_seen: mask what a user has seen.
    """

    def __init__(
        self,
        states: Tensor,
        candidates: Candidates,
        view: View,
        is_new: NDArray[np.bool_],
        filter_seen: bool,
        memory_mb: float,
    ) -> None:
        self.states, self.candidates, self.view = states, candidates, view
        self.watch = NanWatch(states, candidates)
        num_items, device = len(candidates.weight), states.device
        items, offsets = seen_of(view) if filter_seen else (None, None)
        self.excluded = Excluded.of(items, offsets, len(states), num_items)
        self.columns = [torch.from_numpy(np.flatnonzero(which)).to(device) for which in (~is_new, is_new)]
        self.of_new = is_new[view.target - 1]
        # Of a block there are four more at a time: both kinds of items apart, and sorted.
        rows, _, _ = user_blocks(states, num_items, memory_mb / 5)
        self.chunks = [slice(first, min(first + rows, len(states))) for first in range(0, len(states), rows)]

    def block(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of known and of new items, (n, .) each, -inf where masked, and the target's, (n, 1)."""
        every = slice(0, len(self.candidates.weight))
        room = self.states.new_empty((rows.stop - rows.start + 64) * every.stop)
        block = score_block(self.states[rows], self.candidates, every, room)
        self.watch.look(block, rows)
        target = torch.from_numpy(self.view.target[rows] - 1).to(block.device)[:, None]
        own = block.gather(1, target)
        self.excluded.mask(block, rows, every)
        block.scatter_(1, target, own)
        known, new = (block.index_select(1, columns) for columns in self.columns)
        return known, new, own

    def constants(self) -> FloatArray:
        """(3) for each share of ``SHARES``."""
        lacking = []
        for rows in self.chunks:
            known, new, _ = self.block(rows)
            k = min(K, known.shape[1], new.shape[1])
            lowest, best = known.topk(k, dim=1).values.flip(1), new.topk(k, dim=1).values
            lacking.append((lowest - best).double().flatten().cpu().numpy())
        found = np.concatenate(lacking)
        found = found[np.isfinite(found)]
        return np.quantile(found, SHARES) if found.size else np.zeros(len(SHARES))

    def ranks(self, constants: FloatArray) -> tuple[IntArray, IntArray, FloatArray]:
        """Rank of each target with each b, (B, N); of the new ones their rank among new items, and (4)."""
        shift = torch.from_numpy(constants).to(self.states)
        ranks, among, auc = np.zeros((constants.size, len(self.states)), np.int64), [], []
        for rows in self.chunks:
            known, new, own = self.block(rows)
            is_new = torch.from_numpy(self.of_new[rows]).to(own.device)
            for which, same, other, sign in ((~is_new, known, new, -1), (is_new, new, known, 1)):
                if not bool(which.any()):
                    continue
                mine, theirs = own[which], other[which].sort(dim=1).values
                within = (same[which] >= mine).sum(1)
                above = theirs.shape[1] - torch.searchsorted(theirs, mine + sign * shift)  # of the other kind
                # What is never listed comes last, and no score is below none.
                above[:, shift == -torch.inf] = 0 if sign < 0 else len(self.candidates.weight)
                found = (within[:, None] + above).T.cpu().numpy()
                ranks[:, np.arange(rows.start, rows.stop)[which.cpu().numpy()]] = found
                if sign > 0:
                    inside = same[which]
                    others = (inside > -torch.inf).sum(1) - 1
                    ties = (inside == mine).sum(1) - 1
                    below = (others + 1 - within + 0.5 * ties).double() / others.clamp(min=1)
                    among.append(within.cpu().numpy())
                    auc.append(torch.where(others > 0, below, 0.5).cpu().numpy())
        return ranks, np.concatenate(among), np.concatenate(auc)


def _differences(before: dict[str, FloatArray], after: dict[str, FloatArray]) -> dict[str, Any] | None:
    """Each metric's difference, paired by user; None of one user."""
    if next(iter(before.values())).size < 2:
        return None
    return {key: asdict(compare_users(before[key], after[key], samples=SAMPLES)) for key in before}


def _mean(name: str, values: FloatArray) -> dict[str, Any]:
    interval = bootstrap_interval(values, samples=SAMPLES) if values.size > 1 else None
    return {name: float(values.mean()), f"{name}_interval": interval}
