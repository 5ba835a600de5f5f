"""Paired comparisons against scipy and full enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from recbft.errors import UserError
from recbft.evaluation.paired import bootstrap_interval, compare_seeds, compare_users, fisher, holm, sign_flip_p


@pytest.mark.parametrize(("n", "seed"), [(2, 0), (5, 1), (30, 2)])
def test_the_t_test_and_its_interval_are_scipys(n, seed):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(0.1, 0.01, n), rng.normal(0.102, 0.01, n)
    found, expected = compare_seeds(a, b), stats.ttest_rel(b, a)
    assert found.p_t == pytest.approx(expected.pvalue)
    low, high = expected.confidence_interval(0.95)
    assert found.interval == pytest.approx((low, high))
    assert found.difference == pytest.approx((b - a).mean())
    assert found.relative == pytest.approx((b - a).mean() / a.mean())
    assert found.wins == sum(b > a)
    assert found.cohen_d == pytest.approx((b - a).mean() / (b - a).std(ddof=1))
    assert found.num_seeds == n
    assert (found.mean_baseline, found.mean_other) == pytest.approx((a.mean(), b.mean()))
    assert (found.sd_baseline, found.sd_other) == pytest.approx((stats.tstd(a), stats.tstd(b)))


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=9))
def test_sign_flip_equals_full_enumeration(values):
    observed = abs(sum(values))
    patterns = list(itertools.product([-1, 1], repeat=len(values)))
    hits = sum(abs(sum(s * v for s, v in zip(signs, values, strict=True))) >= observed for signs in patterns)
    assert sign_flip_p(values) == hits / len(patterns)


def test_differences_that_cancel_but_for_rounding_are_no_difference():
    assert sign_flip_p([0.1, 0.2, 0.4, -0.7]) == 1.0


def test_the_rounding_of_means_is_neither_a_win_nor_a_difference():
    values = np.random.default_rng(0).random((10, 999))
    baseline, other = values.mean(axis=1), np.array([row[::-1].cumsum()[-1] / row.size for row in values])
    assert (baseline != other).any()
    found = compare_seeds(baseline, other)
    assert (found.wins, found.difference, found.p_t, found.p_sign_flip) == (0, 0.0, 1.0, 1.0)
    assert compare_users(baseline, other).p_sign_flip == 1.0


@pytest.mark.parametrize(("wins", "n"), [(1, 1), (9, 15), (13, 16), (12, 20), (20, 20)])
def test_differences_of_one_size_make_it_the_exact_sign_test(wins, n):
    d = np.repeat([0.25, -0.25], [wins, n - wins])  # 16 and 20 of them have more patterns than are held at a time
    assert sign_flip_p(d) == pytest.approx(stats.binomtest(wins, n).pvalue, rel=1e-12)


@pytest.mark.parametrize("wins", [20, 28])
def test_sampled_sign_flips_come_close_to_the_exact_sign_test(wins):
    d = np.repeat([0.25, -0.25], [wins, 40 - wins])
    expected = stats.binomtest(wins, 40).pvalue
    assert sign_flip_p(d, samples=20_000, seed=wins) == pytest.approx(expected, abs=0.015)  # four standard errors


def test_among_many_differences_the_observed_signs_count_as_one_of_the_samples():
    assert sign_flip_p(np.ones(40), samples=99) == 1 / 100  # no pattern drawn comes near 40 equal signs
    cancelling = np.tile([1.0, -1.0], 300)  # every pattern is as extreme; more of them than are held at a time
    assert sign_flip_p(cancelling, samples=7_000) == 1.0


def test_identical_arms_differ_by_nothing_with_p_one():
    values = [0.1, 0.2, 0.15]
    found = compare_seeds(values, values)
    assert (found.difference, found.relative, found.p_t, found.p_sign_flip, found.wins) == (0, 0, 1, 1, 0)
    assert found.interval == (0, 0) and found.cohen_d == 0 and found.smallest_effect == 0
    users = compare_users(values, values, samples=100)
    assert (users.difference, users.interval, users.p_sign_flip) == (0, (0, 0), 1)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_a_constant_difference_is_no_more_certain_than_so_many_seeds_can_make_it(n):
    values = np.linspace(0.1, 0.3, n)
    found = compare_seeds(values, values + 1e-3)
    assert found.p_t == found.p_sign_flip == 2 / 2**n and found.cohen_d is None and found.is_constant
    assert compare_seeds(values, values).p_t == 1 and compare_seeds(values, values).is_constant
    assert not compare_seeds(values, 2 * values).is_constant


def test_equal_differences_are_seen_through_the_rounding_of_the_values():
    hits = np.array([100, 133, 171]) / 4385
    assert compare_seeds(hits, hits + 2 / 4385).cohen_d is None


def test_zero_metrics_give_no_nan():
    assert compare_seeds([0, 0], [0, 0]).relative == 0
    assert compare_seeds([0, 0], [0.1, 0.2]).relative is None


def test_wrong_inputs_are_refused():
    with pytest.raises(UserError, match="needs at least 2 seeds, and there are 1; add seeds"):
        compare_seeds([0.1], [0.2])
    with pytest.raises(UserError, match="the arms have 2 and 3 seeds; compare them over the seeds they share"):
        compare_seeds([0.1, 0.2], [0.1, 0.2, 0.3])
    with pytest.raises(UserError, match="a value of the seeds is not finite"):
        compare_seeds([0.1, np.nan], [0.1, 0.2])
    with pytest.raises(UserError, match="at least 2 users"):
        compare_users([], [])


@pytest.mark.parametrize("n", [3, 10, 60])
def test_the_power_at_the_smallest_effect_is_four_fifths_by_the_noncentral_t(n):
    d = np.random.default_rng(n).normal(size=n)
    found, critical = compare_seeds(np.zeros(n), d), stats.t.ppf(0.975, n - 1)
    shift = found.smallest_effect / d.std(ddof=1) * math.sqrt(n)
    power = stats.nct.sf(critical, n - 1, shift) + stats.nct.cdf(-critical, n - 1, shift)
    assert power == pytest.approx(0.8, abs=1e-6)


def test_the_interval_of_a_share_of_users_is_the_binomial_s():
    num_users, hits = 10_000, 3_000
    found = bootstrap_interval(np.arange(num_users) < hits, samples=100_000)
    expected = stats.binom.ppf([0.025, 0.975], num_users, hits / num_users) / num_users
    assert found == pytest.approx(tuple(expected), abs=2 / num_users)  # five standard errors of a sampled quantile


@pytest.mark.parametrize(("field", "drawn"), [("interval", bootstrap_interval), ("p_sign_flip", sign_flip_p)])
def test_what_is_drawn_over_users_is_of_as_many_samples_as_asked_for_and_of_a_seed(field, drawn):
    values = np.random.default_rng(0).normal(size=50)
    found = getattr(compare_users(np.zeros(50), values, samples=200), field)
    assert found == drawn(values, samples=200)
    assert drawn(values, samples=201) != found != drawn(values, samples=200, seed=4)


@pytest.mark.parametrize("values", ["all differ", "a tenth differ"])
def test_resamples_drawn_some_at_a_time_are_those_drawn_at_once(values):
    rng, users, samples = np.random.default_rng(1), 3000, 15_000  # 1,333 resamples are held at a time, or 13,333
    if values == "all differ":
        a, samples = rng.normal(size=users), 1500
        drawn = a[np.random.default_rng(5).integers(0, users, (samples, users))]
        means = drawn.mean(axis=1)
    else:
        a = np.repeat(rng.normal(size=users // 10), 10)
        drawn = np.random.default_rng(5).multinomial(users, np.full(users // 10, 10 / users), size=samples)
        means = drawn @ np.unique(a) / users
    low, high = np.quantile(means, [0.025, 0.975])
    assert bootstrap_interval(a, samples=samples, seed=5) == pytest.approx((low, high), rel=1e-12)


def test_holm_is_worked_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


@given(st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.01, 0.05, 0.5, 1.0])), min_size=1, max_size=7))
def test_holm_is_the_closed_test_of_every_subset(p_values):
    subsets = [s for size in range(1, len(p_values) + 1) for s in itertools.combinations(range(len(p_values)), size)]
    of_subset = {s: min(1.0, len(s) * min(p_values[i] for i in s)) for s in subsets}  # Bonferroni's
    closed = [max(p for s, p in of_subset.items() if i in s) for i in range(len(p_values))]
    assert holm(p_values) == pytest.approx(closed, rel=1e-12, abs=0)


@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=8))
def test_fisher_is_scipys(values):
    assert fisher(values) == pytest.approx(stats.combine_pvalues(values).pvalue, rel=1e-9)


def test_fisher_takes_a_p_of_zero_and_refuses_none():
    assert fisher([0.0, 1.0]) < 1e-200
    with pytest.raises(UserError, match="no p-value to pool"):
        fisher([])
