"""Strata on tables small enough to work by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from recbft.errors import UserError
from recbft.evaluation.strata import confound, first_time_items, grid, item_frequency, recency, user_activity

DAY = 86400


def test_item_strata_take_their_edges_from_items_not_from_users():
    # ten items with counts 1..10 in five strata of two items; users ask for popular ones only
    found = item_frequency([9, 10, 10, 3], np.arange(1, 11))
    assert found.names == ("Q1", "Q4") and found.bounds == ("3-4", "9-10")
    assert found.member.tolist() == [1, 1, 1, 0]


def test_item_strata_can_hold_equal_numbers_of_targets_or_of_their_counts_or_have_given_edges():
    counts, items = [1, 1, 1, 2, 2, 3, 4, 9], np.arange(1, 11)
    assert item_frequency(counts, items, quantiles=2, equal="targets").bounds == ("1-2", "3-9")
    # the counts that occur are 1, 2, 3, 4 and 9, and the least three of them are half of them or more
    assert item_frequency(counts, items, quantiles=2, equal="counts").bounds == ("1-3", "4-9")
    found = item_frequency([0, *counts], items, edges=[1, 3])
    assert found.names == ("new", "Q0", "Q1", "Q2") and found.bounds == ("0", "1", "2-3", "4-10")
    assert found.member.tolist() == [0, 1, 1, 1, 2, 2, 2, 3, 3]


@pytest.mark.parametrize("edges", [[], [3, 1], [2, 2], [-1, 4]])
def test_edges_that_do_not_rise_are_refused(edges):
    with pytest.raises(UserError, match="give rising training counts"):
        item_frequency([1, 2], [1, 2], edges=edges)
    with pytest.raises(UserError, match="equal targets has no effect with edges"):
        item_frequency([1, 2], [1, 2], edges=[1], equal="targets")


def test_bounds_reach_to_the_ends_of_items_and_users_alike():
    assert item_frequency([2, 9], np.arange(1, 11)).bounds == ("1-2", "9-10")
    assert item_frequency([1, 20], np.arange(2, 11)).bounds == ("1-3", "10-20")


def test_what_has_no_training_event_is_a_stratum_of_its_own_before_the_rarest():
    found = item_frequency([0, 3, 0, 9], [0, 0, 0, 0, *range(1, 11)])
    assert found.names == ("new", "Q1", "Q4") and found.bounds == ("0", "3-4", "9-10")
    assert found.member.tolist() == [0, 1, 0, 2] and found.empty == ("Q0", "Q2", "Q3")
    assert item_frequency([3, 9], [0, 0, 0, 0, *range(1, 11)]).names == ("Q1", "Q4"), "edges know no item of none"
    assert user_activity([0, 0]).names == ("new",) and user_activity([0, 5, 7], quantiles=2).names == (
        "new",
        "Q0",
        "Q1",
    )
    assert recency([0, 0, 5], ticks_per_second=1).names == ("Q0", "Q3"), "a gap of 0 is no absence"


def test_a_user_of_several_targets_counts_once_in_the_edges_of_activity():
    owner = np.array([0, 0, 0, 0, 1, 2, 3])
    found = user_activity([2, 2, 2, 2, 5, 6, 7], owner=owner, quantiles=2)
    assert found.bounds == ("2-5", "6-7") and found.member.tolist() == [0, 0, 0, 0, 0, 1, 1]


def test_ties_stay_together_and_empty_strata_are_left_out():
    found = item_frequency([5, 5, 5, 8], [5, 5, 5, 5, 5, 5, 5, 8, 8, 9])
    assert found.names == ("Q0", "Q3") and found.bounds == ("5", "6-8") and found.empty == ("Q1", "Q2", "Q4")
    assert found.member.tolist() == [0, 0, 0, 1]


def test_users_are_cut_into_equal_numbers():
    found = user_activity([4, 5, 6, 7, 8, 9, 10, 11, 12, 40])
    assert np.bincount(found.member).tolist() == [2, 2, 2, 2, 2]
    assert found.bounds == ("4-5", "6-7", "8-9", "10-11", "12-40")
    assert user_activity(range(1, 8), quantiles=2).bounds == ("1-4", "5-7"), "half of them at or below the edge"


@pytest.mark.parametrize("quantiles", [2, 5, 7, 14, 40])
def test_strata_are_equal_where_the_number_of_users_allows_it(quantiles):
    for each in (1, 2, 3, 7):
        found = user_activity(1 + np.arange(each * quantiles), quantiles=quantiles)
        assert np.bincount(found.member).tolist() == [each] * quantiles


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(2, 7))
def test_every_user_has_one_stratum_and_strata_follow_the_values(lengths, quantiles):
    for found in (
        user_activity(lengths, quantiles=quantiles),
        recency(lengths, ticks_per_second=1, quantiles=quantiles),
    ):
        assert set(found.member) == set(range(len(found.names))) and len(found.bounds) == len(found.names)
        order = np.argsort(lengths, kind="stable")
        assert (np.diff(found.member[order]) >= 0).all()
        for value in set(lengths):
            assert len(set(found.member[np.array(lengths) == value])) == 1


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(2, 7))
def test_bounds_hold_every_value_of_their_stratum(lengths, quantiles):
    found = user_activity(lengths, quantiles=quantiles)
    for stratum, bounds in enumerate(found.bounds):
        ends = [int(end) for end in bounds.split("-")]
        inside = np.array(lengths)[found.users(stratum)]
        assert ends[0] <= inside.min() and inside.max() <= ends[-1]


def test_targets_never_seen_in_training_form_their_own_stratum():
    found = first_time_items([0, 3, 0])
    assert found.names == ("target never in training", "target in training") and found.bounds == ("0", "1-3")
    assert found.member.tolist() == [0, 1, 0]
    once = first_time_items([1, 0, 1])
    assert once.member.tolist() == [1, 0, 1] and once.bounds == ("0", "1"), "one training event is no first time"
    assert first_time_items([2, 3]).names == ("target in training",)


def test_recency_says_its_bounds_in_a_unit_one_can_read():
    gaps = [0, 0, 3600, 2 * DAY, 30 * DAY, 400 * DAY]
    found = recency(gaps, ticks_per_second=1, quantiles=3)
    assert found.bounds == ("0", "1 h-2 d", "30 d-400 d") and found.member.tolist() == [0, 0, 1, 1, 2, 2]
    assert recency([1, 90, 1600 * DAY], ticks_per_second=1, quantiles=3).bounds == ("1 s", "1.5 min", "1600 d")
    milliseconds = [1000 * gap for gap in gaps]
    assert recency(milliseconds, ticks_per_second=1000, quantiles=3).bounds == found.bounds
    assert recency([0, 20, 1500], ticks_per_second=1000, quantiles=3).bounds == ("0", "20 ms", "1.5 s")
    assert recency([2, 20, 1500], ticks_per_second=10**9, quantiles=3).bounds == ("2 ns", "20 ns", "1.5 us")
    assert recency([0, 0, 1, 7], ticks_per_second=None, quantiles=2).bounds == ("0", "1-7")


def test_a_grid_holds_the_pairs_that_occur():
    found = grid(first_time_items([0, 3, 0]), user_activity([4, 5, 9], quantiles=3))
    never, there = "target never in training", "target in training"
    assert found.names == (f"{never} x Q0", f"{never} x Q2", f"{there} x Q1")
    assert found.bounds == ("0 x 4", "0 x 6-9", "1-3 x 5") and found.member.tolist() == [0, 2, 1]


def test_a_partition_says_what_it_is_by_and_what_its_bounds_count():
    items, users = item_frequency([1, 2], [1, 2]), user_activity([1, 2])
    assert (items.axis, items.unit) == ("item frequency", "training events of the target")
    assert (users.axis, users.unit) == ("user activity", "training events of the user")
    first, gaps = first_time_items([0, 1]), recency([1, 2], ticks_per_second=1)
    assert (first.axis, first.unit) == ("first-time items", "training events of the target")
    assert (gaps.axis, gaps.unit) == ("recency of the target", "time since the event before")
    pairs = grid(items, users)
    assert (pairs.axis, pairs.unit) == (f"{items.axis} x {users.axis}", f"{items.unit} x {users.unit}")


def test_too_few_quantiles_and_no_users_are_refused():
    with pytest.raises(UserError, match="quantiles is 1; give 2 or more"):
        user_activity([1, 2], quantiles=1)
    with pytest.raises(UserError, match="no user to stratify"):
        user_activity([])
    with pytest.raises(UserError, match="no user to stratify"):
        item_frequency([1, 2], [])


def test_the_confound_is_a_pearson_correlation():
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 50, 100)
    counts = lengths + rng.integers(0, 30, 100)
    found = confound(lengths, counts)
    assert found.r == pytest.approx(np.corrcoef(lengths, counts)[0, 1]) and found.p < 0.001
    assert found.p == pytest.approx(stats.pearsonr(lengths, counts).pvalue)
    assert confound([1, 2, 4], [3, 7, 5]).r == pytest.approx(np.corrcoef([1, 2, 4], [3, 7, 5])[0, 1])


@pytest.mark.parametrize("pair", [([1, 2, 3], [3, 3, 3]), ([3, 3, 3], [1, 2, 3]), ([1, 2], [3, 4]), ([], [])])
def test_what_does_not_vary_or_is_too_little_has_no_confound(pair):
    assert confound(*pair) == (0.0, 1.0)
