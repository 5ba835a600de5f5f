"""Recurrences that the Bayesian layer explains, as one table of design models.

    name               what is assumed of the memory                        transition
    bayesian           its covariance is carried along (``bayesian``)       any of that mixer
    deltanet           its covariance is lam I before every write           keeps all
    gated_deltanet     the same                                             a_t I
    kda                the same                                             diag(a_t)
    longhorn           the same, with a noise per column of the values      keeps all
    linear_attention   a write is an input to it, not a sighting of it      keeps all
    retnet             the same                                             rho_h I, fixed
    gla                the same                                             diag(a_t)
    mamba2             the same                                             a_t I

    reset      M = A M + k (eta * (v - (A M)' k))'     eta = lam / (r2 + lam |k|^2)             (9.19)
    additive   M = A M + k (omega * v)'                omega = lam / (lam + r2)                 (9.21)
    innovation = M_t' q_t of all heads, or W_out of them                                        (9.17)
    reset      lobs = min(1 / (s_h (q_t' P_t q_t + r2_t)), lam_max), by (9.20) after the write  (9.18)

lam is 1 and noise in its units, as in ``bayesian``; keys and queries have length 1. (9.18) knows the last write alone:
what earlier ones resolved is what the reset forgets. The additive rules have no belief about the memory, and so no
precision. The recurrences are those of the named architectures without convolutions, output gates and norms.

Source: Dowling et al., Memory by Design, table 1, proposition 2 and appendix A.
Shapes: B rows, T tokens, D model width, H heads, K = D / H, M = K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from recbft.autograd.boundaries import eagerly
from recbft.config.fields import check_choice, check_range
from recbft.core import SequenceContext
from recbft.kernels import memory
from recbft.kernels.memory.reference import Rule, UnfilteredTrace, unfiltered_reading, write_share
from recbft.mixers.interface import Mixer, MixerOptions, Observation, joined, projected, refuse_idle
from recbft.mixers.memory_maps import (
    LEAST_TRANSITION,
    OBSERVATION_FLOOR,
    KeysAndValues,
    Noise,
    Transition,
    Transitions,
    beside,
    fitted_tokens,
    fitted_transition,
    history_starts,
)


class DesignModel(NamedTuple):
    """One line of the table."""

    rule: Rule
    transition: Transitions
    by_column: bool = False  # a noise per column of the values

    @property
    def has_precision(self) -> bool:
        """Whether a readout has a variance."""
        return self.rule == "reset"


DESIGN_MODELS = {
    "deltanet": DesignModel("reset", "identity"),
    "gated_deltanet": DesignModel("reset", "scalar"),
    "kda": DesignModel("reset", "diagonal"),
    "longhorn": DesignModel("reset", "identity", by_column=True),
    "linear_attention": DesignModel("additive", "identity"),
    "retnet": DesignModel("additive", "retention"),
    "gla": DesignModel("additive", "diagonal"),
    "mamba2": DesignModel("additive", "scalar"),
}


@eagerly
def unfiltered_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    transition: Tensor | None,
    observation_noise: Tensor,
    variance: float | Tensor,
    rule: Rule,
    first: Tensor | None = None,
    impl: str = "auto",
) -> UnfilteredTrace:
    """A memory by (9.19) or (9.21), read with q after each token. Linear in T.

    Args:
        observation_noise: r2, broadcastable to (B, H, T), or by column (B, H, T, M); >= 0.
        variance: lam, a number or (H,) or (B, H), > 0.
        rule: ``reset`` or ``additive``.
        others: as those of ``filter_memory``; ``impl`` is ``auto``, ``reference`` (the loop) or ``chunked``.
    """
    q, k, v = fitted_tokens(q, k, v)
    B, H, T, _ = k.shape
    noise, by_column = observation_noise.to(v.dtype), observation_noise.dim() == 4
    noise = noise if by_column else noise.expand(B, H, T)[..., None]
    lam = beside(v, variance).expand(B, H)[..., None, None]
    share = write_share(k, noise, lam, rule)
    kept = fitted_transition(transition, k)
    readout, mean = memory.unfiltered_memory(q, k, v, transition=kept, share=share, rule=rule, first=first, impl=impl)
    spread, gain = unfiltered_reading(q, k, share, lam, rule)
    if not by_column:
        spread, gain = None if spread is None else spread[..., 0], gain[..., 0]
    return UnfilteredTrace(readout, spread, gain, mean)


@dataclass(frozen=True, kw_only=True)
class MemoryFamilyConfig(MixerOptions):
    """Where the learned parts of a design model start (the ``mixing`` section of a config)."""

    only_with_precision = ("key_precision", "prior_variance")

    observation_noise: float = 0.1  # r2, in units of lam
    retention: float = 0.98  # what is kept of the memory at each token, where that is learned
    prior_variance: float | None = None  # s of (9.18); None means 1 / K, as of the REML estimator
    key_precision: Literal["on", "off"] = "on"  # divide the noise of a write by its mean incoming precision^w

    def __post_init__(self) -> None:
        check_range("observation_noise", self.observation_noise, above=0)
        check_range("retention", self.retention, above=LEAST_TRANSITION, below=1)
        check_range("prior_variance", self.prior_variance, above=0)


class MemoryFamilyMixer(Mixer):
    """A line of the table, ``design``, over a packed batch; the memory begins anew with every history."""

    def __init__(
        self,
        hidden_size: int,
        n_heads: int,
        config: MemoryFamilyConfig = MemoryFamilyConfig(),
        *,
        design: str,
        output_projection: bool = False,
        gives_precision: bool = True,
        lam_max: float = 100.0,
    ) -> None:
        super().__init__()
        check_choice("design", design, DESIGN_MODELS)
        model = DESIGN_MODELS[design]
        if model.transition in ("identity", "retention"):
            refuse_idle(config, ("retention",), f"in {design!r}, whose transition is not learned; leave it out")
        if not model.has_precision:
            refuse_idle(config, ("prior_variance",), f"in {design!r}, which has no precision; leave it out")
        self.n_heads, self.config, self.lam_max = n_heads, config, lam_max
        self.design, self.model = design, model
        self.gives_precision, self.mixes_heads = gives_precision and model.has_precision, output_projection
        K = hidden_size // n_heads
        self.maps = KeysAndValues(hidden_size, n_heads)
        self.transition = Transition(hidden_size, n_heads, model.transition, start=config.retention)
        noises = hidden_size if model.by_column else n_heads
        self.observation = Noise(hidden_size, noises, start=config.observation_noise, floor=OBSERVATION_FLOOR)
        self.out = nn.Linear(hidden_size, hidden_size) if output_projection else None
        self.log_scale: nn.Parameter | None = None
        if self.gives_precision:
            start = 1 / K if config.prior_variance is None else config.prior_variance
            self.log_scale = nn.Parameter(torch.full((n_heads,), start).log())

    def forward(
        self,
        x: Tensor,
        precision: Tensor | None,
        context: SequenceContext,
        *,
        ramp: float = 1.0,
        source: Tensor | None = None,
    ) -> Observation:
        """Observe every position; as ``BayesianMixer.forward``."""
        first = history_starts(context, self.design)
        source = x if source is None else source
        q, k, v = self.maps(x, source)
        a, r2, rule = self.transition(source), self._noise(source, precision, ramp), self.model.rule
        trace = unfiltered_memory(q, k, v, transition=a, observation_noise=r2, variance=1.0, rule=rule, first=first)
        real = context.valid[..., None]
        return self._observation(trace.readout, trace.readout_variance, x).each(lambda part: part * real)

    def _noise(self, source: Tensor, precision: Tensor | None, ramp: float) -> Tensor:
        """r2 of writes or, without precision, of readouts: (B, H, T), or by column (B, H, T, K)."""
        noise: Tensor = self.observation(source, precision if self.config.key_precision == "on" else None, ramp)
        return noise.unflatten(1, (self.n_heads, -1)).mT if self.model.by_column else noise

    def _observation(self, readout: Tensor, variance: Tensor | None, x: Tensor) -> Observation:
        """(9.17) and (9.18) from what heads read, (B, H, T, K) and (B, H, T), or by column (B, H, T, K)."""
        innovation = joined(readout).to(x.dtype)
        found = None
        if self.log_scale is not None and variance is not None:
            spread = variance + self._noise(x, None, 1.0)
            spread = spread if self.model.by_column else spread[..., None].expand_as(readout)
            spread = spread * self.log_scale.exp()[:, None, None]
            found = joined(spread.clamp(min=1 / self.lam_max).reciprocal()).to(x.dtype)
        return projected(Observation(innovation, found), self.out, cap=self.lam_max)
