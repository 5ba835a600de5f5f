"""SASRec: a causal Transformer over a user's items, scored against the item embeddings.

    h_0 = s emb(item) + pos(position)       s = sqrt(D) unless asked otherwise  (6.1)
    h_L by L blocks;   state = Norm(h_L);   score(i) = state . emb_i            (6.2)

Three arms of the same code: ``published`` (the authors' layer: normalised queries over raw keys and values, residual
from the normalised stream, no output projection, ReLU feed-forward of width D), ``matched`` (the pre-norm layer with
the precision channel off) and ``bft`` (precision tracked).

Source: Kang and McAuley, Self-Attentive Sequential Recommendation (arXiv 1808.09781);
Precision Tracked Transformer (arXiv 2605.18832).
Shapes: D model width, V items.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from recbft.config.fields import check_range
from recbft.models.backbone import Backbone, BackboneConfig, check_backbone, root_of_width
from recbft.models.feed_forward import FuzzyMoEConfig
from recbft.models.layers import ATTENTION, Mixing, make_blocks, mixer_maker
from recbft.models.precision_channel import CoreConfig


@dataclass(frozen=True, kw_only=True)
class SASRecConfig(BackboneConfig):
    """Shape of the backbone (the ``backbone`` section of a config).

    ``inner_size`` None means hidden_size in the original layer, ``embedding_scale`` None means sqrt(hidden_size).
    """

    attention_dropout: float | None = None  # None means 0, or dropout in the original layer
    activation: Literal["gelu", "relu"] = "gelu"
    layer: Literal["pre_norm", "original"] = "pre_norm"

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward network."""
        return self.inner_size or self.hidden_size * (1 if self.layer == "original" else 4)

    def __post_init__(self) -> None:
        check_backbone(self)
        check_range("attention_dropout", self.attention_dropout, at_least=0, below=1)


def sasrec(
    config: SASRecConfig,
    core: CoreConfig | None,
    training_counts: Tensor,
    *,
    seed: int = 0,
    mixing: Mixing = ATTENTION,
    moe: FuzzyMoEConfig | None = None,
    content: Tensor | None = None,
) -> Backbone:
    """The model; arguments as ``ModelSpec`` says."""
    blocks = make_blocks(
        config,
        core,
        mixer_maker(
            config,
            core,
            mixing,
            attention_dropout=config.attention_dropout,
            default_dropout=config.dropout if config.layer == "original" else 0.0,
        ),
        inner_size=config.ffn_size,
        activation=config.activation,
        layer=config.layer,
        moe=moe,
    )
    return Backbone(
        config,
        core,
        training_counts,
        blocks,
        embedding_scale=root_of_width(config),
        seed=seed,
        positions=config.positions,
        reads_times=mixing.reads_times,
        content=content,
    )
