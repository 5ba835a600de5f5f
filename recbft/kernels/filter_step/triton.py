"""Update and prediction on a GPU: one launch in each direction instead of some twenty.

They serve what ``operands`` calls plain; the equations are those of ``analytic``. Sums over tokens are made of parts
that are added up in one order, so that two runs are equal bit for bit.

Shapes: N tokens, D model width; the tokens' axes come first.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from recbft.core.belief import Belief
from recbft.kernels.dispatch import launched_beside
from recbft.kernels.filter_step.analytic import FLOOR
from recbft.kernels.transforms import applied

ELEMENTS = 1024  # of a program
SUMMED = 2048  # elements of a program that adds up over tokens


def kalman_update(belief: Belief, innovation: Tensor, observation_precision: Tensor, *, ramp: float) -> Belief:
    """The same as ``analytic.kalman_update``."""
    return Belief(
        *launched_beside(innovation, applied)(
            _Update, belief.mean, belief.precision, innovation, observation_precision, ramp
        )
    )


def predict_precision(precision: Tensor, jacobian: Tensor, process_noise: Tensor, *, low: float, cap: float) -> Tensor:
    """The same as ``analytic.predict_precision``."""
    predicted: Tensor = launched_beside(precision, applied)(_Predict, precision, jacobian, process_noise, low, cap)
    return predicted


class _Update(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, lam: Tensor, e: Tensor, r: Tensor, ramp: float) -> tuple[Tensor, Tensor]:
        h, lam, e, r = (x.contiguous() for x in (h, lam, e, r))
        updated, after = torch.empty_like(h), torch.empty_like(lam)
        _update[_programs(h)](h, lam, e, r, updated, after, ramp, h.numel(), ELEMENTS=ELEMENTS)
        ctx.save_for_backward(e, r, after)
        ctx.ramp = ramp
        return updated, after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_h: Tensor, g_after: Tensor) -> Any:
        e, r, after = ctx.saved_tensors
        g_h, g_after = g_h.contiguous(), g_after.contiguous()
        d_lam, d_e, d_r = (torch.empty_like(after) for _ in range(3))
        _update_gradients[_programs(e)](
            e, r, after, g_h, g_after, d_lam, d_e, d_r, ctx.ramp, e.numel(), ELEMENTS=ELEMENTS
        )
        return g_h, d_lam, d_e, d_r, None


class _Predict(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lam: Tensor, J: Tensor, Q: Tensor, low: float, cap: float) -> Tensor:
        D, each = lam.shape[-1], J.shape == lam.shape
        ctx.noise_shape = Q.shape
        lam, Q = lam.contiguous(), Q.expand(D).contiguous()
        J = (J if each else J.expand(D)).contiguous()
        predicted = torch.empty_like(lam)
        _predict[_programs(lam)](
            lam, J, Q, predicted, low, cap, lam.numel(), D, EACH=each, FLOOR=FLOOR, ELEMENTS=ELEMENTS
        )
        ctx.save_for_backward(lam, J, Q, predicted)
        ctx.each, ctx.bounds = each, (low, cap)
        return predicted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        lam, J, Q, predicted = ctx.saved_tensors
        D, g = lam.shape[-1], g.contiguous()
        N = lam.numel() // max(D, 1)
        d_lam = torch.empty_like(lam)
        d_J = torch.empty_like(J) if ctx.each and ctx.needs_input_grad[1] else None
        columns = triton.next_power_of_2(D)
        tokens = max(1, SUMMED // columns)
        parts = triton.cdiv(N, tokens)
        sums = Q.new_empty(parts, D)
        if parts:
            _predict_gradients[(parts,)](
                *(lam, J, Q, predicted, g, d_lam, d_J, sums, *ctx.bounds, N, D),
                EACH=ctx.each, FLOOR=FLOOR, TOKENS=tokens, COLUMNS=columns,
            )  # fmt: skip
        d_Q = sums.sum(dim=0).sum_to_size(ctx.noise_shape) if ctx.needs_input_grad[2] else None
        return d_lam, d_J, d_Q, None, None


def _programs(x: Tensor) -> tuple[int]:
    return (max(1, triton.cdiv(x.numel(), ELEMENTS)),)


# fmt: off
@triton.jit
def _update(
    means, precisions, innovations, observed,  # read
    updated, after,  # written
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


# fmt: off
@triton.jit
def _update_gradients(
    innovations, observed, after, of_mean, of_precision,  # read
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
    own = tl.load(of_precision + at, mask=real, other=0.0) - p * share
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
