"""Hugging Face models whose layers track precision, and how one is made from a pretrained one.

Source: Precision Tracked Transformer (arXiv 2605.18832), section 5.3 and appendix O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
    from transformers.models.mistral.modeling_mistral import MistralConfig, MistralDecoderLayer, MistralForCausalLM
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Config, Qwen2DecoderLayer, Qwen2ForCausalLM
except ImportError as error:
    raise ImportError(
        f"recbft.pretrained needs Hugging Face's transformers ({error}); pip install 'recbft[transformers]'"
    ) from None

from recbft.config.fields import check_choice, check_range, from_dict, to_dict
from recbft.errors import UserError
from recbft.models.precision_channel import CoreConfig
from recbft.pretrained.layer import Flow, PrecisionLayer

# The paper has no count for words, so that precision starts from the embedding alone; each layer's prior is its own.
DEFAULT = CoreConfig(initial="hybrid", prior_scale="per_layer", jacobian="exact")


@dataclass(frozen=True, kw_only=True)
class PretrainedPrecision:
    """The precision channel of a pretrained model, saved in its config under ``precision``."""

    core: CoreConfig = DEFAULT
    warmup: int = 50  # passes in training until w is 1; 0 leaves w to ``set_ramp``

    def __post_init__(self) -> None:
        check_choice("core.estimator", self.core.estimator, ("reml",))
        check_choice("core.kriging", self.core.kriging, ("scalar",))
        check_choice("core.initial", self.core.initial, ("hybrid", "uniform"))  # the others need counts of items
        check_choice("core.jacobian", self.core.jacobian, ("exact", "running_mean", "off"))
        check_choice("core.jacobian_in_evaluation", self.core.jacobian_in_evaluation, ("exact", "running_mean", "off"))
        check_range("warmup", self.warmup, at_least=0)
        if self.core.is_running:
            raise UserError("core.prior_variance running is for models of recbft; give a number, or leave it out")
        if self.core.read_out != "off":
            raise UserError(f"core.read_out {self.core.read_out} is for models of recbft; leave it out")


class PrecisionTracked:
    """What the three models below share; ``config.precision`` holds the settings of the channel.

    Trained, saved, loaded and asked as any model of Hugging Face. Gradient checkpointing would count running means
    twice, so it is not supported.
    """

    supports_gradient_checkpointing = False
    _keep_in_fp32_modules_strict = ("start", "precision", "update")  # parts of a layer
    _layer: type[PrecisionLayer]

    def __init__(self, config: Any) -> None:
        if config.precision is None:
            raise UserError(
                "the model's config has no precision, so that its weights hold no channel; load them as the model that "
                "they are, and give it to recbft.pretrained.track_precision"
            )
        super().__init__(config)  # type: ignore[call-arg]
        self._track(self.model.layers)  # type: ignore[attr-defined]

    @property
    def ramp(self) -> float:
        """The warm-up w: 0 is the original model, 1 the whole of the precision channel."""
        return float(self._first.start.ramp)

    def set_ramp(self, ramp: float) -> None:
        """Set w, in [0, 1]; training raises it from there, unless ``warmup`` is 0."""
        check_range("ramp", ramp, at_least=0, at_most=1)
        self._first.start.ramp.fill_(ramp)

    @property
    def posterior_precision(self) -> Tensor | None:
        """What this thread's last pass left: the precision of every hidden state that it made, (B, T, D)."""
        precision: Tensor | None = self._first.flow.precision
        return precision

    @property
    def _first(self) -> Any:
        return self.model.layers[0]  # type: ignore[attr-defined]

    def _track(self, layers: Any) -> None:
        """Take layers whose modules these become, and put a channel beside them."""
        config: Any = self.config  # type: ignore[attr-defined]
        settings = from_dict(PretrainedPrecision, config.precision, "precision")
        flow, last = Flow(), len(layers) - 1
        self.model.layers = nn.ModuleList(  # type: ignore[attr-defined]
            self._layer(layer, config, settings.core, settings.warmup, flow, is_first=n == 0, is_last=n == last)
            for n, layer in enumerate(layers)
        )


class PrecisionLlamaConfig(LlamaConfig):  # type: ignore[misc]
    """Llama's, with the settings of the precision channel."""

    model_type = "recbft_llama"
    precision: dict[str, Any] | None = None


class PrecisionMistralConfig(MistralConfig):  # type: ignore[misc]
    """Mistral's, with the settings of the precision channel."""

    model_type = "recbft_mistral"
    precision: dict[str, Any] | None = None


