"""Full cross-entropy on a GPU: the (N, V) logits live a tile at a time in registers, forward and backward.

With l_nv = x_n . w_v, one pass over the vocabulary finds for every position

    m = max_v l    z = sum_v exp(l - m)    o = sum_v exp(l - m) w_v                                (a)
    loss = m + log z - l_target            dx = (o / z - w_target) / N                             (b)

and one pass over the positions finds for every item

    dw_v = sum_n (exp(l_nv - m_n - log z_n) - [v = target_n]) x_n / N                              (c)

With shares c_n of the positions these stand in the place of 1 / N. Where there are few positions, (a) is done for parts
of the vocabulary, which are merged in their order, and where there are few items, (c) for parts of the positions, which
are added up. Every number is written once, by one program that adds in a fixed order, so two runs are equal bit for
bit. Products take operands of the type of the inputs (of autocast, where it is on); sums, losses and what is kept are
float32. Logits are counted in units of log 2, since the machine's exponential has base 2.

Source: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models (arXiv 2411.09009); without its filter of
small gradients, which would leave out most of the vocabulary of a recommender.
Shapes: S seeds, N positions (of all seeds, or of one in the equations), V items, D width, P parts of the vocabulary
or of the positions.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from recbft.autograd.boundaries import exact_products
from recbft.autograd.transforms import applied, once_differentiable
from recbft.kernels import dispatch
from recbft.kernels.cross_entropy import product_dtype

OPERANDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Two at once on each multiprocessor of an H100, four times over, so that the last ones leave few of them idle. One
# number for all GPUs gives equal sums on all.
ENOUGH_PROGRAMS = 4 * 264
MERGED_ROWS = 16

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Probabilities among a million items are lost in float16 unless they are lifted.
LIFT = tl.constexpr(1024.0)


def full_cross_entropies(
    states: Tensor, weight: Tensor, target: Tensor, counts: Sequence[int], shares: Tensor | None = None
) -> Tensor:
    """The same as the reference, in float32."""
    learns = torch.is_grad_enabled()
    shares = None if shares is None else shares.float().contiguous()
    losses: Tensor = applied(_FullCrossEntropies, states, weight, target.contiguous(), list(counts), learns, shares)
    return losses


class _FullCrossEntropies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        target: Tensor,
        counts: list[int],
        learns: bool,
        shares: Tensor | None,
    ) -> Tensor:
        shape = _Shape.of(states, weight)
        offsets = _offsets(counts, states.device)
        losses, log_total, d_states = _forward(
            shape, states, weight, target, offsets, max(counts), learns and ctx.needs_input_grad[0]
        )
        ctx.save_for_backward(states, weight, target, offsets, log_total, d_states, shares)
        ctx.shape, ctx.counts = shape, counts
        if shares is not None:
            return torch.stack([own.sum() for own in (losses * shares).split(counts)])
        if len(counts) == 1:  # as below, in fewer launches
            return losses.mean(0, keepdim=True)
        return torch.stack([own.mean() for own in losses.split(counts)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        states, weight, target, offsets, log_total, d_states, shares = ctx.saved_tensors
        relative = None  # of each position, at most 1: half precision holds no more
        if shares is not None:
            largest = shares.amax().clamp(min=torch.finfo(shares.dtype).tiny)
            relative, share = shares / largest, grad * largest
            each = grad.repeat_interleave(offsets.diff(), output_size=len(states)) * shares
        elif len(ctx.counts) == 1:
            each = share = grad / len(states)
        else:
            counts = offsets.diff()
            share = grad / counts.clamp(min=1)  # of a position, (S,)
            each = share.repeat_interleave(counts, output_size=len(states))
        d_x = d_w = None
        if ctx.needs_input_grad[0]:
            d_x = (d_states * each[:, None]).to(states.dtype)
        if ctx.needs_input_grad[1]:
            d_w = _item_gradients(
                ctx.shape, states, weight, target, offsets, max(ctx.counts), log_total, share, relative
            )
        return d_x, d_w, None, None, None, None


class Tiles(NamedTuple):
    """How the two large kernels are cut and run."""

    held: int  # rows of what a program's sums are for
    looped: int  # and of what it sums over
    warps: int
    stages: int


def tiles(row_bytes: int, *, exact: bool, hopper: bool) -> Tiles:
    """The largest tiles that leave everything in registers; exact ones of width 64 are the fastest of nine on an H100.

    Args:
        row_bytes: of one position or item.
        exact: products of float32 to its own precision, which hold more.
        hopper: whether products read operands from shared memory.
    """
    held, warps = max(16, min(64, 16_384 // row_bytes)), 4 if row_bytes < 1024 else 8
    if not exact:
        return Tiles(held, held, warps, 2)
    return Tiles(held, held, warps, 1) if hopper else Tiles(held, min(held, 32), warps, 2)


class _Shape(NamedTuple):
    """What the kernels are compiled for."""

    width: int  # D
    columns: int  # D as a power of two
    operand: Any  # type of the operands of products
    precision: str  # of products of float32
    tiles: Tiles

    @classmethod
    def of(cls, states: Tensor, weight: Tensor) -> _Shape:
        dtype = product_dtype(states, weight)
        columns = max(16, triton.next_power_of_2(states.shape[1]))
        exact = exact_products()
        wholly = exact and dtype == torch.float32
        sizes = tiles(columns * dtype.itemsize, exact=wholly, hopper=dispatch.on_hopper(states))
        return cls(states.shape[1], columns, OPERANDS[dtype], "tf32x3" if exact else "tf32", sizes)

    @property
    def constants(self) -> dict[str, Any]:
        """What all kernels take."""
        return {
            "WIDTH": self.width,
            "COLUMNS": self.columns,
            "OPERAND": self.operand,
            "PRECISION": self.precision,
            "num_warps": self.tiles.warps,
            "num_stages": self.tiles.stages,
        }


def _offsets(counts: Sequence[int], device: torch.device) -> Tensor:
    """The first position of each seed, and the end: (S + 1,)."""
    if len(counts) == 1:  # made on the device: a CUDA graph holds no copy from the host
        return torch.arange(0, counts[0] + 1, counts[0], device=device)
    # From pinned memory, so that the device, which is at work by now, is not waited for.
    offsets = torch.tensor([0, *accumulate(counts)], device="cpu", pin_memory=device.type == "cuda")
    return offsets.to(device, non_blocking=True)


def _forward(
    shape: _Shape, states: Tensor, weight: Tensor, target: Tensor, offsets: Tensor, largest: int, learns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (N,), the logarithms to base 2 of the sums of exponentials (N,), and N dx (N, D) where asked for."""
    N, (S, V, D) = len(states), weight.shape
    held, looped, *_ = shape.tiles
    row_tiles = triton.cdiv(largest, held)
    parts, part_items = _cut(V, looped, S * row_tiles)

    def new(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=states.device)

    best, total, mean = new(parts, N), new(parts, N), new(parts, N if learns else 0, D)
    _sums_of_parts[(row_tiles, parts, S)](
        *(states, weight, offsets, best, total, mean, N, V, part_items, *states.stride(), *weight.stride()),
        LEARNS=learns,
        ROWS=held,
        ITEMS=looped,
        **shape.constants,
    )
    losses, log_total, d_states = new(N), new(N), new(N if learns else 0, D)
    _merge[(triton.cdiv(largest, MERGED_ROWS), S)](
        *(states, weight, target, offsets, best, total, mean, losses, log_total, d_states),
        *(N, V, parts, *states.stride(), *weight.stride()),
        LEARNS=learns,
        ROWS=MERGED_ROWS,
        WIDTH=shape.width,
        COLUMNS=shape.columns,
        OPERAND=shape.operand,
    )
    return losses, log_total, d_states


