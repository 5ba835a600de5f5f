"""Launches of Triton kernels that compile for a GPU which need not be there, and run their PTX here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.ptx import arithmetic, movement, products  # noqa: F401  the instructions
from benchmarks.ptx.memory import GlobalMemory
from benchmarks.ptx.program import Program
from benchmarks.ptx.threads import Threads
from recbft.kernels import dispatch


class _Absent:
    """What Triton asks of a GPU before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def pretended(target: GPUTarget, run: Callable[..., None]) -> Iterator[None]:
    """Launches go to ``run``, which is given what they would, and tensors on the CPU pass for the GPU's."""
    absent, launches = patch.object(driver, "_active", _Absent(target)), patch.object(JITFunction, "run", run)
    served = patch.multiple(dispatch, _wrong_device=lambda *_: None, capability=lambda _: divmod(target.arch, 10))
    with absent, launches, served:
        yield


class Work(NamedTuple):
    """What was run, by kernel."""

    launches: Counter[str]
    instructions: Counter[str]  # summed over threads, but for copies between registers


@contextmanager
def running(capability: int) -> Iterator[Work]:
    """Launches compile their kernel for a GPU of this compute capability, 90 for 9.0, and run it here."""
    work = Work(Counter(), Counter())
    compiled = JITFunction.run

    def run(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        made = compiled(kernel, *given, grid=grid, warmup=True, **named)
        bound = dict(zip(kernel.arg_names, given, strict=False)) | named
        work.instructions[kernel.__name__] += launch(made, bound, grid(bound) if callable(grid) else grid)
        work.launches[kernel.__name__] += 1

    with pretended(GPUTarget("cuda", capability, 32), run):
        yield work


def launch(made: Any, bound: dict[str, Any], grid: tuple[int, ...]) -> int:
    """Run all programs of a compiled kernel, one after another; how many instructions their threads took.

    Args:
        made: what Triton compiled.
        bound: the kernel's arguments by name.
        grid: programs along up to three sides.
    """
    program, memory = _parsed(made.asm["ptx"]), GlobalMemory()
    given = [bound[name] for name, kind in made.src.signature.items() if kind != "constexpr"]
    for tensor in given:
        if isinstance(tensor, Tensor):
            memory.add(tensor)
    scratch = [0] * (len(program.parameters) - len(given))  # of Triton's own, which these kernels do not use
    values = [value.data_ptr() if isinstance(value, Tensor) else value for value in (*given, *scratch)]
    parameters = {
        name: float(value) if kind == "f32" else int(value)
        for (kind, name), value in zip(program.parameters, values, strict=True)
    }
    x, y, z = (*grid, 1, 1)[:3]
    instructions = 0
    for place in product(range(z), range(y), range(x)):
        threads = Threads(program, parameters, memory, made.metadata.shared, place[::-1], (x, y, z))
        threads.run()
        instructions += threads.instructions
    return instructions


_parsed = lru_cache(Program.parse)
