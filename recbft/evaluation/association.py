"""Do two figures rise together? Spearman's rank correlation, and the same with a third figure held fixed.

    rho    = Pearson correlation of the mid-ranks                                                           (a)
    rho_z  = (rho_xy - rho_xz rho_yz) / sqrt((1 - rho_xz^2) (1 - rho_yz^2))                                 (b)
    p      two-sided, of t = rho sqrt(d / (1 - rho^2)) with d = n - 2 degrees of freedom, n - 3 for (b)     (c)
           of up to ``EXACT_VALUES`` pairs: share of the n! orders of y with |rho| as large; none for (b)   (d)

Values closer than 1e-9 of the largest are ties: means of equal numbers differ in their last digits.

Source: Spearman (1904); Kendall and Gibbons, Rank Correlation Methods (1990), chapters 4 and 8.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

EXACT_VALUES = 8  # up to 8! orders are tried, where (c) is too sure: of three in order it is certain
FloatArray = NDArray[np.float64]


class Association(NamedTuple):
    """A rank correlation; None where there is none: a figure that does not vary, or too few values."""

    rho: float | None
    p: float | None
    n: int


def spearman(x: ArrayLike | None, y: ArrayLike | None, given: ArrayLike | None = None) -> Association:
    """Equation (a), or (b) with ``given`` held fixed; pairs with a NaN are left out. None is a figure that is missing.

    >>> spearman([1, 2, 3, 4], [1, 4, 9, 16])
    Association(rho=1.0, p=0.08333333333333333, n=4)
    """
    if x is None or y is None:
        return Association(None, None, 0)
    from scipy import stats  # seconds to import, which nobody who only recommends has to wait for

    columns = [_tied(np.asarray(values, dtype=np.float64)) for values in (x, y, given) if values is not None]
    kept = ~np.any(np.isnan(columns), axis=0)
    n = int(kept.sum())
    freedom = n - len(columns)
    if freedom < 1 or any(np.ptp(values[kept]) == 0 for values in columns):
        return Association(None, None, n)
    ranks = [stats.rankdata(values[kept]) for values in columns]
    r = np.corrcoef(ranks)
    rho = float(r[0, 1])
    if given is not None:
        spread = (1 - r[0, 2] ** 2) * (1 - r[1, 2] ** 2)
        if spread < 1e-12:  # one of the two is the third
            return Association(None, None, n)
        rho = float((r[0, 1] - r[0, 2] * r[1, 2]) / math.sqrt(spread))
    perfect = 1 - abs(rho) < 1e-12
    if perfect:
        rho = math.copysign(1.0, rho)
    if n <= EXACT_VALUES:
        return Association(rho, _p_over_orders(*ranks) if given is None else None, n)
    if perfect:
        return Association(rho, 0.0, n)
    t = rho * math.sqrt(freedom / (1 - rho**2))
    return Association(rho, float(2 * stats.t.sf(abs(t), freedom)), n)


def _p_over_orders(x: FloatArray, y: FloatArray) -> float:
    """(d) of mid-ranks, few of them."""
    x, y = x - x.mean(), y - y.mean()
    found = np.abs(np.array(list(itertools.permutations(y))) @ x)
    return float(np.mean(found >= abs(y @ x) - 1e-9))  # equal sums must count, whatever order they were added in


def _tied(values: FloatArray) -> FloatArray:
    """The values in units of their largest, rounded."""
    largest = np.nanmax(np.abs(values), initial=0.0)
    return np.round(values / largest, 9) if largest > 0 else values
