"""The threads of one program: their registers, and the walk through the instructions that they take together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.ptx.memory import Bytes, GlobalMemory, Numbers, SharedMemory, UndefinedError
from benchmarks.ptx.program import Instruction, Program

Values = NDArray[Any]  # (threads,)
Active = NDArray[np.bool_] | None  # which threads take part; None for all
Handler = Callable[["Threads", Instruction, Active], None]

WARP = 32
TOGETHER = {"shfl", "redux", "ldmatrix", "stmatrix", "mma", "wgmma"}  # what the threads of a warp do as one
UNSIGNED = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
TYPES = {
    **{f"{letter}{8 * size}": UNSIGNED[size] for letter in "ub" for size in (1, 2, 4, 8)},
    **{f"s{8 * size}": np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
    **{f"f{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    **{"pred": np.dtype(np.bool_), "bf16": np.dtype(np.uint16), "tf32": np.dtype(np.uint32)},
}
ADDRESS = re.compile(r"^\[\s*([%\w]+)\s*(?:\+\s*(-?\d+)\s*)?\]$")
HANDLERS: dict[str, Handler] = {}


class UnknownInstructionError(RuntimeError):
    """There is no handler for an instruction."""


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
    raise UnknownInstructionError("an instruction that is not run here")


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
        memory: GlobalMemory,
        shared: int,
        place: tuple[int, int, int],
        grid: tuple[int, int, int],
    ) -> None:
        self.program, self.parameters, self.memory = program, parameters, memory
        self.number = place[0] + grid[0] * (place[1] + grid[1] * place[2])
        self.count = program.threads
        self.instructions = 0  # that were taken by all threads, but for copies between registers
        self.shared = SharedMemory(max(shared, 16))
        self.warp: Numbers = np.arange(self.count) // WARP
        self.lane: Numbers = np.arange(self.count) % WARP
        self.registers: dict[str, Values] = {"%tid.x": np.arange(self.count, dtype=np.uint32)}
        for axis, name in enumerate("xyz"):
            self.registers[f"%ctaid.{name}"] = np.full(self.count, place[axis], np.uint32)
            self.registers[f"%nctaid.{name}"] = np.full(self.count, grid[axis], np.uint32)
        # Copies into shared memory that were begun, as (addresses, bytes, warps), and those closed to groups.
        self.begun: list[tuple[Numbers, Bytes, Numbers]] = []
        self.groups: list[list[tuple[Numbers, Bytes, Numbers]]] = []

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

    def run(self) -> None:
        """Walk to the end.

        Raises:
            UndefinedError: a GPU may do anything there.
            UnknownInstructionError: one that no kernel had so far.
        """
        with np.errstate(all="ignore"):
            self._walk()
        if self.begun or any(self.groups):
            raise UndefinedError(f"{self.program.name} ends with copies under way")

    def _walk(self) -> None:
        """Threads that part ways wait, each at its place, for those furthest behind; for all at what they do as one."""
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
        self.instructions += self.count if instruction.name != "mov" else 0
        try:
            handler_of(instruction.parts)(self, instruction, active)
        except (UndefinedError, UnknownInstructionError) as error:
            raise type(error)(f"{self.program.name}, program {self.number}: {error}: {instruction.text}") from None
