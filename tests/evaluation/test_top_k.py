from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recbft.errors import RunError, UserError
from recbft.evaluation.probability import Calibration
from recbft.evaluation.top_k import top_k
from recbft.models.contract import ItemTable


def jagged(lists):
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in lists])]).astype(np.int64)
    return np.array([item for one in lists for item in one], dtype=np.int64), offsets


def best_by_hand(scores, k, excluded):
    """Sort every item by score, best first, and by index; scores (N, V + 1)."""
    rows = zip(scores, excluded, strict=True)
    return [
        sorted((item for item in range(1, len(row)) if item not in out), key=lambda item, row=row: (-row[item], item))[
            :k
        ]
        for row, out in rows
    ]


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    N=st.integers(1, 12),
    V=st.integers(3, 40),
    high=st.integers(0, 4),
    memory_mb=st.sampled_from([256, 1e-6, 1e-5, 1e-4, 1e-3]),
    data=st.data(),
)
def test_the_best_are_those_of_a_full_sort_with_ties_by_the_smaller_index(seed, N, V, high, memory_mb, data):
    rng = np.random.default_rng(seed)
    states = torch.tensor(rng.integers(-high, high + 1, (N, 2)), dtype=torch.float32)
    table = ItemTable(
        torch.tensor(rng.integers(-high, high + 1, (V + 1, 2)), dtype=torch.float32),
        torch.tensor(rng.integers(-high, high + 1, V + 1), dtype=torch.float32),
    )
    excluded = [rng.integers(1, V + 1, rng.integers(0, V)).tolist() for _ in range(N)]
    k = data.draw(st.integers(1, V + 2))
    items, offsets = jagged(excluded)
    best = top_k(states, table, k, exclude_items=items, exclude_offsets=offsets, memory_mb=memory_mb)
    scores = (states @ table.weight.T + table.bias).tolist()
    for row, items, values, expected in zip(
        scores, best.items, best.scores, best_by_hand(scores, k, excluded), strict=True
    ):
        assert items.tolist() == expected + [0] * (k - len(expected))
        assert values[: len(expected)].tolist() == [row[item] for item in expected]


@pytest.mark.parametrize("memory_mb", [256, 1e-5])
@pytest.mark.parametrize("among", [None, [2, 5, 6, 11]])
@pytest.mark.parametrize("seed", range(5))
def test_lists_hold_only_what_each_user_may_have(seed, among, memory_mb):
    rng = np.random.default_rng(seed)
    states, weight = torch.tensor(rng.normal(size=(6, 3))), torch.tensor(rng.normal(size=(13, 3)))
    allowed = [rng.choice(np.arange(13), rng.integers(0, 9)).tolist() for _ in range(5)] + [list(range(1, 13))]
    seen = [rng.integers(1, 13, rng.integers(0, 4)).tolist() for _ in range(6)]
    barred = [9, 2]
    (items, offsets), (only, only_offsets) = jagged(seen), jagged(allowed)
    best = top_k(
        states, ItemTable(weight, None), 4, exclude_items=items, exclude_offsets=offsets, only_items=only,
        only_offsets=only_offsets, among=None if among is None else np.array(among), barred=np.array(barred),
        calibration=Calibration(1.0, 0.2), memory_mb=memory_mb,
    )  # fmt: skip
    scores = (states @ weight.T).numpy()
    out = [
        {item for item in range(1, 13) if item not in own or item in (*gone, *barred) or item not in (among or own)}
        for own, gone in zip(allowed, seen, strict=True)
    ]
    for row, expected, found, chances in zip(
        scores, best_by_hand(scores.tolist(), 12, out), best.items, best.probabilities, strict=True
    ):
        assert found.tolist() == (expected + [0] * 4)[:4]
        odds = np.exp(row[expected])
        chance = 0.8 * odds / odds.sum() + 0.2 / max(len(expected), 1)
        np.testing.assert_allclose(chances[: len(expected)], chance[:4], rtol=1e-12)


