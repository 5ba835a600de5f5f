"""The user encoder for serving and export: padded item ids in, user vectors out, by plain operations of PyTorch.

A trained backbone in evaluation with all constants folded: the warm-up w, the precision per item (5.1) to (5.11), item
vectors (6.13), the factors of (3.6), (4.6) and (4.7), the mean Jacobian and the process noise of (4.3). No number is
read out of a tensor and no kernel is called, so that ``torch.export`` sees all of it. Of the last layer only the last
token is computed. The reference is ``Backbone.user_states``.

Shapes: B histories, T ids each, R tokens that read (T, or 1 in the last layer), H heads, K head width, D model width,
V items, C content width, L events.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbft.core import (
    Belief,
    SiluMoments,
    delta_precision,
    design_effect_precision,
    gelu_slope,
    kalman_update_ref,
    process_noise,
    propagated_variance,
    reml_naive_precision,
    reml_precision_ref,
    sandwich_precision_ref,
    scalar_log_precision,
)
from recbft.core.filter_step import FLOOR
from recbft.errors import UserError
from recbft.mixers import Observation
from recbft.mixers.attention import SoftmaxAttention
from recbft.mixers.interface import by_head, joined, projected
from recbft.mixers.pointwise import BUCKET_WIDTH, NUM_BUCKETS, PointwiseAttention
from recbft.mixers.value_unit import ValueUnit, unit_of
from recbft.models.backbone import Backbone
from recbft.models.block import Block
from recbft.models.contract import UserStates
from recbft.models.feed_forward import FeedForward
from recbft.models.join import Join
from recbft.models.precision_channel import LAM_MIN, LayerPrecision
from recbft.models.update_rules import KalmanUpdate

MOST_KEPT = 512  # tokens of a history, of whose pairs four grids are kept


def user_encoder(model: nn.Module) -> UserEncoder:
    """The user encoder of a trained model in evaluation, whose weights it shares where none is folded.

    Raises:
        UserError: the model has no such form, because of its kind or of a part of it.
    """
    if isinstance(model, Join):
        with_ones = model.item_table().bias is not None
        return UserEncoder([_BackboneEncoder(_checked(part)) for part in model.parts], with_ones=with_ones)
    backbone = _checked(model)
    return UserEncoder([_BackboneEncoder(backbone)], with_ones=backbone.item_table().bias is not None)


class UserEncoder(nn.Module):
    """User vectors whose products with the rows of ``item_vectors`` are scores, of one backbone or of a join's two.

    ``with_ones`` puts a 1 behind each vector, for the item biases.
    """

    def __init__(self, parts: list[_BackboneEncoder], *, with_ones: bool) -> None:
        super().__init__()
        self.parts, self.with_ones = nn.ModuleList(parts), with_ones
        self.reads_times = any(part.reads_times for part in parts)
        self.keeps_precision = any(part.precision is not None for part in parts)

    def forward(self, items: Tensor, times: Tensor | None = None) -> tuple[Tensor, ...]:
        """Encode histories of any length, of which the last events that the model reads are taken.

        Args:
            items: item indices, oldest first, (B, T); 0 is padding and may stand anywhere.
            times: of the events, (B, T), for a model that reads times.

        Returns:
            Vectors, (B, D or more), NaN where a row holds no item; and the mean precision of the state, (B,), where the
            model keeps one.
        """
        state, precision = self.states(items, times)
        if self.with_ones:
            state = torch.cat([state, torch.ones_like(state[:, :1])], dim=1)
        vector = state.masked_fill((items <= 0).all(dim=1, keepdim=True), math.nan)
        return (vector,) if precision is None else (vector, precision)

    def states(self, items: Tensor, times: Tensor | None = None) -> UserStates:
        """As the model's ``user_states``; arguments as those of ``forward``."""
        return self._states([part(items, times) for part in self.parts])

    def of_one(self, items: Tensor, times: Tensor | None = None) -> UserStates:
        """The same of one history without padding, (1, T), in less time."""
        parts = (part for part in self.parts if isinstance(part, _BackboneEncoder))
        return self._states([part.of_one(items, times) for part in parts])

    def _states(self, own: list[UserStates]) -> UserStates:
        if len(own) == 1:
            return own[0]
        precision = next((each.precision for each in own if each.precision is not None), None)
        return UserStates(torch.cat([each.state for each in own], dim=1), precision)


