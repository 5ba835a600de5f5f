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
from recbft.serving.lists import recommend, recommend_in_blocks, summed

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


@pytest.mark.parametrize("history", [{"a", "b"}, frozenset("ab"), {"a": 5}])
def test_a_history_without_an_order_is_refused(history):
    with pytest.raises(UserError, match="oldest item first"):
        recommend(Echo(), LETTERS, {"ann": history}, 1)


def test_a_model_that_serves_is_not_written_to():
    model = Echo().eval()
    model.__class__ = type(
        "Watched",
        (Echo,),
        {
            "__setattr__": lambda self, name, value: (
                pytest.fail("written to") if name == "training" else nn.Module.__setattr__(self, name, value)
            )
        },
    )
    recommend(model, LETTERS, {"ann": ["a"]}, 1)


def test_seen_items_are_left_out_unless_they_are_asked_for():
    histories = {"ann": ["f", "d", "f"], "bob": ["a"]}
    assert lists(recommend(Echo(), LETTERS, histories, 3)) == {"ann": ["e", "c", "b"], "bob": ["f", "e", "d"]}


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


def test_a_blank_item_is_unknown():
    table = recommend(Echo(), LETTERS, [["a", None, float("nan"), "b"]], 1, filter_seen=False)
    assert table["item"].tolist() == ["b"] and table.attrs["unknown_events"] == 2


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


@pytest.mark.parametrize("history", [[10, 30], ["10", "30"], [10.0, 30.0], np.array([10, 30]), pd.Series([10, 30])])
def test_whole_number_ids_are_found_in_any_form(history):
    table = recommend(Echo(), NUMBERS, {7: history}, 2)
    assert table["item"].tolist() == [60, 50] and table["item"].dtype == np.int64
    assert table["user"].tolist() == [7, 7] and table.attrs["unknown_events"] == 0


def test_text_ids_and_users_of_any_script_come_back_as_they_were():
    vocabulary = Vocabulary(np.array(["crème brûlée", "茶", "007", " x ", "a", "b"], dtype=object))
    table = recommend(Echo(), vocabulary, {"Zoë Ω": ["茶", "7"]}, 2, filter_seen=False)
    assert table["item"].tolist() == ["茶", "b"] and table["user"].tolist() == ["Zoë Ω"] * 2
    assert table.attrs["unknown_events"] == 1, "the number 7 is not the text 007"


def test_users_without_a_precision_get_nan():
    table = recommend(Echo(precise=False), LETTERS, {"ann": ["a"]}, 2)
    assert table["precision"].isna().all() and table["precision"].dtype == np.float64


@pytest.mark.parametrize("at_once", [1, 4096])
def test_a_user_with_fewer_items_left_gets_those_and_no_one_else_fewer(at_once, monkeypatch):
    monkeypatch.setattr("recbft.serving.lists.HISTORIES_AT_ONCE", at_once)
    histories = {"all": list("fedcba"), "ann": ["a"], "bob": ["a", "b", "a", "c", "d"]}
    table = recommend(Echo(), LETTERS, histories, 4)
    assert lists(table) == {"ann": ["f", "e", "d", "c"], "bob": ["f", "e"]}
    assert table["rank"].tolist() == [1, 2, 3, 4, 1, 2] and table["score"].tolist() == [6, 5, 4, 3, 6, 5]
    assert table["precision"].tolist() == [1] * 4 + [5] * 2 and table.index.tolist() == list(range(6))
    assert table.attrs == {"unknown_events": 0, "skipped_users": [], "short_lists": 2, "shortest_list": 0}
    assert table.dtypes.equals(recommend(Echo(), LETTERS, {"ann": ["a"]}, 1).dtypes)


def test_a_k_beyond_the_catalogue_gives_all_of_it():
    for k in (6, 7, 10**12):
        table = recommend(Echo(), LETTERS, {"ann": ["a"]}, k, filter_seen=False)
        assert table["item"].tolist() == list("afedcb") and table.attrs["short_lists"] == (k > 6)
    with pytest.raises(UserError, match="k is 0; ask for at least 1 item"):
        recommend(Echo(), LETTERS, {"ann": ["a"]}, 0)


