"""Precision inside a pretrained language model: Hugging Face's Llama, Mistral and Qwen2 (extra ``transformers``)."""

from recbft.pretrained.models import (
    FAMILIES,
    PrecisionLlamaForCausalLM,
    PrecisionMistralForCausalLM,
    PrecisionQwen2ForCausalLM,
    track_precision,
)

__all__ = [
    "FAMILIES",
    "PrecisionLlamaForCausalLM",
    "PrecisionMistralForCausalLM",
    "PrecisionQwen2ForCausalLM",
    "track_precision",
]
