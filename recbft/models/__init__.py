"""The models by name, and the arms each can be trained in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recbft.datasets.batches import Batch, EpochBatches, TrainingBatches
from recbft.mixers import MIXERS, MixerOptions, MixerSpec
from recbft.models.backbone import BackboneConfig
from recbft.models.bert4rec import BERT4RecConfig, bert4rec, cloze_batches
from recbft.models.content_cosine import ContentCosineConfig, content_cosine
from recbft.models.contract import ItemTable, SequenceModel, UserStates
from recbft.models.feed_forward import FuzzyMoEConfig
from recbft.models.hstu import HSTUConfig, hstu
from recbft.models.join import JoinConfig, not_from_scratch
from recbft.models.layers import Mixing
from recbft.models.losses import LOSSES
from recbft.models.precision_channel import CoreConfig
from recbft.models.sasrec import SASRecConfig, sasrec


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """How a model is configured and made.

    ``build(config, core, training_counts, seed=..., mixing=..., moe=..., content=...)`` returns the module. ``core``
    None leaves the precision channel out, ``training_counts`` is (V + 1,), index 0 padding, and equal seeds give equal
    weights to the parameters that two arms share; ``mixing`` and ``moe`` where the model has a choice, ``content``
    (V + 1, F) where items have features. ``batches(config, items, start, stop, num_items=..., samples=...,
    batch_size=..., seed=..., times=..., weights=..., reliability=...)`` returns what the model is trained on.
    """

    summary: str
    config: type  # the class of the ``backbone`` section
    build: Callable[..., nn.Module]
    arms: Mapping[str, Mapping[str, Any]]  # each arm's own defaults of the backbone's keys
    precision_arms: tuple[str, ...] = ()  # the arms that take a ``core`` section
    trainable: bool = True
    content: str | None = None  # where its weights have the content of items, of a model that can read it
    arm_summaries: Mapping[str, str] = field(default_factory=dict)
    batches: Callable[..., EpochBatches] | None = None
    core: Mapping[str, Any] = field(default_factory=dict)  # the model's own defaults of that section
    takes: Callable[[MixerSpec], bool] = lambda mixer: False  # which mixers its layers can have

    @property
    def mixers(self) -> tuple[str, ...]:
        """Names of the mechanisms its layers can have, the first unless asked otherwise."""
        return tuple(name for name, mixer in MIXERS.items() if self.takes(mixer))

    def make(
        self,
        config: Any,
        core: CoreConfig | None,
        training_counts: Tensor,
        *,
        seed: int,
        mixer: str | None = None,
        mixing: MixerOptions | None = None,
        moe: FuzzyMoEConfig | None = None,
        content: Tensor | None = None,
    ) -> nn.Module:
        """The module, with ``mixer`` and its options where the model leaves a choice, experts and content if any."""
        chosen: dict[str, Any] = {}
        if len(self.mixers) > 1:
            chosen["mixing"] = Mixing(mixer or self.mixers[0], mixing)
        if moe is not None and moe.experts:
            chosen["moe"] = moe
        if content is not None and self.content is not None:
            chosen["content"] = content
        return self.build(config, core, training_counts, seed=seed, **chosen)


def next_item_batches(
    config: BackboneConfig,
    items: NDArray[np.int64],
    start: NDArray[np.int64],
    stop: NDArray[np.int64],
    *,
    num_items: int,
    **order: Any,
) -> TrainingBatches:
    """The batches of models that predict the next item; ``order`` has their samples, seed, times and so on."""
    shown = isinstance(config, HSTUConfig) and config.show_target_time
    earlier = LOSSES[config.loss].leaves_out_seen
    how = {"max_length": config.max_length, "with_next_times": shown, "with_earlier": earlier, **order}
    return TrainingBatches(items, start, stop, **how)


@dataclass(frozen=True, kw_only=True)
class PopularityConfig:
    """Nothing to choose."""


class Popularity(nn.Module, SequenceModel):
    """Every user gets the items by training count, the reference that a model must beat: state 1, weights the counts.

    Args:
        training_counts: events per item index, or the sums of their weights, (V + 1,), >= 0.
    """

    counts: Tensor
    max_length = 1  # events read of a history, of which none matters
    same_for_all = True

    def __init__(self, training_counts: Tensor | NDArray[np.int64]) -> None:
        super().__init__()
        # Double precision holds every count exactly, so equal scores are equal counts.
        self.register_buffer("counts", torch.as_tensor(training_counts, dtype=torch.float64))

    def user_states(self, batch: Batch) -> UserStates:
        """The same state, 1, for every history."""
        return UserStates(self.counts.new_ones(batch.last.numel(), 1), None)

    def item_table(self) -> ItemTable:
        """The counts as weights of width 1."""
        return ItemTable(self.counts[:, None], None)


OF_BACKBONES = "item_belief.content"

MODELS: dict[str, ModelSpec] = {
    "sasrec": ModelSpec(
        summary="causal self-attention over the user's items (Kang and McAuley, 2018), full cross-entropy",
        config=SASRecConfig,
        build=sasrec,
        content=OF_BACKBONES,
        batches=next_item_batches,
        takes=lambda mixer: mixer.precision != "silu",
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
    "bert4rec": ModelSpec(
        summary="bidirectional self-attention that finds masked items (Sun et al., 2019)",
        config=BERT4RecConfig,
        build=bert4rec,
        content=OF_BACKBONES,
        batches=cloze_batches,
        takes=lambda mixer: mixer.precision != "silu" and mixer.both_ways,
        arms={
            "published": {"layer": "post_norm", "head": "gelu", "output_projection": True, "recency_decay": False},
            "matched": {"recency_decay": False},
            "bft": {},
        },
        precision_arms=("bft",),
        arm_summaries={
            "published": "BERT's post-norm layer with output map, GELU head with item biases",
            "matched": "the pre-norm layer of bft with the precision channel off",
            "bft": "precision tracked; the mask is a key that is not trusted",
        },
    ),
    "hstu": ModelSpec(
        summary="gated pointwise SiLU attention with relative position bias (Zhai et al., 2024)",
        config=HSTUConfig,
        build=hstu,
        content=OF_BACKBONES,
        batches=next_item_batches,
        takes=lambda mixer: mixer is MIXERS["pointwise"],  # its layer is that mixer, whatever else is registered
        arms={
            "published": {"feed_forward": False, "output_projection": True, "recency_decay": False},
            "matched": {"recency_decay": False},
            "bft": {},
        },
        precision_arms=("bft",),
        core={"estimator": "sandwich"},
        arm_summaries={
            "published": "the authors' layer: output map, no feed-forward network",
            "matched": "the layer of bft, with its feed-forward network, with the precision channel off",
            "bft": "precision tracked by the sandwich estimator, for weights that do not sum to one",
        },
    ),
    "pop": ModelSpec(
        summary="items by training count: the reference every model must beat",
        config=PopularityConfig,
        build=lambda config, core, training_counts, *, seed=0: Popularity(training_counts),
        arms={"published": {}},
        trainable=False,
    ),
    "content-cosine": ModelSpec(
        summary="items whose content is similar to that of the user's last events",
        config=ContentCosineConfig,
        build=content_cosine,
        content="content",
        arms={"published": {}},
        trainable=False,
    ),
    "join": ModelSpec(
        summary="two finished runs, their scores weighed by the item's training count: `recbft join`",
        config=JoinConfig,
        build=not_from_scratch,
        arms={"by_count": {}, "one_weight": {"by_count": False}},
        trainable=False,
        arm_summaries={
            "by_count": "two weights for each of six bins of the training count",
            "one_weight": "two weights for all items",
        },
    ),
}

__all__ = ["MODELS", "CoreConfig", "ModelSpec", "Popularity"]
