"""Does a confidence tell which users' lists hold the target? Ranked by it, ties counted exactly.

    AUROC    P(c_hit > c_miss) + P(c_hit = c_miss) / 2 over pairs of a hit and a miss (Mann-Whitney)        (a)
    risk     r(i) = share of misses among the i most confident of N users, coverage i / N                   (b)
    AURC     (1 / N) sum_{i=1..N} r(i), the area under the risk-coverage curve                              (c)
    excess   AURC less that of the best order there could be: all hits before all misses                    (d)

Among users of equal confidence the order is left to chance and (b) is its expectation, so a group of n users with e
misses after N_b users with E_b misses adds to the sum of (c)

    sum_{i=1..n} (E_b + i e/n) / (N_b + i) = e + (E_b - N_b e/n) (H(N_b + n) - H(N_b)),  H(n) = 1 + ... + 1/n        (e)

A confidence that is the same for everybody has AUROC 1/2, and its AURC is the share of misses. Where all lists hit, or
none, there is nothing to tell apart and the AUROC is None. Intervals are bootstrap percentiles over users, 95 %; the
confidences of one call share their resamples, so that their differences are paired. They do not stand alone for a
verdict: where all but a few users share one confidence (a precision at its cap), most resamples of these few say the
same, however little they prove. A verdict asks the test of no order as well, with t_m the sizes of the groups

    z = (AUROC - 1/2) n_hit n_miss / sqrt( n_hit n_miss (N + 1 - sum_m (t_m^3 - t_m) / (N (N - 1))) / 12 )  (f)

Are the probabilities true? With P@k what a model gives for the target being among its k best (``probability``), and
hit@k for rank <= k, ties against the target,

    ECE@k  = sum_b (n_b / N) |mean P@k - share of hits@k|  over bins b of users                             (g)
    floor  = (1 / N) sum_b sqrt((2 / pi) sum_{u in b} P@k (1 - P@k))                                        (h)

The bins of (g) hold equal numbers of users as far as ties allow, in the order of P@k (quantile edges, ties together).
ECE@1 is the usual top-label calibration error, ECE@10 that of the project's usual metric. (h) is what (g) would be on
average if P@k were true (normal approximation to the hits of a bin): an ECE is never 0 with finitely many users, and
bootstrap intervals share that excess.

Source: Mann and Whitney (1947); Geifman and El-Yaniv, Selective Classification for Deep Neural Networks (2017);
Geifman, Uziel and El-Yaniv, Bias-Reduced Uncertainty Estimation (2019), for (c) and (d); Guo et al., On Calibration of
Modern Neural Networks (2017), and Nguyen and O'Connor (2015) for equal-mass bins.
Shapes: N users, R resamples, M groups of users of equal confidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recbft.evaluation.strata import quantile_edges

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
CURVE_POINTS = 100
NUM_BINS = 10
CELLS = 1_000_000  # of resampled users held at a time
LEVEL = 0.05  # of the test behind a verdict


class Ranking:
    """Users from the most to the least confident, those of equal confidence together.

    Args:
        confidence: (N,), no NaN.
        hit: (N,), True where the list holds the target.
    """

    def __init__(self, confidence: ArrayLike, hit: ArrayLike) -> None:
        values = np.asarray(confidence, dtype=np.float64)
        assert not np.isnan(values).any(), "a confidence is a number"
        self.order = np.argsort(-values, kind="stable")
        ordered = values[self.order]
        self.first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))  # (M,)
        self.hit = np.asarray(hit, dtype=bool)[self.order]
        everybody = np.ones((1, values.size), np.int64)
        self.area, self.risk_area = (float(found[0]) for found in self.areas(everybody))

    @property
    def num_distinct(self) -> int:
        """M."""
        return self.first.size

    @property
    def p(self) -> float:
        """Two-sided p of (f), normal approximation; 1 where there is nothing to tell apart."""
        N, hits = self.hit.size, int(self.hit.sum())
        sizes = np.diff(np.append(self.first, N)).astype(np.float64)
        pairs = float(hits * (N - hits))
        if not pairs or self.num_distinct == 1:
            return 1.0
        variance = pairs / 12 * (N + 1 - float((sizes**3 - sizes).sum()) / (N * (N - 1)))
        return math.erfc(abs(self.area - 0.5) * pairs / math.sqrt(2 * variance))

    def areas(self, weights: IntArray) -> tuple[FloatArray, FloatArray]:
        """AUROC (NaN where it is None) and AURC with user u counted ``weights[r, u]`` times: (R, N) -> (R,) twice."""
        users, hits = self._groups(weights)
        misses = users - hits
        after = misses.sum(axis=1, keepdims=True) - misses.cumsum(axis=1)  # misses of lower confidence
        pairs = hits.sum(axis=1) * misses.sum(axis=1)
        won = (hits * (after + misses / 2)).sum(axis=1)
        area = np.divide(won, pairs, out=np.full(len(won), np.nan), where=pairs > 0)  # (a)
        up_to, missed = users.cumsum(axis=1), misses.cumsum(axis=1)
        harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, up_to[:, -1].max() + 1))])
        share = np.divide(misses, users, out=np.zeros_like(missed), where=users > 0)
        before = missed - misses - (up_to - users) * share
        steps = harmonic[up_to.astype(np.int64)] - harmonic[(up_to - users).astype(np.int64)]
        return area, (misses + before * steps).sum(axis=1) / up_to[:, -1]  # (e), (c)

    def curve(self) -> dict[str, list[float]]:
        """Equation (b) at up to ``CURVE_POINTS`` even coverages, and at 1."""
        users, hits = self._groups(np.ones((1, self.hit.size), np.int64))
        N = self.hit.size
        count = np.unique(np.ceil(np.linspace(0, N, min(N, CURVE_POINTS) + 1)[1:]))
        misses = np.interp(count, np.append(0, users.cumsum()), np.append(0, (users - hits).cumsum()))
        return {"coverage": (count / N).tolist(), "risk": (misses / count).tolist()}

    def _groups(self, weights: IntArray) -> tuple[FloatArray, FloatArray]:
        """Users and hits of every group, (R, M)."""
        ordered = weights[:, self.order].astype(np.float64)
        return (
            np.add.reduceat(ordered, self.first, axis=1),
            np.add.reduceat(ordered * self.hit, self.first, axis=1),
        )


def compare_confidences(
    confidences: Mapping[str, FloatArray],
    hit: NDArray[np.bool_],
    *,
    reference: str | None = None,
    samples: int = 1000,
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """Every confidence's AUROC, AURC and curve, with intervals.

    Args:
        confidences: (N,) by name, higher is surer.
        hit: (N,).
        reference: a name among them; every other one's entry says how far the reference's areas lie above its own.
        samples, seed: of the bootstrap.

    Returns:
        By name: auroc, auroc_interval, aurc, aurc_interval, excess_aurc, num_distinct, verdict, curve, and (but for the
        reference) reference_above: {auroc, interval, aurc, aurc_interval}; an AURC is the better the lower it is.
    """
    rankings = {name: Ranking(values, hit) for name, values in confidences.items()}
    best = Ranking(hit, hit).risk_area
    drawn: dict[str, list[tuple[FloatArray, FloatArray]]] = {name: [] for name in rankings}
    for weights in resamples(hit.size, samples, seed):
        for name, ranking in rankings.items():
            drawn[name].append(ranking.areas(weights))
    areas = {name: [np.concatenate(part) for part in zip(*parts, strict=True)] for name, parts in drawn.items()}
    found: dict[str, dict[str, Any]] = {}
    for name, ranking in rankings.items():
        auroc = None if np.isnan(ranking.area) else ranking.area
        inside = interval(areas[name][0], hit.size)
        found[name] = {
            "auroc": auroc,
            "auroc_interval": inside,
            "aurc": ranking.risk_area,
            "aurc_interval": interval(areas[name][1], hit.size),
            "excess_aurc": ranking.risk_area - best,
            "num_distinct": ranking.num_distinct,
            "verdict": verdict(auroc, inside, ranking.num_distinct, ranking.p),
            "curve": ranking.curve(),
        }
        if reference is not None and name != reference:
            above = None if auroc is None else rankings[reference].area - auroc
            apart, risk_apart = (
                interval(one - own, hit.size) for one, own in zip(areas[reference], areas[name], strict=True)
            )
            found[name]["reference_above"] = {
                "auroc": above,
                "interval": apart,
                "aurc": rankings[reference].risk_area - ranking.risk_area,
                "aurc_interval": risk_apart,
            }
    return found


def calibration(
    probability: FloatArray, hit: NDArray[np.bool_], *, bins: int = NUM_BINS, samples: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """Equations (g) and (h) and the reliability diagram.

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


