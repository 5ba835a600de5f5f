"""One layer: a mixer observes, the residual connection updates, the feed-forward network predicts.

    x  = Norm(h)          observe   e, r = mixer(x, lam)
    h' = h + gain * e     update    lam' = lam + r           (gain 1 without a precision channel)
    h''= h' + W2 phi(W1 Norm(h') + b1) + b2                  predict lam''

``layer: original`` is the block of the SASRec authors: queries from the normalised stream over raw keys and values, and
both residual connections start from the normalised stream.

Source: Precision Tracked Transformer (arXiv 2605.18832), equations 1 to 4; SASRec (arXiv 1808.09781), section 3.
Shapes: B rows, T tokens, D model width, F feed-forward width.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from recbft.core import Belief, SequenceContext
from recbft.kernels.dropout import Dropout
from recbft.kernels.filter_step import kalman_update
from recbft.mixers import SoftmaxAttention
from recbft.models.precision_channel import LayerPrecision


class Block(nn.Module):
    """Observe, update, predict.

    Args:
        mixer: what moves information along T.
        precision: the layer's precision channel, or None for the plain residual layer.
        hidden_size, inner_size: D and F.
        dropout: on the innovation and on the feed-forward output; also inside the network when ``layer`` is original.
        activation: of the feed-forward network; a precision channel needs gelu.
        layer: ``pre_norm`` or ``original``.
    """

    def __init__(
        self,
        mixer: SoftmaxAttention,
        precision: LayerPrecision | None,
        *,
        hidden_size: int,
        inner_size: int,
        dropout: float,
        norm_eps: float,
        activation: Literal["gelu", "relu"] = "gelu",
        layer: Literal["pre_norm", "original"] = "pre_norm",
    ) -> None:
        super().__init__()
        assert precision is None or (activation == "gelu" and layer == "pre_norm")
        self.mixer, self.precision = mixer, precision
        self.norm_mixer = nn.LayerNorm(hidden_size, eps=norm_eps)
        self.norm_ffn = nn.LayerNorm(hidden_size, eps=norm_eps)
        self.inner = nn.Linear(hidden_size, inner_size)
        self.outer = nn.Linear(inner_size, hidden_size)
        self.dropout = Dropout(dropout)
        self.activation, self.original = activation, layer == "original"

    def forward(self, belief: Belief, context: SequenceContext, ramp: float) -> Belief:
        """One layer's step; without a precision channel the incoming precision is passed on untouched."""
        if self.precision is None:
            return Belief(self._plain(belief.mean, context, ramp), belief.precision)
        lam = self.precision.prior(belief.precision, context)
        observation = self.mixer(self.norm_mixer(belief.mean), lam, context, ramp=ramp)
        innovation = self.dropout(observation.innovation)
        updated = kalman_update(Belief(belief.mean, lam), innovation, observation.precision, ramp=ramp)
        a = self.inner(self.norm_ffn(updated.mean))
        hidden, jacobian = self.precision.activate(a, self.inner.weight, self.outer.weight, context)
        mean = updated.mean + self.dropout(self.outer(hidden))
        return Belief(mean, self.precision.predict(updated.precision, jacobian))

    def _plain(self, mean: Tensor, context: SequenceContext, ramp: float) -> Tensor:
        x = self.norm_mixer(mean)
        source, stay = (mean, x) if self.original else (x, mean)
        observation = self.mixer(x, None, context, ramp=ramp, source=source)
        mean = stay + self.dropout(observation.innovation)
        x = self.norm_ffn(mean)
        hidden = F.gelu(self.inner(x)) if self.activation == "gelu" else F.relu(self.inner(x))
        if self.original:
            hidden = self.dropout(hidden)
        step: Tensor = self.dropout(self.outer(hidden))
        return (x if self.original else mean) + step
