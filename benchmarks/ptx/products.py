"""Products of tensor cores: of a warp (``mma``), and of four warps with operands in shared memory (``wgmma``).

Sums are formed in double precision and rounded once; a GPU rounds on the way.

Shapes: W warps, lanes as (8 groups, 4 threads); M, N, K the sides of a product.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.ptx.arithmetic import from_bfloat16
from benchmarks.ptx.program import Instruction, grouped
from benchmarks.ptx.threads import WARP, Active, Threads, handles

Matrix = NDArray[np.float32]
GROUP = 4 * WARP  # threads
SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
# Of a matrix in shared memory: bytes of a row by the mode in which its pieces of 16 bytes are swapped, and which are.
ROW = {1: 128, 2: 64, 3: 32}
SWAPPED = {1: 7, 2: 3, 3: 1}


def _numbers(raw: NDArray[Any], kind: str) -> Matrix:
    """What the last axis holds: numbers in TF32, which has the upper 19 of 32 bits, or in half precision."""
    if kind == "tf32":
        return (np.ascontiguousarray(raw).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    halves = np.ascontiguousarray(raw).view(np.uint16)
    return halves.view(np.float16).astype(np.float32) if kind == "f16" else from_bfloat16(halves)


def _registers(threads: Threads, names: list[str]) -> NDArray[np.uint32]:
    """(W, 8, 4, registers)."""
    held = np.stack([threads.value(name, "b32") for name in names], axis=1)
    return held.reshape(-1, 8, 4, len(names))


def _left(threads: Threads, names: list[str], kind: str) -> Matrix:
    """(W, 16, K) from four registers of each lane: rows of the group and eight below, both again further right."""
    parts = [
        _numbers(part[..., None], kind) for part in np.moveaxis(_registers(threads, names), -1, 0)
    ]  # (W, 8, 4, 1 or 2)
    upper, lower, upper_right, lower_right = (part.reshape(*part.shape[:2], -1) for part in parts)
    rows = [np.concatenate(pair, axis=2) for pair in ((upper, upper_right), (lower, lower_right))]
    return np.concatenate(rows, axis=1)


@handles("mma.sync")
def product_of_a_warp(threads: Threads, instruction: Instruction, active: Active) -> None:
    assert active is None, f"a part of a warp: {instruction.text}"
    to, left, right, kept = (grouped(operand) for operand in instruction.operands)
    kind = instruction.parts[-2]
    a = _left(threads, left, kind)
    parts = [_numbers(part[..., None], kind) for part in np.moveaxis(_registers(threads, right), -1, 0)]
    b = np.concatenate([part.reshape(*part.shape[:2], -1) for part in parts], axis=2)  # (W, N, K)
    sums = np.einsum("wmk,wnk->wmn", a.astype(np.float64), b)
    _add(threads, to, kept, _spread(sums), np.ones(threads.count, np.bool_))


def _spread(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """(W, 16, N) as lanes hold it, (threads, N / 2): two neighbours of a row and of that eight below, by columns."""
    W, _, N = sums.shape
    return sums.reshape(W, 2, 8, N // 8, 4, 2).transpose(0, 2, 4, 3, 1, 5).reshape(WARP * W, N // 2)


def _add(threads: Threads, to: list[str], kept: list[str], sums: NDArray[np.float64], adds: NDArray[np.bool_]) -> None:
    """Sums, and what is kept where it adds to them."""
    for column, (register, name) in enumerate(zip(to, kept, strict=True)):
        if adds.any():
            held = np.where(adds, threads.value(name, "f32"), 0)
            threads.assign(register, (sums[:, column] + held).astype(np.float32), None)
        else:
            threads.assign(register, sums[:, column].astype(np.float32), None)


@handles("wgmma.mma_async")
def product_of_four_warps(threads: Threads, instruction: Instruction, active: Active) -> None:
    assert active is None, instruction.text
    to, left, right, adds, *options = instruction.operands
    kind = instruction.kind
    shape = next(found for part in instruction.parts if (found := SHAPE.fullmatch(part)))
    _, N, K = (int(side) for side in shape.groups())
    assert options[:2] == ["1", "1"], "signs of operands"
    transposed = [option == "1" for option in options[2:]]  # of operands in shared memory, in half precision
    in_registers = left.startswith("{")
    right_transposed = bool(transposed) and transposed[-1]
    left_transposed = not in_registers and bool(transposed) and transposed[0]
    rows = _left(threads, grouped(left), kind).reshape(-1, 64, K) if in_registers else None
    sums = []
    for group in range(threads.count // GROUP):
        b = _described(threads, right, group, N, K, kind, right_transposed)
        a = _described(threads, left, group, 64, K, kind, left_transposed) if rows is None else rows[group]
        sums.append(_spread((a.astype(np.float64) @ b.T).reshape(4, 16, N)))
    registers = grouped(to)
    _add(threads, registers, registers, np.concatenate(sums), threads.value(adds, "pred"))


def _described(threads: Threads, operand: str, group: int, rows: int, K: int, kind: str, transposed: bool) -> Matrix:
    """(rows, K) from shared memory, where a descriptor says it lies: pieces of 8 rows, swapped against collisions."""
    [described] = np.unique(threads.value(operand, "b64")[GROUP * group : GROUP * (group + 1)])
    start, leading, stride = (int(described) >> shift & 0x3FFF for shift in (0, 16, 32))
    mode = int(described) >> 62
    assert mode in ROW and not int(described) >> 49 & 7, f"descriptor {int(described):#x}"
    size, width = (4 if kind == "tf32" else 2), ROW[mode]
    row, k = np.meshgrid(np.arange(rows), np.arange(K), indexing="ij")
    along, across = (size * row, k) if transposed else (size * k, row)
    at = 16 * start + across // 8 * 16 * stride + across % 8 * width + along % width + along // width * 16 * leading
    at ^= (at >> 7 & SWAPPED[mode]) << 4
    return _numbers(threads.shared.read_by_group(at.reshape(-1), size), kind).reshape(rows, K)
