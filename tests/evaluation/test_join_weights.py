"""The weights of a join: the most likely ones, what is left out, and bins of few targets or none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from recbft.errors import UserError
from recbft.evaluation import join_weights
from recbft.evaluation.join_weights import fit_join, fit_weights
from recbft.models.contract import ItemTable
from recbft.models.join import Join

N, V, G = 60, 15, 3


def drawn(seed, *, biased=True):
    """Two models' states and tables, bins, targets drawn from a join of them, and what users have seen."""
    rng = np.random.default_rng(seed)
    bins = np.concatenate([[0], rng.permutation(np.arange(V) % G)])
    models = []
    for width in (4, 3):
        states, weight = (
            torch.from_numpy(rng.normal(size=(N, width))),
            torch.from_numpy(rng.normal(size=(V + 1, width))),
        )
        bias = torch.from_numpy(rng.normal(size=V + 1)) if biased and width == 4 else None
        models.append((states, ItemTable(weight, bias)))
    seen = np.stack([rng.permutation(np.arange(1, V + 1))[:4] for _ in range(N)])
    true = rng.normal(size=(G, 2))
    s = sum(true[bins[1:], n] * dense(*model) for n, model in enumerate(models))
    s[np.arange(N)[:, None], seen - 1] = -np.inf
    targets = (s + rng.gumbel(size=s.shape)).argmax(axis=1) + 1
    return models, bins, targets, (seen.ravel(), np.arange(N + 1) * 4)


def dense(states, table):
    scores = states @ table.weight[1:].T
    return (scores if table.bias is None else scores + table.bias[1:]).numpy()


def log_shares(weights, models, bins, seen):
    """The log of the softmax of (1), (users, items)."""
    own = np.asarray(weights).reshape(-1, 2)[bins[1:]]
    s = own[:, 0] * dense(*models[0]) + own[:, 1] * dense(*models[1])
    s[np.repeat(np.arange(len(s)), np.diff(seen[1])), seen[0] - 1] = -np.inf
    return s - np.logaddexp.reduce(s, axis=1, keepdims=True)


def log_likelihood(weights, models, bins, targets, seen):
    """Equation (2) per target, written out."""
    return log_shares(weights, models, bins, seen)[np.arange(len(targets)), targets - 1].mean()


def overall(models, targets, seen):
    """w_0 and I_0 of (3), written out."""
    one = np.zeros(models[0][1].weight.shape[0], np.int64)
    pair = minimize(lambda w: -log_likelihood(w, models, one, targets, seen), np.zeros(2), tol=1e-10).x
    p = np.exp(log_shares(pair, models, one, seen))[..., None]
    scores = np.stack([dense(*model) for model in models], axis=2)
    off = scores - (p * scores).sum(axis=1, keepdims=True)
    return pair, np.einsum("uim,uin->mn", p * off, off) / len(targets)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("memory_mb", [256.0, 0.01, 0.001])
def test_the_weights_are_the_most_likely_with_the_prior(seed, memory_mb):
    models, bins, targets, seen = drawn(seed)
    found = fit_weights(*models, bins, G, targets, seen, memory_mb=memory_mb)
    pair, information = overall(models, targets, seen)

    def penalised(w):
        moved = w.reshape(G, 2) - pair
        penalty = found.prior_targets / 2 * np.einsum("bm,mn,bn->", moved, information, moved)
        return penalty / N - log_likelihood(w, models, bins, targets, seen)

    best = minimize(penalised, np.zeros(2 * G), tol=1e-10)
    np.testing.assert_allclose(found.weights.ravel(), best.x, atol=2e-3)
    assert found.log_likelihood == pytest.approx(log_likelihood(best.x, models, bins, targets, seen), abs=1e-3)
    assert found.targets.tolist() == np.bincount(bins[targets], minlength=G).tolist()
    assert found.source.tolist() == list(range(G))
    for weights, alone in (([1, 0], found.alone[0]), ([0, 1], found.alone[1])):
        assert alone == pytest.approx(log_likelihood(weights * G, models, bins, targets, seen))
        assert found.log_likelihood >= alone


def test_one_bin_has_one_pair_of_weights_and_is_no_more_likely():
    models, bins, targets, seen = drawn(0)
    one = fit_weights(*models, np.zeros_like(bins), 1, targets, seen)
    assert one.weights.shape == (1, 2)
    np.testing.assert_allclose(one.weights[0], overall(models, targets, seen)[0], atol=2e-3)
    assert max(one.alone) <= one.log_likelihood <= fit_weights(*models, bins, G, targets, seen).log_likelihood


def many(seed, weights, sizes, users):
    """Targets drawn with given weights of bins of so many items."""
    rng = np.random.default_rng(seed)
    bins = np.concatenate([[0], np.repeat(np.arange(len(sizes)), sizes)])
    drawn = [[torch.from_numpy(rng.normal(size=(rows, 4))) for rows in (users, len(bins))] for _ in range(2)]
    models = [(states, ItemTable(weight, None)) for states, weight in drawn]
    seen = np.empty(0, np.int64), np.zeros(users + 1, np.int64)
    shares = log_shares(weights, models, bins, seen)
    return models, bins, (shares + rng.gumbel(size=shares.shape)).argmax(axis=1) + 1, seen


def without_prior(models, bins, num_bins, targets, seen):
    scores = join_weights._Scores(*models, bins, num_bins, targets, seen, 256.0)
    return join_weights._maximum(scores.of, torch.zeros(num_bins, 2, dtype=torch.float64))[0].numpy()


