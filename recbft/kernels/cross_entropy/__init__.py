"""Cross-entropy over the whole item vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recbft.autograd.eager import eagerly
from recbft.kernels.cross_entropy import cpu, reference
from recbft.kernels.dispatch import Path, choose, late

TRITON_ROW_BYTES = 1024  # of a state in the type that is multiplied; a program holds several


def _triton_declines(states: Tensor, *, weight: Tensor) -> str | None:
    dtype = product_dtype(states, weight)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"needs float32, bfloat16 or float16, got {str(dtype).removeprefix('torch.')}"
    widest = TRITON_ROW_BYTES // dtype.itemsize
    if states.shape[-1] > widest:
        return f"needs a width of at most {widest} in {str(dtype).removeprefix('torch.')}, got {states.shape[-1]}"
    return None


def product_dtype(states: Tensor, weight: Tensor) -> torch.dtype:
    """The type in which ``states @ weight.T`` is multiplied: autocast's where it is on."""
    if torch.is_autocast_enabled(states.device.type):
        return torch.get_autocast_dtype(states.device.type)
    return torch.promote_types(states.dtype, weight.dtype)


def _paths(name: str) -> dict[str, Path]:
    return {
        "triton": Path(late("cross_entropy", name), "cuda", _triton_declines, opened=True, takes_halves=True),
        "cpu": Path(lambda: getattr(cpu, name), "cpu", opened=True),
        "reference": Path(lambda: getattr(reference, name)),
    }


PATHS = _paths("full_cross_entropy")
SEVERAL = _paths("full_cross_entropies")


@eagerly
def full_cross_entropy(states: Tensor, weight: Tensor, target: Tensor, *, impl: str = "auto") -> Tensor:
    """Mean cross-entropy of ``softmax(states @ weight.T)`` at the targets.

    Args:
        states: (N, D), N >= 1.
        weight: item vectors, (V, D).
        target: row of ``weight`` each position should find, (N,), in [0, V).
        impl: ``auto`` takes the fastest path for the device; ``triton``, ``cpu`` and ``reference`` force one.

    Returns:
        A scalar, float32 from ``triton``; ``cpu`` forms gradients in the forward pass and supports one backward pass.
    """
    loss: Tensor = choose(impl, PATHS, states, weight=weight)(states, weight, target)
    return loss


@eagerly
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
    losses: Tensor = choose(impl, SEVERAL, states, weight=weight)(states, weight, target, counts)
    return losses
