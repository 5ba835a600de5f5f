"""Which operands one pass over memory takes: the common case, in single precision."""

from __future__ import annotations

import torch
from torch import Tensor

from recbft.core.belief import Belief


def update_is_plain(belief: Belief, innovation: Tensor, observation_precision: Tensor) -> bool:
    """Whether nothing broadcasts."""
    return _alike(belief.mean, belief.precision, innovation, observation_precision)


def prediction_is_plain(precision: Tensor, jacobian: Tensor, process_noise: Tensor) -> bool:
    """Whether the Jacobian is that of each token, or a constant that all share."""
    D = precision.shape[-1]
    shared = jacobian.shape in ((), (D,)) and jacobian.dtype == torch.float32 and not jacobian.requires_grad
    noise = process_noise.shape in ((), (D,)) and process_noise.dtype == torch.float32
    return noise and (_alike(precision) if shared else _alike(precision, jacobian))


def _alike(first: Tensor, *others: Tensor) -> bool:
    return first.dtype == torch.float32 and all(
        x.shape == first.shape and x.dtype == first.dtype and x.device == first.device for x in others
    )
