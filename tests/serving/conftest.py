"""A small data set with times, and a recommender that tracks precision on it."""

from __future__ import annotations

import pytest

from recbft import Recommender
from recbft.datasets.planted import synthetic_dataset
from recbft.datasets.synth import SyntheticConfig

SMALL = {"hidden_size": 8, "max_length": 8, "batch_size": 16, "epochs": 2, "device": "cpu", "warmup_steps": 4}


@pytest.fixture(scope="session")
def dataset():
    return synthetic_dataset(SyntheticConfig(num_users=50, num_items=60, mean_length=7, seed=1))


@pytest.fixture(scope="session")
def fitted(dataset):
    return Recommender("sasrec", arm="bft", **SMALL).fit(dataset)
