"""Softmax attention with a regime prior: fuzzy memberships, aligned with soft blocks of the history, bias the logits.

    mu_t   = memberships of W x_t + b in R regimes                                                     (9.29)
    b_tj   = (1 - mix) mu_t P phi_j(n_t) - mix beta |t - j| / (n_t - 1)                                (9.33)
    logits + clip((b_tj - m) / d, +-4) / tau * min(1, step / warm-in),      tau in [0.6, 1.6] learned  (9.34)
    innovation = W_out (2 s(W_eta mu_t) * 2 s(W_h mu_t) * e_th)             residual gate, value gate  (9.35)

P is the alignment of regimes with blocks: the Sinkhorn matrix of S = mean over histories of sum_t mu_t phi_t(n)'. In
the paper's listing a position sees other sequences and later positions through P, m, d and the mean over the batch.
Here the bias belongs to one history, and P, m and d (at least 1e-3) are running means over the batches before this one,
of which the first hundred count alike and later ones 0.01, constants for gradients; m and d are those of every fourth
packed row: in training and in evaluation a position depends on what it may read alone. So does the length of the basis:
n_t counts the positions that t may read, not those that will follow.

The gates of (9.35) start near 1, and like the gate of pointwise attention they are taken as precision-preserving. What
concentrates memberships too much is held back by a penalty on the training loss,

    weight / 2 (1 + pressure) max(0, floor log R - mean H(mu)) + drift (tau - tau_before)^2            (9.36)

whose last three numbers a controller may set (``training.controllers.guardian``); without one they are 0.

Source: Fuzzy-Gated Training for Transformers, section 2 and listings 4 to 6; core.regimes.
Shapes: B rows, T tokens, D model width, H heads, K head width, R regimes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recbft.autograd.boundaries import eagerly, in_full_precision
from recbft.autograd.transforms import transformed
from recbft.config.fields import check_range
from recbft.core import Estimator, SequenceContext
from recbft.core.regimes import BiasTerms, block_table, memberships, sinkhorn, standardised_bias
from recbft.errors import UserError
from recbft.kernels.c_library.heads import statistics_of
from recbft.mixers.attention import SoftmaxAttention
from recbft.mixers.interface import Mixer, MixerOptions, Observation, PenaltySlot, projected

TEMPERATURES = (0.6, 1.6)
LIMIT = 4.0  # of the standardised bias
MOMENTUM = 0.01  # of the running means, after the first hundred batches
SAMPLED_ROWS = 4  # one row in so many tells the mean and deviation of (9.34)
LEAST_DEVIATION = 1e-3  # of (9.34): memberships that say nothing yet are not blown up
DISTANCE_START = 0.2  # beta
SATURATED = 0.95  # a token whose largest membership is above this counts as saturated


@dataclass(frozen=True, kw_only=True)
class RegimeConfig(MixerOptions):
    """The regime prior (the ``mixing`` section of a config)."""

    regimes: int = 4  # R, 3 to 8 as a rule
    width: int | None = 16  # of the projection (9.29); None means hidden_size, as in the paper, at more cost
    type2: bool = False  # memberships of uncertain width, (9.30)
    alignment_temperature: float = 0.7  # tau of the Sinkhorn matrix
    sweeps: int = 8  # of Sinkhorn
    temperature: float = 1.0  # start of tau, in [0.6, 1.6]
    warm_in_steps: int = 1200  # batches over which the bias is let in; 0 means at once
    distance_mix: float = 0.1  # share of the distance prior; 0 leaves it out
    residual_gate: bool = True  # the first factor of (9.35)
    value_gate: bool = True  # the second
    entropy_floor: float = 0.5  # share of log R below which the mean entropy is penalised
    entropy_weight: float = 0.02  # of that penalty, (9.36)

    def __post_init__(self) -> None:
        low, high = TEMPERATURES
        check_range("regimes", self.regimes, at_least=2)
        check_range("width", self.width, at_least=self.regimes)
        check_range("alignment_temperature", self.alignment_temperature, above=0)
        check_range("sweeps", self.sweeps, at_least=1)
        check_range("temperature", self.temperature, above=low, below=high)
        check_range("warm_in_steps", self.warm_in_steps, at_least=0)
        check_range("distance_mix", self.distance_mix, at_least=0, below=1)
        check_range("entropy_floor", self.entropy_floor, at_least=0, at_most=1)
        check_range("entropy_weight", self.entropy_weight, at_least=0)


class GaussianMemberships(nn.Module):
    """Equation (9.29) with a projection to ``width``, D unless given; (9.30) with ``type2``."""

    def __init__(self, hidden_size: int, regimes: int, *, width: int | None = None, type2: bool = False) -> None:
        super().__init__()
        width = hidden_size if width is None else width
        self.project = nn.Linear(hidden_size, width)
        # Orthonormal, which a random map makes as good as drawn; of three axes, since a backbone draws all matrices.
        self.centres = nn.Parameter(torch.eye(regimes, width)[:, None])
        self.log_width = nn.Parameter(torch.zeros(regimes))
        self.uncertainty: nn.Module | None = None
        if type2:
            self.uncertainty = nn.Sequential(
                nn.Linear(hidden_size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, 1), nn.Sigmoid()
            )

    @in_full_precision
    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, R), sums of 1."""
        uncertainty = None if self.uncertainty is None else self.uncertainty(x)
        return memberships(self.project(x), self.centres[:, 0], self.log_width, uncertainty)


