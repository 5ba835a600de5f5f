"""The whole estimator class through the models: every estimator x update x propagation x initial, and each backbone."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch

from recbft.core import ESTIMATORS, Belief, SequenceContext, decay_precision, discount_precision
from recbft.errors import UserError
from recbft.mixers import Observation, SoftmaxAttention
from recbft.models import MODELS, CoreConfig
from recbft.models.block import Block
from recbft.models.precision_channel import LayerPrecision
from recbft.models.update_rules import FixedUpdate, GateUpdate, KalmanUpdate, make_update
from recbft.training.run_config import load_run_config

OBSERVING = [{"estimator": name} for name in ESTIMATORS["softmax"]]
OBSERVING += [{"estimator": name, "kriging": "per_dimension"} for name in ("reml", "delta")]
UPDATING = [
    {"update": "kalman"},
    {"update": "residual"},
    {"update": "fixed", "fixed_gain": 0.6},
    {"update": "gate", "gate": "elementwise"},
    {"update": "gate", "gate": "headwise"},
]
PROPAGATING = [{"propagation": name} for name in ("jacobian", "discount", "decay")]
STARTING = [{"initial": name} for name in ("hybrid", "count", "table", "credibility", "uniform", "empirical_bayes")]
HISTORIES = [[3, 7, 1, 7, 12], [5, 6], [9, 2, 2, 8], [4]]

# SASRec in all combinations; the others with one part changed at a time.
CASES = [
    ("sasrec", observe, update, list(itertools.product(PROPAGATING, STARTING)))
    for observe, update in itertools.product(OBSERVING, UPDATING)
]
for name, observing in (("bert4rec", OBSERVING), ("hstu", [{"estimator": "sandwich"}])):
    CASES += [(name, observe, UPDATING[0], [(PROPAGATING[0], STARTING[0])]) for observe in observing]
    CASES += [(name, observing[0], update, [(PROPAGATING[1], STARTING[-1])]) for update in UPDATING]


def label(value):
    if isinstance(value, dict):
        return " ".join(str(part) for part in value.values())
    return None if isinstance(value, list) else str(value)


over_the_class = pytest.mark.parametrize(("name", "observe", "update", "rest"), CASES, ids=label)


def build(lab, name="sasrec", seed=0, **core):
    spec = MODELS[name]
    config = spec.config(hidden_size=lab.D, max_length=lab.T, dropout=0.0, **spec.arms["bft"])
    return spec.build(config, CoreConfig(**core), lab.counts_of(), seed=seed)


def models_of(lab, case, *, every=True, **how):
    """The models of a case; every third otherwise, so chosen that each propagation and each start is among them."""
    name, observe, update, rest = case
    for number, (propagate, start) in enumerate(rest):
        if every or len(rest) == 1 or sum(divmod(number, len(STARTING))) % 3 == 0:
            yield build(lab, name, **observe, **update, **propagate, **start, **how)


@over_the_class
def test_gradients_are_finite_and_beliefs_have_their_shape_and_bounds(lab, name, observe, update, rest):
    batch = lab.packed(lab.draw_histories(0, 6, shortest=2), with_targets=True)
    for ramp, model in itertools.product((0.0, 1.0), models_of(lab, (name, observe, update, rest))):
        model.set_ramp(ramp)
        loss = model.train().loss(batch)
        loss.backward()
        assert torch.isfinite(loss)
        for parameter_name, parameter in model.named_parameters():
            assert parameter.grad is None or torch.isfinite(parameter.grad).all(), parameter_name
        with torch.no_grad():
            mean, precision = model.eval().encode(batch)
        assert mean.shape == precision.shape == (*batch.items.shape, lab.D)
        assert torch.isfinite(mean).all() and precision.min() >= 1e-3 and precision.max() <= 100


@over_the_class
def test_what_is_learned_moves_the_loss_once_warmed_up(lab, name, observe, update, rest):
    batch = lab.packed(lab.draw_histories(1, 6, shortest=3), with_targets=True)
    for model in models_of(lab, (name, observe, update, rest), every=False):
        model = lab.shaken(model).train()
        model.loss(batch).backward()
        for parameter_name, parameter in model.blocks[0].named_parameters():
            # Without a Kalman gain precision acts through the weights of later layers alone, and softmax weights do not
            # change when the precision of all keys is scaled alike; `delta` then scales with them, and its gain stays.
            scaled_away = update["update"] != "kalman" or observe.get("estimator") == "delta"
            idle = scaled_away and parameter_name in (
                "precision.discount_logit",
                "precision.decay_rate",
            )
            if ("update" in parameter_name or parameter_name.startswith("precision")) and not idle:
                assert parameter.grad is not None and parameter.grad.any(), parameter_name


@over_the_class
def test_a_user_is_scored_from_that_user_s_past_alone(lab, name, observe, update, rest):
    mine = HISTORIES[0]
    for training, model in itertools.product((False, True), models_of(lab, (name, observe, update, rest), every=False)):
        model = lab.shaken(model)
        (alone,) = lab.beliefs(model, [mine], training=training)
        together = lab.beliefs(model, [*HISTORIES[1:3], mine, HISTORIES[3]], training=training)[2]
        lab.assert_same(alone, together)
        if name != "bert4rec":  # which sees both ways
            longer, _ = lab.beliefs(model, [[*mine, 11, 2, 5], HISTORIES[1]], training=training)
            lab.assert_same(alone, [values[: len(mine)] for values in longer])


@over_the_class
def test_a_state_dict_carries_all_that_scores_depend_on(lab, name, observe, update, rest):
    case = name, observe, update, rest
    for model, other in zip(models_of(lab, case, every=False), models_of(lab, case, every=False, seed=5), strict=True):
        model, other = lab.shaken(model), other.double()
        other.load_state_dict(model.state_dict())
        other.refresh()
        for one, two in zip(lab.beliefs(model, HISTORIES), lab.beliefs(other, HISTORIES), strict=True):
            assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


@over_the_class
def test_before_the_warm_up_every_member_is_the_plain_layer(lab, name, observe, update, rest):
    spec = MODELS[name]
    config = spec.config(hidden_size=lab.D, max_length=lab.T, dropout=0.0, **spec.arms["matched"])
    for tracked in models_of(lab, (name, observe, update, rest)):
        tracked, plain = lab.shaken(tracked), spec.build(config, None, lab.counts_of()).double()
        plain.load_state_dict({name: tracked.state_dict()[name] for name in plain.state_dict()})
        for model in (tracked, plain):
            model.set_ramp(0.0)
        for one, two in zip(*(lab.beliefs(model, HISTORIES) for model in (tracked, plain)), strict=True):
            torch.testing.assert_close(one[0], two[0], rtol=1e-10, atol=1e-11)


# The parts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [[0, 0, 2, 3, 30, 1, 1, 90, 4, 7, 1, 0, 55], [0] * 13, [0, *[4] * 12]])
def test_empirical_bayes_gives_every_item_its_posterior_precision_from_the_start(lab, counts):
    counts = torch.tensor(counts)
    model = MODELS["sasrec"].build(
        MODELS["sasrec"].config(hidden_size=8), CoreConfig(initial="empirical_bayes"), counts, seed=0
    )
    items = torch.arange(1, 13)[None]
    found = model.item_precision(items, model.item_embedding(items))[0, :, 0]
    c = counts[1:].double()
    if c.var(correction=0) <= c.mean():
        assert (found == 1).all()
        return
    # With prior shape nu the most frequent and the rarest give nu away: (c1 + nu) / (c0 + nu) is their ratio.
    ratio = (found.max() / found.min()).double()
    nu = (c.max() - ratio * c.min()) / (ratio - 1)
    torch.testing.assert_close(found.double(), (c + nu) / (c.mean() + nu), rtol=1e-5, atol=1e-6)
    assert not list(model.item_precision.parameters())


@pytest.mark.parametrize("propagation", ["discount", "decay"])
def test_precision_leaves_a_layer_scaled_by_one_learned_number(propagation):
    layer = LayerPrecision(CoreConfig(propagation=propagation), hidden_size=4, head_width=2).double()
    ((name, parameter),) = layer.named_parameters()
    precision = torch.rand(2, 3, 4).double() + 0.5
    start = layer.predict(precision, torch.zeros(()))
    with torch.no_grad():
        parameter.fill_(-0.4)
    after = layer.predict(precision, torch.zeros(()))
    if propagation == "discount":
        torch.testing.assert_close(start, 0.99 * precision)
        torch.testing.assert_close(after, discount_precision(precision, 1 / (1 + math.exp(0.4))))
    else:
        assert torch.equal(start, precision)
        torch.testing.assert_close(after, decay_precision(precision, torch.tensor(-0.4).double()))
    assert parameter.numel() == 1 and name in ("discount_logit", "decay_rate")


def test_the_gate_starts_at_the_initial_gain_and_learns_at_the_rate_of_the_backbone(lab):
    for kind, rows in (("headwise", 2), ("elementwise", lab.D)):
        model = build(lab, update="gate", gate=kind, initial_gain=0.7)
        update = model.blocks[0].update
        assert isinstance(update, GateUpdate) and update.weight.shape == (rows, lab.D)
        torch.testing.assert_close(torch.sigmoid(update.offset), torch.full((rows,), 0.7))
        assert not update.weight.any()
        assert not any(model.is_precision_parameter(name) for name, _ in model.named_parameters() if "update" in name)


def test_each_rule_takes_up_its_share_of_the_innovation(lab):
    shares = {}
    for core in UPDATING[1:]:
        model = build(lab, **core).double().eval()
        model.set_ramp(1.0)
        block, seen = model.blocks[0], {}
        block.mixer.register_forward_hook(lambda module, args, output, seen=seen: seen.update(e=output.innovation))
        block.register_forward_hook(lambda module, args, output, seen=seen: seen.update(h=args[0].mean))
        block.norm_ffn.register_forward_hook(lambda module, args, output, seen=seen: seen.update(after=args[0]))
        with torch.no_grad():
            model.encode(lab.packed([[1, 2, 3]]))
        share = (seen["after"] - seen["h"]) / seen["e"]
        shares[core["update"]] = share.mean().item()
        torch.testing.assert_close(share, share.mean().expand_as(share), rtol=1e-6, atol=1e-6)
    assert shares == {
        "residual": pytest.approx(1),
        "fixed": pytest.approx(0.6),
        "gate": pytest.approx(CoreConfig().initial_gain),
    }


def test_equal_seeds_give_the_shared_weights_equal_values_whatever_the_member(lab):
    reference = build(lab, seed=3).state_dict()
    for core in (*OBSERVING, *UPDATING, *PROPAGATING):
        for name, value in build(lab, seed=3, **core).state_dict().items():
            if name in reference and "precision" not in name:
                assert torch.equal(reference[name], value), f"{core}: {name}"


def test_attention_dropout_spares_precision_and_drops_whole_pairs_for_all_coordinates(lab):
    torch.manual_seed(0)
    mixer = SoftmaxAttention(8, 2, estimator="reml", kriging="per_dimension", dropout=0.5).double().train()
    with torch.no_grad():
        mixer.value.weight.zero_()
        mixer.value.bias.fill_(1.0)
    x, precision = torch.randn(1, 6, 8).double(), torch.ones(1, 6, 8).double()
    context = SequenceContext(torch.zeros(1, 6).long(), torch.arange(6)[None])
    e, r = mixer(x, precision, context)
    _, again = mixer(x, precision, context)
    assert torch.equal(r, again)
    heads = e.view(6, 2, 4)
    torch.testing.assert_close(heads, heads[..., :1].expand_as(heads))  # equal trust, equal values, one mask
    assert not torch.allclose(e, torch.ones_like(e))


# What is refused ---------------------------------------------------------------------------------------


class Silent(torch.nn.Module):
    """A mixer that does not say how precise it is."""

    def forward(self, x, precision, context, *, ramp=1.0):
        return Observation(x, None)


def test_a_mixer_without_a_precision_takes_any_update_but_kalman_s_which_is_refused_with_those_that_have_one():
    shape = {"hidden_size": 8, "inner_size": 8, "dropout": 0.0, "norm_eps": 1e-8}
    core = CoreConfig(propagation="discount")
    for mixer, name in ((Silent(), "Silent"), (SoftmaxAttention(8, 2), "SoftmaxAttention")):
        layer = LayerPrecision(core, hidden_size=8, head_width=4)
        message = (
            f"update 'kalman' needs an observation precision, and {name} gives none as it is set up; choose "
            r"update residual, gate or fixed, or a mixer that has one: attention, .*regime \(estimator reml, "
            r"reml_naive, sandwich, delta, design_effect\); pointwise \(estimator sandwich\); rfa, .*longhorn "
            r"\(of their own\)"
        )
        for update in (KalmanUpdate(), None):
            with pytest.raises(UserError, match=message):
                Block(mixer, layer, update=update, **shape)
        for update in (FixedUpdate(), make_update(CoreConfig(update="gate"), hidden_size=8, n_heads=2)):
            block = Block(copy.deepcopy(mixer), copy.deepcopy(layer), update=update, **shape).eval()
            context = SequenceContext(torch.zeros(1, 3).long(), torch.arange(3)[None])
            _, precision = block(Belief(torch.randn(1, 3, 8), torch.ones(1, 3, 8)), context, 1.0)
            torch.testing.assert_close(precision, torch.full_like(precision, 0.99))  # discounted, nothing observed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fixed_gain": 0.5}, "core.fixed_gain has no effect with update 'kalman'; leave it out or take update fixed"),
        ({"gate": "headwise"}, "core.gate has no effect with update 'kalman'; leave it out or take update gate"),
        ({"propagation": "decay", "jacobian": "exact"}, "core.jacobian has no effect with propagation 'decay'"),
        ({"propagation": "discount", "process_noise": False}, "core.process_noise has no effect with propagation"),
        ({"sandwich_centre": "innovation"}, "core.sandwich_centre has no effect with estimator 'reml'"),
        (
            {"initial": "table", "initial_gain": 0.5},
            "core.initial_gain has no effect with initial 'table' and prior_sca",
        ),
        (
            {"initial": "uniform", "estimator": "delta", "prior_dof": 2.0},
            "core.prior_dof has no effect with initial 'uniform' and prior_scale 'off' and estimator 'delta'",
        ),
        ({"process_noise": False, "q_max": 7.0}, "core.q_max has no effect with process_noise False"),
        (
            {"jacobian": "exact", "jacobian_rank": 3},
            "core.jacobian_rank has no effect with jacobian 'exact'; leave it out or take low_rank",
        ),
        ({"jacobian": "running_mean", "jacobian_detach": True}, "core.jacobian_detach has no effect with jacobian"),
        ({"update": "fixed", "fixed_gain": 1.5}, "core.fixed_gain is 1.5; give a number > 0 and <= 1"),
        ({"update": "kalmann"}, "core.update is 'kalmann'; did you mean 'kalman'"),
        ({"estimator": "design"}, "core.estimator is 'design'; "),
    ],
)
def test_a_setting_that_is_wrong_or_has_no_effect_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        load_run_config(model="sasrec", arm="bft", **settings)


def test_what_is_not_defined_for_a_backbone_is_refused_with_what_is(lab):
    for estimator in ("reml", "reml_naive", "delta", "design_effect"):
        with pytest.raises(
            UserError, match=f"estimator '{estimator}' is not defined for silu weights.*choose sandwich"
        ):
            build(lab, "hstu", estimator=estimator)
    with pytest.raises(UserError, match="kriging per_dimension is not defined for silu weights; take scalar"):
        build(lab, "hstu", estimator="sandwich", kriging="per_dimension")
    with pytest.raises(UserError, match="sandwich_centre has no effect with softmax weights, which sum to one"):
        build(lab, "sasrec", estimator="sandwich", sandwich_centre="innovation")
    spec = MODELS["sasrec"]
    with pytest.raises(UserError, match="max_length is at most 64, got 65; lower it or take kriging scalar"):
        spec.build(spec.config(max_length=65), CoreConfig(kriging="per_dimension"), lab.counts_of())


def test_a_run_of_each_kind_is_written_and_read_back_alike():
    for core in (*OBSERVING, *UPDATING, *PROPAGATING, *STARTING):
        config = load_run_config(model="sasrec", arm="bft", core=core)
        assert all(getattr(config.core, key) == value for key, value in core.items())
    assert load_run_config(model="hstu", arm="bft").core.estimator == "sandwich"
    assert np.isclose(load_run_config(model="sasrec", arm="bft", settings=["update=fixed"]).core.fixed_gain, 0.9)
