"""Rank correlations against scipy, and where there is none."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
from scipy import stats

from recbft.evaluation.association import spearman


@pytest.mark.parametrize("seed", range(2))
def test_it_is_scipy_s_with_ties_too(seed):
    rng = np.random.default_rng(seed)
    x, y = rng.integers(0, 6, 40), rng.normal(size=40)
    found, expected = spearman(x, y), stats.spearmanr(x, y)
    assert (found.rho, found.p, found.n) == (pytest.approx(expected.statistic), pytest.approx(expected.pvalue), 40)


@pytest.mark.parametrize("seed", range(2))
def test_holding_a_third_fixed_correlates_what_it_leaves_of_the_ranks(seed):
    rng = np.random.default_rng(seed)
    z = rng.integers(1, 9, 60)
    x, y = z + rng.normal(size=60), -z + rng.normal(size=60)
    ranks = [stats.rankdata(values) for values in (x, y, z)]
    left = [r - np.polyval(np.polyfit(ranks[2], r, 1), ranks[2]) for r in ranks[:2]]
    found = spearman(x, y, given=z)
    assert found.rho == pytest.approx(np.corrcoef(*left)[0, 1])
    t = found.rho * np.sqrt(57 / (1 - found.rho**2))
    assert found.p == pytest.approx(2 * stats.t.sf(abs(t), 57))
    assert spearman(x, y).rho < -0.5 < found.rho


def test_pairs_with_a_nan_are_left_out_and_a_perfect_order_of_many_is_certain():
    assert spearman([*range(9), np.nan], [*range(0, -9, -1), 3.0]) == (-1.0, 0.0, 9)
    assert spearman([1, 2, np.nan, 4], [4.0, 2, 9, 1]) == (-1.0, 2 / 6, 3)


@pytest.mark.parametrize("n", [3, 4, 5])
@pytest.mark.parametrize("seed", range(2))
def test_the_p_of_few_is_the_share_of_their_orders_that_scipy_finds_as_strong(seed, n):
    rng = np.random.default_rng(seed)
    x, y = np.append(rng.integers(0, 4, n - 1), 9), np.append(rng.integers(0, 4, n - 1), 9)
    sizes = [abs(stats.spearmanr(x, order).statistic) for order in permutations(y)]
    assert spearman(x, y).p == pytest.approx(np.mean(np.array(sizes) >= sizes[0] - 1e-9))


def test_the_p_of_a_perfect_order_is_that_of_two_orders_in_all():
    assert spearman(range(8), range(8, 0, -1)) == (-1.0, 2 / math.factorial(8), 8)


def test_few_values_have_no_p_with_a_third_held_fixed():
    x, z = np.arange(9), np.array([2, 1, 1, 3, 2, 5, 3, 4, 4])
    assert spearman(x, x, given=z)[:2] == (1.0, 0.0)
    assert spearman(x[:8], x[:8], given=z[:8]) == (1.0, None, 8)


@pytest.mark.parametrize("x", [[1, 1, 1], [1, 2], [], [np.nan] * 3])
def test_what_does_not_vary_or_is_too_little_has_no_correlation(x):
    y = np.arange(len(x))
    assert spearman(x, y)[:2] == (None, None)
    assert spearman(y, x, given=y)[:2] == (None, None)


def test_a_figure_held_against_itself_leaves_nothing():
    x = np.arange(9)
    assert spearman(x, x[::-1], given=x).rho is None


@pytest.mark.parametrize("sign", [1, -1])
def test_equal_means_that_round_differently_are_ties(sign):
    x = sign * np.array([sum([0.1] * n) / n for n in range(1, 12)])
    assert len(set(x)) > 1 and spearman(x, np.arange(11)).rho is None


@pytest.mark.parametrize("unit", [1e-12, 1e9])
def test_the_unit_of_a_figure_does_not_matter(unit):
    rng = np.random.default_rng(0)
    x, y, z = rng.normal(size=(3, 30))
    assert spearman(x * unit, y, given=z * unit) == spearman(x, y, given=z)
