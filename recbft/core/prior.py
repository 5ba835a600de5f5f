"""The precision an item starts with: what its training count says, and how that sets the first gain.

    tau_base = rank quantile of the item's training count, mid-ranks for ties                     (5.2)
    scale    = lam_obs (1 - K0) / K0,  lam_obs = (1 + nu) / (nu s0)                               (5.3)
    tau_i    = (c_i + nu0) / (c + nu0),  c the mean count                                         (5.8)
    nu0      = argmax sum_i log NB(c_i; nu0, c)                                                   (5.9)

(5.3) makes an item of full count meet the largest REML precision with gain K0. (5.8) is empirical Bayes: with counts
c_i ~ Poisson(theta_i) and rates theta_i ~ Gamma(shape nu0, mean c), it is E[theta_i | c_i] / c. With the rates
integrated out a count is negative binomial, mean c and variance c + c^2 / nu0, and (5.9) maximises that likelihood; for
every nu0 it is largest at the mean of the sample, so nothing else is fitted.

Source: Precision Tracked Transformer (arXiv 2605.18832), section 3.3 and table 1; Gamma-Poisson: Robbins (1956), Efron,
Large-Scale Inference (2010), chapter 1.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

# Between these nu0 changes no precision that could be seen: below, an unseen item has next to none; above, all are 1.
_PSEUDO_COUNT_BOUNDS = (1e-4, 1e8)


def count_quantiles(counts: Tensor) -> Tensor:
    """Equation (5.2), (rank - 1) / (n - 1) among the n items ever seen; 0 for items never seen.

    Args:
        counts: training counts, (..., V), >= 0; ranks are taken along the last dimension among the counts above 0.

    Returns:
        Quantiles in [0, 1], the same shape, float64 for float64 counts and the default dtype otherwise. Where all
        counts above 0 are equal they share the middle, 0.5.
    """
    dtype = counts.dtype if counts.is_floating_point() else torch.get_default_dtype()
    ordered = counts.sort(dim=-1).values
    below = torch.searchsorted(ordered, counts.contiguous(), side="left")
    up_to = torch.searchsorted(ordered, counts.contiguous(), side="right")
    unseen = (counts <= 0).sum(dim=-1, keepdim=True)
    num_seen = counts.shape[-1] - unseen
    rank = (below + up_to - 1).to(torch.float64) / 2 - unseen  # mid-rank among the seen, from 0
    quantile = torch.where(num_seen > 1, rank / (num_seen - 1).clamp(min=1), 0.5)
    return torch.where(counts > 0, quantile, 0.0).to(dtype)


def initial_scale(
    gain: float, *, head_width: int, prior_dof: float = 1.0, prior_variance: float | None = None
) -> float:
    """Equation (5.3): the precision that meets the largest REML precision with the given gain.

    Args:
        gain: K0, in (0, 1).
        head_width: K; the prior variance defaults to 1 / K, which makes the largest precision 2 K at nu = 1.
    """
    variance = 1 / head_width if prior_variance is None else prior_variance
    largest = (1 + prior_dof) / (prior_dof * variance)
    return largest * (1 - gain) / gain


def empirical_bayes_precision(counts: Tensor, pseudo_count: float) -> Tensor:
    """Equation (5.8): 1 on average over the items; counts of any shape, the mean over all of them.

    Args:
        counts: training counts, (V,), >= 0.
        pseudo_count: nu0, > 0; infinity gives every item precision 1.

    Returns:
        Precision of each item, (V,), > 0, float64.
    """
    counts = counts.double()
    if math.isinf(pseudo_count) or counts.numel() == 0:
        return torch.ones_like(counts)
    return (counts + pseudo_count) / (counts.mean() + pseudo_count)


def fit_pseudo_count(counts: Tensor) -> float:
    """Equation (5.9): the worth of the prior, in events, that makes the counts most likely; the same on every call.

    Args:
        counts: training counts, (V,), >= 0.

    Returns:
        nu0 > 0; infinity where the counts vary no more than Poisson counts of one rate do (all equal, one item, none).
    """
    from scipy import optimize, special  # half a second to import, and only this initial precision asks for it

    c = counts.double().numpy()
    if c.size == 0 or c.var() <= c.mean():
        return math.inf
    values, times = np.unique(c, return_counts=True)
    mean = c.mean()

    def loss(log_nu: float) -> float:
        nu = math.exp(log_nu)
        each = special.gammaln(values + nu) - special.gammaln(nu)
        each = each - nu * math.log1p(mean / nu) + values * (math.log(mean) - math.log(mean + nu))
        return float(-(times * each).sum())

    bounds = tuple(math.log(bound) for bound in _PSEUDO_COUNT_BOUNDS)
    return math.exp(optimize.minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-10}).x)
