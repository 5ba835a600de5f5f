"""Softmax moments of logits far from 0, as compiled: products and sums are fused, bfloat16 is rounded to nearest."""

from __future__ import annotations

import sys
from unittest.mock import patch

import torch

from benchmarks.ptx.launches import running
from recbft.core import SequenceContext, softmax_moments_ref
from recbft.kernels.softmax_moments import triton as path

T, K = 128, 16
SMALL = {"OWN": 16, "OTHER": 16, "num_warps": 1, "num_stages": 1}


def check_many_tiles(capability: int) -> None:
    """The error is at most twice that of the plain path in the same type."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, T, K, generator=g) for _ in range(3))
    trust = torch.full((1, T), 40.3)
    trust[:, 0] += 8  # the largest logit comes first
    context = SequenceContext(torch.zeros(1, T, dtype=torch.long), torch.arange(T)[None], causal=False)

    def moments(function, dtype):
        given = (x.to(dtype) for x in (q, k, v))
        return function(*given, context, log_precision=trust.to(dtype), log_decay=None, dropout=0.0)

    exact, plain = (moments(softmax_moments_ref, dtype) for dtype in (torch.float64, torch.float32))
    with torch.no_grad(), patch.object(path, "_tiles", lambda *_, **__: SMALL), running(capability):
        found = moments(path.softmax_moments, torch.float32)
    for name, ours, theirs, truth in zip(exact._fields, found, plain, exact, strict=True):
        error, allowed = (float((x.double() - truth).norm() / truth.norm()) for x in (ours, theirs))
        assert error <= 2 * allowed, f"{name}: {error:.2e} against {allowed:.2e}"


def check_the_least_number(capability: int) -> None:
    """A key whose log precision is the least float32, which rounds to -inf in bfloat16, is not read."""
    g = torch.Generator().manual_seed(0)
    heads = [torch.randn(1, 1, 20, 1, generator=g).bfloat16().requires_grad_() for _ in range(3)]
    context = SequenceContext(torch.zeros(1, 20, dtype=torch.long), torch.arange(20)[None])
    found = []
    for least in (torch.finfo(torch.float32).min, float("-inf")):
        trust = torch.zeros(1, 20)
        trust[:, 3] = least
        with patch.object(path, "_tiles", lambda *_, **__: SMALL), running(capability):
            moments = path.softmax_moments(*heads, context, log_precision=trust, log_decay=None, dropout=0.0)
            total = sum(moment.float().square().mean() for moment in moments)
            found.append([*(moment.detach() for moment in moments), *torch.autograd.grad(total, heads)])
    for one, other in zip(*found, strict=True):
        assert one.isfinite().all() and torch.equal(one, other)


if __name__ == "__main__":
    check_many_tiles(int(sys.argv[1]))
    check_the_least_number(int(sys.argv[1]))
