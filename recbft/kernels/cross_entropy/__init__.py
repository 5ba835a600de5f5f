"""Cross-entropy over the whole item vocabulary."""

from __future__ import annotations

from torch import Tensor

from recbft.kernels.cross_entropy import cpu, reference

PATHS = {"reference": reference.full_cross_entropy, "cpu": cpu.full_cross_entropy}


def full_cross_entropy(states: Tensor, weight: Tensor, target: Tensor, *, impl: str = "auto") -> Tensor:
    """Mean cross-entropy of ``softmax(states @ weight.T)`` at the targets.

    Args:
        states: (N, D), N >= 1.
        weight: item vectors, (V, D).
        target: row of ``weight`` each position should find, (N,), in [0, V).
        impl: ``auto`` takes the blocked path on any CPU tensor; ``reference`` and ``cpu`` force one.

    Returns:
        A scalar. The blocked path forms gradients in the forward pass and supports one backward pass.
    """
    if impl == "auto":
        impl = "cpu" if states.device.type == "cpu" else "reference"
    if impl not in PATHS:
        raise ValueError(f"unknown impl {impl!r}; choose one of auto, {', '.join(sorted(PATHS))}")
    return PATHS[impl](states, weight, target)
