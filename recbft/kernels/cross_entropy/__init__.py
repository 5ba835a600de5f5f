"""Cross-entropy over the whole item vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from recbft.kernels.cross_entropy import cpu, reference
from recbft.kernels.dispatch import Path, choose

PATHS = {
    "cpu": Path(lambda: cpu.full_cross_entropy, "cpu"),
    "reference": Path(lambda: reference.full_cross_entropy),
}
SEVERAL = {
    "cpu": Path(lambda: cpu.full_cross_entropies, "cpu"),
    "reference": Path(lambda: reference.full_cross_entropies),
}


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
    loss: Tensor = choose(impl, PATHS, states)(states, weight, target)
    return loss


def full_cross_entropies(
    states: Tensor, weight: Tensor, target: Tensor, counts: Sequence[int], *, impl: str = "auto"
) -> Tensor:
    """``full_cross_entropy`` of several seeds, (S,).

    Args:
        states, target: of all seeds, one after another, (N, D) and (N,).
        weight: (S, V, D).
        counts: positions of each seed, at least 1; their sum is N.
        impl: as above.
    """
    losses: Tensor = choose(impl, SEVERAL, states)(states, weight, target, counts)
    return losses
