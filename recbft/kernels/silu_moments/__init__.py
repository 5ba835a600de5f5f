"""SiLU moments: the paths there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recbft.core.belief import SequenceContext
from recbft.kernels.dispatch import SOME_READ, Path, late
from recbft.kernels.silu_moments import compiled, cpu, reference
from recbft.kernels.silu_moments.bias import total_bias

TRITON_ROW_BYTES = 512  # of a head in the type that is multiplied; a program holds several tiles of them


def _cpu_declines(q: Tensor, *, read_by_all: bool = True) -> str | None:
    return None if read_by_all else SOME_READ


def _triton_declines(q: Tensor, *, read_by_all: bool = True) -> str | None:
    if not read_by_all:
        return SOME_READ
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


def _summed(load: Callable[[], Callable[..., Any]]) -> Callable[[], Callable[..., Any]]:
    """What loads a path that takes the sum of all biases."""

    def path(q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, length: int, **biases: Tensor | None) -> Any:
        return load()(q, k, v, context, length=length, bias=total_bias(q, context, **biases))

    return lambda: path


def _paths(name: str) -> dict[str, Path]:
    triton = _summed(late("silu_moments", name))
    return {
        "triton": Path(triton, "cuda", _triton_declines, opened=True, takes_halves=True),
        "compiled": Path(lambda: getattr(compiled, name), "cpu", compiled.decline, opened=True),
        "cpu": Path(_summed(lambda: getattr(cpu, name)), "cpu", _cpu_declines, opened=True),
        "reference": Path(_summed(lambda: getattr(reference, name))),
    }


PATHS = _paths("silu_moments")
MEAN_PATHS = _paths("silu_mean")
