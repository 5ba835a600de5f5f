"""Spectral mixing: a low-pass filter over the history, joined with attention.

    low_t       = sum_{j <= t} k(t - j) x_j,    k(d) = (1/N) sum_{|f| <= h} cos(2 pi f d / N)              (9.42)
    filtered    = low + beta^2 (x - low),       beta a learned vector                                      (9.43)
    innovation  = W_out (alpha filtered + (1 - alpha) attention(x)),  or without the map                   (9.44)

k is the low-pass filter that keeps the 2 h + 1 lowest of the N frequencies of a window of N events. BSARec takes it by
a Fourier transform of the window, which is circular: tokens read what comes after them, so that the loss may sit at the
window's last token alone. (9.42) reads no later token. The two are equal at the last token of a window, so that every
token here has the filter that BSARec has where it predicts. A layer that looks both ways reads the whole history, with
k of the distance.

The observation precision is that of the attention.

Source: Shin et al., An Attentive Inductive Bias for Sequential Recommendation beyond the Self-Attention
(arXiv 2312.10325), sections 4.1 and 4.2.
Shapes: B rows, T tokens, D model width, H heads, N longest history.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recbft.config.fields import check_range
from recbft.core import SequenceContext, pick
from recbft.mixers.attention import SoftmaxAttention
from recbft.mixers.interface import Mixer, MixerOptions, Observation, projected


@dataclass(frozen=True, kw_only=True)
class SpectralConfig(MixerOptions):
    """The filter and its share (the ``mixing`` section of a config)."""

    share: float = 0.7  # alpha of (9.44)
    frequencies: int = 2  # h of (9.42), beside the constant: 2 h + 1 of N are kept

    def __post_init__(self) -> None:
        check_range("share", self.share, at_least=0, at_most=1)
        check_range("frequencies", self.frequencies, at_least=0)


class SpectralMixer(Mixer):
    """Equations (9.42) to (9.44) over a packed batch.

    Args:
        config: the filter and its share.
        length: N, the longest history.
        output_projection: W_out.
        attention: arguments of ``SoftmaxAttention``.
    """

    takes_only = True

    def __init__(
        self,
        hidden_size: int,
        n_heads: int,
        config: SpectralConfig | None = None,
        *,
        length: int = 50,
        output_projection: bool = False,
        lam_max: float = 100.0,
        **attention: Any,
    ) -> None:
        super().__init__()
        self.config = SpectralConfig() if config is None else config
        self.attend = SoftmaxAttention(hidden_size, n_heads, lam_max=lam_max, **attention)
        self.n_heads, self.by_coordinate = n_heads, self.attend.by_coordinate
        self.gives_precision, self.mixes_heads = self.attend.gives_precision, output_projection
        self.length, self.lam_max = length, lam_max
        self.high_pass = nn.Parameter(torch.ones(hidden_size))  # beta: at 1 nothing is filtered
        self.out = nn.Linear(hidden_size, hidden_size) if output_projection else None

    def forward(
        self,
        x: Tensor,
        precision: Tensor | None,
        context: SequenceContext,
        *,
        ramp: float = 1.0,
        source: Tensor | None = None,
        only: Tensor | None = None,
    ) -> Observation:
        """Observe every position, or the tokens ``only``, as ``Mixer`` says."""
        read = x if source is None else source
        low = self.weights(context, x.dtype) @ read  # (9.42)
        filtered = pick(low + self.high_pass.square() * (read - low), only)  # (9.43)
        found, own = self.attend(x, precision, context, ramp=ramp, source=source, only=only)
        mixed = self.config.share * filtered + (1 - self.config.share) * found  # (9.44)
        return projected(Observation(mixed, own), self.out, cap=self.lam_max)

    def weights(self, context: SequenceContext, dtype: torch.dtype) -> Tensor:
        """k of (9.42) for every pair of tokens, (B, T, T), zero where a token may not read."""
        N, h = self.length, self.config.frequencies

        def make() -> Tensor:
            angle = context.lag.to(torch.float64) * (2 * math.pi / N)
            k = torch.stack([(2 - (f == 0)) * (f * angle).cos() for f in range(min(h, (N - 1) // 2) + 1)]).sum(0) / N
            return (k * context.allowed).to(dtype)

        return context.keep(("low-pass", N, h, dtype), make)

    def attention(self, *seen: Any, **how: Any) -> Tensor:
        """The weights of the attention alone, as ``SoftmaxAttention.attention`` gives them."""
        return self.attend.attention(*seen, **how)

    @property
    def recency_decay(self) -> Tensor | None:
        """rho of the attention."""
        return self.attend.recency_decay
