"""GELU and a product with its slope in C (``kernel.c``).

Shapes: N tokens, F feed-forward width, r columns, S seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_int64

import torch
import torch.nn.functional as F
from torch import Tensor

from recbft.kernels import c_library


def slope_product(a: Tensor, factor: Tensor, values: Tensor | None = None) -> Tensor:
    """As ``torch.slope_product``."""
    z = a.new_empty(len(a), factor.shape[-1])
    for right, points, out, *own in _by_seed(factor, a.contiguous(), z, *([] if values is None else [values])):
        _run("gelu_forward", right, _padded(right), points, own[0] if own else None, out)
    return z


def backward(a: Tensor, factor: Tensor, g_y: Tensor, g_z: Tensor) -> Tensor:
    """The gradient of a."""
    a, g_y, g_z = a.contiguous(), g_y.contiguous(), g_z.contiguous()
    d_a = torch.empty_like(a)
    for right, *parts in _by_seed(factor, a, g_y, g_z, d_a):
        _run("gelu_backward", right, _padded(right.T), *parts)
    return d_a


def _by_seed(factor: Tensor, *tokens: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The factor of each seed, and its share of each tensor."""
    factors = factor[None] if factor.dim() == 2 else factor
    return zip(factors, *(x.view(len(factors), -1, x.shape[-1]) for x in tokens), strict=True)


def _padded(matrix: Tensor) -> Tensor:
    """With rows of whole vectors, as this machine has them."""
    width = matrix.shape[1]
    return F.pad(matrix, (0, c_library.library().gelu_padded(c_int64(width)) - width)).contiguous()


def _run(name: str, factor: Tensor, padded: Tensor, a: Tensor, *tensors: Tensor | None) -> None:
    sizes = (c_int64(n) for n in (len(a), *factor.shape))
    if getattr(c_library.library(), name)(*sizes, *c_library.pointers(a, padded, *tensors)):
        raise MemoryError(f"no memory for {factor.shape[0]} features of a few tokens; lower inner_size")
