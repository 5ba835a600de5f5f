from __future__ import annotations

import math

import pytest

from benchmarks.paired import paired_difference
from recbft.errors import UserError


def test_a_difference_worked_by_hand():
    # d = (1, 2, 3): mean 2, sd 1, t = 2 sqrt(3). With 2 degrees of freedom P(|t| > x) = 1 - x / sqrt(2 + x^2), and the
    # 97.5 % point is 4.302653.
    found = paired_difference([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert found.difference == pytest.approx(2) and found.relative == pytest.approx(1)
    assert found.p == pytest.approx(1 - math.sqrt(12 / 14))
    reach = 4.302653 / math.sqrt(3)
    assert (found.low, found.high) == (pytest.approx(2 - reach, abs=1e-6), pytest.approx(2 + reach, abs=1e-6))
    assert (found.wins, found.num_pairs) == (3, 3)


def test_equal_arms_differ_by_nothing_and_p_is_1():
    found = paired_difference([0.1, 0.2], [0.1, 0.2])
    assert (found.difference, found.low, found.high, found.p, found.wins) == (0, 0, 0, 1, 0)


def test_a_constant_difference_is_not_nan():
    found = paired_difference([2.0, 3.0], [1.0, 2.0])
    assert (found.low, found.high, found.p) == (1, 1, 0)


def test_a_baseline_of_zeros_has_no_relative_change():
    assert paired_difference([0.1, 0.2], [0.0, 0.0]).relative is None


def test_one_seed_is_refused():
    with pytest.raises(UserError, match="needs at least 2 seeds, got 1"):
        paired_difference([0.1], [0.2])
