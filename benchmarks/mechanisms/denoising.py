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

Table 2 repeats one round until its output z is a fixed point, and trains by the gradient there, the implicit one:

    z = f(z)      dL/dparameters = h df/dparameters,   h = dL/dz + h df/dz                                     (2)

Its loss is the cosine part of (1); in table 2 the accuracy after the last of 120 epochs counts. The published
equilibrium starts from small random maps, where f contracts and z forgets the query. ``from Hopfield`` starts the same
model as the retrieval z = sum_k softmax_k(16 p_k . z) p_k, to see whether the start decides; the paper has none.

Source: Gradient Boosting within a Single Attention Layer, sections 5 and 6.2, tables 2 and 4, appendix B; the weight of
(1), what an epoch is, and the widths, loss and epochs of table 2, from the authors' code.
Shapes: N queries, K patterns, d their width.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
BATCH, RATE = 512, 3e-3
SHARPNESS, HOPFIELD_SHARPNESS = 2.0, 16.0  # of the logits at the start
REPEATS, TOLERANCE = 30, 1e-5  # at most, and the relative change at which a fixed point is found
CLASS_WEIGHT = 0.5
TEST_QUERIES, BOUND_QUERIES = 5008, 204_800  # whole rows of K queries
HEAD = ["nearest-pattern accuracy, %", "published", "ours", "sd over seeds"]


class Task(NamedTuple):
    """What is stored and asked for, and how long models train on it."""

    width: int
    patterns: int
    noise: float
    epochs: int
    checked_every: int

    def __str__(self) -> str:
        return f"d {self.width}, K {self.patterns}, sigma {self.noise}"


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    label: str
    rounds: int  # 0 is twicing
    gate: Gate
    published: float | None  # percent
    brief: bool = True  # also in a run that is not full
    repeated: bool = False  # to its fixed point
    hopfield: bool = False  # starts as Hopfield retrieval


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
TASK = Task(64, 16, 0.5, epochs=150, checked_every=50)
# Table 2: one round, equilibrium.
EQUILIBRIA = {
    Task(16, 4, 0.5, 120, 120): (78.9, 25.6),
    Task(16, 4, 0.8, 120, 120): (59.7, 25.6),
    Task(32, 8, 0.5, 120, 120): (59.8, 11.9),
    Task(32, 8, 0.8, 120, 120): (39.5, 11.9),
    Task(64, 16, 0.5, 120, 120): (39.2, 5.6),
    Task(64, 16, 0.8, 120, 120): (22.9, 5.6),
}


def equilibrium_cases(one_round: float, equilibrium: float) -> list[Case]:
    """The rows of a task of table 2."""
    return [
        Case("one round", 1, "mlp", one_round),
        Case("equilibrium", 1, "mlp", equilibrium, repeated=True),
        Case("equilibrium from Hopfield", 1, "mlp", None, repeated=True, hopfield=True),
    ]


class Denoiser(nn.Module):
    """A mixer whose queries are noisy patterns and whose keys and values are the patterns."""

    def __init__(self, case: Case, patterns: Tensor) -> None:
        super().__init__()
        d = patterns.shape[1]
        self.patterns, self.repeated = patterns, case.repeated
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
                for part in (attend.query, attend.key, attend.value):
                    part.bias.zero_()
                    if case.hopfield:
                        nn.init.eye_(part.weight)
                attend.query.weight.mul_((HOPFIELD_SHARPNESS if case.hopfield else SHARPNESS) * math.sqrt(d))
                self.queries.append(attend.query.weight)

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

        def attend(z: Tensor) -> Tensor:
            innovation: Tensor = self.mixer(z, None, context, source=source).innovation
            return innovation

        output = attend(x)
        if self.repeated:
            output = equilibrium(attend, output.detach())
        return output.flatten(0, 1), self.first.attention(x, None, context, source=source).flatten(0, 2)


