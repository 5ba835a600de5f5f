"""Lists for histories of raw ids, on a model whose scores can be read off."""

from __future__ import annotations

import datetime
import decimal
import json
import warnings

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

from recbft.datasets import Dataset
from recbft.datasets.vocabulary import Vocabulary
from recbft.errors import ColdStartError, UserError
from recbft.evaluation.probability import Calibration
from recbft.models.contract import ItemTable, SequenceModel, UserStates
from recbft.serving.lists import joined, recommend_in_blocks, recommend_lists, summed

LETTERS = Vocabulary(np.array(list("abcdef"), dtype=object))
NUMBERS = Vocabulary(np.array([10, 20, 30, 40, 50, 60]))


class Echo(nn.Module, SequenceModel):
    """Scores item i by i, and 100 more if it is the last one read; as precise as the number of events read."""

    def __init__(self, *, max_length=50, precise=True):
        super().__init__()
        self.max_length, self.precise = max_length, precise

    def user_states(self, batch):
        assert not self.training and torch.is_inference_mode_enabled()
        self.times = None if batch.time is None else batch.time[batch.segment >= 0]
        last = batch.items.flatten()[batch.last]
        state = torch.cat([100.0 * torch.eye(7)[last], torch.ones(len(last), 1)], dim=1)
        length = torch.bincount(batch.segment[batch.segment >= 0])
        return UserStates(state, length.float() if self.precise else None)

    def item_table(self):
        return ItemTable(torch.cat([torch.eye(7), torch.arange(7.0)[:, None]], dim=1), None)


class Clock(Echo):
    """Remembers the times that it reads."""

    reads_times = True


class Shown(Clock):
    """Has been shown the time of what it is to predict."""

    shows_target_time = True


def recommend(*asked, **how):
    return joined(recommend_in_blocks(*asked, **how))


def lists(table):
    return {user: part["item"].tolist() for user, part in table.groupby("user", sort=False)}


def test_a_list_holds_the_best_items_with_scores_and_ranks():
    table = recommend(Echo(), LETTERS, {"ann": ["c", "b"], "bob": ["f"]}, 3, filter_seen=False)
    assert list(table.columns) == ["user", "item", "score", "rank", "precision", "probability"]
    assert table["user"].tolist() == ["ann"] * 3 + ["bob"] * 3
    assert table["item"].tolist() == ["b", "f", "e", "f", "e", "d"]
    assert table["score"].tolist() == [102, 6, 5, 106, 5, 4]
    assert table["rank"].tolist() == [1, 2, 3] * 2
    assert table["precision"].tolist() == [2, 2, 2, 1, 1, 1]
    assert table["probability"].isna().all() and table["probability"].dtype == np.float64
    assert table.attrs == {"unknown_events": 0, "skipped_users": [], "short_lists": 0, "shortest_list": 3}


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ({"filter_seen": False}, "abcdef"),
        ({}, "abde"),
        ({"exclude": ["a", "c", "unheard"]}, "bde"),
        ({"candidates": ["f", "d", "unheard", "a"]}, "ad"),
        ({"candidates": ["b", "d", "e"], "exclude": ["e"], "filter_seen": False}, "bd"),
    ],
    ids=["all", "not seen", "not excluded", "candidates", "candidates, not excluded"],
)
def test_probabilities_are_those_of_the_items_that_the_list_may_hold(how, left):
    table = recommend(Echo(), LETTERS, {"ann": ["c", "f"]}, 2, calibration=Calibration(50.0, 0.25), **how)
    scores = {letter: (100 if letter == "f" else 0) + n for n, letter in enumerate("abcdef", start=1)}
    odds = {letter: np.exp(scores[letter] / 50) for letter in left}
    expected = [0.75 * odds[letter] / sum(odds.values()) + 0.25 / len(left) for letter in table["item"]]
    assert table["probability"].tolist() == pytest.approx(expected, rel=1e-5)
    assert table["probability"].is_monotonic_decreasing