class _Tokens(NamedTuple):
    items: Tensor  # (B, T), with the mask at the end where there is one
    position: Tensor  # (B, T) 0 for the oldest event that is read
    valid: Tensor  # (B, T) bool, what is read
    last: Tensor | None  # (B, 1) column of the last one; None where it is the last column of all rows
    times: Tensor | None  # (B, T)


class _Reading(NamedTuple):
    """What tokens read: (B, T, T) of all, or (B, 1, T) of those ``at`` some columns."""

    allowed: Tensor  # 1 where a token may read another, else 0
    mask: Tensor  # 0, and -inf where not allowed
    lag: Tensor  # integers
    distance: Tensor  # the same as floats
    bucket: Tensor | None  # integers, (8.5)
    first: Tensor | None  # (B, 1) column of the first item; None where it is the first column of all rows
    of_last: bool = False
    at: Tensor | None = None  # (B, 1); None where the last tokens are those of the last column

    def corner(self, first: int, stop: int) -> _Reading:
        """Of a history alone: what its tokens from the ``first`` on read, where it has but ``stop`` tokens."""
        grids = (grid[:, first:stop, :stop] for grid in (self.allowed, self.mask, self.lag, self.distance))
        allowed, mask, lag, distance = grids
        return _Reading(allowed, mask, lag, distance, None, None, of_last=first > 0)

    def take(self, x: Tensor) -> Tensor:
        """Those of (B, T, D) that read."""
        return _last(x, self.at) if self.of_last else x


