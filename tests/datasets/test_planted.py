"""The truth behind generated data finds its data set again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from recbft.datasets import Dataset, SyntheticConfig, generate, save_synthetic, synthetic_dataset
from recbft.datasets.planted import planted_reliability
from recbft.datasets.prepare import Preparation


@pytest.fixture(scope="module")
def small():
    return generate(SyntheticConfig(num_users=60, num_items=50, mean_length=6, seed=2))


@pytest.fixture(scope="module")
def synthetic():
    return Dataset.load("synthetic")


def test_a_saved_data_set_has_its_truth_beside_it(small, tmp_path):
    save_synthetic(small, tmp_path / "made.parquet")
    dataset = Dataset.load(tmp_path / "made.parquet", time="timestamp", preparation=Preparation(k_core=3))
    found = planted_reliability(dataset, tmp_path / "made.parquet")
    assert dataset.num_items < 50
    items = dict(zip(small.items["item_id"], small.items["reliability"], strict=True))
    users = dict(zip(small.users["user_id"], small.users["reliability"], strict=True))
    assert found.items.tolist() == [items[item] for item in dataset.item_ids]
    assert found.users.tolist() == [users[user] for user in dataset.user_ids]


def test_a_data_set_named_in_its_root_has_its_truth_there_and_ids_may_have_become_text(small, tmp_path):
    save_synthetic(small, tmp_path / "made.parquet")
    dataset = Dataset.load("made", data_root=tmp_path, time="timestamp")
    assert planted_reliability(dataset, "made") is None
    found = planted_reliability(dataset, "made", tmp_path)
    assert np.isin(found.users, [0.4, 1.0]).all()
    texts = Dataset.from_frame(small.events.astype({"user_id": str, "item_id": str}), time="timestamp")
    of_texts = planted_reliability(texts, tmp_path / "made.parquet")
    assert of_texts.items.tolist() == found.items.tolist() and of_texts.users.tolist() == found.users.tolist()


def test_ids_without_truth_are_nan(small, tmp_path):
    save_synthetic(small._replace(items=small.items[small.items["item_id"] != 7]), tmp_path / "made.parquet")
    dataset = Dataset.from_frame(small.events, time="timestamp")
    found = planted_reliability(dataset, tmp_path / "made.parquet").items
    assert np.flatnonzero(np.isnan(found)).tolist() == np.flatnonzero(dataset.item_ids == 7).tolist()


def test_the_generated_data_set_s_truth_is_generated_again(synthetic):
    found = planted_reliability(synthetic, "synthetic")
    assert found.items.size == 1000 and found.users.size == 2000
    assert pd.Series(found.items).value_counts().to_dict() == {1.0: 700, 0.5: 150, 0.2: 150}


def test_other_data_of_that_name_has_no_truth(small, synthetic, tmp_path):
    assert planted_reliability(synthetic_dataset(SyntheticConfig(num_users=30, seed=1)), "synthetic") is None
    assert planted_reliability(replace(synthetic, items=synthetic.items[::-1]), "synthetic") is None
    dataset = Dataset.from_frame(small.events)
    assert planted_reliability(dataset, tmp_path / "other.parquet") is None
    assert planted_reliability(dataset, "frame") is None
