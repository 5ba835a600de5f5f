"""Settings of the precision channel (the ``core`` section of a config)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from recbft.config.fields import check_range
from recbft.core import ESTIMATORS, MAX_TOKENS, Estimator, check_estimator
from recbft.errors import UserError

JacobianMode = Literal["exact", "low_rank", "running_mean", "off"]


@dataclass(frozen=True, kw_only=True)
class CoreConfig:
    """Observe, update and predict: what is estimated and how.

    Args:
        estimator: observation precision from the attention weights and residuals.
        prior_dof: nu, the observations the estimator's prior is worth.
        prior_variance: s0, the variance it expects; None means 1 / head width.
        sandwich_centre: m of the sandwich estimator; ``innovation`` is the paper's.
        kriging: whether attention weighs a key by its mean precision, or each coordinate of it by its own.
        update: the gain, from precision or one of those it is compared with.
        fixed_gain: the gain of update ``fixed``.
        gate: whether update ``gate`` learns a gain per head or per coordinate.
        initial: precision of an item before the first layer.
        prior_events: n0 of initial ``credibility``: how many events its count prior is worth.
        initial_gain: K0, the gain an item of full count starts with, and every gain of update ``gate``.
        prior_scale: ``per_layer`` rescales each layer's incoming precision so that its gain starts at about K0.
        lam_max: the largest precision before and after a layer.
        propagation: how precision leaves a layer; ``discount`` and ``decay`` learn one factor per layer instead.
        jacobian: the feed-forward slope in training.
        jacobian_in_evaluation: the same in evaluation; ``running_mean`` costs nothing per token.
        jacobian_rank: rank of ``low_rank``.
        jacobian_detach: treat the slope as a constant for gradients.
        process_noise: learn the variance each layer adds.
        q_max: scale of the process noise.
    """

    estimator: Estimator = "reml"
    prior_dof: float = 1.0
    prior_variance: float | None = None
    sandwich_centre: Literal["root", "innovation"] = "root"
    kriging: Literal["scalar", "per_dimension"] = "scalar"
    update: Literal["kalman", "residual", "gate", "fixed"] = "kalman"
    fixed_gain: float = 0.9
    gate: Literal["elementwise", "headwise"] = "elementwise"
    initial: Literal["hybrid", "count", "table", "credibility", "uniform", "empirical_bayes"] = "count"
    prior_events: float = 100.0
    initial_gain: float = 0.9
    prior_scale: Literal["off", "per_layer"] = "off"
    lam_max: float = 100.0
    propagation: Literal["jacobian", "discount", "decay"] = "jacobian"
    jacobian: JacobianMode = "low_rank"
    jacobian_in_evaluation: JacobianMode = "running_mean"
    jacobian_rank: int = 16
    jacobian_detach: bool = False
    process_noise: bool = True
    q_max: float = 1.0

    def __post_init__(self) -> None:
        for key, value, dependent in _ONLY_WITH:
            if getattr(self, key) != value:
                self.refuse_idle(dependent, f"with {key} {getattr(self, key)!r}; leave it out or take {key} {value}")
        if self.jacobian_in_evaluation != "low_rank" and self.jacobian not in ("low_rank", "running_mean"):
            self.refuse_idle(("jacobian_rank",), f"with jacobian {self.jacobian!r}; leave it out or take low_rank")
        if self.jacobian in ("running_mean", "off"):
            self.refuse_idle(("jacobian_detach",), f"with jacobian {self.jacobian!r}, which passes no gradient")
        if not self.starts_from_gain:
            without = f"with initial {self.initial!r} and prior_scale 'off'"
            if self.update != "gate":
                self.refuse_idle(("initial_gain",), without)
            if self.estimator not in _WITH_PRIOR:
                self.refuse_idle(_PRIOR, f"{without} and estimator {self.estimator!r}")
        check_range("fixed_gain", self.fixed_gain, above=0, at_most=1)
        check_range("prior_dof", self.prior_dof, above=0)
        check_range("prior_variance", self.prior_variance, above=0)
        check_range("prior_events", self.prior_events, above=0)
        check_range("initial_gain", self.initial_gain, above=0, below=1)
        check_range("lam_max", self.lam_max, at_least=1e-3)  # what precision is held above anywhere
        check_range("jacobian_rank", self.jacobian_rank, at_least=1)
        check_range("q_max", self.q_max, above=0)

    @property
    def starts_from_gain(self) -> bool:
        """Whether lam0, which follows from K0 and the estimator's prior, is where some precision starts."""
        return self.initial in ("hybrid", "count", "credibility") or self.prior_scale == "per_layer"

    def refuse_idle(self, names: tuple[str, ...], why: str) -> None:
        """Refuse settings that were changed and would have no effect."""
        for field in fields(self):
            if field.name in names and getattr(self, field.name) != field.default:
                raise UserError(f"{field.name} has no effect {why}")


def check_core(core: CoreConfig, weights: str, max_length: int) -> None:
    """Refuse what is not defined, has no effect or would not fit with a mixer's kind of weights.

    Args:
        weights: a key of ``core.ESTIMATORS``, or another word for a mixer whose precision no estimator makes.
        max_length: the longest row of tokens.
    """
    if weights not in ESTIMATORS:
        idle = ("estimator", "sandwich_centre", "kriging", *(() if core.starts_from_gain else _PRIOR))
        core.refuse_idle(idle, "with a mixer that has no attention weights")
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


_PRIOR = ("prior_dof", "prior_variance")
_WITH_PRIOR = ("reml", "design_effect")  # estimators that shrink to it
# (key, value, what only counts where the key has that value)
_ONLY_WITH: tuple[tuple[str, str | bool, tuple[str, ...]], ...] = (
    ("estimator", "sandwich", ("sandwich_centre",)),
    ("update", "fixed", ("fixed_gain",)),
    ("update", "gate", ("gate",)),
    ("initial", "credibility", ("prior_events",)),
    ("process_noise", True, ("q_max",)),
    (
        "propagation",
        "jacobian",
        ("jacobian", "jacobian_in_evaluation", "jacobian_rank", "jacobian_detach", "process_noise", "q_max"),
    ),
)
