"""Update and prediction in C (``compiled/filter_step.c``): every array is read and written once in each direction.

Shapes: N tokens, D model width; the tokens' axes come first.
"""

from __future__ import annotations

from ctypes import c_float, c_int64

import torch
from torch import Tensor

from recbft.core.process import FLOOR
from recbft.kernels import compiled
from recbft.kernels.compiled import pointers


def update(h: Tensor, lam: Tensor, e: Tensor, r: Tensor, updated: Tensor, after: Tensor, ramp: float) -> None:
    """As ``fused.Passes`` says."""
    compiled.library().update_forward(c_int64(h.numel()), c_float(ramp), *pointers(h, lam, e, r, updated, after))


def update_gradients(given: tuple[Tensor | None, ...], found: tuple[Tensor, ...], ramp: float) -> None:
    """As ``fused.Passes`` says."""
    read = [torch.zeros_like(found[0]) if x is None else x for x in given]
    compiled.library().update_backward(c_int64(found[0].numel()), c_float(ramp), *pointers(*read, *found))


def predict(lam: Tensor, J: Tensor, Q: Tensor, predicted: Tensor, low: float, cap: float) -> None:
    """As ``fused.Passes`` says."""
    compiled.library().predict_forward(*_sizes(lam, J), *_bounds(low, cap), *pointers(lam, J, Q, predicted))


def predict_gradients(given: tuple[Tensor, ...], d_lam: Tensor, d_J: Tensor | None, low: float, cap: float) -> Tensor:
    """As ``fused.Passes`` says."""
    lam, J, Q = given[:3]
    num_tokens, *sizes = _sizes(lam, J)
    sums = Q.new_empty(compiled.library().predict_sums(num_tokens), len(Q))
    compiled.library().predict_backward(num_tokens, *sizes, *_bounds(low, cap), *pointers(*given, d_lam, d_J, sums))
    return sums.sum(dim=0)


def _sizes(lam: Tensor, J: Tensor) -> list[c_int64]:
    """N, D, and whether each token has a Jacobian of its own."""
    D = lam.shape[-1]
    return [c_int64(lam.numel() // D), c_int64(D), c_int64(J.shape == lam.shape)]


def _bounds(low: float, cap: float) -> list[c_float]:
    return [c_float(FLOOR), c_float(low), c_float(cap)]
