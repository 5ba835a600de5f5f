from __future__ import annotations

from fractions import Fraction
from math import log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recbft.errors import UserError
from recbft.evaluation.metrics import metrics_from_ranks, values_from_ranks

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


def test_mrr_is_not_truncated():
    assert metrics_from_ranks(np.array([12101]))["mrr"] == pytest.approx(Fraction(1, 12101))


def test_a_rank_of_k_counts_and_of_k_plus_one_does_not():
    values = values_from_ranks(np.array([10, 11]), ks=(10,))
    assert values["hr@10"].tolist() == [1, 0]
    assert values["ndcg@10"].tolist() == [1 / log2(11), 0]
    assert values["mrr@10"].tolist() == [1 / 10, 0]


@given(ranks_of_users)
def test_metrics_are_the_means_of_the_values_per_user(ranks):
    values = values_from_ranks(ranks)
    metrics = metrics_from_ranks(ranks)
    assert list(values) == list(metrics)
    for name, value in metrics.items():
        assert value == pytest.approx(sum(map(Fraction, values[name].tolist())) / len(ranks))
        assert 0 <= value <= 1


@given(ranks_of_users)
def test_metrics_grow_with_k_and_order_as_their_definitions_do(ranks):
    metrics = metrics_from_ranks(ranks, ks=(5, 10))
    for name in ("hr", "ndcg", "mrr"):
        assert metrics[f"{name}@5"] <= metrics[f"{name}@10"]
    assert metrics["mrr@10"] <= metrics["ndcg@10"] + 1e-12 and metrics["ndcg@10"] <= metrics["hr@10"] + 1e-12


def test_no_user_is_refused():
    with pytest.raises(UserError, match="no user to evaluate"):
        metrics_from_ranks(np.array([], dtype=np.int64))


@pytest.mark.parametrize("k", [0, -1, 2.5, True])
def test_a_cut_that_is_not_a_positive_whole_number_is_refused(k):
    with pytest.raises(UserError, match=f"cut at k = {k!r}; give whole numbers of at least 1"):
        metrics_from_ranks(np.array([1]), ks=(k,))
