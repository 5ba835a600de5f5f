"""The Triton kernels as they are compiled for a GPU, run on a CPU: the correctness half of ``gpu_suite`` without one.

``python -m benchmarks.gpu_rehearsal``: every kernel is compiled and its PTX run one instruction after another
(``benchmarks.ptx``), in every type, bfloat16 too, and held against the reference as on a GPU: values and gradients, and
two runs that must be equal. Heads have the widths of models, since a compiler may fail at one of them alone. It ends
where a GPU would be left to chance: addresses out of bounds, threads that share memory without a barrier, programs that
touch what others write. Small shapes; two minutes in all.

``--instructions T ...`` counts instead what threads do for one pair of tokens, in rows of that length: what tiles are
chosen by where no clock is at hand.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import product
from unittest.mock import patch

import torch

from benchmarks import gpu_cases, gpu_suite, machine
from benchmarks.command import check_compiles, check_names, count, finish, parser, recorded
from benchmarks.ptx.memory import UndefinedError
from benchmarks.ptx.threads import UnknownInstructionError
from benchmarks.sheltered import Row
from recbft.errors import RunError

NAME = "gpu_rehearsal"
CAPABILITIES = (80, 86, 89, 90, 120)  # from 10.0 to 11.0 products are made by instructions that are not run here
TYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDTHS = (32, 64)  # of heads, beside the 16 of the small cases


def cases() -> list[tuple[int, gpu_cases.Case]]:
    """All that is checked, and its width."""
    wider = [(width, case) for width in WIDTHS for case in gpu_cases.cases_of_heads(width)]
    return [(16, case) for case in gpu_cases.all_cases(small=True)] + wider


def rows(capability: int, only: str = "") -> Iterator[Row]:
    """What ``gpu_suite.check`` finds of each mechanism, width and type, and how long that took."""
    from benchmarks.ptx.launches import running  # needs Triton

    for width, case in cases():
        for dtype in TYPES if case.half else TYPES[:1]:
            if only in case.name:
                row: Row = {"kernel": case.name, "width": width, "type": str(dtype).removeprefix("torch.")}
                began = time.monotonic()
                try:
                    with running(capability) as work:
                        for found in gpu_suite.check(case, dtype, "cpu"):
                            row |= found
                    row |= {"launches": work.launches.total()}
                except (UndefinedError, UnknownInstructionError) as error:
                    row |= {"right": False, "error": str(error)}
                yield row | {"seconds": round(time.monotonic() - began)}


def of_pairs(length: int, width: int) -> list[gpu_cases.Case]:
    """The mechanisms whose work grows with the pairs of tokens."""
    return [make(1, 1, length, width) for make in (gpu_cases.kriging, gpu_cases.reml, gpu_cases.silu)]


def count_instructions(capability: int, lengths: Sequence[int], only: str) -> None:
    """Print what threads of each kernel take, forward and backward, over the pairs of which one token reads the other.

    One head of one history.
    """
    from benchmarks.ptx.launches import running  # needs Triton

    print("\n| mechanism | type | width | tokens | instructions per pair | by kernel |\n" + "| --- " * 6 + "|")
    for length, width, dtype in product(lengths, (32, 64), TYPES[::2]):
        pairs = length * (length + 1) / 2
        with patch.object(gpu_cases, "packed", lambda *_, length=length, **__: gpu_cases.whole(1, length)):
            for case in of_pairs(length, width):
                if only not in case.name:
                    continue
                with running(capability) as work:
                    case.both_ways(dtype)
                each = ", ".join(f"{kernel} {taken / pairs:.0f}" for kernel, taken in work.instructions.items())
                cells = (case.name, str(dtype).removeprefix("torch."), width, length)
                total = f"{work.instructions.total() / pairs:.0f}"
                print("| " + " | ".join(map(str, (*cells, total, each))) + " |", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Print a line for each mechanism, width and type.

    Raises:
        RunError: some are wrong.
    """
    options = parser(NAME, (__doc__ or "").split("\n")[0])
    options.add_argument(
        "--capability", type=int, default=90, choices=CAPABILITIES, help="of the GPU compiled for; 90 is Hopper"
    )
    options.add_argument("--only", default="", metavar="TEXT", help="mechanisms whose name holds this")
    options.add_argument(
        "--instructions", type=count, nargs="+", default=[], metavar="T", help="count them, in rows of so many tokens"
    )
    chosen = options.parse_args(arguments)
    check_compiles()
    checked = of_pairs(16, 32) if chosen.instructions else [case for _, case in cases()]
    check_names(chosen.only, list(dict.fromkeys(case.name for case in checked)))
    print("\n".join(machine.lines(machine.header(recorded(NAME, arguments), device="cpu"))), flush=True)
    if chosen.instructions:
        count_instructions(chosen.capability, chosen.instructions, chosen.only)
        return 0
    head = ("mechanism", "width", "type", "right", "worst", "error", "the reference's", "launches", "seconds")
    print("\n| " + " | ".join(head) + " |\n" + "| --- " * len(head) + "|")
    found = []
    for row in rows(chosen.capability, chosen.only):
        cells = ("kernel", "width", "type", "right", "worst", "error", "plain", "launches", "seconds")
        print("| " + " | ".join(gpu_suite.cell(row.get(cell)) for cell in cells) + " |", flush=True)
        found.append(row)
    wrong = [row for row in found if not row["right"]]
    if wrong:
        raise RunError(f"{len(wrong)} of {len(found)} checks failed, first {wrong[0]['kernel']}")
    return 0


if __name__ == "__main__":
    finish(main)
