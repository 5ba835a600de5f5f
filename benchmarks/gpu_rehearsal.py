"""The Triton kernels as compiled for a GPU, run on a CPU: the correctness half of ``gpu_suite`` without a GPU.

``python -m benchmarks.gpu_rehearsal`` compiles every kernel, runs its PTX one instruction after another
(``benchmarks.ptx``), and compares values and gradients with the reference, in every type and at the head widths of
models. Small shapes; four minutes in all. It has found four defects that Triton's interpreter does not show:

    f199e9c   Triton 3.6 compiled the Bayesian layer wrongly at widths of 17 to 32
    14f0f16   a log precision near the least float32 rounds to -inf in bfloat16, and its readers became NaN
    8ac2579   ``tl.maximum`` drops NaN on a GPU: a variance of NaN became 0
    9cc23c7   a GPU fuses product and difference: sums of a softmax faded from tile to tile
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import gpu_cases, gpu_suite, machine
from benchmarks.command import finish, parser, recorded
from benchmarks.ptx import arithmetic, movement  # noqa: F401  the instructions
from benchmarks.ptx.threads import Memory, NotRunError, Program, Threads
from benchmarks.sheltered import Row
from recbft.core import SequenceContext
from recbft.errors import RunError, UserError
from recbft.kernels import dispatch

NAME = "gpu_rehearsal"
CAPABILITIES = (80, 86, 89, 90, 120)  # from 10.0 to 11.0 products are made by instructions that are not run here
TYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDTHS = (32, 64)  # of heads, beside the 16 of the small cases
FAR = "kriging moments, logits far from 0"
LEAST_COMPILER = (3, 4)  # compiles for a GPU that is not there


class _Absent:
    """What Triton asks of a GPU before it compiles."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def running(capability: int) -> Iterator[Counter[str]]:
    """Launches compile their kernel for this compute capability, 90 for 9.0, and run it here; counts them by kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launches: Counter[str] = Counter()
    compiled = JITFunction.run

    def run(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        made = compiled(kernel, *given, grid=grid, warmup=True, **named)
        bound = dict(zip(kernel.arg_names, given, strict=False)) | named
        _launch(made, bound, grid(bound) if callable(grid) else grid)
        launches[kernel.__name__] += 1

    absent = patch.object(driver, "_active", _Absent(GPUTarget("cuda", capability, 32)))
    served = patch.multiple(dispatch, _wrong_device=lambda *_: None, capability=lambda _: divmod(capability, 10))
    with absent, patch.object(JITFunction, "run", run), served:
        yield launches


def _launch(made: Any, bound: dict[str, Any], grid: tuple[int, ...]) -> None:
    """Run all programs of a compiled kernel, one after another."""
    program, memory = _parsed(made.asm["ptx"]), Memory()
    given = [bound[name] for name, kind in made.src.signature.items() if kind != "constexpr"]
    for tensor in given:
        if isinstance(tensor, Tensor):
            memory.add(tensor)
    scratch = [0] * (len(program.parameters) - len(given))  # Triton's own, which these kernels do not use
    values = [value.data_ptr() if isinstance(value, Tensor) else value for value in (*given, *scratch)]
    parameters = {
        name: float(value) if kind == "f32" else int(value)
        for (kind, name), value in zip(program.parameters, values, strict=True)
    }
    x, y, z = (*grid, 1, 1)[:3]
    for place in product(range(z), range(y), range(x)):
        Threads(program, parameters, memory, made.metadata.shared, place[::-1], (x, y, z)).run()


_parsed = lru_cache(Program.parse)


def cases() -> list[tuple[int, gpu_cases.Case]]:
    """All that is checked, and its width."""
    wider = [(width, case) for width in WIDTHS for case in gpu_cases.cases_of_heads(width)]
    return [(16, case) for case in gpu_cases.all_cases(small=True)] + wider


def rows(capability: int, only: str) -> Iterator[Row]:
    """What ``gpu_suite.check`` finds of each mechanism, width and type, and how long that took."""
    for width, case in cases():
        for dtype in TYPES if case.half else TYPES[:1]:
            if only in case.name:
                row: Row = {"kernel": case.name, "width": width, "type": str(dtype).removeprefix("torch.")}
                began = time.monotonic()
                try:
                    with running(capability) as launches:
                        for found in gpu_suite.check(case, dtype, "cpu"):
                            row |= found | {"launches": launches.total()}
                except NotRunError as error:
                    row |= {"right": False, "error": str(error)}
                yield row | {"seconds": round(time.monotonic() - began)}
    if only in FAR:
        yield far_logits(capability)


def far_logits(capability: int) -> Row:
    """The mean, S and n of logits about 40 over many tiles: errors at most twice the reference's (9cc23c7)."""
    T, K = 128, 16
    g = torch.Generator().manual_seed(0)
    heads = [torch.randn(1, 1, T, K, generator=g) for _ in "qkv"]
    trust = torch.full((1, T), 40.3)
    trust[:, 0] += 8  # the largest logit comes first
    context = SequenceContext(torch.zeros(1, T, dtype=torch.long), torch.arange(T)[None], causal=False)

    def moments(impl: str, dtype: torch.dtype) -> Sequence[Tensor]:
        given = (x.to(dtype) for x in heads)
        return gpu_cases.softmax_moments(*given, context, log_precision=trust.to(dtype), log_decay=None, impl=impl)

    exact, plain = (moments("reference", dtype) for dtype in (torch.float64, torch.float32))
    tiles = {"OWN": 16, "OTHER": 16, "num_warps": 1, "num_stages": 1}
    path = import_module("recbft.kernels.softmax_moments.triton")
    with torch.no_grad(), patch.object(path, "_tiles", lambda *_, **__: tiles), running(capability) as launches:
        found = moments("triton", torch.float32)
    errors = [
        [float((x.double() - truth).norm() / truth.norm()) for x in (ours, theirs)]
        for ours, theirs, truth in zip(found, plain, exact, strict=True)
    ]
    worst = max(range(3), key=lambda n: errors[n][0] / errors[n][1])
    ours, theirs = errors[worst]
    row: Row = {"kernel": FAR, "width": K, "type": "float32", "right": ours <= 2 * theirs, "worst": f"output {worst}"}
    return row | {"error": ours, "plain": theirs, "launches": launches.total()}


