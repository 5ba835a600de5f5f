"""What an epoch reads: every training event a target once, pieces that depend on seed and epoch alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recbft.datasets.batches import ClozeBatches, TrainingBatches
from recbft.datasets.samples import SAMPLE_KINDS, Samples
from tests.datasets.test_batches import drawn, log_of, unpacked

MASK = 10_000
lengths_of_histories = st.lists(st.integers(1, 30), min_size=1, max_size=20)
few = settings(max_examples=60)


def next_items(lengths, samples, *, max_length=4, batch_size=3, seed=0):
    items, start, stop = log_of(lengths)
    batches = TrainingBatches(
        items, start, stop, max_length=max_length, batch_size=batch_size, seed=seed, samples=samples
    )
    return items, start, stop, batches


def pairs(batch):
    """The (inputs, targets) of each piece of a batch."""
    return list(zip(unpacked(batch), unpacked(batch, batch.target), strict=True))


@few
@given(lengths_of_histories, st.integers(1, 9), st.integers(0, 3))
def test_every_event_but_the_first_is_a_target_once_in_windows_that_lie_side_by_side(lengths, max_length, epoch):
    items, start, stop, batches = next_items(lengths, "windows", max_length=max_length)
    found = [pair for batch in batches.epoch(epoch) for pair in pairs(batch)]
    targets = sorted(target for _, own in found for target in own)
    assert targets == sorted(x for a, b in zip(start, stop, strict=True) for x in items[a + 1 : b].tolist())
    histories = [items[a:b].tolist() for a, b in zip(start, stop, strict=True)]
    for inputs, own in found:
        assert 1 <= len(inputs) <= max_length and inputs[1:] == own[:-1]
        joined = [*inputs, own[-1]]
        assert any(joined == history[at : at + len(joined)] for history in histories for at in range(len(history)))
    assert batches.num_targets == len(targets)


@few
@given(lengths_of_histories, st.integers(1, 9))
def test_a_prefix_of_every_event_has_its_target_at_the_last_token_alone(lengths, max_length):
    items, start, stop, batches = next_items(lengths, "prefixes", max_length=max_length)
    expected = [
        (items[max(a, t - max_length) : t].tolist(), items[t])
        for a, b in zip(start, stop, strict=True)
        for t in range(a + 1, b)
    ]
    found = [pair for batch in batches.epoch(0) for pair in pairs(batch)]
    assert all(not any(targets[:-1]) for _, targets in found)
    assert sorted((inputs, targets[-1]) for inputs, targets in found) == sorted(expected)
    assert batches.num_targets == len(expected) == batches.samples.num_pieces


def test_windows_equal_the_last_events_where_every_history_fits():
    lengths = [3, 9, 2, 5, 1, 7]
    last, windows = (next_items(lengths, kind, max_length=8)[-1] for kind in ("last", "windows"))
    for epoch in range(3):
        for one, other in zip(last.epoch(epoch), windows.epoch(epoch), strict=True):
            assert all(a is b or a.equal(b) for a, b in zip(one, other, strict=True))


def test_the_first_cut_moves_so_that_an_event_stands_everywhere_in_its_window_equally_often():
    length, epochs, N = 23, 600, 5
    samples = Samples("windows", np.array([0]), np.array([length]), length=N, seed=4)
    place = np.zeros((length, N))
    counts = []
    for epoch in range(epochs):
        start, stop, first = samples.of_epoch(epoch)
        assert not first.any()
        counts.append(start.size)
        for a, b in zip(start, stop, strict=True):
            place[np.arange(a, b), np.arange(b - a)] += 1
    assert (place.sum(axis=1) == epochs).all()
    inner = place[N:] / epochs
    assert abs(inner - 1 / N).max() < 0.08, "four deviations of a share of 1/5 in 600 draws"
    assert np.mean(counts) == pytest.approx(1 + (length - 1) / N, rel=0.02) and samples.num_pieces == 5


@pytest.mark.parametrize("kind", SAMPLE_KINDS)
@pytest.mark.parametrize("cloze", [False, True])
def test_an_epoch_depends_on_seed_and_number_alone_and_has_as_many_batches_as_every_other(kind, cloze):
    lengths = [3 + 7 * n % 31 for n in range(25)]
    items, start, stop = log_of(lengths)
    settings = {"max_length": 4, "batch_size": 3, "samples": kind}

    def batches(seed):
        if cloze:
            return ClozeBatches(items, start, stop, seed=seed, mask=MASK, **settings)
        return TrainingBatches(items, start, stop, seed=seed, **settings)

    one = batches(7)
    assert drawn(one, 2) == drawn(batches(7), 2) and drawn(one, 1) != drawn(one, 2) != drawn(batches(8), 2)
    for epoch in range(6):
        sizes = [len(batch.last) for batch in one.epoch(epoch)]
        assert len(sizes) == one.num_batches and max(sizes) <= 4 and min(sizes[:-1]) >= 2


@pytest.mark.parametrize(("lengths", "batch_size"), [([40, 9], 1), ([8], 2), ([7, 3], 2)])
@pytest.mark.parametrize("cloze", [False, True])
def test_an_epoch_of_fewer_windows_than_batches_reads_one_again(lengths, batch_size, cloze):
    items, start, stop = log_of(lengths)
    settings = {"max_length": 4, "batch_size": batch_size, "samples": "windows", "seed": 0}
    batches = (
        ClozeBatches(items, start, stop, mask=MASK, **settings)
        if cloze
        else TrainingBatches(items, start, stop, **settings)
    )
    for epoch in range(20):
        sizes = [len(batch.last) for batch in batches.epoch(epoch)]
        assert len(sizes) == batches.num_batches and min(sizes) >= 1


def test_batches_are_of_the_size_that_is_asked_for_on_average():
    *_, batches = next_items([40] * 300, "windows", max_length=6, batch_size=16)
    sizes = [len(batch.last) for epoch in range(5) for batch in batches.epoch(epoch)]
    assert np.mean(sizes) == pytest.approx(16, rel=0.02) and set(sizes[: batches.num_batches - 1]) <= {15, 16, 17}


@few
@given(lengths_of_histories, st.integers(3, 9), st.integers(0, 3))
def test_the_cloze_reads_every_event_once_in_windows_of_two_events_or_more(lengths, max_length, epoch):
    items, start, stop = log_of(lengths)
    batches = ClozeBatches(
        items, start, stop, max_length=max_length, batch_size=3, seed=0, mask=MASK, samples="windows", cut=False
    )
    read = []
    for batch in batches.epoch(epoch):
        whole = batch._replace(items=batch.items.where(batch.target == 0, batch.target))
        assert all(2 <= len(piece) <= max_length for piece in unpacked(whole))
        assert all(any(targets) for targets in unpacked(batch, batch.target))
        read += [item for piece in unpacked(whole) for item in piece]
    assert sorted(read) == sorted(x for a, b in zip(start, stop, strict=True) if b - a > 1 for x in items[a:b])


def test_the_cloze_masks_the_last_event_of_a_prefix_or_some_of_its_events():
    items, start, stop = log_of([9, 4, 1])
    settings = {"max_length": 5, "batch_size": 4, "seed": 0, "mask": MASK, "samples": "prefixes"}
    prefixes = sorted(
        items[max(a, t - 5) : t].tolist() for a, b in zip(start, stop, strict=True) for t in range(a + 2, b + 1)
    )
    for last in (0.0, 1.0):
        batches = ClozeBatches(items, start, stop, last_item_probability=last, **settings)
        found, masked = [], []
        for batch in batches.epoch(0):
            found += unpacked(batch._replace(items=batch.items.where(batch.target == 0, batch.target)))
            masked += unpacked(batch, batch.target)
        assert sorted(found) == prefixes, "a prefix stays whole"
        if last:
            assert all(targets[-1] and not any(targets[:-1]) for targets in masked)
        else:
            assert any(any(targets[:-1]) for targets in masked)


def test_an_epoch_of_prefixes_keeps_no_prefix():
    import tracemalloc

    *_, batches = next_items([2000] * 5, "prefixes", max_length=500, batch_size=8)
    epoch = batches.epoch(0)
    next(epoch)
    tracemalloc.start()
    for _ in range(20):
        next(epoch)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5e6, "the tokens of all prefixes alone would be 37 MB"