@pytest.mark.parametrize("at_once", [1, 4096])
@pytest.mark.parametrize(
    ("vocabulary", "histories", "left_out"),
    [
        (LETTERS, {"ann": list("abcdef"), "bob": list("fedcba")}, {}),
        (NUMBERS, {1: [10], 2: [10]}, {"candidates": [10]}),
        (LETTERS, [["a"]], {"exclude": list("abcdef")}),
    ],
)
def test_where_no_one_has_an_item_left_the_table_is_empty_and_has_its_types(
    vocabulary, histories, left_out, at_once, monkeypatch
):
    monkeypatch.setattr("recbft.serving.lists.HISTORIES_AT_ONCE", at_once)
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
    with pytest.raises(UserError, match="exclude is 'e'; give a list of item ids"):
        recommend(Echo(), LETTERS, histories, 1, exclude="e")
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


@pytest.mark.parametrize("form", [np.array, pd.Series, pd.Index, tuple, iter, lambda ids: dict.fromkeys(ids)])
def test_left_out_items_come_in_any_form_of_a_list(form):
    assert lists(recommend(Echo(), NUMBERS, {"ann": [10]}, 2, exclude=form([60, 40]))) == {"ann": [50, 30]}
    assert lists(recommend(Echo(), NUMBERS, {"ann": [10]}, 2, candidates=form([60, 40]))) == {"ann": [60, 40]}


@pytest.mark.parametrize("alone", [np.array("a"), torch.tensor(1), bytearray(b"a")])
def test_what_only_looks_like_a_list_is_refused_wherever_a_list_is_wanted(alone):
    for histories in (alone, {"ann": alone}, [["a"], alone]):
        with pytest.raises(UserError, match=r"^the histor(y of user .* is|ies are) .*give (a list of item ids|lists)"):
            recommend(Echo(), LETTERS, histories, 1)
    for name in ("exclude", "candidates"):
        with pytest.raises(UserError, match=f"^{name} is .*; give a list of item ids"):
            recommend(Echo(), LETTERS, [["a"]], 1, **{name: alone})


@pytest.mark.parametrize("form", [pd.DataFrame, pa.table])
def test_a_table_of_one_user_s_events_is_refused_for_its_columns_would_be_taken_for_items(form):
    with pytest.raises(
        UserError, match=r"the history of user 'ann' is a table .*(Table|Frame).*; give its column of item ids"
    ):
        recommend(Echo(), LETTERS, {"ann": form({"a": ["c"]})}, 1)


@pytest.mark.parametrize("user", [["u", "v"], {"name": "u"}, {"u"}, np.array(["u"])])
@pytest.mark.parametrize("timed", [False, True])
def test_a_user_that_is_no_id_is_refused_in_a_frame(user, timed):
    frame = pd.DataFrame({"user_id": pd.Series(["v", user], dtype=object), "item_id": ["a", "b"], "timestamp": [1, 2]})
    model = Echo()
    model.reads_times = timed
    with pytest.raises(UserError, match=r"^column 'user_id' of the histories holds .*u.*; give ids that are whole"):
        recommend(model, LETTERS, frame, 1)


class Unknown:
    """A table as polars has one, with a column of a type (128 bits) that arrow has not."""

    columns = ("user_id", "item_id")

    def __arrow_c_stream__(self, requested_schema=None):
        raise pa.ArrowInvalid("Invalid or unsupported format string: '_pli128'")

    def __iter__(self):  # over its columns
        return iter([[1, 1, 2], ["a", "b", "c"]])


STRANGE = pa.table({"user_id": [1], "item_id": ["a"], "x": pa.UnionArray.from_dense(
    pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([1])])})  # fmt: skip
FAR = pa.table({"user_id": [1], "item_id": ["a"], "x": pa.array([2**30], pa.date32())})


