"""Settings of the precision channel (the ``core`` section of a config)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from recbft.config import check_range

JacobianMode = Literal["exact", "low_rank", "running_mean", "off"]


@dataclass(frozen=True, kw_only=True)
class CoreConfig:
    """Observe, update and predict: what is estimated and how.

    Args:
        estimator: observation precision from the attention residuals.
        prior_dof: nu, the observations the estimator's prior is worth.
        prior_variance: s0, the variance it expects; None means 1 / head width.
        initial: precision of an item before the first layer.
        initial_gain: K0, the gain an item of full count starts with.
        prior_scale: ``per_layer`` rescales each layer's incoming precision so that its gain starts at about K0.
        lam_max: the largest precision anywhere.
        jacobian: the feed-forward slope in training.
        jacobian_in_evaluation: the same in evaluation; ``running_mean`` costs nothing per token.
        jacobian_rank: rank of ``low_rank``.
        jacobian_detach: treat the slope as a constant for gradients.
        process_noise: learn the variance each layer adds.
        q_max: scale of the process noise.
    """

    estimator: Literal["reml", "reml_naive"] = "reml"
    prior_dof: float = 1.0
    prior_variance: float | None = None
    initial: Literal["hybrid", "count", "table", "uniform"] = "hybrid"
    initial_gain: float = 0.9
    prior_scale: Literal["off", "per_layer"] = "off"
    lam_max: float = 100.0
    jacobian: JacobianMode = "low_rank"
    jacobian_in_evaluation: JacobianMode = "running_mean"
    jacobian_rank: int = 16
    jacobian_detach: bool = False
    process_noise: bool = True
    q_max: float = 1.0

    def __post_init__(self) -> None:
        check_range("prior_dof", self.prior_dof, above=0)
        check_range("prior_variance", self.prior_variance, above=0)
        check_range("initial_gain", self.initial_gain, above=0, below=1)
        check_range("lam_max", self.lam_max, above=0)
        check_range("jacobian_rank", self.jacobian_rank, at_least=1)
        check_range("q_max", self.q_max, above=0)
