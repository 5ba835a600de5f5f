"""The plain Transformer is a special case, and the arms without precision are the layers that their papers write."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from recbft.mixers import Mixer, Observation


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


def heads(x, num_heads):  # (T, D) -> (H, T, K)
    return x.view(len(x), num_heads, -1).transpose(0, 1)


def attend(w, block, query, source, num_heads=2):
    """Causal attention of one history with a model's weights, by PyTorch's own."""
    q, k, v = (
        heads(F.linear(x, w[f"{block}.mixer.{part}.weight"], w[f"{block}.mixer.{part}.bias"]), num_heads)
        for part, x in (("query", query), ("key", source), ("value", source))
    )
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)


def norm(w, name, x):
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-8)


def ffn(w, block, x, activation):
    inner = activation(F.linear(x, w[f"{block}.inner.weight"], w[f"{block}.inner.bias"]))
    return F.linear(inner, w[f"{block}.outer.weight"], w[f"{block}.outer.bias"])


def embed(w, history):
    items, positions = w["item_embedding.weight"][history], w["position_embedding.weight"][: len(history)]
    return math.sqrt(items.shape[-1]) * items + positions


def pre_norm_transformer(w, history, output_projection=False):
    h = embed(w, history)
    for block in ("blocks.0", "blocks.1"):
        x = norm(w, f"{block}.norm_mixer", h)
        e = attend(w, block, x, x)
        if output_projection:
            e = F.linear(e, w[f"{block}.mixer.out.weight"], w[f"{block}.mixer.out.bias"])
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


def test_the_embedding_scale_is_the_root_of_the_width_unless_asked_otherwise(lab):
    one = lab.shaken(lab.build("matched"))
    other = lab.shaken(lab.build("matched", embedding_scale=1.0))
    with torch.no_grad():
        other.load_state_dict(one.state_dict())
    assert one.embedding_scale == math.sqrt(lab.D) and other.embedding_scale == 1.0
    a, b = (lab.beliefs(model, [[1, 2, 3]])[0][0] for model in (one, other))
    assert not torch.allclose(a, b)