def test_a_model_that_serves_is_not_written_to_and_one_that_trains_is_left_in_its_mode():
    class Watched(Echo):
        def __setattr__(self, name, value):
            assert name != "training" or "training" not in vars(self)
            super().__setattr__(name, value)

    model = Echo().eval()
    model.__class__ = Watched
    recommend(model, LETTERS, {"ann": ["a"]}, 1)
    model = Echo().train()
    recommend(model, LETTERS, [["a"]], 1)
    assert model.training


def test_items_beyond_what_the_model_reads_count_as_seen_too():
    table = recommend(Echo(max_length=1), LETTERS, {"ann": ["f", "e", "a"]}, 2)
    assert table["item"].tolist() == ["d", "c"] and table["precision"].tolist() == [1, 1]


def test_unknown_items_are_skipped_and_counted():
    histories = {"ann": ["x", "c", "y"], "bob": ["z"], "cem": [], "dee": ["b"]}
    table = recommend(Echo(), LETTERS, histories, 1, filter_seen=False)
    assert lists(table) == {"ann": ["c"], "dee": ["b"]}
    assert table["precision"].tolist() == [1, 1]
    assert table.attrs == {
        "unknown_events": 3, "skipped_users": ["bob", "cem"], "short_lists": 0, "shortest_list": 1
    }  # fmt: skip


def test_histories_come_as_a_mapping_a_sequence_or_a_frame():
    expected = [["c", "a"], ["b"]]
    frame = pd.DataFrame({"user_id": ["v", "u", "v"], "other": 0, "item_id": ["c", "b", "a"]})
    same = [
        recommend(Echo(), LETTERS, {"v": expected[0], "u": expected[1]}, 2),
        recommend(Echo(), LETTERS, expected, 2),
        recommend(Echo(), LETTERS, tuple(map(tuple, expected)), 2),
        recommend(Echo(), LETTERS, {"v": np.array(expected[0]), "u": pd.Series(expected[1])}, 2),
        recommend(Echo(), LETTERS, frame, 2),
        recommend(Echo(), LETTERS, pa.table(frame), 2),
        recommend(Echo(), LETTERS, pd.Series(expected, index=["v", "u"]), 2),
        recommend(Echo(), LETTERS, (history for history in expected), 2),
    ]
    for table in same:
        assert table["item"].tolist() == same[0]["item"].tolist()
        assert table["score"].tolist() == same[0]["score"].tolist()
    for named in (0, 4, 5, 6):
        assert same[named]["user"].tolist() == ["v", "v", "u", "u"]
    for numbered in (1, 2, 7):
        assert same[numbered]["user"].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("at_once", [1, 4096])
def test_a_user_with_fewer_items_left_gets_those_and_no_one_else_fewer(at_once, monkeypatch):
    monkeypatch.setattr("recbft.serving.lists.HISTORIES_AT_ONCE", at_once)
    histories = {"all": list("fedcba"), "bob": ["a", "b", "a", "c", "d"], "ann": ["a"]}
    table = recommend(Echo(), LETTERS, histories, 4)
    assert lists(table) == {"bob": ["f", "e"], "ann": ["f", "e", "d", "c"]}
    assert table["rank"].tolist() == [1, 2, 1, 2, 3, 4] and table["score"].tolist() == [6, 5, 6, 5, 4, 3]
    assert table["precision"].tolist() == [5] * 2 + [1] * 4 and table.index.tolist() == list(range(6))
    assert table.attrs == {"unknown_events": 0, "skipped_users": [], "short_lists": 2, "shortest_list": 0}
    assert table.dtypes.equals(recommend(Echo(), LETTERS, {"ann": ["a"]}, 1).dtypes)


def test_a_k_beyond_the_catalogue_gives_all_of_it():
    for k in (6, 7, 10**12):
        table = recommend(Echo(), LETTERS, {"ann": ["a"]}, k, filter_seen=False)
        assert table["item"].tolist() == list("afedcb") and table.attrs["short_lists"] == (k > 6)


