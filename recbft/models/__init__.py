"""The models by name, and the arms each can be trained in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from recbft.models.popularity import Popularity, PopularityConfig
from recbft.models.precision_config import CoreConfig
from recbft.models.sasrec import SASRec, SASRecConfig


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """How a model is configured and made.

    ``build(config, core, training_counts, seed=...)`` returns the module; ``arms`` holds each arm's own defaults of the
    backbone's keys; only ``precision_arms`` take a ``core`` section.
    """

    summary: str
    config: type
    build: Callable[..., nn.Module]
    arms: Mapping[str, Mapping[str, Any]]
    precision_arms: tuple[str, ...] = ()
    trainable: bool = True
    arm_summaries: Mapping[str, str] = field(default_factory=dict)


def _popularity(config: PopularityConfig, core: None, training_counts: Tensor, *, seed: int = 0) -> nn.Module:
    return Popularity(training_counts)


MODELS: dict[str, ModelSpec] = {
    "sasrec": ModelSpec(
        summary="causal self-attention over the user's items (Kang and McAuley, 2018), full cross-entropy",
        config=SASRecConfig,
        build=SASRec,
        arms={
            "published": {"layer": "original", "activation": "relu", "recency_decay": False},
            "matched": {"recency_decay": False},
            "bft": {},
        },
        precision_arms=("bft",),
        arm_summaries={
            "published": "the authors' layer: raw keys and values, ReLU feed-forward of width D",
            "matched": "the pre-norm layer of bft with the precision channel off",
            "bft": "precision tracked through attention, residual and feed-forward network",
        },
    ),
    "pop": ModelSpec(
        summary="items by training count: the reference every model must beat",
        config=PopularityConfig,
        build=_popularity,
        arms={"published": {}},
        trainable=False,
    ),
}

__all__ = ["MODELS", "CoreConfig", "ModelSpec", "Popularity", "PopularityConfig", "SASRec", "SASRecConfig"]
