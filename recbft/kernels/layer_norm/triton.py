"""Layer normalisation on a GPU: a program takes some tokens; gradients of w and b are added up part by part,
in one order: bit for bit the same in every run.

With n = (x - m) s, what is normed, and g = d_y * w,

    d_x = s (g - sum_d g_d / D - n sum_d (g_d n_d) / D)    d_w = sum_tokens d_y * n    d_b = sum_tokens d_y (b)

Shapes: S seeds, N tokens of each, D width, P parts, W columns of them.
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

ELEMENTS = 4096  # of a tile of a program, and of parts that it reads at once
COLUMNS = 16  # of parts that a program adds up, at most
MOST_PARTS = 512  # of a seed: a few for each multiprocessor; the last launch reads them all


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The same as ``layer_norms_ref``, of at least one token."""
    found: Tensor = _LayerNorm.apply(x, weight, bias, eps)
    return found


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        S, N, D = x.shape
        x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
        y, mean, scale = torch.empty_like(x), x.new_empty(S, N), x.new_empty(S, N)
        rows, columns = _tile(D)
        grid = triton.cdiv(N, rows), S
        launched_beside(x, _forward[grid])(x, weight, bias, y, mean, scale, eps, N, D, ROWS=rows, COLUMNS=columns)
        ctx.save_for_backward(x, weight, mean, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        S, N, D = x.shape
        rows, columns = _tile(D)
        of_part = triton.cdiv(triton.cdiv(N, rows), MOST_PARTS)  # tiles
        num_parts = triton.cdiv(N, rows * of_part)
        d_x, parts, d_both = torch.empty_like(x), x.new_empty(S, num_parts, 2, D), x.new_empty(2, S, D)
        launched_beside(x, _backward[num_parts, S])(
            g.contiguous(), x, weight, mean, scale, d_x, parts, N, D, of_part, ROWS=rows, COLUMNS=columns
        )
        columns = min(COLUMNS, triton.next_power_of_2(2 * D))
        rows = min(ELEMENTS // columns, triton.next_power_of_2(num_parts))
        launched_beside(x, _add_up[triton.cdiv(2 * D, columns), S])(
            parts, d_both, num_parts, D, ROWS=rows, COLUMNS=columns
        )
        return d_x, *d_both, None


def _tile(D: int) -> tuple[int, int]:
    """Tokens and columns of a tile."""
    columns = triton.next_power_of_2(D)
    return max(1, ELEMENTS // columns), columns


# fmt: off
@triton.jit
def _forward(
    x, weight, bias,  # read
    y, means, scales,  # written
    eps, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    # fmt: on
    """(a) of the mechanism for a tile of tokens of one seed."""
    seed, columns = tl.program_id(1).to(tl.int64), tl.arange(0, COLUMNS)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    known, inside = rows < num_rows, columns < width
    at, real = (seed * num_rows + rows)[:, None] * width + columns[None, :], known[:, None] & inside[None, :]
    values = tl.load(x + at, mask=real, other=0.0)
    mean = tl.sum(values, 1) / width
    values = tl.where(inside[None, :], values - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 1) / width + eps)
    w = tl.load(weight + seed * width + columns, mask=inside, other=0.0)
    b = tl.load(bias + seed * width + columns, mask=inside, other=0.0)
    tl.store(y + at, values * scale[:, None] * w[None, :] + b[None, :], mask=real)
    tl.store(means + seed * num_rows + rows, mean, mask=known)
    tl.store(scales + seed * num_rows + rows, scale, mask=known)


# fmt: off
@triton.jit
def _backward(
    of_y, x, weight, means, scales,  # read
    d_x, parts,  # written; (S, P, 2, D)
    num_rows, width, tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    # fmt: on
    """(b) for a part of the tokens of one seed."""
    seed, columns = tl.program_id(1).to(tl.int64), tl.arange(0, COLUMNS)
    inside = columns < width
    w = tl.load(weight + seed * width + columns, mask=inside, other=0.0)[None, :]
    d_weight, d_bias = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(0, tiles):
        rows = (tl.program_id(0).to(tl.int64) * tiles + tile) * ROWS + tl.arange(0, ROWS)
        known = rows < num_rows
        at, real = (seed * num_rows + rows)[:, None] * width + columns[None, :], known[:, None] & inside[None, :]
        mean = tl.load(means + seed * num_rows + rows, mask=known, other=0.0)[:, None]
        scale = tl.load(scales + seed * num_rows + rows, mask=known, other=0.0)[:, None]
        normed = tl.where(real, (tl.load(x + at, mask=real, other=0.0) - mean) * scale, 0.0)
        g_y = tl.load(of_y + at, mask=real, other=0.0)
        d_weight += g_y * normed
        d_bias += g_y
        g = g_y * w
        along, across = tl.sum(g * normed, 1) / width, tl.sum(g, 1) / width
        tl.store(d_x + at, scale * (g - across[:, None] - normed * along[:, None]), mask=real)
    to = parts + (seed * tl.num_programs(0) + tl.program_id(0)) * 2 * width + columns
    tl.store(to, tl.sum(d_weight, 0), mask=inside)
    tl.store(to + width, tl.sum(d_bias, 0), mask=inside)


@triton.jit
def _add_up(parts, sums, num_parts, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The gradients of w and b of one seed, from (S, P, 2, D) to (2, S, D)."""
    seed, columns = tl.program_id(1).to(tl.int64), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    parts += seed * num_parts * 2 * width
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, num_parts, ROWS):
        rows = start + tl.arange(0, ROWS)
        at = rows.to(tl.int64)[:, None] * (2 * width) + columns[None, :]
        real = (rows < num_parts)[:, None] & (columns < 2 * width)[None, :]
        total += tl.load(parts + at, mask=real, other=0.0)
    to = (columns // width * tl.num_programs(1) + seed) * width + columns % width
    tl.store(sums + to, tl.sum(total, 0), mask=columns < 2 * width)
