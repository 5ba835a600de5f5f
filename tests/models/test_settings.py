"""The settings of models: their defaults, their limits, and what is refused with what to give."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from recbft.errors import UserError
from recbft.mixers.head_dynamics import RobustFilterConfig
from recbft.models import MODELS, CoreConfig
from recbft.training.run_config import load_run_config

SHARED = {
    "hidden_size": 64, "n_layers": 2, "n_heads": 2, "inner_size": None, "max_length": 50, "absolute_positions": True,
    "positions": "oldest", "embedding_scale": None, "initializer_range": 0.02, "recency_decay": True,
    "output_projection": False,
    "loss": "ce", "num_negatives": None, "negatives": None, "gbce_t": None,
    "item_vector": None, "content_events": 5, "content_neighbours": 50, "content_width": 256, "content_mean": True,
    "thinned_items": 0.12, "reads_reliability": None, "linear_init": None, "recency_start": None,
}  # fmt: skip
OWN = {
    "sasrec": {"attention_dropout": None, "activation": "gelu", "layer": "pre_norm", "dropout": 0.5, "norm_eps": 1e-8},
    "bert4rec": {
        "attention_dropout": None, "layer": "pre_norm", "head": "tied", "positions": "latest", "dropout": 0.5,
        "norm_eps": 1e-8, "mask_probability": 0.2, "last_item_probability": 0.5, "mask_seed": 0,
    },
    "hstu": {
        "feed_forward": True, "time_bias": False, "show_target_time": False, "activation": "gelu", "dropout": 0.2,
        "norm_eps": 1e-6,
    },
}  # fmt: skip


@pytest.mark.parametrize("model", OWN)
def test_what_runs_rely_on_without_asking_stays_as_it_is(model):
    assert dataclasses.asdict(MODELS[model].config()) == {**SHARED, **OWN[model]}


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("sasrec", {"hidden_size": 1, "n_heads": 1, "n_layers": 1, "inner_size": 1, "max_length": 1, "dropout": 0.0}),
        ("sasrec", {"loss": "bce", "num_negatives": 1, "attention_dropout": 0.0}),
        ("sasrec", {"loss": "gbce", "gbce_t": 0.0}),
        ("sasrec", {"loss": "gbce", "gbce_t": 1.0}),
        ("bert4rec", {"max_length": 2, "last_item_probability": 0.0, "mask_seed": 0}),
        ("bert4rec", {"last_item_probability": 1.0}),
        ("hstu", {"time_bias": True, "show_target_time": True}),
    ],
    ids=str,
)
def test_the_least_and_the_largest_values_that_can_be_are_taken(model, settings):
    assert settings.items() <= dataclasses.asdict(MODELS[model].config(**settings)).items()


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("sasrec", {"n_heads": 3}, r"n_heads is 3, which does not divide hidden_size 64; choose one of 1, 2, 4, 8, 16"),
        ("sasrec", {"estimator": "remi"}, r"core.estimator is 'remi'; did you mean 'reml'"),
        ("sasrec", {"fixed_gain": 0.5}, "core.fixed_gain has no effect with update 'kalman'; leave it out or take upd"),
        ("sasrec", {"gate": "headwise"}, "core.gate has no effect with update 'kalman'; leave it out or take update g"),
        ("sasrec", {"propagation": "decay", "jacobian": "exact"}, "core.jacobian has no effect with propagation 'dec"),
        ("sasrec", {"propagation": "discount", "process_noise": False}, "core.process_noise has no effect with propag"),
        ("sasrec", {"sandwich_centre": "innovation"}, "core.sandwich_centre has no effect with estimator 'reml'"),
        ("sasrec", {"initial": "table", "initial_gain": 0.5}, "core.initial_gain has no effect with initial 'table'"),
        (
            "sasrec",
            {"initial": "uniform", "estimator": "delta", "prior_dof": 2.0},
            "core.prior_dof has no effect with initial 'uniform' and prior_scale 'off' and estimator 'delta'",
        ),
        (
            "sasrec",
            {"process_noise": False, "process_noise_start": -5.0},
            "core.process_noise_start has no effect with",
        ),
        (
            "sasrec",
            {"estimator": "delta", "prior_variance": "running"},
            "prior_variance running has no effect with est",
        ),
        ("sasrec", {"prior_variance": "runing"}, "core.prior_variance is 'runing'; give a number or one of running"),
        ("sasrec", {"process_noise": False, "q_max": 7.0}, "core.q_max has no effect with process_noise False"),
        ("sasrec", {"jacobian": "exact", "jacobian_rank": 3}, "core.jacobian_rank has no effect with jacobian 'exact'"),
        ("sasrec", {"jacobian": "running_mean", "jacobian_detach": True}, "core.jacobian_detach has no effect with"),
        ("sasrec", {"num_negatives": 5}, "num_negatives has no effect with loss 'ce'; leave it out or choose loss sam"),
        ("sasrec", {"loss": "bce", "negatives": "in_batch"}, "negatives has no effect with loss 'bce'"),
        ("hstu", {"loss": "bce", "gbce_t": 0.5}, "gbce_t has no effect with loss 'bce'; .* choose loss gbce"),
        ("hstu", {"feed_forward": False, "inner_size": 8, "arm": "matched"}, "inner_size has no effect with feed_for"),
        ("hstu", {"feed_forward": False, "activation": "relu", "arm": "matched"}, "activation has no effect with feed"),
        ("hstu", {"lam_max": 10.0, "arm": "matched"}, "core.lam_max has no effect in arm 'matched' of hstu; leave it"),
        (
            "hstu",
            {"loss": "top1"},
            "loss is 'top1'; choose one of bce, bpr, ce, ce_unseen, focal, gbce, sampled_softmax",
        ),
        ("hstu", {"show_target_time": True}, "show_target_time has no effect without time_bias"),
        ("bert4rec", {"absolute_positions": False, "positions": "oldest"}, "positions has no effect without abs"),
    ],
)
def test_a_setting_that_cannot_be_is_named_with_what_to_give(model, settings, message):
    with pytest.raises(UserError, match=message):
        load_run_config(model=model, **{"arm": "bft", **settings})


@pytest.mark.parametrize(
    ("model", "name", "values", "more"),
    [
        *(("sasrec", name, (0,), {}) for name in ("max_length", "hidden_size", "n_layers", "inner_size")),
        *(("sasrec", name, (0.0,), {}) for name in ("initializer_range", "norm_eps", "embedding_scale", "prior_dof")),
        ("sasrec", "jacobian_rank", (0,), {}),
        ("sasrec", "dropout", (-0.1, 1.0), {}),
        ("sasrec", "attention_dropout", (-0.1, 1.0), {}),
        ("sasrec", "initial_gain", (0.0, 1.0), {}),
        ("sasrec", "fixed_gain", (0.0, 1.5), {"update": "fixed"}),
        ("sasrec", "recency_start", (0.0, 1.0), {}),
        ("sasrec", "num_negatives", (0,), {"loss": "bce"}),
        ("sasrec", "gbce_t", (-0.1, 1.25), {"loss": "gbce"}),
        ("bert4rec", "mask_probability", (0.0, 1.0), {}),
        ("bert4rec", "max_length", (1,), {}),
        ("bert4rec", "last_item_probability", (-0.1, 1.5), {}),
    ],
)
def test_a_value_out_of_range_is_named_with_what_to_give(model, name, values, more):
    for value in values:
        with pytest.raises(UserError, match=f"{name} is {value}; give a (whole )?number"):
            load_run_config(model=model, arm="bft", **{name: value}, **more)


@pytest.mark.parametrize(
    ("model", "backbone", "core", "message"),
    [
        ("hstu", {}, {"estimator": "reml"}, "estimator 'reml' is not defined for silu weights.*choose sandwich"),
        ("hstu", {}, {"kriging": "per_dimension"}, "kriging per_dimension is not defined for silu weights; take"),
        ("hstu", {"feed_forward": False}, {}, "backbone.feed_forward is false, but arm 'bft' needs true, to predict"),
        ("hstu", {"activation": "relu"}, {}, "backbone.activation is relu, but arm 'bft' needs gelu, to predict"),
        ("bert4rec", {"layer": "post_norm"}, {}, "backbone.layer is post_norm, but arm 'bft' needs pre_norm"),
        ("sasrec", {"layer": "original"}, {}, "backbone.layer is original, but arm 'bft' needs pre_norm, to predict"),
        (
            "sasrec",
            {},
            {"estimator": "sandwich", "sandwich_centre": "innovation"},
            "sandwich_centre has no effect with softmax weights, which sum to one",
        ),
        (
            "sasrec",
            {"max_length": 65},
            {"kriging": "per_dimension"},
            "max_length is at most 64, got 65; lower it or take kriging scalar",
        ),
        ("sasrec", {"recency_decay": False, "recency_start": 0.9}, {}, "recency_start has no effect without a recency"),
        ("sasrec", {"loss": "bce"}, {}, "loss 'bce' needs items to draw from, but there is only one"),
    ],
)
def test_what_a_model_cannot_be_built_with_is_refused(model, backbone, core, message):
    spec = MODELS[model]
    counts = torch.tensor([0, 3]) if "loss" in backbone else torch.arange(5)
    with pytest.raises(UserError, match=message):
        spec.build(spec.config(**backbone), CoreConfig(**{**spec.core, **core}), counts)


def test_hstu_says_that_it_caps_dropout_and_saves_what_is_used():
    with pytest.warns(UserWarning, match=r"dropout is 0.5, but HSTU takes at most 0.2; 0.2 is used"):
        config = load_run_config(model="hstu", arm="bft", dropout=0.5)
    assert config.backbone.dropout == 0.2 and config.core.estimator == "sandwich"


@pytest.mark.parametrize(("options", "told"), [(None, False), ({}, False), ({"time": True}, True)])
@pytest.mark.parametrize("model", ["sasrec", "bert4rec"])
def test_a_model_wants_times_where_its_mixer_reads_them(lab, model, options, told):
    mixing = None if options is None else RobustFilterConfig(**options)
    made = lab.build("matched", model, mixer="rfa", mixing=mixing)
    assert made.reads_times is told
