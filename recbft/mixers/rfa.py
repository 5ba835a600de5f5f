"""Robust filter attention: past tokens as noisy sightings of one state that rotates, decays and diffuses (rfa, sc_rfa).

    q, k, v    complex linear maps of the normalised input, K complex coordinates per head              (a)
    L_tj     = log P_tj - kappa log(1 + P_tj |q_t - carried k_j|^2 / nu),   kappa = (nu + K) / K      (9.9)
    z_t      = sum_j softmax_j(tau L_tj + w log lbar_j) carried v_j                                  (9.11)
    p_t      = sum_j exp(L_tj)                                  evidence: the reweighted precisions  (9.12)
    z_t     <- g_t z_t + (1 - g_t) v_t,   g_t = sigmoid(s log p_t - log p0)         confidence gate  (9.13)
    innovation = Re(W z),   lobs = min(c_h p_t, lam_max) on the coordinates of head h                (9.14)

Without tails L is (9.10). P = 1 / V with V and the carrying of ``kernels.robust_filter.dynamics``, by the lag in
positions or in real time. The weighing of keys by their incoming precision in (9.11) is the one of softmax attention;
the evidence leaves it out. W maps each head's state to that head's own coordinates and starts as the
real part; with an output projection W joins the heads and lobs passes through its squared weights. c_h starts where
one key that fits exactly gives 2 D / H.

``rfa`` learns the decay of each head, and every head has the whole range of frequencies w. In ``sc_rfa`` each head
has a band of them, and decays at b times the highest. Frequencies stand in pairs w, -w. The last heads (a quarter of
them), those of the lowest band, do not decay.

Source: Robust Filter Attention (paper), sections 3.2 and 3.4, appendices B.3, C.4 to C.6, D.1 and D.2.
Shapes: B rows, T tokens, D model width, H heads, K complex coordinates per head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbft.autograd.boundaries import eagerly
from recbft.autograd.complex_pairs import as_complex, real
from recbft.core import SequenceContext, projected_precision, ramped, scalar_log_precision
from recbft.kernels.robust_filter import Clock, Dynamics, Setting, decayed_weights, filtered, read_clock
from recbft.mixers.head_dynamics import (
    KEY_NOISE_START,
    QUERY_NOISE_START,
    ConfidenceGate,
    EvidencePrecision,
    HeadDynamics,
    RobustFilterConfig,
)
from recbft.mixers.interface import Group, Mixer, Observation

LEAST_EVIDENCE = 1e-6  # behind a draw: of less, single precision makes a variance without end


def sample_state(
    value: Tensor,
    evidence: Tensor,
    query_noise: Tensor,
    *,
    valid: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """A draw of the state from its predictive distribution, z + CN(0, 1 / p + gamma2), p no less than 1e-6.

    Args:
        value: z, (B, H, T, K) complex.
        evidence: p, (B, H, T).
        query_noise: gamma2, (H,).
        valid: (B, T) bool, which tokens there are, all unless given; the state of others is returned as it is.
    """
    variance = 1 / evidence.clamp(min=LEAST_EVIDENCE) + query_noise[:, None]
    deviation = (variance / 2).sqrt()[..., None, None]
    if valid is not None:
        deviation = deviation * valid[:, None, :, None, None]
    noise = torch.randn(
        *value.shape, 2, generator=generator, dtype=evidence.dtype, device=evidence.device
    )  # real and imaginary parts
    return value + torch.view_as_complex(noise * deviation)


class RobustFilterAttention(Mixer):
    """Robust filter attention over a packed batch.

    Args:
        coupled: ``sc_rfa``: frequencies in bands, decay bound to them.
        dropout: probability of dropping a weight of (9.11); evidence always uses all.
        gives_precision: whether to report lobs of (9.14); without it evidence is computed for (9.13) alone.
    """

    groups: Mapping[str, Group] = {"sde": "dynamics", "precision": "precision"}
    complex_maps = ("query", "key", "value")
    read: nn.Parameter  # where there is no output map

    def __init__(
        self,
        hidden_size: int,
        n_heads: int,
        config: RobustFilterConfig | None = None,
        *,
        coupled: bool = False,
        dropout: float = 0.0,
        output_projection: bool = False,
        gives_precision: bool = True,
        lam_max: float = 100.0,
    ) -> None:
        super().__init__()
        config = RobustFilterConfig() if config is None else config
        width = hidden_size // n_heads
        K = width if config.latent_width is None else config.latent_width
        self.n_heads, self.config, self.dropout = n_heads, config, dropout
        self.gives_precision, self.mixes_heads, self.lam_max = gives_precision, output_projection, lam_max
        self.sde = HeadDynamics(n_heads, K, config, coupled=coupled)
        # Real and imaginary part of a coordinate next to each other.
        self.query = nn.Linear(hidden_size, 2 * n_heads * K)
        self.key = nn.Linear(hidden_size, 2 * n_heads * K)
        self.value = nn.Linear(hidden_size, 2 * n_heads * K)
        self.out = nn.Linear(2 * n_heads * K, hidden_size) if output_projection else None
        if not output_projection:
            self.read = nn.Parameter(_real_parts(n_heads, width, K))
        self.gate = ConfidenceGate(n_heads) if config.confidence_gate else None
        self.precision = None
        if gives_precision:
            self.precision = EvidencePrecision(n_heads, 2 * width * (KEY_NOISE_START + QUERY_NOISE_START))

    @eagerly  # the compiler refuses views that are complex
    def forward(
        self,
        x: Tensor,
        precision: Tensor | None,
        context: SequenceContext,
        *,
        ramp: float = 1.0,
        source: Tensor | None = None,
    ) -> Observation:
        """Observe every position, as ``Mixer`` says; the context has times where the config reads them."""
        source = x if source is None else source
        v = self._heads(self.value(source))
        sampled = self.training and self.config.latent_sampling
        dynamics = self._dynamics(x)
        dropout = self.dropout if self.training else 0.0
        clock = self._clock(context, x)
        value, evidence = filtered(
            self._heads(self.query(x)),
            self._heads(self.key(source)),
            v,
            context,
            dynamics,
            clock,
            self.config.variant,
            key_bias=self._key_bias(precision, ramp),
            dropout=dropout,
            with_evidence=self.gives_precision or sampled or self.gate is not None,
        )
        if self.gate is not None:
            value = self.gate(value, v, evidence, context.valid)  # (9.13)
        if sampled:
            value = sample_state(value, evidence, dynamics.query_noise, valid=context.valid)
        latent = real(value.transpose(1, 2)).flatten(2).to(x.dtype)  # (B, T, 2 H K)
        found = None if self.precision is None else self._carried(self.precision(evidence, self.lam_max).to(x.dtype))
        innovation = F.linear(latent, torch.block_diag(*self.read)) if self.out is None else self.out(latent)
        return Observation(innovation, found)

    def attention(
        self,
        x: Tensor,
        precision: Tensor | None,
        context: SequenceContext,
        *,
        ramp: float = 1.0,
        source: Tensor | None = None,
    ) -> Tensor:
        """What is left of each key in the estimate, before dropout: softmax times decay, (B, H, T, T)."""
        q, k = self._heads(self.query(x)), self._heads(self.key(x if source is None else source))
        setting = Setting(context, self._dynamics(x), self._clock(context, x), self.config.variant)
        weights, _ = decayed_weights(q, k, setting, self._key_bias(precision, ramp))
        return weights

    def _dynamics(self, x: Tensor) -> Dynamics:
        return Dynamics(*(part.to(_real_type(x)) for part in self.sde()))

    def _clock(self, context: SequenceContext, x: Tensor) -> Clock:
        if not self.config.time:
            return read_clock(context, dtype=_real_type(x))
        return read_clock(context, use_time=True, time_unit=self.sde.time_unit(), dtype=_real_type(x))

    def _key_bias(self, precision: Tensor | None, ramp: float) -> Tensor | None:
        if precision is None or self.config.key_precision == "off":
            return None
        return ramped(scalar_log_precision(precision), ramp)

    def _carried(self, per_head: Tensor) -> Tensor:
        """lobs on the coordinates of the output, (B, H, T) -> (B, T, D)."""
        per_token = per_head.transpose(1, 2)  # (B, T, H)
        if self.out is None:
            return per_token.repeat_interleave(self.read.shape[1], dim=-1)
        columns = self.out.weight.shape[1] // self.n_heads
        return projected_precision(per_token.repeat_interleave(columns, dim=-1), self.out.weight, cap=self.lam_max)

    def _heads(self, x: Tensor) -> Tensor:  # (B, T, 2 H K) -> (B, H, T, K) complex
        return as_complex(x.unflatten(-1, (self.n_heads, -1))).transpose(1, 2)


def _real_type(x: Tensor) -> torch.dtype:
    """Of a latent state's coordinates: complex numbers in half precision are widened (``as_complex``)."""
    return torch.promote_types(x.dtype, torch.float32)


def _real_parts(n_heads: int, width: int, K: int) -> Tensor:
    """A read-out (H, width, 2 K) that gives the real parts of the coordinates, over again where ``width`` exceeds K."""
    read = torch.zeros(n_heads, width, 2 * K)
    row = torch.arange(width)
    read[:, row, 2 * (row % K)] = 1.0
    return read
