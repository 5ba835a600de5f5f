"""Is one arm better than another? Paired comparisons over seeds, and, a different claim, over users.

Over seeds, with d_s the difference of the two arms trained with seed s, n of them, mean m and standard deviation sd:

    t = m / (sd / sqrt(n)),  n - 1 degrees of freedom, two-sided                                  (a)
    interval m +- t_{0.975, n-1} sd / sqrt(n)                                                     (b)
    sign-flip p = share of the 2^n sign patterns with |mean(+-d)| >= |m|                          (c)
    Cohen's d = m / sd                                                                            (d)
    smallest effect: the m that (a) at level 0.05 finds with probability 0.8, given sd and n      (e)

(a) asks whether the arms' means over seeds differ if differences are normal; (c) needs only that under no effect a
difference is as likely as its negative. Both treat the users as given. Over users the roles change: seeds are averaged
away first, and the question is whether other users would have shown the difference too.

Source: Student (1908); Fisher, The Design of Experiments (1935), section 21, for (c); Holm (1979); Fisher (1925) for
the pooled p; Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import integrate, optimize, special, stats

from recbft.errors import UserError

EXACT_SEEDS = 20  # up to 2^20 sign patterns are enumerated; more seeds are sampled
PATTERNS_AT_ONCE = 2**14
LEVEL, POWER = 0.05, 0.8  # of (e)
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class SeedComparison:
    """One metric of one arm against a baseline, paired by seed."""

    num_seeds: int
    mean_baseline: float
    sd_baseline: float
    mean_other: float
    sd_other: float
    difference: float  # other - baseline
    relative: float | None  # difference / mean_baseline; 0 where both are 0, None where only the baseline is
    interval: tuple[float, float]  # (b), 95 %
    p_t: float  # (a)
    p_sign_flip: float  # (c)
    wins: int  # seeds in which the other arm is strictly better
    cohen_d: float | None  # (d); 0 for equal arms, None where all differences are the same and not 0
    smallest_effect: float  # (e), in the metric's own unit

    @property
    def is_constant(self) -> bool:
        """One difference in every seed, be it 0: there is no spread for (a), (b), (e); ``p_t`` is the sign flips'."""
        return self.smallest_effect == 0


@dataclass(frozen=True, kw_only=True)
class UserComparison:
    """One metric of one arm against a baseline over users, seeds averaged away."""

    num_users: int
    difference: float  # other - baseline, mean over users
    interval: tuple[float, float]  # bootstrap percentiles, 95 %
    p_sign_flip: float  # sampled sign patterns of the users' differences


def compare_seeds(baseline: ArrayLike, other: ArrayLike) -> SeedComparison:
    """Compare two arms whose values stand in the same order of seeds.

    Args:
        baseline, other: one value per seed, (n,), n >= 2.

    Returns:
        The comparison; identical arms have difference 0 and p 1, never NaN.

    Raises:
        UserError: fewer than two seeds, or unequal numbers of them.
    """
    a, b = _pair(baseline, other, "seeds")
    d, n = _differences(a, b), a.size
    mean, sd = float(d.mean()), _spread(d, a, b)
    quantile = float(stats.t.ppf(0.975, n - 1))
    half = quantile * sd / math.sqrt(n)
    p_signs = sign_flip_p(d)
    return SeedComparison(
        num_seeds=n,
        mean_baseline=float(a.mean()),
        sd_baseline=float(a.std(ddof=1)),
        mean_other=float(b.mean()),
        sd_other=float(b.std(ddof=1)),
        difference=mean,
        relative=share_of(mean, float(a.mean())),
        interval=(mean - half, mean + half),
        # Equal differences leave the t-test without a spread to judge by; how few they are the signs know.
        p_t=_t_test(mean, sd, n) if sd else p_signs,
        p_sign_flip=p_signs,
        wins=int((d > 0).sum()),
        cohen_d=share_of(mean, sd),
        smallest_effect=_smallest_standard_effect(n) * sd,
    )


def compare_users(baseline: ArrayLike, other: ArrayLike, *, samples: int = 10_000) -> UserComparison:
    """Compare two arms user by user.

    Args:
        baseline, other: one value per user in the same order, averaged over seeds, (N,), N >= 2.
        samples: resamples of the users for the interval, and sign patterns for the p.

    Raises:
        UserError: as ``compare_seeds``, of users.
    """
    a, b = _pair(baseline, other, "users")
    d = _differences(a, b)
    return UserComparison(
        num_users=d.size,
        difference=float(d.mean()),
        interval=bootstrap_interval(d, samples=samples),
        p_sign_flip=sign_flip_p(d, samples=samples),
    )


def seed_interval(values: ArrayLike) -> tuple[float, float] | None:
    """95 % t interval of one arm's mean over seeds, (b) with the values in place of differences; None for one seed."""
    a = np.asarray(values, dtype=np.float64)
    if a.size < 2:
        return None
    half = float(stats.t.ppf(0.975, a.size - 1)) * float(a.std(ddof=1)) / math.sqrt(a.size)
    return float(a.mean()) - half, float(a.mean()) + half


