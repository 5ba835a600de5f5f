"""The plain Transformer is a special case, and the arms without precision are the layers that their papers write."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from recbft.datasets.batches import pack_histories
from recbft.mixers import Mixer, Observation

V, D, H, T = 12, 8, 2, 10
K = D // H


def twins(lab, seed=0, core=None, **settings):
    """A precision-tracking model and the plain layer with the same weights."""
    tracked = lab.build("bft", core=core, **settings)
    plain = lab.build("matched", **{"recency_decay": True, **settings})
    lab.shaken(tracked, seed)
    missing, unexpected = plain.double().load_state_dict(tracked.state_dict(), strict=False)
    assert not missing and all("precision" in name for name in unexpected)
    return tracked, plain


@pytest.mark.parametrize("settings", [{}, {"output_projection": True}, {"recency_decay": False}, {"n_layers": 3}])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("seed", [0])
def test_before_the_warm_up_a_precision_layer_is_the_plain_layer_bit_for_bit(lab, settings, training, seed):
    tracked, plain = twins(lab, seed, **settings)
    for model in (tracked, plain):
        model.set_ramp(0.0)
    for one, two in zip(
        *(lab.beliefs(model, lab.draw_histories(seed), training=training) for model in (tracked, plain)), strict=True
    ):
        assert torch.equal(one[0], two[0])


class Certain(Mixer):
    """A mixer whose innovation is beyond doubt: against precision 1 its gain is 1."""

    def __init__(self, mixer):
        super().__init__()
        self.mixer = mixer

    def forward(self, *args, **settings):
        innovation, precision = self.mixer(*args, **settings)
        return Observation(innovation, torch.full_like(precision, 1e300))


@pytest.mark.parametrize("seed", range(2))
def test_with_precision_one_gain_one_and_no_noise_a_layer_is_the_plain_layer_bit_for_bit(lab, seed):
    core = {
        "initial": "uniform",
        "lam_max": 1.0,
        "jacobian": "off",
        "jacobian_in_evaluation": "off",
        "process_noise": False,
    }
    tracked, plain = twins(lab, seed, core=core)
    for block in tracked.blocks:
        block.mixer = Certain(block.mixer)
    plain.set_ramp(1.0)
    histories = lab.draw_histories(seed)
    for one, two in zip(lab.beliefs(tracked, histories), lab.beliefs(plain, histories), strict=True):
        assert torch.equal(one[0], two[0]) and (one[1] == 1).all()


def linear(w, name, x):
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def norm(w, name, x, eps=1e-8):
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps=eps)


def attend(w, block, query, source):
    """Causal attention of one history with a model's weights, by PyTorch's own."""
    parts = (("query", query), ("key", source), ("value", source))
    q, k, v = (linear(w, f"{block}.mixer.{part}", x).view(len(x), H, K).transpose(0, 1) for part, x in parts)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)


def ffn(w, block, x, activation):
    return linear(w, f"{block}.outer", activation(linear(w, f"{block}.inner", x)))


def embed(w, history):
    return math.sqrt(D) * w["item_embedding.weight"][history] + w["position_embedding.weight"][: len(history)]


def pre_norm_transformer(w, history, output_projection=False):
    h = embed(w, history)
    for block in ("blocks.0", "blocks.1"):
        x = norm(w, f"{block}.norm_mixer", h)
        e = attend(w, block, x, x)
        if output_projection:
            e = linear(w, f"{block}.mixer.out", e)
        h = h + e
        h = h + ffn(w, block, norm(w, f"{block}.norm_ffn", h), F.gelu)
    return norm(w, "norm", h) @ w["item_embedding.weight"][1:].T


def authors_sasrec(w, history):
    h = embed(w, history)
    for block in ("blocks.0", "blocks.1"):
        q = norm(w, f"{block}.norm_mixer", h)
        h = q + attend(w, block, q, h)
        x = norm(w, f"{block}.norm_ffn", h)
        h = x + ffn(w, block, x, F.relu)
    return norm(w, "norm", h) @ w["item_embedding.weight"][1:].T


@pytest.mark.parametrize(
    ("variant", "plain"),
    [
        ("matched", pre_norm_transformer),
        ("output", lambda w, history: pre_norm_transformer(w, history, output_projection=True)),
        ("published", authors_sasrec),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_an_arm_without_precision_is_the_layer_as_its_paper_writes_it(lab, variant, plain, seed):
    settings = {"output_projection": True} if variant == "output" else {}
    model = lab.shaken(lab.build("published" if variant == "published" else "matched", **settings), seed)
    weights = model.state_dict()
    histories = lab.draw_histories(seed)
    for history, (scores, _) in zip(histories, lab.beliefs(model, histories), strict=True):
        torch.testing.assert_close(scores, plain(weights, history), rtol=1e-12, atol=1e-12)


def test_the_loss_is_the_mean_cross_entropy_of_the_next_item_over_all_items(lab):
    model = lab.shaken(lab.build("matched"))
    histories = [[1, 2, 3, 4], [5, 6], [7, 8, 9, 10, 11]]
    losses = []
    for history in histories:
        scores = pre_norm_transformer(model.state_dict(), history[:-1])
        losses += [-torch.log_softmax(row, -1)[target - 1] for row, target in zip(scores, history[1:], strict=True)]
    found = model.train().loss(lab.packed(histories, with_targets=True))
    torch.testing.assert_close(found, torch.stack(losses).mean(), rtol=1e-10, atol=0)


def test_the_embedding_scale_is_the_one_asked_for(lab):
    one, other = (lab.shaken(lab.build("matched", embedding_scale=scale)) for scale in (None, 1.0))
    a, b = (lab.beliefs(model, [[1, 2, 3]])[0][0] for model in (one, other))
    assert other.embedding_scale == 1.0 and not torch.allclose(a, b)


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
