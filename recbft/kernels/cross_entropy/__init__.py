"""Cross-entropy over the whole item vocabulary.

    loss = mean_n( log sum_v exp(x_n . w_v) - x_n . w_target(n) )                                (6.3)

Positions may have shares c_n in the place of 1 / N: sum_n c_n (log sum_v exp(x_n . w_v) - x_n . w_target(n)).
A position may leave items out of its sum, and add something to the logits of a few of them.

Shapes: N positions, V items, D width, S seeds, P pairs that are left out, A pairs that something is added to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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

from recbft.autograd.boundaries import eagerly
from recbft.kernels.cross_entropy import torch as by_torch
from recbft.kernels.dispatch import Path, choose, late

TRITON_ROW_BYTES = 1024  # of a state in the type that is multiplied; a program holds several


class Pairs(NamedTuple):
    """Numbers for some positions and items, ordered by position."""

    which: Tensor  # (2, A) position and row of ``weight``; what a pair has that stands twice is added up
    added: Tensor  # (A,) to its logit


def _triton_declines(
    states: Tensor,
    *,
    weight: Tensor,
    left_out: Tensor | None,
    added: Pairs | None = None,
    shares: Tensor | None = None,
) -> str | None:
    if left_out is not None or added is not None:
        return "treats all items alike"
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


def full_cross_entropies_ref(
    states: Tensor,
    weight: Tensor,
    target: Tensor,
    counts: Sequence[int],
    left_out: Tensor | None = None,
    added: Pairs | None = None,
    shares: Tensor | None = None,
) -> Tensor:
    """The plain form of ``full_cross_entropies``."""
    logits = [x @ w.T for x, w in zip(states.split(list(counts)), weight, strict=True)]
    if added is not None:
        which = by_torch.split(added.which, counts)
        values = added.added.split([pairs.shape[1] for pairs in which])
        logits = [x.index_put(tuple(p), v, accumulate=True) for x, p, v in zip(logits, which, values, strict=True)]
    if left_out is not None:
        which = by_torch.split(left_out, counts)
        logits = [x.index_put(tuple(p), x.new_tensor(float("-inf"))) for x, p in zip(logits, which, strict=True)]
    targets = target.split(list(counts))
    if shares is None:
        return stack([F.cross_entropy(x, y) for x, y in zip(logits, targets, strict=True)])  # (6.3)
    each = [F.cross_entropy(x, y, reduction="none") for x, y in zip(logits, targets, strict=True)]
    return stack([(c * x).sum() for c, x in zip(shares.split(list(counts)), each, strict=True)])


PATHS = {
    "triton": Path(
        late("cross_entropy", "full_cross_entropies"), "cuda", _triton_declines, opened=True, takes_halves=True
    ),
    "torch": Path(lambda: by_torch.full_cross_entropies, "cpu", opened=True),
    "reference": Path(lambda: full_cross_entropies_ref),
}


@eagerly
def full_cross_entropy(
    states: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    left_out: Tensor | None = None,
    added: Pairs | None = None,
    shares: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Mean cross-entropy of ``softmax(states @ weight.T)`` at the targets.

    Args:
        states: (N, D), N >= 1.
        weight: item vectors, (V, D).
        target: row of ``weight`` each position should find, (N,), in [0, V).
        left_out: positions, ascending, and the row of ``weight`` that each leaves out of its sum, (2, P); no target.
        added: what some pairs have more than the product.
        shares: c, (N,), >= 0; None for 1 / N.
        impl: ``auto`` takes the fastest path for the device; ``triton``, ``torch`` and ``reference`` force one.

    Returns:
        A scalar, float32 from ``triton``; ``torch`` forms gradients in the forward pass and supports one backward pass.
    """
    loss: Tensor = full_cross_entropies(
        states, weight[None], target, [len(states)], left_out=left_out, added=added, shares=shares, impl=impl
    )[0]
    return loss


@eagerly
def full_cross_entropies(
    states: Tensor,
    weight: Tensor,
    target: Tensor,
    counts: Sequence[int],
    *,
    left_out: Tensor | None = None,
    added: Pairs | None = None,
    shares: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """``full_cross_entropy`` of several seeds, (S,).

    Args:
        states, target: of all seeds, one after another, (N, D) and (N,).
        weight: (S, V, D).
        counts: positions of each seed, at least 1; their sum is N.
        left_out, added, impl: as above.
        shares: c of all seeds, (N,).
    """
    path = choose(impl, PATHS, states, weight=weight, left_out=left_out, added=added, shares=shares)
    given = {"left_out": left_out, "added": added, "shares": shares}
    more = {name: value for name, value in given.items() if value is not None}
    losses: Tensor = path(states, weight, target, counts, **more)
    return losses