@pytest.mark.parametrize("table", [Unknown(), STRANGE, FAR], ids=["no stream", "union", "far date"])
def test_a_table_that_cannot_be_read_is_no_list_of_histories(table):
    with pytest.raises(
        UserError, match=r"the histories are a table \((Unknown|Table)\) that cannot be read \(.+\); give"
    ):
        recommend(Echo(), LETTERS, table, 1)


def test_a_column_of_arrow_lists_is_no_column_of_users():
    users = pd.Series([["u"], ["v"]], dtype=pd.ArrowDtype(pa.list_(pa.string())))
    with pytest.raises(UserError, match=r"^column 'user_id' of the histories holds .*u.*; give ids that are whole"):
        recommend(Echo(), LETTERS, pd.DataFrame({"user_id": users, "item_id": ["a", "b"]}), 1)


@pytest.mark.parametrize("ask", [recommend, recommend_in_blocks])
@pytest.mark.parametrize("filter_seen", ["false", 0, None, np.array([True, False])])
def test_a_filter_that_is_neither_true_nor_false_is_refused_at_once(ask, filter_seen):
    with pytest.raises(UserError, match=r"^filter_seen is .*; give True .* or False"):
        ask(Echo(), LETTERS, [["a"]], 1, filter_seen=filter_seen)


def test_true_and_false_of_numpy_are_true_and_false():
    for filter_seen in (False, True):
        plain, numpy = (recommend(Echo(), LETTERS, [["f"]], 1, filter_seen=of(filter_seen)) for of in (bool, np.bool_))
        pd.testing.assert_frame_equal(plain, numpy)


@pytest.mark.parametrize("form", [pd.DataFrame, pa.table])
@pytest.mark.parametrize("name", ["exclude", "candidates"])
def test_a_table_of_left_out_items_is_refused_for_its_columns_would_be_taken_for_ids(form, name):
    with pytest.raises(UserError, match=f"{name} is a table .*; give its column of item ids"):
        recommend(Echo(), LETTERS, [["a"]], 1, **{name: form({"item_id": ["f"]})})


def test_users_of_whom_nothing_is_known_have_an_error_of_their_own():
    for nothing in ([["x", "y"]], [[]]):
        with pytest.raises(ColdStartError):
            recommend(Echo(), LETTERS, nothing, 1)


def test_histories_with_nothing_to_go_by_are_refused():
    for nothing in ({}, [], pd.DataFrame({"user_id": [], "item_id": []})):
        with pytest.raises(UserError, match="there is no history to recommend for; give at least one user with items"):
            recommend(Echo(), LETTERS, nothing, 1)
    with pytest.raises(
        UserError,
        match=r"none of the 2 items .* is in the model's vocabulary .such as 'x', while the model knows 'a'.; check",
    ):
        recommend(Echo(), LETTERS, [["x"], ["y"], []], 1)
    for empty in ([[]], {"u": []}):
        with pytest.raises(UserError, match="the histories hold no item; give at least one of them its item ids"):
            recommend(Echo(), LETTERS, empty, 1)


@pytest.mark.parametrize("missing", ["user_id", "item_id"])
def test_a_frame_without_a_column_is_refused_by_its_name(missing):
    frame = pd.DataFrame({"user_id": ["u"], "item_id": ["a"]}).rename(columns={missing: "other"})
    with pytest.raises(UserError, match=rf"the histories: no column '{missing}'; .*other"):
        recommend(Echo(), LETTERS, frame, 1)


def test_a_row_without_a_user_is_not_dropped_in_silence():
    frame = pd.DataFrame({"user_id": ["u", None], "item_id": ["a", "b"]})
    with pytest.raises(UserError, match="blank"):
        recommend(Echo(), LETTERS, frame, 1)


def test_a_text_in_place_of_a_history_is_refused():
    with pytest.raises(UserError, match="bad"):
        recommend(Echo(), LETTERS, {"ann": "bad"}, 1)