def bootstrap_interval(values: ArrayLike, *, samples: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of a mean over users: percentiles over ``samples`` resamples of the users."""
    a = np.asarray(values, dtype=np.float64)
    distinct, number = np.unique(a, return_counts=True)
    rng = np.random.default_rng(seed)
    # Users of equal value can be drawn together, to the same distribution; one value costs as much as ten users.
    are_few = 10 * distinct.size <= a.size
    at_once = max(1, 4_000_000 // (distinct.size if are_few else a.size))

    def means_of(resamples: int) -> FloatArray:
        if are_few:
            means: FloatArray = rng.multinomial(a.size, number / a.size, size=resamples) @ distinct / a.size
        else:
            means = a[rng.integers(0, a.size, (resamples, a.size))].mean(axis=1)
        return means

    drawn = [means_of(min(at_once, samples - first)) for first in range(0, samples, at_once)]
    low, high = np.quantile(np.concatenate(drawn), [0.025, 0.975])
    return float(low), float(high)


def share_of(part: float, whole: float) -> float | None:
    """part / whole; 0 where both are 0, None where only the whole is."""
    if whole:
        return part / whole
    return 0.0 if part == 0 else None


def sign_flip_p(differences: ArrayLike, *, samples: int = 100_000, seed: int = 0) -> float:
    """Equation (c): exact up to ``EXACT_SEEDS`` differences besides 0, else sampled: (1 + hits) / (1 + samples)."""
    d = np.asarray(differences, dtype=np.float64)
    d = d[d != 0]  # whose sign changes nothing
    observed = abs(d.sum()) - 1e-12 * np.abs(d).sum()  # equal sums must count, whatever order they were added in
    if d.size > EXACT_SEEDS:
        rng = np.random.default_rng(seed)
        at_once = max(1, 4_000_000 // d.size)
        hits = 0
        for first in range(0, samples, at_once):
            signs = rng.integers(0, 2, (min(at_once, samples - first), d.size), dtype=np.int8) * 2 - 1
            hits += int((np.abs(signs @ d) >= observed).sum())
        return (1 + hits) / (1 + samples)
    patterns, matching = 2**d.size, 0
    for first in range(0, patterns, PATTERNS_AT_ONCE):
        numbers = np.arange(first, min(first + PATTERNS_AT_ONCE, patterns))
        signs = ((numbers[:, None] >> np.arange(d.size)) & 1) * 2 - 1
        matching += int((np.abs(signs @ d) >= observed).sum())
    return float(matching / patterns)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjustment of a family of p-values, in their own order: rejecting at 0.05 keeps the family's level."""
    order = np.argsort(p_values, kind="stable")
    adjusted, largest = [0.0] * len(order), 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - place) * float(p_values[index])))
        adjusted[index] = largest
    return adjusted


def fisher(p_values: Sequence[float]) -> float:
    """Fisher's pooled p of k independent comparisons: chi-square of -2 sum log p with 2 k degrees of freedom."""
    if not len(p_values):
        raise UserError("there is no p-value to pool; compare at least one data set")
    smallest = np.finfo(np.float64).tiny
    return float(stats.chi2.sf(-2 * np.log(np.maximum(p_values, smallest)).sum(), 2 * len(p_values)))


def _pair(baseline: ArrayLike, other: ArrayLike, what: str) -> tuple[FloatArray, FloatArray]:
    a, b = np.asarray(baseline, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1:
        raise UserError(f"the arms have {a.size} and {b.size} {what}; compare them over the {what} they share")
    if a.size < 2:
        raise UserError(f"a paired comparison needs at least 2 {what}, and there are {a.size}; add {what}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise UserError(f"a value of the {what} is not finite; leave out the broken run")
    return a, b


def _differences(a: FloatArray, b: FloatArray) -> FloatArray:
    """b - a, exactly 0 where the two are equal up to the rounding of means: that is neither a win nor a loss."""
    d = b - a
    return np.where(np.abs(d) <= _rounding(a, b), 0.0, d)


def _spread(d: FloatArray, a: FloatArray, b: FloatArray) -> float:
    """Standard deviation of the differences b - a, exactly 0 where all are equal up to the rounding of the values."""
    sd = float(d.std(ddof=1))
    return 0.0 if sd <= _rounding(a, b) else sd


def _rounding(a: FloatArray, b: FloatArray) -> float:
    return 1e-14 * float(np.abs([a, b]).max(initial=0.0))


def _t_test(mean: float, sd: float, n: int) -> float:
    """Two-sided p of (a); sd > 0."""
    return float(2 * stats.t.sf(abs(mean) / (sd / math.sqrt(n)), n - 1))


@lru_cache
def _smallest_standard_effect(n: int) -> float:
    """Equation (e) for sd = 1; the chance of |t| beyond its critical value, averaged over the estimated deviation."""
    critical, degrees = float(stats.t.ppf(1 - LEVEL / 2, n - 1)), n - 1

    def lacking(effect: float) -> float:
        shift = effect * math.sqrt(n)

        def beyond(chi: float) -> float:
            edge = critical * chi / math.sqrt(degrees)
            tails = special.ndtr(shift - edge) + special.ndtr(-shift - edge)
            return float(stats.chi.pdf(chi, degrees) * tails)

        return float(integrate.quad(beyond, 0, math.sqrt(degrees) + 12)[0]) - POWER

    return float(optimize.brentq(lacking, 0.0, 100.0, xtol=1e-9))
