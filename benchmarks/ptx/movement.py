"""Instructions that move what threads hold, to and from memory and within a warp, and products of tensor cores.

A product is made by a warp (``mma``), or by four warps with operands in shared memory (``wgmma``). Sums are formed in
double precision and rounded once; a GPU rounds on the way.

Shapes: W warps, lanes as (8 groups, 4 threads); M, N, K the sides of a product.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.ptx.arithmetic import from_bfloat16
from benchmarks.ptx.threads import TYPES, UNSIGNED, WARP, Active, Bytes, Instruction, Numbers, Threads, grouped, handles

Matrix = NDArray[np.float32]

REDUCED = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}
GROUP = 4 * WARP  # threads
SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
# Of a matrix in shared memory: bytes of a row by the mode in which its pieces of 16 bytes are swapped, and which are.
ROW = {1: 128, 2: 64, 3: 32}
SWAPPED = {1: 7, 2: 3, 3: 1}


def _taking_part(threads: Threads, active: Active) -> Numbers:
    return np.arange(threads.count) if active is None else np.flatnonzero(active)


@handles("ld.param")
def load_parameter(threads: Threads, instruction: Instruction, active: Active) -> None:
    to, place = instruction.operands
    given = threads.parameters[place.strip("[]")]
    dtype = TYPES[instruction.kind]
    if isinstance(given, float):
        value = np.full(threads.count, given, np.float32)
    else:
        bits = UNSIGNED[dtype.itemsize]
        value = np.full(threads.count, given & (1 << 8 * bits.itemsize) - 1, bits).view(dtype)
        if to.startswith("%rd"):
            value = value.astype(np.int64)
    threads.assign(to, value, active)


@handles("ld.global", "ld.shared")
def load(threads: Threads, instruction: Instruction, active: Active) -> None:
    to, place = instruction.operands
    registers, dtype = grouped(to), UNSIGNED[TYPES[instruction.kind].itemsize]
    who = _taking_part(threads, active)
    found = np.zeros((threads.count, len(registers)), dtype)
    if len(who):
        read = threads.memory[instruction.parts[1]].read(threads.address(place)[who], dtype.itemsize * len(registers))
        found[who] = np.ascontiguousarray(read).view(dtype)
    for column, register in enumerate(registers):
        threads.assign(register, found[:, column], active)


@handles("st.global", "st.shared")
def store(threads: Threads, instruction: Instruction, active: Active) -> None:
    place, given = instruction.operands
    who = _taking_part(threads, active)
    if not len(who):
        return
    kind = f"b{8 * TYPES[instruction.kind].itemsize}"
    values = np.stack([threads.value(register, kind)[who] for register in grouped(given)], axis=1)
    threads.memory[instruction.parts[1]].write(threads.address(place)[who], values.view(np.uint8))


@handles("cp.async")
def copy(threads: Threads, instruction: Instruction, active: Active) -> None:
    """From global to shared memory, here at once."""
    to, given, size, *some = instruction.operands
    who, size = _taking_part(threads, active), int(size, 0)
    if not len(who):
        return
    taken = threads.value(some[0], "u32")[who] if some else np.full(len(who), size)  # the rest becomes zero
    assert np.isin(taken, (0, size)).all(), instruction.text
    found: Bytes = np.zeros((len(who), size), np.uint8)
    if taken.any():
        found[taken > 0] = threads.memory["global"].read(threads.address(given)[who][taken > 0], size)
    threads.memory["shared"].write(threads.address(to)[who], found)


@handles(
    "bar.sync", "bar.warp", "fence", "membar", "cp.async.commit_group", "cp.async.wait_group", "wgmma.fence",
    "wgmma.commit_group", "wgmma.wait_group",
)  # fmt: skip
def nothing(threads: Threads, instruction: Instruction, active: Active) -> None:
    """Threads take instructions together, and products are made where they are asked for."""


@handles("shfl.sync")
def shuffle(threads: Threads, instruction: Instruction, active: Active) -> None:
    """Take what another lane of the warp holds."""
    assert active is None, f"a part of a warp: {instruction.text}"
    to, given, offset, bounds = instruction.operands[:4]
    by, bound = (threads.value(operand, "u32").astype(np.int64) for operand in (offset, bounds))
    lane, segment, clamp = threads.lane, bound >> 8 & 31, bound & 31
    last = lane & segment | clamp & ~segment
    source = {"bfly": lane ^ by, "idx": lane & segment | by & ~segment, "up": lane - by, "down": lane + by}
    found = source[instruction.parts[2]]
    within = found >= last if instruction.parts[2] == "up" else found <= last
    found = WARP * threads.warp + np.where(within, found, lane)
    register, *predicate = to.split("|")
    threads.assign(register, threads.value(given, "b32")[found], None)
    for name in predicate:
        threads.assign(name, within, None)


@handles("redux.sync")
def reduce(threads: Threads, instruction: Instruction, active: Active) -> None:
    assert active is None, f"a part of a warp: {instruction.text}"
    to, given = instruction.operands[:2]
    by_warp = threads.value(given, instruction.kind).reshape(-1, WARP)
    found = REDUCED[instruction.parts[2]].reduce(by_warp, axis=1, dtype=by_warp.dtype)
    threads.assign(to, np.repeat(found, WARP), None)


def _rows(threads: Threads, place: str, number: int) -> Numbers:
    """Where the rows of the 8 x 8 matrix of that number begin in each warp, as its lanes say."""
    return threads.address(place).reshape(-1, WARP)[:, 8 * number : 8 * number + 8].reshape(-1)


@handles("ldmatrix")
def load_matrices(threads: Threads, instruction: Instruction, active: Active) -> None:
    """Matrices of 8 x 8 halves; a lane has two neighbours of a row, or of a column where they are transposed."""
    to, place = instruction.operands
    for number, register in enumerate(grouped(to)):
        found = threads.memory["shared"].read(_rows(threads, place, number), 16).view(np.uint16).reshape(-1, 8, 8)
        found = found.transpose(0, 2, 1) if "trans" in instruction.parts else found
        threads.assign(register, np.ascontiguousarray(found).view(np.uint32).reshape(-1), active)


@handles("stmatrix")
def store_matrices(threads: Threads, instruction: Instruction, active: Active) -> None:
    """The way back."""
    place, given = instruction.operands
    for number, register in enumerate(grouped(given)):
        values = np.ascontiguousarray(threads.value(register, "b32")).view(np.uint16).reshape(-1, 8, 8)
        values = values.transpose(0, 2, 1) if "trans" in instruction.parts else values
        rows = np.ascontiguousarray(values).view(np.uint8).reshape(-1, 16)
        threads.memory["shared"].write(_rows(threads, place, number), rows)


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
    return _numbers(threads.memory["shared"].read(at.reshape(-1), size), kind).reshape(rows, K)
