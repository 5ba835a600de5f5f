"""Update and prediction in C (``compiled/filter_step.c``): every array is read and written once in each direction.

They serve what ``operands`` calls plain.

Shapes: N tokens, D model width; the tokens' axes come first.
"""

from __future__ import annotations

from ctypes import c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from recbft.core.belief import Belief
from recbft.kernels import compiled
from recbft.kernels.compiled import pointer
from recbft.kernels.filter_step.analytic import FLOOR
from recbft.kernels.transforms import applied


def kalman_update(belief: Belief, innovation: Tensor, observation_precision: Tensor, *, ramp: float) -> Belief:
    """The same as ``analytic.kalman_update``."""
    return Belief(*applied(_Update, belief.mean, belief.precision, innovation, observation_precision, ramp))


def predict_precision(precision: Tensor, jacobian: Tensor, process_noise: Tensor, *, low: float, cap: float) -> Tensor:
    """The same as ``analytic.predict_precision``."""
    predicted: Tensor = applied(_Predict, precision, jacobian, process_noise, low, cap)
    return predicted


def _of(*tensors: Tensor | None) -> list[c_void_p]:
    return [c_void_p(pointer(x)) for x in tensors]


class _Update(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, lam: Tensor, e: Tensor, r: Tensor, ramp: float) -> tuple[Tensor, Tensor]:
        h, lam, e, r = (x.contiguous() for x in (h, lam, e, r))
        updated, after = torch.empty_like(h), torch.empty_like(lam)
        parts = _of(h, lam, e, r, updated, after)
        compiled.library().update_forward(c_int64(h.numel()), c_float(ramp), *parts)
        ctx.save_for_backward(e, r, after)
        ctx.ramp = ramp
        return updated, after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_h: Tensor, g_after: Tensor) -> Any:
        e, r, after = ctx.saved_tensors
        g_h, g_after = g_h.contiguous(), g_after.contiguous()
        d_lam, d_e, d_r = (torch.empty_like(after) for _ in range(3))
        parts = _of(e, r, after, g_h, g_after, d_lam, d_e, d_r)
        compiled.library().update_backward(c_int64(e.numel()), c_float(ctx.ramp), *parts)
        return g_h, d_lam, d_e, d_r, None


class _Predict(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lam: Tensor, J: Tensor, Q: Tensor, low: float, cap: float) -> Tensor:
        D = lam.shape[-1]
        ctx.noise_shape = Q.shape
        each = J.shape == lam.shape
        lam, Q = lam.contiguous(), Q.expand(D).contiguous()
        J = (J if each else J.expand(D)).contiguous()
        predicted = torch.empty_like(lam)
        sizes, bounds = (c_int64(lam.numel() // D), c_int64(D), c_int64(each)), map(c_float, (FLOOR, low, cap))
        compiled.library().predict_forward(*sizes, *bounds, *_of(lam, J, Q, predicted))
        ctx.save_for_backward(lam, J, Q, predicted)
        ctx.each, ctx.bounds = each, (low, cap)
        return predicted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        lam, J, Q, predicted = ctx.saved_tensors
        D, g = lam.shape[-1], g.contiguous()
        N = lam.numel() // D
        library = compiled.library()
        d_lam = torch.empty_like(lam)
        d_J = torch.empty_like(J) if ctx.each and ctx.needs_input_grad[1] else None
        sums = Q.new_empty(library.predict_sums(c_int64(N)), D)
        sizes, bounds = (c_int64(N), c_int64(D), c_int64(ctx.each)), map(c_float, (FLOOR, *ctx.bounds))
        library.predict_backward(*sizes, *bounds, *_of(lam, J, Q, predicted, g, d_lam, d_J, sums))
        d_Q = sums.sum(dim=0).sum_to_size(ctx.noise_shape) if ctx.needs_input_grad[2] else None
        return d_lam, d_J, d_Q, None, None