class Diagnosis(NamedTuple):
    """How memberships have looked of late in training."""

    entropy: float  # of a token's memberships, nats
    saturated: float  # share of tokens with one membership above ``SATURATED``


class RegimeAttention(Mixer):
    """Equations (9.29) to (9.36) over a packed batch; the other arguments are those of ``SoftmaxAttention``.

    Args:
        length: the longest history; there cannot be more regimes.
    """

    penalty: PenaltySlot
    alignment: Tensor
    bias_mean: Tensor
    bias_variance: Tensor
    batches: Tensor
    entropy: Tensor
    saturated: Tensor
    pressure: Tensor
    drift: Tensor
    temperature_before: Tensor

    def __init__(
        self,
        hidden_size: int,
        n_heads: int,
        config: RegimeConfig | None = None,
        *,
        length: int = 50,
        output_projection: bool = False,
        estimator: Estimator | None = None,
        lam_max: float = 100.0,
        **attention: Any,
    ) -> None:
        super().__init__()
        config = RegimeConfig() if config is None else config
        R = config.regimes
        if length < R:
            raise UserError(
                f"regimes is {R}, but a history has at most {length} positions; take fewer, or raise max_length to {R}"
            )
        self.config, self.n_heads, self.lam_max = config, n_heads, lam_max
        self.reader = SoftmaxAttention(hidden_size, n_heads, estimator=estimator, lam_max=lam_max, **attention)
        self.mixes_heads = output_projection
        self.gives_precision, self.by_coordinate = self.reader.gives_precision, self.reader.by_coordinate
        self.memberships = GaussianMemberships(hidden_size, R, width=config.width, type2=config.type2)
        low, high = TEMPERATURES
        share = (config.temperature - low) / (high - low)
        self.temperature_logit = nn.Parameter(torch.tensor(math.log(share / (1 - share))))
        self.log_distance = nn.Parameter(torch.tensor(math.log(DISTANCE_START))) if config.distance_mix else None
        self.residual_gate = nn.Linear(R, 1, bias=False) if config.residual_gate else None
        self.value_gate = nn.Linear(R, n_heads, bias=False) if config.value_gate else None
        self.out = nn.Linear(hidden_size, hidden_size) if output_projection else None
        self.penalty = PenaltySlot()
        self.register_buffer("alignment", torch.full((R, R), 1 / R))
        for name, start in _BUFFERS.items():
            self.register_buffer(name, torch.tensor(start))
        self.temperature_before.fill_(config.temperature)

    def forward(self, x: Tensor, precision: Tensor | None, context: SequenceContext, **how: Any) -> Observation:
        """Observe every position, as ``Mixer`` says; ``how`` is ramp and source.

        A pass in training moves the running means, for the passes after it.
        """
        mu = self.memberships(x)
        terms = self._terms(mu, context)
        moments = partial(statistics_of, terms, context, every=SAMPLED_ROWS)
        bias: Tensor | BiasTerms = terms
        if not self.reader.takes_terms(x):
            bias, raw = _written_out(terms, context)
            moments = partial(_moments_of, raw, context)
        mean, found = self.reader(x, precision, context, bias=bias, **how)
        innovation = self._gated(mean, mu)
        if self.training:
            self._leave_penalty(mu, context)
            self._remember(mu.detach(), moments, context)
        return projected(Observation(innovation, found), self.out, cap=self.lam_max)

    def attention(self, x: Tensor, precision: Tensor | None, context: SequenceContext, **how: Any) -> Tensor:
        """The weights behind ``forward``, as ``SoftmaxAttention.attention`` gives them."""
        bias, _ = _written_out(self._terms(self.memberships(x), context), context)
        return self.reader.attention(x, precision, context, bias=bias, **how)

    @property
    def recency_decay(self) -> Tensor | None:
        """rho, learned."""
        return self.reader.recency_decay

    @property
    def temperature(self) -> Tensor:
        """tau of (9.34)."""
        low, high = TEMPERATURES
        return low + (high - low) * torch.sigmoid(self.temperature_logit)

    @torch.no_grad()
    def move_temperature(self, step: float) -> None:
        """Add to tau, within its bounds; a controller's handle."""
        low, high = TEMPERATURES
        share = ((self.temperature + step - low) / (high - low)).clamp(0.01, 0.99)
        self.temperature_logit.copy_(torch.log(share / (1 - share)))

    def diagnosis(self) -> Diagnosis:
        """Running means over the last hundred batches of training or so."""
        return Diagnosis(self.entropy.item(), self.saturated.item())

    @in_full_precision
    def _terms(self, mu: Tensor, context: SequenceContext) -> BiasTerms:
        """What (9.34) adds to the logits."""
        mix = self.config.distance_mix
        shares = (1 - mix) * (mu @ self.alignment.clone())  # as it stood before this batch
        if self.log_distance is not None:
            shares = torch.cat([shares, (-mix * self.log_distance.exp()).expand(*mu.shape[:2], 1)], dim=-1)
        table, reach = _places(context, self.config.regimes, mu.dtype)
        deviation = self.bias_variance.sqrt().clamp(min=LEAST_DEVIATION)
        warm = self.batches / self.config.warm_in_steps if self.config.warm_in_steps else torch.ones_like(deviation)
        return BiasTerms(
            shares=shares.contiguous(),
            table=table,
            reach=reach,
            mean=self.bias_mean.clone(),
            deviation=deviation,
            scale=warm.clamp(max=1) / self.temperature,
            limit=LIMIT,
        )

    def _gated(self, mean: Tensor, mu: Tensor) -> Tensor:
        """Equation (9.35) before W_out; (B, T, D)."""
        gates = [2 * torch.sigmoid(gate(mu)) for gate in (self.residual_gate, self.value_gate) if gate is not None]
        if not gates:
            return mean
        heads: Tensor = mean.unflatten(-1, (self.n_heads, -1))
        return (heads * math.prod(gates[1:], start=gates[0])[..., None]).flatten(2)

    @in_full_precision
    def _leave_penalty(self, mu: Tensor, context: SequenceContext) -> None:
        """Equation (9.36)."""
        # Not entr: its gradient at a membership of 0 is infinite, and the clamp below makes that NaN.
        least = torch.finfo(mu.dtype).tiny
        entropy = _mean_over_tokens(-torch.special.xlogy(mu, mu.clamp(min=least)).sum(dim=-1), context)
        missing = (self.config.entropy_floor * math.log(self.config.regimes) - entropy).clamp(min=0)
        held = self.drift.clone() * (self.temperature - self.temperature_before.clone()).square()
        self.penalty.leave(0.5 * self.config.entropy_weight * (1 + self.pressure.clone()) * missing + held)

    @eagerly
    @in_full_precision
    @torch.no_grad()
    def _remember(self, mu: Tensor, moments: Callable[[], tuple[Tensor, Tensor]], context: SequenceContext) -> None:
        """Move the running means by this batch; the first hundred batches count alike; not under torch.func."""
        if transformed():
            return
        weight = (1 / (self.batches + 1)).clamp(min=MOMENTUM)
        mean, variance = moments()
        self.bias_mean.lerp_(mean, weight)
        self.bias_variance.lerp_(variance, weight)
        scores = self._alignment_scores(mu, context) / self.config.alignment_temperature
        self.alignment.lerp_(sinkhorn(scores, sweeps=self.config.sweeps), weight)
        self.entropy.lerp_(_mean_over_tokens(torch.special.entr(mu).sum(dim=-1), context), weight)
        self.saturated.lerp_(_mean_over_tokens((mu.amax(dim=-1) > SATURATED).to(mu.dtype), context), weight)
        self.batches += 1

    def _alignment_scores(self, mu: Tensor, context: SequenceContext) -> Tensor:
        """S: the mean over histories of sum_t mu_t phi_t', by the whole length of each; (R, R)."""
        B, T, R = mu.shape
        table, _ = _places(context, R, mu.dtype)
        own = torch.arange(B, device=mu.device)[:, None] * T + context.first  # a number per history
        position, valid = context.position, context.valid.to(mu.dtype)
        longest = position.new_zeros(B * T).scatter_reduce_(0, own.flatten(), position.flatten(), "amax")
        index = longest[own] * table.shape[-1] + position
        blocks = table[:-1].flatten(1).index_select(1, index.flatten())  # (R, B T)
        histories = (context.first == torch.arange(T, device=mu.device)).to(mu.dtype).mul(valid).sum().clamp(min=1)
        return ((blocks * valid.flatten()) @ mu.view(B * T, R)).T / histories


