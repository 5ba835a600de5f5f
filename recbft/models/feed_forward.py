"""What predicts the next belief of a layer: one feed-forward network, or experts with gates from fuzzy memberships.

    y      = W2 phi(W1 x + b1) + b2                                  one network                        (4.1)
    p      = softmax((G mu_t + gumbel) / 0.5)              over E experts; no noise in evaluation      (9.37)
    g      = p on the top k experts, divided by its sum there, 0 elsewhere                             (9.38)
    y_t    = sum_e g_te (W2_e phi(W1_e x_t + b1_e) + b2_e)           phi = GELU                        (9.39)
    penalty on the training loss   balance * mean_e (mean_t g_te - 1/E)^2                              (9.40)
    J_t    = sum_e g_te (W2_e * W1_e') phi'(a_te)          diagonal of the Jacobian, gates held fixed  (9.41)

The memberships are those of ``mixers.regime``, of the token that the network reads, so that experts serve behind any
mixer. An expert is run on the tokens that chose it, and padding chooses none. In the paper's listing the noise is drawn
in evaluation too and (9.40) passes no gradient; here scores are not random, and (9.40) trains the gates. It is the only
thing that other tokens have a part in, and it is no part of any output.

Source: Fuzzy-Gated Training for Transformers, section 2.3 and listing 6; Shazeer et al. (2017).
Shapes: B rows, T tokens, D model width, F width of a network, E experts, R regimes, N tokens of one expert.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbft.autograd.boundaries import in_full_precision
from recbft.autograd.transforms import transformed
from recbft.config.fields import check_range
from recbft.core import SequenceContext, ffn_jacobian, pick
from recbft.errors import UserError
from recbft.mixers.interface import PenaltySlot, TrainedPart, refuse_idle
from recbft.mixers.regime import GaussianMemberships
from recbft.models.precision_channel import LayerPrecision

SHARPNESS = 0.5  # of (9.37)
Activation = Literal["gelu", "relu"]
_slope = in_full_precision(ffn_jacobian)


@dataclass(frozen=True, kw_only=True)
class FuzzyMoEConfig:
    """Experts in the place of the feed-forward network (the ``moe`` section of a config)."""

    experts: int = 0  # E; 0 is the one network of a plain layer
    experts_per_token: int = 2  # k
    gate_regimes: int = 4  # R
    gate_width: int | None = 16  # of the memberships' projection; None means hidden_size
    gate_noise: bool = True  # Gumbel noise on the gates in training
    load_balance: float = 0.01  # weight of the load-balance penalty (9.40)

    def __post_init__(self) -> None:
        if self.experts == 0:
            names = [field.name for field in fields(self)]
            refuse_idle(self, names, "without experts; leave it out or set experts: 4")
            return
        check_range("experts", self.experts, at_least=2)
        check_range("experts_per_token", self.experts_per_token, at_least=2)  # the share of one is 1: nothing learns
        check_range("gate_regimes", self.gate_regimes, at_least=2)
        check_range("gate_width", self.gate_width, at_least=self.gate_regimes)
        check_range("load_balance", self.load_balance, at_least=0)
        if self.experts_per_token > self.experts:
            raise UserError(
                f"experts_per_token is {self.experts_per_token}, but there are {self.experts} experts; "
                f"take at most {self.experts}"
            )


class Prediction(NamedTuple):
    """What is added to the stream, and its slope where it was asked for."""

    output: Tensor  # as the input; of experts 0 at padding
    jacobian: Tensor | None  # likewise, or (D,) or a number for all tokens


class FeedForward(NamedTuple):
    """One network, (4.1), of the maps that a layer holds."""

    inner: nn.Linear  # W1 with b1
    outer: nn.Linear  # W2 with b2
    activation: Activation = "gelu"  # phi; a precision channel needs gelu
    dropout: nn.Module | None = None  # inside the network

    def predict(
        self, x: Tensor, context: SequenceContext, precision: LayerPrecision | None = None, only: Tensor | None = None
    ) -> Prediction:
        """From the normalised stream, with the Jacobian that a precision channel works with.

        ``x`` is (B, T, D), or (N, D) where ``only`` names tokens, counted through the rows.
        """
        a, jacobian = self.inner(x), None
        if precision is not None:
            hidden, jacobian = precision.activate(a, self.inner.weight, self.outer.weight, context)
        else:
            hidden = F.gelu(a) if self.activation == "gelu" else F.relu(a)
        return Prediction(self.outer(hidden if self.dropout is None else self.dropout(hidden)), jacobian)

    def jacobian(self, x: Tensor, context: SequenceContext) -> Tensor:
        """(4.2) at every token, (B, T, D), from all of the weights."""
        return ffn_jacobian(self.inner(x), self.inner.weight, self.outer.weight)


class FuzzyMoE(TrainedPart):
    """Experts, (9.37) to (9.41), each of width F, ``inner_size``."""

    penalty: PenaltySlot

    def __init__(self, hidden_size: int, inner_size: int, config: FuzzyMoEConfig) -> None:
        super().__init__()
        self.config = config
        self.memberships = GaussianMemberships(hidden_size, config.gate_regimes, width=config.gate_width)
        self.route = nn.Linear(config.gate_regimes, config.experts, bias=False)
        self.inner = nn.ModuleList(nn.Linear(hidden_size, inner_size) for _ in range(config.experts))
        self.outer = nn.ModuleList(nn.Linear(inner_size, hidden_size) for _ in range(config.experts))
        self.penalty = PenaltySlot()

    def forward(self, x: Tensor, valid: Tensor, *, with_jacobian: bool = False) -> Prediction:
        """Predict from the normalised stream, (B, T, D) or tokens alone, (N, D), with (9.41) where it is asked for."""
        gates = self.gates(self.memberships(x)) * valid[..., None]
        if self.training:  # (9.40)
            load = gates.flatten(0, -2).sum(dim=0) / valid.sum().clamp(min=1)
            self.penalty.leave(self.config.load_balance * (load - 1 / self.config.experts).square().mean())
        tokens, shares = x.flatten(0, -2), gates.flatten(0, -2)
        output = torch.zeros_like(tokens)
        jacobian = torch.zeros_like(tokens) if with_jacobian else None
        for expert, (inner, outer) in enumerate(zip(self.inner, self.outer, strict=True)):
            assert isinstance(inner, nn.Linear) and isinstance(outer, nn.Linear)
            chosen = _choosers(shares[:, expert])  # (N,)
            share = shares[chosen, expert, None]
            a = inner(tokens[chosen])
            output = output.index_add(0, chosen, (share * outer(F.gelu(a))).to(output.dtype))  # (9.39)
            if jacobian is not None:
                slope = _slope(a, inner.weight.detach(), outer.weight.detach())
                jacobian = jacobian.index_add(0, chosen, (share * slope).to(jacobian.dtype))  # (9.41)
        return Prediction(output.view_as(x), None if jacobian is None else jacobian.view_as(x))

    def predict(
        self, x: Tensor, context: SequenceContext, precision: LayerPrecision | None = None, only: Tensor | None = None
    ) -> Prediction:
        """As ``FeedForward``."""
        asked = precision is not None and precision.needs_jacobian
        output, jacobian = self(x, pick(context.valid, only), with_jacobian=asked)
        return Prediction(output, None if precision is None else precision.take(jacobian, context))

    def jacobian(self, x: Tensor, context: SequenceContext) -> Tensor:
        """(9.41) at every token, (B, T, D)."""
        jacobian: Tensor = self(x, context.valid, with_jacobian=True).jacobian
        return jacobian

    def gates(self, memberships: Tensor) -> Tensor:
        """Equations (9.37) and (9.38): (B, T, R) -> (B, T, E), sums of 1."""
        logits = self.route(memberships)
        if self.training and self.config.gate_noise:
            noise = torch.empty_like(logits).exponential_().clamp_(min=torch.finfo(logits.dtype).tiny)
            logits = logits - noise.log()  # Gumbel: -log of an exponential
        probability = torch.softmax(logits / SHARPNESS, dim=-1)
        if self.config.experts_per_token == self.config.experts:
            return probability
        top, place = probability.topk(self.config.experts_per_token, dim=-1)
        return torch.zeros_like(probability).scatter(-1, place, top / top.sum(dim=-1, keepdim=True))


def _choosers(share: Tensor) -> Tensor:
    """Which tokens have a share in an expert; under torch.func, whose members choose apart, all, most with one of 0."""
    return torch.arange(len(share), device=share.device) if transformed() else share.nonzero()[:, 0]
