"""Two arms, one number per seed each: the difference, its interval, and what chance would say.

d_s = a_s - b_s        t = mean(d) / (sd(d) / sqrt(n)),  n - 1 degrees of freedom, two-sided        (1)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from recbft.errors import UserError


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """An arm minus its baseline, paired by seed."""

    difference: float  # mean of d
    relative: float | None  # difference / mean of the baseline; None where that mean is 0
    low: float  # 95 % interval of the mean difference
    high: float
    p: float  # of the paired t-test (1), two-sided; 1 where all pairs are equal
    wins: int  # seeds in which the arm has more
    num_pairs: int


def paired_difference(arm: Sequence[float], baseline: Sequence[float]) -> PairedDifference:
    """Equation (1) over seeds.

    Raises:
        UserError: fewer than two pairs.
    """
    if len(arm) != len(baseline):
        raise ValueError(f"{len(arm)} values against {len(baseline)}; pair them by seed")
    n = len(arm)
    if n < 2:
        raise UserError(f"a paired test needs at least 2 seeds, got {n}; give more")
    a, b = np.asarray(arm, np.float64), np.asarray(baseline, np.float64)
    d = a - b
    mean, error = float(d.mean()), float(d.std(ddof=1)) / math.sqrt(n)
    if not d.any():
        p = 1.0
    elif error == 0:
        p = 0.0
    else:
        p = float(stats.ttest_rel(a, b).pvalue)
    reach = float(stats.t.ppf(0.975, n - 1)) * error
    return PairedDifference(
        difference=mean,
        relative=mean / float(b.mean()) if b.mean() != 0 else None,
        low=mean - reach,
        high=mean + reach,
        p=p,
        wins=int((d > 0).sum()),
        num_pairs=n,
    )
