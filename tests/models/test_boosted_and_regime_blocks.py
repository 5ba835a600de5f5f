"""Boosted attention, twicing and the regime prior in the blocks of a backbone, with each update rule."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from recbft.core.regimes import block_table
from recbft.errors import UserError
from recbft.mixers.boosted import BoostedAttention, BoostedConfig, TwicingAttention
from recbft.mixers.regime import RegimeAttention, RegimeConfig
from recbft.models import CoreConfig
from recbft.models.backbone import Backbone
from recbft.models.layers import make_blocks
from recbft.models.sasrec import SASRecConfig

HISTORIES = [[3, 7, 1, 7, 12], [5, 6], [9, 2, 2, 8], [4]]
MAKERS = {
    "boosted": partial(BoostedAttention, config=BoostedConfig(rounds=3)),
    "boosted scalar": partial(BoostedAttention, config=BoostedConfig(gate="scalar"), output_projection=True),
    "twicing": TwicingAttention,
    "regime": partial(RegimeAttention, config=RegimeConfig(warm_in_steps=2, width=4)),
    "regime type 2": partial(RegimeAttention, config=RegimeConfig(warm_in_steps=2, width=4, type2=True), length=10),
}
over_mixers = pytest.mark.parametrize("name", MAKERS)
over_updates = pytest.mark.parametrize("update", [None, "kalman", "residual", "gate", "fixed"])


def build(lab, name, update, *, both_ways=False, seed=0, estimator="reml"):
    config = SASRecConfig(hidden_size=lab.D, max_length=lab.T, dropout=0.0)
    core = None if update is None else CoreConfig(update=update)

    def mixer():
        estimating = {} if core is None else {"estimator": estimator}
        return MAKERS[name](lab.D, config.n_heads, recency_decay=0.9, **estimating)

    torch.manual_seed(seed)
    blocks = make_blocks(config, core, mixer, inner_size=4 * lab.D)
    return Backbone(config, core, lab.counts_of(), blocks, embedding_scale=1.0, seed=seed, both_ways=both_ways)


@over_mixers
@over_updates
@pytest.mark.parametrize("training", [False, True])
def test_a_user_is_scored_from_that_user_s_past_alone(lab, name, update, training):
    model = lab.shaken(build(lab, name, update))
    mine = HISTORIES[0]
    (alone,) = lab.beliefs(model, [mine], training=training)
    together = lab.beliefs(model, [*HISTORIES[1:3], mine, HISTORIES[3]], training=training)[2]
    lab.assert_same(alone, together)
    longer, _ = lab.beliefs(model, [[*mine, 11, 2, 5], HISTORIES[1]], training=training)
    lab.assert_same(alone, [values[: len(mine)] for values in longer])


@over_mixers
@pytest.mark.parametrize("training", [False, True])
def test_in_both_directions_a_user_is_scored_from_that_user_s_history_alone(lab, name, training):
    model = lab.shaken(build(lab, name, "kalman", both_ways=True))
    (alone,) = lab.beliefs(model, [HISTORIES[0]], training=training)
    lab.assert_same(alone, lab.beliefs(model, [HISTORIES[2], HISTORIES[0]], training=training)[1])


@over_mixers
@over_updates
def test_training_lowers_the_loss_and_beliefs_stay_in_bounds(lab, name, update):
    model = build(lab, name, update)
    batch = lab.packed(lab.draw_histories(0, 8, shortest=2), with_targets=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(25):
        model.train().set_ramp(min(1.0, step / 5))
        loss = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    with torch.no_grad():
        mean, precision = model.eval().encode(batch)
    assert torch.isfinite(mean).all() and precision.min() >= 1e-3 and precision.max() <= 100


@over_mixers
def test_a_state_dict_carries_all_that_scores_depend_on(lab, name):
    model, other = lab.shaken(build(lab, name, "kalman")), build(lab, name, "kalman", seed=5).double()
    other.load_state_dict(model.state_dict())
    other.refresh()
    for one, two in zip(lab.beliefs(model, HISTORIES), lab.beliefs(other, HISTORIES), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@over_mixers
def test_without_an_estimator_the_kalman_update_is_refused(lab, name):
    with pytest.raises(UserError, match="update 'kalman' needs an observation precision"):
        build(lab, name, "kalman", estimator=None)


def test_a_model_that_was_evaluated_first_can_be_trained(lab):
    block_table.cache_clear()
    model = build(lab, "regime", "kalman")
    batch = lab.packed(lab.draw_histories(0, 4, shortest=2), with_targets=True)
    with torch.inference_mode():
        model.eval().encode(batch)
    model.train().loss(batch).backward()
    copy.deepcopy(model)
