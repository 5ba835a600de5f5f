"""What the peers are given and how their lists are counted; the libraries themselves only where they are installed."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pandas as pd
import pytest

from benchmarks import peer_speed
from recbft.datasets import Dataset
from recbft.errors import UserError


@pytest.fixture
def dataset():
    frame = pd.DataFrame({"user_id": list("aaaaabbb"), "item_id": [5, 6, 7, 5, 8, 6, 9, 5]})
    return Dataset.from_frame(frame)


def test_training_leaves_out_two_events_and_the_test_is_the_last(dataset):
    table = peer_speed._table(dataset, left_out=2)
    raw = dataset.item_ids[table["item_id"]]
    assert list(zip(table["user_id"], raw, strict=True)) == [(0, 5), (0, 6), (0, 7), (1, 6)]
    steps = table.groupby("user_id")["datetime"].diff().dropna()
    assert (steps > pd.Timedelta(0)).all()
    assert dataset.item_ids[peer_speed._targets(dataset)].tolist() == [8, 5]


def test_padded_histories_are_the_latest_events_at_the_right(dataset):
    padded = peer_speed._padded(dataset, left_out=1, length=3)
    blank = len(dataset.item_ids)
    assert dataset.item_ids[padded[0]].tolist() == [6, 7, 5]
    assert padded[1, 0] == blank and dataset.item_ids[padded[1, 1:]].tolist() == [6, 9]


def test_batches_teach_the_next_item_of_every_place_that_has_one(dataset):
    blank = len(dataset.item_ids)
    batches = peer_speed._Batches(peer_speed._padded(dataset, left_out=2, length=4), blank, shift=1)
    (batch,) = batches
    row = batch["rows"].tolist().index(0)
    inputs, labels = batch["feature_tensors"]["item_id"][row], batch["positive_labels"][row, :, 0]
    assert inputs[0] == blank and dataset.item_ids[inputs[1:]].tolist() == [5, 6]
    assert dataset.item_ids[labels[1:]].tolist() == [6, 7]
    assert batch["target_padding_mask"][row, :, 0].tolist() == [False, True, True]
    assert not batch["target_padding_mask"][1 - row].any()  # a single event has no next one


def test_metrics_are_of_the_first_ten_places():
    timed = peer_speed.Timed(seconds=[9.0, 2.0, 4.0], evaluations=[1.0], ranks=np.array([1.0, 3.0, 11.0, np.inf]))
    made = peer_speed.result_of(timed)
    assert made["seconds_per_epoch"] == 3.0 and made["hr@10"] == 0.5
    assert made["ndcg@10"] == pytest.approx((1 + 0.5) / 4)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (["--library", "replay", "--set", "dropout=0.1"], "not for this command"),
        (["--library", "replay", "--model", "hstu"], "not for this command"),
    ],
)
def test_bad_usage_is_refused(events, named, message):
    with pytest.raises(UserError, match=message):
        peer_speed.main(["--dataset", str(events), *named])


def test_a_missing_library_is_named_with_what_installs_it(events, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "rectools\[torch\]"'):
        peer_speed.main(["--dataset", str(events), "--library", "rectools"])


@pytest.mark.parametrize("library", sorted(peer_speed.LIBRARIES))
def test_a_library_that_is_installed_trains_and_ranks(library, events, tmp_path):
    pytest.importorskip(library)
    file = tmp_path / "peer.json"
    named = ["--library", library, "--epochs", "2", "--evaluations", "1", "--threads", "1", "--json", str(file)]
    assert peer_speed.main(["--dataset", str(events), *named]) == 0
    (made,) = json.loads(file.read_text())["arms"].values()
    assert made["epochs"] == 2 and 0 <= made["ndcg@10"] <= made["hr@10"] <= 1 and made["seconds_per_epoch"] > 0
