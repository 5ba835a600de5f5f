"""Weights and reliability of events: read as they stand, kept beside the events, and what is in a batch of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from recbft.datasets import Dataset
from recbft.datasets.batches import ClozeBatches, TrainingBatches
from recbft.datasets.config import DataConfig
from recbft.datasets.statistics import describe
from recbft.errors import UserError

# ann's events stand newest first; the one at time 3 counts for nothing
LOG = pd.DataFrame(
    {
        "user_id": ["ann"] * 4 + ["bob"] * 3,
        "item_id": list("dcba") + list("abe"),
        "t": [4, 3, 2, 1, 1, 2, 3],
        "w": [4.0, 0.0, 2.0, 1.0, 0.5, 1.0, 3.0],
    }
)


def test_weights_follow_their_events_through_sorting_and_filters():
    dataset = Dataset.from_frame(LOG, time="t", weight="w")
    assert dataset.weights.tolist() == [1, 2, 0, 4, 0.5, 1, 3]
    assert dataset.columns == {"user": "user_id", "item": "item_id", "time": "t", "weight": "w"}
    assert dataset.preparation["weights"] == {"sum": 11.5, "events_of_weight_0": 1}
    assert describe(dataset).weights == "0 to 4, mean 1.643; 1 events of weight 0"
    # a and b train of ann, a of bob
    index = dataset.encode(["a", "b"])
    assert dataset.training_weights[index].tolist() == [1.5, 2.0]
    assert dataset.training_counts[index].tolist() == [2, 1], "counts are of events, whatever they weigh"
    assert Dataset.from_frame(LOG, time="t").training_weights.tolist() == dataset.training_counts.tolist()


def test_weights_enter_the_content_hash_only_where_there_are_some():
    plain, weighted = Dataset.from_frame(LOG, time="t"), Dataset.from_frame(LOG, time="t", weight="w")
    other = Dataset.from_frame(LOG.assign(w=1), time="t", weight="w")
    assert len({plain.content_hash, weighted.content_hash, other.content_hash}) == 3
    assert plain.content_hash[:12] == "e115c99a9e08", "as before there were weights"
    assert plain.target_hash == weighted.target_hash


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_a_file_gives_the_weights_of_a_frame_and_the_canonical_file_keeps_them(tmp_path, ending):
    path = tmp_path / f"log.{ending}"
    write = {
        "csv": lambda: LOG.to_csv(path, index=False),
        "jsonl": lambda: LOG.to_json(path, orient="records", lines=True),
        "parquet": lambda: LOG.to_parquet(path),
    }
    write[ending]()
    loaded = DataConfig(dataset=str(path), time="t", weight="w").load()
    assert loaded.content_hash == Dataset.from_frame(LOG, time="t", weight="w").content_hash
    loaded.save(tmp_path / "kept.parquet")
    kept = Dataset.load(tmp_path / "kept.parquet")
    assert kept.content_hash == loaded.content_hash and kept.weights.tolist() == loaded.weights.tolist()
    assert kept.preparation == loaded.preparation


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1, 1, -0.5, 1, 1, 1, 1], "row 3: column 'w' holds -0.5, but a weight must be a number >= 0"),
        ([1, np.nan, 1, 1, 1, 1, 1], "row 2: column 'w' holds nothing, but a weight may not be missing; fill it in"),
        ([1, None, 1, 1, 1, 1, 1], "row 2: column 'w' holds nothing, but a weight may not be missing"),
        ([1, 1, 1, 1, 1, 1, np.inf], "row 7: column 'w' holds inf"),
        (["1", " 2 ", "much", "1", "1", "1", "1"], "row 3: column 'w' holds 'much', but a weight must be"),
        (["1", "NULL", "1", "1", "1", "1", "1"], "row 2: column 'w' holds 'NULL', but a weight may not be missing"),
        (pd.to_datetime(["2024-01-01"] * 7), "column 'w' has type timestamp"),
    ],
)
def test_a_weight_that_is_none_is_refused_by_its_first_row(values, said):
    with pytest.raises(UserError, match=said.replace("(", r"\(")):
        Dataset.from_frame(LOG.assign(w=values), time="t", weight="w")


def test_whole_numbers_text_and_truth_values_are_weights():
    for values, read in (([1, 0, 2, 1, 1, 1, 1], 2.0), (["1", "0", "2e0", "1", "1", "1", "1"], 2.0), ([True] * 7, 1.0)):
        assert Dataset.from_frame(LOG.assign(w=values), time="t", weight="w").weights[1] == read


def batches(kind, weights, **how):
    items = np.arange(1, 11)
    start, stop = np.array([0, 6]), np.array([6, 10])
    how = {"max_length": 6, "batch_size": 2, "seed": 3, "weights": weights, **how}
    if kind == "cloze":
        return ClozeBatches(items, start, stop, mask=11, **how)
    return TrainingBatches(items, start, stop, **how)


@pytest.mark.parametrize("kind", ["next", "cloze"])
@pytest.mark.parametrize("samples", ["last", "windows", "prefixes"])
def test_each_target_of_a_batch_has_the_weight_of_its_event_and_those_of_weight_0_are_none(kind, samples):
    weights = np.array([1, 2, 0, 4, 5, 6, 7, 0, 9, 10], dtype=float)
    found = []
    for epoch in range(6):
        for batch in batches(kind, weights, samples=samples, max_length=4).epoch(epoch):
            learns = batch.target > 0
            assert batch.weight[~learns].sum() == 0
            assert (batch.weight[learns] > 0).all() or int(learns.sum()) == 1
            found += zip(batch.target[learns].tolist(), batch.weight[learns].tolist(), strict=True)
            assert batch.learned_weight == float(batch.weight.sum())
    assert all(weight in (weights[target - 1], 0) for target, weight in found)
    assert {target for target, weight in found if weight} >= {4, 5, 6, 9, 10}


@pytest.mark.parametrize("kind", ["next", "cloze"])
def test_equal_weights_give_the_batches_that_none_give(kind):
    for weights in (np.ones(10), np.full(10, 2.5)):
        for plain, same in zip(batches(kind, None).epoch(1), batches(kind, weights).epoch(1), strict=True):
            assert same.weight is None and same.target.equal(plain.target)


def test_a_batch_without_a_target_that_counts_keeps_one_that_teaches_nothing():
    weights = np.array([1, 0, 0, 0, 0, 0, 1, 0, 0, 0], dtype=float)
    for batch in batches("next", weights).epoch(0):
        assert int((batch.target > 0).sum()) == 1 and batch.learned_weight == 0


STARS = [5.0, np.nan, 3.0, 1.0, 4.0, 2.0, 5.0]  # of the events of LOG


def test_reliability_follows_its_events_and_may_be_missing(tmp_path):
    frame = LOG.assign(stars=STARS)
    dataset = Dataset.from_frame(frame, time="t", reliability="stars")
    np.testing.assert_array_equal(dataset.reliability, [1, 3, np.nan, 5, 4, 2, 5])
    assert dataset.columns["reliability"] == "stars"
    assert describe(dataset).reliability == "1 to 5, mean 3.333; 1 events without"
    np.testing.assert_array_equal(dataset.split.training_reliability, [1, 3, 4])
    hashes = {Dataset.from_frame(f, time="t", reliability=column).content_hash for f, column in (
        (frame, None), (frame, "stars"), (frame, "w"), (frame.fillna(0), "stars"))}  # fmt: skip
    assert len(hashes) == 4
    frame.to_csv(tmp_path / "log.csv", index=False)
    config = DataConfig(dataset=str(tmp_path / "log.csv"), time="t", reliability="stars", weight="w")
    loaded = config.load()
    assert loaded.content_hash == Dataset.from_frame(frame, time="t", weight="w", reliability="stars").content_hash
    loaded.save(tmp_path / "kept.parquet")
    kept = Dataset.load(tmp_path / "kept.parquet")
    assert kept.content_hash == loaded.content_hash and kept.preparation == loaded.preparation
    LOG.to_csv(tmp_path / "other.csv", index=False)
    with pytest.warns(UserWarning, match="no column 'stars'.*: the reliability of its events counts as missing"):
        assert config.load_again(str(tmp_path / "other.csv")).reliability is None


@pytest.mark.parametrize("how", [{"hold_out_items": 0.3}, {"split": "global_time", "split_at": 2, "test_at": 3}, {}])
def test_views_have_the_reliability_of_the_events_that_they_read(how):
    number = np.arange(60)
    frame = pd.DataFrame({"user_id": number % 6, "item_id": number * 7 % 13, "t": number // 6})
    plain = Dataset.from_frame(frame, time="t").with_split(**how)
    # an event's reliability is its item's number, which is missing of some
    known = np.where(plain.items % 5, plain.items, np.nan).astype(float)
    split = replace(plain, reliability=known).split
    for part in (split, split.test, split.validation, split.test.rows(np.arange(2))):
        np.testing.assert_array_equal(part.reliability, np.where(part.items % 5, part.items, np.nan))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1, np.inf, 1, 1, 1, 1, 1], "row 2: column 'w' holds inf, but a reliability must be a number, or missing"),
        (["1", "NULL", "much", "1", "1", "1", "1"], "row 3: column 'w' holds 'much', but a reliability must be a num"),
        (pd.to_datetime(["2024-01-01"] * 7), "column 'w' has type timestamp.*, but a reliability must be a number"),
    ],
)
def test_a_reliability_that_is_none_is_refused_by_its_first_row(values, said):
    with pytest.raises(UserError, match=said):
        Dataset.from_frame(LOG.assign(w=values), time="t", reliability="w")


@pytest.mark.parametrize("values", [["5", "", "n/a", "1e0", " 2 ", "null", "3"], [None] * 7, [True] * 7])
def test_text_truth_values_and_nothing_at_all_are_reliabilities(values):
    found = Dataset.from_frame(LOG.assign(w=values), reliability="w").reliability
    np.testing.assert_array_equal(found, pd.to_numeric(pd.Series(values), errors="coerce").astype(float))


def test_nothing_is_said_of_numbers_where_all_are_missing():
    dataset = Dataset.from_frame(LOG.assign(w=[None] * 7), reliability="w")
    assert (describe(dataset).reliability, describe(dataset).weights) == ("7 events without", None)


def test_a_reliability_may_be_the_weight_or_the_time_and_no_id():
    both = Dataset.from_frame(LOG, time="t", weight="w", reliability="w")
    np.testing.assert_array_equal(both.weights, both.reliability)
    assert Dataset.from_frame(LOG, time="t", reliability="t").reliability.tolist() == [1, 2, 3, 4, 1, 2, 3]
    with pytest.raises(UserError, match="must be columns of their own"):
        Dataset.from_frame(LOG, reliability="item_id")
