"""The functions of ``recbft.core``, faster: one folder per mechanism, a short reference beside every fast path.

Here is how tensors of heads lie in memory for them.

Shapes: B rows, H heads, T tokens, K head width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def readable(x: Tensor) -> Tensor:
    """The same with elements of a token side by side; other strides may be any."""
    return x if x.stride(-1) == 1 else x.contiguous()


def by_tokens(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Room for (B, H, T, K), laid out as the layers around have it, (B, T, H, K); in a type of its own if given."""
    B, H, T, K = like.shape
    return like.new_empty(B, T, H, K, dtype=dtype).transpose(1, 2)
