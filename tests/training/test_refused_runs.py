"""What a run cannot have is refused before its folder is made, and before another gives way to it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from recbft.datasets.planted import synthetic_dataset
from recbft.datasets.synth import SyntheticConfig
from recbft.errors import UserError
from recbft.runs.folder import RunFolder
from recbft.training import one_run, trackers
from recbft.training.build import training_batches
from recbft.training.many_seeds import train_seeds
from recbft.training.progress import Silent
from tests.training.conftest import config as small_config


def config(**settings):
    return small_config("matched", **{"epochs": 1, "warmup_steps": 50, **settings})


def begun(made, path, dataset):
    """The folder of a run that was stopped before its first step."""
    return one_run.begin(made, path, dataset, torch.device("cpu"), Silent()).run


def test_a_controller_that_does_not_fit_takes_no_folder_and_no_finished_run(dataset, tmp_path):
    finished = one_run.train(config(), tmp_path / "a", dataset=dataset)
    before = finished.metrics
    for controllers, message in (
        ({"guardian": {}}, "the guardian moves the temperature of mixer 'regime', which this model do"),
        (
            {"dropout_glide": {"floor": 0.2}},
            "dropout_glide has no effect, since no dropout of the model is above its floor 0.2; leave it out, lower",
        ),
        (
            {"context_game": {"lengths": [2, 4], "entropy_weight": 0.3}},
            "context_game.entropy_weight has no effect without mixer 'regime'",
        ),
    ):
        for path in (tmp_path / "a", tmp_path / "new"):
            with pytest.raises(UserError, match=message):
                one_run.train(config(controllers=controllers, dropout=0.2), path, dataset=dataset, overwrite=True)
    assert os.listdir(tmp_path) == ["a"] and finished.metrics == before


def test_seeds_that_cannot_go_on_are_refused_before_a_folder_is_made_for_others(dataset, tmp_path):
    other = synthetic_dataset(SyntheticConfig(num_users=40, num_items=60, mean_length=7, seed=2))
    configs, paths = [config(), config(seed=1)], [tmp_path / "0", tmp_path / "1"]
    begun(replace(configs[1], data=replace(configs[1].data, dataset=dataset.name)), paths[1], dataset)
    with pytest.raises(UserError, match=r"1 holds a run on data with content \w{12}, and 'synthetic' as loaded has"):
        train_seeds(configs, paths, dataset=other)
    assert os.listdir(tmp_path) == ["1"]


def test_a_missing_tensorboard_is_named_whichever_way_a_run_is_trained(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    asked = config(tensorboard=True)
    begun(asked, tmp_path / "begun", dataset)
    for go in (
        lambda: one_run.train(asked, tmp_path / "new", dataset=dataset),
        lambda: one_run.resume(tmp_path / "begun", dataset=dataset),
        lambda: train_seeds([asked], [tmp_path / "new"], dataset=dataset),
    ):
        with pytest.raises(UserError, match=r"trackers tensorboard need packages .*: pip install tensorboard, or"):
            go()
    assert os.listdir(tmp_path) == ["begun"] and not RunFolder.open(tmp_path / "begun").has_checkpoint


@pytest.mark.parametrize("model", ["sasrec", "bert4rec"])
def test_a_batch_holds_about_as_many_targets_as_asked(model, dataset):
    batches = training_batches(config(model=model, batch_targets=8), dataset)
    num_targets = [int((batch.target > 0).sum()) for epoch in range(10) for batch in batches.epoch(epoch)]
    assert batches.num_batches > 3 and sum(num_targets) / (10 * batches.num_batches) == pytest.approx(8, rel=0.25)
    prefixes = training_batches(config(model=model, batch_targets=8, samples="prefixes"), dataset)
    assert prefixes.batch_size == 8, "a prefix is there for one target, whatever else is masked in it"
