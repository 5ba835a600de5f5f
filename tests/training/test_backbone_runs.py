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
from recbft.errors import UserError
from recbft.evaluation.evaluate import evaluate
from recbft.training import one_run
from recbft.training.build import training_batches
from recbft.training.bundle import load_trained
from recbft.training.run_config import load_run_config
from tests.training.conftest import SMALL, StopAt, Stopped, assert_equal_runs, config

RUNS = [
    ("bert4rec", "bft", {}),
    ("hstu", "published", {"time_bias": True}),
    ("hstu", "bft", {"loss": "sampled_softmax", "num_negatives": 7}),
    ("sasrec", "matched", {"loss": "gbce", "num_negatives": 3}),
]
over_runs = pytest.mark.parametrize(("model", "arm", "settings"), RUNS, ids=lambda value: str(value))


@pytest.fixture(scope="module")
def timed(dataset):
    if dataset.times is not None:
        return dataset
    return replace(dataset, times=np.arange(dataset.num_events, dtype=np.int64) ** 2)


@over_runs
def test_a_resumed_run_is_the_uninterrupted_one_and_once_loaded_gives_its_metrics(
    model, arm, settings, timed, tmp_path
):
    asked = config(arm, model, **settings, epochs=3)
    whole = one_run.train(asked, tmp_path / "whole", dataset=timed)
    with pytest.raises(Stopped):
        one_run.train(asked, tmp_path / "part", dataset=timed, progress=StopAt(2))
    torch.rand(3)
    assert_equal_runs(one_run.resume(tmp_path / "part", dataset=timed), whole)
    trained = load_trained(whole.path)[-1]
    trained.refresh()
    assert evaluate(trained, timed, "test").metrics == whole.metrics["test"]


def test_bert4rec_recommends_from_what_it_reads_before_the_mask(dataset):
    recommender = Recommender("bert4rec", arm="bft", **{**SMALL, "epochs": 1}).fit(dataset)
    known = dataset.item_ids[:12].tolist()
    long, cut = (recommender.recommend([items], 5, filter_seen=False) for items in (known, known[-7:]))
    pd.testing.assert_frame_equal(long, cut)
    assert set(long["item"]) <= set(dataset.item_ids) and (long["precision"] > 0).all()


def test_a_time_bias_without_real_times_is_refused(dataset, tmp_path):
    asked = config("bft", "hstu", time_bias=True)
    with pytest.raises(UserError, match=r"backbone.time_bias is true, .*'synthetic' has no real times; .*data.time"):
        one_run.train(asked, tmp_path / "run", dataset=replace(dataset, times=None))


@pytest.mark.parametrize(("unit", "day"), [("ms", "8.64e+07"), ("us", "8.64e+10"), ("ns", "8.64e+13")])
def test_a_clock_of_seconds_is_refused_where_times_are_not(unit, day, timed):
    settings = {**SMALL, "mixer": "rfa", "mixing.time": True}
    unknown = {**timed.preparation, "time_unit": None}
    seconds = replace(timed, times=1_600_000_000 + np.arange(len(timed.items)), preparation=unknown)
    finer = replace(seconds, times=seconds.times * TICKS_PER_SECOND[unit])
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
        run = one_run.train(config("matched", "hstu", epochs=1, **settings), tmp_path / told, dataset=timed)
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
    fractions = recommender.recommend(frame.assign(timestamp=[5.25, 90.25, 4000.25]), 3)
    np.testing.assert_array_equal(fractions["score"], one["score"])  # of seconds, which it was trained on
    shown = Recommender("hstu", arm="bft", **settings, show_target_time=True).fit(timed)
    with pytest.raises(UserError, match="trained with show_target_time: true"):
        shown.recommend(frame, 3)
