"""The layers that a backbone stacks, blocks around mixers, with a precision channel or without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from recbft.errors import UserError
from recbft.mixers import MIXERS, Mixer, MixerOptions, Place
from recbft.mixers.interface import refuse_idle
from recbft.models.backbone import BackboneConfig
from recbft.models.block import Block, Layer
from recbft.models.feed_forward import Activation, FuzzyMoE, FuzzyMoEConfig
from recbft.models.precision_channel import CoreConfig, LayerPrecision, check_core
from recbft.models.update_rules import make_update, without_precision

RECENCY_START = 0.99


def make_blocks(
    config: BackboneConfig,
    core: CoreConfig | None,
    make_mixer: Callable[[], Mixer],
    *,
    inner_size: int | None,
    innovation_dropout: float | None = None,
    activation: Activation = "gelu",
    layer: Layer = "pre_norm",
    moe: FuzzyMoEConfig | None = None,
) -> list[Block]:
    """The layers of a backbone around its mixers, each with a precision channel where ``core`` is given."""
    D = config.hidden_size
    for key, found, needed in (
        ("layer", layer, "pre_norm"),
        ("activation", activation, "gelu"),
        ("feed_forward", str(inner_size is not None).lower(), "true"),
    ):
        if core is not None and found != needed:
            raise UserError(
                f"backbone.{key} is {found}, but arm 'bft' needs {needed}, to predict precision through the "
                "feed-forward network; leave it out, or take arm matched or published"
            )
    if moe is not None and (layer != "pre_norm" or inner_size is None):
        kind = layer if layer != "pre_norm" else "feed_forward false"
        raise UserError(f"experts need a pre-norm layer with a feed-forward network, got {kind}; leave them out")
    if moe is not None and core is not None:
        refuse_idle(core, ("jacobian_rank",), "with experts, whose Jacobian is exact; leave it out")
    if core is not None and config.n_layers == 1 and core.read_out == "off":
        why = "with n_layers 1: no score depends on what the last layer predicts; leave it out or take more layers"
        refuse_idle(core, ("jacobian_detach",), why)
    if moe is not None and activation != "gelu":
        raise UserError(f"activation {activation} has no effect with experts, whose activation is gelu; leave it out")
    blocks = []
    for number in range(config.n_layers):
        precision, update = None, None
        if core is not None:
            is_last = number == config.n_layers - 1
            precision = LayerPrecision(core, hidden_size=D, head_width=D // config.n_heads, is_last=is_last)
            update = make_update(core, hidden_size=D, n_heads=config.n_heads)
        blocks.append(
            Block(
                make_mixer(),
                precision,
                hidden_size=D,
                inner_size=inner_size,
                dropout=config.dropout,
                innovation_dropout=innovation_dropout,
                norm_eps=config.norm_eps,
                activation=activation,
                layer=layer,
                update=update,
                moe=None if moe is None or inner_size is None else FuzzyMoE(D, inner_size, moe),
            )
        )
    return blocks


class Mixing(NamedTuple):
    """Which mixer the layers have, and its own options; None stands for its defaults."""

    name: str = "attention"
    options: MixerOptions | None = None

    @property
    def reads_times(self) -> bool:
        """Whether it looks at real event times."""
        return self.options is not None and self.options.reads_times


ATTENTION = Mixing()


def mixer_maker(
    config: BackboneConfig,
    core: CoreConfig | None,
    mixing: Mixing,
    *,
    attention_dropout: float | None,
    default_dropout: float,
    **more: Any,
) -> Callable[[], Mixer]:
    """What makes the mixer of each layer.

    Args:
        attention_dropout: as asked for, or None.
        default_dropout: of the attention weights where nothing is asked for.
        more: arguments of this mixer alone.
    """
    spec = MIXERS[mixing.name]
    if attention_dropout is not None and "dropout" not in spec.hears:
        raise UserError(f"attention_dropout has no effect with mixer {mixing.name!r}, which has no weights to drop")
    # `bft` has the decay by default, so that there it is left out where a mixer has a decay of its own, or none.
    if core is None and config.recency_decay and "recency_decay" not in spec.hears:
        raise UserError(f"recency_decay has no effect with mixer {mixing.name!r}; leave it out (and `+recency`)")
    if not config.recency_decay or "recency_decay" not in spec.hears:
        refuse_idle(config, ("recency_start",), "without a recency decay; leave it out")
    if core is None and mixing.options is not None:
        why = "in an arm without precision; leave it out"
        refuse_idle(mixing.options, mixing.options.only_with_precision, why)
    if core is not None:
        check_core(core, spec.precision, config.max_length)
        if core.update == "kalman" and spec.precision == "none":
            raise without_precision(f"mixer {mixing.name}")
    start = RECENCY_START if config.recency_start is None else config.recency_start
    place = Place(
        hidden_size=config.hidden_size,
        n_heads=config.n_heads,
        length=config.max_length,
        dropout=default_dropout if attention_dropout is None else attention_dropout,
        output_projection=config.output_projection,
        recency_decay=start if config.recency_decay else None,
        estimation=None if core is None else core.estimation,
    )
    return lambda: spec.make(place, mixing.options, **more)
