"""The precision channel: its settings, where precision starts and how a layer carries it on.

    tau_i = tau_range * tau_base_i + softplus(MLP(emb_i))                     initial: hybrid        (5.1)
    tau_i = tau_range * tau_base_i + ln 2                                     count                  (5.4)
    tau_i = 1 + softplus(p_i)                                                 table                  (5.5)
    tau_i = (tau_range * tau_base_i + ln 2) exp(4 tanh(Z_i p_i / 4)),  Z_i = c_i / (c_i + n0)
                                                                              credibility            (5.6)
    tau_i = 1                                                                 uniform                (5.7)
    tau_i = (c_i + nu0) / (c + nu0)                                           empirical_bayes        (5.8)
    tau_i = ln 2 + tau_content k_i + tau_event c_i                            evidence               (5.11)
    lam  <- kappa * lam0 * lam / mu                                           prior_scale per_layer  (3.6)
    lam'' from J, the slope of the feed-forward network                                              (4.3)
    lam'' = delta lam'                                                        propagation: discount  (4.6)
    lam'' = exp(-c) lam'                                                      propagation: decay     (4.7)

mu and the mean Jacobian are running means over the real training positions of earlier batches (momentum 0.99), 1 and 0
before the first. k_i is 1 where the content of item i is known, and c_i counts its training events.

Source: Precision Tracked Transformer (arXiv 2605.18832), sections 3.2 and 3.3; Z is the credibility factor of
Buehlmann, ASTIN Bulletin 4 (1967): how far c_i observed events move an estimate from its prior.
Shapes: B rows, T tokens, D model width, F feed-forward width, V items.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbft.autograd.boundaries import in_full_precision
from recbft.autograd.transforms import transformed
from recbft.config.fields import check_range
from recbft.core import (
    ESTIMATORS,
    MAX_TOKENS,
    Estimator,
    SequenceContext,
    check_estimator,
    count_quantiles,
    decay_precision,
    discount_precision,
    empirical_bayes_precision,
    fit_pseudo_count,
    initial_scale,
    jacobian_factors,
    mean_over_tokens,
    process_noise,
    remember,
)
from recbft.errors import RunError, UserError
from recbft.kernels.filter_step import predict_precision
from recbft.kernels.gelu import gelu_with_slope, slope_product
from recbft.mixers import Estimation
from recbft.mixers.interface import Kriging, refuse_idle
from recbft.models.precision_read_out import ReadOut

LAM_MIN = 1e-3
LARGEST_LOG_FACTOR = 4.0  # 55 times more or less than the count says
SAMPLED_ROWS = 4  # where only the mean Jacobian is wanted, every fourth row of a batch is enough
Q_LOGIT_START = -9.0
DISCOUNT_START = 0.99

JacobianMode = Literal["exact", "low_rank", "running_mean", "off"]

_PRIOR = ("prior_dof", "prior_variance")  # of which running scales all that is observed
_WITH_PRIOR = ("reml", "design_effect")  # estimators that shrink to it
# (key, value, what only counts where the key has that value)
_ONLY_WITH: tuple[tuple[str, str | bool, tuple[str, ...]], ...] = (
    ("estimator", "sandwich", ("sandwich_centre",)),
    ("update", "fixed", ("fixed_gain",)),
    ("update", "gate", ("gate",)),
    ("initial", "credibility", ("prior_events",)),
    ("process_noise", True, ("q_max", "process_noise_start")),
    (
        "propagation",
        "jacobian",
        (
            "jacobian",
            "jacobian_in_evaluation",
            "jacobian_rank",
            "jacobian_detach",
            "process_noise",
            "q_max",
            "process_noise_start",
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class CoreConfig:
    """Observe, update and predict: what is estimated and how."""

    estimator: Estimator = "reml"  # of observation precision, from the attention weights and residuals
    prior_dof: float = 1.0  # nu, the observations the estimator's prior is worth
    # s0, the variance it expects; None means 1 / head width. With running values are told in units of their own spread
    prior_variance: float | Literal["running"] | None = None
    sandwich_centre: Literal["root", "innovation"] = "root"  # m of the sandwich estimator; innovation is the paper's
    kriging: Kriging = "scalar"  # a key is weighed by its mean precision, or each coordinate of it by its own
    update: Literal["kalman", "residual", "gate", "fixed"] = "kalman"  # the gain, from precision or one to compare with
    fixed_gain: float = 0.9  # the gain of update fixed
    gate: Literal["elementwise", "headwise"] = "elementwise"  # what update gate learns a gain for
    # precision of an item before the first layer
    initial: Literal["hybrid", "count", "table", "credibility", "uniform", "empirical_bayes", "evidence"] = "count"
    prior_events: float = 100.0  # n0 of initial credibility: how many events its count prior is worth
    initial_gain: float = 0.9  # K0, the gain an item of full count starts with, and every gain of update gate
    prior_scale: Literal["off", "per_layer"] = "off"  # per_layer: rescaled so that each layer's gain starts at about K0
    lam_max: float = 100.0  # the largest precision before and after a layer
    # how precision leaves a layer; discount and decay learn one factor per layer
    propagation: Literal["jacobian", "discount", "decay"] = "jacobian"
    jacobian: JacobianMode = "low_rank"  # the feed-forward slope in training
    jacobian_in_evaluation: JacobianMode = "running_mean"  # which costs nothing per token
    jacobian_rank: int = 16  # of low_rank
    jacobian_detach: bool = False  # treat the slope as a constant for gradients
    process_noise: bool = True  # learn the variance each layer adds
    q_max: float = 1.0  # scale of the process noise
    process_noise_start: float | None = None  # q before training, softplus(q) q_max being added; None means -9
    # how scores read the precision of the state: as one temperature, or coordinate by coordinate; off, not at all
    read_out: ReadOut = "off"

    def __post_init__(self) -> None:
        for key, value, dependent in _ONLY_WITH:
            if getattr(self, key) != value:
                refuse_idle(self, dependent, f"with {key} {getattr(self, key)!r}; leave it out or take {key} {value}")
        if self.jacobian_in_evaluation != "low_rank" and self.jacobian not in ("low_rank", "running_mean"):
            refuse_idle(self, ("jacobian_rank",), f"with jacobian {self.jacobian!r}; leave it out or take low_rank")
        if self.jacobian in ("running_mean", "off"):
            refuse_idle(self, ("jacobian_detach",), f"with jacobian {self.jacobian!r}, which passes no gradient")
        if not self.starts_from_gain:
            without = f"with initial {self.initial!r} and prior_scale 'off'"
            if self.update != "gate":
                refuse_idle(self, ("initial_gain",), without)
            if self.estimator not in _WITH_PRIOR:
                refuse_idle(
                    self, _PRIOR[:1] if self.is_running else _PRIOR, f"{without} and estimator {self.estimator!r}"
                )
        check_range("fixed_gain", self.fixed_gain, above=0, at_most=1)
        check_range("prior_dof", self.prior_dof, above=0)
        check_range("prior_variance", self.fixed_variance, above=0)
        if self.is_running and self.estimator == "delta":
            raise UserError("prior_variance running has no effect with estimator 'delta', which reads no residuals")
        check_range("prior_events", self.prior_events, above=0)
        check_range("initial_gain", self.initial_gain, above=0, below=1)
        check_range("lam_max", self.lam_max, at_least=1e-3)  # what precision is held above anywhere
        check_range("jacobian_rank", self.jacobian_rank, at_least=1)
        check_range("q_max", self.q_max, above=0)

    @property
    def estimation(self) -> Estimation:
        """What mixers are told: the one way of ``lam_max`` and the estimator to a layer."""
        return Estimation(
            lam_max=self.lam_max,
            estimator=self.estimator,
            prior_dof=self.prior_dof,
            prior_variance=self.fixed_variance,
            running=self.is_running,
            kriging=self.kriging,
            centre=self.sandwich_centre,
        )

    @property
    def is_running(self) -> bool:
        """Whether values are told in units of their own spread, equation (2.15)."""
        return self.prior_variance == "running"

    @property
    def fixed_variance(self) -> float | None:
        """s0 in the units that values are told in; None means 1 / head width."""
        return 1.0 if isinstance(self.prior_variance, str) else self.prior_variance

    @property
    def starts_from_gain(self) -> bool:
        """Whether lam0, which follows from K0 and the estimator's prior, is where some precision starts."""
        return self.initial in ("hybrid", "count", "credibility", "evidence") or self.prior_scale == "per_layer"


