"""What memory mixers read off their input: keys, queries and values, how the memory moves, and how noisy writes are.

    q, k    linear maps y, as y / sqrt(|y|^2 + 1e-6) per head          v    a linear map                  (9.22)
    a_t   = a0 + (1 - a0) sigmoid(W x_t + b), a0 = 0.01, the same for a head or one per row               (9.23)
    pairs   a_t e^{i theta_t}, theta_t = theta + W' x_t; keys and queries on the first row of each pair   (9.24)
    noise = softplus(W x_t + b) lbar_t^-w + floor, lbar_t the mean incoming precision of what is written  (9.25)

x_t is what is written, the input of keys and values; the noise of a readout, in (9.18), is (9.25) of the query's
input. The floor is 1e-4 for an observation and 1e-6 for the process. W of (9.23) to (9.25) starts small, and b such
that noise and transition start where they are asked to; theta starts at the angles of rotary positions.

Source: Dowling et al., Memory by Design, section 2.2 and appendix D.
Shapes: B rows, T tokens, D model width, H heads, K head width.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbft.autograd.boundaries import in_full_precision
from recbft.core import SequenceContext
from recbft.errors import UserError
from recbft.mixers.interface import by_head

Transitions = Literal["identity", "retention", "scalar", "diagonal", "complex_pairs"]

LEAST_TRANSITION = 0.01  # a0: a memory that a head clears in a few tokens, and chunks of 17 in float32
ROTARY_BASE = 10_000.0
LEAST_SQUARE = 1e-6  # of (9.22)
# The least noise, in units of the prior variance, that float32 can tell from none in a chunk.
PROCESS_FLOOR, OBSERVATION_FLOOR = 1e-6, 1e-4


class KeysAndValues(nn.Module):
    """Equation (9.22): (B, T, D) -> three of (B, H, T, K); with ``pairs`` on the first row of each pair, (9.24)."""

    def __init__(self, hidden_size: int, n_heads: int, *, pairs: bool = False) -> None:
        super().__init__()
        width = hidden_size // 2 if pairs else hidden_size
        self.n_heads, self.pairs = n_heads, pairs
        self.query = nn.Linear(hidden_size, width)
        self.key = nn.Linear(hidden_size, width)
        self.value = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries from ``x``, keys and values from ``source``."""
        maps = self.query(x), self.key(source), self.value(source)
        q, k, v = (by_head(y, self.n_heads).contiguous() for y in maps)
        q, k = _of_length_one(q), _of_length_one(k)
        if self.pairs:
            q, k = (torch.stack((y, torch.zeros_like(y)), dim=-1).flatten(-2) for y in (q, k))
        return q, k, v


