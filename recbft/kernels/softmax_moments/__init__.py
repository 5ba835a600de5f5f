"""Softmax moments: the paths there are."""

from __future__ import annotations

import torch
from torch import Tensor

from recbft.autograd.eager import eagerly
from recbft.autograd.transforms import transformed
from recbft.kernels import dispatch
from recbft.kernels.dispatch import SOME_READ, Path, late
from recbft.kernels.softmax_moments import compiled, cpu, reference

# Of the Triton path, by what shared memory holds.
WIDEST_HEAD = {torch.float32: 128, torch.float16: 256, torch.bfloat16: 256}


def decline_triton(q: Tensor, *, dropout: float = 0.0, read_by_all: bool = True) -> str | None:
    """Why the Triton path cannot serve a call, or None where it can."""
    if not read_by_all:
        return SOME_READ
    if dropout > 0:
        return "moments with attention dropout are served by the reference"
    dtype = str(q.dtype).removeprefix("torch.")
    if q.dtype not in WIDEST_HEAD:
        return f"serves float32, float16 and bfloat16, got {dtype}"
    if q.dtype == torch.bfloat16 and dispatch.interpreted():
        return "Triton's interpreter multiplies bfloat16 as if it were integers; take float16 or float32 there"
    if q.shape[-1] > WIDEST_HEAD[q.dtype]:
        return f"serves heads up to {WIDEST_HEAD[q.dtype]} wide in {dtype}, got {q.shape[-1]}"
    return None


PATHS = {
    "triton": Path(late("softmax_moments", "softmax_moments"), "cuda", decline_triton, opened=True, takes_halves=True),
    "compiled": Path(lambda: compiled.softmax_moments, "cpu", compiled.decline, opened=True),
    "cpu": Path(lambda: cpu.softmax_moments, "cpu", cpu.decline, opened=True),
    "reference": Path(lambda: reference.softmax_moments),
}
MEAN_PATHS = {
    "triton": Path(late("softmax_moments", "softmax_mean"), "cuda", decline_triton, opened=True, takes_halves=True),
    "compiled": Path(lambda: compiled.softmax_mean, "cpu", compiled.decline, opened=True),
    "cpu": Path(lambda: cpu.softmax_mean, "cpu", cpu.decline_mean, opened=True),
    "reference": Path(lambda: reference.softmax_mean),
}


@eagerly
def takes_terms(x: Tensor, *, dropout: float) -> bool:
    """Whether what attends to a normalised input by ``auto`` takes ``core.regimes.BiasTerms`` for a bias of pairs."""
    closed = transformed() or torch.is_autocast_enabled(x.device.type)
    return x.device.type == "cpu" and not closed and compiled.decline(x, dropout=dropout) is None