class PrecisionQwen2Config(Qwen2Config):  # type: ignore[misc]
    """Qwen2's, with the settings of the precision channel."""

    model_type = "recbft_qwen2"
    precision: dict[str, Any] | None = None


# Layers derive from Hugging Face's, by whose class it finds the hidden states that a caller asks for.
class PrecisionLlamaLayer(PrecisionLayer, LlamaDecoderLayer):  # type: ignore[misc]
    """A layer of Llama that tracks precision."""


class PrecisionMistralLayer(PrecisionLayer, MistralDecoderLayer):  # type: ignore[misc]
    """A layer of Mistral that tracks precision."""


class PrecisionQwen2Layer(PrecisionLayer, Qwen2DecoderLayer):  # type: ignore[misc]
    """A layer of Qwen2 that tracks precision."""


class PrecisionLlamaForCausalLM(PrecisionTracked, LlamaForCausalLM):  # type: ignore[misc]
    """Llama whose layers track precision."""

    config_class = PrecisionLlamaConfig
    _layer = PrecisionLlamaLayer
    _no_split_modules = ("PrecisionLlamaLayer",)


class PrecisionMistralForCausalLM(PrecisionTracked, MistralForCausalLM):  # type: ignore[misc]
    """Mistral whose layers track precision."""

    config_class = PrecisionMistralConfig
    _layer = PrecisionMistralLayer
    _no_split_modules = ("PrecisionMistralLayer",)


class PrecisionQwen2ForCausalLM(PrecisionTracked, Qwen2ForCausalLM):  # type: ignore[misc]
    """Qwen2 whose layers track precision."""

    config_class = PrecisionQwen2Config
    _layer = PrecisionQwen2Layer
    _no_split_modules = ("PrecisionQwen2Layer",)


FAMILIES: dict[type, Any] = {
    LlamaForCausalLM: PrecisionLlamaForCausalLM,
    MistralForCausalLM: PrecisionMistralForCausalLM,
    Qwen2ForCausalLM: PrecisionQwen2ForCausalLM,
}
for _tracked in FAMILIES.values():
    AutoConfig.register(_tracked.config_class.model_type, _tracked.config_class)
    AutoModelForCausalLM.register(_tracked.config_class, _tracked)


def track_precision(model: Any, core: CoreConfig = DEFAULT, *, warmup: int = 50, seed: int = 0) -> Any:
    """A model whose layers are those of ``model``, with a precision channel.

    The two share their modules, so that what trains one trains the other. At warm-up 0, where a new channel starts, the
    logits are those of ``model`` to the last bit.

    Args:
        model: a pretrained ``LlamaForCausalLM``, ``MistralForCausalLM`` or ``Qwen2ForCausalLM``, whose attention is
            ``sdpa`` or ``eager``.
        core: settings of the channel: estimator ``reml``, initial ``hybrid`` or ``uniform``.
        warmup: passes in training until the warm-up w is 1, one per optimiser step unless gradients are accumulated; 0
            leaves w to ``set_ramp``.
        seed: of the few weights of the channel that start at random.

    Returns:
        A model of Hugging Face's of its own type (``recbft_llama`` and so on). ``AutoModelForCausalLM`` loads it where
        ``recbft.pretrained`` is imported.

    Raises:
        UserError: another kind of model, or settings that need what a language model does not have.

    Channel parameters are in float32 or float64, also beside weights in half precision.
    """
    kind = FAMILIES.get(type(model))
    if kind is None:
        supported = ", ".join(known.__name__ for known in FAMILIES)
        tracked = " already tracks precision" if isinstance(model, PrecisionTracked) else " is not supported"
        raise UserError(f"{type(model).__name__}{tracked}; give one of {supported}")
    if not all(parameter.is_floating_point() for parameter in model.parameters()):
        raise UserError("the model's weights are quantised; load it in float32, float16 or bfloat16")
    settings = PretrainedPrecision(core=core, warmup=warmup)
    known = {**model.config.to_dict(), "model_type": kind.config_class.model_type, "precision": to_dict(settings)}
    config = kind.config_class.from_dict(known)
    config._attn_implementation = model.config._attn_implementation
    with torch.device("meta"):
        made = kind(config)
    weight = next(model.model.layers[0].parameters())
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        made._track(model.model.layers)
    for layer in made.model.layers:
        for name, part in layer.named_children():
            if name in PrecisionTracked._keep_in_fp32_modules_strict:
                part.to(weight.device, torch.promote_types(weight.dtype, torch.float32))
    for name, part in model.model.named_children():
        if name != "layers":
            setattr(made.model, name, part)
    made.lm_head, made.generation_config = model.lm_head, model.generation_config
    return made.train(model.training)
