"""A data set small enough to train on in a blink, as a file."""

from __future__ import annotations

import pytest

from recbft.datasets.synth import SyntheticConfig, generate

SMALL = ("time=timestamp", "hidden_size=8", "max_length=10", "batch_size=32", "device=cpu", "epochs=2")


@pytest.fixture(scope="session")
def events(tmp_path_factory):
    path = tmp_path_factory.mktemp("benchmark-data") / "tiny.parquet"
    config = SyntheticConfig(num_users=120, num_items=80, mean_length=8.0, seed=3)
    generate(config).events.to_parquet(path)
    return path


@pytest.fixture
def small(events):
    """Options that make any benchmark a small one."""
    return ["--dataset", str(events), *(word for setting in SMALL for word in ("--set", setting))]
