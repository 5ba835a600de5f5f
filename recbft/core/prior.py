"""The precision an item starts with: what its training count says, and how that sets the first gain.

    tau_base = rank quantile of the item's training count, mid-ranks for ties                     (1)
    scale    = lam_obs (1 - K0) / K0,  lam_obs = (1 + nu) / (nu s0)                               (2)

(2) makes an item of full count meet the largest REML precision with gain K0.

Source: Precision Tracked Transformer (arXiv 2605.18832), section 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor


def count_quantiles(counts: Tensor) -> Tensor:
    """Equation (1): 0 for the rarest item, 1 for the most frequent, 0 for items never seen.

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
    """Equation (2): the precision that meets the largest REML precision with the given gain.

    Args:
        gain: K0, in (0, 1).
        head_width: K; the prior variance defaults to 1 / K, which makes the largest precision 2 K at nu = 1.
    """
    variance = 1 / head_width if prior_variance is None else prior_variance
    largest = (1 + prior_dof) / (prior_dof * variance)
    return largest * (1 - gain) / gain
