"""Calibration on tables worked by hand, and distributions against plain softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import special, stats

from recbft.evaluation import probability
from recbft.evaluation.confidence import calibration
from recbft.evaluation.probability import AS_TRAINED, Calibration, predicted
from recbft.evaluation.score_blocks import score_block
from recbft.models.contract import ItemTable


def drawn(seed, N=400, V=30, D=6, *, bias=False, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(N, D, generator=generator, dtype=torch.float64) * spread
    weight = torch.randn(V + 1, D, generator=generator, dtype=torch.float64)
    table = ItemTable(weight, torch.randn(V + 1, generator=generator, dtype=torch.float64) if bias else None)
    scores = states @ weight[1:].T + (table.bias[1:] if bias else 0)
    return states, table, scores.numpy()


@pytest.mark.parametrize(
    ("temperature", "lapse", "memory_mb", "bias"),
    [(0.5, 0.0, 256.0, True), (3.0, 0.2, 1e-9, False), (0.7, 1.0 - 1e-6, 1e-9, True)],
)
def test_every_user_s_distribution_is_the_softmax_over_all_items_and_the_lapses(temperature, lapse, memory_mb, bias):
    states, table, scores = drawn(0, N=20, bias=bias)
    targets = np.random.default_rng(0).integers(1, 31, 20)
    calibrations = (Calibration(7.0, 0.5), Calibration(temperature, lapse))
    _, found = predicted(states, table, targets, calibrations=calibrations, ks=(1, 10, 500), memory_mb=memory_mb)
    p = (1 - lapse) * special.softmax(scores / temperature, axis=1) + lapse / 30
    # Where an item is all but certain both are near 0, and no nearer to it than the rounding of scores.
    np.testing.assert_allclose(found.nll, -np.log(p[np.arange(20), targets - 1]), rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(found.entropy, [stats.entropy(row) for row in p], rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(found.top[1], p.max(axis=1), rtol=1e-10)
    np.testing.assert_allclose(found.top[10], np.sort(p, axis=1)[:, -10:].sum(axis=1), rtol=1e-10)
    np.testing.assert_allclose(found.top[500], 1.0, rtol=1e-10)


@pytest.mark.parametrize("seed", range(2))
def test_rounding_in_single_precision_makes_no_probability_beyond_one_and_no_entropy_below_zero(seed):
    states, (weight, _), scores = drawn(seed, N=200, spread=8.0)
    table = ItemTable(weight.float(), None)
    targets = scores.argmax(axis=1) + 1
    (found,) = predicted(states.float(), table, targets, calibrations=[AS_TRAINED], ks=(1, 10, 30), memory_mb=1)
    assert found.entropy.min() >= 0.0 and all(0 < p.min() <= p.max() <= 1.0 for p in found.top.values())
    assert {part.dtype for part in (found.nll, found.entropy, *found.top.values())} == {np.dtype(np.float64)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="what PyTorch refuses of a GPU")
def test_a_gpu_gives_the_same_by_deterministic_algorithms():
    states, (weight, _), _ = drawn(0)
    targets = np.random.default_rng(0).integers(1, 31, 400)
    asked = {"calibrations": [AS_TRAINED], "ks": (1, 10), "memory_mb": 1.0}
    (plain,) = predicted(states, ItemTable(weight, None), targets, **asked)
    torch.use_deterministic_algorithms(True)
    try:
        (found,) = predicted(states.cuda(), ItemTable(weight.cuda(), None), targets, **asked)
    finally:
        torch.use_deterministic_algorithms(False)
    np.testing.assert_allclose(found.top[10], plain.top[10], rtol=1e-10)


@pytest.mark.parametrize("memory_mb", [1e-9, 0.05])
def test_the_scores_alive_at_a_time_fit_into_the_memory(monkeypatch, memory_mb):
    blocks = []

    def watched(chunk, candidates, columns, room):
        blocks.append(room.numel())
        return score_block(chunk, candidates, columns, room)

    monkeypatch.setattr(probability, "score_block", watched)
    states, table, _ = drawn(0, N=400, V=30)
    predicted(states, table, np.ones(400, np.int64), calibrations=[AS_TRAINED], ks=(1,), memory_mb=memory_mb)
    allowed = memory_mb * 2**20 / (probability.COPIES * states.element_size())
    assert set(blocks) == {30 * max(1, int(allowed / 30))} and sum(blocks) >= 400 * 30


def test_scores_far_apart_give_a_sure_distribution_and_no_nan():
    table = ItemTable(torch.tensor([[0.0], [1e6], [0.0]]), None)
    (found,) = predicted(torch.ones(1, 1), table, np.array([2]), calibrations=[AS_TRAINED], ks=(1,), memory_mb=1)
    assert (found.entropy[0], found.top[1][0], found.nll[0]) == (0.0, 1.0, 1e6)


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
