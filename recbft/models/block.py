"""One layer: a mixer observes, the residual connection updates, the feed-forward network predicts.

    x  = Norm(h)          observe   e, r = mixer(x, lam)
    h' = h + gain * e     update    lam' = lam + r           (gain 1 without a precision channel)  (3.1)
    h''= h' + W2 phi(W1 Norm(h') + b1) + b2                  predict lam''                         (4.1)

``layer: original`` is the block of the SASRec authors: queries from the normalised stream over raw keys and values, and
both residual connections start from the normalised stream. ``post_norm`` is BERT's: h' = Norm(h + e) with e observed
from h itself, h'' = Norm(h' + FFN(h')). Without a feed-forward network (canonical HSTU) a plain pre-norm layer ends
at h'; experts may take the network's place.

Source: Precision Tracked Transformer (arXiv 2605.18832), equations 1 to 4; SASRec (arXiv 1808.09781), section 3;
BERT4Rec (arXiv 1904.06690), section 3; HSTU (arXiv 2402.17152), section 3.
Shapes: B rows, T tokens, D model width, F feed-forward width, N tokens that are wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor, nn

from recbft.core import Belief, SequenceContext, pick
from recbft.errors import UserError
from recbft.kernels.dropout import Dropout
from recbft.kernels.layer_norm import LayerNorm
from recbft.mixers import Mixer, Observation
from recbft.mixers.interface import Group, TrainedPart
from recbft.models.feed_forward import Activation, FeedForward, FuzzyMoE, Prediction
from recbft.models.precision_channel import LayerPrecision
from recbft.models.update_rules import KalmanUpdate, without_precision

Layer = Literal["pre_norm", "post_norm", "original"]


class Block(TrainedPart):
    """Observe, update, predict.

    Args:
        precision: None for the plain residual layer.
        update: the rule of a layer with a precision channel; Kalman's unless given.
        hidden_size, inner_size: D and F; ``inner_size`` None leaves the network out of a plain pre-norm layer.
        dropout: on the innovation and on the feed-forward output; also inside the network when ``layer`` is original.
        innovation_dropout: on the innovation, where it is another.
        activation: of the feed-forward network; a precision channel needs gelu.
        layer: ``pre_norm``, ``post_norm`` or ``original``.
        moe: experts in the place of the feed-forward network of a pre-norm layer.
    """

    groups: Mapping[str, Group] = {"precision": "precision"}

    def __init__(
        self,
        mixer: Mixer,
        precision: LayerPrecision | None,
        *,
        hidden_size: int,
        inner_size: int | None,
        dropout: float,
        norm_eps: float,
        innovation_dropout: float | None = None,
        activation: Activation = "gelu",
        layer: Layer = "pre_norm",
        update: nn.Module | None = None,
        moe: FuzzyMoE | None = None,
    ) -> None:
        super().__init__()
        self.mixer, self.precision = mixer, precision
        self.update: nn.Module | None = None
        if precision is not None:
            self.update = KalmanUpdate() if update is None else update
            if isinstance(self.update, KalmanUpdate) and not mixer.gives_precision:
                raise without_precision(type(mixer).__name__)
        self.norm_mixer = LayerNorm(hidden_size, eps=norm_eps)
        self.norm_ffn = None if inner_size is None else LayerNorm(hidden_size, eps=norm_eps)
        self.moe = moe
        self.inner = self.outer = None
        if inner_size is not None and moe is None:
            self.inner, self.outer = nn.Linear(hidden_size, inner_size), nn.Linear(inner_size, hidden_size)
        self.dropout = Dropout(dropout)
        self.innovation_dropout = self.dropout if innovation_dropout is None else Dropout(innovation_dropout)
        self.activation, self.layer = activation, layer

    def forward(self, belief: Belief, context: SequenceContext, ramp: float, only: Tensor | None = None) -> Belief:
        """One layer's step; without a precision channel the incoming precision is passed on untouched.

        ``only``, for the last layer in evaluation, names the tokens that are wanted, as in ``Backbone.encode``.
        """
        if self.precision is None or self.update is None:
            return Belief(self._plain(belief.mean, context, ramp, only), pick(belief.precision, only))
        lam = self.precision.prior(belief.precision, context)
        x = self.norm_mixer(belief.mean)
        innovation, precision = self._observe(x, lam, context, ramp, only)
        mean, lam, x = (pick(part, only) for part in (belief.mean, lam, x))
        observation = Observation(self.innovation_dropout(innovation), precision)
        updated = self.update(Belief(mean, lam), observation, x, ramp)
        output, jacobian = self._predict(self._normed(updated.mean), context, only, self.precision)
        assert jacobian is not None
        mean = updated.mean + self.dropout(output)
        return Belief(mean, self.precision.predict(updated.precision, jacobian))

    @property
    def network(self) -> FeedForward | FuzzyMoE | None:
        """What predicts: one network, experts, or nothing."""
        if self.inner is None or self.outer is None:
            return self.moe
        inside = self.dropout if self.layer == "original" else None
        return FeedForward(self.inner, self.outer, self.activation, inside)

    def _plain(self, mean: Tensor, context: SequenceContext, ramp: float, only: Tensor | None) -> Tensor:
        if self.layer == "original":
            return self._original(mean, context, ramp, only)
        if self.layer == "post_norm":
            return self._post_norm(mean, context, ramp, only)
        observed = self._observe(self.norm_mixer(mean), None, context, ramp, only).innovation
        after: Tensor = pick(mean, only) + self.innovation_dropout(observed)
        if self.norm_ffn is None:
            return after
        predicted: Tensor = self.dropout(self._predict(self.norm_ffn(after), context, only).output)
        return after + predicted

    def _post_norm(self, mean: Tensor, context: SequenceContext, ramp: float, only: Tensor | None) -> Tensor:
        observed = self._observe(mean, None, context, ramp, only).innovation
        mean = self.norm_mixer(pick(mean, only) + self.dropout(observed))
        return self._normed(mean + self.dropout(self._predict(mean, context, only).output))

    def _original(self, mean: Tensor, context: SequenceContext, ramp: float, only: Tensor | None) -> Tensor:
        x = self.norm_mixer(mean)
        observed = self._observe(x, None, context, ramp, only, source=mean).innovation
        x = self._normed(pick(x, only) + self.dropout(observed))
        predicted: Tensor = self.dropout(self._predict(x, context, only).output)
        return x + predicted

    def _normed(self, mean: Tensor) -> Tensor:
        assert self.norm_ffn is not None
        normed: Tensor = self.norm_ffn(mean)
        return normed

    def _predict(
        self, x: Tensor, context: SequenceContext, only: Tensor | None, precision: LayerPrecision | None = None
    ) -> Prediction:
        assert self.network is not None
        return self.network.predict(x, context, precision, only)

    def _observe(
        self, x: Tensor, lam: Tensor | None, context: SequenceContext, ramp: float, only: Tensor | None, **more: Tensor
    ) -> Observation:
        """What the mixer observes, of the tokens ``only`` if that is all that is wanted."""
        if only is not None and self.mixer.takes_only:
            observed = self.mixer(x, lam, context, ramp=ramp, only=only, **more)
            return _checked(observed, (len(only), x.shape[-1]), self.mixer)
        observed = self.mixer(x, lam, context, ramp=ramp, **more)
        return _checked(observed, tuple(x.shape), self.mixer).at(only)


def _checked(observed: Observation, shape: tuple[int, ...], mixer: Mixer) -> Observation:
    """What a mixer of anyone's returned: a missing axis would be broadcast silently."""
    name = f"mixer {type(mixer).__name__}"
    if not isinstance(observed, Observation):
        raise UserError(f"{name} returns a {type(observed).__name__}; return Observation(innovation, precision)")
    for part, found in observed._asdict().items():
        if found is not None and tuple(found.shape) != shape:
            raise UserError(f"{name} returns {part} of shape {tuple(found.shape)}; return one of shape {shape}")
    return observed
