"""SiLU moments: the paths there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recbft.kernels import dispatch
from recbft.kernels.dispatch import Path, late
from recbft.kernels.silu_moments import cpu, reference

TRITON_ROW_BYTES = 512  # of a head in the type that is multiplied; a program holds several tiles of them


def _triton_declines(q: Tensor) -> str | None:
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"needs float32, bfloat16 or float16, got {str(q.dtype).removeprefix('torch.')}"
    widest = TRITON_ROW_BYTES // product_dtype(q.dtype).itemsize
    if q.shape[-1] > widest:
        return (
            f"needs heads of at most {widest} coordinates in {str(q.dtype).removeprefix('torch.')}, got {q.shape[-1]}"
        )
    return None


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of operands on a GPU: float16 has no room for squares and their gradients."""
    return torch.float32 if dtype == torch.float16 else dtype


PATHS = {
    "triton": Path(late("silu_moments", "silu_moments"), "cuda", _triton_declines, opened=True, takes_halves=True),
    "cpu": Path(lambda: cpu.silu_moments, "cpu", opened=True),
    "reference": Path(lambda: reference.silu_moments),
}
MEAN_PATHS = {
    "triton": Path(late("silu_moments", "silu_mean"), "cuda", _triton_declines, opened=True, takes_halves=True),
    "cpu": Path(lambda: cpu.silu_mean, "cpu", opened=True),
    "reference": Path(lambda: reference.silu_mean),
}


def choose(impl: str, q: Tensor) -> Callable[..., Any]:
    """The path for the moments."""
    return dispatch.choose(impl, PATHS, q)


def choose_mean(impl: str, q: Tensor) -> Callable[..., Any]:
    """The path for the mean alone."""
    return dispatch.choose(impl, MEAN_PATHS, q)