@pytest.mark.parametrize(
    ("vocabulary", "histories", "left_out"),
    [
        (LETTERS, {"ann": list("abcdef"), "bob": list("fedcba")}, {}),
        (NUMBERS, {1: [10], 2: [10]}, {"candidates": [10]}),
        (LETTERS, [["a"]], {"exclude": list("abcdef")}),
    ],
)
def test_where_no_one_has_an_item_left_the_table_is_empty_and_has_its_types(
    vocabulary, histories, left_out, monkeypatch
):
    monkeypatch.setattr("recbft.serving.lists.HISTORIES_AT_ONCE", 1)
    table = recommend(Echo(), vocabulary, histories, 3, **left_out)
    assert len(table) == 0 and table.attrs["short_lists"] == len(histories) and table.attrs["shortest_list"] == 0
    usual = recommend(Echo(), vocabulary, histories, 3, filter_seen=False)
    assert table.dtypes.equals(usual.dtypes) and table.columns.equals(usual.columns)


def test_blocks_are_the_rows_of_the_table_and_count_everything_once(monkeypatch):
    monkeypatch.setattr("recbft.serving.lists.HISTORIES_AT_ONCE", 2)
    histories = {"ann": ["a", "x"], "bob": list("abcde"), "no one": ["y"], "cem": ["c"], "dee": ["d"], "eve": ["e"]}
    table = recommend(Echo(), LETTERS, histories, 2)
    blocks = list(recommend_in_blocks(Echo(), LETTERS, histories, 2))
    assert [block["user"].unique().tolist() for block in blocks] == [["ann", "bob"], ["cem", "dee"], ["eve"]]
    pd.testing.assert_frame_equal(pd.concat(blocks, ignore_index=True), table)
    assert summed([block.attrs for block in blocks]) == table.attrs
    assert table.attrs == {"unknown_events": 2, "skipped_users": ["no one"], "short_lists": 1, "shortest_list": 1}


def test_long_lists_come_in_blocks_of_fewer_users(monkeypatch):
    monkeypatch.setattr("recbft.serving.lists.ROWS_AT_ONCE", 10)
    blocks = recommend_in_blocks(Echo(), LETTERS, [["a"]] * 5, 5)
    assert [block["user"].nunique() for block in blocks] == [2, 2, 1]


def test_what_is_wrong_with_a_request_is_said_before_the_first_block():
    for histories, k in (([], 1), ([["a"]], 0), ([["x"]], 1)):
        with pytest.raises(UserError):
            recommend_in_blocks(Echo(), LETTERS, histories, k)


def test_between_two_blocks_gradients_are_the_callers(monkeypatch):
    monkeypatch.setattr("recbft.serving.lists.HISTORIES_AT_ONCE", 1)
    model = Echo().train()
    for _ in recommend_in_blocks(model, LETTERS, [["a"], ["b"]], 1):
        assert model.training and not torch.is_inference_mode_enabled() and torch.is_grad_enabled()


def test_skipped_users_are_not_copied_with_every_part_of_a_table():
    table = recommend(Echo(), LETTERS, {np.int64(1): ["a"], np.int64(2): ["x"]}, 1)
    assert table.head().attrs["skipped_users"] is table.attrs["skipped_users"]
    assert json.loads(json.dumps(table.attrs))["skipped_users"] == [2], "as Parquet files keep attrs"


def test_some_items_can_be_left_out_of_all_lists_or_be_the_only_ones():
    histories = {"ann": ["a"], "bob": ["f"]}
    assert lists(recommend(Echo(), LETTERS, histories, 2, exclude=["e", "nothing"])) == {
        "ann": ["f", "d"],
        "bob": ["d", "c"],
    }
    assert "".join(recommend(Echo(), LETTERS, [["f"]], 6, exclude=["a"], filter_seen=False)["item"]) == "fedcb"
    only = recommend(Echo(), LETTERS, histories, 1, candidates=pd.Series(["b", "a", "b", "nothing"]), exclude=["b"],
                     filter_seen=False)  # fmt: skip
    assert lists(only) == {"ann": ["a"], "bob": ["a"]}
    with pytest.raises(UserError, match=r"none of the 2 candidates is in the model's vocabulary \(such as 'x'\)"):
        recommend(Echo(), LETTERS, histories, 1, candidates=["x", "y"])
    assert lists(recommend(Echo(), LETTERS, histories, 2, candidates=["a", "c"])) == {"ann": ["c"], "bob": ["c", "a"]}