def check_core(core: CoreConfig, weights: str, max_length: int) -> None:
    """Refuse what is not defined, has no effect or would not fit with a mixer's ``MixerSpec.precision``."""
    if weights not in ESTIMATORS:
        idle = ("estimator", "sandwich_centre", "kriging", *(() if core.starts_from_gain else _PRIOR))
        refuse_idle(core, idle, "with a mixer that has no attention weights")
        if core.is_running:
            raise UserError("core.prior_variance running is for mixers with attention weights; give a number, or none")
        return
    check_estimator(core.estimator, weights)
    if weights == "softmax" and core.sandwich_centre != "root":
        raise UserError("core.sandwich_centre has no effect with softmax weights, which sum to one; leave it out")
    if core.kriging == "per_dimension" and weights != "softmax":
        raise UserError(f"core.kriging per_dimension is not defined for {weights} weights; take scalar")
    if core.kriging == "per_dimension" and max_length > MAX_TOKENS:
        raise UserError(
            f"core.kriging per_dimension keeps a weight per pair of tokens and coordinate, so max_length is at most "
            f"{MAX_TOKENS}, got {max_length}; lower it or take kriging scalar"
        )


class ItemPrecision(nn.Module):
    """Precision of an item before the first layer, (5.1), (5.4) to (5.8) or (5.11).

    ``token_counts`` are training events per token: 0 is padding, 1 to V are items, what follows is no item (a mask).
    ``content`` (V + 1, F) tells where the content of an item is known.
    """

    base: Tensor
    credibility: Tensor
    known: Tensor

    def __init__(
        self,
        core: CoreConfig,
        token_counts: Tensor,
        *,
        num_items: int,
        hidden_size: int,
        head_width: int,
        content: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.mode, self.lam_max = core.initial, core.lam_max
        if core.initial == "empirical_bayes":
            base = _empirical_bayes(token_counts, num_items)
        else:
            base = token_counts if core.initial == "evidence" else count_quantiles(token_counts)
        self.register_buffer("base", base.to(torch.get_default_dtype()))
        self.start = _first_precision(core, head_width)
        if core.initial in ("hybrid", "count", "credibility"):
            self.range = nn.Parameter(torch.tensor(self.start))
        if core.initial == "hybrid":
            self.read = nn.Sequential(nn.Linear(hidden_size, 16), nn.GELU(), nn.Linear(16, 1))
        if core.initial == "evidence":
            known = torch.zeros_like(self.base)
            if content is not None:
                known[: len(content)] = content.any(dim=1).to(known.dtype)
            self.register_buffer("known", known)
            mean = self.base[1 : num_items + 1].mean().clamp(min=1)
            self.log_event = nn.Parameter((self.start / mean).log())
            self.log_content = nn.Parameter(torch.tensor(0.0)) if content is not None else None
        if core.initial == "credibility":
            counts = token_counts.to(torch.get_default_dtype())
            self.register_buffer("credibility", counts / (counts + core.prior_events))
        if core.initial in ("table", "credibility"):
            self.table = nn.Parameter(torch.zeros(token_counts.numel()))

    def base_of(self, counts: Tensor, known: Tensor) -> Tensor:
        """What ``base`` is for items that come later, (N,), by their counts and those of padding and items, (V + 1,).

        Some bases rise evenly with counts. Of the others it is that of items with as many events or the next fewer.
        Padding has that of an item without events.
        """
        known, counts = known.to(self.base), counts.to(self.base)
        if self.mode in ("empirical_bayes", "evidence"):
            most = known.argmax()
            return self.base[0] + counts * (self.base[most] - self.base[0]) / known[most].clamp(min=1)
        ordered = known[1:].sort()
        fewer = torch.searchsorted(ordered.values, counts, right=True)  # how many items have so many or fewer
        return self.base[torch.cat([known.new_zeros(1).long(), 1 + ordered.indices])[fewer]]

    def forward(self, items: Tensor, embedded: Tensor) -> Tensor:
        """Initial precision of every token: (B, T) items and (B, T, D) embeddings -> (B, T, 1)."""
        if self.mode == "uniform":
            return torch.ones_like(embedded[..., :1]).clamp(max=self.lam_max)
        if self.mode == "table":
            tau = 1 + F.softplus(self.table[items])[..., None]
        elif self.mode == "empirical_bayes":
            tau = self.base[items][..., None]
        elif self.mode == "evidence":
            tau = math.log(2) + (self.log_event.exp() * self.base[items])[..., None]
            if self.log_content is not None:
                tau = tau + (self.log_content.exp() * self.known[items])[..., None]
        else:
            tau = (self.range * self.base[items])[..., None]
            tau = tau + (F.softplus(self.read(embedded)) if self.mode == "hybrid" else math.log(2))
            if self.mode == "credibility":
                log_factor = (self.credibility * self.table)[items]
                bounded = LARGEST_LOG_FACTOR * torch.tanh(log_factor / LARGEST_LOG_FACTOR)  # never without a gradient
                tau = tau * bounded.exp()[..., None]
        return tau.clamp(LAM_MIN, self.lam_max)


class LayerPrecision(nn.Module):
    """What one layer learns and remembers about precision: (3.6) before the update, (4.3), (4.6) or (4.7) after it."""

    mean_precision: Tensor
    mean_jacobian: Tensor
    updates: Tensor

    def __init__(self, core: CoreConfig, *, hidden_size: int, head_width: int, is_last: bool = False) -> None:
        super().__init__()
        self.core, self.lam_max, self.is_last = core, core.lam_max, is_last
        self.first_precision = _first_precision(core, head_width)
        with_noise = core.process_noise and core.propagation == "jacobian"
        start = Q_LOGIT_START if core.process_noise_start is None else core.process_noise_start
        self.noise_logits = nn.Parameter(torch.full((hidden_size,), start)) if with_noise else None
        if core.propagation == "discount":
            self.discount_logit = nn.Parameter(torch.tensor(math.log(DISCOUNT_START / (1 - DISCOUNT_START))))
        if core.propagation == "decay":
            self.decay_rate = nn.Parameter(torch.zeros(()))
        self.log_kappa = nn.Parameter(torch.zeros(())) if core.prior_scale == "per_layer" else None
        self.register_buffer("mean_precision", torch.ones(()))
        self.register_buffer("mean_jacobian", torch.zeros(hidden_size))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.factors: tuple[Tensor, Tensor] | None = None

    def _apply(self, fn: Any, recurse: bool = True) -> LayerPrecision:
        self.factors = None  # of weights of another type, or elsewhere
        moved: LayerPrecision = super()._apply(fn, recurse)
        return moved

    def _load_from_state_dict(self, *arguments: Any, **named: Any) -> None:
        self.factors = None  # of other weights
        super()._load_from_state_dict(*arguments, **named)

    @property
    def mode(self) -> JacobianMode:
        """How the Jacobian is found as the layer is now, in training or in evaluation."""
        if self.core.propagation != "jacobian":
            return "off"
        if not self.training:
            return self.core.jacobian_in_evaluation
        # What the last layer predicts is reported, and only by a read-out read: without, its mean will do in training.
        unread = self.is_last and self.core.read_out == "off"
        return "running_mean" if unread and self.core.jacobian != "off" else self.core.jacobian

    @property
    def needs_jacobian(self) -> bool:
        """Whether a Jacobian at each token is needed as the layer is now."""
        return self.mode != "off" and (self.training or self.mode != "running_mean")

    def refresh(self, w1: Tensor, w2: Tensor) -> None:
        """Take the factors of C = W2 * W1' from the present weights; constants for autograd."""
        if self.core.propagation != "jacobian":
            return
        if "low_rank" in (self.core.jacobian, self.core.jacobian_in_evaluation) or self.core.jacobian == "running_mean":
            with torch.inference_mode(False):  # training goes on with what evaluation has made
                try:
                    wide = torch.promote_types(w1.dtype, torch.float32)  # no factors are taken in half precision
                    left, right = jacobian_factors(w1.detach().to(wide), w2.detach().to(wide), self.core.jacobian_rank)
                    self._keep((left.to(w1.dtype), right.to(w1.dtype)))
                except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # finite weights whose products are not
                    largest = max(float(w.detach().abs().max()) for w in (w1, w2))
                    raise RunError(
                        f"the feed-forward weights are too large, up to {largest:.2g}, for their Jacobian: training "
                        "has diverged; lower learning_rate or set clip_norm"
                    ) from None

    def _keep(self, factors: tuple[Tensor, Tensor]) -> None:
        """Keep them where the last ones are: a CUDA graph of a training step reads them there."""
        if self.factors is None:
            self.factors = factors
        else:
            for kept, new in zip(self.factors, factors, strict=True):
                kept.copy_(new)

    def prior(self, precision: Tensor, context: SequenceContext) -> Tensor:
        """Equation (3.6): the incoming precision a layer works with, (B, T, D)."""
        if self.log_kappa is None:
            return precision
        # The mean as it stood before this batch: what a token gets must not depend on its batch mates.
        scale = self.log_kappa.exp() * self.first_precision / self.mean_precision.clone()
        if self.training and not transformed():
            remember(self.mean_precision, mean_over_tokens(precision.detach(), context.valid).mean(), self.updates)
        return (scale * precision).clamp(LAM_MIN, self.lam_max)

    def activate(self, a: Tensor, w1: Tensor, w2: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor]:
        """GELU of the pre-activation, (B, T, F), and the network's Jacobian: (B, T, D), or (D,) or scalar for all."""
        if self.mode == "off":
            return F.gelu(a), a.new_zeros(())
        if self.mode == "running_mean":
            if not self.training:
                return F.gelu(a), self.mean_jacobian.clone()
            reduced = slope_product(a.detach()[::SAMPLED_ROWS], self.slope_factors(w1, w2)[1])
            return F.gelu(a), self._remember(self._jacobian(reduced, w1, w2), context, every=SAMPLED_ROWS)
        if self.core.jacobian_detach:
            hidden, reduced = F.gelu(a), slope_product(a, self.slope_factors(w1, w2)[1])
        else:
            hidden, reduced = gelu_with_slope(a, self.slope_factors(w1, w2)[1])
        return hidden, self.take(self._jacobian(reduced, w1, w2), context)

    def take(self, jacobian: Tensor | None, context: SequenceContext) -> Tensor:
        """What ``activate`` returns second, from the Jacobian of a network that gives its own where it is wanted."""
        if self.mode == "off":
            return self.mean_jacobian.new_zeros(())
        mean = self._remember(jacobian, context) if self.training else None
        if jacobian is None or self.mode == "running_mean":
            return self.mean_jacobian.clone() if mean is None else mean
        return jacobian.detach() if self.core.jacobian_detach else jacobian

    def predict(self, precision: Tensor, jacobian: Tensor) -> Tensor:
        """Precision after the feed-forward network, (4.3), (4.6) or (4.7); the Jacobian as ``activate`` gave it."""
        if self.training and not transformed():
            self.updates += 1
        if self.core.propagation == "discount":
            discount = torch.sigmoid(self.discount_logit)
            return discount_precision(precision, discount, cap=self.lam_max).clamp(min=LAM_MIN)
        if self.core.propagation == "decay":
            return decay_precision(precision, self.decay_rate, cap=self.lam_max).clamp(min=LAM_MIN)
        logits = self.noise_logits
        noise = precision.new_zeros(()) if logits is None else process_noise(logits, self.core.q_max)
        return predict_precision(precision, jacobian, noise, low=LAM_MIN, cap=self.lam_max)

    @in_full_precision
    def _jacobian(self, reduced: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        """J from phi'(a) times the right factor."""
        left, _ = self.slope_factors(w1, w2)
        return reduced if left is None else reduced @ left.T

    def slope_factors(self, w1: Tensor, w2: Tensor) -> tuple[Tensor | None, Tensor]:
        """Left (D, r) and right (F, r) factor of C; without a left one, the right is all of C, (F, D).

        So under torch.func too: kept factors are of the weights this module has, not of those it is called with.
        """
        if self.mode == "exact" or transformed() or (self.mode == "running_mean" and self.core.jacobian == "exact"):
            return None, (w2.T * w1).detach()
        if self.factors is None:
            self.refresh(w1, w2)
        assert self.factors is not None
        return self.factors

    def _remember(self, jacobian: Tensor | None, context: SequenceContext, *, every: int = 1) -> Tensor:
        """Move the mean Jacobian by those of a batch; torch.func takes it as it stands.

        Returned is the mean as it stood before: what a token gets must not depend on its batch mates.
        """
        assert jacobian is not None
        if transformed():
            return self.mean_jacobian.clone()
        before = self.mean_jacobian.clone()
        remember(self.mean_jacobian, mean_over_tokens(jacobian.detach(), context.valid[::every]), self.updates)
        return before


def _empirical_bayes(token_counts: Tensor, num_items: int) -> Tensor:
    """Precision per token; padding and mask, which are no items, get that of an item never seen."""
    items = token_counts[1 : num_items + 1]
    pseudo_count = fit_pseudo_count(items)
    unseen = 1.0 if math.isinf(pseudo_count) else pseudo_count / (float(items.double().mean()) + pseudo_count)
    precision = torch.full(token_counts.shape, unseen, dtype=torch.float64)
    precision[1 : num_items + 1] = empirical_bayes_precision(items, pseudo_count)
    return precision


def _first_precision(core: CoreConfig, head_width: int) -> float:
    """lam0: what meets the largest REML precision with the gain K0."""
    return initial_scale(
        core.initial_gain, head_width=head_width, prior_dof=core.prior_dof, prior_variance=core.fixed_variance
    )