# Scalars that training moves, and where they start.
_BUFFERS = {
    "bias_mean": 0.0,
    "bias_variance": 1.0,
    "batches": 0.0,
    "entropy": 0.0,
    "saturated": 0.0,
    "pressure": 0.0,
    "drift": 0.0,
    "temperature_before": 0.0,
}


def _written_out(bias: BiasTerms, context: SequenceContext) -> tuple[Tensor, Tensor]:
    """What (9.34) adds to the logits, (B, 1, T, T), and b of (9.33) without gradients, (B, T, T)."""
    shares = bias.shares.movedim(-1, 0)
    terms = _terms_of_pairs(bias.table, bias.reach, context)[: len(shares)]
    made, raw = standardised_bias(
        shares, terms, mean=bias.mean, deviation=bias.deviation, limit=bias.limit, scale=bias.scale
    )
    return made[:, None], raw


@eagerly
def _terms_of_pairs(table: Tensor, reach: Tensor, context: SequenceContext) -> Tensor:
    """phi_j(n_t) of (9.33) and |t - j| / (n_t - 1) for all pairs, (R + 1, B, T, T)."""

    def make() -> Tensor:
        index = (reach * table.shape[-1])[:, :, None] + context.position[:, None, :]
        terms = table.flatten(1).index_select(1, index.flatten()).view(len(table), *index.shape)
        if not context.causal:  # the table's distance is from the last position that may be read
            terms[-1] = context.lag.to(table.dtype) / reach.clamp(min=1)[..., None]
        return terms

    return context.keep(("terms of pairs", len(table), table.dtype), make)


def _moments_of(raw: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor]:
    """Mean and variance of b of (9.33) over the pairs of some rows."""
    keep, raw = context.allowed[::SAMPLED_ROWS].to(raw.dtype), raw[::SAMPLED_ROWS]
    pairs = keep.sum().clamp(min=1)
    mean = torch.dot(raw.flatten(), keep.flatten()) / pairs
    return mean, (raw - mean).square_().mul_(keep).sum() / pairs


@eagerly
def _places(context: SequenceContext, regimes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``block_table`` of the longest history, and n - 1 of (9.33), the last place a token may read: (B, T) int32."""

    def make() -> tuple[Tensor, Tensor]:
        position = context.position
        longest = int(position.amax()) + 1 if position.numel() else 1
        reach = position if context.causal else torch.where(context.allowed, position[:, None, :], 0).amax(dim=-1)
        table = block_table(1 << (longest - 1).bit_length(), regimes, dtype, position.device)
        return table, reach.to(torch.int32)

    return context.keep(("places", regimes, dtype), make)


def _mean_over_tokens(values: Tensor, context: SequenceContext) -> Tensor:  # (B, T) -> ()
    keep = context.valid.to(values.dtype)
    return (values * keep).sum() / keep.sum().clamp(min=1)
