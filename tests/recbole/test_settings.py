"""What a RecBole config says of our models: what is read, refused and warned about."""

from __future__ import annotations

import logging
import sys

import pytest

from recbft.errors import UserError
from tests.recbole.conftest import trainer_of, warned


def test_recboles_names_and_ours_say_what_the_model_is(built):
    changes = {"hidden_dropout_prob": 0.1, "attn_dropout_prob": 0.2, "layer_norm_eps": 1e-5, "inner_size": 24}
    backbone = built(**changes, lam_max=7.0, initializer_range=0.01)[2].run
    assert (backbone.backbone.dropout, backbone.backbone.attention_dropout) == (0.1, 0.2)
    assert (backbone.backbone.norm_eps, backbone.backbone.inner_size) == (1e-5, 24)
    assert (backbone.backbone.max_length, backbone.backbone.initializer_range) == (12, 0.01)
    assert backbone.core.lam_max == 7.0


def test_sections_say_what_bare_keys_say(built):
    sections = {"core": {"lam_max": 7.0}, "mixing": {"rounds": 1}, "moe": {"experts": 3}}
    config, _, model = built(mixer="boosted", **sections, training={"warmup_steps": 5, "precision_lr_multiplier": 10})
    run = model.run
    assert (run.core.lam_max, run.mixing.rounds, run.moe.experts, run.training.warmup_steps) == (7.0, 1, 3, 5)
    backbone, precision = trainer_of(config, model).optimizer.param_groups
    assert precision["lr"] == 10 * backbone["lr"]


def test_a_training_key_that_recboles_trainer_would_not_read_is_refused():
    for key, use in (
        ("patience", "write stopping_step at the top of the config"),
        ("epochs", "write epochs at the top of the config"),
        ("cuda_graphs", "leave it out"),
    ):
        with pytest.raises(UserError) as error:
            read_settings(training={"warmup_steps": 5, key: 1})
        assert str(error.value) == f"training.{key} has no effect, since RecBole's own trainer runs; {use}"


def test_every_key_of_training_is_read_here_or_has_its_reason():
    from recbft.config.fields import field_types
    from recbft.recbole.settings import OWN_TRAINING, RECBOLE_KEYS
    from recbft.training.run_config import TrainingConfig

    ours = {"cuda_graphs", "optimizer", "samples", "threads", "warm_start", "warm_start_keep"}
    ours |= {"tensorboard", "trackers"}
    assert set(field_types(TrainingConfig)) - {*OWN_TRAINING, *RECBOLE_KEYS} == ours


def test_a_section_that_is_none_and_a_bare_key_of_two_sections_are_refused():
    with pytest.raises(UserError, match="core is 5; it is a section: give keys and values"):
        read_settings(core=5)
    with pytest.raises(UserError, match="key 'gate' is in mixing and core; write it inside the section that is meant"):
        read_settings(mixer="boosted", gate="headwise")
    assert read_settings(mixer="boosted", core={"update": "gate", "gate": "headwise"}).core.gate == "headwise"


def read_settings(**values):
    from recbft.recbole.settings import run_config

    return run_config("SASRecBFT", {"loss_type": "CE", **values})


