"""AUROC, risk and coverage on tables worked by hand, against scikit-learn, and where there is nothing to rank."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu
from sklearn.metrics import roc_auc_score

from recbft.evaluation.confidence import (
    Ranking,
    bootstrap,
    calibration,
    compare_confidences,
    interval,
    resamples,
    verdict,
)

users = st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=30)


def columns(drawn):
    return np.array([float(c) for c, _ in drawn]), np.array([h for _, h in drawn])


def by_hand(confidence, hit):
    """AURC in fractions, averaged over every order that users of equal confidence can stand in."""
    total, orders = Fraction(0), 0
    for order in permutations(range(len(hit))):
        if all(confidence[a] >= confidence[b] for a, b in pairwise(order)):
            missed, area = 0, Fraction(0)
            for i, user in enumerate(order, start=1):
                missed += not hit[user]
                area += Fraction(missed, i)
            total, orders = total + area / len(hit), orders + 1
    return total / orders


def test_users_of_equal_confidence_share_their_risk_along_the_curve():
    assert Ranking([1, 1, 1, 1], [True, False, False, False]).curve()["risk"] == pytest.approx([3 / 4] * 4)
    # two at random of a hit and a miss, then a hit
    curve = Ranking([2, 2, 1], [True, False, True]).curve()
    assert curve == {"coverage": pytest.approx([1 / 3, 2 / 3, 1]), "risk": pytest.approx([1 / 2, 1 / 2, 1 / 3])}


@pytest.mark.parametrize("seed", range(3))
def test_ties_count_as_the_mean_over_all_their_orders(seed):
    rng = np.random.default_rng(seed)
    confidence, hit = rng.integers(0, 3, 6).astype(float), rng.random(6) < 0.5
    assert Ranking(confidence, hit).risk_area == pytest.approx(float(by_hand(confidence, hit)), rel=1e-12)


@given(users)
def test_the_auroc_is_that_of_scikit_learn(drawn):
    confidence, hit = columns(drawn)
    area = Ranking(confidence, hit).area
    if hit.all() or not hit.any():
        assert np.isnan(area)
    else:
        assert area == pytest.approx(roc_auc_score(hit, confidence), abs=1e-12)


@given(users, st.integers(0, 5))
def test_counting_a_user_twice_is_having_the_user_twice(drawn, seed):
    confidence, hit = columns(drawn)
    weights = np.random.default_rng(seed).integers(0, 4, (1, len(hit)))
    weights[0, 0] += 1
    area, risk = Ranking(confidence, hit).areas(weights)
    again = Ranking(np.repeat(confidence, weights[0]), np.repeat(hit, weights[0]))
    np.testing.assert_allclose([area[0], risk[0]], [again.area, again.risk_area], rtol=1e-12)


@given(users)
def test_no_order_beats_hits_first_and_saying_nothing_costs_the_share_of_misses(drawn):
    confidence, hit = columns(drawn)
    best, nothing = Ranking(hit, hit).risk_area, Ranking(np.zeros(len(hit)), hit)
    assert Ranking(confidence, hit).risk_area >= best - 1e-12
    assert nothing.risk_area == pytest.approx(1 - hit.mean()) and nothing.num_distinct == 1


@pytest.mark.parametrize("hits", [[True] * 4, [False] * 4, [True], [False]])
def test_all_right_and_all_wrong_have_no_auroc_and_say_so(hits):
    hit = np.array(hits)
    (found,) = compare_confidences({"c": np.arange(len(hit)) * 1.0}, hit, samples=20).values()
    assert found["auroc"] is None and found["auroc_interval"] is None
    assert found["verdict"] == "all lists hit or all miss, so there is nothing to tell apart"
    assert found["aurc"] == 1 - hit.mean()
    assert found["aurc_interval"] == (None if len(hits) == 1 else [found["aurc"], found["aurc"]])
    assert found["excess_aurc"] == 0


def test_a_constant_confidence_has_auroc_one_half_and_says_so():
    found = compare_confidences({"c": np.full(9, 3.0)}, np.arange(9) < 4, samples=50)["c"]
    assert found["auroc"] == 0.5 and set(found["auroc_interval"]) == {0.5}
    assert found["verdict"] == "the same for every user, so it tells nothing: AUROC 0.5"


def test_verdicts_follow_the_interval():
    assert verdict(0.6, [0.55, 0.65], 9, 0.01) == "higher where the list holds the target"
    assert verdict(0.4, [0.35, 0.45], 9, 0.01) == "lower where the list holds the target"
    for holding in ([0.45, 0.65], [0.5, 0.65], [0.45, 0.5]):
        assert verdict(0.6, holding, 9, 0.01) == "not shown to tell hits from misses: the interval holds 0.5"
    assert "a rank test has p >= 0.05" in verdict(0.6, [0.55, 0.65], 9, 0.05)
    assert verdict(0.6, [0.55, 0.65], 9, 0.0499) == "higher where the list holds the target"


@given(users)
def test_the_rank_test_is_that_of_scipy(drawn):
    confidence, hit = columns(drawn)
    if hit.all() or not hit.any() or np.ptp(confidence) == 0:
        assert Ranking(confidence, hit).p == 1
    else:
        found = mannwhitneyu(confidence[hit], confidence[~hit], method="asymptotic", use_continuity=False)
        assert Ranking(confidence, hit).p == pytest.approx(found.pvalue, abs=1e-12)


@pytest.mark.parametrize("seed", range(2))
def test_a_few_misses_below_the_cap_prove_nothing(seed):
    # by chance alone 13 users are all misses in half of all cases (0.95^13)
    precision, hit = np.full(1400, 100.0), np.arange(1400) % 20 == 0
    precision[np.flatnonzero(~hit)[:13]] -= np.random.default_rng(seed).random(13)
    found = compare_confidences({"precision": precision}, hit, samples=200, seed=seed)["precision"]
    assert found["auroc_interval"][0] > 0.5
    assert found["verdict"] == (
        "not shown to tell hits from misses: the interval leaves out 0.5, but a rank test has p >= 0.05"
    )


def test_the_reference_is_compared_on_the_same_resamples():
    rng = np.random.default_rng(0)
    hit = rng.random(400) < 0.3
    good, bad = hit + rng.normal(size=400), rng.normal(size=400)
    found = compare_confidences({"good": good, "same": good * 2, "bad": bad}, hit, reference="good", samples=200)
    none = [0.0, 0.0]
    assert found["same"]["reference_above"] == {"auroc": 0.0, "interval": none, "aurc": 0.0, "aurc_interval": none}
    above = found["bad"]["reference_above"]
    assert above["auroc"] == found["good"]["auroc"] - found["bad"]["auroc"]
    assert 0 < above["interval"][0] < above["auroc"] < above["interval"][1]
    assert above["aurc"] == found["good"]["aurc"] - found["bad"]["aurc"]
    assert above["aurc_interval"][0] < above["aurc"] < above["aurc_interval"][1] < 0, "less risk"
    assert "reference_above" not in found["good"]


def test_resamples_draw_as_many_users_as_there_are_and_depend_on_the_seed_alone(monkeypatch):
    one = np.concatenate(list(resamples(7, 10, seed=3)))
    assert one.shape == (10, 7) and (one.sum(axis=1) == 7).all()
    assert not np.array_equal(one, np.concatenate(list(resamples(7, 10, seed=4))))
    for cells in (1, 30, 70):  # fewer than one resample has, four of them, all ten
        monkeypatch.setattr("recbft.evaluation.confidence.CELLS", cells)
        assert np.array_equal(one, np.concatenate(list(resamples(7, 10, seed=3))))
    means = bootstrap(lambda weights: weights @ np.arange(7) / 7, 7, samples=500, seed=0)
    assert means.mean() == pytest.approx(3, abs=0.15) and interval(means, 7)[0] < 3 < interval(means, 7)[1]


def test_an_interval_leaves_out_a_fortieth_at_either_end_and_resamples_without_a_value():
    values = np.random.default_rng(0).permutation(np.arange(1001.0))
    assert interval(values, 2) == interval(np.append(values, [np.nan] * 500), 2) == [25, 975]
    assert interval(np.full(3, np.nan), 2) is None
    assert interval(np.ones(3), 2) == [1, 1] and interval(np.ones(3), 1) is None, "of one user there is none"


def test_the_curve_of_many_users_has_a_hundred_points_and_ends_at_the_whole():
    rng = np.random.default_rng(0)
    hit = rng.random(1234) < 0.2
    curve = Ranking(rng.random(1234), hit).curve()
    assert len(curve["coverage"]) == 100 and curve["coverage"][-1] == 1
    assert curve["risk"][-1] == pytest.approx(1 - hit.mean())


def test_calibration_worked_by_hand():
    # two bins of two users: claimed 1/8 and happened 1/2; claimed 3/4 and happened 1/2
    found = calibration(np.array([0.1, 0.15, 0.7, 0.8]), np.array([0, 1, 1, 0], bool), bins=2, samples=50)
    assert found["ece"] == pytest.approx((3 / 8 + 1 / 4) / 2)
    assert found["bins"] == [
        {"probability": pytest.approx(1 / 8), "hit_rate": 0.5, "num_users": 2},
        {"probability": pytest.approx(3 / 4), "hit_rate": 0.5, "num_users": 2},
    ]
    assert (found["mean_probability"], found["hit_rate"]) == (pytest.approx(7 / 16), 0.5)
    spreads = (0.1 * 0.9 + 0.15 * 0.85, 0.7 * 0.3 + 0.8 * 0.2)
    assert found["floor"] == pytest.approx(sum(np.sqrt(2 / np.pi * s) for s in spreads) / 4)


@pytest.mark.parametrize("bins", [2, 14, 38])
def test_bins_are_equal_where_the_number_of_users_allows_it(bins):
    for each in (1, 3, 7):
        claims = np.linspace(0.1, 0.9, each * bins)
        found = calibration(claims, claims > 0.5, bins=bins, samples=1)
        assert [one["num_users"] for one in found["bins"]] == [each] * bins


def test_equal_probabilities_share_one_bin_and_one_user_is_enough():
    found = calibration(np.full(7, 0.25), np.arange(7) < 2, samples=10)
    assert len(found["bins"]) == 1 and found["ece"] == pytest.approx(2 / 7 - 1 / 4)
    alone = calibration(np.array([0.25]), np.array([True]), samples=10)
    assert alone["ece"] == 0.75 and alone["interval"] is None  # one user, of whom all resamples are alike


def test_true_claims_show_about_the_floor_and_false_ones_more():
    rng = np.random.default_rng(0)
    claims = rng.beta(1, 6, 3000)
    true = np.mean([calibration(claims, rng.random(3000) < claims, samples=1)["ece"] for _ in range(200)])
    floor = calibration(claims, rng.random(3000) < claims, samples=1)["floor"]
    assert true == pytest.approx(floor, rel=0.05)
    assert calibration(claims, rng.random(3000) < claims**2, samples=1)["ece"] > 5 * floor


def test_the_interval_is_of_the_same_bins_over_resampled_users():
    rng = np.random.default_rng(0)
    claims = rng.random(500)
    found = calibration(claims, rng.random(500) < claims**2, samples=300)
    assert [one["num_users"] for one in found["bins"]] == [50] * 10
    assert found["interval"][0] < found["ece"] < found["interval"][1]
    assert calibration(claims, rng.random(500) < 2, samples=5)["hit_rate"] == 1
