"""Raw weights of llama2.c as a Llama of Hugging Face's.

A file is 7 little-endian int32 (dim, hidden width, layers, heads, key-value heads, vocabulary, length; a negative
vocabulary says that the read-out is not tied) and float32 weights: embedding, attention norms, Wq, Wk, Wv, Wo of all
layers, feed-forward norms, W1, W2, W3 of all layers, the last norm, two tables of the rotation that are not read, and
a read-out that is not tied. llama2.c turns the coordinates 2i and 2i + 1 of a head together, Hugging Face i and
i + K / 2, so that the rows of Wq and Wk change places.

One copy of stories260K.bin had each of its matrices transposed in place five times, by a program that made weights for
a board and always took them to be (in, out). It is known by its hash and turned back; a file as llama2.c writes it is
read as it is.

Source: https://github.com/karpathy/llama2.c, export.py (version 0) and run.c.
Shapes: K head width.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recbft.errors import UserError

HEADER = struct.Struct("<7i")
# SHA-256 of a file -> how often its matrices were transposed in place.
TRANSPOSED = {"9414d5a285453a7eab631713d171753232c978f6f97654211469aff8be93c8d6": 5}


def load_llama2c(path: Path) -> Any:
    """The model of a file, a ``transformers.LlamaForCausalLM`` in float32, in evaluation mode.

    Raises:
        UserError: there is no such file, or it is none of llama2.c (version 0).
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    if not path.is_file():
        raise UserError(f"{path} does not exist; name a file of llama2.c, such as stories260K.bin")
    raw = path.read_bytes()
    header = HEADER.unpack(raw[: HEADER.size]) if len(raw) >= HEADER.size else (0,) * 7
    D, width, L, H, kv_heads, signed_vocabulary, length = header
    V = abs(signed_vocabulary)
    if min(D, width, L, H, kv_heads, V, length) < 1 or D % H or H % kv_heads:
        raise UserError(f"{path} begins with {header}, which is no header of llama2.c (version 0)")
    K = D // H
    shapes = [
        *((V, D), (L, D), (L, D, D), (L, kv_heads * K, D), (L, kv_heads * K, D), (L, D, D), (L, D)),
        *((L, width, D), (L, D, width), (L, width, D), (D,), (2, length, K // 2)),
        *(() if signed_vocabulary > 0 else ((V, D),)),
    ]
    wanted = HEADER.size + 4 * sum(int(np.prod(shape)) for shape in shapes)
    if len(raw) != wanted:
        raise UserError(
            f"{path} has {len(raw):,} bytes, and as a header of llama2.c (version 0) its first 28 ask for {wanted:,}; "
            "take the whole file, in that format"
        )
    numbers, place, parts = torch.from_numpy(np.frombuffer(raw, "<f4", offset=HEADER.size).copy()), 0, []
    for shape in shapes:
        size = int(np.prod(shape))
        parts.append(numbers[place : place + size].view(shape))
        place += size
    turns = TRANSPOSED.get(hashlib.sha256(raw).hexdigest(), 0)
    parts = [turned_back(part, turns) if part.dim() == 3 and len(part) == L else part for part in parts]
    embedding, norm1, wq, wk, wv, wo, norm2, w1, w2, w3, norm, _, *read_out = parts
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": norm}
    weights["lm_head.weight"] = read_out[0] if read_out else embedding
    for layer in range(L):
        own = {
            "input_layernorm": norm1[layer],
            "self_attn.q_proj": in_halves(wq[layer], H),
            "self_attn.k_proj": in_halves(wk[layer], kv_heads),
            "self_attn.v_proj": wv[layer],
            "self_attn.o_proj": wo[layer],
            "post_attention_layernorm": norm2[layer],
            "mlp.gate_proj": w1[layer],
            "mlp.down_proj": w2[layer],
            "mlp.up_proj": w3[layer],
        }
        weights |= {f"model.layers.{layer}.{name}.weight": weight for name, weight in own.items()}
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=width,
        num_hidden_layers=L,
        num_attention_heads=H,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=not read_out,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights)
    return model.eval()


def turned_back(weights: Tensor, turns: int) -> Tensor:
    """Matrices, (L, out, in), that were so often overwritten by their transpose, each time read as (in, out)."""
    for _ in range(turns):
        weights = weights.mT.reshape(weights.shape)
    return weights


def in_halves(weight: Tensor, n_heads: int) -> Tensor:
    """Rows of Wq or Wk, (H K, D), whose pairs stand side by side, with pairs half a head apart."""
    return weight.view(n_heads, -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
