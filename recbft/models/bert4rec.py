"""BERT4Rec: a Transformer that looks both ways, trained to find masked items, asked with a mask at the end.

    h_0 = s emb(item) + pos(position)                                                                      (6.1)
    h_L by L blocks that see the whole history;   state = read_out(h_L);   score(i) = state . emb_i + b_i  (6.2)

The mask is the item V + 1: it is embedded as items are, its training count is 0, so its initial precision is that of an
item never seen, an unreliable key. At prediction a history's last N - 1 items are read and the mask after them.

Three arms of the same code: ``published`` (BERT's layer: normalised after each residual, output map, dropout of the
attention weights, the embedding normalised; read_out = Norm(GELU(Linear)), item biases, s = 1), ``matched`` (the
pre-norm layer with the precision channel off, read_out = Norm, no item biases) and ``bft`` (precision tracked).

Source: Sun et al., BERT4Rec (arXiv 1904.06690); Precision Tracked Transformer (arXiv 2605.18832).
Shapes: N longest history with its mask, D model width, V items.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from recbft.config.fields import check_range
from recbft.datasets.batches import ClozeBatches
from recbft.kernels.layer_norm import LayerNorm
from recbft.models.backbone import Backbone, BackboneConfig, check_backbone, root_of_width
from recbft.models.feed_forward import FuzzyMoEConfig
from recbft.models.layers import ATTENTION, Mixing, make_blocks, mixer_maker
from recbft.models.losses import LOSSES
from recbft.models.precision_channel import CoreConfig

OF_RUN = 2**32  # above all seeds that are given: what a run's own seed draws is its order


@dataclass(frozen=True, kw_only=True)
class BERT4RecConfig(BackboneConfig):
    """Shape of the backbone and its objective (the ``backbone`` section of a config).

    ``embedding_scale`` None means sqrt(hidden_size), or 1 in the post-norm layer.
    """

    attention_dropout: float | None = None  # None means 0, or dropout in the post-norm layer
    layer: Literal["pre_norm", "post_norm"] = "pre_norm"
    head: Literal["tied", "gelu"] = "tied"  # gelu: Linear, GELU and norm before the items, which have biases
    positions: Literal["oldest", "latest"] = "latest"
    mask_probability: float = 0.2  # of an item in training
    last_item_probability: float = 0.5  # of cutting a history at random and masking its last item only
    mask_seed: int | None = 0  # of what is masked; None means that it follows the run's seed

    def __post_init__(self) -> None:
        check_backbone(self)
        check_range("max_length", self.max_length, at_least=2)  # an item and the mask
        check_range("attention_dropout", self.attention_dropout, at_least=0, below=1)
        check_range("mask_probability", self.mask_probability, above=0, below=1)
        check_range("last_item_probability", self.last_item_probability, at_least=0, at_most=1)
        check_range("mask_seed", self.mask_seed, at_least=0)


def bert4rec(
    config: BERT4RecConfig,
    core: CoreConfig | None,
    training_counts: Tensor,
    *,
    seed: int = 0,
    mixing: Mixing = ATTENTION,
    moe: FuzzyMoEConfig | None = None,
    content: Tensor | None = None,
) -> Backbone:
    """The model; arguments as ``ModelSpec`` says."""
    D, post_norm = config.hidden_size, config.layer == "post_norm"
    read_out: nn.Module | None = None
    if config.head == "gelu":
        read_out = nn.Sequential(nn.Linear(D, D), nn.GELU(), LayerNorm(D, eps=config.norm_eps))
    elif post_norm:
        read_out = nn.Identity()  # the last layer ends in a norm
    blocks = make_blocks(
        config,
        core,
        mixer_maker(
            config,
            core,
            mixing,
            attention_dropout=config.attention_dropout,
            default_dropout=config.dropout if post_norm else 0.0,
        ),
        inner_size=config.inner_size or 4 * D,
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
        read_out=read_out,
        norm_embedding=post_norm,
        item_bias=config.head == "gelu",
        both_ways=True,
        positions=config.positions,
        reads_times=mixing.reads_times,
        content=content,
    )


def cloze_batches(
    config: BERT4RecConfig,
    items: NDArray[np.int64],
    start: NDArray[np.int64],
    stop: NDArray[np.int64],
    *,
    num_items: int,
    **order: Any,
) -> ClozeBatches:
    """The batches that BERT4Rec is trained on; ``order`` is their samples, batch_size, seed, times and so on."""
    mask_seed = OF_RUN + order["seed"] if config.mask_seed is None else config.mask_seed
    return ClozeBatches(
        items,
        start,
        stop,
        max_length=config.max_length,
        mask=num_items + 1,
        mask_probability=config.mask_probability,
        last_item_probability=config.last_item_probability,
        mask_seed=mask_seed,
        with_earlier=LOSSES[config.loss].leaves_out_seen,
        **order,
    )
