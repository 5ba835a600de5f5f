"""Instructions that move what threads hold: to and from memory, and within a warp."""

from __future__ import annotations

import numpy as np

from benchmarks.ptx.memory import Bytes, Numbers
from benchmarks.ptx.program import Instruction, grouped
from benchmarks.ptx.threads import TYPES, UNSIGNED, WARP, Active, Threads, handles

REDUCED = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}


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
        addresses, size = threads.address(place)[who], dtype.itemsize * len(registers)
        if instruction.parts[1] == "global":
            read = threads.memory.read(addresses, size, threads.number)
        else:
            read = threads.shared.read(addresses, size, threads.warp[who])
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
    addresses, written = threads.address(place)[who], values.view(np.uint8)
    if instruction.parts[1] == "global":
        threads.memory.write(addresses, written, threads.number)
    else:
        threads.shared.write(addresses, written, threads.warp[who])


@handles("cp.async")
def copy(threads: Threads, instruction: Instruction, active: Active) -> None:
    """From global to shared memory, where it may arrive at any moment until it is waited for."""
    to, given, size, *some = instruction.operands
    who, size = _taking_part(threads, active), int(size, 0)
    if not len(who):
        return
    taken = threads.value(some[0], "u32")[who] if some else np.full(len(who), size)  # the rest becomes zero
    assert np.isin(taken, (0, size)).all(), instruction.text
    found: Bytes = np.zeros((len(who), size), np.uint8)
    if taken.any():
        found[taken > 0] = threads.memory.read(threads.address(given)[who][taken > 0], size, threads.number)
    place, warps = threads.address(to)[who], threads.warp[who]
    threads.shared.begin_copy(place, size, warps)
    threads.begun.append((place, found, warps))


@handles("cp.async.commit_group")
def close_group(threads: Threads, instruction: Instruction, active: Active) -> None:
    threads.groups.append(threads.begun)
    threads.begun = []


@handles("cp.async.wait_group")
def wait_for_groups(threads: Threads, instruction: Instruction, active: Active) -> None:
    while len(threads.groups) > int(instruction.operands[0]):
        for place, found, warps in threads.groups.pop(0):
            threads.shared.end_copy(place, found, warps)


@handles("bar.sync")
def barrier(threads: Threads, instruction: Instruction, active: Active) -> None:
    assert active is None, f"a barrier that some threads miss: {instruction.text}"
    threads.shared.barriers += 1


@handles("bar.warp", "fence", "membar", "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group")
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


def _rows(threads: Threads, place: str, number: int) -> tuple[Numbers, Numbers]:
    """Where the rows of the 8 x 8 matrix of that number begin, as its lanes say, and the warps they belong to."""
    lanes = threads.address(place).reshape(-1, WARP)[:, 8 * number : 8 * number + 8]
    return lanes.reshape(-1), np.repeat(np.arange(len(lanes)), 8)


@handles("ldmatrix")
def load_matrices(threads: Threads, instruction: Instruction, active: Active) -> None:
    """Matrices of 8 x 8 halves; a lane has two neighbours of a row, or of a column where they are transposed."""
    to, place = instruction.operands
    for number, register in enumerate(grouped(to)):
        addresses, warps = _rows(threads, place, number)
        found = threads.shared.read(addresses, 16, warps).view(np.uint16).reshape(-1, 8, 8)
        found = found.transpose(0, 2, 1) if "trans" in instruction.parts else found
        threads.assign(register, np.ascontiguousarray(found).view(np.uint32).reshape(-1), active)


@handles("stmatrix")
def store_matrices(threads: Threads, instruction: Instruction, active: Active) -> None:
    """The way back."""
    place, given = instruction.operands
    for number, register in enumerate(grouped(given)):
        addresses, warps = _rows(threads, place, number)
        values = np.ascontiguousarray(threads.value(register, "b32")).view(np.uint16).reshape(-1, 8, 8)
        values = values.transpose(0, 2, 1) if "trans" in instruction.parts else values
        threads.shared.write(addresses, np.ascontiguousarray(values).view(np.uint8).reshape(-1, 16), warps)
