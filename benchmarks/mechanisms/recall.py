"""Learned recall over addresses that no map can change: the task, the backbone and its five memories.

    h = W_in [type, address, value];   twice: h <- h + W_o memory(RMSNorm h),  h <- h + SwiGLU(RMSNorm h);   W_out h

Key and query of every head are the address itself; values, gates and noises are linear in RMSNorm h. Sequences: every
identity once in random order; each target n_boost = 4 times in a row; each distractor n_flood times in a row; then the
targets are asked for in random order. Target i has address e_{2i-1}, its distractor rho e_{2i-1} + sqrt(1 - rho^2)
e_{2i}; a permutation drawn per sequence says which label each of the 16 writes.

The paper does not say where gates start; here GLA-style starts by keeping 0.98 per token and DeltaNet-style with a
step of 0.5, so that all start with a memory.

Source: Dowling et al., Memory by Design, appendix E.5.
Shapes: B sequences, T tokens, D model width, H heads, K = D / H address and value width, n pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbft.errors import RunError
from recbft.mixers.bayesian import filter_memory
from recbft.mixers.memory_family import unfiltered_memory

MEMORIES = {
    "linear_attention": "Linear Attention",
    "gla": "GLA-style",
    "deltanet": "DeltaNet-style",
    "reset": "Covariance-reset",
    "bayesian": "Bayesian Layer",
}
D, H, INNER, LAYERS = 64, 4, 128, 2
OBSERVATION_NOISE, PRIOR, PROCESS_START = 0.05, 3.0, 0.05
PAIRS, BOOSTS, TRAINING_FLOODS, TRAINING_OVERLAPS = 8, 4, (1, 2, 4, 8), (0.60, 0.80)
TEST_SEQUENCES, TEST_TOKENS = 64, 40_000


class Sequences(NamedTuple):
    """A batch of recall sequences."""

    tokens: Tensor  # (B, T, 2 + ...), type, address and value side by side
    address: Tensor  # (B, T, K)
    asked: Tensor  # (B, n), columns of the queries
    answer: Tensor  # (B, n), label of each
    rival: Tensor  # (B, n), label of the distractor of each


@dataclass(frozen=True)
class Collisions:
    """Sequences with floods of ``flood`` writes per distractor and overlaps drawn from [low, high]."""

    flood: int
    low: float
    high: float

    def draw(self, num_sequences: int, generator: torch.Generator) -> Sequences:
        B, n = num_sequences, PAIRS
        overlap = self.low + (self.high - self.low) * torch.rand(B, n, generator=generator)
        target = torch.eye(2 * n)[0::2].expand(B, n, 2 * n)
        distractor = overlap[..., None] * target + (1 - overlap**2).sqrt()[..., None] * torch.eye(2 * n)[1::2]
        addresses = torch.cat((target, distractor), dim=1)  # (B, 2n, K), targets first
        label = torch.rand(B, 2 * n, generator=generator).argsort(dim=1)
        seeds = torch.rand(B, 2 * n, generator=generator).argsort(dim=1)
        questions = torch.rand(B, n, generator=generator).argsort(dim=1)
        fixed = torch.cat(
            (torch.arange(n).repeat_interleave(BOOSTS), (n + torch.arange(n)).repeat_interleave(self.flood))
        )
        identity = torch.cat((seeds, fixed.expand(B, -1), questions), dim=1)  # (B, T)
        return assemble(identity, addresses, label, num_queries=n)


def assemble(identity: Tensor, addresses: Tensor, label: Tensor, *, num_queries: int) -> Sequences:
    """Tokens of writes to identities (B, T), the last ``num_queries`` of them questions; labels (B, identities)."""
    T, num_labels = identity.shape[1], addresses.shape[1]
    address = addresses.gather(1, identity[..., None].expand(-1, -1, addresses.shape[2]))
    written = torch.arange(T) < T - num_queries
    value = F.one_hot(label.gather(1, identity), num_labels) * written[:, None]
    tokens = torch.cat((written[None, :, None].expand(len(identity), T, 1), address, value), dim=-1)
    asked = torch.arange(T - num_queries, T).expand(len(identity), num_queries)
    answer = label.gather(1, identity[:, -num_queries:])
    half = num_labels // 2
    rival = label.gather(1, (identity[:, -num_queries:] + half) % num_labels)
    return Sequences(tokens, address, asked, answer, rival)


class Memory(nn.Module):
    """One of the five memories over given addresses: (B, T, D) -> (B, T, D)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.value, self.out = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        widths = {"gla": D, "deltanet": H, "bayesian": H}
        starts = {"gla": _logit(0.98), "deltanet": 0.0, "bayesian": math.log(math.expm1(PROCESS_START))}
        self.gate = None
        if kind in widths:
            self.gate = nn.Linear(D, widths[kind])
            nn.init.constant_(self.gate.bias, starts[kind])

    def forward(self, x: Tensor, address: Tensor) -> Tensor:
        v = self.value(x).unflatten(-1, (H, -1)).transpose(1, 2)  # (B, H, T, K)
        k = address[:, None].expand(-1, H, -1, -1)
        gate = None if self.gate is None else self.gate(x)
        noise = torch.full_like(v[..., 0], OBSERVATION_NOISE)
        if self.kind == "bayesian":
            assert gate is not None
            process = F.softplus(gate).mT + 1e-6
            readout = filter_memory(
                k, k, v, transition=None, process_noise=process, observation_noise=noise, prior_variance=PRIOR
            ).readout
        elif self.kind == "reset":
            readout = unfiltered_memory(
                k, k, v, transition=None, observation_noise=noise, variance=OBSERVATION_NOISE, rule="reset"
            ).readout
        elif self.kind == "deltanet":
            assert gate is not None
            # With keys of length 1 this noise makes the share of (1), lam / (r2 + lam), sigmoid(gate).
            readout = unfiltered_memory(
                k, k, v, transition=None, observation_noise=(-gate).exp().mT, variance=1.0, rule="reset"
            ).readout
        else:
            kept = None if gate is None else torch.sigmoid(gate).unflatten(-1, (H, -1)).transpose(1, 2)
            readout = unfiltered_memory(
                k, k, v, transition=kept, observation_noise=torch.zeros_like(noise), variance=1.0, rule="additive"
            ).readout
        y: Tensor = self.out(readout.transpose(1, 2).flatten(2))
        return y


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.inner = nn.Linear(D, INNER, bias=False), nn.Linear(D, INNER, bias=False)
        self.outer = nn.Linear(INNER, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.outer(F.silu(self.gate(x)) * self.inner(x))
        return y


class Recaller(nn.Module):
    """Backbone and readout: sequences -> logits at the questions, (B, n, labels)."""

    def __init__(self, kind: str, *, token_width: int, num_labels: int) -> None:
        super().__init__()
        self.embed, self.read = nn.Linear(token_width, D), nn.Linear(D, num_labels)
        self.memories = nn.ModuleList(Memory(kind) for _ in range(LAYERS))
        self.ffns = nn.ModuleList(SwiGLU() for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.RMSNorm(D) for _ in range(2 * LAYERS + 1))

    def forward(self, sequences: Sequences) -> Tensor:
        h = self.embed(sequences.tokens)
        for n, (memory, ffn) in enumerate(zip(self.memories, self.ffns, strict=True)):
            h = h + memory(self.norms[2 * n](h), sequences.address)
            h = h + ffn(self.norms[2 * n + 1](h))
        asked = h.gather(1, sequences.asked[..., None].expand(-1, -1, D))
        logits: Tensor = self.read(self.norms[-1](asked))
        return logits


class Training(NamedTuple):
    """How long, on how many sequences at once, how fast; otherwise as the paper: AdamW, decay 1e-4, clipping at 1."""

    steps: int
    batch_size: int
    learning_rate: float


def train_and_test(
    kind: str, seed: int, training: Training, tests: Mapping[str, Collisions]
) -> dict[str, tuple[float, float]]:
    """Train one memory on short floods; margin p_B - p_A of the pair alone and accuracy over all labels, per test."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Sequences:
        flood = TRAINING_FLOODS[int(torch.randint(len(TRAINING_FLOODS), (), generator=generator))]
        return Collisions(flood, *TRAINING_OVERLAPS).draw(training.batch_size, generator)

    model = fit(kind, seed, training, draw, token_width=1 + 4 * PAIRS, num_labels=2 * PAIRS)
    return {name: _measure(model, test, torch.Generator().manual_seed(10_000 + seed)) for name, test in tests.items()}


def fit(
    kind: str, seed: int, training: Training, draw: Callable[[], Sequences], *, token_width: int, num_labels: int
) -> Recaller:
    """A model trained on fresh sequences at every step."""
    torch.manual_seed(seed)
    model = Recaller(kind, token_width=token_width, num_labels=num_labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate, weight_decay=1e-4)
    for step in range(training.steps):
        sequences = draw()
        loss = F.cross_entropy(model(sequences).flatten(0, 1), sequences.answer.flatten())
        if not torch.isfinite(loss):
            raise RunError(f"{kind}: the loss is {loss.item()} at step {step}; lower --learning-rate")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


@torch.no_grad()
def _measure(model: Recaller, test: Collisions, generator: torch.Generator) -> tuple[float, float]:
    margins, right = [], []
    length = PAIRS * (2 + BOOSTS + test.flood + 1)
    at_once = max(1, min(TEST_SEQUENCES, TEST_TOKENS // length))
    for _ in range(-(-TEST_SEQUENCES // at_once)):
        sequences = test.draw(at_once, generator)
        logits = model(sequences)
        pair = logits.gather(-1, torch.stack((sequences.answer, sequences.rival), dim=-1)).softmax(dim=-1)
        margins.append(pair[..., 0] - pair[..., 1])
        right.append(logits.argmax(dim=-1) == sequences.answer)
    return torch.cat(margins).mean().item(), torch.cat(right).double().mean().item()


def _logit(p: float) -> float:
    return math.log(p / (1 - p))
