"""Robust filter attention on a GPU: three passes over tiles, nothing of shape (T, T), every sum in one order.

Sums over all tokens are left by ``triton_passes`` as one part per tile, and added up here. Queries, keys and values
are turned as they are loaded; with learned frequencies or a learned unit of time they are turned beforehand, and what
the unit does to lags is one of the sums.

Shapes: B rows, H heads, T tokens, K complex coordinates per head, n tiles of readers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from recbft.autograd.transforms import applied, decline_dropout, once_differentiable, transformed
from recbft.kernels import by_tokens
from recbft.kernels.dispatch import interpreted
from recbft.kernels.robust_filter.dynamics import Setting, turns_of
from recbft.kernels.robust_filter.triton_passes import forward, keys_backward, readers_backward

OWN, STEP = 16, 16  # tokens of a program, and those it goes over at once: larger tiles spill registers
MAX_WIDTH = 64  # complex coordinates that the registers hold
NUM_SCALARS = 8  # mu, s2, eta2, gamma2, nu, kappa, tau, scale


def decline(q: Tensor, *, dropout: float = 0.0, by_position: bool = True) -> str | None:
    """Why this path cannot serve a call, or None where it can."""
    if (reason := decline_dropout(dropout)) is not None:
        return reason
    if q.dtype != torch.complex64:
        return f"needs complex64, got {q.dtype}"
    if q.shape[-1] > MAX_WIDTH:
        return f"serves up to {MAX_WIDTH} complex coordinates per head, got {q.shape[-1]}"
    return None


def robust_filter(
    q: Tensor, k: Tensor, v: Tensor, setting: Setting, *, key_bias: Tensor | None, dropout: float, with_evidence: bool
) -> tuple[Tensor, Tensor | None]:
    """The same as the reference with scalars (H,)."""
    context, dynamics, clock, variant = setting
    H, T, K = q.shape[1:]
    asks, reads = turns_of(dynamics.frequency, clock)
    # Learned frequencies or unit of time, or what torch.func may ask about: the rotations are left to autograd.
    outside = asks.requires_grad or transformed()
    if outside:
        q, k = q * asks, k * reads
        v = v * reads if variant.rotate_values else v
    kappa = (dynamics.dof + K) / K
    scale = torch.ones_like(kappa)
    if isinstance(clock.unit, Tensor):
        scale = scale * (clock.unit.detach() / clock.unit)  # 1, with the gradient of the unit
    scalars = torch.stack((*dynamics[1:6], kappa, dynamics.temperature, scale), dim=-1)
    places = (
        context.segment.contiguous(),  # (B, T), as the positions
        context.position.contiguous(),
        _in_two(clock.query),  # (B or 1, T, 2), as those of the keys: one row may stand for all
        _in_two(clock.key),
        torch.view_as_real(asks.detach().contiguous()),  # (B or 1, H, T, K, 2), as those of the keys
        torch.view_as_real(reads.detach().contiguous()),
    )
    options = {
        "times_row": 2 * T if clock.query.shape[0] > 1 else 0,
        "turns_row": 2 * H * T * K if asks.shape[0] > 1 else 0,
        "horizon": variant.horizon,
        "p": dropout,
        "seed": int(torch.randint(2**31 - 1, ())) if dropout > 0 else 0,
        "CAUSAL": context.causal,
        "STUDENT": variant.kernel == "student",
        "MULTIPLICATIVE": variant.multiplicative,
        "TURN": not outside,
        "TURN_VALUES": not outside and variant.rotate_values,
        "WITH_EVIDENCE": with_evidence,
        "DROPOUT": dropout > 0,
    }
    mean, evidence = applied(_RobustFilter, q, k, v, scalars, key_bias, options, *places)
    if outside and variant.rotate_values:
        mean = mean * asks.conj()
    return mean, evidence if with_evidence else None


def _in_two(time: Tensor) -> Tensor:
    """Times as sums of two float32 numbers, (..., 2)."""
    time = time.detach()
    near = time.float()
    return torch.stack((near, (time - near.double()).float()), dim=-1)


class _RobustFilter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scalars: Tensor,
        key_bias: Tensor | None,
        options: dict[str, Any],
        *places: Tensor,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = _alike(q, k, v)
        scalars, bias = scalars.contiguous(), None if key_bias is None else key_bias.contiguous()
        mean = by_tokens(q)
        evidence, log_sum = (scalars.new_empty(q.shape[:3]) for _ in range(2))
        if mean.numel():
            settings = _settings(q, mean, options)
            forward[_grid(q)](*_pairs(q, k, v, mean), evidence, log_sum, scalars, bias, *places, **settings)
        ctx.save_for_backward(q, k, v, mean, log_sum, scalars, bias, *places)
        ctx.options = options
        return mean, evidence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, grad_evidence: Tensor) -> Any:
        q, k, v, mean, log_sum, scalars, bias, *places = ctx.saved_tensors
        (g,), grad_evidence = _alike(grad_mean), grad_evidence.contiguous()
        B, H, T, _ = q.shape
        dq, dk, dv = (by_tokens(q) for _ in range(3))
        parts = scalars.new_empty(B, _tiles(T), H, NUM_SCALARS)
        spent, d_bias = (scalars.new_empty(B, H, T) for _ in range(2))
        if mean.numel():
            settings = _settings(q, mean, ctx.options)
            shared = (scalars, bias, *places, *(2 * step for step in g.stride()[:3]))
            pairs = _pairs(q, k, v, g)
            readers_backward[_grid(q)](
                *pairs, *_pairs(mean, dq), grad_evidence, log_sum, spent, parts, *shared, **settings
            )
            keys_backward[_grid(q)](*pairs, *_pairs(dk, dv), grad_evidence, log_sum, spent, d_bias, *shared, **settings)
        return dq, dk, dv, parts.sum(dim=(0, 1)), None if bias is None else d_bias.sum(dim=1), *(None,) * 7


def _settings(q: Tensor, mean: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """What all kernels are told, by name; strides count numbers, of which a complex one has two."""
    _, H, T, K = q.shape
    strides = {
        f"{name}_{axis}": 2 * x.stride(i)
        for name, x in (("in", q), ("out", mean))
        for i, axis in enumerate(("row", "head", "token"))
    }
    return {
        **strides,
        **options,
        "H": H,
        "T": T,
        "K": K,
        # The residual is a difference of large numbers: TF32 alone would not do.
        "PRECISION": "ieee" if interpreted() else "tf32x3",
        "OWN": OWN,
        "STEP": STEP,
        "WIDTH": max(16, triton.next_power_of_2(K)),
        "num_warps": 2 if K <= 32 else 4,
        "num_stages": 1,  # registers are shorter than time to load
    }


def _tiles(T: int) -> int:
    return -(-T // OWN)


def _grid(q: Tensor) -> tuple[int]:
    B, H, T, _ = q.shape
    return (_tiles(T) * B * H,)


def _alike(*tensors: Tensor) -> list[Tensor]:
    """Complex tensors with the same strides and coordinates next to each other; copies where they are not so."""
    resolved = [x.resolve_conj() for x in tensors]
    if resolved[0].stride(-1) == 1 and all(x.stride() == resolved[0].stride() for x in resolved):
        return resolved
    return [x.contiguous() for x in resolved]


def _pairs(*tensors: Tensor) -> list[Tensor]:
    return [torch.view_as_real(x) for x in tensors]