def test_items_to_leave_out_that_are_all_unknown_are_warned_of():
    said = r"none of the 2 excluded items is in the model's vocabulary \(such as '010', while the model knows 10\), so"
    with pytest.warns(UserWarning, match=said) as found:
        recommend(Echo(), NUMBERS, {"ann": [10]}, 2, exclude=["010", "020"])
    assert len(found) == 1
    with pytest.warns(UserWarning, match=r"\(such as 7, while"):
        recommend(Echo(), NUMBERS, {"ann": [10]}, 2, exclude=np.array([7]))
    with pytest.raises(UserError, match=r"\(such as 7\)"):
        recommend(Echo(), NUMBERS, {"ann": [10]}, 2, candidates=np.array([7]))
    with pytest.raises(UserError, match=r"\(such as 7, while"):
        recommend(Echo(), NUMBERS, {"ann": np.array([7])}, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recommend(Echo(), NUMBERS, {"ann": [10]}, 2, exclude=[])


@pytest.mark.parametrize("form", [np.array, pd.Series, iter, set])
def test_left_out_items_come_in_any_form_of_a_list(form):
    assert lists(recommend(Echo(), NUMBERS, {"ann": [10]}, 2, exclude=form([60, 40]))) == {"ann": [50, 30]}
    assert lists(recommend(Echo(), NUMBERS, {"ann": [10]}, 2, candidates=form([60, 40]))) == {"ann": [60, 40]}


NO_LIST = [np.array("a"), torch.tensor(1), b"a", "ab", 7, pd.DataFrame({"a": ["c"]}), pa.table({"a": ["c"]})]


@pytest.mark.parametrize("alone", NO_LIST, ids=lambda value: type(value).__name__)
def test_what_only_looks_like_a_list_is_refused_wherever_a_list_is_wanted(alone):
    """A loop over it would take it apart into something else."""
    for histories, of in (({"ann": alone}, "the history of user 'ann'"), ([["a"], alone], "the history of user 1")):
        with pytest.raises(UserError, match=rf"^{of} is .*; give a list of item ids, oldest first$"):
            recommend(Echo(), LETTERS, histories, 1)
    for name in ("exclude", "candidates"):
        with pytest.raises(UserError, match=rf"^{name} is .*; give a list of item ids$"):
            recommend(Echo(), LETTERS, [["a"]], 1, **{name: alone})
    if not hasattr(alone, "columns"):
        with pytest.raises(UserError, match=r"^the histories are .*; give lists of item ids by user"):
            recommend(Echo(), LETTERS, alone, 1)


@pytest.mark.parametrize("filter_seen", ["false", 0, None, np.array([True, False])])
def test_a_filter_that_is_neither_true_nor_false_is_refused_at_once(filter_seen):
    with pytest.raises(UserError, match=r"^filter_seen is .*; give True .* or False"):
        recommend_in_blocks(Echo(), LETTERS, [["a"]], 1, filter_seen=filter_seen)
    for seen in (False, True):
        plain, numpy = (recommend(Echo(), LETTERS, [["f"]], 1, filter_seen=of(seen)) for of in (bool, np.bool_))
        pd.testing.assert_frame_equal(plain, numpy)


def test_histories_with_nothing_to_go_by_are_refused():
    for nothing in ({}, [], pd.DataFrame({"user_id": [], "item_id": [], "timestamp": []})):
        with pytest.raises(UserError, match="there is no history to recommend for; give at least one user with items"):
            recommend(Clock(), LETTERS, nothing, 1)
    told = r"none of the 2 items .* is in the model's vocabulary .such as 'x', while the model knows 'a'.; check"
    with pytest.raises(ColdStartError, match=told):
        recommend(Echo(), LETTERS, [["x"], ["y"], []], 1)
    with pytest.raises(ColdStartError, match="the histories hold no item; give at least one of them its item ids"):
        recommend(Echo(), LETTERS, {"u": []}, 1)


@pytest.mark.parametrize(
    ("histories", "message"),
    [
        ({"u": {"a", "b"}}, r"the history of user 'u' is .* \(set\); give a list of item ids, oldest first"),
        ({"u": {"a": 5}}, r"the history of user 'u' is .* \(dict\); give"),
        ({"u": [b"a"]}, "an item id is b'a'; give ids that are whole numbers or text"),
        (pd.Series([["a"], ["b"]], index=["u", "u"]), "user 'u' occurs twice in the histories"),
        (pd.DataFrame([["u", "a", "b"]], columns=["user_id", "item_id", "item_id"]), "column 'item_id' occurs 2 times"),
        (pa.table({"user": ["u"], "item_id": ["a"]}), "the histories: no column 'user_id'; did you mean 'user'"),
        (pd.DataFrame({"user_id": ["u", None], "item_id": ["a", "b"]}), "row 2 of the histories has a blank user_id"),
        ({"u": ["a"], None: ["b"]}, r"user 2 of the histories is blank \(None\); fill the id in or leave"),
        (pd.Series([["a"], ["b"]], index=["u", float("nan")]), r"user 2 of the histories is blank \(nan\)"),
    ],
)
def test_histories_in_another_form_are_refused(histories, message):
    with pytest.raises(UserError, match=message):
        recommend(Echo(), LETTERS, histories, 1)


@pytest.mark.parametrize("k", [0, 2.0, "2", True, None])
def test_a_k_that_is_no_whole_number_is_refused(k):
    with pytest.raises(UserError, match=f"k is {k!r}; give a whole number of at least 1, the length of the lists"):
        recommend(Echo(), LETTERS, [["a"]], k)


def test_a_model_that_needs_the_time_of_the_next_event_is_refused():
    with pytest.raises(UserError, match="show_target_time: true, but the time of the next event is not known"):
        recommend(Shown(), LETTERS, [["a"]], 1)


@pytest.mark.parametrize("memory_mb", [256.0, 1e-4])
def test_many_users_get_the_lists_they_would_get_alone(memory_mb, monkeypatch):
    monkeypatch.setattr("recbft.serving.lists.HISTORIES_AT_ONCE", 3)
    rng = np.random.default_rng(0)
    histories = {f"u{n}": rng.choice(list("abcdefxy"), rng.integers(1, 5)).tolist() for n in range(20)}
    histories["sure"] = ["a"]
    together = recommend(Echo(), LETTERS, histories, 2, memory_mb=memory_mb, calibration=Calibration(50.0, 0.1))
    for user, items in histories.items():
        own = together[together["user"] == user]
        if user in together.attrs["skipped_users"]:
            assert own.empty and not set(items) & set("abcdef")
            continue
        alone = recommend(Echo(), LETTERS, {user: items}, 2, calibration=Calibration(50.0, 0.1))
        assert own["probability"].tolist() == pytest.approx(alone["probability"].tolist(), rel=1e-6)
        rest = ["item", "score", "rank", "precision"]
        assert own[rest].values.tolist() == alone[rest].values.tolist()


@pytest.mark.parametrize(
    "users", [[1, 2**53 + 1], [1, 2.5], [2**53 + 1, 2.5], [1, "ann"], [2.5, 3.5], ["ann", "bob"], [(1, 2), (3, 4)]]
)
@pytest.mark.parametrize("at_once", [1, 4096])
def test_users_come_back_as_they_were_given(users, at_once, monkeypatch):
    monkeypatch.setattr("recbft.serving.lists.HISTORIES_AT_ONCE", at_once)
    found = recommend(Echo(), LETTERS, {user: ["a"] for user in users}, 1)["user"].tolist()
    assert found == users and [type(user) for user in found] == [type(user) for user in users]


def test_a_user_whose_name_has_no_utf_8_does_not_end_the_call():
    assert recommend(Echo(), LETTERS, {"\ud800": ["a"], "ann": ["b"]}, 1)["user"].tolist() == ["\ud800", "ann"]


def test_large_ids_of_an_arrow_table_stay_exact_beside_a_blank():
    vocabulary = Vocabulary(np.array([2**53, 2**53 + 1]))
    table = pa.table({"user_id": ["u", "u"], "item_id": pa.array([2**53 + 1, None])})
    assert recommend(Echo(), vocabulary, table, 1, filter_seen=False)["item"].tolist() == [2**53 + 1]


def test_a_column_of_lists_is_a_sequence_of_histories():
    column = pa.chunked_array([[["a", "c"]], [["b"]]])
    table = recommend(Echo(), LETTERS, column, 1, filter_seen=False)
    assert lists(table) == {0: ["c"], 1: ["b"]}


def seen(stamps, unit="s", users=("u", "v", "u")):
    """The times that a model reads of three events, user by user."""
    frame = pd.DataFrame({"user_id": users, "item_id": ["a", "b", "c"], "timestamp": stamps})
    model = Clock()
    recommend(model, LETTERS, frame, 1, time_unit=unit)
    return model.times.tolist()


DAYS = [datetime.date(2020, 1, day) for day in (1, 2, 3)]
SECONDS = [1577836800, 1577836800 + 86400, 1577836800 + 2 * 86400]


@pytest.mark.parametrize(
    "stamps",
    [
        DAYS,
        pd.Categorical(pd.to_datetime(DAYS)),
        pd.to_datetime(DAYS).tz_localize("UTC").tz_convert("Asia/Tokyo"),
        [str(second) for second in SECONDS],
        [decimal.Decimal(second) for second in SECONDS],
        pd.array(SECONDS, dtype="Int64"),
    ],
)
def test_times_are_taken_in_every_form_that_a_data_set_takes(stamps):
    frame = pd.DataFrame({"user_id": "u", "item_id": ["a", "b", "c"], "timestamp": stamps})
    assert Dataset.from_frame(frame, time="timestamp").times.tolist() == SECONDS
    assert seen(stamps) == [SECONDS[0], SECONDS[2], SECONDS[1]]


@pytest.mark.parametrize(("unit", "factor"), [("ms", 10**3), ("us", 10**6), ("ns", 10**9)])
def test_dates_are_told_in_the_unit_of_the_training_data_and_whole_numbers_are_in_it(unit, factor):
    assert seen(DAYS, unit) == [second * factor for second in (SECONDS[0], SECONDS[2], SECONDS[1])]
    assert seen([5, 6, 7], unit) == [5, 7, 6]
    assert seen(pd.to_datetime([1_500, 2_500, 3_999], unit="ms"), "s") == [1, 3, 2]


@pytest.mark.parametrize(
    ("stamps", "unit", "message"),
    [
        ([1, -2, 3], "s", "the histories: row 2: column 'timestamp' holds -2, but a time must be"),
        ([1, "x", DAYS[0]], "s", "the histories: column 'timestamp' holds values of type date, int, str; make it"),
        ([1, 2, 1_700_000_000_000], "s", "up to 1700000000000, which look like dates in ms, but the model reads"),
        (DAYS, None, "dates or fractions of seconds, which cannot be .* \\(whole numbers of an unknown unit\\); give"),
        ([datetime.date(2999, 1, 1)] * 3, "ns", "which cannot be converted to the times of the training data \\(ns\\)"),
    ],
)
def test_times_that_cannot_be_read_are_refused(stamps, unit, message):
    with pytest.raises(UserError, match=message):
        seen(stamps, unit)


@pytest.mark.parametrize(
    ("make", "stamps"), [(Clock, [30, 5, 20]), (Echo, list(reversed(DAYS))), (Clock, pd.Categorical(DAYS[::-1]))]
)
def test_rows_that_go_back_in_time_are_taken_as_they_are_with_a_warning(make, stamps):
    frame = pd.DataFrame({"user_id": ["u", "v", "u"], "item_id": ["a", "b", "c"], "timestamp": stamps})
    with pytest.warns(UserWarning, match="column 'timestamp' goes backwards within a user 1 times; sort the frame by"):
        table = recommend(make(), LETTERS, frame, 1, filter_seen=False, time_unit="s")
    assert table["item"].tolist() == ["c", "b"], "the last row counts as the last event"


@pytest.mark.parametrize("stamps", [[1, 9, 1], ["x", "y", "z"], [None] * 3, [1, "x", DAYS[0]]])
def test_times_that_go_on_or_are_none_are_no_matter_to_a_model_without_them(stamps):
    frame = pd.DataFrame({"user_id": ["u", "v", "u"], "item_id": ["a", "b", "c"], "timestamp": stamps})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recommend(Echo(), LETTERS, frame, 1, filter_seen=False)["item"].tolist() == ["c", "b"]


@pytest.mark.filterwarnings("error")
def test_categories_of_users_are_users():
    assert seen([1, 2, 3], users=pd.Categorical(["u", "v", "u"])) == [1, 3, 2]


POPULAR = torch.tensor([0.0, 5, 1, 9, 1, 0, 3])  # c, a, f, b, d, e


@pytest.mark.parametrize("at_once", [1, 2, 4096])
def test_a_fallback_answers_every_user_and_marks_whom_it_answers(at_once, monkeypatch):
    monkeypatch.setattr("recbft.serving.lists.HISTORIES_AT_ONCE", at_once)
    histories = {"new": ["x"], "ann": ["a"], "all": list("abcdef"), "nothing": []}
    table = recommend(Echo(), LETTERS, histories, 3, fallback="popular", popular=POPULAR)
    assert lists(table) == {"new": list("caf"), "ann": list("fed"), "all": list("caf"), "nothing": list("caf")}
    is_fallback = table.groupby("user", sort=False)["fallback"].first()
    assert is_fallback.tolist() == [True, False, True, True] and table["rank"].tolist() == [1, 2, 3] * 4
    assert table.loc[table["fallback"], ["score", "precision", "probability"]].isna().all(axis=None)
    assert table.loc[~table["fallback"], "score"].tolist() == [6, 5, 4]
    assert table.attrs["skipped_users"] == [] and table.attrs["fallback_lists"] == 3
    assert "fallback" not in recommend(Echo(), LETTERS, histories, 3)


def test_a_fallback_heeds_what_is_left_out_and_needs_no_known_user():
    how = {"fallback": "popular", "popular": POPULAR}
    assert lists(recommend(Echo(), LETTERS, [["x"], []], 2, exclude=["c"], **how)) == {0: ["a", "f"], 1: ["a", "f"]}
    own = {"candidates": {0: ["d", "b"], 1: ["e"]}, "exclude": {0: ["d"]}}
    assert lists(recommend(Echo(), LETTERS, [["x"], []], 2, **own, **how)) == {0: ["b"], 1: ["e"]}
    with pytest.raises(UserError, match="fallback is 'pop'; give 'popular', or leave it out"):
        recommend(Echo(), LETTERS, [["a"]], 2, fallback="pop", popular=POPULAR)


@pytest.mark.parametrize("how", [{}, {"fallback": "popular", "popular": POPULAR}])
@pytest.mark.parametrize("calibration", [None, Calibration(50.0, 0.25)])
@pytest.mark.parametrize("precise", [True, False])
@pytest.mark.parametrize("at_once", [2, 4096])
def test_plain_lists_hold_what_the_table_holds_and_one_for_every_history(
    how, calibration, precise, at_once, monkeypatch
):
    monkeypatch.setattr("recbft.serving.lists.HISTORIES_AT_ONCE", at_once)
    histories = [["a"], ["x"], list("abcde"), list("abcdef"), []]
    model = Echo(precise=precise)
    table = recommend(model, LETTERS, histories, 2, calibration=calibration, **how)
    plain = recommend_lists(model, LETTERS, histories, 2, calibration=calibration, **how)
    assert len(plain) == 5 and json.loads(json.dumps(plain))
    for number, one in enumerate(plain):
        own = table[table["user"] == number]
        assert one.items == own["item"].tolist()
        assert one.fallback == bool(how and number in (1, 3, 4))
        if one.fallback:
            assert (one.scores, one.probabilities, one.precision) == (None, None, None)
            continue
        assert one.scores == own["score"].tolist()
        assert one.probabilities == (own["probability"].tolist() if calibration and len(own) else None)
        assert one.precision == (own["precision"].tolist()[0] if precise and len(own) else None)


def test_plain_lists_of_users_without_a_known_item_are_empty():
    assert [one.items for one in recommend_lists(Echo(), LETTERS, {"u": ["x"], "v": ["a"], "w": []}, 1)] == [
        [],
        ["f"],
        [],
    ]
    assert recommend_lists(Echo(), NUMBERS, [[10, 60]], 1)[0].items == [50]
    with pytest.raises(UserError, match="there is no history"):
        recommend_lists(Echo(), LETTERS, [], 1)
