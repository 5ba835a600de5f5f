"""Update and prediction on a GPU: one launch in each direction instead of some twenty.

Sums over tokens are made of parts that are added up in one order, so that two runs are equal bit for bit. Equations are
those of ``torch.py``.

Shapes: N tokens, D model width; the tokens' axes come first.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from recbft.autograd.transforms import applied, once_differentiable
from recbft.core.belief import Belief
from recbft.core.filter_step import FLOOR
from recbft.kernels.dispatch import launched_beside

ELEMENTS = 1024  # of a program
SUMMED = 2048  # elements of a program that adds up over tokens


def kalman_update(
    belief: Belief, innovation: Tensor, observation_precision: Tensor, *, ramp: float
) -> tuple[Belief, Tensor]:
    """The same as ``core.kalman_update_ref``; operands of one shape."""
    mean, precision, gain = applied(_Update, *belief, innovation, observation_precision, ramp)
    return Belief(mean, precision), gain


def predict(lam: Tensor, J: Tensor, Q: Tensor, predicted: Tensor, low: float, cap: float) -> None:
    """Fill ``predicted``; J of each token, or (D,)."""
    sizes, each = (lam.numel(), lam.shape[-1]), J.shape == lam.shape
    _launched(_predict, lam)(lam, J, Q, predicted, low, cap, *sizes, EACH=each, FLOOR=FLOOR, ELEMENTS=ELEMENTS)


def predict_gradients(given: tuple[Tensor, ...], d_lam: Tensor, d_J: Tensor | None, low: float, cap: float) -> Tensor:
    """From lam, J, Q, lam'' and its gradient; returned is the gradient of Q, (D,)."""
    lam, J, Q = given[:3]
    D = lam.shape[-1]
    N = lam.numel() // max(D, 1)
    columns = triton.next_power_of_2(D)
    tokens = max(1, SUMMED // columns)
    parts = Q.new_empty(triton.cdiv(N, tokens), D)
    if len(parts):
        launched_beside(lam, _predict_gradients[(len(parts),)])(
            *(*given, d_lam, d_J, parts, low, cap, N, D),
            EACH=J.shape == lam.shape, FLOOR=FLOOR, TOKENS=tokens, COLUMNS=columns,
        )  # fmt: skip
    return parts.sum(dim=0)


class _Update(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, lam: Tensor, e: Tensor, r: Tensor, ramp: float) -> tuple[Tensor, Tensor, Tensor]:
        h, lam, e, r = (x.contiguous() for x in (h, lam, e, r))
        ctx.set_materialize_grads(False)  # nothing is made of the precision after the last layer
        updated, after, gain = torch.empty_like(h), torch.empty_like(lam), torch.empty_like(lam)
        _launched(_update, h)(h, lam, e, r, updated, after, gain, ramp, h.numel(), ELEMENTS=ELEMENTS)
        ctx.save_for_backward(e, r, after)
        ctx.ramp = ramp
        ctx.mark_non_differentiable(gain)
        return updated, after, gain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_h: Tensor | None, g_after: Tensor | None, _: Tensor | None) -> Any:
        e, r, after = ctx.saved_tensors
        g_h = torch.zeros_like(after) if g_h is None else g_h.contiguous()
        g_after = None if g_after is None else g_after.contiguous()
        d_lam, d_e, d_r = (torch.empty_like(after) for _ in range(3))
        read, written = (e, r, after, g_h, g_after), (d_lam, d_e, d_r)
        _launched(_update_gradients, after)(*read, *written, ctx.ramp, after.numel(), ELEMENTS=ELEMENTS)
        return g_h, d_lam, d_e, d_r, None


def _launched(kernel: Any, x: Tensor) -> Any:
    """A kernel with as many programs as the elements of ``x`` take, on its device."""
    return launched_beside(x, kernel[(max(1, triton.cdiv(x.numel(), ELEMENTS)),)])


# fmt: off
@triton.jit
def _update(
    means, precisions, innovations, observed,  # read
    updated, after, gains,  # written
    ramp, size, ELEMENTS: tl.constexpr,
):
    # fmt: on
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    real = at < size
    r = tl.load(observed + at, mask=real, other=0.0)
    total = tl.load(precisions + at, mask=real, other=1.0) + r
    gain = 1 - ramp * (1 - r / total)
    h = tl.load(means + at, mask=real, other=0.0)
    e = tl.load(innovations + at, mask=real, other=0.0)
    tl.store(updated + at, h + gain * e, mask=real)
    tl.store(after + at, total, mask=real)
    tl.store(gains + at, gain, mask=real)


# fmt: off
@triton.jit
def _update_gradients(
    innovations, observed, after, of_mean, of_precision,  # read; the last may be None
    d_precision, d_innovation, d_observed,  # written
    ramp, size, ELEMENTS: tl.constexpr,
):
    # fmt: on
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    real = at < size
    total = tl.load(after + at, mask=real, other=1.0)
    share = tl.load(observed + at, mask=real, other=0.0) / total
    g = tl.load(of_mean + at, mask=real, other=0.0)
    p = ramp * g * tl.load(innovations + at, mask=real, other=0.0) / total
    own = -p * share
    if of_precision is not None:
        own += tl.load(of_precision + at, mask=real, other=0.0)
    tl.store(d_precision + at, own, mask=real)
    tl.store(d_observed + at, own + p, mask=real)
    tl.store(d_innovation + at, g * (1 - ramp * (1 - share)), mask=real)


# fmt: off
@triton.jit
def _predict(
    precisions, jacobians, noises,  # read
    predicted,  # written
    low, cap, size, width, EACH: tl.constexpr, FLOOR: tl.constexpr, ELEMENTS: tl.constexpr,
):
    # fmt: on
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    real, column = at < size, at % width
    lam = tl.load(precisions + at, mask=real, other=1.0)
    stretch = 1 + tl.load(jacobians + (at if EACH else column), mask=real, other=0.0)
    square = stretch * stretch
    slope = tl.where(square < FLOOR, FLOOR, square)  # not maximum, which drops what is not a number
    found = lam / (slope + tl.load(noises + column, mask=real, other=0.0) * lam)
    found = tl.where(found < low, low, found)
    tl.store(predicted + at, tl.where(found > cap, cap, found), mask=real)


# fmt: off
@triton.jit
def _predict_gradients(
    precisions, jacobians, noises, predicted, of_predicted,  # read
    d_precision, d_jacobian, d_noises,  # written; d_jacobian may be None; d_noises by program
    low, cap, num_tokens, width,
    EACH: tl.constexpr, FLOOR: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):
    # fmt: on
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.arange(0, COLUMNS)
    inside = columns < width
    at = tokens[:, None] * width + columns[None, :]
    real = (tokens < num_tokens)[:, None] & inside[None, :]
    lam = tl.load(precisions + at, mask=real, other=0.0)
    after = tl.load(predicted + at, mask=real, other=0.0)
    if EACH:
        stretch = 1 + tl.load(jacobians + at, mask=real, other=0.0)
    else:
        stretch = 1 + tl.load(jacobians + columns, mask=inside, other=0.0)[None, :]
    square = stretch * stretch
    slope = tl.where(square < FLOOR, FLOOR, square)
    divisor = slope + tl.load(noises + columns, mask=inside, other=0.0)[None, :] * lam
    p = tl.load(of_predicted + at, mask=real, other=0.0) / (divisor * divisor)
    p = tl.where((after > low) & (after < cap), p, 0.0)
    tl.store(d_precision + at, p * slope, mask=real)
    p *= lam
    if d_jacobian is not None:
        tl.store(d_jacobian + at, tl.where(square > FLOOR, -2 * p * stretch, 0.0), mask=real)
    tl.store(d_noises + tl.program_id(0) * width + columns, -tl.sum(p * lam, 0), mask=inside)
