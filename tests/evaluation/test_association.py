"""Rank correlations against scipy, and where there is none."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from recbft.evaluation.association import spearman


@pytest.mark.parametrize("seed", range(5))
def test_it_is_scipy_s_with_ties_too(seed):
    rng = np.random.default_rng(seed)
    x, y = rng.integers(0, 6, 40), rng.normal(size=40)
    found, expected = spearman(x, y), stats.spearmanr(x, y)
    assert (found.rho, found.p, found.n) == (pytest.approx(expected.statistic), pytest.approx(expected.pvalue), 40)


@pytest.mark.parametrize("seed", range(5))
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


def test_pairs_with_a_nan_are_left_out_and_a_perfect_order_is_certain():
    assert spearman([1, 2, np.nan, 4], [4.0, 2, 9, 1]) == (-1.0, 0.0, 3)


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
