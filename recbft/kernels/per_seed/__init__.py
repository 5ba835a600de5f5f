"""Linear map and layer norm with weights of their own for every seed: which path serves a call."""

from __future__ import annotations

from torch import Tensor

from recbft.autograd.eager import eagerly
from recbft.kernels.dispatch import Path, choose
from recbft.kernels.layer_norm import fused
from recbft.kernels.per_seed import cpu, reference

LINEAR = {"cpu": Path(lambda: cpu.linear, "cpu"), "reference": Path(lambda: reference.linear)}
LAYER_NORM = {"cpu": Path(lambda: cpu.layer_norm, "cpu"), "reference": Path(lambda: reference.layer_norm)}


@eagerly
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, impl: str = "auto") -> Tensor:
    """``x[s] @ weight[s].T + bias[s]`` for every seed s.

    Args:
        x: (S, N, I).
        weight, bias: (S, O, I), and (S, O) or None.
        impl: ``auto`` takes the fast path on any CPU tensor; ``reference`` and ``cpu`` force one.

    Returns:
        (S, N, O).
    """
    found: Tensor = choose(impl, LINEAR, x)(x, weight, bias)
    return found


@eagerly
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float, impl: str = "auto") -> Tensor:
    """Layer norm over the last axis with weights of each seed; x (S, N, D), weight and bias (S, D)."""
    at_once = fused(x, weight, bias, eps) if impl == "auto" else None
    if at_once is not None:
        return at_once
    found: Tensor = choose(impl, LAYER_NORM, x)(x, weight, bias, eps)
    return found
