"""A compiled kernel as instructions, the memory of a launch, and the threads of one program that walk through it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from recbft.experiments.lists import split_list

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]
Values = NDArray[Any]  # (threads,)
Active = NDArray[np.bool_] | None  # which threads take part; None for all
Handler = Callable[["Threads", "Instruction", Active], None]

WARP = 32
TOGETHER = {"shfl", "redux", "ldmatrix", "stmatrix", "mma", "wgmma"}  # what the threads of a warp do as one
UNSIGNED = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
TYPES = {
    **{f"{letter}{8 * size}": UNSIGNED[size] for letter in "ub" for size in (1, 2, 4, 8)},
    **{f"s{8 * size}": np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
    **{f"f{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    **{"pred": np.dtype(np.bool_), "bf16": np.dtype(np.uint16), "tf32": np.dtype(np.uint32)},
}
LABEL = re.compile(r"^(\$L\w+):$")
INSTRUCTION = re.compile(r"^(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)
ADDRESS = re.compile(r"^\[\s*([%\w]+)\s*(?:\+\s*(-?\d+)\s*)?\]$")
HANDLERS: dict[str, Handler] = {}


class NotRunError(RuntimeError):
    """A GPU may do anything there, or no kernel had such an instruction before."""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
        text: as it is written.
        guard: the predicate that says which threads take part, or None for all.
        unless: whether those threads take part for which the predicate is false.
        parts: its name, such as ``add``, and its qualifiers.
        operands: as written, the destination first.
    """

    text: str
    guard: str | None
    unless: bool
    parts: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.parts[0]

    @property
    def kind(self) -> str:
        """The type it computes in."""
        return self.parts[-1]

    @classmethod
    def parse(cls, text: str) -> Instruction:
        found = INSTRUCTION.match(text)
        assert found is not None, text
        unless, guard, name, operands = found.groups()
        return cls(text, guard, unless == "!", tuple(name.split(".")), tuple(split_list(operands)) if operands else ())


