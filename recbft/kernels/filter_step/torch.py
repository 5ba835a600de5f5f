"""The steps of the filter with backwards written out.

    r = min(m / (S + c), cap),  m = n + nu where n > 0, else 0,  c = nu s0 + epsilon               (2.8)
        g_S = -g r^2 / m    g_n = sum_k g r / m                both 0 where the cap holds           (a)
    lam' = lam + r    k = r / lam'    h' = h + (1 - w (1 - k)) e                                    (3.1), (3.2)
        with p = w g_h e / lam':   g_lam = g_lam' - p k    g_r = g_lam + p    g_e = g_h gain        (b)
    s = max((1 + J)^2, floor)    d = s + Q lam'    lam'' = lam' / d, clamped                        (4.3)
        with p = g / d^2, 0 where clamped:
        g_lam' = p s    g_J = -2 p lam' (1 + J), 0 where floored    g_Q = -sum p lam'^2             (c)

Shapes: B rows, H heads, T tokens, K head width, D model width.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from recbft.autograd.transforms import applied, once_differentiable
from recbft.core.belief import Belief
from recbft.core.filter_step import FLOOR
from recbft.core.observation_precision import epsilon_of


def reml_precision(
    residual_variance: Tensor, effective_sample_size: Tensor, *, prior_scale: float, prior_dof: float, cap: float
) -> Tensor:
    """Equation (2.8); S (B, H, T, K), n (B, H, T)."""
    constant = prior_dof * prior_scale + epsilon_of(residual_variance)
    precision: Tensor = applied(_Reml, residual_variance, effective_sample_size, prior_dof, constant, cap)
    return precision


def kalman_update(
    belief: Belief, innovation: Tensor, observation_precision: Tensor, *, ramp: float
) -> tuple[Belief, Tensor]:
    """Equations (3.1) and (3.2); all (B, T, D)."""
    mean, precision, gain = applied(_Update, *belief, innovation, observation_precision, ramp)
    return Belief(mean, precision), gain


def predict_precision(precision: Tensor, jacobian: Tensor, process_noise: Tensor, *, low: float, cap: float) -> Tensor:
    """Equation (4.3); precision (B, T, D), J broadcastable to it, Q (D,) or scalar."""
    predicted: Tensor = applied(_Predict, precision, jacobian, process_noise, low, cap)
    return predicted


def predict_by(
    passes: ModuleType, precision: Tensor, jacobian: Tensor, process_noise: Tensor, *, low: float, cap: float
) -> Tensor:
    """Equation (4.3), by the ``predict`` and ``predict_gradients`` of a module, one pass over memory in each direction.

    They take contiguous float32 arrays. Precision (..., D), J like it or a constant (D,) or scalar, Q (D,) or scalar.
    """
    predicted: Tensor = applied(_PredictBy, passes, precision, jacobian, process_noise, low, cap)
    return predicted


class _Reml(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, S: Tensor, n: Tensor, nu: float, constant: float, cap: float) -> Tensor:
        m = ((n + nu) * (n > 0))[..., None]
        r = torch.add(S, constant)
        torch.div(m, r, out=r).clamp_(max=cap)
        ctx.save_for_backward(r, m)
        ctx.cap = cap
        return r

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        r, m = ctx.saved_tensors
        flow = (g * r).mul_(r < ctx.cap)
        inverse = torch.where(m > 0, 1 / m, 0.0)
        d_n = flow.sum(dim=-1).mul_(inverse[..., 0])
        return flow.mul_(r).mul_(-inverse), d_n, None, None, None


class _Update(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, lam: Tensor, e: Tensor, r: Tensor, ramp: float) -> tuple[Tensor, Tensor, Tensor]:
        after = lam + r
        share = r / after
        gain = share if ramp == 1.0 else 1 - ramp * (1 - share)
        ctx.save_for_backward(after, share, gain, e)
        ctx.ramp = ramp
        ctx.mark_non_differentiable(gain)
        return torch.addcmul(h, gain, e), after, gain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_h: Tensor, g_after: Tensor, _: Tensor) -> Any:
        after, share, gain, e = ctx.saved_tensors
        p = (g_h * e).div_(after)
        if ctx.ramp != 1.0:
            p *= ctx.ramp
        g_lam = torch.addcmul(g_after, p, share, value=-1)
        return g_h, g_lam, g_h * gain, p.add_(g_lam), None


class _Predict(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lam: Tensor, J: Tensor, Q: Tensor, low: float, cap: float) -> Tensor:
        slope = (1 + J).square_().clamp_(min=FLOOR)
        divisor = torch.addcmul(slope, Q, lam) if slope.shape == lam.shape else slope + Q * lam
        predicted = (lam / divisor).clamp_(low, cap)
        ctx.save_for_backward(lam, J, divisor, predicted)
        ctx.bounds, ctx.noise_shape = (low, cap), Q.shape
        return predicted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        lam, J, divisor, predicted = ctx.saved_tensors
        low, cap = ctx.bounds
        p = (g / divisor).div_(divisor).mul_((predicted > low) & (predicted < cap))
        stretch = 1 + J
        slope = stretch.square().clamp_(min=FLOOR)
        g_lam = p * slope
        p *= lam
        g_Q = (p * lam).neg_().sum_to_size(ctx.noise_shape) if ctx.needs_input_grad[2] else None
        g_J = None
        if ctx.needs_input_grad[1]:
            g_J = p.mul_(-2).mul_(stretch).mul_(slope > FLOOR).sum_to_size(J.shape)
        return g_lam, g_J, g_Q, None, None


class _PredictBy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: ModuleType, lam: Tensor, J: Tensor, Q: Tensor, low: float, cap: float) -> Tensor:
        D, each = lam.shape[-1], J.shape == lam.shape
        ctx.noise_shape = Q.shape
        lam, Q = lam.contiguous(), Q.expand(D).contiguous()
        J = (J if each else J.expand(D)).contiguous()
        predicted = torch.empty_like(lam)
        passes.predict(lam, J, Q, predicted, low, cap)
        ctx.save_for_backward(lam, J, Q, predicted)
        ctx.passes, ctx.each, ctx.bounds = passes, each, (low, cap)
        return predicted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        lam, J, Q, predicted = ctx.saved_tensors
        d_lam = torch.empty_like(lam)
        d_J = torch.empty_like(J) if ctx.each and ctx.needs_input_grad[2] else None
        d_Q = ctx.passes.predict_gradients((lam, J, Q, predicted, g.contiguous()), d_lam, d_J, *ctx.bounds)
        return None, d_lam, d_J, d_Q.sum_to_size(ctx.noise_shape), None, None
