"""Softmax attention that knows places by rotation or by distance: rope, alibi, decayed_rope, sc_rope.

    rope          q_t, k_j turned by -w t and -w j: products depend on the lag, w one range in every head  (9.1)
    alibi         logits - m_h |t - j|,   m_h = 2^(-8 h / H), h = 1 .. H                                   (9.2)
    decayed_rope  (9.1) and logits - mu_h |t - j|: weights decay by exp(-mu_h |t - j|), mu_h learned       (9.3)
    sc_rope       (9.3) with w cut into a band per head and mu_h = b max(w_h), fixed                       (9.4)

Decays enter the logits, so the rows of weights still sum to one and every estimator of softmax attention is defined.
(The paper's decay also scales the products; robust filter attention has it so.) Neighbouring coordinates are turned
together.

Source: RoFormer (arXiv 2104.09864); ALiBi (arXiv 2108.12409); Robust Filter Attention (paper), appendix E.2, B1 to B4.
Shapes: B rows, T tokens, D model width, H heads, K head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from recbft.autograd.boundaries import eagerly
from recbft.autograd.complex_pairs import as_complex, real
from recbft.config.fields import check_choice, check_range
from recbft.core import SequenceContext
from recbft.errors import UserError
from recbft.kernels.robust_filter import Clock, read_clock, turns
from recbft.mixers.attention import SoftmaxAttention
from recbft.mixers.head_dynamics import DAMPING, Constants, HeadDecay, frequency_range, spread_decays
from recbft.mixers.interface import Group, Mixer, MixerOptions, Observation, refuse_idle

Scheme = Literal["rope", "alibi", "decayed_rope", "sc_rope"]

# Which scheme reads which setting.
_READ_BY: dict[str, tuple[Scheme, ...]] = {
    "frequency_base": ("rope", "decayed_rope", "sc_rope"),
    "damping": ("decayed_rope", "sc_rope"),
    "undamped_heads": ("decayed_rope", "sc_rope"),
}


@dataclass(frozen=True, kw_only=True)
class PositionalConfig(MixerOptions):
    """Frequencies and decays of the positional schemes (the ``mixing`` section of a config)."""

    frequency_base: float = 10_000.0  # frequencies run from 1 towards 1 / frequency_base
    damping: float = DAMPING  # b, decay over the highest frequency of a band; where decays are learned, their start
    undamped_heads: int | None = None  # heads that do not decay; None means a quarter of them

    def __post_init__(self) -> None:
        check_range("frequency_base", self.frequency_base, above=1)
        check_range("damping", self.damping, above=0)
        check_range("undamped_heads", self.undamped_heads, at_least=0)


class PositionalAttention(Mixer):
    """Softmax attention with one of the schemes; other arguments as those of ``SoftmaxAttention``."""

    groups: Mapping[str, Group] = {"sde": "dynamics"}

    def __init__(
        self,
        hidden_size: int,
        n_heads: int,
        config: PositionalConfig | None = None,
        *,
        scheme: Scheme = "rope",
        **attention: Any,
    ) -> None:
        super().__init__()
        check_choice("scheme", scheme, get_args(Scheme))
        config = PositionalConfig() if config is None else config
        for name, schemes in _READ_BY.items():
            if scheme not in schemes:
                refuse_idle(config, (name,), f"with {scheme}; leave it out or take {', '.join(schemes)}")
        self.reader = SoftmaxAttention(hidden_size, n_heads, **attention)
        self.gives_precision, self.mixes_heads = self.reader.gives_precision, self.reader.mixes_heads
        self.n_heads, self.by_coordinate = n_heads, self.reader.by_coordinate
        self.sde = HeadPlaces(hidden_size // n_heads, n_heads, config, scheme)

    def forward(
        self,
        x: Tensor,
        precision: Tensor | None,
        context: SequenceContext,
        *,
        ramp: float = 1.0,
        source: Tensor | None = None,
    ) -> Observation:
        """Observe every position, as ``Mixer`` says."""
        q, k, v = self.reader.project(x, source)
        q, k, bias = self._placed(q, k, context, x.dtype)
        return self.reader.observe(q, k, v, precision, context, ramp=ramp, bias=bias)

    def attention(
        self,
        x: Tensor,
        precision: Tensor | None,
        context: SequenceContext,
        *,
        ramp: float = 1.0,
        source: Tensor | None = None,
    ) -> Tensor:
        """The weights behind ``forward``, as ``SoftmaxAttention.attention`` gives them."""
        q, k, _ = self.reader.project(x, source)
        q, k, bias = self._placed(q, k, context, x.dtype)
        return self.reader.weigh(q, k, precision, context, ramp=ramp, bias=bias)

    def _placed(
        self, q: Tensor, k: Tensor, context: SequenceContext, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What the scheme makes of them, in the type of the input: half precision is widened to be turned."""
        q, k, bias = self.sde(q, k, read_clock(context, dtype=q.dtype))
        return q.to(dtype), k.to(dtype), bias


class HeadPlaces(Constants):
    """What a scheme does to queries, keys and logits."""

    frequency: Tensor | None
    slope: Tensor | None

    def __init__(self, width: int, n_heads: int, config: PositionalConfig, scheme: Scheme) -> None:
        super().__init__()
        frequency, slope, self.decay = None, None, None
        if scheme == "alibi":
            slope = torch.pow(2.0, -8.0 * torch.arange(1, n_heads + 1) / n_heads)
        else:
            if width % 2:
                raise UserError(
                    f"a head of width {width} has a coordinate without a partner to turn with; give an even one"
                )
            in_bands = scheme == "sc_rope"
            frequency = frequency_range(n_heads, width // 2, config.frequency_base, in_bands=in_bands)
        if scheme in ("decayed_rope", "sc_rope"):
            start = spread_decays(n_heads, config.frequency_base, config.damping, config.undamped_heads)
            self.decay = HeadDecay(start, learned=scheme == "decayed_rope")
        self.register_buffer("frequency", frequency, persistent=False)
        self.register_buffer("slope", slope, persistent=False)

    @eagerly  # the compiler refuses views that are complex
    def forward(self, q: Tensor, k: Tensor, clock: Clock) -> tuple[Tensor, Tensor, Tensor | None]:
        """q and k turned, (B, H, T, K), and the bias of the logits, (B or 1, H, T, T)."""
        if self.frequency is not None:
            turn = turns(self.frequency, clock.query)
            q, k = (real(as_complex(x) * turn) for x in (q, k))
        slope = self.slope if self.decay is None else self.decay()
        return q, k, None if slope is None else -slope[:, None, None] * clock.lag.abs()[:, None]