@dataclass(frozen=True)
class Program:
    """A kernel: its parameters as (type, name), threads, instructions, and where labels stand among them."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    threads: int
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    @classmethod
    def parse(cls, ptx: str) -> Program:
        head, body = ptx.split(".entry", 1)[1].split("\n{", 1)
        name, threads = re.match(r"\s*(\w+)", head), re.search(r"\.reqntid (\d+)", head)
        assert name is not None and threads is not None
        parameters = re.findall(r"\.param \.(\w+)[^,\n]*? (\w+_param_\d+)", head)
        text = re.sub(r"//.*", "", body.split("$L__func_end")[0])
        instructions: list[Instruction] = []
        labels = {}
        for line in map(str.strip, text.split("\n")):
            if found := LABEL.match(line):
                labels[found[1]] = len(instructions)
            elif not line.startswith("."):
                parts = (part.strip() for part in line.split(";"))
                instructions += [Instruction.parse(part) for part in parts if part not in ("", "{", "}")]
        return cls(name[1], tuple(parameters), int(threads[1]), tuple(instructions), labels)


def grouped(operand: str) -> list[str]:
    """The registers of an operand that may be several in braces."""
    return split_list(operand[1:-1]) if operand.startswith("{") else [operand]


class Memory:
    """Stretches of bytes by their first address: the tensors of a launch, or what the threads of a program share."""

    def __init__(self) -> None:
        self.stretches: dict[int, Bytes] = {}

    @classmethod
    def shared(cls, size: int) -> Memory:
        """Begins at address 0; what nobody has written is NaN."""
        made = cls()
        made.stretches[0] = np.full(size, 0xFF, np.uint8)
        return made

    def add(self, tensor: Tensor) -> None:
        """Let a launch reach the storage of a tensor."""
        start, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if size:
            self.stretches[start] = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))

    def read(self, addresses: Numbers, size: int) -> Bytes:
        """(threads, size) bytes."""
        held, at = self._find(addresses, size)
        return held[at]

    def write(self, addresses: Numbers, values: Bytes) -> None:
        """(threads, size) bytes."""
        held, at = self._find(addresses, values.shape[1])
        held[at] = values

    def _find(self, addresses: Numbers, size: int) -> tuple[Bytes, Numbers]:
        """The stretch that all of the addresses lie in, and the places there."""
        if (addresses % size).any():
            raise NotRunError(f"an address of {size} bytes is no multiple of that")
        first, end = int(addresses.min()), int(addresses.max()) + size
        for start, held in self.stretches.items():
            if start <= first and end <= start + len(held):
                return held, (addresses - start)[:, None] + np.arange(size)
        raise NotRunError("an address lies outside of the memory that the launch was given")


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Let a function run the instructions whose names begin so; the longest beginning decides."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


@cache  # asked at every step
def handler_of(parts: tuple[str, ...]) -> Handler:
    """The function that runs the instructions of a name and its qualifiers."""
    for length in range(len(parts), 0, -1):
        if found := HANDLERS.get(".".join(parts[:length])):
            return found
    raise NotRunError("an instruction that is not run here")


class Threads:
    """A program of a launch.

    Args:
        program: what they run.
        parameters: by name.
        memory: of the launch.
        shared: bytes of shared memory.
        place: number of the program along each side of the grid.
        grid: programs along each side.
    """

    def __init__(
        self,
        program: Program,
        parameters: Mapping[str, float],
        memory: Memory,
        shared: int,
        place: tuple[int, int, int],
        grid: tuple[int, int, int],
    ) -> None:
        self.program, self.parameters, self.count, self.place = program, parameters, program.threads, place
        self.memory = {"global": memory, "shared": Memory.shared(max(shared, 16))}
        self.warp: Numbers = np.arange(self.count) // WARP
        self.lane: Numbers = np.arange(self.count) % WARP
        self.registers: dict[str, Values] = {"%tid.x": np.arange(self.count, dtype=np.uint32)}
        for axis, name in enumerate("xyz"):
            self.registers[f"%ctaid.{name}"] = np.full(self.count, place[axis], np.uint32)
            self.registers[f"%nctaid.{name}"] = np.full(self.count, grid[axis], np.uint32)

    def value(self, operand: str, kind: str) -> Values:
        """A register or a number as the type that an instruction reads it in."""
        dtype = TYPES[kind]
        if operand.startswith("%"):
            found = self.registers[operand]
            if kind == "pred" or found.dtype.itemsize == dtype.itemsize:
                return found.view(dtype)
            return found.astype(UNSIGNED[dtype.itemsize]).view(dtype)
        if operand.startswith("0f"):
            return np.full(self.count, int(operand[2:], 16), np.uint32).view(np.float32)
        number = 0 if operand == "global_smem" else int(operand.rstrip("U"), 0)
        if kind == "pred":
            return np.full(self.count, number != 0)
        bits = UNSIGNED[dtype.itemsize]
        return np.full(self.count, number & (1 << 8 * bits.itemsize) - 1, bits).view(dtype)

    def assign(self, register: str, value: Values, active: Active) -> None:
        """Set a register where threads take part."""
        if register == "_":
            return
        if value.dtype != np.bool_:
            width = {"%rd": 8, "%rs": 2}.get(register[:3], 4)
            value = np.ascontiguousarray(value).view(UNSIGNED[value.dtype.itemsize])
            value = value if value.dtype.itemsize == width else value.astype(UNSIGNED[width])
        if active is not None:
            value = np.where(active, value, self.registers.get(register, np.zeros_like(value)))
        self.registers[register] = value

    def address(self, operand: str) -> Numbers:
        """Where ``[register + offset]`` points."""
        found = ADDRESS.match(operand)
        assert found is not None, operand
        base, offset = found[1], int(found[2] or 0)
        if not base.startswith("%"):
            return np.full(self.count, offset)
        at: Numbers = self.value(base, "s64" if base.startswith("%rd") else "s32").astype(np.int64) + offset
        return at

    @np.errstate(all="ignore")
    def run(self) -> None:
        """Walk to the end. Threads that part ways wait, each at its place, for those furthest behind.

        All wait for one another at a barrier and at what a warp does as one.

        Raises:
            NotRunError: with the kernel, the program and the instruction.
        """
        instructions, end = self.program.instructions, len(self.program.instructions)
        waits = np.array([i.name in TOGETHER or i.parts[:2] == ("bar", "sync") for i in instructions] + [True])
        at, places = 0, np.zeros(self.count, np.int64)
        apart: Active = None  # who goes on, where not all do
        while at < end:
            instruction = instructions[at]
            active = self._active(instruction, apart)
            at += 1
            if instruction.name in ("bra", "ret"):
                to = end if instruction.name == "ret" else self.program.labels[instruction.operands[0]]
                if active is None or (apart is None and active.all()):
                    at = to
                elif active.any():
                    here = np.ones(self.count, np.bool_) if apart is None else apart
                    places = np.where(active, to, np.where(here, at, places))
                    at, apart = self._furthest_behind(places, waits)
                    continue
            else:
                self._take(instruction, active)
            if apart is not None:
                places = np.where(apart, at, places)
                at, apart = self._furthest_behind(places, waits)

    @staticmethod
    def _furthest_behind(places: Numbers, waits: Numbers) -> tuple[int, Active]:
        going = places[~waits[places]]  # those behind may be further on in the code
        at = int((going if going.size else places).min())
        here = places == at
        return at, None if here.all() else here

    def _active(self, instruction: Instruction, apart: Active) -> Active:
        if instruction.guard is None:
            return apart
        chosen = self.registers[instruction.guard]
        chosen = ~chosen if instruction.unless else chosen
        return chosen if apart is None else chosen & apart

    def _take(self, instruction: Instruction, active: Active) -> None:
        try:
            handler_of(instruction.parts)(self, instruction, active)
        except NotRunError as error:
            raise NotRunError(f"{self.program.name}, program {self.place}: {error}: {instruction.text}") from None
