"""The published BERT4Rec and HSTU, written again from their papers with PyTorch's own parts, token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from recbft.datasets.batches import pack_histories

V, D, H, T = 12, 8, 2, 10
K = D // H


def linear(w, name, x):
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def norm(w, name, x, eps):
    return F.layer_norm(x, (D,), w[f"{name}.weight"], w[f"{name}.bias"], eps=eps)


@pytest.mark.parametrize("positions", ["latest", "oldest"])
def test_bert4rec_published_is_bert_over_the_items_and_a_mask(lab, positions):
    model = lab.shaken(lab.build("published", "bert4rec", positions=positions)).eval()
    w, eps, histories = model.state_dict(), model.config.norm_eps, lab.draw_histories(1)
    with torch.no_grad():
        states, (weight, bias) = model.user_states(lab.packed(histories, model)).state, model.item_table()
    for history, found in zip(histories, states @ weight.T + bias, strict=True):
        tokens = torch.tensor([*history, V + 1])
        places = torch.arange(len(tokens))
        places = places.flip(0) if positions == "latest" else places
        h = norm(w, "norm_embedding", w["item_embedding.weight"][tokens] + w["position_embedding.weight"][places], eps)
        for block in ("blocks.0", "blocks.1"):
            layer = torch.nn.TransformerEncoderLayer(
                D, H, 4 * D, dropout=0.0, activation="gelu", layer_norm_eps=eps, batch_first=True, dtype=torch.float64
            )
            parts = [f"{block}.mixer.{part}" for part in ("query", "key", "value")]
            layer.load_state_dict(
                {
                    "self_attn.in_proj_weight": torch.cat([w[f"{part}.weight"] for part in parts]),
                    "self_attn.in_proj_bias": torch.cat([w[f"{part}.bias"] for part in parts]),
                    "self_attn.out_proj.weight": w[f"{block}.mixer.out.weight"],
                    "self_attn.out_proj.bias": w[f"{block}.mixer.out.bias"],
                    "linear1.weight": w[f"{block}.inner.weight"],
                    "linear1.bias": w[f"{block}.inner.bias"],
                    "linear2.weight": w[f"{block}.outer.weight"],
                    "linear2.bias": w[f"{block}.outer.bias"],
                    "norm1.weight": w[f"{block}.norm_mixer.weight"],
                    "norm1.bias": w[f"{block}.norm_mixer.bias"],
                    "norm2.weight": w[f"{block}.norm_ffn.weight"],
                    "norm2.bias": w[f"{block}.norm_ffn.bias"],
                }
            )
            with torch.no_grad():
                h = layer(h[None])[0]
        state = norm(w, "norm.2", F.gelu(linear(w, "norm.0", h[-1])), eps)
        expected = state @ w["item_embedding.weight"][: V + 1].T + w["item_bias"]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shown", [None, False, True], ids=["no times", "own time", "target's time"])
def test_hstu_published_is_the_authors_layer(lab, shown):
    times_of = {"time_bias": shown is not None, "show_target_time": bool(shown)}
    model = lab.shaken(lab.build("published", "hstu", **times_of)).eval()
    w, eps = model.state_dict(), model.config.norm_eps
    rng = np.random.default_rng(3)
    history = rng.integers(1, V + 1, 7)
    times = np.cumsum(rng.integers(0, 100_000, 8))
    events = np.append(history, 5)
    batch = pack_histories(events, np.array([0]), np.array([7]), times=times, with_next_times=bool(shown))
    with torch.no_grad():
        found = model.user_states(batch).state[0]
    h = math.sqrt(D) * w["item_embedding.weight"][history] + w["position_embedding.weight"][:7]
    for block in ("blocks.0", "blocks.1"):
        x = norm(w, f"{block}.norm_mixer", h, eps)
        u, v, q, k = (F.silu(linear(w, f"{block}.mixer.{part}", x)) for part in ("gate", "value", "query", "key"))
        e = torch.zeros(7, D, dtype=torch.float64)
        for t in range(7):
            for j in range(t + 1):
                bias = w[f"{block}.mixer.position_table"][t - j, 0]
                if shown is not None:
                    elapsed = max(abs(int(times[t + shown] - times[j])), 1)
                    bias = bias + w[f"{block}.mixer.time_table"][int(math.log(elapsed) / 0.301), 0]
                for head in range(H):
                    part = slice(head * K, (head + 1) * K)
                    weight = F.silu(q[t, part] @ k[j, part] / math.sqrt(K) + bias) / T
                    e[t, part] += weight * v[j, part]
        h = h + linear(w, f"{block}.mixer.out", norm(w, f"{block}.mixer.norm", e, eps) * u)
    torch.testing.assert_close(found, norm(w, "norm", h[-1], eps), rtol=1e-10, atol=1e-10)


def test_the_published_arms_have_the_parameters_of_their_papers(lab):
    bert, hstu = (dict(lab.build("published", model).named_parameters()) for model in ("bert4rec", "hstu"))
    assert {"norm_embedding.weight", "blocks.0.mixer.out.bias", "norm.0.weight", "item_bias"} <= set(bert)
    assert bert["item_embedding.weight"].shape == (V + 2, D) and bert["blocks.0.inner.weight"].shape == (4 * D, D)
    assert {"blocks.0.mixer.gate.weight", "blocks.0.mixer.position_table", "blocks.0.mixer.out.weight"} <= set(hstu)
    assert not any("inner" in name or "decay" in name for name in hstu)