def _cut(size: int, tile: int, tiles_beside: int) -> tuple[int, int]:
    """How many parts a sum over some size is cut into, for enough programs, and the size of a part, whole tiles."""
    tiles = max(1, triton.cdiv(size, tile))
    parts = min(tiles, triton.cdiv(ENOUGH_PROGRAMS, tiles_beside))
    part = triton.cdiv(tiles, parts) * tile
    return max(1, triton.cdiv(size, part)), part


def _item_gradients(
    shape: _Shape,
    states: Tensor,
    weight: Tensor,
    target: Tensor,
    offsets: Tensor,
    largest: int,
    log_total: Tensor,
    share: Tensor,
    relative: Tensor | None,
) -> Tensor:
    """dw, (S, V, D), with ``share`` (S,) of each position, times ``relative`` (N,) where there is one."""
    S, V, _ = weight.shape
    held, looped, *_ = shape.tiles
    item_tiles = triton.cdiv(V, held)
    parts, part_rows = _cut(largest, looped, S * item_tiles)
    kind = weight.dtype if parts == 1 else torch.float32
    found = torch.empty((parts, *weight.shape), dtype=kind, device=weight.device)
    _gradient_of_items[(item_tiles, parts, S)](
        *(states, weight, target, offsets, log_total, share, share if relative is None else relative, found),
        *(V, part_rows, *states.stride(), *weight.stride()),
        WEIGHTED=relative is not None,
        ITEMS=held,
        ROWS=looped,
        **shape.constants,
    )
    return found[0] if parts == 1 else found.sum(0).to(weight.dtype)


