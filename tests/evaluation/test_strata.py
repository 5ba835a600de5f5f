"""Strata on tables small enough to work by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recbft.errors import UserError
from recbft.evaluation.strata import compare_strata, confound, first_time_items, grid, item_frequency, user_activity


def table(counts, lengths=None, ranks=None):
    n = len(counts)
    ranks = np.ones(n, np.int64) if ranks is None else np.asarray(ranks)
    return pd.DataFrame(
        {
            "user": np.arange(n), "history_length": lengths if lengths is not None else [5] * n,
            "target": np.arange(n), "target_count": counts, "rank_unfiltered": ranks, "rank_filtered": ranks,
        }
    )  # fmt: skip


def test_item_strata_take_their_edges_from_items_not_from_users():
    # ten items with counts 1..10 in five strata of two items; users ask for popular ones only
    found = item_frequency(table([9, 10, 10, 3]), np.arange(1, 11))
    assert found.names == ("Q1 item frequency 3-4", "Q4 item frequency 9-10")
    assert found.member.tolist() == [1, 1, 1, 0]


def test_ties_stay_together_and_empty_strata_are_left_out():
    found = item_frequency(table([5, 5, 5, 8]), [5, 5, 5, 5, 5, 5, 5, 8, 8, 9])
    assert found.names == ("Q0 item frequency 5", "Q3 item frequency 6-8")
    assert found.member.tolist() == [0, 0, 0, 1]


def test_users_are_cut_into_equal_numbers():
    found = user_activity(table([1] * 10, lengths=[4, 5, 6, 7, 8, 9, 10, 11, 12, 40]))
    assert np.bincount(found.member).tolist() == [2, 2, 2, 2, 2]
    assert found.names[0] == "Q0 history length 4-5" and found.names[4] == "Q4 history length 12-40"


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(2, 7))
def test_every_user_has_one_stratum_and_strata_follow_the_values(lengths, quantiles):
    found = user_activity(table([1] * len(lengths), lengths=lengths), quantiles=quantiles)
    assert set(found.member) == set(range(len(found.names)))
    order = np.argsort(lengths, kind="stable")
    assert (np.diff(found.member[order]) >= 0).all()
    for value in set(lengths):
        assert len(set(found.member[np.array(lengths) == value])) == 1


def test_targets_never_seen_in_training_form_their_own_stratum():
    found = first_time_items(table([0, 3, 0]))
    assert found.names == ("target never in training", "target in training")
    assert found.member.tolist() == [0, 1, 0]


def test_a_grid_holds_the_pairs_that_occur():
    found = grid(first_time_items(table([0, 3, 0])), user_activity(table([1] * 3, lengths=[4, 4, 9]), quantiles=2))
    assert found.names == (
        "target never in training, Q0 history length 4", "target never in training, Q1 history length 5-9",
        "target in training, Q0 history length 4",
    )  # fmt: skip
    assert found.member.tolist() == [0, 2, 1]


def test_arms_are_compared_within_each_stratum():
    counts = [1, 1, 9, 9]
    strata = item_frequency(table(counts), [1, 9], quantiles=2)
    baseline = {seed: table(counts, ranks=[1, 20, 3, 20]) for seed in (0, 1)}
    other = {seed: table(counts, ranks=[1, 1, 3, 20]) for seed in (0, 1, 7)}
    rare, popular = compare_strata(strata, baseline, other, metric="hr@10")
    assert (rare.num_users, rare.mean_target_count) == (2, 1.0)
    assert (rare.comparison.mean_baseline, rare.comparison.mean_other) == (0.5, 1.0)
    assert popular.comparison.difference == 0 and popular.comparison.p_t == 1


def test_other_users_unknown_metrics_and_missing_seeds_are_refused():
    strata, one = user_activity(table([1, 2])), {0: table([1, 2]), 1: table([1, 2])}
    with pytest.raises(UserError, match="a run has 3 users and the strata 2"):
        compare_strata(strata, {0: table([1, 2, 3]), 1: table([1, 2, 3])}, one)
    shuffled = table([1, 2]).iloc[::-1]
    with pytest.raises(UserError, match="two runs list different values of 'user'"):
        compare_strata(strata, one, {0: shuffled, 1: shuffled})
    with pytest.raises(UserError, match="unknown metric 'auc@10'"):
        compare_strata(strata, one, one, metric="auc@10")
    with pytest.raises(UserError, match="share no seed"):
        compare_strata(strata, {0: table([1, 2])}, {1: table([1, 2])})
    with pytest.raises(UserError, match="quantiles is 1; give 2 or more"):
        user_activity(table([1, 2]), quantiles=1)


def test_the_confound_is_a_pearson_correlation():
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 50, 100)
    counts = lengths + rng.integers(0, 30, 100)
    found = confound(table(counts, lengths=lengths))
    assert found.r == pytest.approx(np.corrcoef(lengths, counts)[0, 1]) and found.p < 0.001
    assert confound(table([3, 3, 3], lengths=[1, 2, 3])) == (0.0, 1.0)
