"""The width of a model cut into heads, and heads put together again.

Shapes: B rows, T tokens, H heads, K head width.
"""

from __future__ import annotations

from torch import Tensor


def by_head(x: Tensor, n_heads: int) -> Tensor:
    """(B, T, H K) -> (B, H, T, K)."""
    heads: Tensor = x.unflatten(-1, (n_heads, -1))
    return heads.transpose(1, 2)


def joined(heads: Tensor) -> Tensor:
    """(B, H, T, K) -> (B, T, H K)."""
    return heads.transpose(1, 2).flatten(2)
