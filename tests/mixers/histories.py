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
