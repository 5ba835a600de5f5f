"""Splits: what trains, what is asked from what, and what is left out."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from recbft.datasets import Dataset, Splitting, leave_one_out
from recbft.datasets.config import DataConfig
from recbft.datasets.split import View, counts_lines, held_out
from recbft.datasets.statistics import describe, remarks
from recbft.errors import UserError

# A user a line, ITEM and time; u4 is new at time 30, and in the test has an event before its own others.
LOG = {
    "u1": "a10 b11 c30 a31 d45",
    "u2": "b10 a20 e30 e33 b41 b42",
    "u3": "c10 d12 a13",
    "u4": "f35 a40 f44",
}
BY_TIME = {"split": "global_time", "split_at": 30, "test_at": 40}


@pytest.fixture
def dataset() -> Dataset:
    rows = [(user, one[0], int(one[1:])) for user, line in LOG.items() for one in line.split()]
    return Dataset.from_frame(pd.DataFrame(rows, columns=["user_id", "item_id", "t"]), name="log", time="t")


def random_log(seed: int) -> Dataset:
    rng = np.random.default_rng(seed)
    n = 400
    frame = pd.DataFrame(
        {"user_id": rng.integers(0, 40, n), "item_id": rng.integers(0, 30, n), "t": np.sort(rng.integers(0, 90, n))}
    )
    return Dataset.from_frame(frame, time="t")


def trained(dataset: Dataset) -> list[str]:
    """The training events of each user who has any."""
    split = dataset.split
    bounds = zip(split.training_start, split.training_stop, strict=True)
    return ["".join(dataset.decode(split.items[start:stop])) for start, stop in bounds]


def asked(dataset: Dataset, view: View) -> list[str]:
    """User, history and target of each row."""
    rows = zip(view.user, view.start, view.stop, view.target, strict=True)
    return [
        f"{dataset.user_ids[user]} {''.join(dataset.decode(view.items[start:stop]))}>{dataset.decode([target])[0]}"
        for user, start, stop, target in rows
    ]


def test_by_time_all_items_of_a_part_are_targets_once_each_from_what_is_before_the_part(dataset: Dataset) -> None:
    split = dataset.with_split(**BY_TIME).split
    assert trained(dataset.with_split(**BY_TIME)) == ["ab", "ba", "cda"]
    assert asked(dataset, split.validation) == ["u1 ab>c", "u1 ab>a", "u2 ba>e"]
    assert asked(dataset, split.test) == ["u1 abca>d", "u2 baee>b", "u4 f>a", "u4 f>f"]
    assert split.text.startswith("global time: events before 30 train; each user's events from then on and before 40")
    assert split.counts == {
        "training": {"users": 3, "events": 7, "items": 4},
        "validation": {
            "users": 2, "new_users": 0, "targets": 3, "new_items": 1, "targets_of_new_items": 1,
            "users_left_out": 1, "targets_left_out": 1,
        },
        "test": {
            "users": 3, "new_users": 1, "targets": 4, "new_items": 1, "targets_of_new_items": 1,
            "users_left_out": 0, "targets_left_out": 0,
        },
    }  # fmt: skip
    assert counts_lines(split.counts)[1] == (
        "validation: 3 targets of 2 users (0 new), 1 of them of 1 new items; 1 targets with nothing before them are "
        "left out, and 1 users with all of theirs"
    )


def test_the_first_target_alone_or_each_event_from_those_before_it(dataset: Dataset) -> None:
    first = dataset.with_split(**BY_TIME, split_targets="first").split
    assert asked(dataset, first.validation) == ["u1 ab>c", "u2 ba>e"]
    assert asked(dataset, first.test) == ["u1 abca>d", "u2 baee>b", "u4 f>a"]
    each = dataset.with_split(**BY_TIME, split_targets="successive").split
    assert asked(dataset, each.validation) == ["u1 ab>c", "u1 abc>a", "u2 ba>e", "u2 bae>e"]
    assert asked(dataset, each.test) == ["u1 abca>d", "u2 baee>b", "u2 baeeb>b", "u4 f>a", "u4 fa>f"]
    assert each.counts is not None and each.counts["validation"]["targets_left_out"] == 1


def test_training_counts_and_the_target_hash_are_those_of_the_split(dataset: Dataset) -> None:
    by_time = dataset.with_split(**BY_TIME)
    counts = dict(zip(dataset.item_ids, by_time.training_counts[1:].tolist(), strict=True))
    assert counts == {"a": 3, "b": 2, "c": 1, "d": 1, "e": 0, "f": 0}
    hashes = {one.target_hash for one in (dataset, by_time, dataset.with_split(**BY_TIME, split_targets="first"))}
    assert len(hashes) == 3 and by_time.content_hash == dataset.content_hash
    assert describe(by_time).num_tested == 3 and describe(by_time).unseen_targets == 1 / 4
    assert by_time.num_tested == 3 and dataset.num_tested == 4


def test_plain_leave_one_out_copies_nothing_and_says_what_it_always_said(dataset: Dataset) -> None:
    split = dataset.split
    assert split.items is dataset.items and split.validation.items is dataset.items and split.counts is None
    assert split.text == "leave-one-out: the last event tests, the one before validates, the rest train"
    assert leave_one_out(dataset).test.target.tolist() == split.test.target.tolist()
    assert dataset.splitting.is_plain and dataset.splitting.chosen() == {}
    assert not any("split" in line for line in remarks(dataset))
    assert dataset.training_counts.sum() == dataset.num_events - 2 * dataset.num_users


def test_points_in_time_may_be_shares_dates_or_times_of_the_data() -> None:
    days = pd.to_datetime(["2020-01-01", "2020-01-02", "2020-01-03", "2020-01-04", "2020-01-05"] * 2)
    frame = pd.DataFrame({"user_id": ["x"] * 5 + ["y"] * 5, "item_id": list("abcdeabcde"), "t": days})
    dataset = Dataset.from_frame(frame, time="t")

    def starts(**how: object) -> tuple[int, int]:
        split = dataset.with_split(split="global_time", **how).split
        return int(split.training_length[0]), int(split.validation.target.size)

    assert starts(split_at="2020-01-03") == (2, 2)  # half of the rest
    assert starts(split_at="2020-01-03", test_at="2020-01-04 00:00:01") == (2, 4)
    assert starts(split_at=0.4, test_at=0.8) == (2, 4)
    second = 1577836800 + 2 * 86400
    assert starts(split_at=second, test_at=second + 1) == (2, 2)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"split": "global_time"}, "split_at is missing"),
        ({"split": "by_time"}, "split is 'by_time'"),
        ({"split_at": 0.8}, "split_at has no effect with split leave_one_out"),
        ({"split_targets": "first"}, "split_targets has no effect"),
        ({"split": "global_time", "split_at": 1.5}, "split_at is 1.5; give a number > 0 and < 1"),
        ({"split": "global_time", "split_at": True}, "split_at is True; give a share"),
        ({"hold_out_items": 1.0}, "hold_out_items is 1.0; give a number >= 0 and < 1"),
        ({"hold_out_seed": 3}, "hold_out_seed has no effect without hold_out_items"),
    ],
)
def test_settings_that_say_nothing_or_no_split_are_refused(how: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Splitting(**how)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"split_at": 40, "test_at": 30}, "validation has no time: training ends at 40"),
        ({"split_at": 5, "test_at": 30}, "leaves no event in training"),
        ({"split_at": 60, "test_at": 70}, "leaves no target of a user with an event before it in validation"),
        ({"split_at": "2020-01-01"}, "are no dates \\(up to 45\\)"),
    ],
)
def test_a_split_that_the_data_cannot_have_is_refused(dataset: Dataset, how: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _ = dataset.with_split(split="global_time", **how).split


def test_a_text_that_is_no_date_is_refused_and_so_is_data_without_times() -> None:
    frame = pd.DataFrame({"user_id": [1] * 3, "item_id": [1, 2, 3], "t": pd.date_range("2020-01-01", periods=3)})
    dataset = Dataset.from_frame(frame, time="t")
    with pytest.raises(UserError, match="split_at is 'soon'; give a share of the events"):
        _ = dataset.with_split(split="global_time", split_at="soon").split
    with pytest.raises(UserError, match="has no real times; give data with a time column"):
        _ = Dataset.from_frame(frame[["user_id", "item_id"]]).with_split(split="global_time", split_at=0.5).split


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("targets", ["all", "first", "successive"])
def test_no_event_of_a_part_or_after_it_is_read_before_it(seed: int, targets: str) -> None:
    dataset = random_log(seed).with_split(split="global_time", split_at=50, test_at=70, split_targets=targets)
    split = dataset.split
    assert split.times is not None
    ends = split.training_stop - 1
    assert split.times[ends].max() < 50 and dataset.times is not None
    for view, first, end in ((split.validation, 50, 70), (split.test, 70, 90)):
        assert view.times is not None
        when = dataset.times[view.event]
        assert first <= when.min() and when.max() < end
        assert (dataset.items[view.event] == view.target).all()
        assert (view.times[view.stop - 1] <= when).all() and (view.stop > view.start).all()
        if targets != "successive":
            assert view.times[view.stop - 1].max() < first


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"split": "global_time", "split_at": 45},
        {"split": "global_time", "split_at": 45, "split_targets": "successive"},
    ],
)
def test_items_held_out_are_targets_and_nowhere_else(seed: int, how: dict[str, object]) -> None:
    plain = random_log(seed).with_split(**how)
    dataset = plain.with_split(**how, hold_out_items=0.3, hold_out_seed=seed)
    out = np.append(False, held_out(dataset.item_ids, 0.3, seed))
    split, before = dataset.split, plain.split
    assert (dataset.training_counts[out] == 0).all() and out.any()
    assert (dataset.training_counts[~out] == plain.training_counts[~out]).all(), "the others lose nothing"
    assert split.training_length.sum() == dataset.training_counts.sum()
    for view, whole in ((split.validation, before.validation), (split.test, before.test)):
        assert out[view.target].any(), "they stay as targets"
        kept = {(int(u), int(e)): n for n, (u, e) in enumerate(zip(whole.user, whole.event, strict=True))}
        for row, (user, event) in enumerate(zip(view.user, view.event, strict=True)):
            other = kept.pop((int(user), int(event)))
            history = whole.items[whole.start[other] : whole.stop[other]]
            assert view.items[view.start[row] : view.stop[row]].tolist() == history[~out[history]].tolist()
            assert view.times is not None and dataset.times is not None
            same = view.history is None or row == 0 or view.history[row] != view.history[row - 1]
            if same:  # what a model that is shown the time of the next event reads
                assert view.times[view.stop[row]] == dataset.times[event]
        for other in kept.values():  # a row is left out if its history had nothing else
            assert out[whole.items[whole.start[other] : whole.stop[other]]].all()


def test_who_is_held_out_depends_on_the_seed_and_the_raw_id_alone() -> None:
    ids = np.arange(2000)
    drawn = held_out(ids, 0.1, 0)
    assert 150 < drawn.sum() < 250
    assert held_out(ids[::-1].astype(str).astype(object), 0.1, 0)[::-1].tolist() == drawn.tolist()
    assert (held_out(ids, 0.2, 0) >= drawn).all(), "of a larger share they are a part"
    assert (held_out(ids, 0.1, 1) != drawn).any()


def test_views_group_rows_by_user_and_by_history(dataset: Dataset) -> None:
    shared = dataset.with_split(**BY_TIME).split.test
    assert shared.owner is not None and shared.owner.tolist() == [0, 1, 2, 2]
    assert shared.history is not None and shared.history.tolist() == [0, 1, 2, 2]
    assert asked(dataset, shared.next_events()) == ["u1 abca>d", "u2 baee>b", "u4 f>a"]
    each = dataset.with_split(**BY_TIME, split_targets="successive").split.test
    assert each.owner is not None and each.owner.tolist() == [0, 1, 1, 2, 2] and each.history is None
    assert each.histories() is each and dataset.split.test.next_events() is dataset.split.test


def test_a_configuration_names_the_split_and_null_is_leave_one_out(dataset: Dataset) -> None:
    asked_for = DataConfig(dataset="log", split="global_time", split_at=30, test_at=40)
    made = asked_for.split_as_asked(dataset)
    assert made.splitting == Splitting(**BY_TIME) and asked_for.split_as_asked(made) is made
    assert DataConfig(dataset="log").split_as(made) == asked_for
    assert DataConfig.behind(made).split_at == 30
    assert DataConfig(split="leave_one_out").split_as_asked(dataset) is dataset
    assert DataConfig(split="leave_one_out").split_as(dataset) == DataConfig()
    assert DataConfig().split_as_asked(made) is made, "data with a split of their own keep it"
    with pytest.raises(UserError, match="give the data without a split of their own"):
        DataConfig(hold_out_items=0.1).split_as_asked(made)


def test_remarks_say_what_is_new_and_what_is_left_out(dataset: Dataset) -> None:
    said = remarks(dataset.with_split(**BY_TIME))
    assert said[-3:] == counts_lines(dataset.with_split(**BY_TIME).split.counts or {})
    assert said[-4].startswith("split: global time: events before 30 train")
    rows = [("old", "a", 1), ("old", "b", 8), ("old", "c", 9)] + [
        (f"new{n}", item, 9) for n in (1, 2) for item in "abc"
    ]
    frame = pd.DataFrame(rows, columns=["user_id", "item_id", "t"])
    newcomers = Dataset.from_frame(frame, time="t")
    by_time = {"split": "global_time", "split_at": 8, "test_at": 9}
    assert remarks(newcomers.with_split(**by_time))[4].startswith("most test targets are left out; split_targets=succ")
    assert not any("most" in line for line in remarks(newcomers.with_split(**by_time, split_targets="successive")))
