"""Many random addresses in few dimensions: how fast does recall crowd out? (Memory by Design, appendix E.5.4.)

python -m benchmarks.mechanisms.random_keys

Addresses are normal in 64 dimensions and of length 1; memories see them through one frozen projection on 16, again of
length 1. Every write has one of 64 labels, drawn per sequence; 8 of the n written addresses are asked for. Trained at n
= 16 to 64, tested up to 256, where no readout by M' q can be right about all.

Shapes: B sequences, T = n + 8 tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import machine
from benchmarks.command import count, finish, parse, parser, recorded
from benchmarks.mechanisms.recall import MEMORIES, Recaller, Sequences, Training, fit
from recbft.experiments.lists import parse_seeds
from recbft.reporting.tables import text_table
from recbft.system.files import write_json

NAME = "mechanisms.random_keys"
RAW, LABELS, QUERIES, WIDTH = 64, 64, 8, 16
TRAINING_WRITES, TEST_WRITES = (16, 32, 48, 64), (16, 32, 64, 96, 128, 192, 256)
TEST_SEQUENCES = 256
PUBLISHED = "published (figure 7; no numbers): the Bayesian layer has the lowest cross-entropy at all densities n / 16"


@dataclass(frozen=True)
class RandomKeys:
    """Sequences of ``writes`` random addresses, seen through ``projection`` (16, 64)."""

    writes: int
    projection: Tensor

    def draw(self, num_sequences: int, generator: torch.Generator) -> Sequences:
        B, n = num_sequences, self.writes
        addresses = F.normalize(torch.randn(B, n, RAW, generator=generator), dim=-1)
        labels = torch.randint(LABELS, (B, n), generator=generator)
        questions = torch.rand(B, n, generator=generator).argsort(dim=1)[:, :QUERIES]
        raw = torch.cat((addresses, addresses.gather(1, questions[..., None].expand(-1, -1, RAW))), dim=1)
        written = (torch.arange(n + QUERIES) < n).expand(B, -1)[..., None]
        values = F.pad(F.one_hot(labels, LABELS), (0, 0, 0, QUERIES))
        answer = labels.gather(1, questions)
        asked = torch.arange(n, n + QUERIES).expand(B, -1)
        seen = F.normalize(raw @ self.projection.T, dim=-1)
        return Sequences(torch.cat((written, raw, values), dim=-1), seen, asked, answer, rival=answer)


def projection(seed: int) -> Tensor:
    """Orthonormal rows, (16, 64)."""
    drawn = torch.randn(RAW, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.qr(drawn).Q.T.float()


def train_and_test(kind: str, seed: int, training: Training, tests: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Cross-entropy and accuracy at the questions, by the number of writes."""
    generator, frozen = torch.Generator().manual_seed(seed), projection(seed)

    def draw() -> Sequences:
        writes = TRAINING_WRITES[int(torch.randint(len(TRAINING_WRITES), (), generator=generator))]
        return RandomKeys(writes, frozen).draw(training.batch_size, generator)

    model = fit(kind, seed, training, draw, token_width=1 + RAW + LABELS, num_labels=LABELS)
    return {
        writes: _measure(model, RandomKeys(writes, frozen), torch.Generator().manual_seed(10_000 + seed))
        for writes in tests
    }


@torch.no_grad()
def _measure(model: Recaller, test: RandomKeys, generator: torch.Generator) -> tuple[float, float]:
    sequences = test.draw(TEST_SEQUENCES, generator)
    logits = model(sequences).flatten(0, 1)
    answer = sequences.answer.flatten()
    return F.cross_entropy(logits, answer).item(), (logits.argmax(-1) == answer).double().mean().item()


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    training = Training(options.steps, options.batch_size, options.learning_rate)
    seeds = parse_seeds(options.seeds)
    made = machine.header(recorded(NAME, arguments))
    print("\n".join(machine.lines(made)), end="\n\n")
    rows: list[dict[str, Any]] = []
    for memory in MEMORIES:
        for seed in seeds:
            for writes, (loss, accuracy) in train_and_test(memory, seed, training, TEST_WRITES).items():
                rows.append({"memory": memory, "seed": seed, "writes": writes, "loss": loss, "accuracy": accuracy})
    print(f"{training.steps} steps of {training.batch_size} sequences, seeds {options.seeds}")
    for measure, name in (("loss", "cross-entropy"), ("accuracy", "right answers")):
        print("\n" + _table(rows, measure, name))
    print("\n" + PUBLISHED)
    if options.json is not None:
        write_json(options.json, machine.close(made) | {"random_keys": rows})
    return 0


def _table(rows: Sequence[dict[str, Any]], measure: str, title: str) -> str:
    table = []
    for memory, name in MEMORIES.items():
        cells = []
        for writes in TEST_WRITES:
            found = [row[measure] for row in rows if row["memory"] == memory and row["writes"] == writes]
            cells.append(f"{sum(found) / len(found):.3f}")
        table.append([name, *cells])
    return text_table([title, *(f"n = {writes}" for writes in TEST_WRITES)], table)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = parser(NAME, "Recall among random addresses.")
    options.add_argument("--seeds", default="0", help="the paper has three")
    options.add_argument("--steps", type=count, default=400, help="the paper's are 2,500")
    options.add_argument("--batch-size", type=count, default=64, help="the paper's is 256")
    options.add_argument("--learning-rate", type=float, default=3e-3, help="the paper's is 3e-4")
    return parse(options, arguments)


if __name__ == "__main__":
    finish(main)
