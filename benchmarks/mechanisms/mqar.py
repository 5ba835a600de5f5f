"""Associative recall over learned tokens: many keys written, then asked for. (Memory by Design, section 4.2.)

python -m benchmarks.mechanisms.mqar                    base, update and block tasks, minutes on a CPU
python -m benchmarks.mechanisms.mqar --size medium      longer sequences and twice the keys, an hour on a CPU
python -m benchmarks.mechanisms.mqar --size full        the paper's size: for a GPU

    base      k v k v ... 0 0 q 0 q ...           a question's answer is the value that followed its key
    update    the same, some keys written again   the answer is the newest value
    block     k k v v k k v v ... q 0 q           B keys, then their B values

Keys and values share one vocabulary, and which stands for what is drawn per sequence; 0 fills the places between
questions, whose distances follow a power law. Two layers of h <- h + mixer(Norm h), no feed-forward network and no
convolution, tokens embedded with learned positions, one linear readout. AdamW with weight decay 0.1, warm-up and
cosine, at the best of a few learning rates, as the benchmark's authors have it.

Shapes: B sequences, T tokens, D model width.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import machine
from benchmarks.command import count, finish, parse, parser, recorded
from recbft.core import SequenceContext
from recbft.errors import RunError, UserError, did_you_mean
from recbft.experiments.lists import parse_seeds, split_list
from recbft.mixers import SoftmaxAttention
from recbft.mixers.bayesian import BayesianMixer
from recbft.mixers.memory_family import DESIGN_MODELS, MemoryFamilyMixer
from recbft.reporting.tables import text_table
from recbft.system.files import write_json
from recbft.training.process_settings import chosen_device
from recbft.training.run_config import TrainingConfig

NAME = "mechanisms.mqar"
TASKS = ("base", "update", "block")
POWER = 0.01  # of the distances between questions
LEARNED = 0.8  # share of right answers
PUBLISHED = {
    "base": "figure 4a: the Bayesian layer matches the best at larger widths, near-perfect",
    "update": "figure 4b: Bayesian layer about 88 %, Gated DeltaNet and Mamba-2 about 60 %",
    "block": "figure 4c: Bayesian layer and Gated DeltaNet, without convolutions, bridge the gap from key to value",
}


@dataclass(frozen=True)
class Shape:
    """One kind of sequence: its length, distinct keys, further writes of them, keys in a row before their values."""

    length: int
    keys: int
    updates: int = 0
    block: int = 1

    @property
    def fits(self) -> bool:
        """Whether every key can be asked for behind what is written."""
        return self.length - 2 * (self.keys + self.updates) >= 2 * self.keys


@dataclass(frozen=True)
class Size:
    """A model, its sequences and its training."""

    vocabulary: int
    width: int
    head_width: int
    shapes: dict[str, tuple[Shape, ...]]
    batch_size: int
    steps: dict[str, int]  # by task
    warmup: int
    learning_rates: tuple[float, ...]
    test_sequences: int


def _shapes(lengths: Sequence[int], keys: Sequence[int], block_length: int) -> dict[str, tuple[Shape, ...]]:
    base = [Shape(length, count) for length in lengths for count in keys]
    update = [replace(one, updates=one.keys // part) for one in base for part in (1, 2, 4, 8) if one.keys >= part]
    block = [Shape(block_length, 2 * count, block=2) for count in (1, 2, 3, 4)]
    kinds = {"base": base, "update": update, "block": block}
    return {name: tuple(one for one in shapes if one.fits) for name, shapes in kinds.items()}


def _steps(others: int, update: int) -> dict[str, int]:
    return {"base": others, "update": update, "block": others}


SIZES = {
    "small": Size(32, 64, 32, _shapes([32], [4], 32), 64, _steps(800, 2000), 80, (3e-3, 1e-2), 512),
    "medium": Size(64, 64, 32, _shapes([32, 64], [4, 8], 64), 64, _steps(2500, 5000), 250, (3e-3, 1e-2), 512),
    "full": Size(
        8192, 128, 32, _shapes([64, 128], [4, 16], 128), 256, _steps(25_000, 25_000), 1024, (3e-4, 1e-3, 3e-3), 3000
    ),
}


def draw(shape: Shape, vocabulary: int, num_sequences: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens (B, T) and, at questions, answers (B, T); 0 elsewhere. Tokens run from 1 to ``vocabulary``."""
    B, n = num_sequences, shape.keys
    order = torch.rand(B, vocabulary, generator=generator).argsort(dim=1) + 1  # a permutation per sequence
    keys = order[:, :n]
    again = torch.randint(n, (B, shape.updates), generator=generator)
    written = torch.cat((torch.arange(n).expand(B, n), again), dim=1)  # which key, in the order of writing
    values = torch.randint(1, vocabulary + 1, written.shape, generator=generator)
    pairs = torch.stack((keys.gather(1, written), values), dim=-1)  # (B, writes, 2)
    context = pairs.unflatten(1, (-1, shape.block)).transpose(2, 3).flatten(1)
    newest = torch.zeros(B, n, dtype=torch.int64).scatter_(1, written[:, :n], values[:, :n])
    for write in range(n, written.shape[1]):
        newest.scatter_(1, written[:, write, None], values[:, write, None])
    places = (shape.length - context.shape[1]) // 2
    chance = torch.arange(1, places + 1, dtype=torch.float64) ** (POWER - 1)
    where = torch.multinomial(chance.expand(B, -1), n, generator=generator)  # a place per key
    rest = torch.zeros(B, shape.length - context.shape[1], dtype=torch.int64)
    tokens = torch.cat((context, rest.scatter(1, 2 * where, keys)), dim=1)
    answers = torch.cat((torch.zeros_like(context), rest.scatter(1, 2 * where, newest)), dim=1)
    return tokens, answers


