"""Are the probabilities that the scores stand for true? As trained, and fitted.

    p_i    = (1 - u) exp(s_i / T) / sum_j exp(s_j / T) + u / V  over all V items, seen ones included              (6.7)
    NLL    = mean over users of -ln p_target                                                                        (b)
    H      = -sum_i p_i ln p_i                                                                                      (c)
    P@k    = sum of the k largest p: what the model itself gives for the target being among its k best              (d)
    ECE@k  = sum_b (n_b / N) |mean P@k - share of hits@k|  over bins b of users                                     (e)
    floor  = (1 / N) sum_b sqrt((2 / pi) sum_{u in b} P@k (1 - P@k))                                                (f)

T = 1 and u = 0 is the softmax that the model was trained as; ``probability`` fits them. The bins of (e) hold equal
numbers of users as far as ties allow, in the order of P@k (quantile edges, ties together). hit@k is rank <= k, ties
against the target, so ECE@1 is the usual top-label calibration error and ECE@10 that of the project's usual metric. (f)
is what (e) would be on average if P@k were true (normal approximation to the hits of a bin): an ECE is never 0 with
finitely many users, and bootstrap intervals share that excess. The order by score, and so every rank, is the same for
all T and u.

Source: Guo et al., On Calibration of Modern Neural Networks (2017); equal-mass bins: Nguyen and O'Connor (2015).
Shapes: N users, V items, D state width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recbft.evaluation.confidence import bootstrap, interval
from recbft.evaluation.probability import Calibration
from recbft.evaluation.score_blocks import align, score_block
from recbft.evaluation.strata import quantile_edges
from recbft.models.contract import ItemTable

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
NUM_BINS = 10
COPIES = 4  # of a block of scores that are alive at once
CACHED_SCORES = 1_000_000  # a block of so many stays in a processor's cache from one step to the next


class Predicted(NamedTuple):
    """What each user's distribution (6.7) says, (N,) each, float64."""

    nll: FloatArray  # -ln p_target
    entropy: FloatArray  # (c), in nats, between 0 and ln V
    top: dict[int, FloatArray]  # k -> (d)


def predicted(
    states: Tensor,
    table: ItemTable,
    targets: IntArray,
    *,
    calibrations: Sequence[Calibration],
    ks: Sequence[int],
    memory_mb: float,
) -> list[Predicted]:
    """Equations (6.7) and (b) to (d) user by user, once for each T and u.

    Args:
        states: (N, D).
        targets: item index per user, (N,).
        ks: cut-offs of (d); a k beyond the catalogue takes all of it.
        memory_mb: bound on the scores that are alive at a time; at least one user's are.
    """
    found: list[list[Tensor]] = [[] for _ in calibrations]
    for scores, own in _rows(states, table, targets, memory_mb):
        best = scores.topk(min(max(ks), scores.shape[1]), dim=1).indices
        for (temperature, lapse), parts in zip(calibrations, found, strict=True):
            z = scores / temperature
            log_p = z.sub_(z.logsumexp(dim=1, keepdim=True))
            if lapse > 0:
                even = torch.full((), math.log(lapse) - math.log(scores.shape[1]), dtype=z.dtype, device=z.device)
                log_p = torch.logaddexp(log_p.add_(math.log1p(-lapse)), even)
            p = log_p.exp()
            entropy = -torch.linalg.vecdot(p, log_p).clamp(max=0)
            parts.append(torch.cat([-log_p.gather(1, own), entropy[:, None], p.gather(1, best)], dim=1))
    # Summed on the CPU: on a GPU a running sum has no fixed order, and PyTorch refuses it where one is asked for.
    return [_predicted(torch.cat(parts).cpu(), ks) for parts in found]


def calibration(
    probability: FloatArray, hit: NDArray[np.bool_], *, bins: int = NUM_BINS, samples: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """Equations (e) and (f) and the reliability diagram.

    Args:
        probability: P@k of each user, (N,), in [0, 1].
        hit: hit@k, (N,).
        samples, seed: of the bootstrap over users, which keeps the bins.

    Returns:
        ece, interval (95 %), floor, mean_probability, hit_rate, and bins: a list of {probability, hit_rate, num_users}.
    """
    edges = quantile_edges(probability, bins)
    _, member = np.unique(np.searchsorted(edges, probability, side="left"), return_inverse=True)
    number = np.bincount(member)
    mean, rate = (np.bincount(member, weights=w) / number for w in (probability, hit))
    spread = np.bincount(member, weights=probability * (1 - probability))
    order = np.argsort(member, kind="stable")
    gap = (probability - hit)[order]
    first = np.concatenate([[0], np.cumsum(number)[:-1]])

    def ece(weights: IntArray) -> FloatArray:
        ordered = weights[:, order]
        sums: FloatArray = np.abs(np.add.reduceat(ordered * gap, first, axis=1)).sum(axis=1) / ordered.sum(axis=1)
        return sums

    return {
        "ece": float(ece(np.ones((1, hit.size), np.int64))[0]),
        "interval": interval(bootstrap(ece, hit.size, samples=samples, seed=seed), hit.size),
        "floor": float(np.sqrt(2 / np.pi * spread).sum() / hit.size),
        "mean_probability": float(probability.mean()),
        "hit_rate": float(hit.mean()),
        "bins": [
            {"probability": float(p), "hit_rate": float(h), "num_users": int(n)}
            for p, h, n in zip(mean, rate, number, strict=True)
        ],
    }


def _predicted(columns: Tensor, ks: Sequence[int]) -> Predicted:
    """From -ln p_target, (c) and the largest p in falling order, user by user, (N, 2 + max k)."""
    nll, entropy = columns[:, :2].double().T.contiguous().numpy()
    top = columns[:, 2:].cumsum(dim=1).clamp(max=1).double()
    return Predicted(nll, entropy, {k: top[:, min(k, top.shape[1]) - 1].contiguous().numpy() for k in ks})


def _rows(states: Tensor, table: ItemTable, targets: IntArray, memory_mb: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores of some users for all items, (n, V), to be overwritten at will, and their targets' columns, (n, 1)."""
    states, candidates = align(states, table)
    num_items = len(candidates.weight)
    fitting = min(CACHED_SCORES, int(memory_mb * 2**20) // (COPIES * states.element_size()))
    at_once = max(1, min(len(states), fitting // num_items))
    own = torch.from_numpy(targets - 1).to(states.device)[:, None]
    candidates = candidates.for_blocks(len(states), at_once)
    room = states.new_empty(at_once * num_items)
    for first in range(0, len(states), at_once):
        chunk = slice(first, first + at_once)
        yield score_block(states[chunk], candidates, slice(0, num_items), room), own[chunk]
