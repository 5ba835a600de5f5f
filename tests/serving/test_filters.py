"""Per-user candidates and exclusions, whose keys are users and never items."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest

from recbft.errors import UserError
from tests.serving.test_lists import LETTERS, NUMBERS, Echo, lists, recommend

HISTORIES = {"ann": ["a"], "bob": ["f"], "cem": ["c"]}


def test_each_user_may_have_items_of_their_own_to_choose_from_or_to_leave_out():
    own = {"ann": ["f", "b", "unheard"], "bob": np.array(["e"]), "cem": pd.Series(["c", "d"])}
    assert lists(recommend(Echo(), LETTERS, HISTORIES, 3, candidates=own)) == {
        "ann": ["f", "b"], "bob": ["e"], "cem": ["d"],
    }  # fmt: skip
    assert lists(recommend(Echo(), LETTERS, HISTORIES, 2, exclude={"ann": ["f", "e"], "dee": ["d"]})) == {
        "ann": ["d", "c"], "bob": ["e", "d"], "cem": ["f", "e"],
    }  # fmt: skip
    both = {"candidates": own, "exclude": {"ann": {"f"}}}
    assert lists(recommend(Echo(), LETTERS, HISTORIES, 3, **both))["ann"] == ["b"]
    mixed = {"candidates": ["b", "d", "e"], "exclude": {"bob": ["e"]}}
    assert lists(recommend(Echo(), LETTERS, HISTORIES, 2, **mixed)) == {
        "ann": ["e", "d"], "bob": ["d", "b"], "cem": ["e", "d"],
    }  # fmt: skip
    assert lists(recommend(Echo(), LETTERS, [["a"], ["f"]], 1, candidates={1: ["b"], 0: ["c"]})) == {0: ["c"], 1: ["b"]}


@pytest.mark.parametrize("at_once", [1, 2, 4096])
def test_a_user_without_an_entry_has_no_candidates_whatever_the_blocks(at_once, monkeypatch):
    monkeypatch.setattr("recbft.serving.lists.HISTORIES_AT_ONCE", at_once)
    table = recommend(Echo(), LETTERS, HISTORIES, 1, candidates={"cem": ["b"], "ann": ["d"]})
    assert lists(table) == {"ann": ["d"], "cem": ["b"]}
    assert table.attrs["short_lists"] == 1 and table.attrs["shortest_list"] == 0


def test_users_whose_ids_are_items_too_are_users():
    histories = {10: [60], 20: [60]}
    assert lists(recommend(Echo(), NUMBERS, histories, 2, exclude={10: [50, 40]})) == {10: [30, 20], 20: [50, 40]}
    assert lists(recommend(Echo(), NUMBERS, histories, 2, candidates={"10": [20], 20: ["30"]})) == {10: [20], 20: [30]}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"candidates": {"dee": ["a"]}},
            "candidates names 1 users, such as 'dee', and none of the 3 users of the hist",
        ),
        ({"candidates": {}}, "candidates names 0 users, and none of the 3 users of the histories, such as 'ann'"),
        ({"candidates": {"ann": ["x", "y"]}}, r"none of the 2 candidates is in the model's vocabulary \(such as 'x'\)"),
        ({"candidates": {"ann": "ab"}}, "candidates of user 'ann' is 'ab' .*; give a list of item ids"),
        ({"exclude": {"a": 0.5}}, "exclude of user 'a' is 0.5 .*; give a list of item ids"),
        ({"exclude": {1: ["a"], "1": ["b"]}}, "exclude names user '1' twice, as number and as text"),
    ],
)
def test_a_mapping_of_no_user_or_no_list_is_refused(how, message):
    with pytest.raises(UserError, match=message):
        recommend(Echo(), LETTERS, HISTORIES, 1, **how)


def test_exclusions_without_effect_are_warned_of():
    with pytest.warns(
        UserWarning, match="exclude names 1 users, and none of the 3 users of the histories; give"
    ) as told:
        recommend(Echo(), LETTERS, HISTORIES, 1, exclude={"f": ["a"]})
    with pytest.warns(UserWarning, match="none of the 1 excluded items is in the model's vocabulary") as more:
        recommend(Echo(), LETTERS, HISTORIES, 1, exclude={"ann": ["x"]})
    assert len(told) == len(more) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recommend(Echo(), LETTERS, HISTORIES, 1, exclude={"ann": []})
        recommend(Echo(), LETTERS, HISTORIES, 1, exclude={})
        recommend(Echo(), LETTERS, HISTORIES, 1, exclude={"ann": ["b"], "dee": ["x"]})
