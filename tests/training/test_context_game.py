"""The game over history lengths: its step by hand, where it comes to rest, and what a cut batch is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from recbft.datasets.batches import ClozeBatches, pack_histories
from recbft.errors import UserError
from recbft.mixers.regime import Diagnosis, RegimeConfig
from recbft.training.controllers import Moment
from recbft.training.controllers.context_game import ContextGame, ContextGameConfig, cut
from recbft.training.run_config import load_run_config


def moment():
    return Moment(model=None, optimizer=None, epoch=0, step=0, total_epochs=10, total_steps=100)


def test_the_replicator_step_by_hand():
    game = ContextGame(ContextGameConfig(lengths=(5, 10, 20), eta=1.0), torch.nn.Linear(1, 1))
    for chosen, losses in ((0, (2.0, 4.0)), (1, (2.0,))):  # means 3 and 2; 20 was not played, it earns -2.5
        for loss in losses:
            game.chosen = chosen
            game.after_step(moment(), loss)
    game.on_epoch_end(moment(), {})
    weights = [math.exp(-3), math.exp(-2), math.exp(-2.5)]
    assert list(game.shares) == [5, 10, 20]
    assert list(game.shares.values()) == pytest.approx([w / sum(weights) for w in weights])
    before = game.shares
    game.on_epoch_end(moment(), {})
    assert game.shares == pytest.approx(before), "an epoch without a step changes nothing"


class Mixer:
    """Memberships that look as they are told to."""

    def __init__(self, *, saturated, entropy, regimes):
        self.seen, self.config = Diagnosis(entropy=entropy, saturated=saturated), RegimeConfig(regimes=regimes)

    def diagnosis(self):
        return self.seen


def test_a_length_earns_less_where_memberships_are_saturated_and_more_where_they_are_spread():
    config = ContextGameConfig(lengths=(5, 10), saturation_weight=0.2, saturation_free=0.5, entropy_weight=0.3)
    game = ContextGame(ContextGameConfig(lengths=(5, 10)), torch.nn.Linear(1, 1))
    game.config, game.mixers = (
        config,
        [
            Mixer(saturated=0.75, entropy=math.log(2), regimes=4),  # 0.3 / 2 - 0.2 (0.75 - 0.5) = 0.1
            Mixer(saturated=0.25, entropy=math.log(3), regimes=3),  # 0.3 - 0
        ],
    )
    game.chosen = 1
    for loss in (2.0, 5.0):
        game.after_step(moment(), loss)
    assert game.earned.tolist() == pytest.approx([0, -7 + 2 * (0.1 + 0.3) / 2])
    assert game.played.tolist() == [0, 2]


@pytest.mark.parametrize("seed", range(4))
def test_the_game_comes_to_rest_at_the_length_that_earns_most(seed):
    game = ContextGame(ContextGameConfig(lengths=(5, 10), eta=0.5), torch.nn.Linear(1, 1), seed=seed)
    batch = pack_histories(np.arange(1, 13), np.array([0]), np.array([12]))
    for _ in range(60):
        for _ in range(5):
            played = game.on_batch(batch)
            game.after_step(moment(), {5: 3.0, 10: 2.0}[int((played.segment >= 0).sum())])
        game.on_epoch_end(moment(), {})
    assert game.shares[10] > 0.97  # how close depends on the draws, which differ between versions of torch


def test_a_cut_batch_is_the_batch_of_shorter_histories():
    items, times = np.arange(1, 31), np.arange(30) * 7
    start, stop = np.array([0, 9, 12]), np.array([8, 11, 27])
    given = {"times": times, "with_targets": True, "with_next_times": True, "first": np.array([0, 8, 11])}
    whole = pack_histories(items, start, stop, **given)
    found = cut(whole, 4)
    expected = pack_histories(items, np.maximum(start, stop - 4), stop, **given)
    for segment in range(3):
        mine, theirs = found.segment == segment, expected.segment == segment
        for name in ("items", "position", "time", "target", "next_time"):
            assert torch.equal(getattr(found, name)[mine], getattr(expected, name)[theirs])
    empty = found.segment < 0
    for name in ("items", "position", "time", "target"):
        assert not getattr(found, name)[empty].any()
    assert torch.equal(found.items.flatten()[found.last], whole.items.flatten()[whole.last])
    assert torch.equal(found.earlier, expected.earlier) and torch.equal(found.num_earlier, expected.num_earlier)
    assert cut(whole, 15) is whole


def test_a_cut_that_leaves_nothing_to_learn_is_not_made_and_not_played():
    game = ContextGame(ContextGameConfig(lengths=(1, 2)), torch.nn.Linear(1, 1))
    stop = np.array([9])
    batches = ClozeBatches(
        np.arange(1, 10), np.array([0]), stop, max_length=9, batch_size=1, seed=0, mask=10, last_item_probability=0.0
    )
    whole = 0
    for epoch in range(20):
        [batch] = batches.epoch(epoch)
        played = game.on_batch(batch)
        assert played.target.any()
        if played is batch:
            whole += 1
            assert not cut(batch, 1).target.any()
        game.after_step(moment(), 1.0)
    assert 0 < whole < 20 and game.played.sum() == 20 - whole


def test_a_game_whose_lengths_cut_nothing_is_refused():
    model = load_run_config(hidden_size=8, max_length=50).build(torch.arange(9))
    with pytest.raises(UserError, match=r"lengths is \[100, 200\], but the model reads 50 events at most"):
        ContextGame(ContextGameConfig(lengths=(100, 200)), model)
    ContextGame(ContextGameConfig(lengths=(49, 200)), model)
