"""Sums over tokens in Triton, bit for bit the same in every run: of parts, which a last program adds up in one order.

Shapes: P parts, W columns.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

ADDED = 4096  # numbers that a program reads at once
COLUMNS = 16  # of a program, at most


def cut(num_parts: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    """The grid over the columns of (P, W) parts, and what ``added`` is compiled for."""
    columns = min(COLUMNS, triton.next_power_of_2(max(1, width)))
    rows = min(ADDED // columns, triton.next_power_of_2(max(1, num_parts)))
    return (triton.cdiv(width, columns),), {"ROWS": rows, "COLUMNS": columns}


@triton.jit
def own_columns(COLUMNS: tl.constexpr):
    """Those that this program adds up."""
    return tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def added(parts, num_parts, columns, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums of the given columns over all parts, (COLUMNS,); 0 without parts."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, num_parts, ROWS):
        rows = start + tl.arange(0, ROWS)
        at = rows.to(tl.int64)[:, None] * width + columns[None, :]
        real = (rows < num_parts)[:, None] & (columns < width)[None, :]
        total += tl.load(parts + at, mask=real, other=0.0)
    return tl.sum(total, 0)
