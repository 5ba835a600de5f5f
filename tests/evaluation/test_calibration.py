"""Calibration on tables worked by hand, distributions against plain softmax, and temperatures that were planted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats

from recbft.evaluation import calibration as calibrating
from recbft.evaluation.calibration import calibration, fit_temperature, predicted, solve_temperature
from recbft.evaluation.score_blocks import score_block
from recbft.models.contract import ItemTable


def drawn(seed, N=400, V=30, D=6, *, bias=False, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(N, D, generator=generator, dtype=torch.float64) * spread
    weight = torch.randn(V + 1, D, generator=generator, dtype=torch.float64)
    table = ItemTable(weight, torch.randn(V + 1, generator=generator, dtype=torch.float64) if bias else None)
    scores = states @ weight[1:].T + (table.bias[1:] if bias else 0)
    return states, table, scores.numpy()


def sample_targets(scores, temperature, seed):
    """Targets from the softmax of the scores at a temperature, item indices."""
    rng = np.random.default_rng(seed)
    return 1 + np.array([rng.choice(scores.shape[1], p=special.softmax(row / temperature)) for row in scores])


@pytest.mark.parametrize("memory_mb", [1e-9, 256.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("bias", [False, True])
def test_every_user_s_distribution_is_the_softmax_over_all_items(temperature, memory_mb, bias):
    states, table, scores = drawn(0, N=20, bias=bias)
    targets = sample_targets(scores, 1.0, seed=0)
    how = {"temperatures": (7.0, temperature), "ks": (1, 10, 500), "memory_mb": memory_mb}
    _, found = predicted(states, table, targets, **how)
    p = special.softmax(scores / temperature, axis=1)
    np.testing.assert_allclose(found.nll, -np.log(p[np.arange(20), targets - 1]), rtol=1e-10)
    np.testing.assert_allclose(found.entropy, [stats.entropy(row) for row in p], rtol=1e-10)
    np.testing.assert_allclose(found.top[1], p.max(axis=1), rtol=1e-10)
    np.testing.assert_allclose(found.top[10], np.sort(p, axis=1)[:, -10:].sum(axis=1), rtol=1e-10)
    np.testing.assert_allclose(found.top[500], 1.0, rtol=1e-10)


@pytest.mark.parametrize("seed", range(3))
def test_rounding_in_single_precision_makes_no_probability_beyond_one_and_no_entropy_below_zero(seed):
    states, (weight, _), scores = drawn(seed, N=200, spread=8.0)
    table = ItemTable(weight.float(), None)
    targets = scores.argmax(axis=1) + 1
    (found,) = predicted(states.float(), table, targets, temperatures=[1.0], ks=(1, 10, 30), memory_mb=1)
    assert found.entropy.min() >= 0.0 and all(0 < p.min() <= p.max() <= 1.0 for p in found.top.values())
    assert {part.dtype for part in (found.nll, found.entropy, *found.top.values())} == {np.dtype(np.float64)}


@pytest.mark.parametrize("memory_mb", [1e-9, 0.05])
def test_the_scores_alive_at_a_time_fit_into_the_memory(monkeypatch, memory_mb):
    blocks = []

    def watched(chunk, candidates, columns, room):
        blocks.append(room.numel())
        return score_block(chunk, candidates, columns, room)

    monkeypatch.setattr(calibrating, "score_block", watched)
    states, table, _ = drawn(0, N=400, V=30)
    predicted(states, table, np.ones(400, np.int64), temperatures=[1.0], ks=(1,), memory_mb=memory_mb)
    allowed = memory_mb * 2**20 / (calibrating.COPIES * states.element_size())
    assert set(blocks) == {30 * max(1, int(allowed / 30))} and sum(blocks) >= 400 * 30


def test_scores_far_apart_give_a_sure_distribution_and_no_nan():
    table = ItemTable(torch.tensor([[0.0], [1e6], [0.0]]), None)
    (found,) = predicted(torch.ones(1, 1), table, np.array([2]), temperatures=[1.0], ks=(1,), memory_mb=1)
    assert (found.entropy[0], found.top[1][0], found.nll[0]) == (0.0, 1.0, 1e6)


@pytest.mark.parametrize("planted", [0.4, 1.0, 2.5])
def test_a_planted_temperature_is_found_again(planted):
    states, table, scores = drawn(1, N=4000)
    targets = sample_targets(scores, planted, seed=2)
    found = fit_temperature(states, table, targets, memory_mb=1)
    assert found.value == pytest.approx(planted, rel=0.08) and not found.at_bound

    def nll(b):
        return -special.log_softmax(scores * b, axis=1)[np.arange(len(targets)), targets - 1].mean()

    best = optimize.minimize_scalar(nll, bounds=(0.1, 10), method="bounded", options={"xatol": 1e-9}).x
    assert found.value == pytest.approx(1 / best, rel=1e-4)


def test_the_fit_lowers_the_likelihood_loss_on_its_own_targets():
    states, table, scores = drawn(3, spread=3.0)
    targets = sample_targets(scores, 2.0, seed=0)
    fitted = fit_temperature(states, table, targets, memory_mb=1).value
    tried = (1.0, fitted, fitted * 1.1, fitted / 1.1)
    at = [one.nll.mean() for one in predicted(states, table, targets, temperatures=tried, ks=(1,), memory_mb=1)]
    assert at[1] == min(at)


def test_targets_that_are_always_first_or_always_last_end_at_the_bound_of_the_search():
    states, table, scores = drawn(4)
    first, last = scores.argmax(axis=1) + 1, scores.argmin(axis=1) + 1
    assert fit_temperature(states, table, first, memory_mb=1).value < 0.01
    found = fit_temperature(states, table, last, memory_mb=1)
    assert found.at_bound and found.value == 2.0**10


def test_a_catalogue_of_one_item_or_equal_scores_leave_the_temperature_at_one():
    one = ItemTable(torch.ones(2, 3), None)
    assert fit_temperature(torch.ones(5, 3), one, np.ones(5, np.int64), memory_mb=1) == (1.0, False)
    equal = ItemTable(torch.ones(9, 3), None)
    assert fit_temperature(torch.ones(5, 3), equal, np.ones(5, np.int64), memory_mb=1).value == 1.0


@pytest.mark.parametrize("wrong", [1.0, 0.2, 3.0, 1e-9, 0.0, -1.0])
@pytest.mark.parametrize("root", [0.01, 0.3, 1.0, 1.7, 400.0])
def test_the_root_of_a_rising_slope_is_found_wherever_it_lies(root, wrong):
    """Also where the derivative is wrong by a factor, so that Newton's steps lead astray."""
    asked = []

    def slope(b):
        asked.append(b)
        return np.tanh(b - root), wrong * (1 - np.tanh(b - root) ** 2)

    found = solve_temperature(slope)
    assert found.value == pytest.approx(1 / root, rel=1e-5) and not found.at_bound
    # Each is a pass over all scores; halving alone would take 25.
    assert len(asked) < (16 if wrong == 1.0 else 60)


