"""Whole runs of BERT4Rec and HSTU: resumed bit for bit, evaluated with their mask, honest about times."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from recbft import Recommender
from recbft.datasets.events import TICKS_PER_SECOND
from recbft.datasets.planted import synthetic_dataset
from recbft.datasets.synth import SyntheticConfig
from recbft.errors import UserError
from recbft.evaluation.evaluate import evaluate
from recbft.runs import checkpoint
from recbft.runs.tensors import flatten
from recbft.training import one_run
from recbft.training.build import training_batches
from recbft.training.bundle import load_trained
from recbft.training.progress import Silent
from recbft.training.run_config import load_run_config

SMALL = {"hidden_size": 8, "max_length": 8, "batch_size": 16, "epochs": 4, "warmup_steps": 6, "device": "cpu"}
RUNS = [
    ("bert4rec", "published", {}),
    ("bert4rec", "bft", {}),
    ("hstu", "published", {"time_bias": True}),
    ("hstu", "bft", {"loss": "sampled_softmax", "num_negatives": 7}),
    ("sasrec", "matched", {"loss": "gbce", "num_negatives": 3}),
]
over_runs = pytest.mark.parametrize(("model", "arm", "settings"), RUNS, ids=lambda value: str(value))


@pytest.fixture(scope="module")
def dataset():
    return synthetic_dataset(SyntheticConfig(num_users=50, num_items=60, mean_length=7, seed=1))


@pytest.fixture(scope="module")
def timed(dataset):
    if dataset.times is not None:
        return dataset
    return replace(dataset, times=np.arange(dataset.num_events, dtype=np.int64) ** 2)


class Stop(Silent):
    """Raises after two epochs, as a killed process ends."""

    def __init__(self):
        self.left = 2

    def epoch(self, row):
        self.left -= 1
        if self.left == 0:
            raise KeyError


def results(run):
    loaded, tensors = checkpoint.load(run.checkpoint), {}
    flatten([loaded.model_state, loaded.optimizer_state, loaded.rng_state], "all", tensors)
    tensors |= {f"best.{name}": value for name, value in checkpoint.load_best(run.checkpoint).items()}
    metrics = {name: value for name, value in run.metrics.items() if name != "training_seconds"}
    return tensors, metrics, pd.read_parquet(run.per_user_file)


@over_runs
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(model, arm, settings, timed, tmp_path):
    config = load_run_config(model=model, arm=arm, **{**SMALL, **settings})
    whole = one_run.train(config, tmp_path / "whole", dataset=timed)
    with pytest.raises(KeyError):
        one_run.train(config, tmp_path / "part", dataset=timed, progress=Stop())
    torch.rand(3)
    part = one_run.resume(tmp_path / "part", dataset=timed)
    (one, metrics, users), (two, metrics_2, users_2) = results(whole), results(part)
    assert set(one) == set(two) and metrics == metrics_2
    assert all(torch.equal(one[name], two[name]) for name in one)
    pd.testing.assert_frame_equal(users, users_2, check_exact=True)


@over_runs
def test_a_loaded_run_gives_the_metrics_it_reported(model, arm, settings, timed, tmp_path):
    config = load_run_config(model=model, arm=arm, **{**SMALL, **settings})
    run = one_run.train(config, tmp_path / "run", dataset=timed)
    trained = load_trained(run.path)[-1]
    trained.refresh()
    assert evaluate(trained, timed, "test").metrics == run.metrics["test"]


def test_bert4rec_recommends_from_what_it_reads_before_the_mask(dataset):
    recommender = Recommender("bert4rec", arm="bft", **{**SMALL, "epochs": 1}).fit(dataset)
    known = dataset.item_ids[:12].tolist()
    long, cut = (recommender.recommend([items], 5, filter_seen=False) for items in (known, known[-7:]))
    pd.testing.assert_frame_equal(long, cut)
    assert set(long["item"]) <= set(dataset.item_ids) and (long["precision"] > 0).all()


def test_a_time_bias_without_real_times_is_refused(dataset, tmp_path):
    config = load_run_config(model="hstu", arm="bft", time_bias=True, **SMALL)
    with pytest.raises(UserError, match=r"backbone.time_bias is true, .*'synthetic' has no real times; .*data.time"):
        one_run.train(config, tmp_path / "run", dataset=replace(dataset, times=None))


@pytest.mark.parametrize(("unit", "day"), [("ms", "8.64e+07"), ("us", "8.64e+10"), ("ns", "8.64e+13")])
def test_a_clock_of_seconds_is_refused_where_times_are_not(unit, day, timed):
    settings = {**SMALL, "mixer": "rfa", "mixing.time": True}
    seconds = replace(timed, times=1_600_000_000 + np.arange(len(timed.items)))
    finer = replace(timed, times=seconds.times * TICKS_PER_SECOND[unit])
    dated = replace(seconds, preparation={**seconds.preparation, "time_unit": unit})  # what dates say goes first
    told = f"mixing.time_unit is 86400, a day of seconds, .* are in {unit} .*; set mixing.time_unit to {re.escape(day)}"
    for data in (finer, dated):
        with pytest.raises(UserError, match=told):
            training_batches(load_run_config(**settings), data)
        assert training_batches(load_run_config(**settings, time_unit=float(day)), data)
    assert training_batches(load_run_config(**settings), seconds)


def test_the_protocol_says_whether_the_target_s_time_is_shown(timed, tmp_path):
    for settings, told in (
        ({}, "no times are read"),
        ({"time_bias": True}, "not shown"),
        ({"time_bias": True, "show_target_time": True}, "shown"),
    ):
        config = load_run_config(model="hstu", arm="matched", **{**SMALL, "epochs": 1}, **settings)
        run = one_run.train(config, tmp_path / told, dataset=timed)
        assert run.protocol["target_time"] == told


def test_a_time_biased_model_recommends_from_histories_with_times_only(timed):
    settings = {**SMALL, "epochs": 1, "time_bias": True}
    recommender = Recommender("hstu", arm="bft", **settings).fit(timed)
    items = timed.item_ids[:3].tolist()
    with pytest.raises(UserError, match=r"but the list of histories has no real times; .* \(in a shell --time"):
        recommender.recommend([items], 3)
    frame = pd.DataFrame({"user_id": ["ann"] * 3, "item_id": items, "timestamp": [5, 90, 4000]})
    one, other = (
        recommender.recommend(frame.assign(timestamp=stamps), 3) for stamps in ([5, 90, 4000], [5, 3000, 4000])
    )
    assert not np.allclose(one["score"], other["score"])
    with pytest.raises(UserError, match=r"row 1: column 'timestamp' holds 0\.5, but a time must be a whole number"):
        recommender.recommend(frame.assign(timestamp=0.5), 3)
    shown = Recommender("hstu", arm="bft", **settings, show_target_time=True).fit(timed)
    with pytest.raises(UserError, match="trained with show_target_time: true"):
        shown.recommend(frame, 3)
