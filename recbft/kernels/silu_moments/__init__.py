"""Pointwise SiLU attention: the innovation, and the sums that a sandwich variance needs.

Equations (8.2), (8.3) and (8.6); the references are ``core.silu_moments_ref`` and ``core.silu_mean_ref``.

Shapes: B rows, H heads, T tokens, K head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, bfloat16, dtype, float16, float32

from recbft import core
from recbft.autograd.boundaries import eagerly
from recbft.core import SequenceContext, SiluMoments
from recbft.kernels.dispatch import SOME_READ, Path, choose, late
from recbft.kernels.silu_moments import c
from recbft.kernels.silu_moments import torch as by_torch

TRITON_ROW_BYTES = 512  # of a head in the type that is multiplied; a program holds several tiles of them


@eagerly
def silu_moments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: SequenceContext,
    *,
    length: int,
    bias: Tensor | None = None,
    lag_bias: Tensor | None = None,
    log_precision: Tensor | None = None,
    log_decay: Tensor | None = None,
    impl: str = "auto",
) -> SiluMoments:
    """The sums of (8.3) and (8.6).

    Args:
        q, k, v: queries, keys and values, (B, H, T, K); what is added to the scores may be in a wider type.
        context: which token may read which.
        length: N of (8.3), > 0.
        bias, lag_bias, log_precision, log_decay: as ``core.silu.total_bias`` takes them.
        impl: ``auto`` takes the fastest path that serves the call; ``triton``, ``c``, ``torch`` and ``reference`` force
            one. Fewer queries than keys, as ``core.Readers`` has them, are for ``c`` and ``reference``.

    Raises:
        ValueError: unknown ``impl``, or the forced path cannot serve the call; ``length`` is not positive.
    """
    biases = {"bias": bias, "lag_bias": lag_bias, "log_precision": log_precision, "log_decay": log_decay}
    sums: SiluMoments = _attend(MOMENTS, impl, q, k, v, context, length=length, **biases)
    return sums


@eagerly
def silu_mean(q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, impl: str = "auto", **call: Any) -> Tensor:
    """e of (8.3) alone, for layers that keep no precision: the same as ``silu_moments(...).mean``.

    Arguments as those of ``silu_moments``.
    """
    mean: Tensor = _attend(MEAN, impl, q, k, v, context, **call)
    return mean


def product_dtype(given: dtype) -> dtype:
    """The type of operands on a GPU: float16 has no room for squares and their gradients."""
    return float32 if given == float16 else given


def _attend(paths: dict[str, Path], impl: str, *inputs: Any, length: int, **biases: Tensor | None) -> Any:
    if length <= 0:
        raise ValueError(f"length is {length}; give the constant that divides the weights, > 0")
    q, _, _, context = inputs
    return choose(impl, paths, q, read_by_all=context.read_by_all)(*inputs, length=length, **biases)


def _decline_torch(q: Tensor, *, read_by_all: bool) -> str | None:
    return None if read_by_all else SOME_READ


def _decline_triton(q: Tensor, *, read_by_all: bool) -> str | None:
    if not read_by_all:
        return SOME_READ
    name = str(q.dtype).removeprefix("torch.")
    if q.dtype not in (float32, bfloat16, float16):
        return f"needs float32, bfloat16 or float16, got {name}"
    widest = TRITON_ROW_BYTES // product_dtype(q.dtype).itemsize
    return (
        None if q.shape[-1] <= widest else f"needs heads of at most {widest} coordinates in {name}, got {q.shape[-1]}"
    )


def _paths(name: str, reference: Callable[..., Any]) -> dict[str, Path]:
    return {
        "triton": Path(late("silu_moments", name), "cuda", _decline_triton, opened=True, takes_halves=True),
        "c": Path(lambda: getattr(c, name), "cpu", c.decline, opened=True),
        "torch": Path(lambda: getattr(by_torch, name), "cpu", _decline_torch, opened=True),
        "reference": Path(lambda: reference),
    }


MOMENTS = _paths("silu_moments", core.silu_moments_ref)
MEAN = _paths("silu_mean", core.silu_mean_ref)
