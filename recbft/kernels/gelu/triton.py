"""GELU and its slope on a GPU: one launch in each direction, the product with a narrow factor in it.

Shapes: N tokens, F feed-forward width, r columns, S seeds.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from recbft.kernels.dispatch import interpreted, launched_beside

ELEMENTS = 1024  # of a program
ROWS, COLUMNS = 32, 32  # of a tile beside the product
MOST_RANK = 64  # columns of a factor that a program multiplies with; wider ones are left to PyTorch's products

ROOT_HALF = tl.constexpr(0.7071067811865476)
PEAK = tl.constexpr(0.3989422804014327)  # of the normal density


def slope_product(a: Tensor, factor: Tensor, values: Tensor | None = None) -> Tensor:
    """As ``torch.slope_product``."""
    a = a.contiguous()
    if factor.shape[-1] <= MOST_RANK:
        z = a.new_empty(len(a), factor.shape[-1])
        _launch_rows(_gelu_product, a, factor, a, values, factor.contiguous(), z)
        return z
    slope = torch.empty_like(a)
    _launch(_gelu, a, a, values, slope)
    return _product(slope, factor)


def backward(a: Tensor, factor: Tensor, g_y: Tensor, g_z: Tensor) -> Tensor:
    """The gradient of a."""
    a, g_y = a.contiguous(), g_y.contiguous()
    d_a = torch.empty_like(a)
    if factor.shape[-1] <= MOST_RANK:
        _launch_rows(_product_gradient, a, factor, a, g_y, g_z.contiguous(), factor.contiguous(), d_a)
    else:
        _launch(_gelu_gradient, a, a, g_y, _product(g_z, factor.mT).contiguous(), d_a)
    return d_a


def _product(rows: Tensor, factor: Tensor) -> Tensor:
    """Rows times the factor of their seed."""
    if factor.dim() == 2:
        return rows @ factor
    return (rows.view(len(factor), -1, rows.shape[-1]) @ factor).flatten(0, 1)


def _launch(kernel: Any, like: Tensor, *tensors: Tensor | None) -> None:
    if like.numel():
        grid = (triton.cdiv(like.numel(), ELEMENTS),)
        launched_beside(like, kernel[grid])(*tensors, like.numel(), ELEMENTS=ELEMENTS)


def _launch_rows(kernel: Any, like: Tensor, factor: Tensor, *tensors: Tensor | None) -> None:
    """A kernel over the rows of each seed."""
    S, (N, width), rank = (1 if factor.dim() == 2 else len(factor)), like.shape, factor.shape[-1]
    if N and rank:
        tile = {"ROWS": ROWS, "COLUMNS": COLUMNS, "RANK": max(16, triton.next_power_of_2(rank))}
        launched_beside(like, kernel[triton.cdiv(N // S, ROWS), S])(
            *tensors, N // S, width, rank, PRECISION="ieee" if interpreted() else "tf32x3", **tile
        )


# fmt: off
@triton.jit
def _gelu_product(
    points, values, factor,  # read; written; read
    products,  # written
    num_rows, width, rank,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):
    # fmt: on
    """(4.1) for some rows of one seed, whose slopes stay here; ``values`` may be None."""
    seed, ranks = tl.program_id(1).to(tl.int64), tl.arange(0, RANK)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    known, kept = rows < num_rows, ranks < rank
    rows += seed * num_rows
    total = tl.zeros((ROWS, RANK), tl.float32)
    for start in range(0, width, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < width
        at, real = rows[:, None] * width + columns[None, :], known[:, None] & inside[None, :]
        a = tl.load(points + at, mask=real, other=0.0)
        share = 0.5 + 0.5 * tl.erf(a * ROOT_HALF)
        if values is not None:
            tl.store(values + at, a * share, mask=real)
        of_factor = (seed * width + columns)[:, None] * rank + ranks[None, :]
        m = tl.load(factor + of_factor, mask=inside[:, None] & kept[None, :], other=0.0)
        total = tl.dot(share + a * PEAK * tl.exp(-0.5 * a * a), m, acc=total, input_precision=PRECISION)
    tl.store(products + rows[:, None] * rank + ranks[None, :], total, mask=known[:, None] & kept[None, :])


# fmt: off
@triton.jit
def _product_gradient(
    points, of_values, of_products, factor,  # read
    d_points,  # written
    num_rows, width, rank,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):
    # fmt: on
    """(a) for some rows of one seed."""
    seed, ranks = tl.program_id(1).to(tl.int64), tl.arange(0, RANK)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    known, kept = rows < num_rows, ranks < rank
    rows += seed * num_rows
    g_z = tl.load(of_products + rows[:, None] * rank + ranks[None, :], mask=known[:, None] & kept[None, :], other=0.0)
    for start in range(0, width, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < width
        at, real = rows[:, None] * width + columns[None, :], known[:, None] & inside[None, :]
        of_factor = (seed * width + columns)[None, :] * rank + ranks[:, None]
        m = tl.load(factor + of_factor, mask=inside[None, :] & kept[:, None], other=0.0)
        pull = tl.dot(g_z, m, input_precision=PRECISION)
        a = tl.load(points + at, mask=real, other=0.0)
        bell = PEAK * tl.exp(-0.5 * a * a)
        g = tl.load(of_values + at, mask=real, other=0.0) * (0.5 + 0.5 * tl.erf(a * ROOT_HALF) + a * bell)
        tl.store(d_points + at, g + pull * bell * (2 - a * a), mask=real)


@triton.jit
def _gelu(points, values, slopes, size, ELEMENTS: tl.constexpr):
    """phi and phi' of (4.1); the first may be None."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    real = at < size
    a = tl.load(points + at, mask=real, other=0.0)
    share = 0.5 + 0.5 * tl.erf(a * ROOT_HALF)
    if values is not None:
        tl.store(values + at, a * share, mask=real)
    tl.store(slopes + at, share + a * PEAK * tl.exp(-0.5 * a * a), mask=real)


@triton.jit
def _gelu_gradient(points, of_values, of_slopes, d_points, size, ELEMENTS: tl.constexpr):
    """(a)."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    real = at < size
    a = tl.load(points + at, mask=real, other=0.0)
    bell = PEAK * tl.exp(-0.5 * a * a)
    slope = 0.5 + 0.5 * tl.erf(a * ROOT_HALF) + a * bell
    g = tl.load(of_values + at, mask=real, other=0.0) * slope
    g += tl.load(of_slopes + at, mask=real, other=0.0) * bell * (2 - a * a)
    tl.store(d_points + at, g, mask=real)