@pytest.mark.parametrize("rise", [0.0, 1e-9, 1.0])
def test_a_slope_of_one_sign_ends_at_the_bound(rise):
    assert solve_temperature(lambda b: (-1.0, rise)) == (2.0**-10, True)
    assert solve_temperature(lambda b: (1.0, rise)) == (2.0**10, True)


def test_a_table_worked_by_hand():
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


@pytest.mark.parametrize("bins", [2, 10, 14, 25, 38])
def test_bins_are_equal_where_the_number_of_users_allows_it(bins):
    for each in (1, 3, 7):
        claims = np.linspace(0.1, 0.9, each * bins)
        found = calibration(claims, claims > 0.5, bins=bins, samples=1)
        assert [one["num_users"] for one in found["bins"]] == [each] * bins


def test_equal_probabilities_share_one_bin_and_one_user_is_enough():
    found = calibration(np.full(7, 0.25), np.arange(7) < 2, samples=10)
    assert len(found["bins"]) == 1 and found["ece"] == pytest.approx(2 / 7 - 1 / 4)
    alone = calibration(np.array([0.25]), np.array([True]), samples=10)
    assert alone["ece"] == 0.75 and alone["interval"] == [0.75, 0.75]


@pytest.mark.parametrize(("hits", "ece"), [(True, 0.6), (False, 0.4)])
def test_all_right_and_all_wrong_are_as_far_off_as_the_claims(hits, ece):
    claims = np.linspace(0.2, 0.6, 21)
    assert calibration(claims, np.full(21, hits), samples=10)["ece"] == pytest.approx(ece)


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
