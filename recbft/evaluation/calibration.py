"""Are the probabilities that the scores stand for true? Softmax over the catalogue, before and after one temperature.

    p_i    = exp(s_i / T) / sum_j exp(s_j / T)  over all V items, seen ones included; T = 1: as the model has it    (1)
    NLL    = mean over users of -ln p_target                                                                        (2)
    T*     = argmin of (2) on validation; in b = 1 / T it is convex, with slope  mean of (E_p[s] - s_target)        (3)
    P@k    = sum of the k largest p: what the model itself gives for the target being among its k best              (4)
    ECE@k  = sum_b (n_b / N) |mean P@k - share of hits@k|  over bins b of users                                     (5)
    floor  = (1 / N) sum_b sqrt((2 / pi) sum_{u in b} P@k (1 - P@k))                                                (6)

The bins of (5) hold equal numbers of users as far as ties allow, in the order of P@k (quantile edges, ties together).
hit@k is rank <= k, ties against the target, so ECE@1 is the usual top-label calibration error and ECE@10 that of the
project's usual metric. (6) is what (5) would be on average if P@k were true (normal approximation to the hits of a
bin): an ECE is never 0 with finitely many users, and bootstrap intervals share that excess. The ordering by score, and
so every rank, is the same for all T.

Source: Guo et al., On Calibration of Modern Neural Networks (2017); equal-mass bins: Nguyen and O'Connor (2015).
Shapes: N users, V items, D state width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recbft.evaluation.confidence import bootstrap, interval
from recbft.evaluation.score_blocks import align, score_block
from recbft.evaluation.strata import quantile_edges
from recbft.models.contract import ItemTable

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
NUM_BINS = 10
HOTTEST = 2.0**10  # T is sought between this and its inverse
TOLERANCE = 1e-6  # of the temperature, relative
NEAR = 0.01  # a temperature within this share of the hottest or coldest stands for what lies beyond
COPIES = 5  # of a block of scores that are alive at once
CACHED_SCORES = 1_000_000  # a block of so many stays in a processor's cache from one step to the next


class Predicted(NamedTuple):
    """What each user's distribution (1) says, (N,) each, float64."""

    nll: FloatArray  # -ln p_target
    entropy: FloatArray  # in nats, between 0 and ln V
    top: dict[int, FloatArray]  # k -> (4)


class Temperature(NamedTuple):
    """T* of (3); ``at_bound``: the likelihood still rises at the end of the range that is searched, which is given."""

    value: float
    at_bound: bool


def predicted(
    states: Tensor,
    table: ItemTable,
    targets: IntArray,
    *,
    temperatures: Sequence[float],
    ks: Sequence[int],
    memory_mb: float,
) -> list[Predicted]:
    """Equations (1), (2) and (4) user by user, at each temperature.

    Args:
        states: (N, D).
        targets: item index per user, (N,).
        ks: cut-offs of (4); a k beyond the catalogue takes all of it.
        memory_mb: bound on the scores that are alive at a time; at least one user's are.
    """
    found: list[list[Tensor]] = [[] for _ in temperatures]
    for scores, own in _rows(states, table, targets, memory_mb):
        best = scores.topk(min(max(ks), scores.shape[1]), dim=1).values
        target = scores.gather(1, own)
        for temperature, parts in zip(temperatures, found, strict=True):
            z = scores / temperature
            total = z.logsumexp(dim=1, keepdim=True)
            nll = total - target / temperature
            top = (best / temperature - total).exp().cumsum(dim=1).clamp(max=1)
            entropy = total[:, 0] - torch.linalg.vecdot((z - total).exp_(), z)
            columns = [nll[:, 0], entropy.clamp(min=0), *(top[:, min(k, top.shape[1]) - 1] for k in ks)]
            parts.append(torch.stack(columns).double())
    joined = [torch.cat(parts, dim=1).cpu().numpy() for parts in found]
    return [Predicted(nll, entropy, dict(zip(ks, top, strict=True))) for nll, entropy, *top in joined]


def fit_temperature(states: Tensor, table: ItemTable, targets: IntArray, *, memory_mb: float) -> Temperature:
    """Equation (3), from its slope and curvature over all users."""

    def slope(b: float) -> tuple[float, float]:
        first = second = 0.0
        for scores, own in _rows(states, table, targets, memory_mb):
            p = torch.softmax(scores * b, dim=1)
            mean = torch.linalg.vecdot(p, scores)
            first += float((mean - scores.gather(1, own)[:, 0]).double().sum())
            second += float(torch.linalg.vecdot(p, scores.sub_(mean[:, None]).square_()).double().sum())
        return first / len(targets), second / len(targets)

    return solve_temperature(slope)


def solve_temperature(slope: Callable[[float], tuple[float, float]]) -> Temperature:
    """1 / b where a rising function of b > 0 crosses zero: Newton's method in x = ln b, halving where it is no help.

    Args:
        slope: b -> the function's value and its derivative.

    >>> found = solve_temperature(lambda b: (b - 0.5, 1.0))
    >>> round(found.value, 6), found.at_bound
    (2.0, False)
    """
    low, high = -math.log(HOTTEST), math.log(HOTTEST)
    x, step = 0.0, high
    while True:
        value, rise = slope(math.exp(x))
        if value == 0 or abs(step) < TOLERANCE:
            return Temperature(math.exp(-x), False)
        low, high = (x, high) if value < 0 else (low, x)
        if high < NEAR - math.log(HOTTEST) or low > math.log(HOTTEST) - NEAR:
            return Temperature(HOTTEST if high < 0 else 1 / HOTTEST, True)
        newton = -value / (rise * math.exp(x)) if rise > 0 else math.inf
        halving = not low < x + newton < high or abs(newton) > abs(step) / 2
        step = (low + high) / 2 - x if halving else newton
        x += step


def calibration(
    probability: FloatArray, hit: NDArray[np.bool_], *, bins: int = NUM_BINS, samples: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """Equations (5) and (6) and the reliability diagram.

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
        "interval": interval(bootstrap(ece, hit.size, samples=samples, seed=seed)),
        "floor": float(np.sqrt(2 / np.pi * spread).sum() / hit.size),
        "mean_probability": float(probability.mean()),
        "hit_rate": float(hit.mean()),
        "bins": [
            {"probability": float(p), "hit_rate": float(h), "num_users": int(n)}
            for p, h, n in zip(mean, rate, number, strict=True)
        ],
    }


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