def verdict(auroc: float | None, inside: list[float] | None, num_distinct: int, p: float) -> str:
    """What an AUROC says, in words: an order is claimed where the interval leaves out 0.5 and the p of (f) is small."""
    if auroc is None:
        return "all lists hit or all miss, so there is nothing to tell apart"
    if num_distinct == 1:
        return "the same for every user, so it tells nothing: AUROC 0.5"
    if inside is None or inside[0] <= 0.5 <= inside[1]:
        return "not shown to tell hits from misses: the interval holds 0.5"
    if p >= LEVEL:
        return f"not shown to tell hits from misses: the interval leaves out 0.5, but a rank test has p >= {LEVEL}"
    if auroc > 0.5:
        return "higher where the list holds the target"
    return "lower where the list holds the target"


def resamples(num_users: int, samples: int, seed: int) -> Iterator[IntArray]:
    """How often each user is drawn in each bootstrap resample, some resamples at a time: (R, N)."""
    rng = np.random.default_rng(seed)
    at_once = max(1, CELLS // num_users)
    for first in range(0, samples, at_once):
        rows = min(at_once, samples - first)
        drawn = rng.integers(0, num_users, (rows, num_users)) + num_users * np.arange(rows)[:, None]
        yield np.bincount(drawn.ravel(), minlength=rows * num_users).reshape(rows, num_users)


def bootstrap(statistic: Callable[[IntArray], FloatArray], num_users: int, *, samples: int, seed: int) -> FloatArray:
    """A statistic of weights, (R, N) -> (R,), over all resamples."""
    return np.concatenate([statistic(weights) for weights in resamples(num_users, samples, seed)])


def interval(values: FloatArray, num_users: int) -> list[float] | None:
    """The 2.5 and 97.5 % points of resamples; None where none has a value, and of one user, of whom all are alike."""
    values = values[~np.isnan(values)]
    return np.quantile(values, [0.025, 0.975]).tolist() if values.size and num_users > 1 else None