@pytest.mark.parametrize(
    ("histories", "message"),
    [
        (None, "the histories are None; give lists of item ids by user"),
        (7, "the histories are 7; give lists"),
        ("ab", "the histories are 'ab'; give lists"),
        (pd.Series(["a", "b"]), "the history of user 0 is 'a'; give a list"),
        ({"u": None}, r"the history of user 'u' is None; give a list of item ids, such as \[\]"),
        (pd.Series([["a"], ["b"]], index=["u", "u"]), "user 'u' occurs twice in the histories"),
        (pd.DataFrame([["u", "a", "b"]], columns=["user_id", "item_id", "item_id"]), "column 'item_id' occurs 2 times"),
        (pa.table({"user": ["u"], "item_id": ["a"]}), "the histories: no column 'user_id'"),
    ],
)
def test_histories_in_another_form_are_refused_with_the_forms_there_are(histories, message):
    with pytest.raises(UserError, match=message):
        recommend(Echo(), LETTERS, histories, 1)


@pytest.mark.parametrize("k", [2.0, "2", True, None])
def test_a_k_that_is_no_whole_number_is_refused(k):
    with pytest.raises(UserError, match="give a whole number, the length of the lists"):
        recommend(Echo(), LETTERS, [["a"]], k)


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


def test_the_model_s_mode_is_left_as_it_was():
    model = Echo().train()
    recommend(model, LETTERS, [["a"]], 1)
    assert model.training


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
    users = pd.Series(["\ud800", "ann"], dtype=object)
    frame = pd.DataFrame({"user_id": users, "item_id": ["a", "b"], "timestamp": [2, 1]})
    assert recommend(Echo(), LETTERS, frame, 1)["user"].tolist() == ["\ud800", "ann"]


def test_items_in_bytes_are_refused_not_taken_for_unknown():
    with pytest.raises(UserError, match="an item id is b'a'; give ids that are whole numbers or text"):
        recommend(Echo(), LETTERS, [[b"a"]], 1)


def test_large_ids_of_an_arrow_table_stay_exact_beside_a_blank():
    vocabulary = Vocabulary(np.array([2**53, 2**53 + 1]))
    table = pa.table({"user_id": ["u", "u"], "item_id": pa.array([2**53 + 1, None])})
    assert recommend(Echo(), vocabulary, table, 1, filter_seen=False)["item"].tolist() == [2**53 + 1]


def test_a_column_of_lists_is_a_sequence_of_histories():
    column = pa.chunked_array([[["a", "c"]], [["b"]]])
    table = recommend(Echo(), LETTERS, column, 1, filter_seen=False)
    assert lists(table) == {0: ["c"], 1: ["b"]}


