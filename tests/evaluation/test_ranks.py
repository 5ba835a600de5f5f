from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recbft.errors import RunError, UserError
from recbft.evaluation import ranks as ranking
from recbft.evaluation import score_blocks
from recbft.evaluation.ranks import full_ranks
from recbft.evaluation.score_blocks import block_shape, spans
from recbft.evaluation.top_k import top_k
from recbft.models.contract import ItemTable

TINY = 1e-4  # MB: a block of 26 single-precision scores, so that users and items are cut into many pieces


def ranks_by_hand(scores, targets, seen):
    """Item by item, for scores (N, V + 1) whose column 0 is padding."""
    unfiltered, filtered = [], []
    for row, target, ignored in zip(scores, targets, seen, strict=True):
        others = [item for item in range(1, len(row)) if item != target]
        unfiltered.append(1 + sum(row[item] > row[target] or row[item] == row[target] for item in others))
        filtered.append(1 + sum(row[item] >= row[target] for item in others if item not in ignored))
    return unfiltered, filtered


def jagged(lists):
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in lists])]).astype(np.int64)
    return np.array([item for one in lists for item in one], dtype=np.int64), offsets


def draw_case(seed, *, N=7, V=23, D=3, high=3, bias=True, dtype=torch.float32):
    """Whole-number states and weights: every score is exact, and ties abound."""
    rng = np.random.default_rng(seed)
    states = torch.tensor(rng.integers(-high, high + 1, (N, D)), dtype=dtype)
    weight = torch.tensor(rng.integers(-high, high + 1, (V + 1, D)), dtype=dtype)
    biases = torch.tensor(rng.integers(-high, high + 1, V + 1), dtype=dtype) if bias else None
    targets = rng.integers(1, V + 1, N)
    seen = [rng.integers(1, V + 1, rng.integers(0, 2 * V)).tolist() for _ in range(N)]
    return states, ItemTable(weight, biases), targets, seen


def scores_of(states, table):
    scores = states.double() @ table.weight.double().T
    return scores if table.bias is None else scores + table.bias.double()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("bias", "memory_mb", "dtype"),
    [(True, 256, torch.float32), (False, TINY, torch.float32), (True, TINY, torch.float64), (False, 256, torch.float64),
     (True, TINY, torch.bfloat16)],
)  # fmt: skip
def test_ranks_are_those_counted_item_by_item(seed, bias, memory_mb, dtype):
    states, table, targets, seen = draw_case(seed, bias=bias, dtype=dtype)
    ranks = full_ranks(states, table, targets, *jagged(seen), memory_mb=memory_mb)
    unfiltered, filtered = ranks_by_hand(scores_of(states, table).tolist(), targets, seen)
    assert ranks.unfiltered.tolist() == unfiltered and ranks.filtered.tolist() == filtered
    assert ranks.unfiltered.dtype == ranks.filtered.dtype == np.int64


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    N=st.integers(1, 20),
    V=st.integers(1, 40),
    high=st.integers(0, 4),
    memory_mb=st.sampled_from([1e-6, 1e-5, 3e-5, TINY, 1e-3, 0.01]),
)
def test_ranks_do_not_depend_on_how_the_scores_are_cut(seed, N, V, high, memory_mb):
    states, table, targets, seen = draw_case(seed, N=N, V=V, high=high)
    whole = full_ranks(states, table, targets, *jagged(seen))
    cut = full_ranks(states, table, targets, *jagged(seen), memory_mb=memory_mb)
    assert whole.unfiltered.tolist() == cut.unfiltered.tolist() and whole.filtered.tolist() == cut.filtered.tolist()
    assert (whole.filtered >= 1).all() and (whole.filtered <= whole.unfiltered).all() and (whole.unfiltered <= V).all()


@pytest.mark.parametrize("memory_mb", [256, 0.02])
def test_items_with_equal_rows_tie_among_others_that_differ(memory_mb):
    generator = torch.Generator().manual_seed(0)
    states, weight = torch.randn(50, 16, generator=generator), torch.randn(101, 16, generator=generator)
    equal = [7, 30, 60, 100]
    weight[equal] = weight[60].clone()
    weight[5], weight[6] = 0.0, -0.0
    targets = np.resize(equal, 50)
    ranks = full_ranks(states, ItemTable(weight, None), targets, *jagged([[100, 100, 30]] * 50), memory_mb=memory_mb)
    scores = states.double() @ weight.double().T
    better = (scores > scores[:, [60]]).numpy()
    better[:, [0, *equal]] = False
    assert ranks.unfiltered.tolist() == (better.sum(1) + 4).tolist()
    num_masked = np.where(np.isin(targets, [30, 100]), 1, 2)
    assert ranks.filtered.tolist() == (better.sum(1) + 4 - num_masked).tolist()


def test_ranks_leave_the_table_and_the_states_as_they_were():
    states, table, targets, seen = draw_case(0)
    weight = table.weight.clone().requires_grad_()
    full_ranks(states.requires_grad_(), ItemTable(weight, table.bias), targets, *jagged(seen))
    assert torch.equal(weight, table.weight) and weight.requires_grad


def test_a_target_counts_though_its_score_was_rounded_up_in_another_product(monkeypatch):
    own = ranking._own_scores
    monkeypatch.setattr(ranking, "_own_scores", lambda *given: own(*given) * (1 + 1e-6))
    table, targets = ItemTable(torch.arange(51.0)[:, None], None), np.array([50, 49, 2, 1])
    found = full_ranks(torch.ones(4, 1), table, targets, *jagged([[]] * 4), memory_mb=TINY)
    assert found.unfiltered.tolist() == [1, 2, 49, 50]


