"""The log of a mean on a GPU: rows are summed up, and their gradients spread out, by one launch.

Shapes: N tokens, D width; the tokens' axes come first.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from recbft.autograd.transforms import once_differentiable
from recbft.kernels.dispatch import launched_beside

ELEMENTS = 2048  # of a program


def log_mean(x: Tensor) -> Tensor:
    """As the mechanism says; something, of any strides."""
    found: Tensor = _LogMean.apply(x)
    return found


class _LogMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y, total = (x.new_empty(x.shape[:-1]) for _ in range(2))
        _launch(_forward, x, rows, *rows.stride(), y, total)
        ctx.save_for_backward(total)
        ctx.shape = x.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (total,) = ctx.saved_tensors
        d_x: Tensor = total.new_empty(ctx.shape)
        _launch(_backward, d_x, g.contiguous(), total, d_x)
        return d_x


def _launch(kernel: Any, x: Tensor, *given: Any) -> None:
    """A kernel over the rows of ``x``."""
    N, D = x.numel() // x.shape[-1], x.shape[-1]
    columns = triton.next_power_of_2(D)
    rows = max(1, ELEMENTS // columns)
    launched_beside(x, kernel[(triton.cdiv(N, rows),)])(*given, N, D, ROWS=rows, COLUMNS=columns)


# fmt: off
@triton.jit
def _forward(
    values, of_row, of_column,  # read; their strides
    logs, totals,  # written
    num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    # fmt: on
    rows, columns = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = rows[:, None] * of_row + columns[None, :] * of_column
    real = (rows < num_rows)[:, None] & (columns < width)[None, :]
    total = tl.sum(tl.load(values + at, mask=real, other=0.0), 1)
    known = rows < num_rows
    tl.store(logs + rows, tl.log(tl.where(known, total, 1.0) / width), mask=known)
    tl.store(totals + rows, total, mask=known)


@triton.jit
def _backward(of_logs, totals, d_values, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    known = rows < num_rows
    d = tl.load(of_logs + rows, mask=known, other=0.0) / tl.load(totals + rows, mask=known, other=1.0)
    at, real = rows[:, None] * width + columns[None, :], known[:, None] & (columns < width)[None, :]
    tl.store(d_values + at, tl.broadcast_to(d[:, None], [ROWS, COLUMNS]), mask=real)
