"""The running mean in plain PyTorch: the reference, and what serves all but a GPU in single precision.

Shapes: B rows, T tokens, D width.
"""

from __future__ import annotations

from torch import Tensor

from recbft.autograd.full_precision import in_full_precision

MOMENTUM = 0.99


@in_full_precision
def mean_over_tokens(values: Tensor, valid: Tensor) -> Tensor:  # (B, T, D), (B, T) -> (D,)
    """v of (1)."""
    keep = valid.flatten().to(values.dtype)
    return (keep @ values.reshape(-1, values.shape[-1])).div_(keep.sum().clamp_(min=1))


def remember(mean: Tensor, value: Tensor, updates: Tensor) -> None:
    """Move a running mean towards a value in place, or to it where there was no update yet; no device is waited for."""
    mean.lerp_(value, (updates == 0).to(mean.dtype).clamp(min=1 - MOMENTUM))
