"""Batches of several seeds side by side: every token is there once, and knows where it stood."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from recbft.datasets.batches import pack_histories
from recbft.datasets.side_by_side import lay_side_by_side


def batch_of(lengths, *, seed=0, times=True, append=None):
    rng = np.random.default_rng(seed)
    lengths = np.array(lengths)
    stop = np.cumsum(lengths + 1) - 1  # one event more, as the last target
    items = rng.integers(1, 90, int(stop[-1]) + 1)
    clock = rng.integers(1, 10**6, items.size) if times else None
    return pack_histories(items, stop - lengths, stop, times=clock, with_targets=append is None, append=append)


@given(st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=20), min_size=1, max_size=4))
def test_every_token_is_there_once_with_all_that_belongs_to_it(lengths):
    batches = [batch_of(own, seed=n) for n, own in enumerate(lengths)]
    side = lay_side_by_side(batches)
    S, B, T = len(batches), side.num_rows, side.batch.items.shape[1]
    assert side.num_seeds == S and side.batch.items.shape == (S * B, T) and max(map(max, lengths)) == T
    first = 0
    for n, own in enumerate(batches):
        rows = slice(n * B, (n + 1) * B)
        valid = side.batch.segment[rows].flatten() >= 0
        origin = side.origin[n][valid]
        assert sorted(origin.tolist()) == (own.segment.flatten() >= 0).nonzero().flatten().tolist()
        assert side.sizes[n] == own.items.numel() and side.widths[n] == own.items.shape[1]
        for name in ("items", "position", "time", "target"):
            here = getattr(side.batch, name)[rows].flatten()
            assert torch.equal(here[valid], getattr(own, name).flatten()[origin]), name
            assert not here[~valid].any(), name
        assert torch.equal(side.batch.segment[rows].flatten()[valid], own.segment.flatten()[origin] + first)
        first += len(own.last)
    last = side.batch.last
    assert torch.equal(side.batch.segment.flatten()[last], torch.arange(first))
    flat = torch.cat([own.items.flatten()[own.last] for own in batches])
    assert torch.equal(side.batch.items.flatten()[last], flat)


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=15), min_size=1, max_size=3))
def test_a_history_stands_in_one_row_in_order(lengths):
    side = lay_side_by_side([batch_of(own) for own in lengths])
    segment, position = side.batch.segment.numpy(), side.batch.position.numpy()
    for history in range(sum(map(len, lengths))):
        row, column = np.nonzero(segment == history)
        assert len(set(row)) == 1 and (np.diff(column) == 1).all()
        assert position[row, column].tolist() == list(range(len(row)))


def test_what_batches_lack_is_lacking_side_by_side():
    side = lay_side_by_side([batch_of([3, 1], times=False), batch_of([2], times=False)])
    assert side.batch.time is None and side.batch.next_time is None and side.batch.target is not None
    assert lay_side_by_side([batch_of([2], append=95)]).batch.target is None
