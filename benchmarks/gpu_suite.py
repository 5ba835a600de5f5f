"""The one command to run on a GPU: are its kernels right, how fast are they, and how much memory do they take?

    python -m benchmarks.gpu_suite --out DIR
    python -m benchmarks.gpu_suite --out DIR --dry-run       small shapes in Triton's interpreter, no GPU needed

1. Every kernel against its reference in float64, values and gradients, in single and half precision. The error may be
   twice that of the reference in the same type (and a few units of the last digit); two runs must be equal bit for bit.
2. Kriging moments against PyTorch's attention (FlashAttention in half precision) and against the reference: time
   forward, and forward and backward, as a caller waits for it and as the GPU is busy with it, and peak memory. The
   cross-entropy against the one over logits.
3. A training step of ``bft`` against ``matched``, at two lengths, in single and mixed precision and from CUDA graphs.
4. Twenty seeds of each arm trained together, both arms at once, on generated histories as many and as short as those of
   Amazon Beauty: whole epochs with validation and checkpoints, and what a hundred of them would take.
5. The other mechanisms beside their references.
6. The forward and the backward pass of kriging moments by tile, for whoever chooses them.
7. How long the GPU is at work in the steps of 3, and by how many kernels.

Nothing begins after ``--minutes`` or goes on for ninety seconds more: what no time is left for is named. Results are on
disk line by line, and what fails is a line of its own, so that the rest is still told: the work is done in a process of
its own, and in a new one after an illegal access to memory or a kernel that does not end. Exit code 1 where a kernel is
wrong or something failed.

Shapes: B rows, H heads, T tokens, K head width.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import gpu_cases, machine
from benchmarks.command import finish, parser, recorded
from benchmarks.gpu_cases import Case
from benchmarks.gpu_clock import Clock
from benchmarks.gpu_training import kernels, side_by_side, steps
from benchmarks.sheltered import Inline, Row, Sheltered, Unit, failure
from recbft.errors import RunError, UserError
from recbft.experiments.lists import split_list
from recbft.kernels.dispatch import dotted, missing, release
from recbft.reporting.tables import text_table
from recbft.system.files import write_json

NAME = "gpu_suite"
GRACE = 90.0  # seconds that what has begun may go on after the last beginning
# Units of the last digit that an error may have whatever the reference's, and how often that of the reference it may
# be. Three products of TF32 stand for one of float32 and lose two or three of its 24 bits, and sums lose more where
# they cancel: a robust filter's frequencies, the one number of a decay.
LAST_DIGITS = {torch.float32: 256, torch.float16: 4, torch.bfloat16: 4}
TIMES_PLAIN = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}
SHAPES = ((256, 2, 50, 32), (128, 4, 200, 64), (8, 8, 2048, 64))
VOCABULARIES = ((12_800, 12_101, 64), (2_048, 1_000_000, 64))
LENGTHS = (50, 200)
# Tokens of the tile that a program owns and of those it walks over, warps, stages: none of these spills much.
TILES = ((64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3), (64, 32, 4, 4), (64, 32, 4, 5), (128, 64, 8, 3))


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    out = Path(options.out)
    if (reason := missing("triton")) is not None:
        raise UserError(reason)
    if options.dry_run:
        _ask_for_the_interpreter()
    elif not torch.cuda.is_available():
        raise UserError("PyTorch sees no CUDA GPU; use --dry-run for small shapes in Triton's interpreter")
    device = "cpu" if options.dry_run else "cuda"
    ends = time.monotonic() + 60 * options.minutes
    made = machine.header(recorded(NAME, arguments), device=device)
    print("\n".join(machine.lines(made)), flush=True)
    healthy, last = torch.cuda.synchronize, ends + GRACE
    worker = Inline(units, device) if options.dry_run else Sheltered(units, device, last=last, healthy=healthy)
    parts = [unit.part for unit in worker.units]
    chosen = split_list(options.parts) if options.parts else parts
    if unknown := [name for name in chosen if name not in parts]:
        raise UserError(f"--parts has {unknown[0]!r}; there are {', '.join(dict.fromkeys(parts))}")
    found: dict[str, list[Row]] = {}
    out.mkdir(parents=True, exist_ok=True)
    file = out / "gpu_suite.json"
    try:
        for name in dict.fromkeys(part for part in parts if part in chosen):
            rows = found[name] = []
            for row in _in_time(worker, [number for number, part in enumerate(parts) if part == name], ends):
                rows.append(row)
                write_json(file, machine.close(made) | _storable(found), durable=False)
            if rows:
                print(f"\n{name}\n\n" + _table(rows), flush=True)
            if time.monotonic() > ends:
                print(f"{name}: no time left for more", flush=True)
    finally:
        worker.close()
    print(f"\nwritten to {file}")
    _judge(found)
    return 0


def _ask_for_the_interpreter() -> None:
    """Triton reads it when the kernels are made, which is later.

    Raises:
        UserError: this Triton's interpreter takes arrays of one element for numbers, which this numpy refuses.
    """
    triton, numpy = release("triton"), release("numpy")
    if triton < (3, 7) and numpy >= (2, 4):
        raise UserError(
            f"the interpreter of Triton {dotted(triton)} fails with numpy {dotted(numpy)}; install numpy<2.4 or "
            "triton>=3.7"
        )
    os.environ["TRITON_INTERPRET"] = "1"


def _in_time(worker: Inline | Sheltered, numbers: Sequence[int], ends: float) -> Iterator[Row]:
    """The rows of units, none of which begins after the end."""
    for number in numbers:
        rows = worker.rows(number)
        while time.monotonic() < ends and (row := next(rows, None)) is not None:
            yield row


def units(device: str) -> list[Unit]:
    """All that is measured, in small shapes where there is no GPU."""
    clock, small = Clock(device), device != "cuda"
    halves = [torch.float16] if small else [torch.float16, torch.bfloat16]  # the interpreter's bf16 dots are wrong
    made = []
    for case in gpu_cases.all_cases(small=small):
        for dtype in (torch.float32, *(halves if case.half else [])):
            labels = {"kernel": case.name, "type": _name(dtype)}
            made.append(Unit("correctness", labels, partial(check, case, dtype, device)))
    for shape in [(2, 1, 20, 16)] if small else SHAPES:
        for dtype in [torch.float32] if small else [torch.bfloat16, torch.float32]:
            labels = {"shape": "x".join(map(str, shape)), "type": _name(dtype)}
            made.append(Unit("attention", labels, partial(attention, clock, *shape, dtype)))
    for sizes in [(20, 50, 16)] if small else VOCABULARIES:
        labels = {"shape": "x".join(map(str, sizes))}
        made.append(Unit("vocabulary", labels, partial(vocabulary, clock, *sizes)))
    for length in LENGTHS[:1] if small else LENGTHS:
        made.append(Unit("steps", {"T": length}, partial(steps, clock, length, small=small)))
    made.append(Unit("seeds", {}, partial(side_by_side, device, small=small)))
    for case, dtype in gpu_cases.timed_cases(small=small):
        labels = {"kernel": case.name, "shape": case.shape, "type": _name(dtype)}
        made.append(Unit("mechanisms", labels, partial(mechanism, clock, case, dtype)))
    made += [Unit("tiles", {"tile": "x".join(map(str, t))}, partial(tiles, clock, t)) for t in TILES if not small]
    for length in LENGTHS[:1] if small else LENGTHS:  # last: see there
        made.append(Unit("kernels", {"T": length}, partial(kernels, clock, length, small=small)))
    return made


def _storable(found: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """The lines as JSON holds them, which knows neither infinity nor NaN."""
    return {
        name: [
            {key: str(x) if isinstance(x, float) and not math.isfinite(x) else x for key, x in row.items()}
            for row in rows
        ]
        for name, rows in found.items()
    }


def _judge(found: Mapping[str, Sequence[Row]]) -> None:
    """Raise RunError where a kernel is wrong, or a line is one of failure."""
    checks = found.get("correctness", [])
    wrong = [row for row in checks if not row.get("right")]
    broken = [f"{name}: {row['failed']}" for name, rows in found.items() for row in rows if "failed" in row]
    if wrong:
        raise RunError(f"{len(wrong)} of {len(checks)} checks failed, first {wrong[0]['kernel']}")
    if broken:
        raise RunError(f"{len(broken)} measurements failed, first {broken[0]}")


def check(case: Case, dtype: torch.dtype, device: str) -> Iterator[Row]:
    """A kernel in one type against the reference in double, and the reference in the same type."""
    inputs = case.inputs(dtype, device)
    exact_inputs = {
        name: leaf.detach().to(torch.complex128 if leaf.is_complex() else torch.float64).requires_grad_()
        for name, leaf in inputs.items()
    }
    exact = _values_and_gradients(case, exact_inputs, "reference")
    plain = _values_and_gradients(case, inputs, "reference")
    fast, again = (_values_and_gradients(case, inputs, "triton") for _ in range(2))
    least, times = LAST_DIGITS[dtype] * torch.finfo(dtype).eps, TIMES_PLAIN[dtype]
    errors = {name: (_error(fast[name], exact[name]), _error(plain[name], exact[name])) for name in exact}
    worst = max(errors, key=lambda name: errors[name][0] / max(times * errors[name][1], least))
    equal = all(torch.equal(fast[name], again[name]) for name in fast)
    right = equal and all(ours <= max(times * theirs, least) for ours, theirs in errors.values())
    yield {
        "right": right,
        "worst": worst,
        "error": errors[worst][0],
        "plain": errors[worst][1],
        "repeats": equal,
    }


def _values_and_gradients(case: Case, inputs: Mapping[str, Tensor], impl: str) -> dict[str, Tensor]:
    outputs = case.run(inputs, impl)
    found = {f"output {number}": output.detach() for number, output in enumerate(outputs)}
    total = sum((_weighted(output) for output in outputs), torch.zeros((), device=outputs[0].device))
    leaves = list(inputs.values())
    for name, grad in zip(inputs, torch.autograd.grad(total, leaves), strict=True):
        found[f"d {name}"] = grad
    return found


def _weighted(output: Tensor) -> Tensor:
    """A scalar that depends on every number of an output in a way of its own."""
    real = torch.view_as_real(output) if output.is_complex() else output
    places = torch.arange(real.numel(), device=real.device, dtype=torch.float64)
    return (real.double() * torch.cos(places).view_as(real)).sum()


def _error(found: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm; infinite where something is not finite."""
    if not torch.isfinite(torch.view_as_real(found) if found.is_complex() else found).all():
        return float("inf")
    wide = torch.complex128 if found.is_complex() else torch.float64
    size = exact.norm().clamp(min=torch.finfo(torch.float64).tiny)
    return float((found.to(wide) - exact).norm() / size)