def make_mixer(name: str, width: int, head_width: int) -> nn.Module:
    """A mixer by its name, with an output map."""
    heads = width // head_width
    if name == "attention":
        return SoftmaxAttention(width, heads, output_projection=True)
    if name == "bayesian":
        return BayesianMixer(width, heads, output_projection=True, gives_precision=False)
    if name in DESIGN_MODELS:
        return MemoryFamilyMixer(width, heads, design=name, output_projection=True, gives_precision=False)
    known = ("attention", "bayesian", *DESIGN_MODELS)
    raise UserError(f"unknown mixer {name!r}; {did_you_mean(name, known)}")


class Recaller(nn.Module):
    """Tokens (B, T) -> logits (B, T, vocabulary + 1)."""

    def __init__(self, mixer: Callable[[], nn.Module], size: Size, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary + 1, size.width)
        self.positions = nn.Embedding(length, size.width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=size.width**-0.5)
        self.mixers = nn.ModuleList(mixer() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(size.width) for _ in range(3))
        self.read = nn.Linear(size.width, size.vocabulary + 1)

    def forward(self, tokens: Tensor) -> Tensor:
        B, T = tokens.shape
        position = torch.arange(T, device=tokens.device).expand(B, T)
        context = SequenceContext(torch.arange(B, device=tokens.device)[:, None].expand(B, T), position)
        h = self.tokens(tokens) + self.positions(position)
        for mixer, norm in zip(self.mixers, self.norms, strict=False):
            h = h + mixer(norm(h), None, context).innovation
        logits: Tensor = self.read(self.norms[2](h))
        return logits


def train_and_test(name: str, task: str, size: Size, seed: int, rate: float, device: torch.device) -> float:
    """Share of questions that are answered right, over all shapes of the task alike."""
    shapes = size.shapes[task]
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Recaller(
        lambda: make_mixer(name, size.width, size.head_width), size, max(shape.length for shape in shapes)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmed(step, size.warmup, size.steps[task]))
    for step in range(size.steps[task]):
        shape = shapes[int(torch.randint(len(shapes), (), generator=generator))]
        tokens, answers = (x.to(device) for x in draw(shape, size.vocabulary, size.batch_size, generator))
        asked = answers > 0
        loss = F.cross_entropy(model(tokens)[asked], answers[asked])
        if not torch.isfinite(loss):
            raise RunError(f"{name}, {task}: the loss is {loss.item()} at step {step}; lower --learning-rates")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return accuracy(model.eval(), shapes, size, torch.Generator().manual_seed(10_000 + seed), device)


