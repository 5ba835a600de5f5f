"""A data set small enough to train on in a blink, as a file."""

from __future__ import annotations

import shutil

import pytest
import torch

from recbft.datasets.synth import SyntheticConfig, generate
from recbft.experiments.plan import parse_arms, plan
from recbft.training.one_run import train

SMALL = ("time=timestamp", "hidden_size=8", "max_length=10", "batch_size=32", "device=cpu", "epochs=2")


@pytest.fixture(autouse=True)
def same_threads_afterwards():
    """A command sets the threads and the seed of its process, which here is that of all tests."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


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


@pytest.fixture(scope="session")
def trained_runs(tmp_path_factory):
    """The folder of the runs that tests have asked for so far."""
    return tmp_path_factory.mktemp("benchmark-runs")


@pytest.fixture
def train_arms(events, trained_runs, tmp_path):
    """Gives arms, trained on two seeds each, in a folder that the test may change."""
    settings = ["data.time=timestamp", "hidden_size=8", "max_length=10", "batch_size=32", "epochs=2"]

    def configure(arm, seed):
        return arm.config(settings, dataset=str(events), seed=seed)

    def train_all(arms):
        for job in plan(parse_arms(arms), [0, 1], trained_runs, configure):
            if not job.path.exists():
                train(job.config, job.path)
            shutil.copytree(job.path, tmp_path / "out" / "runs" / job.path.name)
        return tmp_path / "out"

    return train_all
