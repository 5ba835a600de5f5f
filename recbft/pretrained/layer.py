"""A pretrained decoder layer with a precision channel: its own modules observe, update and predict.

    x  = Norm(h)          e = W_o (sum_j a_tj v_j)       r from the weights a, through W_o       (2.2) to (2.8), (2.13)
    h' = h + gain * e     lam' = lam + r                 gain 1 at warm-up 0                     (3.1), (3.2)
    h''= h' + W2 (phi(Wg x') * (Wu x')),  x' = Norm(h')  lam'' from the slope of the network     (4.3), (4.8)

At warm-up 0 the layer calls the model's own attention, so that its output is the original's to the last bit. Above it
the logits have the bias w log lbar_j of (2.2), which attention of others does not take, and the mean comes from
``kernels.softmax_moments``, in the pass that estimates r.

A key's log lbar_j is kept in the cache as one more column of its values: what crops, reorders or offloads a cache needs
to know nothing of precision.

Source: Precision Tracked Transformer (arXiv 2605.18832), section 5.3 and appendix O.
Shapes: B rows, T tokens that are read now, S keys, D model width, H heads, K head width, F feed-forward width.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from recbft.autograd.boundaries import HALVES, in_full_precision
from recbft.core import (
    Belief,
    SequenceContext,
    gated_jacobian,
    projected_precision,
    ramped,
    scalar_log_precision,
    softmax_moments_ref,
)
from recbft.errors import UserError
from recbft.kernels.filter_step import reml_precision
from recbft.kernels.softmax_moments import softmax_reml
from recbft.mixers import Observation
from recbft.mixers.interface import Group, TrainedPart, joined
from recbft.models.feed_forward import Prediction
from recbft.models.precision_channel import CoreConfig, ItemPrecision, LayerPrecision
from recbft.models.update_rules import make_update

ATTENTION = ("sdpa", "eager")  # whose masks are understood here
_jacobian = in_full_precision(gated_jacobian)


class Flow(threading.local):
    """What goes from layer to layer beside the hidden states; a pass in another thread has its own."""

    ramp: float = 0.0
    precision: Tensor | None = None  # (B, T, D), of the last layer once a pass is over
    context: SequenceContext | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Flow, ()  # a copy starts empty: what flows belongs to one pass


@dataclass(frozen=True, eq=False)
class Seen(SequenceContext):
    """One history per row, read as a mask of the model's says."""

    readable: Tensor = field(kw_only=True)  # (B or 1, T, S) bool

    @cached_property
    def allowed(self) -> Tensor:
        """(B or 1, T, S) bool."""
        return self.readable


class Start(TrainedPart):
    """Precision before the first layer, (5.1), and the warm-up w, which grows with every pass in training up to 1.

    All tokens count as equally frequent: the paper knows of no count that tells how reliable a token is.
    """

    groups: Mapping[str, Group] = {"initial": "precision"}
    ramp: Tensor

    def __init__(self, core: CoreConfig, warmup: int, *, hidden_size: int, head_width: int) -> None:
        super().__init__()
        self.warmup = warmup
        alike = torch.ones(1, dtype=torch.int64)
        self.initial = ItemPrecision(core, alike, num_items=0, hidden_size=hidden_size, head_width=head_width)
        if core.initial == "hybrid":
            nn.init.zeros_(self.initial.read[2].weight)  # type: ignore[arg-type]  # softplus starts at ln 2
        self.register_buffer("ramp", torch.zeros(()))

    def forward(self, embedded: Tensor) -> tuple[Tensor, float]:
        """Precision of every token, (B, T, D), from its embedding, and w of this pass."""
        ramp = float(self.ramp)
        if self.training and torch.is_grad_enabled():
            if self.ramp.dtype in HALVES:
                raise UserError(
                    f"precision is trained in float32 or float64, got {self.ramp.dtype}; leave the model in float32 "
                    "and train it under autocast (bf16=True of the Trainer), or convert it before track_precision"
                )
            if self.warmup:
                self.ramp.fill_(min(1.0, round(ramp * self.warmup + 1) / self.warmup))
        token = torch.zeros(embedded.shape[:-1], dtype=torch.int64, device=embedded.device)
        precision: Tensor = self.initial(token, embedded.to(self.ramp.dtype))
        return precision.to(_wide(embedded)).expand(embedded.shape), ramp


