"""Rows of histories one after another, as batches are packed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recbft.core import SequenceContext


def packed(
    rows: Sequence[Sequence[int]],
    width: int,
    *,
    causal: bool = True,
    order: Tensor | None = None,
    offset: int = 0,
    device: str = "cpu",
) -> SequenceContext:
    """Histories of the given lengths in each row, padding behind them.

    Args:
        rows: lengths of the histories of each row.
        width: T.
        order: takes the columns apart.
        offset: the position of a history's first token.
    """
    segment = torch.full((len(rows), width), -1)
    position = torch.zeros(len(rows), width, dtype=torch.long)
    number = 0
    for row, lengths in enumerate(rows):
        column = 0
        for length in lengths:
            segment[row, column : column + length] = number
            position[row, column : column + length] = offset + torch.arange(length)
            column, number = column + length, number + 1
    if order is not None:
        segment, position = segment[:, order], position[:, order]
    return SequenceContext(segment.to(device), position.to(device), causal=causal)