def main(arguments: Sequence[str]) -> int:
    """Print a line for each mechanism, width and type.

    Raises:
        RunError: some are wrong.
    """
    chosen = _options(arguments)
    print("\n".join(machine.lines(machine.header(recorded(NAME, arguments), device="cpu"))), flush=True)
    columns = ("kernel", "width", "type", "right", "worst", "error", "plain", "launches", "seconds")
    print("\n| " + " | ".join(columns) + " |\n" + "| --- " * len(columns) + "|")
    found = []
    for row in rows(chosen.capability, chosen.only):
        print("| " + " | ".join(gpu_suite.cell(row.get(column)) for column in columns) + " |", flush=True)
        found.append(row)
    wrong = [row for row in found if not row["right"]]
    if wrong:
        raise RunError(f"{len(wrong)} of {len(found)} checks failed, first {wrong[0]['kernel']}")
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = parser(NAME, (__doc__ or "").split("\n")[0])
    options.add_argument("--capability", type=int, default=90, choices=CAPABILITIES, help="90 is Hopper")
    options.add_argument("--only", default="", metavar="TEXT", help="mechanisms whose name holds this")
    chosen = options.parse_args(arguments)
    if (reason := dispatch.missing("triton")) is not None:
        raise UserError(reason)
    if (release := dispatch.release("triton")) < LEAST_COMPILER:
        raise UserError(f"needs Triton {dispatch.dotted(LEAST_COMPILER)} or later, got {dispatch.dotted(release)}")
    if dispatch.interpreted():
        raise UserError("TRITON_INTERPRET is set; unset it: the interpreter compiles nothing")
    names = list(dict.fromkeys([*(case.name for _, case in cases()), FAR]))
    if not any(chosen.only in name for name in names):
        raise UserError(f"--only {chosen.only}: no mechanism has this in its name; there are {', '.join(names)}")
    return chosen


if __name__ == "__main__":
    finish(main)
