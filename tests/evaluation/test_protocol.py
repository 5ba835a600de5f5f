from __future__ import annotations

import hashlib
import json

import numpy as np
import pandas as pd
import pytest

from recbft.datasets.dataset import Dataset
from recbft.evaluation.evaluate import evaluate
from recbft.evaluation.protocol import config_hash, format_metrics, protocol
from recbft.models.popularity import Popularity

CONFIG = {"model": "pop", "arm": "published", "evaluation": {"ks": (5, 10)}}


@pytest.fixture
def dataset():
    rows = [(user, item) for user in range(3) for item in np.roll(range(4), user)]
    return Dataset.from_frame(pd.DataFrame(rows, columns=["user_id", "item_id"]), name="small")


def make_protocol(dataset, **changes):
    return protocol(
        dataset, **{"part": "test", "filter_seen": False, "max_length": 50, "seed": 7, "config": CONFIG, **changes}
    )


def test_a_protocol_holds_what_the_number_depends_on(dataset):
    made = make_protocol(dataset)
    for key, value in {
        "dataset": "small", "users": 3, "items": 4, "events": 12, "content_hash": dataset.content_hash,
        "target_hash": dataset.target_hash, "part": "test", "filter_seen": False, "max_length": 50, "seed": 7,
    }.items():  # fmt: skip
        assert made[key] == value
    assert "against the target" in made["ties"] and made["recbft_version"]
    assert json.loads(json.dumps(made))["config"]["evaluation"]["ks"] == [5, 10]


def test_metrics_print_with_their_protocol(dataset):
    result = evaluate(Popularity(dataset.training_counts), dataset, "test", ks=(10,))
    text = format_metrics(result.metrics, make_protocol(dataset))
    lines = text.splitlines()
    assert lines[0].split() == ["HR@10", "NDCG@10", "MRR@10", "MRR"]
    assert lines[1].startswith("all items") and lines[2].startswith("seen masked")
    assert lines[1].split()[2:] == [f"{value:.4f}" for value in result.metrics["unfiltered"].values()]
    assert lines[3].startswith("data: small, 3 users, 4 items, 12 events, content " + dataset.content_hash[:12])
    assert "ties against it" in lines[4] and "filter_seen false" in lines[4] and "seed 7" in lines[4]
    assert "max length 50" in lines[4] and "pop published" in lines[4] and config_hash(CONFIG)[:12] in lines[4]


def test_the_headline_is_named(dataset):
    assert "headline seen masked (filter_seen true)" in format_metrics({}, make_protocol(dataset, filter_seen=True))


@pytest.mark.parametrize("lost", ["content_hash", "filter_seen", "seed"])
def test_a_number_without_its_protocol_is_not_printed(dataset, lost):
    made = make_protocol(dataset)
    del made[lost]
    with pytest.raises(ValueError, match=f"the protocol lacks {lost}; a number is not printed without its protocol"):
        format_metrics({"unfiltered": {"hr@10": 0.5}}, made)


def test_rows_may_have_different_metrics(dataset):
    text = format_metrics({"a": {"hr@5": 0.5}, "b": {"mrr": 0.25}}, make_protocol(dataset))
    assert text.splitlines()[1].split() == ["a", "0.5000"] and text.splitlines()[2].split() == ["b", "0.2500"]


def test_a_configs_hash_ignores_the_order_of_keys_and_nothing_else():
    assert config_hash({"a": 1, "b": (2,)}) == config_hash({"b": [2], "a": 1})
    assert config_hash({"a": 1}) != config_hash({"a": 2})
    assert config_hash({"a": {"b": 1}}) != config_hash({"a": 1, "b": 1})


def test_an_option_that_is_not_set_leaves_the_hash_of_an_older_version_which_is_that_of_compact_json():
    older = {"core": {"lam_max": 5.0}, "arm": "bft"}
    assert config_hash({"new": None, "core": {"newer": None, "lam_max": 5.0}, "arm": "bft"}) == config_hash(older)
    assert config_hash({**older, "new": False}) != config_hash(older) != config_hash({**older, "new": 0})
    expected = hashlib.sha256(b'{"arm":"bft","core":{"lam_max":5.0}}').hexdigest()
    assert config_hash(older) == expected, "runs made so far would not be taken for those asked for"