class Transition(nn.Module):
    """Equations (9.23) and (9.24): (B, T, D) -> what ``kernels.memory`` takes as a transition.

    Args:
        kind: ``identity`` keeps everything; ``retention`` keeps 1 - 2^(-5 - h) in head h, whatever the input;
            ``scalar`` one share per head, ``diagonal`` one per row, ``complex_pairs`` one and an angle per pair.
        start: where (9.23) starts, between a0 and 1.
    """

    def __init__(self, hidden_size: int, n_heads: int, kind: Transitions, *, start: float) -> None:
        super().__init__()
        K = hidden_size // n_heads
        self.n_heads, self.kind = n_heads, kind
        self.to_angle: nn.Linear | None = None
        if kind in ("identity", "retention"):
            return
        if kind == "complex_pairs" and K % 2:
            raise UserError(
                f"transition complex_pairs needs an even head width, got {K} (hidden size {hidden_size} / {n_heads} "
                "heads); change either, or take transition diagonal"
            )
        rows = {"scalar": 1, "diagonal": K, "complex_pairs": K // 2}[kind]
        share = (start - LEAST_TRANSITION) / (1 - LEAST_TRANSITION)
        self.to_share = _small(nn.Linear(hidden_size, n_heads * rows, bias=False))
        self.share_start = nn.Parameter(torch.full((n_heads * rows,), math.log(share / (1 - share))))
        if kind == "complex_pairs":
            angles = ROTARY_BASE ** -(torch.arange(rows) / rows)
            self.to_angle = _small(nn.Linear(hidden_size, n_heads * rows, bias=False))
            self.angle_start = nn.Parameter(angles.repeat(n_heads))

    def forward(self, x: Tensor) -> Tensor | None:
        """None, or (B, H, T, 1), (B, H, T, K), or complex (B, H, T, K / 2)."""
        if self.kind == "identity":
            return None
        wide = torch.promote_types(x.dtype, torch.float32)  # half precision rounds to 1, and has no complex numbers
        if self.kind == "retention":
            kept = 1 - 2.0 ** -(5 + torch.arange(self.n_heads, dtype=wide, device=x.device))
            return kept[:, None, None].expand(len(x), -1, x.shape[1], 1)
        share = torch.sigmoid(by_head(self.to_share(x) + self.share_start, self.n_heads))
        share = LEAST_TRANSITION + (1 - LEAST_TRANSITION) * share
        if self.to_angle is None:
            return share
        angle = by_head(self.to_angle(x) + self.angle_start, self.n_heads)
        return torch.polar(share.to(wide), angle.to(wide))


class Noise(nn.Module):
    """Equation (9.25): (B, T, D) -> (B, width, T), >= ``floor``; it begins at ``start`` + ``floor``."""

    def __init__(self, hidden_size: int, width: int, *, start: float, floor: float) -> None:
        super().__init__()
        self.floor = floor
        self.to_noise = _small(nn.Linear(hidden_size, width, bias=False))
        self.noise_start = nn.Parameter(torch.full((width,), start + math.log(-math.expm1(-start))))

    def forward(self, x: Tensor, precision: Tensor | None = None, ramp: float = 1.0) -> Tensor:
        """With precision (B, T, D) and w, or the noise of something equally well known everywhere."""
        noise = F.softplus(self.to_noise(x) + self.noise_start)
        if precision is not None:
            noise = noise * precision.mean(dim=-1, keepdim=True) ** -ramp
        return noise.mT + self.floor


def history_starts(context: SequenceContext, mixer: str) -> Tensor | None:
    """(B, T) bool, True where a history or the padding begins; None where nothing begins after the first column."""
    if not context.causal:
        raise UserError(
            f"mixer {mixer!r} reads a history from its first item to its last and cannot look ahead, as a "
            "bidirectional model needs; choose mixer attention, or a causal model such as sasrec"
        )
    segment = context.segment
    begins = torch.ones_like(segment, dtype=torch.bool)
    begins[:, 1:] = segment[:, 1:] != segment[:, :-1]
    return begins if bool(begins[:, 1:].any()) else None


def fitted_tokens(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, (B, H, T, .), in float32 at least."""
    dtype = torch.promote_types(v.dtype, torch.float32)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def fitted_transition(transition: Tensor | None, k: Tensor) -> Tensor | None:
    """A transition for keys (B, H, T, K), expanded but for an axis of 1 that stands for all K, in their precision."""
    if transition is None:
        return None
    return transition.to(k.dtype.to_complex() if transition.is_complex() else k.dtype).expand(*k.shape[:3], -1)


def beside(v: Tensor, number: float | Tensor) -> Tensor:
    """A number or tensor in the type and on the device of ``v``; a number is written there: a copy is waited for."""
    return number.to(v) if isinstance(number, Tensor) else v.new_full((), number)


@in_full_precision
def _of_length_one(y: Tensor) -> Tensor:
    """Or 0 of a token that dropout has emptied, with a gradient that Adam can square."""
    return y * (y.square().sum(dim=-1, keepdim=True) + LEAST_SQUARE).rsqrt()


def _small(linear: nn.Linear) -> nn.Linear:
    nn.init.normal_(linear.weight, std=0.02)
    return linear
