"""Exponentials of a block of logits in their place, with their sums; in C where that serves.

Shapes: N positions, V items.
"""

from __future__ import annotations

from ctypes import c_int64

from torch import Tensor

from recbft.kernels import compiled


def exponentials(logits: Tensor, *, shifted: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """exp(l - m) written over l, (N, V), its sums and m, (N, 1) each; m is the row maximum, or None for 0."""
    if not compiled.serves(logits) or logits.stride(1) != 1 or logits.shape[1] == 0:
        shift = logits.amax(dim=1, keepdim=True) if shifted else None
        odds = (logits if shift is None else logits.sub_(shift)).exp_()
        return odds, odds.sum(dim=1, keepdim=True), shift
    N, V = logits.shape
    total = logits.new_empty(N, 1)
    shift = logits.new_empty(N, 1) if shifted else None
    sizes = (c_int64(n) for n in (N, V, logits.stride(0)))
    compiled.library().exponential_sums(*sizes, *compiled.pointers(logits, shift, total))
    return logits, total, shift