def equilibrium(f: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """z = f(z), found from ``start``, with the gradient of (2)."""
    with torch.no_grad():
        z = settled(f, start)
    if not torch.is_grad_enabled():
        return z
    z.requires_grad_()
    again = f(z)
    output = again.clone()  # the hook is on the copy, so that it does not call itself
    output.register_hook(lambda g: settled(lambda h: g + torch.autograd.grad(again, z, h, retain_graph=True)[0], g))
    return output


def settled(f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """f(f(.. z)) until it changes no more, or ``REPEATS`` times."""
    for _ in range(REPEATS):
        before, z = z, f(z)
        if (z - before).norm() <= TOLERANCE * z.norm():
            break
    return z


def draw(patterns: Tensor, sigma: float, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy queries, (N, d), and which pattern each is of, (N,)."""
    which = torch.randint(len(patterns), (count,), generator=generator)
    noise = torch.randn(count, patterns.shape[1], generator=generator)
    return patterns[which] + sigma * noise, which


def accuracy(output: Tensor, patterns: Tensor, which: Tensor) -> float:
    """Percent of outputs that are nearest to their own pattern."""
    return 100 * (torch.cdist(output, patterns).argmin(dim=1) == which).double().mean().item()


def bound(patterns: Tensor, sigma: float, generator: torch.Generator) -> float:
    """Percent that the best decision gets right."""
    queries, which = draw(patterns, sigma, BOUND_QUERIES, generator)
    return 100 * ((queries @ patterns.T).argmax(dim=1) == which).double().mean().item()


def train(case: Case, task: Task, patterns: Tensor, seed: int) -> float:
    """The best accuracy of a case trained from a seed."""
    generator = torch.Generator().manual_seed(seed + 1_000_000)
    torch.manual_seed(seed)
    model = Denoiser(case, patterns)
    optimizer = torch.optim.Adam(model.groups())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=task.epochs)
    best = 0.0
    for epoch in range(1, task.epochs + 1):
        queries, which = draw(patterns, task.noise, BATCH, generator)
        output, weights = model(queries)
        loss = 1 - F.cosine_similarity(output, patterns[which]).mean()  # (1)
        if not case.repeated:
            loss = loss + CLASS_WEIGHT * F.cross_entropy(weights, which)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if epoch % task.checked_every == 0:
            with torch.no_grad():
                queries, which = draw(patterns, task.noise, TEST_QUERIES, generator)
                best = max(best, accuracy(model(queries)[0], patterns, which))
    return best


def measure(task: Task, cases: Sequence[Case], seeds: Sequence[int]) -> dict[str, Any]:
    """Accuracy by case and seed; each seed has patterns of its own, the same for all cases."""
    found: dict[str, list[float]] = {case.label: [] for case in cases}
    bounds = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        patterns = F.normalize(torch.randn(task.patterns, task.width, generator=generator), dim=-1)
        bounds.append(bound(patterns, task.noise, generator))
        once: dict[Case, float] = {}  # the paper has one of the settings in two tables
        for case in cases:
            setting = replace(case, label="", published=None, brief=True)
            if setting not in once:
                once[setting] = train(case, task, patterns, seed)
            found[case.label].append(once[setting])
    return {"accuracy": found, "bound": bounds}


def rows(cases: Sequence[Case], results: dict[str, Any], task: str = "") -> list[list[str]]:
    """The published figure beside ours."""
    made = []
    for case in cases:
        values = results["accuracy"][case.label]
        published = "-" if case.published is None else f"{case.published:.1f}"
        made.append([task + case.label, published, f"{statistics.mean(values):.1f}", _spread(values)])
    made.append([task + "bound", "-", f"{statistics.mean(results['bound']):.1f}", _spread(results["bound"])])
    return made


def equilibrium_verdict(results: dict[Task, dict[str, Any]]) -> str:
    """Whether equilibria guess, and whether their start decides that."""
    labels = (case.label for case in equilibrium_cases(0, 0) if case.repeated)
    drawn, hopfield = ([_above_chance(found, task, label) for task, found in results.items()] for label in labels)
    verdict = "as published" if max(map(abs, drawn)) < 3 else "NOT as published"
    return (
        f"verdict: equilibria differ from chance by at most {max(map(abs, drawn)):.1f} points (published: 0.7), "
        f"{verdict};\nfrom Hopfield by {min(hopfield):+.1f} to {max(hopfield):+.1f}"
    )


def _above_chance(found: dict[str, Any], task: Task, label: str) -> float:
    return statistics.mean(found["accuracy"][label]) - 100 / task.patterns


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.stdev(values):.1f}" if len(values) > 1 else "-"


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    seeds = parse_seeds(options.seeds or ("0-9" if options.full else "0-2"))
    torch.set_num_threads(options.threads)
    cases = [case for case in CASES if case.brief or options.full]
    header = machine.header(recorded(NAME, arguments))
    results = measure(TASK, cases, seeds)
    settled_at = {task: measure(task, equilibrium_cases(*known), seeds) for task, known in EQUILIBRIA.items()}
    header = machine.close(header)
    print("\n".join([*machine.lines(header), ""]))
    print(text_table(HEAD, rows(cases, results)))
    print(f"{TASK}, {TASK.epochs} epochs of {BATCH} queries; seeds {seeds}, published: one")
    one, two = (statistics.mean(results["accuracy"][case.label]) for case in CASES[:2])
    verdict = "as published" if two > one + 3 else "NOT as published"
    print(f"verdict: a second round brings {two - one:+.1f} points (published: +12.0), {verdict}")
    lines = [rows(equilibrium_cases(*EQUILIBRIA[task]), found, f"{task}: ") for task, found in settled_at.items()]
    print("\n" + text_table(HEAD, [line for part in lines for line in part]))
    print(equilibrium_verdict(settled_at))
    if options.json:
        published = {case.label: case.published for case in cases}
        by_task = {str(task): found | {"published": EQUILIBRIA[task]} for task, found in settled_at.items()}
        made = {"benchmark": NAME, **header, "seeds": seeds, "published": published, **results, "equilibria": by_task}
        write_json(options.json, made)
    return 0


def _options(arguments: Sequence[str]) -> Any:
    made = parser(NAME, "Pattern denoising by rounds.")
    made.add_argument("--full", action="store_true", help="all rounds and gates, ten seeds")
    made.add_argument("--seeds", help="such as 0-9 or 0,1,5-7")
    made.add_argument("--threads", type=count, default=1, metavar="N")
    return parse(made, arguments)


if __name__ == "__main__":
    finish(main)