@pytest.mark.parametrize("compiled", ["0", "1"])
@pytest.mark.parametrize(
    ("memory_mb", "dtype", "among", "temperature"),
    [(256, torch.float32, None, 0.01), (1e-5, torch.float64, None, 1.0), (1e-4, torch.float32, [2, 5, 6, 11], 7.5),
     (256, torch.float64, [2, 5, 6, 11], 0.01), (1e-5, torch.float32, None, 7.5)],
)  # fmt: skip
def test_probabilities_are_those_of_the_items_left(monkeypatch, compiled, memory_mb, dtype, among, temperature):
    monkeypatch.setenv("RECBFT_COMPILED", compiled)
    rng = np.random.default_rng(0)
    states, weight, bias = (torch.tensor(rng.normal(size=size)) for size in ((6, 3), (13, 3), 13))
    seen = [[1, 2, 3, 4], [], [5, 5], [12], [3], list(range(1, 13))]  # the first block has nothing left of the first
    items, offsets = jagged(seen)
    barred = np.array([9, 2])
    best = top_k(
        states.to(dtype),
        ItemTable(weight.to(dtype), bias.to(dtype)),
        5,
        exclude_items=items,
        exclude_offsets=offsets,
        among=None if among is None else np.array(among),
        barred=barred,
        calibration=Calibration(temperature, 0.2),
        memory_mb=memory_mb,
    )
    scores = (states @ weight.T + bias).numpy() / temperature
    for row, own, found, listed in zip(scores, seen, best.probabilities, best.items, strict=True):
        left = [item for item in (among or range(1, 13)) if item not in own and item not in barred]
        odds = {item: np.exp(row[item] - max((row[i] for i in left), default=0)) for item in left}
        expected = [0.8 * odds[item] / sum(odds.values()) + 0.2 / len(left) for item in listed if item]
        tolerance = (1e-4 if temperature < 1 else 2e-6) if dtype is torch.float32 else 1e-12
        np.testing.assert_allclose(found[: len(expected)], expected, rtol=tolerance)
        assert np.isnan(found[len(expected) :]).all()
    assert best.probabilities.dtype == np.float64


def test_probabilities_change_nothing_else_and_those_of_all_items_sum_to_one():
    rng = np.random.default_rng(1)
    states, table = torch.tensor(rng.normal(size=(50, 8))), ItemTable(torch.tensor(rng.normal(size=(301, 8))), None)
    plain, best = top_k(states, table, 300), top_k(states, table, 300, calibration=Calibration(0.7, 0.3))
    for name in ("items", "scores", "lengths"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(best, name))
    assert np.isnan(plain.probabilities).all()
    np.testing.assert_allclose(best.probabilities.sum(axis=1), 1, rtol=1e-12)


@pytest.mark.parametrize(("memory_mb", "k"), [(256, 3), (1e-5, 5), (256, 9)])
def test_a_user_with_fewer_items_left_gets_those_and_then_padding(memory_mb, k):
    rng = np.random.default_rng(0)
    states, table = torch.tensor(rng.normal(size=(4, 3))), ItemTable(torch.tensor(rng.normal(size=(6, 3))), None)
    seen = [[1, 2], [], [5, 3, 1, 2, 4], [4]]
    items, offsets = jagged(seen)
    best = top_k(states, table, k, exclude_items=items, exclude_offsets=offsets, barred=np.array([4]),
                 memory_mb=memory_mb)  # fmt: skip
    expected = best_by_hand((states @ table.weight.T).tolist(), k, [[*own, 4] for own in seen])
    assert best.lengths.tolist() == [len(own) for own in expected] == [min(k, left) for left in (2, 4, 0, 4)]
    for items, scores, own in zip(best.items, best.scores, expected, strict=True):
        assert items.tolist() == own + [0] * (k - len(own))
        assert np.isnan(scores[len(own) :]).all() and np.isfinite(scores[: len(own)]).all()


def test_no_items_are_refused():
    with pytest.raises(UserError, match="k is 0; ask for at least 1 item"):
        top_k(torch.zeros(2, 1), ItemTable(torch.zeros(6, 1), None), 0)


def test_nan_scores_are_refused():
    states = torch.zeros(3, 1)
    states[1] = torch.nan
    with pytest.raises(RunError, match="NaN for 1 of 3 users, first for row 1"):
        top_k(states, ItemTable(torch.ones(6, 1), None), 2)


@pytest.mark.parametrize("among", [[3], [1, 4, 5, 9, 12, 13], list(range(1, 14)), []], ids=len)
@pytest.mark.parametrize("barred", [None, [5, 8, 9]])
def test_candidates_are_ranked_as_among_all_items(among, barred):
    rng = np.random.default_rng(5)
    states = torch.from_numpy(rng.normal(size=(6, 3)))
    table = ItemTable(torch.from_numpy(rng.normal(size=(14, 3)).round(1)), torch.from_numpy(rng.normal(size=14)))
    seen = [rng.integers(0, 14, rng.integers(0, 6)).tolist() for _ in range(6)]
    items, offsets = np.array([item for own in seen for item in own], np.int64), np.cumsum([0, *map(len, seen)])
    given = {"exclude_items": items, "exclude_offsets": offsets, "memory_mb": 0.001}
    others = sorted({*range(1, 14)} - {*among} | {*(barred or [])})
    whole = top_k(states, table, 4, barred=np.array(others), **given)
    best = top_k(
        states, table, 4, among=np.array(among, np.int64), barred=None if barred is None else np.array(barred), **given
    )
    assert best.items.tolist() == whole.items.tolist()
    assert best.lengths.tolist() == whole.lengths.tolist()
    np.testing.assert_allclose(best.scores, whole.scores, rtol=1e-12)
