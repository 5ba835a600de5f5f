"""RecBole's own SASRec and losses, with their weights, are what recbft makes of their settings."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recbft.models.contract import read_histories
from recbft.models.losses import pairwise_ranking
from recbft.training.run_config import load_run_config

IN_BLOCKS = {
    "mixer.query": "multi_head_attention.query",
    "mixer.key": "multi_head_attention.key",
    "mixer.value": "multi_head_attention.value",
    "mixer.out": "multi_head_attention.dense",
    "norm_mixer": "multi_head_attention.LayerNorm",
    "inner": "feed_forward.dense_1",
    "outer": "feed_forward.dense_2",
    "norm_ffn": "feed_forward.LayerNorm",
}


def of_recbole(name):
    """What RecBole calls a parameter of ours."""
    if name == "norm_embedding.weight" or name == "norm_embedding.bias":
        return name.replace("norm_embedding", "LayerNorm")
    if not name.startswith("blocks."):
        return name
    _, number, rest = name.split(".", 2)
    part, _, kind = rest.rpartition(".")
    return f"trm_encoder.layer.{number}.{IN_BLOCKS[part]}.{kind}"


OURS_TOO = {"n_layers": 2, "n_heads": 2, "hidden_size": 8, "inner_size": 24, "initializer_range": 0.3,
            "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.5, "attn_dropout_prob": 0.5,
            "MAX_ITEM_LIST_LENGTH": 12}  # fmt: skip
FIELDS = {"USER_ID_FIELD": "user_id", "ITEM_ID_FIELD": "item_id", "LIST_SUFFIX": "_list", "NEG_PREFIX": "neg_",
          "ITEM_LIST_LENGTH_FIELD": "item_length", "device": "cpu", "loss_type": "CE"}  # fmt: skip


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_sasrec_with_a_post_norm_layer_is_recbole_s(at_home, activation):
    from recbole.model.sequential_recommender import SASRec

    num_items = 40
    settings = OURS_TOO | FIELDS | {"hidden_act": activation}
    theirs = SASRec(settings, SimpleNamespace(num=lambda field: num_items + 1)).double().eval()
    asked = OURS_TOO | {"model": "SASRec", "layer": "post_norm"}
    asked |= {} if activation == "gelu" else {"hidden_act": activation}  # as RecBole, gelu unless it is named
    file = at_home / "recbole.yaml"
    file.write_text("".join(f"{key}: {value}\n" for key, value in asked.items()))
    config = load_run_config(file)
    ours = config.build(torch.ones(num_items + 1)).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # biases and norms too
            parameter.normal_(std=0.5)
    weights = theirs.state_dict()
    own_names = [name for name in ours.state_dict() if name != "ramp"]
    ours.load_state_dict({name: weights.pop(of_recbole(name)) for name in own_names} | {"ramp": torch.zeros(())})
    assert not weights, "all of RecBole's weights are ours"

    rng = np.random.default_rng(0)
    lengths = np.array([1, 3, 12, 30])
    items, stop = rng.integers(1, num_items + 1, lengths.sum()), lengths.cumsum()
    (batch,) = read_histories(ours, items, stop - lengths, stop, times=None, source="t")
    padded = torch.zeros(len(lengths), 12, dtype=torch.int64)
    for row, (first, last) in enumerate(zip(stop - lengths, stop, strict=True)):
        read = torch.from_numpy(items[first:last][-12:])
        padded[row, : len(read)] = read
    with torch.no_grad():
        found = ours.user_states(batch).state @ ours.item_table().weight.T
        interaction = {theirs.ITEM_SEQ: padded, theirs.ITEM_SEQ_LEN: torch.from_numpy(lengths.clip(max=12))}
        expected = theirs.full_sort_predict(interaction)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_pairwise_loss_is_recbole_s():
    from recbole.model.loss import BPRLoss

    random = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(n, 4, generator=random, dtype=torch.float64) for n in (20, 9))
    target, negative = (torch.randint(9, (20,), generator=random) for _ in range(2))
    expected = BPRLoss()((states * weight[target]).sum(-1), (states * weight[negative]).sum(-1))
    torch.testing.assert_close(pairwise_ranking(states, weight, target, negative[:, None]), expected, rtol=0, atol=1e-8)
