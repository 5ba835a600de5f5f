"""Packed batches: nothing lost, nothing doubled, little padding, and the same order whenever it is asked for."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recbft.datasets.batches import TrainingBatches, history_batches, pack_histories

lengths_of_histories = st.lists(st.integers(1, 12), min_size=1, max_size=40)
few = settings(max_examples=40)


def log_of(lengths, seed=0):
    """Items, start and stop of histories side by side; item numbers differ event by event."""
    stop = np.cumsum(lengths).astype(np.int64)
    items = np.random.default_rng(seed).permutation(int(stop[-1])).astype(np.int64) + 1
    return items, stop - np.asarray(lengths, dtype=np.int64), stop


def unpacked(batch, values=None):
    """Each history of a batch as a list, by its segment and position alone."""
    values = batch.items if values is None else values
    histories = []
    for number in range(len(batch.last)):
        own = batch.segment == number
        order = batch.position[own].argsort()
        assert batch.position[own][order].tolist() == list(range(int(own.sum())))
        histories.append(values[own][order].tolist())
    return histories


def training_batches(lengths, *, times=None, **how):
    items, start, stop = log_of(lengths)
    how = {"max_length": 50, "batch_size": 4, "seed": 0, **how}
    return items, TrainingBatches(items, start, stop - 2, times=times, **how)


@few
@given(lengths_of_histories)
def test_every_event_is_packed_exactly_once_and_no_history_is_cut_over_two_rows(lengths):
    items, start, stop = log_of(lengths)
    batch = pack_histories(items, start, stop)
    real = batch.segment >= 0
    assert sorted(batch.items[real].tolist()) == sorted(items.tolist())
    assert unpacked(batch) == [items[a:b].tolist() for a, b in zip(start, stop, strict=True)]
    assert not batch.items[~real].any() and not batch.position[~real].any()
    assert batch.time is None and batch.target is None
    for number in range(len(lengths)):
        rows, columns = (batch.segment == number).nonzero(as_tuple=True)
        assert len(rows.unique()) == 1
        assert columns.tolist() == list(range(int(columns[0]), int(columns[0]) + lengths[number]))
    assert batch.last.dtype == torch.int64
    assert batch.items.flatten()[batch.last].tolist() == items[stop - 1].tolist()
    assert batch.segment.flatten()[batch.last].tolist() == list(range(len(lengths)))


@few
@given(lengths_of_histories)
def test_rows_are_as_wide_as_the_longest_history_and_few_are_wasted(lengths):
    batch = pack_histories(*log_of(lengths))
    num_rows, width = batch.items.shape
    assert width == max(lengths)
    fill = [int((batch.segment[row] >= 0).sum()) for row in range(num_rows)]
    assert min(fill) > 0
    assert all(one + two > width for i, one in enumerate(fill) for two in fill[i + 1 :]), "two rows could be one"


@few
@given(lengths_of_histories, st.integers(1, 14), st.integers(1, 9))
def test_evaluation_reads_the_last_events_of_every_history_in_order(lengths, max_length, at_once):
    items, start, stop = log_of(lengths)
    found = []
    for batch in history_batches(items, start, stop, max_length=max_length, histories_per_batch=at_once):
        assert len(batch.last) <= at_once and batch.items.shape[1] <= max_length and batch.target is None
        found += unpacked(batch)
    assert found == [items[a:b][-max_length:].tolist() for a, b in zip(start, stop, strict=True)]


@few
@given(st.lists(st.integers(3, 12), min_size=2, max_size=30), st.integers(1, 14), st.integers(1, 9))
def test_training_targets_are_the_next_items_of_the_training_events(lengths, max_length, batch_size):
    if max(lengths) < 4:
        lengths = [*lengths, 4]
    items, batches = training_batches(lengths, max_length=max_length, batch_size=batch_size)
    _, start, stop = log_of(lengths)
    expected = []
    for a, b in zip(start, stop - 2, strict=True):
        training = items[a:b].tolist()
        if len(training) >= 2:
            expected.append((training[:-1][-max_length:], training[1:][-max_length:]))
    epoch = list(batches.epoch(0))
    found = [pair for batch in epoch for pair in zip(unpacked(batch), unpacked(batch, batch.target), strict=True)]
    assert sorted(found) == sorted(expected)
    assert not any(batch.target[batch.segment < 0].any() for batch in epoch)
    assert batches.num_batches == len(epoch) and all(len(batch.last) <= batch_size for batch in epoch)
    assert batches.num_tokens == batches.num_targets == sum(int((batch.target > 0).sum()) for batch in epoch)


def test_neither_validation_nor_test_items_are_ever_trained_on():
    lengths = [3, 4, 5, 9]
    items, batches = training_batches(lengths)
    held_out = {int(items[s - back]) for s in np.cumsum(lengths) for back in (1, 2)}
    for batch in batches.epoch(0):
        assert held_out.isdisjoint([*batch.items.flatten().tolist(), *batch.target.flatten().tolist()])


def test_users_with_fewer_than_two_training_events_are_left_out():
    items, batches = training_batches([3, 4, 3, 5])
    (batch,) = batches.epoch(0)
    assert sorted(unpacked(batch)) == sorted([[items[3]], [items[10], items[11]]])
    assert training_batches([3, 3])[1].num_batches == 0
    assert list(training_batches([3, 3])[1].epoch(0)) == []


def drawn(batches, epoch):
    return [history for batch in batches.epoch(epoch) for history in unpacked(batch)]


def test_the_order_depends_on_seed_and_epoch_alone():
    seed = 7
    lengths = [4 + n % 5 for n in range(30)]
    one, two = (training_batches(lengths, seed=seed)[1] for _ in range(2))
    np.random.seed(5)
    before, torch_before = np.random.get_state()[1].copy(), torch.get_rng_state()
    for epoch in (2, 0, 1, 0):  # nor does which epochs were drawn before
        assert drawn(one, epoch) == drawn(two, epoch)
    assert drawn(one, 0) != drawn(one, 1)
    assert drawn(one, 0) != drawn(training_batches(lengths, seed=seed + 1)[1], 0)
    assert sorted(drawn(one, 0)) == sorted(drawn(one, 1))
    assert (np.random.get_state()[1] == before).all() and torch.equal(torch.get_rng_state(), torch_before)


def test_times_travel_with_their_events():
    lengths = [5, 7, 4, 6]
    items, start, stop = log_of(lengths)
    times = items * 10**12 + 7  # beyond what float32 or int32 could hold
    for batch in (
        pack_histories(items, start, stop, times=times),
        *history_batches(items, start, stop, times=times, max_length=3, histories_per_batch=2),
        *training_batches(lengths, times=times)[1].epoch(0),
    ):
        real = batch.segment >= 0
        assert batch.time.dtype == torch.int64
        assert torch.equal(batch.time[real], batch.items[real] * 10**12 + 7) and not batch.time[~real].any()


def test_a_batch_moved_to_a_device_is_the_same_batch():
    items, start, stop = log_of([3, 2])
    for batch in (
        pack_histories(items, start, stop),
        pack_histories(items, start, stop - 1, times=items, with_targets=True),
        pack_histories(items, start, stop - 1, times=items * 3, with_next_times=True),
    ):
        assert batch.to("cpu") is batch
        moved = batch.to("cpu:0")  # to torch another device than "cpu", so that all is copied
        for one, two in zip(batch, moved, strict=True):
            assert (one is None and two is None) or torch.equal(one, two)


@few
@given(lengths_of_histories, st.data())
def test_some_rows_of_a_batch_are_a_batch_of_the_histories_in_them(lengths, data):
    items, start, stop = log_of(lengths)
    batch = pack_histories(items, start, stop, times=items * 3)
    num_rows, width = batch.items.shape
    rows = torch.tensor(data.draw(st.lists(st.sampled_from(range(num_rows)), min_size=1, unique=True)))
    some, all_histories = batch.of_rows(rows), unpacked(batch)
    left = [number for number, last in enumerate(batch.last.tolist()) if last // width in rows.tolist()]
    assert unpacked(some) == [all_histories[number] for number in left]
    assert some.items.flatten()[some.last].tolist() == [all_histories[number][-1] for number in left]
    assert some.segment.flatten()[some.last].tolist() == list(range(len(left)))
    assert torch.equal(some.segment < 0, batch.segment[rows] < 0)
    assert torch.equal(some.time, some.items * 3) and some.target is None
