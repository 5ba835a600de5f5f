"""What the Triton kernels take of a multiprocessor, found without a GPU: they are compiled for one, not run.

``python -m benchmarks.gpu_registers``: registers of a thread, bytes of it that spilled to memory, shared memory and the
programs that fit a multiprocessor at once, for each kernel by type and head width. Tiles are chosen by these before a
GPU is at hand, where ``benchmarks.gpu_suite`` says what they cost.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import gpu_cases
from benchmarks.command import check_compiles, check_names, count, finish, parser

if TYPE_CHECKING:  # of an earlier Triton, or without one, ``main`` says so
    from triton.backends.compiler import GPUTarget

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REGISTERS = 65_536  # of a multiprocessor
# KB of shared memory that a program may have, and threads of a multiprocessor, by compute capability.
LIMITS = {80: (163, 2_048), 86: (99, 1_536), 89: (99, 1_536), 90: (227, 2_048), 100: (227, 2_048), 120: (99, 1_536)}
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes."""

    kernel: str
    registers: int
    spilled: int  # bytes of a thread
    shared: int  # bytes of a program
    warps: int
    capability: int

    @property
    def resident(self) -> int:
        """Programs that a multiprocessor holds at once; 0 where it has not the shared memory for one."""
        threads = 32 * self.warps
        shared, most_threads = LIMITS[self.capability]
        limits = [most_threads // threads, REGISTERS // max(1, self.registers * threads)]
        return min(limits) if self.shared == 0 else min(*limits, 1024 * shared // self.shared)


@contextmanager
def compiling(target: GPUTarget) -> Iterator[list[Usage]]:
    """Launches compile their kernel for ``target``, as they would there, note what it takes, and run nothing."""
    from triton.runtime.jit import JITFunction

    from benchmarks.ptx.launches import pretended

    found: list[Usage] = []
    launch = JITFunction.run

    def run(kernel: Any, *tensors: Any, grid: Any, warmup: bool, **named: Any) -> None:
        made = launch(kernel, *tensors, grid=grid, warmup=True, **named)
        registers, stack, _, local = _usage(made.asm["cubin"])
        of_program = made.metadata.shared, made.metadata.num_warps
        found.append(Usage(kernel.__name__, registers, stack + local, *of_program, target.arch))

    with pretended(target, run):
        yield found


def _usage(cubin: bytes) -> tuple[int, ...]:
    """Registers, stack, static shared memory and local memory, as NVIDIA's own tool reads them."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = knobs.nvidia.cuobjdump.path
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = USAGE.search(said)
    assert found is not None, said
    return tuple(int(number) for number in found.groups())


def cases(width: int) -> dict[str, gpu_cases.Case]:
    """One call of each mechanism with heads of this width, by name."""
    found = [make(1, 1, 256, width) for make in (gpu_cases.kriging, gpu_cases.reml, gpu_cases.silu)]
    if width <= 64:
        found += [gpu_cases.robust_filter(1, 1, 256, width // 2), gpu_cases.memory(1, 1, 256, width)]
    found += [gpu_cases.vocabulary(3_000, 12_101, width)]
    found += [gpu_cases.filter_step(256, width), gpu_cases.gelu(256, 4 * width, 16), gpu_cases.channel(8, 32, width)]
    found += [gpu_cases.norm(1, 256, width)]
    return {case.name: case for case in found}


def usages(case: gpu_cases.Case, dtype: torch.dtype, target: GPUTarget) -> list[Usage]:
    """What the kernels of a call take, forward and backward."""
    with compiling(target) as found, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nothing ran: what outputs hold is what lay in memory
        case.both_ways(dtype)
    return found


def main(arguments: Sequence[str]) -> int:
    """Compile and print the table."""
    options = parser("gpu_registers", (__doc__ or "").split("\n")[0])
    options.add_argument(
        "--capability", type=int, default=90, choices=LIMITS, help="of the GPU compiled for; 90 is Hopper"
    )
    options.add_argument("--widths", type=count, nargs="+", default=[32, 64], metavar="K", help="of a head")
    options.add_argument("--only", default="", metavar="TEXT", help="mechanisms whose name holds this")
    chosen = options.parse_args(arguments)
    check_compiles()
    from triton.backends.compiler import GPUTarget

    check_names(chosen.only, (name for width in chosen.widths for name in cases(width)))
    target = GPUTarget("cuda", chosen.capability, 32)
    print("| mechanism | type | width | kernel | registers | spilled, bytes | shared, KB | warps | programs at once |")
    print("| --- " * 9 + "|")
    for width in chosen.widths:
        for name, case in cases(width).items():
            if chosen.only in name:
                for kind in DTYPES if case.half else ("float32",):
                    try:
                        found = usages(case, DTYPES[kind], target)
                    except ValueError as error:  # a path that does not serve this width
                        print(f"| {name} | {kind} | {width} | {error} " + "| " * 6, flush=True)
                        continue
                    for u in found:
                        print(
                            f"| {name} | {kind} | {width} | `{u.kernel}` | {u.registers} | {u.spilled} | "
                            f"{u.shared / 1024:.0f} | {u.warps} | {u.resident} |",
                            flush=True,
                        )
    return 0


if __name__ == "__main__":
    finish(main)
