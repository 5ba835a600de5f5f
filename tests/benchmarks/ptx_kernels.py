"""Products of Triton compiled for the capability that is named, and run by ``benchmarks.ptx``: a program for tests."""

import sys

import torch
import triton
import triton.language as tl

from benchmarks.ptx.launches import running


@triton.jit
def product(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TURNED: tl.constexpr, PRECISION: tl.constexpr):
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + rows[:, None] * K + inner[None, :])
    if TURNED:  # (N, K) in memory
        right = tl.trans(tl.load(b + columns[:, None] * K + inner[None, :]))
    else:
        right = tl.load(b + inner[:, None] * N + columns[None, :])
    found = tl.dot(left, right, input_precision=PRECISION)
    found = tl.dot(left, right, acc=found, input_precision=PRECISION)
    tl.store(c + rows[:, None] * N + columns[None, :], found)


def main(capability: int) -> None:
    generator = torch.Generator().manual_seed(capability)
    shapes = [(16, 16, 16, 4), (64, 32, 32, 4), (128, 64, 64, 8), (64, 16, 128, 4)]
    with running(capability) as work:
        for M, N, K, warps in shapes:
            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                for turned in (False, True):
                    a = torch.randn(M, K, generator=generator).to(dtype)
                    b = torch.randn(*((N, K) if turned else (K, N)), generator=generator).to(dtype)
                    c = torch.full((M, N), torch.nan)
                    product[(1,)](a, b, c, M, N, K, turned, "tf32x3", num_warps=warps)
                    truth = 2 * a.double() @ (b.T if turned else b).double()
                    worst = float((c - truth).abs().max() / truth.abs().max())
                    assert worst < 1e-6, (M, N, K, dtype, turned, worst)
    assert work.launches.total() == 6 * len(shapes) and work.instructions["product"] > 0


if __name__ == "__main__":
    main(int(sys.argv[1]))
