"""Linear map and layer norm with weights of their own for every seed: which path serves a call."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from recbft.kernels.per_seed import cpu, reference

PATHS: dict[str, ModuleType] = {"reference": reference, "cpu": cpu}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, impl: str = "auto") -> Tensor:
    """``x[s] @ weight[s].T + bias[s]`` for every seed s.

    Args:
        x: (S, N, I).
        weight, bias: (S, O, I), and (S, O) or None.
        impl: ``auto`` takes the fast path on any CPU tensor; ``reference`` and ``cpu`` force one.

    Returns:
        (S, N, O).
    """
    found: Tensor = _path(impl, x).linear(x, weight, bias)
    return found


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float, impl: str = "auto") -> Tensor:
    """Layer norm over the last axis with weights of each seed; x (S, N, D), weight and bias (S, D)."""
    found: Tensor = _path(impl, x).layer_norm(x, weight, bias, eps)
    return found


def _path(impl: str, x: Tensor) -> ModuleType:
    if impl == "auto":
        impl = "cpu" if x.device.type == "cpu" else "reference"
    if impl not in PATHS:
        raise ValueError(f"unknown impl {impl!r}; choose one of auto, {', '.join(sorted(PATHS))}")
    return PATHS[impl]