class _BackboneEncoder(nn.Module):
    """States of one backbone."""

    table: Tensor  # (V + 1, or V + 2 with a mask, D)
    precision: Tensor | None  # (V + 1 or V + 2,) before the first layer
    content: Tensor | None  # (V + 1, C) of (6.15)
    rates: Tensor | None  # (L,) rho^l of (6.15)

    def __init__(self, model: Backbone) -> None:
        super().__init__()
        self.scale, self.both_ways, self.positions = model.embedding_scale, model.both_ways, model.positions
        self.append, self.reads_times, self.num_items = model.append, model.reads_times, model.num_items
        self.max_length, self.num_events = model.max_length, model.max_length - (model.append is not None)
        self.position_embedding, self.norm_embedding = model.position_embedding, model.norm_embedding
        self.read_out, items = model.norm, model.item_belief
        self.precision_read_out, self.ramp = model.precision_read_out, float(model.ramp)
        self._whole: tuple[_Tokens, _Reading] | None = None
        with torch.no_grad():
            table = model.item_embedding.weight.detach()
            content = rates = precision = None
            if items is not None:
                table = items.vectors(table, items.counts)
                if items.num_events:
                    lag = torch.arange(items.num_events, device=table.device)
                    content, rates = items.content, items.decay ** lag.to(table.dtype)
            if model.item_precision is not None:
                every = torch.arange(len(table), device=table.device)
                precision = model.item_precision(every[None], table[None])[0, :, 0]
            for name, held in (("table", table), ("content", content), ("rates", rates), ("precision", precision)):
                self.register_buffer(name, held)
            self.layers = nn.ModuleList(_Layer(block, self.ramp) for block in model.blocks if isinstance(block, Block))

    def forward(self, items: Tensor, times: Tensor | None = None) -> UserStates:
        """Of padded histories, as ``UserEncoder``."""
        tokens = self._tokens(items, times)
        return self._states(tokens, self._reading(tokens), self._reading(tokens, of_last=True))

    def of_one(self, items: Tensor, times: Tensor | None = None) -> UserStates:
        """Of one history without padding, (1, T); what depends on T alone is kept."""
        if self.reads_times or self.max_length > MOST_KEPT:
            return self.forward(items, times)
        items, whole = items[:, -self.num_events :], self._whole
        if whole is None:  # of the longest history: those of others are its corners
            ones = items.new_ones(1, self.num_events)
            tokens = self._tokens(ones, None)._replace(last=None)
            whole = self._whole = tokens, self._reading(tokens)._replace(first=None)
        tokens, reading = whole
        if self.append is not None:
            items = torch.cat([items, tokens.items[:, -1:]], dim=1)
        T = items.shape[1]
        own = _Tokens(items, tokens.position[:, :T], tokens.valid[:, :T], None, None)
        every, latest = reading.corner(0, T), reading.corner(T - 1, T)
        return self._states(own, every, latest)

    def _states(self, tokens: _Tokens, every: _Reading, latest: _Reading) -> UserStates:
        embedded = F.embedding(tokens.items, self.table)
        age = None  # events that come later
        if self.content is not None or self.positions == "latest":
            age = _last(tokens.position[..., None], tokens.last)[..., 0] - tokens.position
        if self.position_embedding is None:
            mean = self.scale * embedded
        else:
            place = tokens.position if self.positions == "oldest" or age is None else age.clamp(min=0)
            mean = torch.add(F.embedding(place, self.position_embedding.weight), embedded, alpha=self.scale)
        if self.norm_embedding is not None:
            mean = _normed(self.norm_embedding, mean)
        belief = Belief(mean, mean if self.precision is None else self.precision[tokens.items][..., None])
        *earlier, final = self.layers
        for layer in earlier:
            belief = layer(belief, every)
        belief = final(belief, latest)
        state: Tensor = self.read_out(belief.mean)[:, 0]
        if self.precision_read_out is not None:
            state = self.precision_read_out.some(state, belief.precision[:, 0], self.ramp)  # (6.18)
        if self.content is not None and self.rates is not None and age is not None:
            there = tokens.valid & (age < len(self.rates)) & (tokens.items <= self.num_items)  # a mask is no item
            share = self.rates[age.clamp(0, len(self.rates) - 1)] * there
            held = share[:, None] @ F.embedding(tokens.items * there, self.content)  # (6.15)
            state = torch.cat([state, held[:, 0]], dim=1)
        return UserStates(state, None if self.precision is None else belief.precision[:, 0].mean(dim=-1))

    def _tokens(self, items: Tensor, times: Tensor | None) -> _Tokens:
        valid, items = items > 0, items.clamp(min=0)
        count = valid.cumsum(dim=1)  # of the events up to each column
        total = count[:, -1:]
        left_out = (total - self.num_events).clamp(min=0)  # events that are earlier than what is read
        valid = valid & (count > left_out)
        position = (count - 1 - left_out).clamp(min=0)
        if self.append is None:  # of equal counts ``argmax`` finds the first
            return _Tokens(items, position, valid, count.argmax(dim=1, keepdim=True), times)
        items = torch.cat([items, torch.full_like(total, self.append)], dim=1)
        position = torch.cat([position, total - left_out], dim=1)
        return _Tokens(items, position, torch.cat([valid, total >= 0], dim=1), None, times)

    def _reading(self, tokens: _Tokens, *, of_last: bool = False) -> _Reading:
        position, valid, times, at = tokens.position, tokens.valid, tokens.times, tokens.last
        own, real = (_last(x[..., None], at)[..., 0] if of_last else x for x in (position, valid))
        allowed = valid[:, None, :]
        if not self.both_ways:
            allowed = allowed & (position[:, None, :] <= own[:, :, None])
        allowed = allowed | ~real[:, :, None]  # what padding reads, nobody does
        lag = (own[:, :, None] - position[:, None, :]).abs()
        bucket = None
        if self.reads_times and times is not None:
            read_at = _last(times[..., None], at)[..., 0] if of_last else times
            elapsed = (read_at[:, :, None] - times[:, None, :]).abs().clamp(min=1).float()
            bucket = (elapsed.log() / BUCKET_WIDTH).long().clamp(max=NUM_BUCKETS - 1)
        distance = lag.to(self.table.dtype)
        mask = torch.zeros_like(distance).masked_fill(~allowed, -math.inf)
        first = valid.long().argmax(dim=1, keepdim=True)
        return _Reading(allowed.to(mask.dtype), mask, lag, distance, bucket, first, of_last, at)


