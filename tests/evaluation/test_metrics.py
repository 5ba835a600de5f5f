from __future__ import annotations

from fractions import Fraction
from math import log2

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recbft.errors import UserError
from recbft.evaluation.metrics import (
    check_metric,
    metrics_from_ranks,
    one_from_ranks,
    over_users,
    owner_of,
    values_from_ranks,
)
from recbft.evaluation.ranks import full_ranks
from recbft.models.contract import ItemTable

ranks_of_users = st.lists(st.integers(1, 1000), min_size=1, max_size=50).map(lambda ranks: np.array(ranks))


def test_metrics_of_ranks_one_three_eleven_worked_by_hand():
    metrics = metrics_from_ranks(np.array([1, 3, 11]), ks=(1, 5, 10, 20))
    assert metrics == pytest.approx(
        {
            "hr@1": Fraction(1, 3),
            "hr@5": Fraction(2, 3),
            "hr@10": Fraction(2, 3),
            "hr@20": Fraction(3, 3),
            "ndcg@1": Fraction(1, 3),
            "ndcg@5": (1 + Fraction(1, 2)) / 3,  # log2(3 + 1) = 2
            "ndcg@10": (1 + Fraction(1, 2)) / 3,
            "ndcg@20": (1 + 1 / 2 + 1 / log2(12)) / 3,
            "mrr@1": Fraction(1, 3),
            "mrr@5": (1 + Fraction(1, 3)) / 3,
            "mrr@10": (1 + Fraction(1, 3)) / 3,
            "mrr@20": (1 + Fraction(1, 3) + Fraction(1, 11)) / 3,
            "mrr": (1 + Fraction(1, 3) + Fraction(1, 11)) / 3,
        },
        abs=1e-15,
    )


@st.composite
def rankings(draw):
    """Items 1..V from best to worst, (N, V), and a target for each of the N users."""
    N, V = draw(st.integers(1, 6)), draw(st.integers(2, 40))
    lists = [draw(st.permutations(range(1, V + 1))) for _ in range(N)]
    return np.array(lists), np.array([draw(st.integers(1, V)) for _ in range(N)])


def values_of_rankings(lists, targets, k):
    scores = np.empty(lists.shape)  # without ties
    np.put_along_axis(scores, lists - 1, -np.arange(lists.shape[1], dtype=float)[None], axis=1)
    table = ItemTable(torch.from_numpy(np.insert(scores, 0, 0, axis=1).T.copy()), None)
    states, nothing = torch.eye(len(lists), dtype=torch.float64), np.zeros(len(lists) + 1, dtype=np.int64)
    return values_from_ranks(full_ranks(states, table, targets, nothing[:0], nothing).unfiltered, ks=(k,))


@given(rankings(), st.integers(1, 50))
def test_metrics_are_those_of_the_ranked_lists_gone_through_item_by_item(lists_and_targets, k):
    values = values_of_rankings(*lists_and_targets, k)
    for user, (ranked, target) in enumerate(zip(*lists_and_targets, strict=True)):
        relevant = [int(item == target) for item in ranked]
        gain, ideal = (
            sum(one / log2(place + 2) for place, one in enumerate(order[:k]))
            for order in (relevant, sorted(relevant, reverse=True))
        )
        assert values[f"hr@{k}"][user] == sum(relevant[:k])
        assert values[f"ndcg@{k}"][user] == pytest.approx(gain / ideal, abs=1e-15)
        assert values["mrr"][user] == 1 / (relevant.index(1) + 1)
        assert values[f"mrr@{k}"][user] == next((1 / (i + 1) for i, one in enumerate(relevant[:k]) if one), 0)


@given(ranks_of_users)
def test_metrics_are_the_means_of_the_values_per_user(ranks):
    values = values_from_ranks(ranks)
    metrics = metrics_from_ranks(ranks)
    assert list(values) == list(metrics)
    for name, value in metrics.items():
        assert value == pytest.approx(sum(map(Fraction, values[name].tolist())) / len(ranks))
        assert 0 <= value <= 1


def test_metrics_are_cut_at_5_10_and_20_unless_asked_otherwise():
    cut = [f"{name}@{k}" for name in ("hr", "ndcg", "mrr") for k in (5, 10, 20)]
    assert list(values_from_ranks(np.array([1]))) == [*cut, "mrr"]


