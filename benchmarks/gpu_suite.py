"""The one command to run on a GPU: are its kernels right, how fast are they, and how much memory do they take?

    python -m benchmarks.gpu_suite --out DIR
    python -m benchmarks.gpu_suite --out DIR --dry-run       small shapes in Triton's interpreter, no GPU needed

1. Every kernel against its reference in float64, values and gradients, in single and half precision. The error may be
   twice that of the reference in the same type (and a few units of the last digit); two runs must be equal bit for bit.
2. Kriging moments against PyTorch's attention and against the reference: time forward, and forward and backward, and
   peak memory. The cross-entropy against the one over logits.
3. A training step of ``bft`` against ``matched``, at two lengths, in single and in mixed precision.

It keeps to ``--minutes`` in all: what no time is left for is named. Results are on disk line by line, and what fails is
a line of its own, so that the rest is still told (but for an illegal access to memory, after which all fails). Exit
code 1 where a kernel is wrong or something failed.

Shapes: B rows, H heads, T tokens, K head width.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu_cases, machine, train_speed
from benchmarks.command import finish, recorded
from benchmarks.gpu_cases import Case
from recbft.datasets import SyntheticConfig, synthetic_dataset
from recbft.errors import RunError, UserError
from recbft.experiments.arms import parse_arms
from recbft.experiments.tables import text_table
from recbft.files import write_json

NAME = "gpu_suite"
# Units of the last digit that an error may have whatever the reference's; sums over many pairs lose some in single.
LAST_DIGITS = {torch.float32: 64, torch.float16: 4, torch.bfloat16: 4}
SHAPES = ((256, 2, 50, 32), (128, 4, 200, 64), (8, 8, 2048, 64))
VOCABULARIES = ((12_800, 12_101, 64), (2_048, 1_000_000, 64))
LENGTHS = (50, 200)


class Clock:
    """The time that is left, and times on a device."""

    def __init__(self, minutes: float, device: str) -> None:
        self.ends, self.device = time.monotonic() + 60 * minutes, device

    def is_over(self) -> bool:
        """Whether nothing further should begin."""
        return time.monotonic() > self.ends

    def seconds(self, work: Callable[[], Any], *, at_least: float = 0.2) -> float:
        """Median seconds of some work, after two warm-up rounds."""
        found: list[float] = []
        for _ in range(2):
            work()
        self._wait()
        began = time.perf_counter()
        while len(found) < 5 or (time.perf_counter() - began < at_least and len(found) < 200):
            start = time.perf_counter()
            work()
            self._wait()
            found.append(time.perf_counter() - start)
        return statistics.median(found)

    def peak_mb(self, work: Callable[[], Any]) -> float | None:
        """MB that some work adds to what is allocated, at its peak; None without a GPU."""
        if self.device != "cuda":
            return None
        self._wait()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        self._wait()
        return (torch.cuda.max_memory_allocated() - before) / 1e6

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    out = Path(options.out)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are made, which is later
    elif not torch.cuda.is_available():
        raise UserError("PyTorch sees no CUDA GPU; use --dry-run for small shapes in Triton's interpreter")
    out.mkdir(parents=True, exist_ok=True)
    device = "cpu" if options.dry_run else "cuda"
    clock = Clock(options.minutes, device)
    made = machine.header(recorded(NAME, arguments), device=device)
    print("\n".join(machine.lines(made)), flush=True)
    found: dict[str, list[dict[str, Any]]] = {}
    file = out / "gpu_suite.json"
    for name, part in (
        ("correctness", correctness),
        ("attention", attention),
        ("vocabulary", vocabulary),
        ("steps", steps),
    ):
        rows = found[name] = []
        lines = iter(part(clock, small=options.dry_run))
        while not clock.is_over() and (row := _next(lines)) is not None:
            rows.append(row)
            write_json(file, machine.close(made) | _storable(found), durable=False)
        print(f"\n{name}\n\n" + _table(rows), flush=True)
        if clock.is_over():
            print(f"{name}: no time left for more", flush=True)
    print(f"\nwritten to {file}")
    _judge(found)
    return 0


def _next(lines: Iterator[dict[str, Any]]) -> dict[str, Any] | None:
    """The next line of a part, or why there is none, or None at its end."""
    try:
        return next(lines, None)
    except Exception as error:  # nothing more comes of this part
        return _failure(error)


def _failure(error: Exception) -> dict[str, Any]:
    return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}


def _storable(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """The lines as JSON holds them, which knows neither infinity nor NaN."""
    return {
        name: [
            {key: str(x) if isinstance(x, float) and not math.isfinite(x) else x for key, x in row.items()}
            for row in rows
        ]
        for name, rows in found.items()
    }


def _judge(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Raise RunError where a kernel is wrong, or a line is one of failure."""
    checks = found["correctness"]
    wrong = [row for row in checks if not row.get("right")]
    broken = [f"{name}: {row['failed']}" for name, rows in found.items() for row in rows if "failed" in row]
    if wrong:
        first = wrong[0].get("kernel", wrong[0].get("failed"))
        raise RunError(f"{len(wrong)} of {len(checks)} checks failed, first {first}")
    if broken:
        raise RunError(f"{len(broken)} measurements failed, first {broken[0]}")


