"""Time the mixers against softmax attention, forward and backward, and measure the memory each needs.

    python -m benchmarks.mixer_speed --json FILE
    python -m benchmarks.mixer_speed --mixers rfa,bayesian --shapes 256x2x50x32,32x4x512x64,4x4x4096x64

One layer's mixer, as the registry makes it, over full rows: projections included, no dropout. In one process all take
turns, so that whatever else the machine does falls on all alike; ratios are medians over rounds to the plain softmax
mixer of the same round. ``precision``: what the mixer costs with its observation precision, where it has one.
Memory is the growth of the peak of a fresh process over one forward and backward pass.

Shapes: B rows, H heads, T tokens, K head width.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from benchmarks import machine
from benchmarks.command import count, finish, parse, parser, recorded
from recbft.config.fields import from_dict
from recbft.config.yaml_text import parse_setting
from recbft.core import SequenceContext
from recbft.errors import UserError, did_you_mean
from recbft.experiments.lists import split_list
from recbft.mixers import MIXERS, Estimation, Place
from recbft.reporting.tables import text_table
from recbft.system.files import write_json

NAME = "mixer_speed"
PLAIN = "attention"
Key = TypeVar("Key", bound=Hashable)


class Shape(NamedTuple):
    """Rows, heads, tokens, head width."""

    B: int
    H: int
    T: int
    K: int

    def __str__(self) -> str:
        return "x".join(map(str, self))


class Case(NamedTuple):
    """A mixer with options of its own, with or without its observation precision.

    ``text`` is the mixer's name, or ``NAME[key=value,..]``.
    """

    text: str
    precision: bool

    @property
    def mixer(self) -> str:
        """Its name in the registry."""
        return self.text.partition("[")[0]

    @property
    def options(self) -> dict[str, Any]:
        """Settings of its own section."""
        inside = self.text.partition("[")[2].removesuffix("]")
        return dict(parse_setting(part) for part in split_list(inside)) if inside else {}


def cases_of(names: Sequence[str]) -> list[Case]:
    """Each mixer without and, where it has one, with its precision; the plain one first.

    Raises:
        UserError: an unknown mixer, or a wrong option.
    """
    found = [Case(PLAIN, False)]
    for name in names:
        case = Case(name, False)
        if case.mixer not in MIXERS:
            raise UserError(f"unknown mixer {case.mixer!r}; {did_you_mean(case.mixer, MIXERS)}")
        from_dict(MIXERS[case.mixer].options, case.options, "mixing")
        with_precision = [] if MIXERS[case.mixer].precision == "none" else [Case(name, True)]
        found += [one for one in (case, *with_precision) if one not in found]
    return found


def make_pass(case: Case, shape: Shape) -> Callable[[], None]:
    """One forward and backward pass of a fresh mixer."""
    torch.manual_seed(0)
    spec = MIXERS[case.mixer]
    D = shape.H * shape.K
    estimation = None
    if case.precision:
        estimation = Estimation(lam_max=100.0, estimator="reml" if spec.precision == "softmax" else "sandwich")
    place = Place(hidden_size=D, n_heads=shape.H, length=shape.T, estimation=estimation)
    mixer = spec.make(place, from_dict(spec.options, case.options, "mixing")).train()
    x = torch.randn(shape.B, shape.T, D, requires_grad=True)
    trust = (torch.rand(shape.B, shape.T, D) * 9 + 0.5).requires_grad_() if case.precision else None
    position = torch.arange(shape.T).expand(shape.B, shape.T)
    context = SequenceContext(torch.zeros_like(position), position)

    def run() -> None:
        seen = mixer(x, trust, context)
        loss = seen.innovation.square().sum()
        if seen.precision is not None:
            loss = loss + seen.precision.sum()
        loss.backward()
        for leaf in (x, trust, *mixer.parameters()):
            if leaf is not None:
                leaf.grad = None

    return run


def time_in_turn(passes: Mapping[Key, Callable[[], Any]], rounds: int) -> dict[Key, list[float]]:
    """Seconds of each pass in each round, after one that warms up; whoever begins changes from round to round."""
    for run in passes.values():
        run()
    keys, seconds = list(passes), {key: list[float]() for key in passes}
    for turn in range(rounds):
        for number in range(len(keys)):
            key = keys[(number + turn) % len(keys)]
            began = time.perf_counter()
            passes[key]()
            seconds[key].append(time.perf_counter() - began)
    return seconds


def memory_of(case: Case, shape: Shape) -> float | None:
    """MB that one pass adds to the peak of a fresh process; None if that process was ended by the system."""
    asked = json.dumps([case, shape])
    command = [sys.executable, "-m", f"benchmarks.{NAME}", "--memory-of", asked]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return float(ended.stdout) if ended.returncode == 0 else None


def print_memory(asked: str) -> int:
    """The child of ``memory_of``."""
    case, shape = json.loads(asked)
    run = make_pass(Case(*case), Shape(*shape))
    before = machine.peak_rss_mb()
    run()
    print(machine.peak_rss_mb() - before)
    return 0


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    if options.memory_of is not None:
        return print_memory(options.memory_of)
    shapes = [shape_of(text) for text in split_list(options.shapes)]
    cases = cases_of(_mixers(options.mixers))
    made = machine.header(recorded(NAME, arguments))
    print("\n".join(machine.lines(made)), flush=True)
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        memory = {case: memory_of(case, shape) for case in cases}
        fitting = [case for case in cases if memory[case] is not None]
        if Case(PLAIN, False) not in fitting:
            raise UserError(f"softmax attention does not fit at {shape}; take a smaller shape")
        seconds = time_in_turn({case: make_pass(case, shape) for case in fitting}, options.rounds)
        found = [_row(case, shape, seconds, memory[case]) for case in cases]
        print(f"\nB x H x T x K = {shape}, {options.rounds} rounds\n\n" + table(found), flush=True)
        rows += found
    if options.json is not None:
        write_json(options.json, machine.close(made) | {"mixer_speed": rows})
    return 0


def _row(case: Case, shape: Shape, seconds: dict[Case, list[float]], memory: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {"mixer": case.text, "precision": case.precision, "shape": list(shape), "memory_mb": memory}
    if case in seconds:
        ratios = [own / plain for own, plain in zip(seconds[case], seconds[Case(PLAIN, False)], strict=True)]
        row |= {"seconds": seconds[case], "ratio": statistics.median(ratios), "range": [min(ratios), max(ratios)]}
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line per case."""
    lines = []
    for row in rows:
        name = row["mixer"] + (" with precision" if row["precision"] else "")
        if row["memory_mb"] is None:
            lines.append([name, "does not fit", "", "", ""])
            continue
        low, high = row["range"]
        times = [f"{1e3 * statistics.median(row['seconds']):,.1f}", f"{row['ratio']:.2f}", f"{low:.2f} to {high:.2f}"]
        lines.append([name, *times, f"{row['memory_mb']:,.0f}"])
    return text_table(["mixer", "ms", "x softmax", "range", "MB"], lines)


def shape_of(text: str) -> Shape:
    """What ``--shapes`` names: BxHxTxK."""
    parts = text.split("x")
    if len(parts) != 4 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"shape {text!r} is not BxHxTxK; write for example 256x2x50x32")
    return Shape(*map(int, parts))


def _mixers(text: str) -> list[str]:
    if text == "all":
        return [name for name, spec in MIXERS.items() if spec.precision != "silu"]
    return split_list(text)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = parser(NAME, "Time and memory of the mixers.")
    options.add_argument("--mixers", default="all", help="names, or NAME[key=value,..], divided by commas")
    options.add_argument("--shapes", default="256x2x50x32", help="BxHxTxK, divided by commas")
    options.add_argument("--rounds", type=count, default=7)
    options.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parse(options, arguments)


if __name__ == "__main__":
    finish(main)