class PrecisionLayer(nn.Module):
    """The modules of a pretrained decoder layer, with a precision channel beside them.

    Args:
        layer: whose modules these are from now on, too.
        config: of the model; it names the kind of attention.
        flow: one that the layers of a model share.
        is_first, is_last: among them.
    """

    self_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any
    update: Any

    def __init__(
        self, layer: Any, config: Any, core: CoreConfig, warmup: int, flow: Flow, *, is_first: bool, is_last: bool
    ) -> None:
        nn.Module.__init__(self)
        for name, module in layer.named_children():
            self.add_module(name, module)
        self.config, self.flow, self.is_last = config, flow, is_last
        attention = layer.self_attn
        D, K = attention.o_proj.out_features, attention.head_dim
        self.prior: dict[str, Any] = {
            "prior_scale": 1 / K if core.fixed_variance is None else core.fixed_variance,
            "prior_dof": core.prior_dof,
            "cap": core.lam_max,
        }
        self.start = Start(core, warmup, hidden_size=D, head_width=K) if is_first else None
        self.precision = LayerPrecision(core, hidden_size=D, head_width=K, is_last=is_last)
        self.update = make_update(core, hidden_size=D, n_heads=attention.o_proj.in_features // K)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **more: Any,
    ) -> Tensor:
        """As the layer that this was made of; ``past_key_values`` is what earlier releases call the cache."""
        flow = self.flow
        if self.start is not None:
            self._check(more)
            flow.precision, flow.ramp = self.start(hidden_states)
            flow.context = _context(attention_mask, hidden_states)
        context = flow.context
        assert flow.precision is not None and context is not None and position_embeddings is not None
        lam = self.precision.prior(flow.precision, context)
        x = self.input_layernorm(hidden_states)
        q, k, v, log_precision = self._project(
            x, scalar_log_precision(lam), position_embeddings, past_key_values if cache is None else cache
        )
        mean, r = self._moments(q, k, v, attention_mask, log_precision)
        if flow.ramp == 0:
            mean = self._attend(q, k, v, attention_mask, more)
        weight = self.self_attn.o_proj.weight.to(r.dtype)
        observation = Observation(
            self.self_attn.o_proj(mean.to(x.dtype)).to(lam.dtype),
            projected_precision(r, weight, cap=self.prior["cap"]).to(lam.dtype),
        )
        updated = self.update(Belief(hidden_states.to(lam.dtype), lam), observation, x, flow.ramp)
        after: Tensor = updated.mean.to(hidden_states.dtype)
        output, jacobian = self._predict(self.post_attention_layernorm(after), context)
        assert jacobian is not None
        flow.precision = self.precision.predict(updated.precision, jacobian)
        if self.is_last:
            flow.precision, flow.context = flow.precision.detach(), None
        return after + output

    def _check(self, more: dict[str, Any]) -> None:
        if (kind := self.config._attn_implementation) not in ATTENTION:
            raise UserError(f"attention {kind!r} tells no weights; model.set_attn_implementation({ATTENTION[0]!r})")
        if more.get("output_attentions"):
            raise UserError("a model that tracks precision returns no attention weights; leave output_attentions out")

    def _project(
        self, x: Tensor, log_precision: Tensor, turns: tuple[Tensor, Tensor], cache: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q (B, H, T, K), and of all keys k, v (B, H', S, K), H' a divisor of H, and log lbar (B, S)."""
        own = self.self_attn
        maps = (own.q_proj, own.k_proj, own.v_proj)
        q, k, v = (y(x).view(*x.shape[:-1], -1, own.head_dim).transpose(1, 2) for y in maps)
        q, k = _source(own).apply_rotary_pos_emb(q, k, *turns)
        if cache is None:
            return q, k, v, log_precision
        column = log_precision.to(v.dtype)[:, None, :, None].expand(*v.shape[:-1], 1)
        k, v = cache.update(k, torch.cat([v, column], dim=-1), own.layer_idx)
        return q, k, v[..., :-1].contiguous(), v[:, 0, :, -1].to(log_precision.dtype)

    def _moments(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, log_precision: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Mean and observation precision, heads joined, (B, T, H K) each."""
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], dim=1) for y in (k, v))
        ramp = self.flow.ramp
        terms: dict[str, Any] = {
            "log_precision": ramped(log_precision, ramp) if ramp else None,
            "dropout": self.self_attn.attention_dropout if self.training else 0.0,
        }
        (T, S), context = (q.shape[2], k.shape[2]), self.flow.context
        if mask is None and T == S:
            assert context is not None
            mean, r = softmax_reml(q, k, v, context, **terms, **self.prior)
        else:
            mean, r = _masked_moments(q, k, v, mask, terms, self.prior)
        return joined(mean), joined(r)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, more: dict[str, Any]) -> Tensor:
        """The mean by the model's own attention, (B, T, H K)."""
        own = self.self_attn
        kind, source = self.config._attn_implementation, _source(own)
        attend = source.eager_attention_forward if kind == "eager" else source.ALL_ATTENTION_FUNCTIONS[kind]
        dropout = own.attention_dropout if self.training else 0.0
        mean: Tensor = attend(own, q, k, v, mask, dropout=dropout, scaling=own.scaling, **more)[0]
        return mean.reshape(*mean.shape[:2], -1).contiguous()

    def _predict(self, x: Tensor, context: SequenceContext) -> Prediction:
        """The gated network, and (4.8) as the channel takes it."""
        network, channel = self.mlp, self.precision
        output: Tensor = network(x)
        if not channel.needs_jacobian:
            return Prediction(output, channel.take(None, context))
        detached = channel.mode == "running_mean" or channel.core.jacobian_detach
        with torch.set_grad_enabled(torch.is_grad_enabled() and not detached):
            a, up = network.gate_proj(x), network.up_proj(x)
            activated, slope = torch.func.jvp(network.act_fn, (a,), (torch.ones_like(a),))[:2]
            maps = (network.gate_proj, network.up_proj, network.down_proj)
            terms = (activated, slope, up, *(y.weight.detach() for y in maps))
            jacobian = _jacobian(*(y.to(_wide(x)) for y in terms))
        return Prediction(output, channel.take(jacobian, context))