@pytest.mark.parametrize("metric", ["hr@1", "ndcg@3", "mrr@7", "mrr"])
def test_a_metric_asked_for_by_name_is_the_one_of_that_name(metric):
    check_metric(metric)
    ranks = np.arange(1, 13).reshape(3, 4)
    expected = values_from_ranks(ranks.ravel(), ks=(1, 3, 7))[metric]
    assert one_from_ranks(ranks, metric).tolist() == expected.reshape(3, 4).tolist()


@pytest.mark.parametrize("name", ["hr", "hr@0", "mrr@", "hr@10.5", "xhr@10", ""])
def test_a_name_that_is_no_metric_s_is_refused(name):
    with pytest.raises(UserError, match="unknown metric"):
        check_metric(name)
    with pytest.raises(UserError, match="unknown metric"):
        one_from_ranks(np.array([1]), name)


def test_no_user_is_refused():
    with pytest.raises(UserError, match="no user to evaluate"):
        metrics_from_ranks(np.array([], dtype=np.int64))


# Three users: ranks 1, 4 and 30; rank 2; ranks 3 and 3, which tie.
SEVERAL, OWNER = np.array([1, 4, 30, 2, 3, 3]), np.array([0, 0, 0, 1, 2, 2])


def test_metrics_of_several_targets_are_means_of_each_users_mean_worked_by_hand():
    found = metrics_from_ranks(SEVERAL, (2, 5), OWNER, of_lists=True)
    third, log = Fraction(1, 3), log2
    assert found["hr@5"] == pytest.approx((2 * third + 1 + 1) / 3)
    assert found["mrr"] == pytest.approx(((1 + 1 / 4 + 1 / 30) / 3 + 1 / 2 + 1 / 3) / 3)
    # min(k, n): two of the first user's three could be among the first 2, and one is.
    assert found["recall@2"] == pytest.approx((1 / 2 + 1 + 0) / 3) and found["recall@5"] == found["hr@5"]
    ideal = {n: sum(1 / log(j + 1) for j in range(1, n + 1)) for n in (2, 3)}
    assert found["list_ndcg@5"] == pytest.approx(
        ((1 + 1 / log(5)) / ideal[3] + 1 / log(3) + (1 / 2 + 1 / 2) / ideal[2]) / 3
    )
    assert found["list_ndcg@2"] == pytest.approx((1 / ideal[2] + 1 / log(3) + 0) / 3)
    for name, value in found.items():
        assert one_from_ranks(SEVERAL, name, OWNER).mean() == pytest.approx(value)
    assert "recall@5" not in metrics_from_ranks(SEVERAL, (5,), OWNER)


def test_of_one_target_each_the_metrics_of_lists_are_hr_and_ndcg():
    ranks, alone = np.array([[1, 3, 11], [2, 9, 1]]), np.arange(3)
    for of_list, of_target in (("recall@10", "hr@10"), ("list_ndcg@10", "ndcg@10")):
        for owner in (None, alone):
            np.testing.assert_array_equal(one_from_ranks(ranks, of_list, owner), one_from_ranks(ranks, of_target))
    assert owner_of(["a", "b", "c"]) is None and over_users(ranks, None) is ranks


@given(ranks_of_users, st.integers(1, 12))
def test_a_perfect_list_has_recall_and_list_ndcg_of_one_and_no_list_has_more(ranks, k):
    owner = np.zeros(len(ranks), np.int64)
    best = np.arange(1, len(ranks) + 1)
    some = np.unique(ranks)
    for name in (f"recall@{k}", f"list_ndcg@{k}"):
        assert one_from_ranks(best, name, owner)[0] == pytest.approx(1)
        assert one_from_ranks(some, name, owner[: len(some)])[0] <= 1 + 1e-12


def test_users_are_grouped_by_their_ids_side_by_side():
    assert owner_of(np.array(["a", "a", "b", "c", "c"], object)).tolist() == [0, 0, 1, 2, 2]
    assert over_users(np.array([[1.0, 3, 5, 7, 8]]), owner_of([4, 4, 9, 2, 2])).tolist() == [[2, 5, 7.5]]
