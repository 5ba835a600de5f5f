"""Cross-entropy over the whole item vocabulary.

    loss = mean_n( log sum_v exp(x_n . w_v) - x_n . w_target(n) )                                (6.3)

Shapes: N positions, V items, D width, S seeds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import (
    Tensor,
    bfloat16,
    dtype,
    float16,
    float32,
    get_autocast_dtype,
    is_autocast_enabled,
    promote_types,
    stack,
)

from recbft.autograd.eager import eagerly
from recbft.kernels.cross_entropy import torch as by_torch
from recbft.kernels.dispatch import Path, choose, late

TRITON_ROW_BYTES = 1024  # of a state in the type that is multiplied; a program holds several


def _triton_declines(states: Tensor, *, weight: Tensor) -> str | None:
    kind = product_dtype(states, weight)
    name = str(kind).removeprefix("torch.")
    if kind not in (float32, bfloat16, float16):
        return f"needs float32, bfloat16 or float16, got {name}"
    widest = TRITON_ROW_BYTES // kind.itemsize
    if states.shape[-1] > widest:
        return f"needs a width of at most {widest} in {name}, got {states.shape[-1]}"
    return None


def product_dtype(states: Tensor, weight: Tensor) -> dtype:
    """The type in which ``states @ weight.T`` is multiplied: autocast's where it is on."""
    if is_autocast_enabled(states.device.type):
        return get_autocast_dtype(states.device.type)
    return promote_types(states.dtype, weight.dtype)


def full_cross_entropies_ref(states: Tensor, weight: Tensor, target: Tensor, counts: Sequence[int]) -> Tensor:
    """The plain form of ``full_cross_entropies``."""
    parts = zip(states.split(list(counts)), weight, target.split(list(counts)), strict=True)
    return stack([F.cross_entropy(x @ w.T, wanted) for x, w, wanted in parts])  # (6.3)


PATHS = {
    "triton": Path(
        late("cross_entropy", "full_cross_entropies"), "cuda", _triton_declines, opened=True, takes_halves=True
    ),
    "torch": Path(lambda: by_torch.full_cross_entropies, "cpu", opened=True),
    "reference": Path(lambda: full_cross_entropies_ref),
}


@eagerly
def full_cross_entropy(states: Tensor, weight: Tensor, target: Tensor, *, impl: str = "auto") -> Tensor:
    """Mean cross-entropy of ``softmax(states @ weight.T)`` at the targets.

    Args:
        states: (N, D), N >= 1.
        weight: item vectors, (V, D).
        target: row of ``weight`` each position should find, (N,), in [0, V).
        impl: ``auto`` takes the fastest path for the device; ``triton``, ``torch`` and ``reference`` force one.

    Returns:
        A scalar, float32 from ``triton``; ``torch`` forms gradients in the forward pass and supports one backward pass.
    """
    loss: Tensor = full_cross_entropies(states, weight[None], target, [len(states)], impl=impl)[0]
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
    losses: Tensor = choose(impl, PATHS, states, weight=weight)(states, weight, target, counts)
    return losses
