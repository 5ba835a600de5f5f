"""``Recommender.explain`` and ``Recommender.probe``: raw ids in and out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest

from recbft.errors import UserError


@pytest.fixture(scope="module")
def history(dataset):
    return dataset.item_ids[[4, 9, 2, 30, 11]].tolist()


def test_the_best_items_are_explained_as_they_are_recommended(fitted, history):
    table, lists = fitted.explain(history), fitted.recommend([history], 3)
    assert table["item"].unique().tolist() == lists["item"].tolist() and len(table) == 15
    assert table.groupby("item", sort=False)["score"].first().tolist() == pytest.approx(
        lists["score"].tolist(), rel=1e-5
    )
    assert table.attrs["precision"] == pytest.approx(lists["precision"].iloc[0], rel=1e-5)
    for _, rows in table.groupby("item"):
        assert (rows["weight"].diff().dropna() <= 0).all() and rows["weight"].sum() == pytest.approx(1, rel=1e-5)
        assert sorted(rows["position"]) == [1, 2, 3, 4, 5]
        assert [history[place - 1] for place in rows["position"]] == rows["event"].tolist()
    assert fitted.explain(history, k=1)["item"].nunique() == 1


def test_the_change_is_what_recommending_without_the_event_shows(fitted, dataset, history):
    item = lists_all(fitted, dataset, history)["item"].iloc[7]
    table = fitted.explain(history, item)
    whole = lists_all(fitted, dataset, history).set_index("item")["score"][item]
    for row in table.itertuples():
        rest = [event for place, event in enumerate(history, start=1) if place != row.position]
        without = lists_all(fitted, dataset, rest).set_index("item")["score"][item]
        assert row.change == pytest.approx(whole - without, abs=1e-4)


def lists_all(fitted, dataset, history):
    return fitted.recommend([history], dataset.num_items, filter_seen=False)


def test_threads_that_explain_and_recommend_at_once_see_nothing_of_each_other(fitted, dataset):
    histories = [dataset.item_ids[first : first + 4].tolist() for first in range(12)]
    recommended, explained = ([ask(one) for one in histories] for ask in (recommend_one(fitted), fitted.explain))
    with ThreadPoolExecutor(4) as threads:
        pending = [
            (threads.submit(fitted.explain, one), threads.submit(recommend_one(fitted), one))
            for _ in range(2)
            for one in histories
        ]
        for number, (why, lists) in enumerate(pending):
            pd.testing.assert_frame_equal(why.result(), explained[number % len(histories)])
            pd.testing.assert_frame_equal(lists.result(), recommended[number % len(histories)])


def recommend_one(fitted):
    return lambda history: fitted.recommend([history])


def test_unknown_events_are_skipped_and_places_stay_those_of_the_history(fitted, history):
    table = fitted.explain(["?", history[0], "no such", *history[1:]], history[3])
    assert table.attrs["unknown_events"] == 2 and sorted(table["position"]) == [2, 4, 5, 6, 7]
    plain = fitted.explain(history, history[3])
    assert table["change"].tolist() == plain["change"].tolist() and table["event"].tolist() == plain["event"].tolist()


def test_a_data_frame_of_one_user_is_a_history(fitted, history):
    frame = pd.DataFrame({"user_id": "ann", "item_id": history})
    pd.testing.assert_frame_equal(fitted.explain(frame), fitted.explain(history))
    with pytest.raises(UserError, match="holds 5 users; give the events of one"):
        fitted.explain(frame.assign(user_id=range(5)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"item": "tea"}, "item 'tea' is not in the model's vocabulary"),
        ({"item": 1, "k": 2}, "k is 2, which has no effect where an item is named"),
        ({"k": 0}, "k is 0"),
        ({"k": 56}, "k is 56, but only 54 of 59 items are not in the history; name an item to explain, or lower k"),
        ({"history": {"ann": [1]}}, r"the history is .* \(dict\); give a list of item ids"),
        ({"history": ["?"]}, "none of the 1 items"),
    ],
)
def test_what_cannot_be_explained_is_refused(fitted, history, arguments, message):
    with pytest.raises(UserError, match=message):
        fitted.explain(**{"history": history, **arguments})


def test_a_history_of_almost_every_item_has_what_is_left_explained(fitted, dataset):
    known = dataset.item_ids.tolist()
    assert fitted.explain(known[2:])["item"].nunique() == 2
    with pytest.raises(UserError, match=r"^only 0 of 59 items are not in the history; name an item to explain$"):
        fitted.explain(known)


def test_probing_in_a_notebook_gives_both_parts_and_the_protocol(fitted, dataset):
    found = fitted.probe(dataset, samples=10)
    assert set(found) == {"mechanism", "uncertainty", "new_items", "protocol"}
    assert found["uncertainty"]["hit_rate"] == fitted.evaluate(dataset).metrics["unfiltered"]["hr@10"]
    assert found["mechanism"]["user_reliability"] is None, "the truth of other synthetic data is not this data's"
    some = fitted.probe(dataset, "validation", users=20, samples=10)
    assert some["mechanism"]["num_users"] == some["uncertainty"]["num_users"] == 20
    assert some["protocol"]["part"] == "validation"
    assert some == fitted.probe(dataset, "validation", users=20, samples=10)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"users": 0}, "users is 0; give 1 to 50, or leave it out"),
        ({"users": 51}, "users is 51; give 1 to 50, or leave it out"),
        ({"samples": 0}, "samples is 0; give a whole number of at least 1"),
        ({"samples": True}, "samples is True; give a whole number of at least 1"),
    ],
)
def test_a_probe_of_users_or_samples_that_there_are_not_is_refused(fitted, dataset, asked, said):
    with pytest.raises(UserError, match=said):
        fitted.probe(dataset, **asked)