def attention(clock: Clock, B: int, H: int, T: int, K: int, dtype: torch.dtype) -> Iterator[Row]:
    """Kriging moments and what they are compared with."""
    heads = _heads(clock, (B, H, T, K), dtype)
    yield from _beside_the_first(clock, gpu_cases.attentions(*heads, impl=_impl(clock)), heads)


def tiles(clock: Clock, tile: tuple[int, ...]) -> Iterator[Row]:
    """Kriging moments of wide heads in bfloat16, cut and run as told."""
    heads = _heads(clock, SHAPES[-1], torch.bfloat16)
    run = gpu_cases.attentions(*heads, impl="triton")["recbft moments"]
    module = import_module("recbft.kernels.softmax_moments.triton")
    chosen = {SHAPES[-1][-1]: module.Tile(*tile)}
    with patch.dict(module.HALF_TILES, chosen), patch.dict(module.FORWARD_HALF_TILES, chosen):
        yield _times(clock, run, heads)


def _heads(clock: Clock, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values."""
    return [torch.randn(shape, device=clock.device, dtype=dtype, requires_grad=True) for _ in "qkv"]


def mechanism(clock: Clock, case: Case, dtype: torch.dtype) -> Iterator[Row]:
    """The kernels of a mechanism beside its reference, on one batch as a model's layers have it."""
    inputs = case.inputs(dtype, clock.device)
    ways = {"reference": partial(case.run, inputs, "reference"), "recbft": partial(case.run, inputs, "triton")}
    with patch.object(gpu_cases, "packed", lru_cache(gpu_cases.packed)):
        yield from _beside_the_first(clock, ways, list(inputs.values()))


def vocabulary(clock: Clock, N: int, V: int, D: int) -> Iterator[Row]:
    """The cross-entropy and the one over logits."""
    states, weight = (torch.randn(n, D, device=clock.device, requires_grad=True) for n in (N, V))
    target = torch.randint(V, (N,), device=clock.device)
    ways = gpu_cases.losses(states, weight, target, impl=_impl(clock))
    yield from _beside_the_first(clock, ways, (states, weight), parts=("both",))


def _beside_the_first(
    clock: Clock,
    ways: Mapping[str, Callable[[], Any]],
    leaves: Sequence[Tensor],
    *,
    parts: Sequence[str] = ("forward", "both"),
) -> Iterator[Row]:
    """What each way takes, and its times over those of the first."""
    first: Row = {}
    for name, run in ways.items():
        row = _times(clock, run, leaves)
        first = first or row
        yield {"way": name} | row | _ratios(row, first, parts)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ratios(row: Row, stock: Row, parts: Sequence[str]) -> dict[str, float]:
    """The times over those of the first way, where both were had."""
    both = "failed" not in row | stock
    names = [name for part in parts for name in (part, f"{part}_gpu")]
    return {f"{n}_x": row[f"{n}_ms"] / stock[f"{n}_ms"] for n in names if both and f"{n}_ms" in row.keys() & stock}


def _impl(clock: Clock) -> str:
    """The path that is timed: on a GPU what users get, else the kernels in the interpreter."""
    return "auto" if clock.device == "cuda" else "triton"


def _times(clock: Clock, run: Callable[[], Any], leaves: Sequence[Tensor]) -> Row:
    """Milliseconds forward, and forward and backward, and the memory of both; or what failed.

    Those of ``_gpu`` leave out what Python takes to launch kernels, which is most of a small shape's time.
    """
    passes = {"forward": gpu_cases.forward_pass(run), "both": gpu_cases.both_passes(run, leaves)}
    row: Row = {}
    try:
        for part, work in passes.items():
            row[f"{part}_ms"] = 1e3 * clock.seconds(work)
            if (busy := clock.busy_seconds(work)) is not None:
                row[f"{part}_gpu_ms"] = 1e3 * busy
        return row | {"peak_mb": clock.peak_mb(passes["both"])}
    except torch.OutOfMemoryError:
        return {"forward_ms": float("nan"), "both_ms": float("nan"), "peak_mb": None}
    except Exception as error:
        return failure(error)


def _table(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return text_table(names, [[cell(row.get(name)) for name in names] for row in rows])


def cell(value: Any) -> str:
    """A value as tables show it."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2e}" if 0 < abs(value) < 1e-2 else f"{value:,.2f}"
    return str(value)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = parser(NAME, "Kernels on a GPU.")
    options.add_argument("--out", required=True, metavar="DIR", help="folder for the results")
    options.add_argument("--minutes", type=float, default=5.9, help="nothing begins later than this")
    options.add_argument("--parts", default="", metavar="NAMES", help="such as correctness,steps; all unless given")
    options.add_argument("--dry-run", action="store_true", help="small shapes in Triton's interpreter, without a GPU")
    return options.parse_args(arguments)


if __name__ == "__main__":
    finish(main)
