"""oneDNN keeps a program for every shape it has met, so products whose number of rows is ever another have few."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recbft.evaluation.ranks import full_ranks
from recbft.evaluation.top_k import top_k
from recbft.kernels import product as products
from recbft.kernels.cross_entropy import full_cross_entropy
from recbft.models.contract import ItemTable

V, D, ROWS = 300, 8, 128


@pytest.fixture
def met(monkeypatch):
    """The shapes that the library has met, on a machine that has it or not."""
    shapes = set()

    def linear(x, weight, bias, *_):
        shapes.add((*x.shape, len(weight)))
        y = x @ weight.T
        return y if bias is None else y + bias

    monkeypatch.setattr(products, "_ONEDNN", linear)
    return shapes


@given(size=st.integers(0, 10**6))
def test_a_common_size_is_a_little_larger_and_stays_as_it_is(size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "_ONEDNN", products.torch.mm)
        found = products.common_size(size, torch.empty(0))
        assert size <= found <= max(9 * size / 8, size + 15)
        assert products.common_size(found, torch.empty(0)) == found
        assert products.common_size(size, torch.empty(0, dtype=torch.float64)) == size  # which is not oneDNN's
        patch.setattr(products, "_ONEDNN", None)
        assert products.common_size(size, torch.empty(0)) == size


def test_there_are_few_common_sizes(met):
    assert len({products.common_size(size, torch.empty(0)) for size in range(1, 5001)}) < 70


@pytest.mark.parametrize("longest_row", [10**9, 0], ids=["blocks", "tiles"])
def test_losses_of_many_batches_meet_few_shapes_and_are_right(met, monkeypatch, longest_row):
    monkeypatch.setattr("recbft.kernels.cross_entropy.torch.BLOCK_ELEMENTS", ROWS * V)
    monkeypatch.setattr("recbft.kernels.cross_entropy.torch.LONGEST_ROW", longest_row)
    monkeypatch.setattr("recbft.kernels.cross_entropy.torch.POSITIONS", ROWS)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(V, D, generator=generator).requires_grad_()
    for N in range(1, 3 * ROWS, 17):
        states = torch.randn(N, D, generator=generator).requires_grad_()
        target = torch.randint(V, (N,), generator=generator)
        fast, plain = (
            [loss, *torch.autograd.grad(loss, [states, weight])]
            for loss in (full_cross_entropy(states, weight, target, impl=impl) for impl in ("torch", "reference"))
        )
        for found, expected in zip(fast, plain, strict=True):
            torch.testing.assert_close(found, expected)
    assert 0 < len(met) <= 3 * 8 + 16


def test_lists_and_ranks_of_any_number_of_users_meet_few_shapes_and_are_right(met, monkeypatch):
    monkeypatch.setattr("recbft.evaluation.score_blocks._CACHED_SCORES", ROWS * V)
    rng = np.random.default_rng(0)
    table = ItemTable(torch.randn(V + 1, D, generator=torch.Generator().manual_seed(1)), None)
    for num_users in range(1, 3 * ROWS, 23):
        states = torch.randn(num_users, D, generator=torch.Generator().manual_seed(num_users))
        scores = (states @ table.weight[1:].T).numpy()
        targets = rng.integers(1, V + 1, num_users)
        ranks = full_ranks(states, table, targets, np.empty(0, np.int64), np.zeros(num_users + 1, np.int64))
        own = np.take_along_axis(scores, targets[:, None] - 1, axis=1)
        assert (ranks.unfiltered == (scores >= own).sum(axis=1)).all()
        assert (top_k(states, table, 3).items == 1 + np.argsort(-scores, axis=1)[:, :3]).all()
    assert 0 < len(met) <= 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gained", [True, False])
@pytest.mark.parametrize(("N", "inputs", "outputs"), [(1, 3, 2), (70, 40, 8), (5, 2, 9)])
def test_an_updated_product_is_that_of_its_reference_and_so_are_its_gradients(N, inputs, outputs, gained, dtype):
    generator = torch.Generator().manual_seed(N)
    x, weight, own, gain, grad = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((N, inputs), (outputs, inputs), (N, outputs), (N,), (N, outputs))
    )
    found = {}
    for impl, kind in (("torch", dtype), ("reference", torch.float64)):
        leaves = [y.to(kind).requires_grad_() for y in (weight, own, *([gain] if gained else []))]
        y = products.updated_product(x.to(kind), *leaves, impl=impl)
        found[impl] = [y.detach(), *torch.autograd.grad(y, leaves, grad.to(kind))]
    near = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    for one, right in zip(found["torch"], found["reference"], strict=True):
        torch.testing.assert_close(one.double(), right, **near)
