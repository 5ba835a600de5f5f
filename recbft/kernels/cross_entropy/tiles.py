"""Loss and gradients of the full cross-entropy in tiles of positions by items, where whole rows of logits are too long.

A row of a million logits lies in memory, not in the cache, and so does dW, which every block of rows would go through.
In tiles, all that is touched at a time stays in the cache; the price is a second product x . w, since a position's sum
is known only after its last tile. With m and z as in ``cpu``:

    first     m, z over all tiles
    second    dX += exp(l - m) / z W        dW' += (X / z)' exp(l - m)        for each tile of W       (1)

Shapes: N positions, V items, D width; a tile has n positions by v items.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recbft.kernels.cross_entropy.exponentials import exponentials
from recbft.kernels.product import add_product, product

POSITIONS, ITEMS = 256, 4096  # of a tile: 4 MB of logits in float32


class Sums(NamedTuple):
    """What a position's exponentials add up to: total * exp(shift)."""

    shift: Tensor | None  # (N, 1), the largest logit; None where exp needs no shift
    total: Tensor  # (N, 1)


def exponential_sums(states: Tensor, weight: Tensor, *, bounded: bool) -> Sums:
    """The first pass; ``bounded`` says that no logit can leave the range in which exp is safe."""
    total = states.new_zeros(len(states), 1)
    shift = None if bounded else states.new_full((len(states), 1), float("-inf"))
    for items in _pieces(len(weight), ITEMS):
        for rows in _pieces(len(states), POSITIONS):
            logits = product(states[rows], weight[items])
            if shift is not None:
                higher = torch.maximum(shift[rows], logits.amax(dim=1, keepdim=True))
                total[rows] *= (shift[rows] - higher).exp_()
                shift[rows] = higher
                logits -= higher
            total[rows] += exponentials(logits, shifted=False)[1]
    return Sums(shift, total)


def gradients(states: Tensor, weight: Tensor, sums: Sums, *, count: int) -> tuple[Tensor, Tensor]:
    """The second pass: dX (N, D) and dW (V, D) of the mean of log z + m over ``count`` positions, the others' x 0."""
    share = 1 / (count * sums.total)
    scaled = states * share
    d_states, d_weight = torch.zeros_like(states), torch.empty_like(weight)
    for items in _pieces(len(weight), ITEMS):
        columns = weight[items].T.contiguous()
        d_columns = torch.zeros_like(columns)  # (D, v), the way its product is fastest
        for rows in _pieces(len(states), POSITIONS):
            logits = product(states[rows], weight[items])
            if sums.shift is not None:
                logits -= sums.shift[rows]
            odds, _, _ = exponentials(logits, shifted=False)
            add_product(d_states[rows], odds, columns)
            add_product(d_columns, scaled[rows].T, odds.T)
        d_weight[items] = d_columns.T
    return d_states.mul_(share), d_weight


def _pieces(num: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, num)) for first in range(0, num, size)]
