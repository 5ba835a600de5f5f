"""Tiny random models of each family, in float64 unless asked otherwise."""

from __future__ import annotations

import pytest
import torch

SHAPE = {
    "vocab_size": 17,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


@pytest.fixture
def plain():
    """``plain(family)``: the model as Hugging Face makes it, in evaluation mode."""
    transformers = pytest.importorskip("transformers")

    def make(family: str = "llama", *, attention: str = "sdpa", dtype: torch.dtype = torch.float64, **shape):
        name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}[family]
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**{**SHAPE, **shape})
        kind = getattr(transformers, f"{name}ForCausalLM")
        return kind._from_config(config, attn_implementation=attention).to(dtype).eval()

    return make


@pytest.fixture
def tiny(plain):
    """``tiny(family)``: the model with a precision channel."""
    from recbft.pretrained import track_precision

    def make(family: str = "llama", *, warmup: int = 50, **more):
        return track_precision(plain(family, **more), warmup=warmup)

    return make
