"""Packed histories for the tests of mixers: each token brings the same input wherever it is packed."""

from __future__ import annotations

import numpy as np
import torch

from recbft.core import SequenceContext
from recbft.datasets.batches import pack_histories

D, H = 8, 2
K = D // H


def packed(lengths, *, causal=True):
    """Histories of these lengths whose items are numbered through, with times."""
    stop = np.cumsum(lengths)
    batch = pack_histories(np.arange(1, stop[-1] + 1), stop - np.array(lengths), stop)
    time = 40 * batch.position + batch.position**3
    return batch, SequenceContext(batch.segment, batch.position, time, causal=causal)


def inputs(batch, seed=0):
    """Input and precision, (B, T, D) each, by item number."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(100, D, generator=generator, dtype=torch.float64)
    precision = torch.rand(100, D, generator=generator, dtype=torch.float64) * 9 + 0.1
    return x[batch.items], precision[batch.items]


def context(*rows, width=None, causal=True):
    """Rows of consecutive histories by their lengths, padded at the end."""
    width = max(sum(lengths) for lengths in rows) if width is None else width
    segment, position = torch.full((len(rows), width), -1), torch.zeros(len(rows), width, dtype=torch.int64)
    number = 0
    for row, lengths in enumerate(rows):
        column = 0
        for length in lengths:
            segment[row, column : column + length] = number
            position[row, column : column + length] = torch.arange(length)
            column, number = column + length, number + 1
    return SequenceContext(segment, position, causal=causal)


def drawn(seed=0, B=1, T=9, D=6):
    """Input and precision, (B, T, D) each."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
    return x, torch.rand(B, T, D, generator=generator, dtype=torch.float64) * 5 + 0.1
