"""The Triton kernels as they are compiled for a GPU, run on a CPU: the correctness half of ``gpu_suite`` without one.

``python -m benchmarks.gpu_rehearsal``: every kernel is compiled and its PTX run one instruction after another
(``benchmarks.ptx``), in every type, bfloat16 too, and held against the reference as on a GPU: values and gradients, and
two runs that must be equal. It ends where a GPU would be left to chance: addresses out of bounds, threads that share
memory without a barrier, programs that touch what others write. Small shapes; a minute in all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence

import torch
from triton.backends.compiler import GPUTarget

from benchmarks import gpu_cases, gpu_suite, machine
from benchmarks.command import finish, recorded
from benchmarks.ptx.launches import running
from benchmarks.ptx.memory import UndefinedError
from benchmarks.sheltered import Row
from recbft.errors import RunError, UserError
from recbft.kernels import dispatch

NAME = "gpu_rehearsal"
CAPABILITIES = (80, 86, 89, 90, 120)  # from 10.0 to 11.0 products are made by instructions that are not run here
TYPES = (torch.float32, torch.float16, torch.bfloat16)


def rows(capability: int, only: str = "") -> Iterator[Row]:
    """What ``gpu_suite.check`` finds of each mechanism and type, and how long that took."""
    for case in gpu_cases.all_cases(small=True):
        for dtype in TYPES if case.half else TYPES[:1]:
            if only in case.name:
                row = {"kernel": case.name, "type": str(dtype).removeprefix("torch.")}
                began = time.monotonic()
                try:
                    with running(GPUTarget("cuda", capability, 32)) as launched:
                        for found in gpu_suite.check(case, dtype, "cpu"):
                            row |= found
                    row |= {"launches": launched.total()}
                except (UndefinedError, NotImplementedError) as error:
                    row |= {"right": False, "error": str(error)}
                yield row | {"seconds": round(time.monotonic() - began)}


def main(arguments: Sequence[str]) -> int:
    """Print a line for each mechanism and type.

    Raises:
        RunError: some are wrong.
    """
    options = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description=(__doc__ or "").split("\n")[0])
    options.add_argument(
        "--capability", type=int, default=90, choices=CAPABILITIES, help="of the GPU compiled for; 90 is Hopper"
    )
    options.add_argument("--only", default="", metavar="TEXT", help="mechanisms whose name holds this")
    chosen = options.parse_args(arguments)
    if dispatch.interpreted():
        raise UserError("TRITON_INTERPRET is set; unset it: the interpreter compiles nothing")
    print("\n".join(machine.lines(machine.header(recorded(NAME, arguments), device="cpu"))), flush=True)
    print(
        "\n| mechanism | type | right | worst | error | the reference's | launches | seconds |\n" + "| --- " * 8 + "|"
    )
    found = []
    for row in rows(chosen.capability, chosen.only):
        cells = ("kernel", "type", "right", "worst", "error", "plain", "launches", "seconds")
        print("| " + " | ".join(gpu_suite.cell(row.get(cell)) for cell in cells) + " |", flush=True)
        found.append(row)
    if not found:
        names = ", ".join(case.name for case in gpu_cases.all_cases(small=True))
        raise UserError(f"--only {chosen.only}: no mechanism's name holds this; there are {names}")
    wrong = [row for row in found if not row["right"]]
    if wrong:
        raise RunError(f"{len(wrong)} of {len(found)} checks failed, first {wrong[0]['kernel']}")
    return 0


if __name__ == "__main__":
    finish(main)
