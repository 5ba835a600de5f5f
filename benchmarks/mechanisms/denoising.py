"""Pattern denoising: which stored pattern does a noisy query come from, after one or more rounds of attention?

    python -m benchmarks.mechanisms.denoising
    python -m benchmarks.mechanisms.denoising --full --json FILE

K unit vectors drawn uniformly from the sphere in R^d are stored; a query is one of them plus N(0, sigma^2 I). A query
attends to the patterns, one head; accuracy is the share of queries whose output is nearest to their own pattern.

    loss    1 - cos(output, pattern) + CE(weights of the first round, number of the pattern) / 2               (1)

Training: Adam, rate 3e-3 falling to 0 as a cosine, gradients clipped at 1, an "epoch" being one step on 512 fresh
queries; the best of the accuracies after every 50 epochs counts. The published figures are of one seed. Logits start as
2 q . k, so the query map, which our attention divides by sqrt(d), starts 2 sqrt(d) times as large, at a rate to match.
The bound is the accuracy of the pattern with the largest x . p, which no method beats.

Source: Gradient Boosting within a Single Attention Layer, section 6.2, table 4 and appendix B; the weight of (1) and
what an epoch is, from the authors' code.
Shapes: N queries, K patterns, d their width.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import machine
from benchmarks.command import count, finish, parse, parser, recorded
from recbft.core import SequenceContext
from recbft.experiments.lists import parse_seeds
from recbft.mixers.boosted import BoostedAttention, BoostedConfig, Gate, TwicingAttention
from recbft.reporting.tables import text_table
from recbft.system.files import write_json

NAME = "mechanisms.denoising"
WIDTH, PATTERNS, NOISE = 64, 16, 0.5
BATCH, EPOCHS, RATE, CHECKED_EVERY = 512, 150, 3e-3, 50
SHARPNESS = 2.0  # of the logits at the start
CLASS_WEIGHT = 0.5
TEST_QUERIES, BOUND_QUERIES = 5008, 204_800  # whole rows of K queries


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    label: str
    rounds: int  # 0 is twicing
    gate: Gate
    published: float | None  # percent
    brief: bool = True  # also in a run that is not full


CASES = (
    Case("rounds 1", 1, "mlp", 41.3),
    Case("rounds 2", 2, "mlp", 53.3),
    Case("rounds 3", 3, "mlp", 54.8),
    Case("rounds 4", 4, "mlp", 56.3, brief=False),
    Case("rounds 5", 5, "mlp", 55.8, brief=False),
    Case("gate mlp, 2 rounds", 2, "mlp", 55.2, brief=False),
    Case("gate scalar, 2 rounds", 2, "scalar", 55.0),
    Case("gate none, 2 rounds", 2, "none", 54.3),
    Case("twicing", 0, "none", None),
)


class Denoiser(nn.Module):
    """A mixer whose queries are noisy patterns and whose keys and values are the patterns."""

    def __init__(self, case: Case, patterns: Tensor) -> None:
        super().__init__()
        d = patterns.shape[1]
        self.patterns = patterns
        if case.rounds:
            self.mixer: nn.Module = BoostedAttention(d, 1, BoostedConfig(rounds=case.rounds, gate=case.gate))
            attending = list(self.mixer.rounds)
        else:
            self.mixer = TwicingAttention(d, 1)
            attending = [self.mixer.smoother]
        self.first = attending[0]
        self.queries: list[Tensor] = []
        with torch.no_grad():
            for attend in attending:
                attend.query.weight.mul_(SHARPNESS * math.sqrt(d))
                self.queries.append(attend.query.weight)
                for part in (attend.query, attend.key, attend.value):
                    part.bias.zero_()

    def groups(self) -> list[dict[str, Any]]:
        """Parameters with their rates: Adam's steps grow with the weights that start larger."""
        larger = {id(weight) for weight in self.queries}
        others = [parameter for parameter in self.parameters() if id(parameter) not in larger]
        return [
            {"params": others, "lr": RATE},
            {"params": self.queries, "lr": RATE * SHARPNESS * math.sqrt(self.patterns.shape[1])},
        ]

    def forward(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """(N, d), N a multiple of K, to outputs (N, d) and the first round's weights (N, K)."""
        K, d = self.patterns.shape
        x = queries.view(-1, K, d)  # a row of K queries beside its K sources
        rows = x.shape[0]
        source = self.patterns.expand(rows, K, d)
        place = torch.arange(K).expand(rows, K)
        context = SequenceContext(torch.zeros_like(place), place, causal=False)
        output = self.mixer(x, None, context, source=source).innovation
        return output.flatten(0, 1), self.first.attention(x, None, context, source=source).flatten(0, 2)


def draw(patterns: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy queries, (N, d), and which pattern each is of, (N,)."""
    which = torch.randint(len(patterns), (count,), generator=generator)
    noise = torch.randn(count, patterns.shape[1], generator=generator)
    return patterns[which] + NOISE * noise, which


def accuracy(output: Tensor, patterns: Tensor, which: Tensor) -> float:
    """Percent of outputs that are nearest to their own pattern."""
    return 100 * (torch.cdist(output, patterns).argmin(dim=1) == which).double().mean().item()


def bound(patterns: Tensor, generator: torch.Generator) -> float:
    """Percent that the best decision gets right."""
    queries, which = draw(patterns, BOUND_QUERIES, generator)
    return 100 * ((queries @ patterns.T).argmax(dim=1) == which).double().mean().item()


def train(case: Case, patterns: Tensor, seed: int) -> float:
    """The best accuracy of a case trained from a seed."""
    generator = torch.Generator().manual_seed(seed + 1_000_000)
    torch.manual_seed(seed)
    model = Denoiser(case, patterns)
    optimizer = torch.optim.Adam(model.groups())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    best = 0.0
    for epoch in range(1, EPOCHS + 1):
        queries, which = draw(patterns, BATCH, generator)
        output, weights = model(queries)
        loss = 1 - F.cosine_similarity(output, patterns[which]).mean()  # (1)
        loss = loss + CLASS_WEIGHT * F.cross_entropy(weights, which)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if epoch % CHECKED_EVERY == 0:
            with torch.no_grad():
                queries, which = draw(patterns, TEST_QUERIES, generator)
                best = max(best, accuracy(model(queries)[0], patterns, which))
    return best


def measure(cases: Sequence[Case], seeds: Sequence[int]) -> dict[str, Any]:
    """Accuracy by case and seed; each seed has patterns of its own, the same for all cases."""
    found: dict[str, list[float]] = {case.label: [] for case in cases}
    bounds = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        patterns = F.normalize(torch.randn(PATTERNS, WIDTH, generator=generator), dim=-1)
        bounds.append(bound(patterns, generator))
        once: dict[tuple[int, str], float] = {}  # the paper has one of the settings in two tables
        for case in cases:
            setting = case.rounds, case.gate
            if setting not in once:
                once[setting] = train(case, patterns, seed)
            found[case.label].append(once[setting])
    return {"accuracy": found, "bound": bounds}


def table(cases: Sequence[Case], results: dict[str, Any]) -> str:
    """The published figure beside ours."""
    rows = []
    for case in cases:
        values = results["accuracy"][case.label]
        published = "-" if case.published is None else f"{case.published:.1f}"
        rows.append([case.label, published, f"{statistics.mean(values):.1f}", _spread(values)])
    rows.append(["bound", "-", f"{statistics.mean(results['bound']):.1f}", _spread(results["bound"])])
    return text_table(["nearest-pattern accuracy, %", "published", "ours", "sd over seeds"], rows)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.stdev(values):.1f}" if len(values) > 1 else "-"


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    seeds = parse_seeds(options.seeds or ("0-9" if options.full else "0-2"))
    torch.set_num_threads(options.threads)
    cases = [case for case in CASES if case.brief or options.full]
    header = machine.header(recorded(NAME, arguments))
    results = measure(cases, seeds)
    header = machine.close(header)
    print("\n".join([*machine.lines(header), ""]))
    print(table(cases, results))
    print(f"d {WIDTH}, K {PATTERNS}, sigma {NOISE}, {EPOCHS} epochs of {BATCH} queries; seeds {seeds}, published: one")
    one, two = (statistics.mean(results["accuracy"][case.label]) for case in CASES[:2])
    verdict = "as published" if two > one + 3 else "NOT as published"
    print(f"verdict: a second round brings {two - one:+.1f} points (published: +12.0), {verdict}")
    if options.json:
        published = {case.label: case.published for case in cases}
        write_json(options.json, {"benchmark": NAME, **header, "seeds": seeds, "published": published, **results})
    return 0


def _options(arguments: Sequence[str]) -> Any:
    made = parser(NAME, "Pattern denoising by rounds.")
    made.add_argument("--full", action="store_true", help="all rounds and gates, ten seeds")
    made.add_argument("--seeds", help="such as 0-9 or 0,1,5-7")
    made.add_argument("--threads", type=count, default=1, metavar="N")
    return parse(made, arguments)


if __name__ == "__main__":
    finish(main)