class _Layer(nn.Module):
    """``Block`` without what it does in training."""

    def __init__(self, block: Block, ramp: float) -> None:
        super().__init__()
        self.kind, self.norm_mixer, self.norm_ffn = block.layer, block.norm_mixer, block.norm_ffn
        mixer, network = block.mixer, block.network
        assert isinstance(mixer, (SoftmaxAttention, PointwiseAttention))
        self.reader: nn.Module = (
            _SoftmaxReader(mixer, ramp) if isinstance(mixer, SoftmaxAttention) else _PointwiseReader(mixer, ramp)
        )
        self.channel: _Channel | None = None
        self.inner = self.outer = None
        self.relu = False
        if isinstance(network, FeedForward):
            self.inner, self.outer, self.relu = network.inner, network.outer, network.activation == "relu"
            if block.precision is not None:
                self.channel = _Channel(block.precision, block.update, network, ramp)

    def forward(self, belief: Belief, reading: _Reading) -> Belief:
        """The belief of those that read after the layer, (B, R, D)."""
        mean, lam = belief
        own = reading.take(mean)
        if self.kind == "post_norm":
            x = _normed(self.norm_mixer, own + self.reader(mean, mean, None, reading).innovation)
            return Belief(_normed(self.norm_ffn, x + self._network(x)), lam)
        x = _normed(self.norm_mixer, mean)
        if self.kind == "original":
            observed = self.reader(x, mean, None, reading).innovation
            x = _normed(self.norm_ffn, reading.take(x) + observed)
            return Belief(x + self._network(x), lam)
        if self.channel is None:
            mean = own + self.reader(x, x, None, reading).innovation
            return Belief(mean if self.inner is None else mean + self._network(_normed(self.norm_ffn, mean)), lam)
        lam = self.channel.prior(lam)
        observed = self.reader(x, x, lam, reading)
        mean, lam = self.channel.update(Belief(own, reading.take(lam)), observed, x, reading)
        a = _linear(self.inner, _normed(self.norm_ffn, mean))
        return Belief(mean + _linear(self.outer, F.gelu(a)), self.channel.predict(lam, a))

    def _network(self, x: Tensor) -> Tensor:
        a = _linear(self.inner, x)
        return _linear(self.outer, F.relu(a) if self.relu else F.gelu(a))


def _unit(unit: ValueUnit | None) -> float:
    """d of (2.15), 1 where values are told as they are; a mixer without an estimator has none."""
    return 1.0 if unit is None else float(unit_of(unit.variance))


class _SoftmaxReader(nn.Module):
    """``SoftmaxAttention``."""

    def __init__(self, mixer: SoftmaxAttention, ramp: float) -> None:
        super().__init__()
        self.n_heads, self.ramp, self.estimator, self.out = mixer.n_heads, ramp, mixer.estimator, mixer.out
        self.cap, self.prior_dof, self.prior_variance = mixer.lam_max, mixer.prior_dof, mixer.prior_variance
        self.unit = _unit(mixer.unit)
        self.query = _scaled(mixer.query, math.sqrt(mixer.n_heads / mixer.query.out_features))
        self.key_value = _beside(mixer.key, mixer.value)
        decay = mixer.decay_logit
        self.log_decay = None if decay is None else ramp * float(F.logsigmoid(decay))

    def forward(self, x: Tensor, source: Tensor, lam: Tensor | None, reading: _Reading) -> Observation:
        """Arguments as those of ``Mixer.forward``."""
        q = by_head(_linear(self.query, reading.take(x)), self.n_heads)
        k, v = by_head(_linear(self.key_value, source), 2 * self.n_heads).chunk(2, dim=1)
        v = v / self.unit  # (2.15)
        bias = reading.mask
        if self.log_decay is not None:
            bias = torch.add(bias, reading.distance, alpha=self.log_decay)
        if lam is not None:
            bias = torch.add(bias, scalar_log_precision(lam)[:, None], alpha=self.ramp)
        weights = torch.softmax(q @ k.mT + bias[:, None], dim=-1)  # (2.3)
        if self.estimator is None:
            return projected(Observation(joined(weights @ v), None), self.out, cap=self.cap)
        if reading.first is None:
            centre = v[:, :, :1]
        else:
            centre = v.gather(2, reading.first[:, None, :, None].expand(-1, v.shape[1], -1, v.shape[3]))
        u = v - centre
        first, second = (weights @ torch.cat([u, u.square()], dim=-1)).chunk(2, dim=-1)
        precision = self._estimate(weights, u, first, second, lam, reading)
        found = Observation((centre + first) * self.unit, precision.expand_as(first))
        return projected(found.each(joined), self.out, cap=self.cap)

    def _estimate(
        self, weights: Tensor, u: Tensor, first: Tensor, second: Tensor, lam: Tensor | None, reading: _Reading
    ) -> Tensor:
        """Observation precision, (B, H, R, K) or (B, H, R, 1), from sums over the centred values u."""
        squares = weights.square()
        prior = {"prior_scale": self.prior_variance, "prior_dof": self.prior_dof, "cap": self.cap}
        if self.estimator == "sandwich":
            sums = squares.sum(dim=-1), squares @ u, squares @ u.square()
            return sandwich_precision_ref(SiluMoments(first, weights.sum(dim=-1), *sums), cap=self.cap)
        if self.estimator == "delta":
            assert lam is not None
            return delta_precision(propagated_variance(weights, lam.mean(dim=-1)), cap=self.cap)
        n = squares.sum(dim=-1).reciprocal()  # (2.5)
        if self.estimator == "design_effect":
            among = (reading.allowed / reading.allowed.sum(dim=-1, keepdim=True))[:, None]
            spread = (among @ u.square() - (among @ u).square()).clamp(min=0)
            return design_effect_precision(spread, n, **prior)
        S = torch.addcmul(second, first, first, value=-1).clamp(min=0)  # (2.6)
        if self.estimator == "reml_naive":
            return reml_naive_precision(S, n, cap=self.cap)
        return reml_precision_ref(S, n, **prior)