@torch.no_grad()
def accuracy(
    model: nn.Module, shapes: Sequence[Shape], size: Size, generator: torch.Generator, device: torch.device
) -> float:
    """Mean over shapes of the share of right answers on fresh sequences."""
    shares = []
    for shape in shapes:
        tokens, answers = (x.to(device) for x in draw(shape, size.vocabulary, size.test_sequences, generator))
        asked = answers > 0
        shares.append((model(tokens)[asked].argmax(-1) == answers[asked]).double().mean().item())
    return sum(shares) / len(shares)


def warmed(step: int, warmup: int, steps: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    tasks, names, seeds = split_list(options.tasks), split_list(options.mixers), parse_seeds(options.seeds)
    for task in tasks:
        if task not in TASKS:
            raise UserError(f"unknown task {task!r}; {did_you_mean(task, TASKS)}")
    size = SIZES[options.size]
    size = replace(
        size,
        steps=_steps(options.steps, options.steps) if options.steps else size.steps,
        batch_size=options.batch_size or size.batch_size,
        learning_rates=_rates(options.learning_rates) if options.learning_rates else size.learning_rates,
    )
    for name in names:
        make_mixer(name, size.width, size.head_width)  # an unknown one is refused before the first is trained
    device = chosen_device(TrainingConfig(device=options.device).device)
    made = machine.header(recorded(NAME, arguments), device=device)
    print("\n".join(machine.lines(made)), end="\n\n")
    rows: list[dict[str, Any]] = []
    for task in tasks:
        for name in names:
            for seed in seeds:
                for rate in size.learning_rates:
                    share = train_and_test(name, task, size, seed, rate, device)
                    rows.append({"task": task, "mixer": name, "seed": seed, "rate": rate, "accuracy": share})
                    print(f"{task} {name} seed {seed} rate {rate:g}: {share:.1%}", flush=True)
    rates = ", ".join(f"{rate:g}" for rate in size.learning_rates)
    print(
        f"\nright answers at the best of learning rates {rates}, steps {_counts(tasks, size)}, {size.batch_size} "
        f"sequences each, seeds {options.seeds}"
    )
    print(_table(rows, tasks, names), end="\n\n")
    print("\n".join(f"published, {task}, {PUBLISHED[task]}" for task in tasks))
    if "bayesian" in names:
        print("\n".join(verdict(rows, task) for task in tasks))
    if options.json is not None:
        write_json(options.json, machine.close(made) | {"mqar": rows})
    return 0


def _counts(tasks: Sequence[str], size: Size) -> str:
    return ", ".join(f"{size.steps[task]} ({task})" for task in tasks)


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in split_list(text))
    except ValueError:
        raise UserError(f"--learning-rates has {text!r}; give numbers, such as 3e-3,1e-2") from None


def _best(rows: Sequence[dict[str, Any]], task: str, name: str) -> float:
    """The share at the best learning rate of each seed, over seeds."""
    best: dict[int, float] = {}
    for row in rows:
        if row["mixer"] == name and row["task"] == task:
            best[row["seed"]] = max(row["accuracy"], best.get(row["seed"], 0.0))
    return sum(best.values()) / len(best)


def _table(rows: Sequence[dict[str, Any]], tasks: Sequence[str], names: Sequence[str]) -> str:
    lines = [[name, *(f"{_best(rows, task, name):.1%}" for task in tasks)] for name in names]
    return text_table(["mixer", *tasks], lines)


def verdict(rows: Sequence[dict[str, Any]], task: str) -> str:
    """Whether the Bayesian layer has learned a task."""
    share = _best(rows, task, "bayesian")
    learned = "learned" if share > LEARNED else "NOT learned"
    return f"verdict, {task}: the Bayesian layer answers {share:.1%}, {learned} (more than {LEARNED:.0%})"


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = parser(NAME, "Multi-query recall.")
    options.add_argument("--size", choices=sorted(SIZES), default="small")
    options.add_argument("--tasks", default=",".join(TASKS))
    options.add_argument("--mixers", default="attention,bayesian,gated_deltanet,mamba2")
    options.add_argument("--seeds", default="0")
    options.add_argument("--steps", type=count, help="unless given, what the size has")
    options.add_argument("--batch-size", type=count, help="likewise")
    options.add_argument(
        "--learning-rates", metavar="RATE,...", help="likewise; the best of them counts, as in Zoology"
    )
    options.add_argument("--device", default="auto")
    return parse(options, arguments)


if __name__ == "__main__":
    finish(main)
