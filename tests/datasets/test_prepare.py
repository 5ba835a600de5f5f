"""Order, filters and minimum counts, on tables small enough to work by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from recbft.datasets import Dataset, Preparation, leave_one_out
from recbft.datasets.config import DataConfig
from recbft.errors import UserError
from recbft.serving.histories import histories_from_file


def log(text, **columns):
    """``"a:1 a:2 b:1"`` as a frame of users and items."""
    pairs = [pair.split(":") for pair in text.split()]
    return pd.DataFrame(pairs, columns=["user_id", "item_id"]).assign(**columns)


def histories(dataset):
    parts = np.split(dataset.decode(dataset.items), dataset.offsets[1:-1])
    return {user: items.tolist() for user, items in zip(dataset.user_ids.tolist(), parts, strict=True)}


def test_interleaved_users_are_gathered_in_row_order():
    dataset = Dataset.from_frame(log("b:x a:x b:y a:z b:x a:y"))
    assert histories(dataset) == {"b": ["x", "y", "x"], "a": ["x", "z", "y"]}
    assert dataset.user_ids.tolist() == ["b", "a"], "users by first appearance"
    assert dataset.item_ids.tolist() == ["x", "y", "z"], "items by first appearance in the histories"
    assert dataset.times is None


def test_a_time_column_sorts_stably_so_ties_keep_the_row_order():
    dataset = Dataset.from_frame(log("a:late a:tie1 a:tie2 a:tie3 a:early", when=[9, 5, 5, 5, 1]), time="when")
    assert histories(dataset) == {"a": ["early", "tie1", "tie2", "tie3", "late"]}
    assert dataset.times.tolist() == [1, 5, 5, 5, 9]


def test_users_with_fewer_than_three_events_are_dropped_and_counted():
    dataset = Dataset.from_frame(log("a:x b:x a:y b:w a:z c:x"))
    assert histories(dataset) == {"a": ["x", "y", "z"]}
    assert dataset.item_ids.tolist() == ["x", "y", "z"], "an item only dropped users had is not in the vocabulary"
    assert dataset.preparation["dropped"]["users_under_3_events"] == 2
    assert dataset.preparation["before"] == {"users": 3, "items": 4, "events": 6}
    assert dataset.preparation["after"] == {"users": 1, "items": 3, "events": 3}


def test_users_of_two_events_may_train_and_are_not_tested(tmp_path):
    frame = log("b:x a:x b:y c:q a:y a:z d:w d:x d:y d:z")
    dataset = Dataset.from_frame(frame, preparation=Preparation(min_history=2))
    assert histories(dataset) == {"a": ["x", "y", "z"], "d": ["w", "x", "y", "z"], "b": ["x", "y"]}
    assert dataset.user_ids.tolist() == ["a", "d", "b"], "who only trains comes last"
    assert dataset.preparation["dropped"]["users_under_2_events"] == 1
    split = leave_one_out(dataset)
    training = [dataset.items[a:b] for a, b in zip(split.training_start, split.training_stop, strict=True)]
    assert [dataset.decode(items).tolist() for items in training] == [["x"], ["w", "x"], ["x", "y"]]
    assert dataset.decode(split.validation.target).tolist() == ["y", "y"]
    assert dataset.decode(split.test.target).tolist() == ["z", "z"]
    counts = dict(zip(dataset.item_ids.tolist(), dataset.training_counts[1:].tolist(), strict=True))
    assert counts == {"x": 3, "y": 1, "z": 0, "w": 1}
    assert dataset.target_hash == Dataset.from_frame(frame).target_hash, "the same test"
    dataset.save(tmp_path / "kept.parquet")
    again = Dataset.load(tmp_path / "kept.parquet")
    assert (again.content_hash, again.num_tested) == (dataset.content_hash, 2)


def test_users_of_two_events_need_others_to_be_tested():
    with pytest.raises(UserError, match="no user has 3 events after filtering"):
        Dataset.from_frame(log("a:x a:y b:x b:y"), preparation=Preparation(min_history=2))


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_sessions_are_histories_instead_of_users_or_of_each_user(tmp_path, ending):
    frame = log("a:x a:y b:x a:z a:p b:y b:z b:q a:r a:q b:p b:r", visit=[1, 1, 1, 1, 2, 1, 1, 3, 2, 2, 3, 3])
    getattr(frame, f"to_{ending}")(tmp_path / f"log.{ending}", index=False)
    for how, wanted in (
        ({"session": "visit"}, {1: list("xyxzyz"), 2: list("prq"), 3: list("qpr")}),
        (
            {"session": "visit", "user": "user_id"},
            {"a/1": list("xyz"), "b/1": list("xyz"), "a/2": list("prq"), "b/3": list("qpr")},
        ),
    ):
        for made in (Dataset.from_frame(frame, **how), Dataset.load(tmp_path / f"log.{ending}", **how)):
            assert histories(made) == wanted
            again = DataConfig(**{**made.columns, "dataset": str(tmp_path / f"log.{ending}")})
            assert again.load().content_hash == made.content_hash
            again.check_prepared(made)
    events = histories_from_file(tmp_path / f"log.{ending}", session="visit", where="visit = 2")
    assert events.user_id.tolist() == [2, 2, 2] and events.item_id.tolist() == list("prq")
    with pytest.raises(UserError, match="user, item, time and session must be columns of their own"):
        Dataset.from_frame(frame, user="visit", session="visit")


def test_sessions_that_would_share_a_name_are_refused():
    frame = pd.DataFrame({"who": ["a/b"] * 3 + ["a"] * 3, "visit": ["c"] * 3 + ["b/c"] * 3, "item_id": list("xyzxyw")})
    with pytest.raises(UserError, match="two sessions of different users have the same name USER/SESSION"):
        Dataset.from_frame(frame, user="who", session="visit")
    told_apart = frame.assign(visit=["c"] * 3 + ["d/c"] * 3)
    assert Dataset.from_frame(told_apart, user="who", session="visit").num_users == 2


@pytest.mark.parametrize(("keep", "expected"), [(None, "x y x z y"), ("first", "x y z"), ("last", "x z y")])
def test_deduplication_keeps_the_first_or_last_event_in_time_of_a_pair(keep, expected):
    frame = log("a:y a:z a:x a:y a:x b:x b:y b:z", when=[9, 8, 7, 6, 5, 1, 2, 3])
    dataset = Dataset.from_frame(frame, time="when", preparation=Preparation(deduplicate=keep))
    assert histories(dataset)["a"] == expected.split()
    assert dataset.preparation["dropped"]["events_repeated"] == (0 if keep is None else 2)


def test_k_core_is_iterative():
    # d holds the second w and goes (2 events); then w has one event and goes; then c has 2 events and goes
    frame = log("a:x a:y a:z b:x b:y b:z c:x c:y c:w d:w d:z e:x e:y e:z")
    dataset = Dataset.from_frame(frame, preparation=Preparation(k_core=3))
    assert set(histories(dataset)) == {"a", "b", "e"}
    assert dataset.preparation["dropped"] == {
        "events_filtered_out": 0,
        "events_repeated": 0,
        "users_below_minimum": 2,
        "users_under_3_events": 0,
    }


def test_minimum_counts_hold_together_with_the_minimum_of_three_events():
    frame = log("a:x a:y a:z b:x b:y b:z c:q c:x c:y d:q d:x")
    dataset = Dataset.from_frame(frame, preparation=Preparation(min_item_events=2))
    assert set(histories(dataset)) == {"a", "b"}, "without d the item q has one event, without q user c has two"
    assert dataset.preparation["dropped"]["users_under_3_events"] == 2


def test_a_user_whose_items_go_all_at_once_missed_no_minimum_that_was_not_asked_for():
    frame = log("a:x a:y a:z b:x b:y b:z c:p c:q c:r")
    for asked, counts in ((0, (0, 1)), (2, (1, 0))):
        made = Dataset.from_frame(frame, preparation=Preparation(min_item_events=2, min_user_events=asked))
        dropped = made.preparation["dropped"]
        assert (dropped["users_below_minimum"], dropped["users_under_3_events"]) == counts


def test_users_are_counted_by_the_minimum_that_they_miss_the_asked_one_first():
    frame = log("a:x a:y a:z b:x b:y c:x d:x e:x e:y")
    dataset = Dataset.from_frame(frame, preparation=Preparation(min_user_events=2))
    dropped = dataset.preparation["dropped"]
    assert (dropped["users_below_minimum"], dropped["users_under_3_events"]) == (2, 2)


@pytest.mark.parametrize(("seed", "number"), [(0, 0), (1, 1), (2, 5)])
def test_without_the_last_events_users_are_as_they_were_before_them(seed, number):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"user_id": rng.zipf(1.3, 300) % 40, "item_id": rng.integers(0, 20, 300)})
    frame["when"] = rng.integers(0, 50, 300)
    core = Preparation(k_core=3, deduplicate="last")
    whole = Dataset.from_frame(frame, time="when", preparation=core)
    cut = Dataset.from_frame(frame, time="when", preparation=replace(core, drop_last_events=number))
    earlier = {user: items[: max(len(items) - number, 0)] for user, items in histories(whole).items()}
    assert histories(cut) == {user: items for user, items in earlier.items() if len(items) >= 3}
    dropped, before = cut.preparation["dropped"], whole.preparation["dropped"]
    assert dropped["users_under_3_events"] - before["users_under_3_events"] == whole.num_users - cut.num_users
    assert dropped.get("last_events", 0) == sum(min(number, len(items)) for items in histories(whole).values())


def test_no_user_without_the_last_events_is_told_as_that():
    with pytest.raises(UserError, match="no user has 3 events left without the last 2; lower drop_last_events"):
        Dataset.from_frame(log("a:x a:y a:z a:x"), preparation=Preparation(drop_last_events=2))


@pytest.mark.parametrize("seed", range(2))
def test_k_core_equals_dropping_one_user_or_item_at_a_time(seed):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"user_id": rng.integers(0, 30, 220), "item_id": rng.zipf(1.5, 220) % 40})
    left = frame
    while True:
        users, items = left.user_id.value_counts(), left.item_id.value_counts()
        few = left[left.user_id.map(users).lt(4) | left.item_id.map(items).lt(4)]
        if few.empty:
            break
        first = few.iloc[0]
        left = left[left.user_id != first.user_id] if users[first.user_id] < 4 else left[left.item_id != first.item_id]
    dataset = Dataset.from_frame(frame, preparation=Preparation(k_core=4))
    expected = {user: rows.item_id.tolist() for user, rows in left.groupby("user_id", sort=False)}
    assert histories(dataset) == expected


def test_no_user_left_is_an_error_with_counts():
    frame = log("a:x a:y b:x b:y b:x", rating=[5, 5, 5, 5, 1])
    with pytest.raises(UserError) as raised:
        Dataset.from_frame(frame, preparation=Preparation(where="rating>1", deduplicate="first"))
    assert str(raised.value) == (
        "frame: no user has 3 events after filtering (5 events of 2 users read; 4 of 2 users after the row filter, "
        "4 after de-duplication); check the user column, or loosen the filters and minimum counts"
    )


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"k_core": -1}, "k_core is -1; give a whole number >= 0"),
        ({"drop_last_events": 0.5}, "drop_last_events is 0.5; give a whole number >= 0"),
        ({"min_user_events": 2.5}, "min_user_events is 2.5; give a whole number >= 0"),
        ({"min_history": 5}, "min_history is 5; give 3, or 2 to train on users of two events too"),
        ({"deduplicate": "both"}, "deduplicate is 'both'; choose 'first', 'last' or None"),
        ({"where": "rating is good"}, "row filter 'rating is good' cannot be read"),
        ({"where": ""}, "row filter '' cannot be read"),
    ],
)
def test_a_preparation_checks_its_values(settings, complaint):
    with pytest.raises(UserError, match=complaint):
        Preparation(**settings)


def test_numbers_of_numpy_can_be_written_down():
    preparation = Preparation(k_core=np.int64(5), deduplicate="last", where="rating>=4")
    assert Preparation(**json.loads(json.dumps(preparation.to_dict()))) == preparation