class _PointwiseReader(nn.Module):
    """``PointwiseAttention``."""

    lag_bias: Tensor  # (N,)
    time_bias: Tensor | None  # of each bucket

    def __init__(self, mixer: PointwiseAttention, ramp: float) -> None:
        super().__init__()
        self.n_heads, self.length, self.ramp, self.estimator = mixer.n_heads, mixer.length, ramp, mixer.estimator
        self.cap, self.centre, self.norm, self.out = mixer.lam_max, mixer.centre, mixer.norm, mixer.out
        self.unit = _unit(mixer.unit)
        self.gate_query, self.key_value = _beside(mixer.gate, mixer.query), _beside(mixer.key, mixer.value)
        lag_bias = mixer.position_table[:, 0].detach()
        if mixer.decay_logit is not None:
            lags = torch.arange(len(lag_bias), dtype=lag_bias.dtype, device=lag_bias.device)
            lag_bias = lag_bias + ramp * F.logsigmoid(mixer.decay_logit.detach()) * lags
        self.register_buffer("lag_bias", lag_bias)
        self.register_buffer("time_bias", None if mixer.time_table is None else mixer.time_table[:, 0].detach())

    def forward(self, x: Tensor, source: Tensor, lam: Tensor | None, reading: _Reading) -> Observation:
        """Arguments as those of ``Mixer.forward``."""
        gate, q = F.silu(_linear(self.gate_query, reading.take(x))).chunk(2, dim=-1)
        k, v = by_head(F.silu(_linear(self.key_value, source)), 2 * self.n_heads).chunk(2, dim=1)
        q = by_head(q, self.n_heads) * (1 / math.sqrt(k.shape[-1]))
        bias = self.lag_bias[reading.lag.clamp(max=len(self.lag_bias) - 1)]  # padding may be farther off
        if self.time_bias is not None and reading.bucket is not None:
            bias = bias + self.time_bias[reading.bucket]
        if lam is not None:
            bias = torch.add(bias, scalar_log_precision(lam)[:, None], alpha=self.ramp)
        weights = F.silu(q @ k.mT + bias[:, None]) * (reading.allowed[:, None] / self.length)  # (8.3)
        mean = weights @ v
        precision = None
        if self.estimator is not None:
            squares = weights.square()
            u = v / self.unit  # (2.15)
            sums = weights.sum(dim=-1), squares.sum(dim=-1), squares @ u, squares @ u.square()
            moments = SiluMoments(mean / self.unit, *sums)
            precision = joined(sandwich_precision_ref(moments, cap=self.cap, centre=self.centre))
        innovation = _normed(self.norm, joined(mean)) * gate
        return projected(Observation(innovation, precision), self.out, cap=self.cap)  # (8.4)


