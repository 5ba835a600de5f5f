"""Cloze batches: what is masked, how often, and on what it depends; and what is appended at prediction."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recbft.datasets.batches import ClozeBatches, history_batches, pack_histories
from recbft.models.bert4rec import BERT4RecConfig, cloze_batches

MASK = 100


def cloze(seed=0, num_users=200, **settings):
    rng = np.random.default_rng(9)
    lengths = rng.integers(1, 13, num_users)
    stop = np.cumsum(lengths)
    items = rng.integers(1, MASK, stop[-1])
    settings = {"max_length": 8, "batch_size": 64, "mask": MASK, **settings}
    return items, stop - lengths, stop, ClozeBatches(items, stop - lengths, stop, seed=seed, **settings)


def read(batches, epoch):
    """Each history of an epoch as (items read, targets), in order of the batches."""
    found = []
    for batch in batches.epoch(epoch):
        for number in range(len(batch.last)):
            own = batch.segment == number
            order = batch.position[own].argsort()
            found.append((tuple(batch.items[own][order].tolist()), tuple(batch.target[own][order].tolist())))
    return found


def test_every_history_of_two_events_or_more_is_read_once_with_something_masked():
    epoch = 1
    items, start, stop, batches = cloze()
    found = read(batches, epoch)
    assert len(found) == (stop - start >= 2).sum() and batches.num_batches == -(-len(found) // 64)
    assert batches.num_tokens == sum(min(length, 8) for length in (stop - start).tolist() if length >= 2)
    windows = {tuple(items[max(a, b - 8) : b].tolist()) for a, b in zip(start, stop, strict=True)}
    for tokens, targets in found:
        assert any(targets)
        assert all((token == MASK) == (target > 0) for token, target in zip(tokens, targets, strict=True))
        whole = tuple(target or token for token, target in zip(tokens, targets, strict=True))
        assert any(window[: len(whole)] == whole for window in windows)


def test_the_last_item_case_masks_the_end_of_a_history_cut_at_random():
    found = read(cloze(last_item_probability=1.0)[-1], 0)
    assert all(targets[-1] > 0 and not any(targets[:-1]) and len(targets) >= 2 for _, targets in found)
    lengths = [{len(tokens) for tokens, _ in read(cloze(last_item_probability=p)[-1], 0)} for p in (0.0, 1.0)]
    assert max(map(max, lengths)) == 8 and 2 in lengths[1]


@pytest.mark.parametrize(("probability", "last"), [(0.1, 0.5), (0.4, 0.0)])
def test_the_targets_of_an_epoch_are_foretold(probability, last):
    batches = cloze(num_users=3000, mask_probability=probability, last_item_probability=last)[-1]
    found = [sum(int((batch.target > 0).sum()) for batch in batches.epoch(epoch)) for epoch in range(5)]
    assert np.mean(found) == pytest.approx(batches.num_targets, rel=0.02)


def test_masks_follow_the_mask_seed_and_the_epoch_and_not_the_order():
    one, other = (read(cloze(seed)[-1], 0) for seed in (0, 1))
    assert one != other and sorted(one) == sorted(other)
    assert read(cloze()[-1], 3) == read(cloze()[-1], 3)
    assert sorted(one) != sorted(read(cloze()[-1], 1))
    assert sorted(one) != sorted(read(cloze(mask_seed=1)[-1], 0))
    assert sorted(one) == sorted(read(cloze(batch_size=7)[-1], 0))


def test_masks_follow_the_seed_of_the_run_where_they_have_none_of_their_own():
    def masks(mask_seed, seed):
        config = BERT4RecConfig(max_length=8, mask_seed=mask_seed)
        items, start, stop, _ = cloze()
        return sorted(read(cloze_batches(config, items, start, stop, num_items=MASK - 1, batch_size=64, seed=seed), 0))

    assert masks(None, 1) == masks(None, 1) != masks(None, 2)
    assert masks(None, 1) != masks(1, 1)  # the same numbers draw the order of the histories
    assert masks(0, 1) == masks(0, 2)


def test_an_appended_item_ends_every_history_at_the_time_of_its_last_event():
    items, times = np.arange(1, 9), np.arange(8) * 10 + 5
    batch = pack_histories(items, np.array([0, 1, 4]), np.array([1, 4, 8]), times=times, append=MASK)
    for number, (tokens, stamps) in enumerate(
        [([1, MASK], [5, 5]), ([2, 3, 4, MASK], [15, 25, 35, 35]), ([5, 6, 7, 8, MASK], [45, 55, 65, 75, 75])]
    ):
        own = batch.segment == number
        order = batch.position[own].argsort()
        assert batch.items[own][order].tolist() == tokens
        assert batch.time[own][order].tolist() == stamps
    assert (batch.items.flatten()[batch.last] == MASK).all()


def test_what_is_appended_is_one_of_the_tokens_that_are_read():
    (batch,) = history_batches(np.arange(1, 8), np.array([0]), np.array([7]), max_length=4, append=MASK)
    assert batch.items.tolist() == [[5, 6, 7, MASK]] and batch.position.tolist() == [[0, 1, 2, 3]]


def test_the_time_of_the_next_event_is_given_where_asked_for():
    items, times = np.arange(1, 8), np.arange(7) ** 2
    (batch,) = history_batches(items, np.array([0]), np.array([5]), max_length=3, times=times, with_next_times=True)
    assert batch.time.tolist() == [[4, 9, 16]] and batch.next_time.tolist() == [[9, 16, 25]]
    assert torch.equal(batch.to("cpu").next_time, batch.next_time)


def test_a_masked_last_event_has_the_time_that_prediction_gives_the_mask():
    items, start, stop, _ = cloze()
    times = np.arange(items.size) * 10
    batches = ClozeBatches(items, start, stop, seed=0, max_length=8, batch_size=64, mask=MASK, times=times)
    inner = 0
    for batch in batches.epoch(0):
        for number in range(len(batch.last)):
            own = batch.segment == number
            order = batch.position[own].argsort()
            gaps = batch.time[own][order].diff().tolist()
            asked = int(batch.target[own][order][-1]) > 0
            assert gaps == [10] * (len(gaps) - asked) + [0] * asked
            inner += not asked
    assert inner > 0 and times.tolist() == list(range(0, items.size * 10, 10)), "the data's own times are left alone"


def test_a_target_that_is_masked_alone_in_a_whole_history_has_the_time_of_the_event_before_it():
    items, times = np.array([1, 2, 3, 4, 5]), np.array([10, 20, 30, 40, 50])

    def batch_of(last_item_probability, cut):
        batches = ClozeBatches(
            items, np.array([0, 2]), np.array([2, 5]), max_length=9, batch_size=2, seed=0, mask=6, times=times,
            mask_probability=1e-9, last_item_probability=last_item_probability, cut=cut,
        )  # fmt: skip
        [batch] = batches.epoch(0)
        return batch

    alone = batch_of(1.0, False)
    assert alone.time is not None
    assert sorted(alone.time[alone.target > 0].tolist()) == [10, 40]
    assert sorted(alone.time[(alone.target == 0) & (alone.segment >= 0)].tolist()) == [10, 30, 40]
    kept, usual = batch_of(0.0, False), batch_of(0.0, True)
    assert all(torch.equal(one, other) for one, other in zip(kept, usual, strict=True) if one is not None)