def test_two_columns_of_times_are_no_matter_where_none_is_read():
    frame = pd.DataFrame([["u", "a", 2, 1], ["u", "b", 1, 2]], columns=["user_id", "item_id", "timestamp", "timestamp"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recommend(Echo(), LETTERS, frame, 1, filter_seen=False)["item"].tolist() == ["b"]


def test_users_that_are_whole_numbers_make_a_column_of_them():
    assert recommend(Echo(), LETTERS, {1: ["a"], 2: ["b"]}, 1)["user"].dtype == np.int64


@pytest.mark.parametrize("blank", [None, float("nan"), pd.NA, pd.NaT])
@pytest.mark.parametrize("form", [dict, lambda histories: pd.Series(histories.values(), index=list(histories))])
def test_a_blank_user_is_refused(blank, form):
    histories = {1: ["a"], blank: ["b"]}
    with pytest.raises(UserError, match=r"user 2 of the histories is blank \(.*\); fill the id in or leave"):
        recommend(Echo(), LETTERS, form(histories), 1)


class Clock(Echo):
    """Remembers the times that it reads."""

    reads_times = True


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
        pd.Categorical(DAYS),
        pd.Categorical(pd.to_datetime(DAYS)),
        pd.to_datetime(DAYS).tz_localize("UTC").tz_convert("Asia/Tokyo"),
        pd.Series(pd.to_datetime(DAYS), dtype="datetime64[ns]"),
        pd.Series(DAYS, dtype=pd.ArrowDtype(pa.date32())),
        SECONDS,
        [float(second) for second in SECONDS],
        [str(second) for second in SECONDS],
        [decimal.Decimal(second) for second in SECONDS],
        np.array(SECONDS, dtype=np.uint64),
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
        ([1, -2, 3], "s", "the histories: row 2: column 'timestamp' holds -2, but a time must be >= 0"),
        (pd.to_datetime(["1969-01-01"] * 3), "s", "row 1: .* holds .*1969.*, but a date must not lie before 1970"),
        ([1.0, 2.5, 3.0], "s", "row 2: column 'timestamp' holds 2.5, but a time must be a whole number"),
        (np.array([1, 2, 2**63], dtype=np.uint64), "s", "row 3: column 'timestamp' holds '9.*8', but a time must fit"),
        ([1, 2, 2**64], "s", "column 'timestamp' of the histories has type object; give dates, or whole"),
        ([1, "x", DAYS[0]], "s", "column 'timestamp' of the histories has type object; give dates, or whole"),
        ([True, False, True], "s", "column 'timestamp' has type bool, but times must be whole numbers or dates"),
        ([1, 2, 1_700_000_000_000], "s", "up to 1700000000000, which are dates in ms, and the model reads them in s"),
        ([1.0, np.nan, 3.0], "s", "row 2 of the histories has a blank timestamp; fill it in or leave it out"),
        ([*DAYS[:2], None], "s", "row 3 of the histories has a blank timestamp"),
        (DAYS, None, "holds dates, and the training data held whole numbers of a unit that it does not say"),
        ([datetime.date(2999, 1, 1)] * 3, "ns", "dates up to 32472144000 s after 1970, which do not fit in 64 bits in"),
    ],
)
def test_times_that_cannot_be_read_are_refused(stamps, unit, message):
    with pytest.raises(UserError, match=message):
        seen(stamps, unit)


@pytest.mark.parametrize("make", [Echo, Clock])
@pytest.mark.parametrize("stamps", [[30, 5, 20], list(reversed(DAYS)), pd.Categorical(list(reversed(DAYS)))])
def test_rows_that_go_back_in_time_are_taken_as_they_are_with_a_warning(make, stamps):
    frame = pd.DataFrame({"user_id": ["u", "v", "u"], "item_id": ["a", "b", "c"], "timestamp": stamps})
    with pytest.warns(UserWarning, match="column 'timestamp' goes backwards within a user 1 times; sort the frame by"):
        table = recommend(make(), LETTERS, frame, 1, filter_seen=False, time_unit="s")
    assert table["item"].tolist() == ["c", "b"], "the last row counts as the last event"


def test_times_of_another_name_that_go_back_are_warned_of_too():
    frame = pd.DataFrame({"user_id": ["u", "v", "u"], "item_id": ["a", "b", "c"], "created_at": list(reversed(DAYS))})
    with pytest.warns(UserWarning, match="column 'created_at' goes backwards within a user 1 times; sort the") as found:
        recommend(Echo(), LETTERS, frame, 1, filter_seen=False)
    assert len(found) == 1


@pytest.mark.parametrize("stamps", [[1, 9, 1], ["x", "y", "z"], [None] * 3, [1, "x", DAYS[0]]])
def test_times_that_go_on_or_are_none_are_no_matter_to_a_model_without_them(stamps):
    frame = pd.DataFrame({"user_id": ["u", "v", "u"], "item_id": ["a", "b", "c"], "timestamp": stamps})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recommend(Echo(), LETTERS, frame, 1, filter_seen=False)["item"].tolist() == ["c", "b"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form", [list, pd.Categorical])
def test_a_blank_user_of_a_timed_frame_is_refused(form):
    with pytest.raises(UserError, match="row 2 of the histories has a blank user_id"):
        seen([1, 2, 3], users=form(["u", None, "u"]))
    assert seen([1, 2, 3], users=form(["u", "v", "u"])) == [1, 3, 2]


def test_a_frame_without_rows_is_refused_by_a_model_with_times_too():
    with pytest.raises(UserError, match="there is no history to recommend for"):
        recommend(Clock(), LETTERS, pd.DataFrame({"user_id": [], "item_id": [], "timestamp": []}), 1)
