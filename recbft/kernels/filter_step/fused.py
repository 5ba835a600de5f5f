"""Update and prediction by one pass over memory in each direction: in C on a CPU, by Triton on a GPU.

They serve the common case, in single precision; the equations are those of ``analytic``.

Shapes: N tokens, D model width; the tokens' axes come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from recbft.autograd.transforms import applied, once_differentiable
from recbft.core.belief import Belief


class Passes(Protocol):
    """A module of passes, which read and write contiguous float32 arrays."""

    def update(self, h: Tensor, lam: Tensor, e: Tensor, r: Tensor, updated: Tensor, after: Tensor, ramp: float) -> None:
        """Fill the last two."""

    def update_gradients(self, given: tuple[Tensor | None, ...], found: tuple[Tensor, ...], ramp: float) -> None:
        """From e, r, lam', g_h and g_lam', which is None where it is zero: the gradients of lam, e and r."""

    def predict(self, lam: Tensor, J: Tensor, Q: Tensor, predicted: Tensor, low: float, cap: float) -> None:
        """Fill the last; J of each token, or (D,)."""

    def predict_gradients(
        self, given: tuple[Tensor, ...], d_lam: Tensor, d_J: Tensor | None, low: float, cap: float
    ) -> Tensor:
        """From lam, J, Q, lam'' and its gradient; returned is the gradient of Q, (D,)."""


@dataclass(frozen=True)
class Fused:
    """What ``analytic`` has, by these passes."""

    passes: Passes

    def kalman_update(
        self, belief: Belief, innovation: Tensor, observation_precision: Tensor, *, ramp: float
    ) -> Belief:
        """Equation (2); all (..., D)."""
        operands = belief.mean, belief.precision, innovation, observation_precision
        return Belief(*applied(_Update, self.passes, *operands, ramp))

    def predict_precision(
        self, precision: Tensor, jacobian: Tensor, process_noise: Tensor, *, low: float, cap: float
    ) -> Tensor:
        """Equation (3); precision (..., D), J like it or a constant (D,) or scalar, Q (D,) or scalar."""
        predicted: Tensor = applied(_Predict, self.passes, precision, jacobian, process_noise, low, cap)
        return predicted


def update_is_plain(belief: Belief, innovation: Tensor, observation_precision: Tensor) -> bool:
    """Whether passes serve an update: nothing broadcasts."""
    return _alike(belief.mean, belief.precision, innovation, observation_precision)


def prediction_is_plain(precision: Tensor, jacobian: Tensor, process_noise: Tensor) -> bool:
    """Whether they serve a prediction: the Jacobian is that of each token, or a constant that all share."""
    D = precision.shape[-1]
    shared = jacobian.shape in ((), (D,)) and jacobian.dtype == torch.float32 and not jacobian.requires_grad
    noise = process_noise.shape in ((), (D,)) and process_noise.dtype == torch.float32
    return noise and (_alike(precision) if shared else _alike(precision, jacobian))


def _alike(first: Tensor, *others: Tensor) -> bool:
    return first.dtype == torch.float32 and all(
        x.shape == first.shape and x.dtype == first.dtype and x.device == first.device for x in others
    )


class _Update(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, passes: Passes, h: Tensor, lam: Tensor, e: Tensor, r: Tensor, ramp: float
    ) -> tuple[Tensor, Tensor]:
        h, lam, e, r = (x.contiguous() for x in (h, lam, e, r))
        ctx.set_materialize_grads(False)  # nothing is made of the precision after the last layer
        updated, after = torch.empty_like(h), torch.empty_like(lam)
        passes.update(h, lam, e, r, updated, after, ramp)
        ctx.save_for_backward(e, r, after)
        ctx.passes, ctx.ramp = passes, ramp
        return updated, after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_h: Tensor | None, g_after: Tensor | None) -> Any:
        e, r, after = ctx.saved_tensors
        g_h = torch.zeros_like(after) if g_h is None else g_h.contiguous()
        g_after = None if g_after is None else g_after.contiguous()
        d_lam, d_e, d_r = (torch.empty_like(after) for _ in range(3))
        ctx.passes.update_gradients((e, r, after, g_h, g_after), (d_lam, d_e, d_r), ctx.ramp)
        return None, g_h, d_lam, d_e, d_r, None


class _Predict(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: Passes, lam: Tensor, J: Tensor, Q: Tensor, low: float, cap: float) -> Tensor:
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