def correctness(clock: Clock, *, small: bool) -> Iterator[dict[str, Any]]:
    """One row per kernel and type."""
    for case in gpu_cases.all_cases(small=small):
        halves = [torch.float16] if small else [torch.float16, torch.bfloat16]  # the interpreter's bf16 dots are wrong
        for dtype in [torch.float32, *(halves if case.half else [])]:
            yield check(case, dtype, clock.device)


def check(case: Case, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """A kernel in one type against the reference in double, and the reference in the same type."""
    row: dict[str, Any] = {"kernel": case.name, "type": str(dtype).removeprefix("torch.")}
    try:
        return row | _compared(case, dtype, device)
    except Exception as error:  # a kernel that does not compile is a finding like any other
        return row | {"right": False} | _failure(error)


def _compared(case: Case, dtype: torch.dtype, device: str) -> dict[str, Any]:
    inputs = case.inputs(dtype, device)
    exact_inputs = {
        name: leaf.detach().to(torch.complex128 if leaf.is_complex() else torch.float64).requires_grad_()
        for name, leaf in inputs.items()
    }
    exact = _values_and_gradients(case, exact_inputs, "reference")
    plain = _values_and_gradients(case, inputs, "reference")
    fast, again = (_values_and_gradients(case, inputs, "triton") for _ in range(2))
    least = LAST_DIGITS[dtype] * torch.finfo(dtype).eps
    errors = {name: (_error(fast[name], exact[name]), _error(plain[name], exact[name])) for name in exact}
    worst = max(errors, key=lambda name: errors[name][0] / max(2 * errors[name][1], least))
    equal = all(torch.equal(fast[name], again[name]) for name in fast)
    right = equal and all(ours <= max(2 * theirs, least) for ours, theirs in errors.values())
    return {
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


def attention(clock: Clock, *, small: bool) -> Iterator[dict[str, Any]]:
    """Kriging moments and what they are compared with, by shape and type."""
    shapes = [(2, 1, 20, 16)] if small else SHAPES
    for B, H, T, K in shapes:
        for dtype in [torch.float32] if small else [torch.bfloat16, torch.float32]:
            q, k, v = (torch.randn(B, H, T, K, device=clock.device, dtype=dtype, requires_grad=True) for _ in "qkv")
            stock: dict[str, Any] = {}
            for name, run in gpu_cases.contestants(B, T, clock.device, impl=_impl(clock)).items():
                row = _times(clock, lambda run=run, q=q, k=k, v=v: run(q, k, v), (q, k, v))  # type: ignore[misc]
                stock = stock or row
                row |= _ratios(row, stock, ("forward", "both"))
                yield {"shape": f"{B}x{H}x{T}x{K}", "type": str(dtype).removeprefix("torch."), "way": name} | row


def vocabulary(clock: Clock, *, small: bool) -> Iterator[dict[str, Any]]:
    """The cross-entropy and the one over logits."""
    for N, V, D in [(20, 50, 16)] if small else VOCABULARIES:
        states, weight = (torch.randn(n, D, device=clock.device, requires_grad=True) for n in (N, V))
        target = torch.randint(V, (N,), device=clock.device)
        ways = gpu_cases.losses(states, weight, target, impl=_impl(clock))
        first: dict[str, Any] = {}
        for name, run in ways.items():
            row = _times(clock, run, (states, weight))
            first = first or row
            row |= _ratios(row, first, ("both",))
            yield {"shape": f"{N}x{V}x{D}", "way": name} | row


def _ratios(row: Mapping[str, Any], stock: Mapping[str, Any], parts: Sequence[str]) -> dict[str, float]:
    """The times over those of the first way, where both were had."""
    return {f"{p}_x": row[f"{p}_ms"] / stock[f"{p}_ms"] for p in parts if "failed" not in row | stock}


def _impl(clock: Clock) -> str:
    """The path that is timed: on a GPU what users get, else the kernels in the interpreter."""
    return "auto" if clock.device == "cuda" else "triton"


def _times(clock: Clock, run: Callable[[], Any], leaves: Sequence[Tensor]) -> dict[str, Any]:
    """Milliseconds forward, and forward and backward, and the memory of both; or what failed."""
    forward, both = gpu_cases.forward_pass(run), gpu_cases.both_passes(run, leaves)
    try:
        return {
            "forward_ms": 1e3 * clock.seconds(forward),
            "both_ms": 1e3 * clock.seconds(both),
            "peak_mb": clock.peak_mb(both),
        }
    except torch.OutOfMemoryError:
        return {"forward_ms": float("nan"), "both_ms": float("nan"), "peak_mb": None}
    except Exception as error:
        return _failure(error)


def steps(clock: Clock, *, small: bool) -> Iterator[dict[str, Any]]:
    """A training step of each arm, and evaluation, on generated histories that fill most of their rows."""
    arms = parse_arms("matched,bft,matched[training.autocast=bf16],bft[training.autocast=bf16]")
    for length in LENGTHS[:1] if small else LENGTHS:
        size = SyntheticConfig(
            num_users=60 if small else 4096, num_items=400 if small else 12_000, mean_length=0.75 * length
        )
        dataset = synthetic_dataset(size)
        settings = [
            f"max_length={length}",
            f"device={clock.device}",
            *(["hidden_size=16", "batch_size=32"] if small else []),
        ]
        configs = [arm.config(settings, model="sasrec", dataset="synthetic") for arm in arms]
        contestants = train_speed.measure(arms, configs, dataset, epochs=1 if small else 3, chunk_steps=8, times=1)
        for contestant in contestants:
            found = train_speed.result_of(contestant, contestants[0])
            yield {
                "T": length,
                "arm": contestant.arm.label,
                "step_ms": 1e3 * found["seconds_per_epoch"] / contestant.batches.num_batches,
                "x": found["ratio"]["median"],
                "tokens_per_second": found["tokens_per_second"],
                "evaluation_s": found["evaluation_seconds"],
            }


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return text_table(names, [[_cell(row.get(name)) for name in names] for row in rows])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2e}" if 0 < abs(value) < 1e-2 else f"{value:,.2f}"
    return str(value)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description="Kernels on a GPU.")
    options.add_argument("--out", required=True, metavar="DIR", help="folder for the results")
    options.add_argument("--minutes", type=float, default=7.0, help="nothing begins later than this")
    options.add_argument("--dry-run", action="store_true", help="small shapes in Triton's interpreter, without a GPU")
    return options.parse_args(arguments)


if __name__ == "__main__":
    finish(main)
