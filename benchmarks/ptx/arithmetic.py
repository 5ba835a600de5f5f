"""Instructions that compute, each thread for itself."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.ptx.threads import TYPES, UNSIGNED, Active, Instruction, NotRunError, Threads, Values, grouped, handles

TWO = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.fmin, "max": np.fmax,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
ONE = {
    "neg": np.negative, "abs": np.abs, "not": np.invert, "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt,
    "rcp": np.reciprocal, "tanh": np.tanh, "rsqrt": lambda x: 1 / np.sqrt(x),
}  # fmt: skip
COMPARED = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
ROUNDED = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}
LEAST_NORMAL = np.finfo(np.float32).tiny


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Single precision that is equal."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, near).astype(np.uint16)


def _read(threads: Threads, operand: str, kind: str) -> Values:
    """A value, or (threads, 2) of them; bfloat16 in single precision."""
    if not kind.endswith("x2"):
        return from_bfloat16(threads.value(operand, "b16")) if kind == "bf16" else threads.value(operand, kind)
    halves = np.ascontiguousarray(threads.value(operand, "b32")).view(np.uint16).reshape(-1, 2)
    return from_bfloat16(halves) if kind == "bf16x2" else halves.view(np.float16)


def _written(x: Values, kind: str) -> Values:
    """What ``_read`` gave, as a register holds it."""
    if kind.startswith("bf16"):
        x = to_bfloat16(x.astype(np.float32))
    elif kind.startswith("f16"):
        x = x.astype(np.float16)
    return np.ascontiguousarray(x).view(np.uint32).reshape(-1) if kind.endswith("x2") else x


def _flushed(instruction: Instruction, x: Values) -> Values:
    """Numbers too small to be normal are zero where the instruction says so."""
    if "ftz" not in instruction.parts:
        return x
    return np.where(np.abs(x) < LEAST_NORMAL, np.copysign(x.dtype.type(0), x), x)


@handles("add", "sub", "min", "max", "and", "or", "xor", "mul")
def two(threads: Threads, instruction: Instruction, active: Active) -> None:
    to, *operands = instruction.operands
    kind = instruction.kind
    a, b = (_flushed(instruction, _read(threads, operand, kind)) for operand in operands)
    function = TWO[instruction.name]
    if "NaN" in instruction.parts:
        function = {"min": np.minimum, "max": np.maximum}[instruction.name]
    threads.assign(to, _written(_flushed(instruction, function(a, b)), kind), active)


@handles("fma", "mad.lo")
def three(threads: Threads, instruction: Instruction, active: Active) -> None:
    to, *operands = instruction.operands
    kind = instruction.kind
    a, b, c = (_flushed(instruction, _read(threads, operand, kind)) for operand in operands)
    # One rounding: a product of single precision is exact in double.
    result = (a.astype(np.float64) * b + c).astype(a.dtype) if a.dtype.kind == "f" else a * b + c
    threads.assign(to, _written(_flushed(instruction, result), kind), active)


@handles("mul.wide", "mad.wide")
def wide(threads: Threads, instruction: Instruction, active: Active) -> None:
    to, *operands = instruction.operands
    kind = instruction.kind
    double = f"{kind[0]}{2 * int(kind[1:])}"
    a, b = (threads.value(operand, kind).astype(TYPES[double]) for operand in operands[:2])
    threads.assign(to, a * b + (threads.value(operands[2], double) if instruction.name == "mad" else 0), active)


@handles("mul.hi")
def high(threads: Threads, instruction: Instruction, active: Active) -> None:
    to, *operands = instruction.operands
    a, b = (threads.value(operand, instruction.kind).astype(np.int64) for operand in operands)
    threads.assign(to, (a.view(np.uint64) * b.view(np.uint64) >> np.uint64(32)).astype(np.uint32), active)


@handles("div", "rem")
def divide(threads: Threads, instruction: Instruction, active: Active) -> None:
    to, *operands = instruction.operands
    a, b = (threads.value(operand, instruction.kind) for operand in operands)
    if a.dtype.kind == "f":
        threads.assign(to, a / b, active)
        return
    if (b == 0).any():
        raise NotRunError("a division by zero")
    rest = np.fmod(a, b)  # towards zero, as here
    threads.assign(to, (a - rest) // b if instruction.name == "div" else rest, active)


@handles(*ONE)
def one(threads: Threads, instruction: Instruction, active: Active) -> None:
    to, operand = instruction.operands
    x = _flushed(instruction, threads.value(operand, instruction.kind))
    threads.assign(to, _flushed(instruction, ONE[instruction.name](x).astype(x.dtype)), active)


@handles("shl", "shr")
def shift(threads: Threads, instruction: Instruction, active: Active) -> None:
    to, operand, amount = instruction.operands
    x, by = threads.value(operand, instruction.kind), threads.value(amount, "u32").astype(np.int64)
    most = 8 * x.dtype.itemsize - 1
    kept = np.minimum(by, most).astype(x.dtype)
    shifted = x << kept if instruction.name == "shl" else x >> kept
    if not (instruction.name == "shr" and x.dtype.kind == "i"):
        shifted = np.where(by > most, 0, shifted)
    threads.assign(to, shifted.astype(x.dtype), active)


@handles("bfe")
def field(threads: Threads, instruction: Instruction, active: Active) -> None:
    to, *operands = instruction.operands
    x, first, length = (threads.value(operand, "u32").astype(np.int64) for operand in operands)
    found = x >> (first & 255) & (1 << (length & 255)) - 1
    if instruction.kind == "s32":
        found = np.where(found >> np.maximum(length - 1, 0) & 1, found - (1 << length), found)
    threads.assign(to, found.astype(np.int32), active)


@handles("lop3")
def logic(threads: Threads, instruction: Instruction, active: Active) -> None:
    to, *operands, table = instruction.operands
    a, b, c = (threads.value(operand, "b32") for operand in operands)
    rows = [(a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c) for row in range(8)]
    chosen = [bits for row, bits in enumerate(rows) if int(table, 0) >> row & 1]
    threads.assign(to, np.bitwise_or.reduce(chosen) if chosen else np.zeros_like(a), active)


@handles("prmt")
def permute(threads: Threads, instruction: Instruction, active: Active) -> None:
    to, *operands = instruction.operands
    a, b, chosen = (np.ascontiguousarray(threads.value(operand, "b32")) for operand in operands)
    given = np.concatenate([x.view(np.uint8).reshape(-1, 4) for x in (a, b)], axis=1)
    nibbles = chosen[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & 15
    found = np.take_along_axis(given, (nibbles & 7).astype(np.int64), axis=1)
    found = np.where(nibbles & 8, np.where(found & 0x80, 0xFF, 0), found).astype(np.uint8)
    threads.assign(to, np.ascontiguousarray(found).view(np.uint32).reshape(-1), active)


@handles("setp")
def compare(threads: Threads, instruction: Instruction, active: Active) -> None:
    to, *operands = instruction.operands
    how = instruction.parts[1]
    a, b = (_flushed(instruction, threads.value(operand, instruction.kind)) for operand in operands[:2])
    unordered = np.isnan(a) | np.isnan(b) if a.dtype.kind == "f" else np.zeros(len(a), np.bool_)
    if how in ("num", "nan"):
        found = unordered if how == "nan" else ~unordered
    elif how in COMPARED:
        found = COMPARED[how](a, b) & ~unordered
    else:  # such as "ltu"
        found = COMPARED[how.removesuffix("u")](a, b) | unordered
    if len(operands) == 3:  # joined with a predicate, as the third part says
        found = TWO[instruction.parts[2]](found, threads.value(operands[2], "pred"))
    threads.assign(to, found, active)


@handles("selp")
def select(threads: Threads, instruction: Instruction, active: Active) -> None:
    to, yes, no, which = instruction.operands
    a, b = (threads.value(operand, instruction.kind) for operand in (yes, no))
    threads.assign(to, np.where(threads.value(which, "pred"), a, b), active)


@handles("cvt")
def convert(threads: Threads, instruction: Instruction, active: Active) -> None:
    to, *operands = instruction.operands
    kind, given = instruction.parts[-2:]
    if kind.endswith("x2"):  # the first operand becomes the upper half
        both = np.stack([threads.value(operand, given) for operand in reversed(operands)], axis=1)
        result = _written(both, kind)
    elif kind == "tf32":  # to the nearest of ten bits, ties away from zero
        bits = threads.value(operands[0], "b32")
        finite = bits & np.uint32(0x7F800000) != 0x7F800000
        result = np.where(finite, bits + np.uint32(0x1000) & np.uint32(0xFFFFE000), bits)
    else:
        x = _read(threads, operands[0], given)
        if x.dtype.kind == "f" and TYPES[kind].kind in "iu" and kind != "bf16":
            x = ROUNDED[instruction.parts[1]](x)
        result = _written(x, kind) if kind == "bf16" else x.astype(TYPES[kind])
    threads.assign(to, result, active)


@handles("mov")
def move(threads: Threads, instruction: Instruction, active: Active) -> None:
    """Also between one register and the parts of it."""
    to, given = instruction.operands
    size = TYPES[instruction.kind].itemsize
    if to.startswith("{"):
        parts = grouped(to)
        whole = np.ascontiguousarray(threads.value(given, instruction.kind))
        split = whole.view(UNSIGNED[size // len(parts)]).reshape(-1, len(parts))
        for part, register in enumerate(parts):
            threads.assign(register, split[:, part], active)
    elif given.startswith("{"):
        parts = grouped(given)
        columns = [_part(threads, part, 8 * size // len(parts)) for part in parts]
        threads.assign(to, np.stack(columns, axis=1).view(UNSIGNED[size]).reshape(-1), active)
    else:
        threads.assign(to, threads.value(given, instruction.kind), active)


def _part(threads: Threads, part: str, bits: int) -> Values:
    """Bits for a part of a register: all ones, which is no number, where nothing has been written that anyone reads."""
    kind = UNSIGNED[bits // 8]
    if part.startswith("%") and part not in threads.registers:
        return np.full(threads.count, np.iinfo(kind).max, kind)
    return threads.value(part, f"b{bits}").view(kind)
