"""Exponentials of a block of logits in their place, with their sums; in C (``kernel.c``) where that serves.

Shapes: N positions, V items.
"""

from __future__ import annotations

from ctypes import c_int64

import torch
from torch import Tensor

from recbft.kernels import c_library
from recbft.kernels.dispatch import Path, choose


def exponentials(logits: Tensor, *, shifted: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """exp(l - m) written over l, (N, V), its sums and m, (N, 1) each; m is the row maximum, or None for 0."""
    odds, total, shift = choose("auto", PATHS, logits)(logits, shifted)
    return odds, total, shift


def _by_torch(logits: Tensor, shifted: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    shift = logits.amax(dim=1, keepdim=True) if shifted else None
    odds = (logits if shift is None else logits.sub_(shift)).exp_()
    return odds, odds.sum(dim=1, keepdim=True), shift


def _in_c(logits: Tensor, shifted: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    N, V = logits.shape
    total = logits.new_empty(N, 1)
    shift = logits.new_empty(N, 1) if shifted else None
    sizes = (c_int64(n) for n in (N, V, logits.stride(0)))
    c_library.library().exponential_sums(*sizes, *c_library.pointers(logits, shift, total))
    return logits, total, shift


def _decline(logits: Tensor) -> str | None:
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or logits.shape[1] == 0:
        return "needs rows of float32"
    return c_library.missing()


PATHS = {
    "c": Path(lambda: _in_c, "cpu", _decline, opened=True, takes_halves=True),
    "reference": Path(lambda: _by_torch, takes_halves=True),
}
