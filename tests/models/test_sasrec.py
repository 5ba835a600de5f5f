"""SASRec in its three arms: whose past decides a score, what can be learned, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from recbft.datasets.batches import TrainingBatches
from recbft.errors import UserError
from recbft.training.config import TrainingConfig
from recbft.training.optimiser import make_optimizer
from recbft.training.run_config import load_run_config

# Whose past decides ---------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["evaluation", "training"])
def training(request):
    return request.param


def test_scores_of_a_user_do_not_change_with_packing_batch_mates_or_padding(lab, variant, training):
    model = lab.shaken(lab.build(variant))
    mine = [3, 7, 1, 7, 12]
    (alone,) = lab.beliefs(model, [mine], training=training)
    for seed in range(3):
        others = lab.draw_histories(seed)
        place = seed * 3 % len(others)
        together = lab.beliefs(model, [*others[:place], mine, *others[place:]], training=training)
        lab.assert_same(alone, together[place])


def test_scores_of_a_user_do_not_change_with_later_items(lab, variant, training):
    model = lab.shaken(lab.build(variant))
    mate = [2, 9, 4]
    for seed in range(3):
        past, *futures = (history[: lab.T // 2] for history in lab.draw_histories(seed, count=4))
        (now,) = lab.beliefs(model, [past], training=training)
        for future in futures:
            later, _ = lab.beliefs(model, [past + future, mate], training=training)
            lab.assert_same(now, [values[: len(past)] for values in later])


def test_an_earlier_item_does_change_them(lab, variant):
    model = lab.shaken(lab.build(variant))
    (one,), (two,) = lab.beliefs(model, [[1, 5, 6, 7]]), lab.beliefs(model, [[2, 5, 6, 7]])
    assert not torch.allclose(one[0][1:], two[0][1:], rtol=1e-3)


def test_user_states_are_the_beliefs_at_each_last_event_in_order(lab, variant):
    model = lab.shaken(lab.build(variant)).eval()
    histories = lab.draw_histories(4)
    with torch.no_grad():
        state, precision = model.user_states(lab.packed(histories))
    for number, (scores, lam) in enumerate(lab.beliefs(model, histories)):
        torch.testing.assert_close(state[number] @ model.item_table().weight[1:].T, scores[-1])
        if variant.startswith("bft"):
            torch.testing.assert_close(precision[number], lam[-1].mean())
    assert (precision is None) == (not variant.startswith("bft"))


def test_the_gradient_of_one_user_s_loss_reaches_no_event_of_another(lab, variant):
    model = lab.shaken(lab.build(variant)).train()
    embedded = []

    def watch(module, args, output):
        output.retain_grad()
        embedded.append(output)

    model.item_embedding.register_forward_hook(watch)
    batch = lab.packed([[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12]], with_targets=True)
    mine = batch.segment == 1
    model.loss(batch._replace(target=batch.target * mine)).backward()
    assert embedded[0].grad[mine].any(dim=-1).all()
    assert not embedded[0].grad[~mine].any()


# Gradients and fitting --------------------------------------------------------------------------------


@pytest.mark.parametrize("ramp", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_parameter_that_can_learn_gets_a_finite_gradient(lab, variant, ramp, dtype):
    model = lab.build(variant).to(dtype).train()
    model.set_ramp(ramp)
    model.loss(lab.packed(lab.draw_histories(0, 12, shortest=2), with_targets=True)).backward()
    # What the last layer predicts of precision goes into no score, only beside the recommendations.
    last = f"blocks.{len(model.blocks) - 1}.precision"
    idle = {f"{last}.{name}" for name in ("noise_logits", "discount_logit", "decay_rate")}
    for name, parameter in model.named_parameters():
        if name in idle:
            continue
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("variant", ["bft", "bft table", "bft per layer", "bft with output", "bft exact"])
def test_every_precision_parameter_moves_the_loss_once_warmed_up(lab, variant):
    model = lab.shaken(lab.build(variant)).train()
    model.loss(lab.packed(lab.draw_histories(1, 12, shortest=2), with_targets=True)).backward()
    for name, parameter in model.named_parameters():
        if model.is_precision_parameter(name) and name != "blocks.1.precision.noise_logits":
            assert parameter.grad.any(), name


@pytest.mark.parametrize("variant", ["published", "matched", "bft", "bft per layer", "bft table", "bft exact"])
def test_eight_sequences_are_learned_by_heart(lab, variant):
    rng = np.random.default_rng(0)
    # Each starts with an item of its own, so that what follows is decided.
    histories = [[first, *rng.integers(1, lab.V + 1, 6).tolist(), 1, 1] for first in range(1, 9)]
    items = np.array([item for history in histories for item in history], dtype=np.int64)
    stop = np.arange(1, 9) * 9
    batches = TrainingBatches(items, stop - 9, stop - 2, max_length=lab.T, batch_size=8, seed=0)
    model = lab.build(variant, hidden_size=32).train()
    config = TrainingConfig(learning_rate=1e-2, precision_lr_multiplier=10.0)
    optimizer = make_optimizer(model, config)
    losses = []
    for step in range(250):
        model.set_ramp(min(1.0, step / 50))
        (batch,) = batches.epoch(step)
        optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(lab.V), abs=0.2)
    assert losses[-1] < 0.02


@pytest.mark.parametrize(("variant", "places"), [("published", 3), ("matched", 2), ("bft", 2)])
def test_a_layer_drops_its_innovation_and_its_network_s_output_and_the_authors_the_inside_of_it_too(
    lab, variant, places
):
    model, widths = lab.build(variant, dropout=0.5).train(), []
    model.blocks[0].dropout.register_forward_hook(lambda module, args, output: widths.append(output.shape[-1]))
    model.encode(lab.packed([[1, 2, 3]]))
    assert widths == [lab.D] * places


# Degenerate sizes -------------------------------------------------------------------------------------


def test_one_event_one_item_one_coordinate_and_a_full_window_work(lab, variant):
    n_heads = lab.VARIANTS[variant][1].get("n_heads", 1)
    n_layers = 2 if "jacobian_detach" in lab.VARIANTS[variant][2] else 1  # one layer has no use for it
    for histories, num_items, settings in (
        ([[1]], 1, {}),
        ([[1], [1, 1]], 1, {}),
        ([[2]], 2, {"hidden_size": 1, "n_heads": n_heads}),
        ([list(range(1, lab.T + 1))], lab.V, {}),
        ([[1, 2]], 2, {"max_length": 2, "n_layers": n_layers}),
    ):
        model = lab.build(variant, counts=lab.counts_of(num_items), **settings)
        model.set_ramp(1.0)
        with torch.no_grad():
            state, precision = model.eval().user_states(lab.packed(histories))
        assert state.shape == (len(histories), model.config.hidden_size) and torch.isfinite(state).all()
        assert precision is None or (torch.isfinite(precision).all() and (precision > 0).all())
        if len(histories[-1]) > 1:
            loss = model.train().loss(lab.packed([histories[-1]], with_targets=True))
            loss.backward()
            assert torch.isfinite(loss) and (num_items > 1 or loss.item() == pytest.approx(0, abs=1e-6))
            for name, parameter in model.named_parameters():
                assert parameter.grad is None or torch.isfinite(parameter.grad).all(), name


def test_a_state_dict_carries_everything_that_scores_depend_on(lab, variant):
    model = lab.shaken(lab.build(variant))
    other = lab.build(variant, seed=9).double()
    other.load_state_dict(model.state_dict())
    histories = lab.draw_histories(3)
    for one, two in zip(lab.beliefs(model, histories), lab.beliefs(other, histories), strict=True):
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


def test_dropout_is_at_work_in_training_and_only_there(lab, variant):
    model = lab.shaken(lab.build(variant, dropout=0.5, attention_dropout=0.3))
    (one,), (two,) = (lab.beliefs(model, [[1, 2, 3, 4]], training=True) for _ in range(2))
    assert not torch.allclose(one[0], two[0])
    (one,), (two,) = (lab.beliefs(model, [[1, 2, 3, 4]]) for _ in range(2))
    assert torch.equal(one[0], two[0])


# Configs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_heads": 3}, r"n_heads is 3, which does not divide hidden_size 64; choose one of 1, 2, 4, 8, 16, 32, 64"),
        ({"dropout": 1.5}, r"dropout is 1.5; give a number >= 0 and < 1"),
        ({"attention_dropout": -0.1}, r"attention_dropout is -0.1; give a number >= 0 and < 1"),
        ({"max_length": 0}, r"max_length is 0; give a whole number >= 1"),
        ({"hidden_size": 0}, r"hidden_size is 0; give a whole number >= 1"),
        ({"n_layers": 0}, r"n_layers is 0; give a whole number >= 1"),
        ({"inner_size": 0}, r"inner_size is 0; give a whole number >= 1"),
        ({"initializer_range": 0.0}, r"initializer_range is 0.0; give a number > 0"),
        ({"norm_eps": 0.0}, r"norm_eps is 0.0; give a number > 0"),
        ({"embedding_scale": 0.0}, r"embedding_scale is 0.0; give a number > 0"),
        ({"initial_gain": 1.0}, r"initial_gain is 1.0; give a number > 0 and < 1"),
        ({"jacobian_rank": 0}, r"jacobian_rank is 0; give a whole number >= 1"),
        ({"prior_dof": 0.0}, r"prior_dof is 0.0; give a number > 0"),
        ({"estimator": "remi"}, r"estimator is 'remi'; did you mean 'reml'"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_to_give(settings, message):
    with pytest.raises(UserError, match=message):
        load_run_config(model="sasrec", arm="bft", **settings)


@pytest.mark.parametrize("settings", [{"layer": "original"}, {"activation": "relu"}])
def test_precision_needs_the_pre_norm_gelu_layer(lab, settings):
    [(key, value)] = settings.items()
    message = f"backbone.{key} is '{value}', but arm 'bft' needs '.*'; leave it out, or take arm matched or published"
    with pytest.raises(UserError, match=message):
        lab.build("bft", **settings)


@pytest.mark.parametrize("arm", ["published", "matched"])
def test_a_precision_setting_without_effect_is_refused(arm):
    with pytest.raises(
        UserError, match=rf"core.lam_max has no effect in arm '{arm}' of sasrec; leave it out or take arm bft"
    ):
        load_run_config(model="sasrec", arm=arm, lam_max=10.0)