class _Channel(nn.Module):
    """``LayerPrecision`` and the update rule of a layer."""

    slope: Tensor  # (1 + J)^2 where J is the same for all tokens; (D,) or a number
    noise: Tensor  # Q of (4.3), (D,) or a number
    left: Tensor | None  # the factors of (4.5), (D, r); None where ``right`` is all of C
    right: Tensor | None  # (F, r), or (F, D)

    def __init__(self, precision: LayerPrecision, update: nn.Module | None, network: FeedForward, ramp: float) -> None:
        super().__init__()
        core, mean = precision.core, precision.mean_jacobian
        self.ramp, self.cap, self.factor, self.scale = ramp, precision.lam_max, None, None
        self.rule = None if isinstance(update, KalmanUpdate) else update
        if precision.log_kappa is not None:  # (3.6)
            self.scale = float(precision.log_kappa.exp() * precision.first_precision / precision.mean_precision)
        if core.propagation == "discount":
            self.factor = float(torch.sigmoid(precision.discount_logit))
        if core.propagation == "decay":
            self.factor = float(torch.exp(-precision.decay_rate))
        logits, mode = precision.noise_logits, core.jacobian_in_evaluation
        self.register_buffer("noise", mean.new_zeros(()) if logits is None else process_noise(logits, core.q_max))
        self.register_buffer("slope", ((1 + mean) if mode == "running_mean" else mean.new_ones(())) ** 2)
        self.slope.clamp_(min=FLOOR)
        left = right = None
        if self.factor is None and mode in ("exact", "low_rank"):
            left, right = precision.slope_factors(network.inner.weight, network.outer.weight)
        self.register_buffer("left", left)
        self.register_buffer("right", right)

    def prior(self, lam: Tensor) -> Tensor:
        """Equation (3.6)."""
        return lam if self.scale is None else (self.scale * lam).clamp(LAM_MIN, self.cap)

    def update(self, belief: Belief, observed: Observation, x: Tensor, reading: _Reading) -> Belief:
        """Equations (3.1) to (3.5)."""
        if self.rule is not None:
            found = self.rule(belief, observed, reading.take(x), self.ramp)
            return Belief(found.mean, found.precision)
        assert observed.precision is not None
        return kalman_update_ref(belief, observed.innovation, observed.precision, ramp=self.ramp)[0]

    def predict(self, lam: Tensor, a: Tensor) -> Tensor:
        """Equations (4.3), (4.6) and (4.7), from the network's pre-activation, (B, R, F)."""
        if self.factor is not None:
            return (self.factor * lam).clamp(LAM_MIN, self.cap)
        slope = self.slope
        if self.right is not None:
            reduced = gelu_slope(a) @ self.right
            slope = (1 + (reduced if self.left is None else reduced @ self.left.T)).square().clamp(min=FLOOR)
        return (lam / (slope + self.noise * lam)).clamp(LAM_MIN, self.cap)


def _checked(model: object) -> Backbone:
    """The model, if all of it has the form that is here."""
    instead = "take the vectors of Recommender.user_vectors and item_vectors in its place"
    if not isinstance(model, Backbone):
        raise UserError(f"a {type(model).__name__} has no encoder of its own; {instead}")
    if model.shows_target_time:
        raise UserError("this model was trained with show_target_time: true, the time of the next event; it has no use")
    if model.reads_reliability:
        raise UserError(f"backbone.reads_reliability has no form for export; {instead}")
    for block in model.blocks:
        assert isinstance(block, Block)
        mixer = block.mixer
        if not isinstance(mixer, (SoftmaxAttention, PointwiseAttention)):
            raise UserError(f"mixer {type(mixer).__name__} has no form for export, as attention has; {instead}")
        if mixer.by_coordinate:
            raise UserError(f"core.kriging per_dimension has no form for export, as scalar has; {instead}")
        if block.moe is not None:
            raise UserError(f"experts have no form for export, as one network has; {instead}")
    return model


def _last(x: Tensor, at: Tensor | None) -> Tensor:
    """The column ``at``, (B, 1), of each row of (B, T, D), or the last column."""
    return x[:, -1:] if at is None else x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))


def _normed(norm: nn.LayerNorm | None, x: Tensor) -> Tensor:
    assert norm is not None
    return torch.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def _linear(layer: nn.Linear | None, x: Tensor) -> Tensor:
    assert layer is not None
    return F.linear(x, layer.weight, layer.bias)


def _beside(*maps: nn.Linear) -> nn.Linear:
    """One linear map that gives what several give, side by side."""
    weight = torch.cat([each.weight for each in maps])
    joint = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    joint.weight = nn.Parameter(weight, requires_grad=False)
    joint.bias = nn.Parameter(torch.cat([each.bias for each in maps]), requires_grad=False)
    return joint


def _scaled(query: nn.Linear, by: float) -> nn.Linear:
    """A linear map times a number."""
    scaled = _beside(query)
    scaled.weight.mul_(by)
    scaled.bias.mul_(by)
    return scaled