def test_a_whole_number_that_the_tuner_gives_as_a_float_is_taken(built):
    run = built(n_layers=1.0, warmup_steps=3.0, core={"jacobian_rank": 4.0}, mixer="boosted", rounds=3.0)[2].run
    found = run.backbone.n_layers, run.training.warmup_steps, run.core.jacobian_rank, run.mixing.rounds
    assert found == (1, 3, 4, 3) and all(isinstance(number, int) for number in found)
    for wrong in ({"n_layers": 1.5}, {"epochs": 2.0}, {"MAX_ITEM_LIST_LENGTH": 12.0}):  # RecBole counts by the last two
        with pytest.raises(UserError, match=f"{next(iter(wrong))} is .*; give a whole number"):
            built(**wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_type": "BPR", "train_neg_sample_args": {"sample_num": 1}}, "loss_type is 'BPR'"),
        ({"arm": "btf"}, "arm of sasrec is 'btf'; did you mean 'bft'?"),
        ({"arm": "matched", "lam_max": 3}, "core.lam_max has no effect in arm 'matched'"),
        ({"hidden_size": 9}, "n_heads is 2, which does not divide hidden_size 9"),
        ({"estimator": "rmel"}, "core.estimator is 'rmel'; did you mean 'reml'?"),
        ({"TIME_FIELD": "when"}, "has no time column 'when' among those read (user_id, item_id)"),
        ({"USER_ID_FIELD": "uid"}, "has no user column 'uid' among those read (item_id, timestamp); name the column"),
        ({"load_col": {"inter": ["uid"]}}, "has no user column 'user_id' among those read (none); name the column in"),
        ({"clip_grad_norm": 5.0}, "clip_grad_norm is 5.0; RecBole takes keys: write clip_grad_norm: {max_norm: 5.0}"),
        ({"topk": [5]}, "valid_metric is 'NDCG@10', which is not among what is measured: Hit, NDCG, MRR at 5; change"),
        ({"valid_metric": "HR@10"}, "valid_metric is 'HR@10', which is not among what is measured"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(changes, message, built):
    with pytest.raises(UserError) as error:
        built(**changes)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"valid_metric": "nDcG@10"},
        {"valid_metric": "mrr@5", "topk": 5},
        {"valid_metric": "GAUC", "metrics": "GAUC"},
        {"valid_metric": "ItemCoverage@10", "metrics": ["ItemCoverage"]},
        {"valid_metric": "NDCG@20", "eval_step": 0},
    ],
)
def test_a_validation_metric_that_is_measured_or_not_used_is_taken(changes, settings):
    from recbole.config import Config

    Config(model="SASRecBFT", dataset="tiny", config_dict={**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_dropout_prob": 2}, "hidden_dropout_prob is 2.0; give a number >= 0 and < 1"),
        ({"arm": False}, "arm is False; give text"),  # off, as RecBole reads YAML
        ({"learning_rate": "fast"}, "learning_rate is 'fast'; give a number"),
        ({"MAX_ITEM_LIST_LENGTH": 12, "max_length": 0}, "backbone.max_length is 0; give a whole number >= 1"),
        (
            {"warmup_steps": 5, "training": {"warmup_steps": -1}},
            "training.warmup_steps is -1; give a whole number >= 0",
        ),
    ],
)
def test_a_wrong_value_is_named_by_the_key_that_the_config_has_it_from(changes, message):
    with pytest.raises(UserError) as error:
        read_settings(**changes)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("SASRecBFT", {"estimatr": "reml"}, ["unknown key 'estimatr' has no effect; did you mean 'estimator'?"]),
        ("SASRecBFT", {"embedding_size": 3}, ["unknown key 'embedding_size' has no effect; did you mean 'hidden_size"]),
        ("SASRecBFT", {"mask_ratio": 0.3}, ["key 'mask_ratio' has no effect: model 'sasrec' has no 'mask_probability"]),
        ("SASRecBFT", {"patience": 3}, ["unknown key 'patience' has no effect; RecBole calls it 'stopping_step'"]),
        ("SASRecBFT", {"where": "rating>3"}, ["unknown key 'where' has no effect; RecBole calls it 'val_interval'"]),
        ("SASRecBFT", {"horizon": 3.0}, ["unknown key 'horizon' has no effect"]),  # of another mixer
        ("SASRecBFT", {"mixer": "rfa", "horizon": 3.0, "experts": 3}, []),
        ("SASRecBFT", {"encoding": "utf-8", "tail_ratio": 0.1, "neg_sampling": None}, []),  # read, but not listed
        ("BERT4RecBFT", {"hidden_act": "gelu"}, []),  # what it has anyway
        (
            "BERT4RecBFT",
            {"hidden_act": "relu"},
            ["key 'hidden_act' has no effect: model 'bert4rec' has no 'activat"],
        ),
    ],
)
def test_a_key_without_effect_is_warned_about(name, changes, expected, built, caplog):
    with caplog.at_level(logging.WARNING, "recbft.recbole.settings"):
        built(name, **changes)
    assert [told[: len(said)] for told, said in zip(warned(caplog, "settings"), expected, strict=True)] == expected


def test_options_of_recboles_own_scripts_are_no_unknown_keys(built, caplog, monkeypatch):
    options = ["config_files=a.yaml b.yaml", "nproc=1", "group_offset=0"]  # run_recbole.py's
    options += ["params_file=hyper.test", "output_file=a.result", "display_file=a.html", "tool=Hyperopt"]
    monkeypatch.setattr(sys, "argv", ["run_recbole.py", *(f"--{option}" for option in options), "--stoping_step=3"])
    with caplog.at_level(logging.WARNING, "recbft.recbole.settings"):
        built()
    assert warned(caplog, "settings") == ["unknown key 'stoping_step' has no effect; did you mean 'stopping_step'?"]


def test_settings_of_precision_are_warned_about_where_the_arm_has_none(built, caplog):
    with caplog.at_level(logging.WARNING, "recbft.recbole.adapter"):
        built(warmup_steps=7, precision_lr_multiplier=3)
        built(arm="published")
        assert not warned(caplog, "adapter")
        built(arm="published", warmup_steps=7, precision_lr_multiplier=3)
    why = "has no effect: this model has neither precision nor recency to learn"
    assert warned(caplog, "adapter") == [f"precision_lr_multiplier {why}", f"warmup_steps {why}"]