@pytest.mark.parametrize("memory_mb", [256, TINY])
@pytest.mark.parametrize("broken", ["states", "weight", "bias"])
def test_nan_scores_are_refused_with_their_number_and_the_first(memory_mb, broken):
    states, (weight, bias), targets, seen = draw_case(1)
    if broken == "states":
        states[[2, 5], 0] = torch.nan
        said = "NaN for 2 of 7 users, first for row 2;"
    else:
        (weight if broken == "weight" else bias)[9] = torch.nan
        said = "NaN for 7 of 7 users, first for row 0;"
    with pytest.raises(RunError, match=said):
        full_ranks(states, ItemTable(weight, bias), targets, *jagged(seen), memory_mb=memory_mb)


def test_infinite_scores_are_ranked_and_their_difference_is_refused():
    states = torch.tensor([[1e38, 0.0], [torch.inf, torch.inf]])
    weight = torch.tensor([[0.0, 0.0], [1e38, -1e38], [1.0, 1.0]])
    ranks = full_ranks(states[:1], ItemTable(weight, None), np.array([2]), *jagged([[]]))
    assert ranks.unfiltered.tolist() == [2]
    with pytest.raises(RunError, match="1 of 2 users, first for row 1"):
        full_ranks(states, ItemTable(weight, None), np.array([2, 2]), *jagged([[], []]))


@pytest.mark.parametrize("padding", [torch.nan, torch.inf])
def test_padding_is_never_a_candidate(padding):
    weight = torch.tensor([[padding], [1.0], [0.0]])
    ranks = full_ranks(torch.ones(1, 1), ItemTable(weight, None), np.array([2]), *jagged([[]]))
    assert ranks.unfiltered.tolist() == [2]


@pytest.mark.parametrize("memory_mb", [0, float("nan")])
def test_memory_that_is_not_positive_is_refused(memory_mb):
    states, table, targets, seen = draw_case(0)
    with pytest.raises(UserError, match="give a positive number, such as 256"):
        full_ranks(states, table, targets, *jagged(seen), memory_mb=memory_mb)


@given(
    N=st.integers(0, 10**6), V=st.integers(1, 10**9), memory_mb=st.floats(1e-5, 1e5), cached=st.booleans()
)  # fmt: skip
def test_a_block_fits_into_the_memory(N, V, memory_mb, cached):
    rows, width = block_shape(N, V, 4, memory_mb, cached=cached)
    assert rows >= 1 and 1 <= width <= V and 4 * rows * width <= max(4, memory_mb * 2**20)


@pytest.mark.parametrize(
    ("num_users", "num_items", "memory_mb", "shape"),
    [
        (1000, 10_000, 256, (160, 10_000)),  # as many users as a processor's cache has room for
        (1000, 100_000, 256, (64, 100_000)),  # as few as a product needs
        (1000, 10_000, 4, (104, 10_000)),  # as many as the memory has room for
        (5, 10_000, 256, (5, 10_000)),
        (10, 10_000_000, 1, (10, 26_214)),  # tiles
        (0, 0, 256, (1, 1)),
    ],
)
def test_a_block_holds_all_items_where_enough_users_fit_beside_them(num_users, num_items, memory_mb, shape):
    assert block_shape(num_users, num_items, 4, memory_mb) == shape


@pytest.mark.parametrize(
    ("num_users", "num_items", "memory_mb", "shape"),
    [
        (20_000, 10_000, 256, (6_710, 10_000)),
        (1000, 10_000, 256, (1000, 10_000)),
        (1000, 10_000_000, 256, (64, 2**20)),  # tiles
    ],
)
def test_a_block_on_a_gpu_is_as_large_as_the_memory(num_users, num_items, memory_mb, shape):
    assert block_shape(num_users, num_items, 4, memory_mb, cached=False) == shape


@given(N=st.integers(2, 10**6), V=st.integers(1, 10**7), memory_mb=st.floats(1, 1e4))
def test_a_block_of_several_users_is_memory_that_is_kept_for_the_next_one(N, V, memory_mb):
    rows, width = block_shape(N, V, 4, memory_mb)
    assert 4 * rows * width < 2**25


@pytest.mark.parametrize(("seed", "bias", "V"), [(0, False, 700), (1, True, 1001)])
def test_a_catalogue_too_large_for_one_block_is_ranked_by_the_same_scores(seed, bias, V, monkeypatch):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(V + 1, 16, generator=generator, dtype=torch.float64)
    table = ItemTable(weight, torch.randn(V + 1, generator=generator, dtype=torch.float64) if bias else None)
    states = torch.randn(70, 16, generator=generator, dtype=torch.float64)
    targets = torch.randint(1, V + 1, (70,), generator=generator).numpy()
    seen = jagged([[int(target), 5, 7] for target in targets])
    whole = full_ranks(states, table, targets, *seen), top_k(states, table, 20)
    monkeypatch.setattr(score_blocks, "_LARGEST_KEPT", 2**12)
    monkeypatch.setattr(score_blocks, "_CACHED_SCORES", 2**13)
    assert block_shape(70, V, 8, 256)[1] < V
    tiles = full_ranks(states, table, targets, *seen), top_k(states, table, 20)
    assert all((x == y).all() for x, y in zip(whole[0], tiles[0], strict=True))
    assert (whole[1].items == tiles[1].items).all()


@given(num=st.integers(0, 500), size=st.integers(1, 600))
def test_spans_cover_everything_once_in_pieces_of_about_one_size(num, size):
    pieces = list(spans(num, size))
    assert [place for piece in pieces for place in range(piece.start, piece.stop)] == list(range(num))
    lengths = [piece.stop - piece.start for piece in pieces]
    assert not lengths or (max(lengths) <= size and max(lengths) - min(lengths) <= 1)