@pytest.mark.parametrize("seed", range(8))
def test_a_bin_of_few_targets_stays_near_all_and_one_of_many_has_its_own_weights(seed):
    true = np.array([[0.9, 0.3], [0.3, 0.9], [0.6, 0.6]])
    models, bins, targets, seen = many(seed, true, [40, 40, 1], 600)
    few = np.flatnonzero(bins[targets] == 2)[3:]
    targets[few] = 1 + few % 80  # of the item of the last bin three targets are left
    found = fit_weights(*models, bins, 3, targets, seen)
    free = without_prior(models, bins, 3, targets, seen)
    pair = fit_weights(*models, 0 * bins, 1, targets, seen).weights[0]
    kept, moved = (np.linalg.norm(found.weights - other, axis=1) for other in (free, pair))
    assert found.targets[2] <= 3 < found.targets[:2].min() and 1 <= found.prior_targets < 60
    assert (kept[:2] < 0.1 * moved[:2]).all() and kept[2] > 0.1 * np.linalg.norm(free[2] - pair)
    assert moved[2] < np.linalg.norm(free[2] - pair)


@pytest.mark.parametrize("seed", range(3))
def test_bins_that_do_not_differ_get_nearly_the_weights_of_all(seed):
    models, bins, targets, seen = many(seed, np.full((4, 2), 0.6), [20, 20, 20, 5], 600)
    found = fit_weights(*models, bins, 4, targets, seen)
    free = without_prior(models, bins, 4, targets, seen)
    pair = fit_weights(*models, 0 * bins, 1, targets, seen).weights[0]
    assert found.prior_targets > 30
    assert np.abs(found.weights - pair).max() < 0.7 * np.abs(free - pair).max()


def test_an_item_that_is_always_foreseen_gets_finite_weights():
    """Alone its bin would have weights without bound: its score tells its only target from all others."""
    models, bins, targets, seen = many(0, np.full((2, 2), 0.6), [30, 1], 100)
    targets[:] = np.where(targets == 31, 1, targets)
    targets[0] = 31
    states, table = models[0]
    states[:, 3], table.weight[31] = 0, torch.tensor([0.0, 0, 0, 1.0])
    states[0, 3] = 1
    found = fit_weights((states, table), models[1], bins, 2, targets, seen)
    assert np.abs(found.weights).max() < 6


@pytest.mark.parametrize(("empty", "source"), [((0,), [1, 1, 2]), ((0, 1), [2, 2, 2]), ((2,), [0, 1, 1])])
def test_a_bin_without_targets_takes_the_weights_of_the_next_that_has_some(empty, source):
    models, bins, targets, seen = drawn(1)
    have = ~np.isin(bins[targets], empty)
    states = [(own[torch.from_numpy(have)], table) for own, table in models]
    rows = np.flatnonzero(have)
    own = seen[0].reshape(N, -1)[rows].ravel(), np.arange(len(rows) + 1) * 4
    found = fit_weights(*states, bins, G, targets[have], own)
    assert found.source.tolist() == source and found.targets[list(empty)].tolist() == [0] * len(empty)
    np.testing.assert_array_equal(found.weights, found.weights[source])
    merged = fit_weights(*states, np.asarray(source)[bins], G, targets[have], own)
    np.testing.assert_allclose(found.weights, merged.weights[source])


def test_scores_that_say_nothing_get_no_weight_and_large_ones_a_small_one():
    models, bins, targets, seen = drawn(2, biased=False)
    (states, table), (other, weight) = models
    silent = fit_weights((states, table), (0 * other, weight), bins, G, targets, seen)
    assert not silent.weights[:, 1].any()
    usual, scaled = (fit_weights((factor * states, table), models[1], bins, G, targets, seen) for factor in (1.0, 1e4))
    np.testing.assert_allclose(scaled.weights * [1e4, 1], usual.weights, rtol=1e-3)


def test_targets_that_scores_always_foresee_end_the_fit():
    states = torch.eye(V, dtype=torch.float64)[: V - 1]
    table = ItemTable(torch.cat([torch.zeros(1, V), torch.eye(V)]).double(), None)
    targets, seen = np.arange(1, V), (np.empty(0, np.int64), np.zeros(V, np.int64))
    found = fit_weights((states, table), (states, table), np.zeros(V + 1, np.int64), 1, targets, seen)
    assert found.log_likelihood > -1e-4 and np.isfinite(found.weights).all()


def test_users_who_have_seen_their_target_are_left_out(lab, monkeypatch):
    first, second = (lab.make_model(lab.dataset, arm="matched", seed=seed) for seed in (0, 1))
    model = Join(first, second, torch.from_numpy(lab.dataset.training_counts), by_count=True).double()
    before = model.weights.clone()
    found = fit_join(model, lab.dataset)
    split = lab.dataset
    ends = split.offsets[1:] - 2
    new = [split.items[stop] not in split.items[start:stop] for start, stop in zip(split.offsets, ends, strict=False)]
    assert found.targets.sum() == sum(new) < split.num_users
    assert found.log_likelihood >= max(found.alone) and torch.equal(model.weights, before)
    monkeypatch.setattr(join_weights, "FITTED_USERS", 5)
    monkeypatch.setattr(join_weights, "FITTED_SCORES", 0)
    few, again = fit_join(model, lab.dataset), fit_join(model, lab.dataset)
    assert few.targets.sum() == 5 and np.array_equal(few.weights, again.weights)


def test_data_whose_users_always_repeat_themselves_are_refused(lab):
    dataset = lab.make_dataset(num_items=1)
    first, second = (lab.make_model(dataset, arm="matched", seed=seed) for seed in (0, 1))
    model = Join(first, second, torch.from_numpy(dataset.training_counts), by_count=False)
    with pytest.raises(UserError, match="every validation target of data set 'tiny' is an item that its user has seen"):
        fit_join(model, dataset)
