"""HSTU: gated pointwise attention over a user's items, scored against the item embeddings.

    h_0 = sqrt(D) emb(item) + pos(position)                                                  (6.1)
    h  <- h + innovation(Norm(h))                     ``mixers.pointwise``              (3.3, 8.4)
    h  <- h + FFN(Norm(h))                            where there is a feed-forward network  (4.1)
    state = Norm(h_L);   score(i) = state . emb_i                                            (6.2)

Three arms of the same code: ``published`` (the authors' layer: an output map in (8.4), no (4.1)), ``matched`` ((4.1)
put back, no output map, the precision channel off: the control that separates (4.1) from precision) and ``bft``
(precision tracked by the sandwich estimator, which needs no weights that sum to one).

Source: Zhai et al., Actions Speak Louder than Words (arXiv 2402.17152); Precision Tracked Transformer
(arXiv 2605.18832), section 5.1 and appendices D and M.
Shapes: D model width, V items.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from recbft.errors import UserError
from recbft.models.backbone import Backbone, BackboneConfig, check_backbone, root_of_width
from recbft.models.feed_forward import FuzzyMoEConfig
from recbft.models.layers import Mixing, make_blocks, mixer_maker
from recbft.models.precision_channel import CoreConfig

DROPOUT_CAP = 0.2


@dataclass(frozen=True, kw_only=True)
class HSTUConfig(BackboneConfig):
    """Shape of the backbone (the ``backbone`` section of a config).

    ``embedding_scale`` None means sqrt(hidden_size).
    """

    dropout: float = DROPOUT_CAP  # more is cut to this, with a warning
    norm_eps: float = 1e-6
    feed_forward: bool = True  # False is canonical HSTU
    time_bias: bool = False  # a learned bias by elapsed time; needs data with real times
    show_target_time: bool = False  # with time_bias: a token reads at the time of the next event, the target's
    activation: Literal["gelu", "relu"] = "gelu"

    def __post_init__(self) -> None:
        check_backbone(self)
        if self.dropout > DROPOUT_CAP:
            warnings.warn(
                f"dropout is {self.dropout:g}, but HSTU takes at most {DROPOUT_CAP:g}; {DROPOUT_CAP:g} is used",
                stacklevel=4,
            )
            object.__setattr__(self, "dropout", DROPOUT_CAP)
        if self.show_target_time and not self.time_bias:
            raise UserError("show_target_time has no effect without time_bias; leave it out or set time_bias: true")
        if self.inner_size is not None and not self.feed_forward:
            raise UserError("inner_size has no effect with feed_forward false; leave it out or set feed_forward: true")
        if self.activation != "gelu" and not self.feed_forward:
            raise UserError("activation has no effect with feed_forward false; leave it out or set feed_forward: true")


def hstu(
    config: HSTUConfig,
    core: CoreConfig | None,
    training_counts: Tensor,
    *,
    seed: int = 0,
    moe: FuzzyMoEConfig | None = None,
    content: Tensor | None = None,
) -> Backbone:
    """The model; arguments as ``ModelSpec`` says."""
    own = {"norm_eps": config.norm_eps, "time_bias": config.time_bias}
    pointwise = Mixing("pointwise")
    blocks = make_blocks(
        config,
        core,
        mixer_maker(config, core, pointwise, attention_dropout=None, default_dropout=config.dropout, **own),
        inner_size=(config.inner_size or 4 * config.hidden_size) if config.feed_forward else None,
        # With an output map the innovation is dropped before it, as the authors do.
        innovation_dropout=0.0 if config.output_projection else None,
        activation=config.activation,
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
        reads_times=config.time_bias,
        shows_target_time=config.show_target_time,
        content=content,
    )
