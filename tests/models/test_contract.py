"""What every model owes in every arm, with every part: whose past decides a score, gradients, what is saved."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from recbft.core import ESTIMATORS
from recbft.mixers.boosted import BoostedConfig
from recbft.mixers.regime import RegimeConfig
from recbft.training.optimiser import make_optimizer
from recbft.training.run_config import TrainingConfig

MOE = {"experts": 3, "gate_regimes": 2, "gate_width": 4, "gate_noise": False, "load_balance": 0.0}
OBSERVING: list[dict[str, Any]] = [{"estimator": name} for name in ESTIMATORS["softmax"]]
OBSERVING += [{"estimator": name, "kriging": "per_dimension"} for name in ("reml", "delta")]
UPDATING: list[dict[str, Any]] = [
    {"update": "kalman"},
    {"update": "residual"},
    {"update": "fixed", "fixed_gain": 0.6},
    {"update": "gate", "gate": "elementwise"},
    {"update": "gate", "gate": "headwise"},
]
PROPAGATING = [{"propagation": name} for name in ("jacobian", "discount", "decay")]
STARTS = ("hybrid", "count", "table", "credibility", "uniform", "empirical_bayes", "evidence")
STARTING = [{"initial": name} for name in STARTS]
# Every way to observe with every start and, in turn, every update and propagation: each pair of parts is among them.
TOGETHER = [
    {**observe, **start, **UPDATING[(i + 2 * j) % 5], **PROPAGATING[(i + j) % 3]}
    for (i, observe), (j, start) in itertools.product(enumerate(OBSERVING), enumerate(STARTING))
]
JACOBIANS = [
    {"jacobian": "exact", "jacobian_in_evaluation": "exact"},
    {"jacobian_in_evaluation": "low_rank", "jacobian_rank": 3},
    {"jacobian": "running_mean"},
    {"jacobian": "exact", "jacobian_detach": True},
    {"jacobian": "off", "jacobian_in_evaluation": "off"},
    {"process_noise": False},
    {"prior_scale": "per_layer"},
]
MIXED = [
    {"mixer": "boosted", "mixing": BoostedConfig(rounds=3), "core": {"update": "gate"}},
    {"mixer": "boosted", "mixing": BoostedConfig(gate="scalar"), "output_projection": True},
    {"mixer": "twicing"},
    {"mixer": "spectral"},
    {"mixer": "regime", "mixing": RegimeConfig(warm_in_steps=2, width=4)},
    {"mixer": "regime", "mixing": RegimeConfig(warm_in_steps=2, width=4, type2=True), "core": {"update": "fixed"}},
    {"mixer": "regime", "mixing": RegimeConfig(warm_in_steps=2, width=4), "arm": "matched", "recency_decay": True},
]
MODELS = ("sasrec", "bert4rec", "hstu")
CASES: list[dict[str, Any]] = [
    *({"model": model, "arm": arm} for model in MODELS for arm in ("published", "matched", "bft")),
    {"arm": "matched", "recency_decay": True},
    {"arm": "matched", "output_projection": True},
    {"recency_decay": False},
    {"output_projection": True},
    {"positions": "latest"},
    {"n_layers": 3, "n_heads": 1, "core": {"lam_max": 10.0}},
    *({"core": core} for core in (*TOGETHER, *JACOBIANS)),
    *MIXED,
    {"arm": "matched", **MOE},
    MOE,
    {"model": "bert4rec", "arm": "matched", "recency_decay": True},
    {"model": "bert4rec", "output_projection": True, "core": {"prior_scale": "per_layer", "estimator": "sandwich"}},
    {"model": "bert4rec", "positions": "oldest", "core": {"initial": "table", "update": "fixed"}},
    {"model": "bert4rec", "head": "gelu", "core": {"kriging": "per_dimension", "propagation": "discount"}},
    {"model": "bert4rec", "absolute_positions": False, "core": {"estimator": "delta", "update": "gate"}},
    {"model": "bert4rec", **MIXED[0]},
    {"model": "bert4rec", **MIXED[3]},
    {"model": "bert4rec", **MOE, "core": {"jacobian": "off", "jacobian_in_evaluation": "off"}},
    {"model": "hstu", "arm": "published", "time_bias": True},
    {"model": "hstu", "time_bias": True, "show_target_time": True, "core": {"update": "residual"}},
    {"model": "hstu", "output_projection": True, "core": {"prior_scale": "per_layer", "initial": "empirical_bayes"}},
    {"model": "hstu", "n_heads": 1, "n_layers": 3, "core": {"sandwich_centre": "innovation", "propagation": "decay"}},
    {"model": "hstu", "arm": "matched", "absolute_positions": False},
    {"model": "hstu", **MOE, "core": {"jacobian_detach": True, "update": "gate", "gate": "headwise"}},
    *({"model": model, "content": 5, "core": {"initial": "evidence"}} for model in MODELS),
    {"content": 5},
    *({"arm": "matched", "content": 5, "item_vector": arm} for arm in ("id", "additive", "gate", "content")),
    {"arm": "matched", "content": 5, "content_events": 0},
    {"arm": "matched", "content": 5, "content_mean": False, "loss": "ce_unseen"},
]  # fmt: skip


def label(case):
    words = {"model": "sasrec", "arm": "bft", **case}
    return " ".join(str(value) for key, value in words.items() if key not in MOE) + " moe" * ("experts" in case)


over_cases = pytest.mark.parametrize("case", CASES, ids=label)
over_modes = pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
plain_cases = pytest.mark.parametrize("case", CASES[:9], ids=label)
MINE = [3, 7, 1, 7, 12]


def is_causal(case):
    return case.get("model") != "bert4rec" and case.get("positions") != "latest"


@over_cases
@over_modes
def test_a_user_is_scored_from_that_user_s_past_alone(lab, case, training):
    model = lab.shaken(lab.build(**case))
    (alone,) = lab.beliefs(model, [MINE], training=training)
    for seed in range(2):
        others = lab.draw_histories(seed)
        place = seed * 3 % len(others)
        lab.assert_same(alone, lab.beliefs(model, [*others[:place], MINE, *others[place:]], training=training)[place])
    if is_causal(case):
        # Where the time of the next event is shown, the next item's time is: item 1 stands for both.
        longer, _ = lab.beliefs(model, [[*MINE, 1, 2, 9], others[0]], training=training)
        lab.assert_same(alone, [values[: len(MINE)] for values in longer])


@over_cases
def test_an_earlier_item_changes_a_score_and_states_are_the_beliefs_at_each_last_token_in_order(lab, case):
    model = lab.shaken(lab.build(**case)).eval()
    (one,), (two,) = lab.beliefs(model, [[1, 5, 6, 7]]), lab.beliefs(model, [[2, 5, 6, 7]])
    assert not torch.allclose(one[0][1:4], two[0][1:4], rtol=1e-3)
    histories = lab.draw_histories(4)
    with torch.no_grad():
        state, precision = model.user_states(lab.packed(histories, model))
    for number, (scores, lam) in enumerate(lab.beliefs(model, histories)):
        torch.testing.assert_close(state[number] @ model.item_table().weight[1:].T, scores[-1])
        assert precision is None or torch.allclose(precision[number], lam[-1].mean())
    assert (precision is None) == (case.get("arm", "bft") != "bft")
    with torch.no_grad():
        assert model.train().user_states(lab.packed(histories, model)).state.shape == state.shape


@over_cases
def test_gradients_are_finite_and_reach_no_event_of_another_user(lab, case, monkeypatch):
    model, embedded, plain = lab.shaken(lab.build(**case)).train(), [], torch.nn.functional.embedding

    def watched(*given, **named):
        embedded.append(plain(*given, **named))
        embedded[-1].retain_grad()
        return embedded[-1]

    monkeypatch.setattr(torch.nn.functional, "embedding", watched)
    batch = lab.training_batch(model, [[1, 2, 3, 4, 5], [6, 7, 8, 1, 2], [9, 10, 11, 12]])
    mine = batch.segment == 1
    model.loss(batch._replace(target=batch.target * mine)).backward()
    assert embedded[0].grad[mine].any() and not embedded[0].grad[~mine].any()
    # What the last layer predicts of precision goes into no score. Without a Kalman gain precision acts through the
    # weights of later layers alone, and softmax weights do not change when that of all keys is scaled alike; ``delta``
    # then scales with them, and its gain stays.
    core, last = case.get("core", {}), f"blocks.{len(model.blocks) - 1}.precision"
    idle = {f"{last}.{name}" for name in ("noise_logits", "discount_logit", "decay_rate")}
    if core.get("update", "kalman") != "kalman" or core.get("estimator") == "delta":
        idle |= {f"blocks.{n}.precision.{name}" for n in range(9) for name in ("discount_logit", "decay_rate")}
    if core.get("initial") == "credibility":
        idle |= {"item_precision.table"}  # of items that this batch does not have
    groups = model.optimiser_groups()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name
        if (groups[name] == "precision" or ".update." in name) and name not in idle:
            assert parameter.grad is not None and parameter.grad.any(), name


@over_cases
@pytest.mark.parametrize("ramp", [0.0, 1.0])
def test_a_new_model_has_finite_gradients_and_beliefs_within_bounds(lab, case, ramp):
    model = lab.build(**case)
    model.set_ramp(ramp)
    batch = lab.training_batch(model, lab.draw_histories(0, 12, shortest=2))
    loss = model.train().loss(batch)
    loss.backward()
    last = f"blocks.{len(model.blocks) - 1}.precision"
    idle = {f"{last}.{name}" for name in ("noise_logits", "discount_logit", "decay_rate")}
    assert loss.isfinite()
    for name, parameter in model.named_parameters():
        if name not in idle:
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    with torch.no_grad():
        mean, precision = model.eval().encode(batch)
    assert mean.shape == precision.shape == (*batch.items.shape, lab.D) and mean.isfinite().all()
    assert precision.min() >= 1e-3 and precision.max() <= (model.core.lam_max if model.core else 1)


@over_cases
def test_a_state_dict_carries_everything_that_scores_depend_on(lab, case):
    model, other = lab.shaken(lab.build(**case)), lab.build(**case, seed=9).double()
    other.load_state_dict(model.state_dict())
    other.refresh()
    for one, two in zip(*(lab.beliefs(m, lab.draw_histories(3)) for m in (model, other)), strict=True):
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


@pytest.mark.parametrize("case", [case for case in CASES if case.get("arm", "bft") == "bft"], ids=label)
@over_modes
def test_before_the_warm_up_a_precision_layer_is_the_plain_layer(lab, case, training):
    tracked = lab.shaken(lab.build(**case))
    plain = {**case, "arm": "matched", "core": None, "recency_decay": case.get("recency_decay", True)}
    plain = lab.build(**plain).double()
    missing, unexpected = plain.load_state_dict(tracked.state_dict(), strict=False)
    assert not missing and all("precision" in name or "update" in name for name in unexpected)
    for each in (tracked, plain):
        each.set_ramp(0.0)
    histories = lab.draw_histories(0)
    for one, two in zip(*(lab.beliefs(m, histories, training=training) for m in (tracked, plain)), strict=True):
        torch.testing.assert_close(one[0], two[0], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("loss", ["sampled_softmax", "bce", "gbce", "bpr"])
@pytest.mark.parametrize("model", MODELS)
def test_every_loss_gives_every_parameter_a_finite_gradient(lab, model, loss):
    made = lab.build(model=model, loss=loss, num_negatives=4, **({"head": "gelu"} if model == "bert4rec" else {}))
    made.train().loss(lab.training_batch(made, lab.draw_histories(0, 12, shortest=2))).backward()
    for name, parameter in made.named_parameters():
        if name != "blocks.1.precision.noise_logits":
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@plain_cases
def test_dropout_is_at_work_in_training_and_only_there(lab, case):
    rates = {"dropout": 0.2} if case["model"] == "hstu" else {"dropout": 0.2, "attention_dropout": 0.3}
    model = lab.shaken(lab.build(**case, **rates))
    for training in (True, False):
        (one,), (two,) = (lab.beliefs(model, [[1, 2, 3, 4]], training=training) for _ in range(2))
        assert torch.equal(one[0], two[0]) != training


@plain_cases
def test_a_model_learns_eight_sequences(lab, case):
    rng = np.random.default_rng(0)
    histories = [[first, *rng.permutation(np.arange(1, lab.V + 1))[:6].tolist()] for first in range(1, 9)]
    more = {"last_item_probability": 1.0} if case["model"] == "bert4rec" else {}
    model = lab.build(**case, hidden_size=32, **more).train()
    optimizer = make_optimizer(model, TrainingConfig(learning_rate=1e-2, precision_lr_multiplier=10.0))
    losses = []
    for step in range(80):
        model.set_ramp(min(1.0, step / 20))
        optimizer.zero_grad()
        loss = model.loss(lab.training_batch(model, histories))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(np.log(lab.V), abs=0.3)
    assert losses[-1] < 0.15


@plain_cases
def test_one_event_one_item_one_coordinate_and_a_full_window_work(lab, case):
    least = 1 + (case["model"] == "bert4rec")  # an item and the mask
    for histories, num_items, settings in (
        ([[1], [1, 1]], 1, {}),
        ([[2]], 2, {"hidden_size": 1, "n_heads": 1}),
        ([list(range(1, lab.T + 1))], lab.V, {}),
        ([[1, 2]], 2, {"max_length": 2, "n_layers": 1}),
    ):
        model = lab.build(**case, counts=lab.counts_of(num_items), **settings)
        model.set_ramp(1.0)
        histories = [history[: model.max_length + 1 - least] for history in histories]
        with torch.no_grad():
            state, precision = model.eval().user_states(lab.packed(histories, model))
        assert state.shape == (len(histories), model.config.hidden_size) and state.isfinite().all()
        assert precision is None or (precision.isfinite().all() and (precision > 0).all())
        if len(histories[-1]) > 1:
            loss = model.train().loss(lab.training_batch(model, [histories[-1]]))
            loss.backward()
            assert loss.isfinite() and (num_items > 1 or loss.item() == pytest.approx(0, abs=1e-6))
            assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