@triton.jit
def _tile(pointer, rows, kept, row_stride, column_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of a matrix, (rows, COLUMNS), zero where they are not kept and beyond the width."""
    columns = tl.arange(0, COLUMNS)
    at = pointer + rows[:, None] * row_stride + columns[None, :] * column_stride
    return tl.load(at, mask=kept[:, None] & (columns < WIDTH)[None, :], other=0.0)


# fmt: off
@triton.jit
def _sums_of_parts(
    states, weight, offsets,  # read
    best_of_part, total_of_part, mean_of_part,  # written, (P, N), (P, N) and (P, N, D)
    num_positions, num_items, part_items, state_stride, state_column, seed_stride, item_stride, item_column,
    LEARNS: tl.constexpr, ROWS: tl.constexpr, ITEMS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """(a) for a tile of one seed's positions and a part of the vocabulary."""
    part, seed = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    stop = tl.load(offsets + seed + 1)
    first = tl.load(offsets + seed) + tl.program_id(0).to(tl.int64) * ROWS
    if first >= stop:  # this seed has fewer positions than another
        return
    rows = first + tl.arange(0, ROWS)
    x = _tile(states, rows, rows < stop, state_stride, state_column, WIDTH, COLUMNS).to(OPERAND)
    weight += seed * seed_stride
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, COLUMNS], tl.float32)
    end = tl.minimum((part + 1) * part_items, num_items)
    for start in range(part * part_items, end, ITEMS):
        items = start + tl.arange(0, ITEMS)
        w = _tile(weight, items, items < end, item_stride, item_column, WIDTH, COLUMNS).to(OPERAND)
        logits = tl.dot(x, tl.trans(w), input_precision=PRECISION) * LOG2_E
        logits = tl.where((items < end)[None, :], logits, float("-inf"))
        higher = tl.maximum(best, tl.max(logits, 1))
        odds = tl.exp2(logits - higher[:, None])
        fade = tl.exp2(best - higher)
        best = higher
        total = total * fade + tl.sum(odds, 1)
        if LEARNS:
            mean = tl.dot(odds.to(OPERAND), w, mean * fade[:, None], input_precision=PRECISION)
    at = part * num_positions + rows
    tl.store(best_of_part + at, best, mask=rows < stop)
    tl.store(total_of_part + at, total, mask=rows < stop)
    if LEARNS:
        columns = tl.arange(0, COLUMNS)
        inside = (rows < stop)[:, None] & (columns < WIDTH)[None, :]
        tl.store(mean_of_part + at[:, None] * WIDTH + columns[None, :], mean, mask=inside)


