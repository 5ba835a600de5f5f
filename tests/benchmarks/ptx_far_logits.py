"""Softmax moments of many tiles whose logits are all far from 0, as compiled, where products and sums are fused."""

from __future__ import annotations

import sys
from unittest.mock import patch

import torch

from benchmarks.ptx.launches import running
from recbft.core import SequenceContext
from recbft.kernels.softmax_moments import reference
from recbft.kernels.softmax_moments import triton as path

T, K = 128, 16
SMALL = {"OWN": 16, "OTHER": 16, "num_warps": 1, "num_stages": 1}


def check(capability: int) -> None:
    """The error is at most twice that of the plain path in the same type."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, T, K, generator=g) for _ in range(3))
    trust = torch.full((1, T), 40.3)
    trust[:, 0] += 8  # the largest logit comes first
    context = SequenceContext(torch.zeros(1, T, dtype=torch.long), torch.arange(T)[None], causal=False)

    def moments(function, dtype):
        given = (x.to(dtype) for x in (q, k, v))
        return function(*given, context, log_precision=trust.to(dtype), log_decay=None, dropout=0.0)

    exact, plain = (moments(reference.softmax_moments, dtype) for dtype in (torch.float64, torch.float32))
    with torch.no_grad(), patch.object(path, "_tiles", lambda *_, **__: SMALL), running(capability):
        found = moments(path.softmax_moments, torch.float32)
    for name, ours, theirs, truth in zip(exact._fields, found, plain, exact, strict=True):
        error, allowed = (float((x.double() - truth).norm() / truth.norm()) for x in (ours, theirs))
        assert error <= 2 * allowed, f"{name}: {error:.2e} against {allowed:.2e}"


if __name__ == "__main__":
    check(int(sys.argv[1]))
