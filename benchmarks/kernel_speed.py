"""Time the CPU paths against what PyTorch or the plain equations take, forward, and forward and backward.

    python -m benchmarks.kernel_speed --json FILE
    python -m benchmarks.kernel_speed --parts attention --shapes 256x2x50x32 --threads 1 --rounds 21

attention    the mean of attention and its kriging moments, over PyTorch's attention, which gives the mean alone
vocabulary   the cross-entropy over all items, ours and PyTorch's fused one, over ``linear`` and ``cross_entropy``
memory       the Bayesian layer in chunks, over its loop over tokens

In one process all ways of a part take turns, so that whatever else the machine does falls on all alike; ratios are
medians over rounds to the first way of the same round. Gradients that come from above are dense, as a layer's are.

Shapes: B rows, H heads, T tokens, K head width, N positions, V items, D width.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu_cases, machine
from benchmarks.command import count, finish, parse, parser, recorded
from benchmarks.mixer_speed import Shape, shape_of, time_in_turn
from recbft.errors import UserError, did_you_mean
from recbft.experiments.lists import split_list
from recbft.reporting.tables import text_table
from recbft.system.files import write_json
from recbft.system.memory import keep_freed_memory

NAME = "kernel_speed"
VOCABULARY = ((12_800, 12_101, 64), (1_500, 12_101, 64))  # N x V x D; the second is a step of Beauty
MEMORY = ((256, 2, 50, 32), (32, 4, 200, 64))


# What a part is measured at, ways to compute it by name, and the leaves whose gradients are wanted.
Measured = Iterator[tuple[str, Mapping[str, Callable[[], Any]], Sequence[Tensor]]]


def attention(shapes: Sequence[Shape]) -> Measured:
    """Ways to compute attention, by shape."""
    for shape in shapes:
        heads = [torch.randn(*shape, requires_grad=True) for _ in "qkv"]
        yield str(shape), gpu_cases.attentions(*heads, impl="auto", others=["torch"]), heads


def vocabulary(sizes: Sequence[tuple[int, int, int]] = VOCABULARY) -> Measured:
    """Ways to compute the cross-entropy, by size."""
    for N, V, D in sizes:
        states, weight = (torch.randn(n, D, requires_grad=True) for n in (N, V))
        ways = gpu_cases.losses(states, weight, torch.randint(V, (N,)), impl="torch")
        yield f"{N}x{V}x{D}", ways, (states, weight)


def memory(shapes: Sequence[tuple[int, int, int, int]] = MEMORY) -> Measured:
    """The Bayesian layer as a loop and in chunks."""
    for shape in shapes:
        case = gpu_cases.memory(*shape)
        x = case.inputs(torch.float32, "cpu")
        named = {"loop over tokens": "reference", "recbft, in chunks": "chunked"}
        yield str(Shape(*shape)), {name: partial(case.run, x, impl) for name, impl in named.items()}, list(x.values())


def measure(ways: Mapping[str, Callable[[], Any]], leaves: Sequence[Tensor], rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of each way, and their ratio to the first's in the same round."""
    forward = {name: gpu_cases.forward_pass(run) for name, run in ways.items()}
    both = {name: gpu_cases.both_passes(run, leaves) for name, run in ways.items()}
    rows: dict[str, dict[str, Any]] = {name: {"way": name} for name in ways}
    for part, passes in (("forward", forward), ("both", both)):
        seconds = time_in_turn(passes, rounds)
        first = next(iter(seconds.values()))
        for name, own in seconds.items():
            ratios = [a / b for a, b in zip(own, first, strict=True)]
            rows[name] |= {f"{part}_ms": 1e3 * statistics.median(own), f"{part}_x": statistics.median(ratios)}
            rows[name][f"{part}_range"] = [min(ratios), max(ratios)]
    return list(rows.values())


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per way."""
    lines = []
    for row in rows:
        low, high = row["both_range"]
        times = [f"{row['forward_ms']:,.1f}", f"{row['forward_x']:.2f}", f"{row['both_ms']:,.1f}"]
        lines.append([row["way"], *times, f"{row['both_x']:.2f}", f"{low:.2f} to {high:.2f}"])
    return text_table(["way", "forward, ms", "x first", "and backward, ms", "x first", "range"], lines)


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    parts = {
        "attention": lambda: attention([shape_of(text) for text in split_list(options.shapes)]),
        "vocabulary": vocabulary,
        "memory": memory,
    }
    asked = split_list(options.parts)
    for name in asked:
        if name not in parts:
            raise UserError(f"unknown part {name!r}; {did_you_mean(name, parts)}")
    keep_freed_memory()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    made = machine.header(recorded(NAME, arguments))
    print("\n".join(machine.lines(made)), flush=True)
    rows: list[dict[str, Any]] = []
    for name in asked:
        for shape, ways, leaves in parts[name]():
            found = measure(ways, leaves, options.rounds)
            print(f"\n{name}, {shape}, {options.rounds} rounds\n\n" + table(found), flush=True)
            rows += [{"part": name, "shape": shape} | row for row in found]
    if options.json is not None:
        write_json(options.json, machine.close(made) | {"kernel_speed": rows})
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = parser(NAME, "Time of the CPU paths.")
    options.add_argument(
        "--parts", default="attention,vocabulary,memory", help="attention, vocabulary, memory; all unless given"
    )
    options.add_argument(
        "--shapes", default="256x2x50x32,128x4x200x64", help="of attention, BxHxTxK, divided by commas"
    )
    options.add_argument("--rounds", type=count, default=9)
    options.add_argument("--threads", type=count, help="threads of PyTorch; its own choice unless given")
    return parse(options, arguments)


if __name__ == "__main__":
    finish(main)