# fmt: off
@triton.jit
def _merge(
    states, weight, target, offsets, best_of_part, total_of_part, mean_of_part,  # read
    losses, log_totals, d_states,  # written, (N,), (N,) and (N, D)
    num_positions, num_items, num_parts, state_stride, state_column, seed_stride, item_stride, item_column,
    LEARNS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, OPERAND: tl.constexpr,
):
    # fmt: on
    """(b) for a tile of one seed's positions; NaN for a target that is no item."""
    seed = tl.program_id(1).to(tl.int64)
    stop = tl.load(offsets + seed + 1)
    first = tl.load(offsets + seed) + tl.program_id(0).to(tl.int64) * ROWS
    if first >= stop:
        return
    rows = first + tl.arange(0, ROWS)
    real = rows < stop
    columns = tl.arange(0, COLUMNS)
    inside = real[:, None] & (columns < WIDTH)[None, :]
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, COLUMNS], tl.float32)
    for part in range(0, num_parts):
        at = part * num_positions + rows
        own_best = tl.load(best_of_part + at, mask=real, other=0.0)
        higher = tl.maximum(best, own_best)
        fade, own_fade = tl.exp2(best - higher), tl.exp2(own_best - higher)
        best = higher
        total = total * fade + tl.load(total_of_part + at, mask=real, other=1.0) * own_fade
        if LEARNS:
            own_mean = tl.load(mean_of_part + at[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)
            mean = mean * fade[:, None] + own_mean * own_fade[:, None]
    wanted = tl.load(target + rows, mask=real, other=0)
    known = real & (wanted >= 0) & (wanted < num_items)
    # Rounded as the operands of the sums were, so that a sure prediction has loss and gradient 0.
    x = _tile(states, rows, real, state_stride, state_column, WIDTH, COLUMNS).to(OPERAND).to(tl.float32)
    weight += seed * seed_stride
    w = _tile(weight, wanted, known, item_stride, item_column, WIDTH, COLUMNS).to(OPERAND).to(tl.float32)
    log_total = best + tl.log2(total)
    loss = tl.where(known, log_total * LN_2 - tl.sum(x * w, 1), float("nan"))
    tl.store(losses + rows, loss, mask=real)
    tl.store(log_totals + rows, log_total, mask=real)
    if LEARNS:
        tl.store(d_states + rows[:, None] * WIDTH + columns[None, :], mean / total[:, None] - w, mask=inside)


# fmt: off
@triton.jit
def _gradient_of_items(
    states, weight, target, offsets, log_totals, shares, relative,  # read; the last where it is ``WEIGHTED``
    d_weight,  # written, (P, S, V, D)
    num_items, part_rows, state_stride, state_column, seed_stride, item_stride, item_column,
    WEIGHTED: tl.constexpr, ITEMS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """(c) for a tile of one seed's items and a part of its positions."""
    part, seed, num_seeds = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64), tl.num_programs(2)
    items = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    weight += seed * seed_stride
    w = _tile(weight, items, items < num_items, item_stride, item_column, WIDTH, COLUMNS).to(OPERAND)
    gradient = tl.zeros([ITEMS, COLUMNS], tl.float32)
    first = tl.load(offsets + seed) + part * part_rows
    stop = tl.minimum(tl.load(offsets + seed + 1), first + part_rows)
    for start in range(first, stop, ROWS):
        rows = start + tl.arange(0, ROWS)
        real = rows < stop
        x = _tile(states, rows, real, state_stride, state_column, WIDTH, COLUMNS).to(OPERAND)
        log_total = tl.load(log_totals + rows, mask=real, other=0.0)
        wanted = tl.load(target + rows, mask=real, other=-1)
        logits = tl.dot(w, tl.trans(x), input_precision=PRECISION) * LOG2_E
        surplus = tl.exp2(logits - log_total[None, :])
        surplus = tl.where(items[:, None] == wanted[None, :], surplus - 1, surplus)
        if WEIGHTED:
            surplus *= tl.load(relative + rows, mask=real, other=0.0)[None, :]
        gradient = tl.dot((surplus * LIFT).to(OPERAND), x, gradient, input_precision=PRECISION)
    gradient *= tl.load(shares + seed) / LIFT
    columns = tl.arange(0, COLUMNS)
    inside = (items < num_items)[:, None] & (columns < WIDTH)[None, :]
    at = (part * num_seeds + seed) * num_items + items
    tl.store(d_weight + at[:, None] * WIDTH + columns[None, :], gradient, mask=inside)
