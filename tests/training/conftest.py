"""Small data, runs of a few epochs, whatever ends one, and what two equal runs share."""

from __future__ import annotations

import shutil

import pandas as pd
import pytest
import torch

from recbft.datasets.planted import synthetic_dataset
from recbft.datasets.synth import SyntheticConfig
from recbft.runs import checkpoint
from recbft.runs.checkpoint import flatten
from recbft.runs.folder import RunFolder
from recbft.training import one_run
from recbft.training.progress import Silent
from recbft.training.run_config import load_run_config

SMALL = {"hidden_size": 8, "max_length": 8, "batch_size": 16, "epochs": 4, "warmup_steps": 6, "device": "cpu"}


@pytest.fixture(scope="session")
def dataset():
    return synthetic_dataset(SyntheticConfig(num_users=50, num_items=60, mean_length=7, seed=1))


def config(arm="bft", model="sasrec", **settings):
    return load_run_config(model=model, arm=arm, **{**SMALL, **settings})


@pytest.fixture(scope="session")
def whole(dataset, tmp_path_factory):
    """A run that nothing has stopped; nobody changes it."""
    return one_run.train(config(), tmp_path_factory.mktemp("whole") / "run", dataset=dataset)


@pytest.fixture(scope="session")
def stopped_after_two(dataset, tmp_path_factory):
    """The same, stopped after two of its four epochs; nobody changes it."""
    path = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Stopped):
        one_run.train(config(), path, dataset=dataset, progress=StopAt(2))
    return path


@pytest.fixture
def stopped(stopped_after_two, tmp_path):
    """A copy of it."""
    return RunFolder.open(shutil.copytree(stopped_after_two, tmp_path / "run"))


class Stopped(Exception):  # noqa: N818  it is an ending, not an error
    """Stands for whatever ends a process."""


class StopAt(Silent):
    """Raises after a number of epochs, in the middle of the next one if ``steps`` is given."""

    def __init__(self, epochs, steps=None, error=Stopped):
        self.left, self.steps, self.error = epochs, steps, error

    def epoch(self, row):
        self.left -= 1
        if self.left == 0 and self.steps is None:
            raise self.error

    def batch(self, done, total, loss, tokens):
        if self.left == 0 and done == self.steps:
            raise self.error


def results(run):
    """All that two equal runs share: weights, optimiser, random state, ranks, metrics, history."""
    loaded, tensors = checkpoint.load(run.checkpoint), {}
    states = [loaded.model_state, loaded.optimizer_state, loaded.rng_state, loaded.controllers_state]
    flatten(states, "all", tensors)
    tensors |= {f"best.{name}": value for name, value in checkpoint.load_best(run.checkpoint).items()}
    metrics = {name: value for name, value in run.metrics.items() if name != "training_seconds"}
    history = pd.DataFrame(run.read_history()).drop(columns=["seconds", "tokens_per_second"])
    plain = numbers([states, vars(loaded.state), metrics, run.protocol])
    return plain, tensors, history, pd.read_parquet(run.per_user_file)


def numbers(value):
    """A tree of states without its tensors."""
    if isinstance(value, dict):
        return {key: numbers(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [numbers(part) for part in value]
    return None if isinstance(value, torch.Tensor) else value


def assert_equal_runs(one, two):
    plain, tensors, history, per_user = results(one)
    plain_2, tensors_2, history_2, per_user_2 = results(two)
    assert plain == plain_2
    assert set(tensors) == set(tensors_2) and len(tensors) > 20
    for name, value in tensors.items():
        assert value.dtype == tensors_2[name].dtype and torch.equal(value, tensors_2[name]), name
    pd.testing.assert_frame_equal(history, history_2, check_exact=True)
    pd.testing.assert_frame_equal(per_user, per_user_2, check_exact=True)
