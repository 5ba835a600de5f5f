"""A protocol holds what a number depends on; a config's hash is that of its values."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pandas as pd
import pytest

from recbft.datasets.dataset import Dataset
from recbft.evaluation.metrics import config_hash, protocol

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