@in_full_precision
def _masked_moments(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, terms: dict[str, Any], prior: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Mean and precision, (B, H, T, K) each, where tokens read what a mask says; the weights are written out.

    Args:
        q: (B, H, T, K).
        k, v: (B, H, S, K).
        mask: (B or 1, 1, T, S), True or 0 where a token reads a key, False or the lowest number where it does not; a
            bias elsewhere. None is what it is to PyTorch's attention: one token reads all keys, several read the first
            keys up to their own place.
    """
    q, k, v = (y.to(_wide(y)) for y in (q, k, v))
    B, _, T, _ = q.shape
    S, bias = k.shape[2], None
    if mask is None:
        readable = torch.ones(1, T, S, dtype=torch.bool, device=q.device)
        readable = readable if T == 1 else readable.tril()
    else:
        mask = mask[..., :S]
        readable = _readable(mask)
        if mask.dtype != torch.bool:
            bias = mask.masked_fill(~readable[:, None], 0).to(q.dtype)
    place = torch.arange(S, device=q.device).expand(B, S)
    seen = Seen(torch.zeros_like(place), place, readable=readable)
    mean, residual, n = softmax_moments_ref(q, k, v, seen, **terms, bias=bias)
    return mean, reml_precision(residual, n, **prior)


def _context(mask: Tensor | None, x: Tensor) -> SequenceContext:
    """One history in every row of (B, T, D), padding where the model's mask has some."""
    B, T, _ = x.shape
    valid = torch.ones(B, T, dtype=torch.bool, device=x.device)
    if mask is not None:
        readable = _readable(mask)
        square = readable.shape[1] == readable.shape[2]
        valid = valid & (readable.diagonal(dim1=1, dim2=2) if square else readable.any(dim=2))
    return SequenceContext(torch.where(valid, 0, -1), torch.arange(T, device=x.device).expand(B, T))


def _readable(mask: Tensor) -> Tensor:
    """(B or 1, 1, T, S) of the model -> (B or 1, T, S) bool."""
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return allowed[:, 0]


def _source(module: nn.Module) -> Any:
    """The file of Hugging Face that a module is defined in, with the functions that it calls."""
    return sys.modules[type(module).__module__]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
