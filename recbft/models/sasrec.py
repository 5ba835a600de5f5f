"""SASRec: a causal Transformer over a user's items, scored against the item embeddings.

    h_0 = s emb(item) + pos(position)       s = sqrt(D) unless asked otherwise  (6.1)
    h_L by L blocks;   state = Norm(h_L);   score(i) = state . emb_i            (6.2)

Three arms of the same code: ``published`` (the authors' layer: normalised queries over raw keys and values, residual
from the normalised stream, no output projection, ReLU feed-forward of width D), ``matched`` (the pre-norm layer with
the precision channel off) and ``bft`` (precision tracked). ``layer: post_norm`` is BERT's layer, as in BERT4Rec: the
embedding normalised with s = 1, no norm after the last layer. With ``output_projection`` it is RecBole's SASRec.

Source: Kang and McAuley, Self-Attentive Sequential Recommendation (arXiv 1808.09781);
Precision Tracked Transformer (arXiv 2605.18832).
Shapes: D model width, V items.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from recbft.config.fields import check_range
from recbft.models.backbone import Backbone, BackboneConfig, check_backbone, root_of_width
from recbft.models.block import Layer
from recbft.models.feed_forward import FuzzyMoEConfig
from recbft.models.layers import ATTENTION, Mixing, make_blocks, mixer_maker
from recbft.models.precision_channel import CoreConfig


@dataclass(frozen=True, kw_only=True)
class SASRecConfig(BackboneConfig):
    """Shape of the backbone (the ``backbone`` section of a config).

    ``inner_size`` None means hidden_size in the original layer, ``embedding_scale`` None means sqrt(hidden_size), or 1
    in the post-norm layer.
    """

    attention_dropout: float | None = None  # None means dropout, or 0 in the pre-norm layer
    activation: Literal["gelu", "relu"] = "gelu"
    layer: Layer = "pre_norm"

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
    post_norm = config.layer == "post_norm"
    blocks = make_blocks(
        config,
        core,
        mixer_maker(
            config,
            core,
            mixing,
            attention_dropout=config.attention_dropout,
            default_dropout=0.0 if config.layer == "pre_norm" else config.dropout,
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
        embedding_scale=1.0 if post_norm and config.embedding_scale is None else root_of_width(config),
        seed=seed,
        read_out=nn.Identity() if post_norm else None,  # its last layer ends in a norm
        norm_embedding=post_norm,
        positions=config.positions,
        reads_times=mixing.reads_times,
        content=content,
    )
