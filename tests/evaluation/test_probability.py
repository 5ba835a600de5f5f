"""Probabilities of scores: the two numbers behind them against a search by hand, and found again where planted."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import optimize, special, stats

from recbft.datasets import Dataset
from recbft.evaluation import probability
from recbft.evaluation.probability import AS_TRAINED, Calibration, best_lapse, calibrations, fit, predicted
from recbft.evaluation.score_blocks import score_block
from recbft.models.contract import ItemTable, SequenceModel, UserStates


def drawn(seed, N=400, V=30, *, bias=False):
    rng = np.random.default_rng(seed)
    states, weight = torch.tensor(rng.normal(size=(N, 6))), torch.tensor(rng.normal(size=(V + 1, 6)))
    table = ItemTable(weight, torch.tensor(rng.normal(size=V + 1)) if bias else None)
    scores = states @ weight[1:].T + (table.bias[1:] if bias else 0)
    return states, table, scores.numpy()


def mixed(scores, temperature, lapse):
    """Equation (6.7); -inf is an item left out."""
    left = np.isfinite(scores)
    return (1 - lapse) * special.softmax(scores / temperature, axis=1) + lapse * left / left.sum(axis=1, keepdims=True)


def sample(p, seed):
    rng = np.random.default_rng(seed)
    return 1 + np.array([rng.choice(len(row), p=row) for row in p])


def best_by_search(scores, targets, *, prior=True):
    """Equation (6.8) by a search in the plane from many starts."""

    def loss(x):
        p = mixed(scores, np.exp(x[0]), special.expit(x[1]))
        value = np.log(p[np.arange(len(targets)), targets - 1]).sum()
        if prior:
            value += stats.cauchy.logpdf(x[0], scale=0.4) + stats.beta.logpdf(special.expit(x[1]), 2, 4)
        return -value / len(targets)

    how = {"method": "Nelder-Mead", "options": {"xatol": 1e-7, "fatol": 1e-12, "maxiter": 2000}}
    found = min((optimize.minimize(loss, (a, b), **how) for a in (-1, 1) for b in (-3, 0)), key=lambda one: one.fun)
    return np.exp(found.x[0]), special.expit(found.x[1])


def test_scores_that_are_counts_of_many_events_have_their_temperature_too():
    counts = torch.tensor(np.random.default_rng(0).integers(0, 100_000, (31, 1)), dtype=torch.float64)
    scores = np.tile(counts[1:, 0].numpy(), (3000, 1))
    targets = sample(mixed(scores, 25_000, 0.0), seed=1)
    found = fit(torch.ones(3000, 1, dtype=torch.float64), ItemTable(counts, None), targets)
    assert found.temperature == pytest.approx(25_000, rel=0.15) and found.lapse < 0.1


@pytest.mark.parametrize(
    ("memory_mb", "unseen", "N", "bias", "prior"),
    [(1e-3, True, 300, False, True), (256.0, False, 300, True, False), (1e-2, True, 20, True, True)],
)
def test_the_fit_is_the_best_of_a_search_in_the_plane(memory_mb, unseen, N, bias, prior):
    states, table, scores = drawn(5, N=N, bias=bias)
    rng = np.random.default_rng(0)
    left_out = rng.random(scores.shape) < rng.choice([0.0, 0.3, 0.9], (N, 1))
    left_out[:, 0] = False
    seen = None
    if unseen:
        user, item = np.nonzero(left_out)
        seen = item + 1, np.searchsorted(user, np.arange(N + 1))
        scores = np.where(left_out, -np.inf, scores)
    targets = sample(mixed(scores, 1.7, 0.25), seed=1)
    found = fit(states, table, targets, seen=seen, prior=prior, memory_mb=memory_mb)
    temperature, lapse = best_by_search(scores, targets, prior=prior)
    assert found.temperature == pytest.approx(temperature, rel=3e-3) and found.lapse == pytest.approx(lapse, abs=3e-3)


@pytest.mark.parametrize("seed", [306, 2330, 4190])
def test_of_two_peaks_the_fit_finds_the_higher(seed):
    states, table, scores = drawn(seed, N=20)
    rng = np.random.default_rng(seed)
    targets = 1 + np.where(rng.random(20) < 0.5, scores.argmax(axis=1), rng.integers(0, 30, 20))
    found, expected = fit(states, table, targets), best_by_search(scores, targets)
    assert found == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("memory_mb", [1e-3, 256.0])
def test_a_fit_in_single_precision_is_that_of_double(memory_mb):
    states, table, scores = drawn(7, N=300, bias=True)
    seen = np.tile(np.arange(2, 15), 150), np.repeat(np.arange(151) * 13, 2)[1:]  # of every other user, half of a tile
    targets = np.where(np.arange(300) % 2, scores.argmax(axis=1) + 1, 1)
    targets[(targets > 1) & (targets < 15)] = 1
    single = ItemTable(table.weight.float(), table.bias.float())
    exact = np.array(fit(states, table, targets, seen=seen))
    found = np.array(fit(states.float(), single, targets, seen=seen, memory_mb=memory_mb))
    assert found == pytest.approx(exact, rel=5e-3)  # at the top a likelihood good to 1e-7 is flat to 1e-3


def test_a_temperature_alone_is_that_of_the_best_likelihood():
    states, table, scores = drawn(3, N=500)
    targets = sample(mixed(scores, 1.4, 0.3), seed=0)
    found = fit(states, table, targets, lapses=False, prior=False)

    def loss(x):
        return -special.log_softmax(scores * np.exp(-x), axis=1)[np.arange(500), targets - 1].mean()

    best = optimize.minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-9}).x
    assert found.temperature == pytest.approx(np.exp(best), rel=1e-3) and found.lapse == 0


def test_targets_that_scores_foresee_leave_no_lapse_and_those_they_do_not_leave_nothing_else():
    states, table, scores = drawn(4)
    sure = fit(states, table, scores.argmax(axis=1) + 1, prior=False)
    assert sure.temperature < 0.1 and sure.lapse < 1e-6
    worst = fit(states, table, scores.argmin(axis=1) + 1, prior=False)
    assert worst.lapse > 0.9 or worst.temperature > 100


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_few_users_do_not_make_a_list_sure_or_worthless(foreseen):
    states, table, scores = drawn(4, N=3)
    targets = (scores.argmax(axis=1) if foreseen else scores.argmin(axis=1)) + 1
    by_likelihood, found = (fit(states, table, targets, prior=prior) for prior in (False, True))
    assert 0.05 < found.lapse < 0.8 and 0.3 < found.temperature < 3
    assert by_likelihood.temperature < 0.1 or max(by_likelihood.lapse, by_likelihood.temperature / 100) > 0.9


@pytest.mark.parametrize("seed", range(2))
def test_the_best_lapse_of_a_softmax_is_the_best_of_a_grid(seed):
    rng = np.random.default_rng(seed)
    log_p, log_chance = -rng.exponential(4, 50), -np.log(rng.integers(5, 300, 50))
    grid = np.linspace(0, 1, 2001)
    values = np.log(np.outer(1 - grid, np.exp(log_p)) + np.outer(grid, np.exp(log_chance))).sum(axis=1)
    for counts in ((0, 0), (1, 3), (0, 2), (4, 0)):
        u, value = best_lapse(log_p, log_chance, *counts)
        kept = values + special.xlogy(counts[0], grid) + special.xlogy(counts[1], 1 - grid)
        assert kept.max() <= value + 1e-10 and abs(grid[kept.argmax()] - u) <= 5e-4


@pytest.mark.parametrize("log_p", [-800.0, -5000.0, -np.inf])
def test_a_target_that_the_softmax_leaves_no_room_gets_its_share_of_the_lapses(log_p):
    u, value = best_lapse(np.array([log_p, np.log(0.5)]), np.log([0.1, 0.1]), 0, 0)
    assert u == pytest.approx(5 / 8)  # 1 / u = 0.8 / (1 - 0.8 u)
    assert value == pytest.approx(np.log([0.0625, 0.25]).sum())
    everyone = best_lapse(np.full(30_000, log_p), np.full(30_000, np.log(0.1)), 0, 0)
    assert everyone == pytest.approx((1, 30_000 * np.log(0.1)))
    assert best_lapse(np.full(16, log_p), np.full(16, np.log(0.1)))[0] == pytest.approx(17 / 20)


def test_one_item_or_equal_scores_need_no_care():
    one = fit(torch.ones(5, 3), ItemTable(torch.ones(2, 3), None), np.ones(5, np.int64))
    equal = fit(torch.ones(5, 3), ItemTable(torch.ones(9, 3), None), np.ones(5, np.int64))
    assert all(np.isfinite(found).all() and 0 <= found.lapse <= 1 for found in (one, equal))


class Known(torch.nn.Module, SequenceModel):
    """The state of a user is that of the last item of the history."""

    def __init__(self, states, table):
        super().__init__()
        self.max_length, self.states, self.table = 50, states, table

    def user_states(self, batch):
        assert torch.is_inference_mode_enabled() and not self.training
        return UserStates(self.states[batch.items.flatten()[batch.last]], None)

    def item_table(self):
        return self.table


def test_a_run_s_are_fitted_on_its_validation_targets(monkeypatch):
    rng = np.random.default_rng(0)
    V, N = 40, 200
    states, weight = rng.normal(size=(2, V, 3))
    rows = []
    for user in range(N):
        item = rng.integers(V)
        for _ in range(rng.integers(3, 9)):
            rows.append((user, item))
            item = rng.choice(V, p=special.softmax(weight @ states[item])) if rng.random() < 0.8 else rng.integers(V)
    dataset = Dataset.from_frame(pd.DataFrame(rows, columns=["user", "item"]), user="user", item="item")
    order = dataset.item_ids[[0, *range(dataset.num_items)]]  # with a row for padding
    states, weight = torch.tensor(states[order]), torch.tensor(weight[order])
    model = Known(states, ItemTable(weight, None))

    def by_hand(*, unseen, users):
        kept, targets = [], []
        for user in users:
            items = dataset.items[dataset.offsets[user] : dataset.offsets[user + 1]]
            history, asked = items[:-2], items[-2]
            row = (states[history[-1]] @ weight[1:].T).numpy().copy()
            if unseen and asked in history:
                continue
            if unseen:
                row[history - 1] = -np.inf
            kept.append(row)
            targets.append(asked)
        return best_by_search(np.array(kept), np.array(targets))

    found = calibrations(model, dataset)
    for name, unseen in (("unfiltered", False), ("filtered", True)):
        temperature, lapse = by_hand(unseen=unseen, users=range(N))
        assert found[name] == {
            "temperature": pytest.approx(temperature, rel=5e-3), "lapse": pytest.approx(lapse, abs=5e-3)
        }, name  # fmt: skip
    # Of a large catalogue some of the users, the same each time.
    monkeypatch.setattr(probability, "FITTED_USERS", 20)
    monkeypatch.setattr(probability, "FITTED_SCORES", 90 * dataset.num_items)
    some = np.sort(np.random.default_rng(0).permutation(N)[:90])
    fewer = calibrations(model, dataset)
    assert fewer == calibrations(model, dataset) and fewer != found
    temperature, _ = by_hand(unseen=True, users=some)
    assert fewer["filtered"]["temperature"] == pytest.approx(temperature, rel=2e-3)


def test_where_every_target_was_seen_before_there_is_none_of_the_unseen():
    rows = [(user, 1 + user % 3 if place != 3 else 4) for user in range(5) for place in range(4)]
    dataset = Dataset.from_frame(pd.DataFrame(rows, columns=["user", "item"]), user="user", item="item")
    generator = torch.Generator().manual_seed(0)
    states, weight = torch.randn(10, 2, generator=generator), torch.randn(dataset.num_items + 1, 2, generator=generator)
    found = calibrations(Known(states, ItemTable(weight, None)), dataset)
    assert found["filtered"] is None and found["unfiltered"]["temperature"] > 0


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
    states, (weight, _), scores = drawn(seed, N=200)
    states, scores = 8 * states, 8 * scores
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
