from __future__ import annotations

import logging
import sys
from contextlib import suppress

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from recbft.errors import UserError
from recbft.training.optimiser import DYNAMICS
from tests.recbole.conftest import NAMES


def training_counts(config, dataset):
    from recbft.recbole.adapter import training_counts  # imports RecBole: not while tests are collected

    return training_counts(config, dataset)


def rows_of(loader):
    return next(iter(loader))[0]


def trainer_of(config, model):
    from recbole.utils import get_trainer

    trainer = get_trainer(config["MODEL_TYPE"], config["model"])(config, model)
    trainer.tensorboard.close()
    return trainer


@pytest.mark.parametrize("name", NAMES)
def test_run_recbole_trains_and_tests_each_model(name, settings):
    from recbole.quick_start import run_recbole

    place = {"gpu_id": "0"} if torch.cuda.is_available() else {}
    result = run_recbole(model=name, dataset="tiny", config_dict={**settings, **place})
    assert set(result["test_result"]) == {"hit@10", "ndcg@10", "mrr@10"}
    assert all(0 <= value <= 1 for value in result["test_result"].values())


@pytest.mark.parametrize("arm", ["published", "matched", "bft"])
def test_the_arm_is_a_key_of_the_config(arm, built):
    _, parts, model = built(arm=arm)
    assert model.run.arm == arm and (model.recommender.core is not None) == (arm == "bft")
    assert torch.isfinite(model.calculate_loss(rows_of(parts[2])))


def test_recboles_names_and_ours_say_what_the_model_is(built):
    changes = {"hidden_dropout_prob": 0.1, "attn_dropout_prob": 0.2, "layer_norm_eps": 1e-5, "inner_size": 24}
    backbone = built(**changes, lam_max=7.0, initializer_range=0.01)[2].run
    assert (backbone.backbone.dropout, backbone.backbone.attention_dropout) == (0.1, 0.2)
    assert (backbone.backbone.norm_eps, backbone.backbone.inner_size) == (1e-5, 24)
    assert (backbone.backbone.max_length, backbone.backbone.initializer_range) == (12, 0.01)
    assert backbone.core.lam_max == 7.0


def test_item_numbers_are_recboles_and_counts_are_of_the_training_events(built, dataset):
    config, parts, model = built()
    counts = training_counts(config, parts[0]._dataset)
    ours = dataset.training_counts[1:]
    assert counts[0] == 0 and counts.sum() == ours.sum()
    number = parts[0]._dataset.field2token_id["item_id"]
    assert [counts[number[str(raw)]] for raw in dataset.item_ids] == ours.tolist()
    assert model.recommender.item_table().weight.shape[0] == parts[0]._dataset.item_num == dataset.num_items + 1


@pytest.mark.parametrize("window", [1, 2, 50])
def test_counts_do_not_depend_on_the_window(window, prepared, dataset):
    config, (train, *_) = prepared(MAX_ITEM_LIST_LENGTH=window)
    number = train._dataset.field2token_id["item_id"]
    counts = training_counts(config, train._dataset)
    assert [counts[number[str(raw)]] for raw in dataset.item_ids] == dataset.training_counts[1:].tolist()


def test_a_row_trains_the_cross_entropy_of_its_own_target(built):
    _, parts, model = built(hidden_dropout_prob=0.0, arm="matched")
    rows = rows_of(parts[2])
    state = model.forward(rows["item_id_list"], rows["item_length"])
    scores = state @ model.recommender.item_table().weight[1:].T
    expected = F.cross_entropy(scores, rows["item_id"] - 1)
    torch.testing.assert_close(model.calculate_loss(rows), expected)


@pytest.mark.parametrize(("ft_ratio", "mask_ratio"), [(1.0, 0.5), (0.0, 1e-9), (0.5, 0.5)])
def test_a_row_of_bert4rec_keeps_its_whole_history_and_masks_its_target_alone_as_often_as_asked(
    ft_ratio, mask_ratio, built, monkeypatch
):
    _, parts, model = built("BERT4RecBFT", ft_ratio=ft_ratio, mask_ratio=mask_ratio, mixer="attention")
    rows, seen = rows_of(parts[2]), []
    monkeypatch.setattr(model.recommender, "loss", lambda batch: seen.append(batch) or torch.zeros(()))
    model.calculate_loss(rows)
    [batch] = seen
    mask, found = model.recommender.append, batch.target > 0
    assert torch.equal(found, batch.items == mask)
    whole = torch.where(found, batch.target, batch.items)
    histories = [
        [*history[:length][-11:], target]  # the window of 12 holds the target too
        for history, length, target in zip(
            *(rows[key].tolist() for key in ("item_id_list", "item_length", "item_id")), strict=True
        )
    ]
    read = [whole[batch.segment == segment].tolist() for segment in range(len(batch.last))]
    assert sorted(read) == sorted(histories)
    masked = torch.stack([found[batch.segment == segment].sum() for segment in range(len(batch.last))])
    alone = found.flatten()[batch.last] & (masked == 1)
    if ft_ratio == 1:
        assert alone.all()
    elif ft_ratio == 0:
        assert (masked == 1).all() and not alone.all()
    else:
        assert 0.3 < alone.float().mean() < 0.8


@pytest.mark.parametrize("name", NAMES)
def test_scores_depend_on_the_users_own_row_and_not_on_padding(name, built):
    _, parts, model = built(name)
    model.eval()
    rows = rows_of(parts[2])
    with torch.no_grad():
        scores = model.full_sort_predict(rows)
        alone = model.full_sort_predict(rows[5:6])
        wider = {key: rows[key][5:6] for key in ("item_id_list", "item_length")}
        wider["item_id_list"] = F.pad(wider["item_id_list"], (0, 4))
        padded = model.full_sort_predict(wider)
        single = model.predict(rows)
    torch.testing.assert_close(alone, scores[5:6])
    torch.testing.assert_close(padded, scores[5:6])
    torch.testing.assert_close(single, scores.gather(1, rows["item_id"][:, None]).squeeze(1))


def test_full_sort_gives_a_new_tensor_each_time(built):
    _, parts, model = built()
    model.eval()
    rows = rows_of(parts[2])
    with torch.no_grad():
        first = model.full_sort_predict(rows)
        kept = first.clone()
        first.fill_(0)
        assert torch.equal(model.full_sort_predict(rows), kept)


def test_the_trainer_has_a_precision_group_and_warms_up(built):
    from recbole.utils import get_trainer

    config, parts, model = built(warmup_steps=50, weight_decay=0.01, precision_lr_multiplier=10)
    trainer = get_trainer(config["MODEL_TYPE"], config["model"])(config, model)
    backbone, precision = trainer.optimizer.param_groups
    assert (backbone["lr"], backbone["weight_decay"]) == (1e-3, 0.01)
    assert (precision["lr"], precision["weight_decay"]) == (1e-2, 0.0)
    trainer._train_epoch(parts[0], 2)
    assert float(model.recommender.ramp) == pytest.approx(min(1, (3 * len(parts[0]) - 1) / 50))
    trainer.tensorboard.close()


def test_sections_say_what_bare_keys_say(built):
    sections = {"core": {"lam_max": 7.0}, "mixing": {"rounds": 1}, "moe": {"experts": 3}}
    config, _, model = built(mixer="boosted", **sections, training={"warmup_steps": 5, "precision_lr_multiplier": 10})
    run = model.run
    assert (run.core.lam_max, run.mixing.rounds, run.moe.experts, run.training.warmup_steps) == (7.0, 1, 3, 5)
    backbone, precision = trainer_of(config, model).optimizer.param_groups
    assert precision["lr"] == 10 * backbone["lr"]


@pytest.mark.parametrize(
    ("key", "use"),
    [
        ("epochs", "write epochs at the top of the config"),
        ("learning_rate", "write learning_rate at the top of the config"),
        ("weight_decay", "write weight_decay at the top of the config"),
        ("patience", "write stopping_step at the top of the config"),
        ("batch_size", "write train_batch_size at the top of the config"),
        ("clip_norm", "write clip_grad_norm at the top of the config"),
        ("autocast", "write enable_amp at the top of the config"),
        ("threads", "leave it out"),
        ("cuda_graphs", "leave it out"),
    ],
)
def test_a_training_key_that_recboles_trainer_would_not_read_is_refused(key, use):
    with pytest.raises(UserError) as error:
        read_settings(training={"warmup_steps": 5, key: 1})
    assert str(error.value) == f"training.{key} has no effect, since RecBole's own trainer runs; {use}"


def test_every_key_of_training_is_read_here_or_has_its_reason():
    from recbft.config.fields import field_types
    from recbft.recbole.settings import OWN_TRAINING, RECBOLE_TRAINING
    from recbft.training.config import TrainingConfig

    ours = {"cuda_graphs", "tensorboard", "threads", "warm_start", "warm_start_keep"}
    assert set(field_types(TrainingConfig)) - {*OWN_TRAINING, *RECBOLE_TRAINING} == ours


def test_a_section_that_is_none_is_refused():
    with pytest.raises(UserError, match="core is 5; it is a section: give keys and values"):
        read_settings(core=5)


def test_a_bare_key_of_two_sections_is_refused():
    with pytest.raises(UserError, match="key 'gate' is in mixing and core; write it inside the section that is meant"):
        read_settings(mixer="boosted", gate="headwise")
    assert read_settings(mixer="boosted", core={"update": "gate", "gate": "headwise"}).core.gate == "headwise"


def read_settings(**values):
    from recbft.recbole.settings import run_config

    return run_config("SASRecBFT", {"loss_type": "CE", **values})


@pytest.mark.parametrize(("arm", "warned"), [("bft", True), ("published", False)])
def test_another_trainer_trains_the_model_as_it_is_used_and_is_warned_about(arm, warned, built, caplog):
    from recbole.trainer import Trainer

    config, parts, model = built(arm=arm)
    trainer = Trainer(config, model)
    trainer.tensorboard.close()
    with caplog.at_level(logging.WARNING, "recbft.recbole.adapter"):
        for epoch in range(2):
            trainer._train_epoch(parts[0], epoch)
        trainer_of(*built(arm=arm)[::2])._train_epoch(parts[0], 0)
    said = [record.getMessage() for record in caplog.records if record.name == "recbft.recbole.adapter"]
    assert len(said) == warned and float(model.recommender.ramp) == 1
    assert not said or said[0].startswith("SASRecBFT is not trained by its own trainer: there is no warm-up and one le")


def test_stochastic_dynamics_take_half_the_rate_and_a_clipped_gradient(built):
    config, parts, model = built(mixer="rfa", learning_rate=0.01)
    trainer = trainer_of(config, model)
    *_, dynamics = trainer.optimizer.param_groups
    assert dynamics["lr"] == 0.005 and dynamics["clip_norm"] == DYNAMICS["clip_norm"]
    trainer._train_epoch(parts[0], 0)
    gradients = torch.cat([p.grad.flatten() for p in dynamics["params"] if p.grad is not None])
    assert 0 < gradients.norm() <= DYNAMICS["clip_norm"] * (1 + 1e-5)


def test_training_runs_without_anomaly_mode_and_leaves_it_as_it_was(built):
    from recbole.utils import get_trainer

    config, parts, model = built()
    trainer = get_trainer(config["MODEL_TYPE"], config["model"])(config, model)
    seen = []
    torch.autograd.set_detect_anomaly(True)

    def loss(rows):
        seen.append(torch.is_anomaly_enabled())
        return model.calculate_loss(rows)

    trainer._train_epoch(parts[0], 0, loss)
    assert set(seen) == {False} and torch.is_anomaly_enabled()
    trainer.tensorboard.close()


def test_evaluation_reads_factors_of_the_present_weights(built):
    _, parts, model = built(jacobian_in_evaluation="low_rank")
    rows = rows_of(parts[2])
    model.eval()
    with torch.no_grad():
        before = model.recommender.user_states(model_batch(model, rows)).precision
        for block in model.recommender.blocks:
            block.inner.weight.mul_(30)
        stale = model.recommender.user_states(model_batch(model, rows)).precision
        fresh = model.eval().recommender.user_states(model_batch(model, rows)).precision
    assert not torch.allclose(before, fresh) and not torch.allclose(stale, fresh)


def model_batch(model, rows):
    from recbft.models.contract import read_histories

    items, times, start, stop = model._histories(rows)
    [batch] = read_histories(model.recommender, items, start, stop, times=times, source="test")
    return batch


def test_a_saved_model_is_loaded_with_equal_scores(settings):
    from recbole.quick_start import load_data_and_model, run_recbole

    result = run_recbole(model="SASRecBFT", dataset="tiny", config_dict=dict(settings))
    import glob

    [file] = glob.glob(f"{settings['checkpoint_dir']}/*.pth")
    config, model, _, _, _, test_data = load_data_and_model(file)
    from recbole.utils import get_trainer

    trainer = get_trainer(config["MODEL_TYPE"], config["model"])(config, model)
    assert trainer.evaluate(test_data, load_best_model=False) == result["test_result"]
    trainer.tensorboard.close()


def test_a_training_resumed_from_a_checkpoint_goes_on_with_the_warm_up(built):
    from recbole.utils import get_trainer

    config, parts, model = built(epochs=2, warmup_steps=1000)
    trainer = get_trainer(config["MODEL_TYPE"], config["model"])(config, model)
    trainer.fit(parts[0], parts[1], verbose=False)
    ramp = float(model.recommender.ramp)
    again = get_trainer(config["MODEL_TYPE"], config["model"])(config, built()[2])
    again.resume_checkpoint(trainer.saved_model_file)
    assert 0 < float(again.model.recommender.ramp) <= ramp
    assert float(again.model.recommender.ramp) == pytest.approx((again.start_epoch * len(parts[0]) - 1) / 1000)
    for each in (trainer, again):
        each.tensorboard.close()


def test_a_training_resumed_as_another_model_is_warned_about(built, caplog):
    config, parts, model = built()
    trainer = trainer_of(config, model)
    trainer.fit(parts[0], parts[1], verbose=False)
    for changes, said in (
        ({"estimator": "delta", "learning_rate": 0.5}, ["core.estimator was 'reml' and is 'delta'"]),
        ({"recency_decay": False, "arm": "matched"}, ["arm was 'bft' and is 'matched'", "core.estimator was 'reml'"]),
        ({"learning_rate": 0.5, "epochs": 3}, []),
    ):
        with caplog.at_level(logging.WARNING, "recbft.recbole.trainer"), suppress(RuntimeError):  # other weights
            trainer_of(*built(**changes)[::2]).resume_checkpoint(trainer.saved_model_file)
        found = [record.getMessage() for record in caplog.records if record.name == "recbft.recbole.trainer"]
        assert len(found) == bool(said) and all(part in found[0] for part in said), changes
        caplog.clear()


def test_recboles_objective_for_tuning_takes_our_models(settings):
    from recbole.quick_start import objective_function

    result = objective_function({**settings, "model": "HSTUBFT", "dataset": "tiny"})
    assert result["model"] == "HSTUBFT" and 0 <= result["best_valid_score"] <= 1


def test_recboles_tuner_takes_our_models(settings, at_home):
    pytest.importorskip("hyperopt")
    from recbole.quick_start import objective_function
    from recbole.trainer import HyperTuning

    config = at_home / "fixed.yaml"
    config.write_text("\n".join(f"{key}: {value}" for key, value in {**settings, "dataset": "tiny"}.items()))
    with open(config, "a") as file:
        file.write("\nmodel: SASRecBFT\n")
    tuning = HyperTuning(
        objective_function, algo="exhaustive", params_dict={"choice": {"lam_max": [10, 100]}}, early_stop=5,
        fixed_config_file_list=[str(config)],
    )  # fmt: skip
    tuning.run()
    assert len(tuning.params2result) == 2 and tuning.best_params["lam_max"] in (10, 100)


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
        ({"estimator": "sandwhich"}, "did you mean 'sandwich'?"),
        ({"TIME_FIELD": "when"}, "has no time column 'when' among those read (user_id, item_id)"),
        ({"USER_ID_FIELD": "uid"}, "has no user column 'uid' among those read (item_id, timestamp); name the column"),
        (
            {"ITEM_ID_FIELD": "iid"},
            "no item column 'iid' among those read (user_id, timestamp); name the column in ITEM",
        ),
        ({"load_col": {"inter": ["uid"]}}, "has no user column 'user_id' among those read (none); name the column in"),
        ({"load_col": {"inter": ["user_id", "item_id"]}}, "has no time column 'timestamp' among those read"),
        ({"clip_grad_norm": 5.0}, "clip_grad_norm is 5.0; RecBole takes keys: write clip_grad_norm: {max_norm: 5.0}"),
        ({"topk": [5]}, "valid_metric is 'NDCG@10', which is not among what is measured: Hit, NDCG, MRR at 5; change"),
        ({"valid_metric": "NDCG"}, "valid_metric is 'NDCG', which is not among what is measured: Hit, NDCG, MRR at 10"),
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
        ({"MAX_ITEM_LIST_LENGTH": 0}, "MAX_ITEM_LIST_LENGTH is 0; give a whole number >= 1"),
        ({"arm": False}, "arm is False; give text"),  # off, as RecBole reads YAML
        ({"arm": ""}, "arm of sasrec is ''; choose one of bft, matched, published"),
        ({"learning_rate": "fast"}, "learning_rate is 'fast'; give a number"),
        ({"MAX_ITEM_LIST_LENGTH": 12, "max_length": 0}, "backbone.max_length is 0; give a whole number >= 1"),
        (
            {"MAX_ITEM_LIST_LENGTH": 12, "backbone": {"max_length": 0}},
            "backbone.max_length is 0; give a whole number >= 1",
        ),
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


def test_an_estimator_that_is_not_defined_for_hstu_is_refused(built):
    with pytest.raises(UserError, match="estimator"):
        built("HSTUBFT", estimator="reml")


def test_a_time_bias_reads_real_times_and_refuses_scaled_ones(built):
    _, parts, model = built("HSTU", time_bias=True)
    assert torch.isfinite(model.calculate_loss(rows_of(parts[2])))
    with pytest.raises(UserError, match=r"RecBole scales it to \[0, 1\]; set normalize_all: False"):
        built("HSTU", time_bias=True, normalize_all=True)


def write_data(folder, name, header, rows):
    (folder / name).mkdir()
    lines = ["\t".join(header), *("\t".join(map(str, row)) for row in rows)]
    (folder / name / f"{name}.inter").write_text("\n".join(lines) + "\n")


def test_fields_by_other_names_are_loaded_without_load_col(built, at_home):
    rows = [(f"u{user}", f"i{(user + step) % 9}", 60 * step) for user in range(6) for step in range(7)]
    write_data(at_home, "other", ["uid:token", "iid:token", "when:float", "stars:float"], [(*row, 1) for row in rows])
    names = {"USER_ID_FIELD": "uid", "ITEM_ID_FIELD": "iid", "TIME_FIELD": "when"}
    config, parts, model = built(dataset="other", data_path=str(at_home), **names)
    assert config["load_col"] == {"inter": ["uid", "iid", "when"]}
    assert torch.isfinite(model.calculate_loss(rows_of(parts[2])))


def test_a_time_bias_refuses_times_that_are_not_whole(built, at_home):
    rows = [(f"u{user}", f"i{(user + step) % 9}", step / 8) for user in range(6) for step in range(7)]
    write_data(at_home, "parts", ["user_id:token", "item_id:token", "timestamp:float"], rows)
    data = {"dataset": "parts", "data_path": str(at_home)}
    assert torch.isfinite(built("HSTU", **data)[2].calculate_loss(rows_of(built("HSTU", **data)[1][2])))
    with pytest.raises(
        UserError, match=r"backbone.time_bias reads 'timestamp', which holds 0\.\d+, not a whole number"
    ):
        built("HSTU", time_bias=True, **data)


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        (0, ""),
        (2**24 - 400, ""),
        (2**24 - 300, "in steps of 2: scores are not those"),  # of the latest of the times alone
        (10**9, "in steps of 64: scores are not those"),
    ],
)
def test_times_that_recbole_rounds_are_warned_about(begin, said, built, at_home, caplog):
    rows = [(f"u{user}", f"i{(user + step) % 9}", begin + 60 * step) for user in range(6) for step in range(9)]
    write_data(at_home, "late", ["user_id:token", "item_id:token", "timestamp:float"], rows)
    with caplog.at_level(logging.WARNING, "recbft.recbole.adapter"):
        built("HSTU", time_bias=True, dataset="late", data_path=str(at_home))
    assert said in caplog.text and bool(caplog.text) == bool(said)


def test_a_clock_of_seconds_is_refused_where_the_times_are_of_another_unit(built, at_home):
    for name, second in (("seconds", 1), ("thousandths", 1000)):
        rows = [
            (f"u{u}", f"i{(u + step) % 9}", second * (1_700_000_000 + 60 * step)) for u in range(6) for step in range(9)
        ]
        write_data(at_home, name, ["user_id:token", "item_id:token", "timestamp:float"], rows)
    how = {"mixer": "rfa", "mixing": {"time": True}, "data_path": str(at_home)}
    built(dataset="seconds", **how)
    with pytest.raises(UserError, match="a day of seconds, but the times of data set 'thousandths' are in ms"):
        built(dataset="thousandths", **how)


@pytest.fixture
def split_files(at_home):
    """The keys of a config that reads a data set whose files are split, histories of events without times."""
    (at_home / "split").mkdir()
    for part in ("train", "valid", "test"):
        header = "user_id:token\titem_id_list:token_seq\titem_id:token\n"
        (at_home / "split" / f"split.{part}.inter").write_text(header + "1\ta b\tc\n2\tb a\tc\n")
    return {
        "dataset": "split", "data_path": str(at_home), "benchmark_filename": ["train", "valid", "test"],
        "alias_of_item_id": ["item_id_list"], "load_col": {"inter": ["user_id", "item_id_list", "item_id"]},
    }  # fmt: skip


def test_a_time_bias_refuses_rows_without_times(built, split_files):
    with pytest.raises(UserError, match="but the rows lack 'timestamp' or 'timestamp_list'; have both in the files"):
        built("HSTU", time_bias=True, **split_files)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load_col": {"inter": ["item_id_list", "item_id"]}}, "no user column 'user_id' among those read (item_id_li"),
        ({"load_col": {"inter": ["user_id", "item_id"]}}, "no history column 'item_id_list' among those read (user_id"),
        ({"alias_of_item_id": None}, "one number stands for two items; set alias_of_item_id: [item_id_list]"),
    ],
)
def test_split_files_whose_histories_cannot_be_read_are_refused_in_one_line(changes, message, built, split_files):
    with pytest.raises(UserError) as error:
        built(**{**split_files, **changes})
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["SASRecBFT", "HSTU"])
def test_an_empty_history_is_refused_by_models_that_start_from_an_event(name, built):
    _, parts, model = built(name)
    rows = rows_of(parts[2])
    rows["item_length"][3], rows["item_id_list"][3] = 0, 0
    for use in (model.calculate_loss, model.predict, model.full_sort_predict):
        with pytest.raises(UserError, match=f"a row with an empty history, which {name} cannot read"):
            use(rows)


def test_a_key_that_nobody_knows_is_warned_about(built, caplog):
    with caplog.at_level(logging.WARNING, "recbft.recbole.settings"):
        built(estimatr="reml")
        built(embedding_size=32)
    assert "unknown key 'estimatr' has no effect; did you mean 'estimator'?" in caplog.text
    assert "unknown key 'embedding_size' has no effect; did you mean 'hidden_size'?" in caplog.text


def test_a_key_that_is_a_number_is_warned_about(caplog):
    from recbft.recbole.settings import warn_about_unknown

    with caplog.at_level(logging.WARNING, "recbft.recbole.settings"):
        warn_about_unknown(read_settings(), {5: 3}, ())
    assert caplog.messages == ["unknown key 5 has no effect"]


def test_keys_that_recbole_reads_without_listing_them_are_known(built, caplog):
    with caplog.at_level(logging.WARNING, "recbft.recbole.settings"):
        built(encoding="utf-8", tail_ratio=0.1, neg_sampling=None)  # the last of older versions, and not set
    assert not [record for record in caplog.records if record.name == "recbft.recbole.settings"]


def test_options_of_recboles_own_scripts_are_no_unknown_keys(built, caplog, monkeypatch):
    options = ["config_files=a.yaml b.yaml", "nproc=1", "group_offset=0"]  # run_recbole.py's
    options += ["params_file=hyper.test", "output_file=a.result", "display_file=a.html", "tool=Hyperopt"]
    monkeypatch.setattr(sys, "argv", ["run_recbole.py", *(f"--{option}" for option in options), "--stoping_step=3"])
    with caplog.at_level(logging.WARNING, "recbft.recbole.settings"):
        built()
    said = [record.getMessage() for record in caplog.records if record.name == "recbft.recbole.settings"]
    assert said == ["unknown key 'stoping_step' has no effect; did you mean 'stopping_step'?"]


def test_the_activation_that_bert4rec_has_anyway_is_not_warned_about(built, caplog):
    with caplog.at_level(logging.WARNING, "recbft.recbole.settings"):
        built("BERT4RecBFT", hidden_act="gelu")
        assert not [record for record in caplog.records if record.name == "recbft.recbole.settings"]
        built("BERT4RecBFT", hidden_act="relu")
    assert "key 'hidden_act' has no effect: model 'bert4rec' has no 'activation'" in caplog.text


def test_keys_of_the_mixer_and_of_the_experts_are_applied_without_a_warning(built, caplog):
    with caplog.at_level(logging.WARNING, "recbft.recbole.settings"):
        run = built(mixer="rfa", horizon=3.0, experts=3)[2].run
    assert (run.mixing.horizon, run.moe.experts) == (3.0, 3)
    assert not [record for record in caplog.records if record.name == "recbft.recbole.settings"]


def test_known_keys_without_effect_in_this_model_are_warned_about(built, caplog):
    with caplog.at_level(logging.WARNING, "recbft.recbole.settings"):
        built(mask_ratio=0.3, patience=3, horizon=3.0, min_user_events=5, where="rating>3")
    said = [record.getMessage() for record in caplog.records if record.name == "recbft.recbole.settings"]
    assert "key 'mask_ratio' has no effect: model 'sasrec' has no 'mask_probability'" in said
    assert "unknown key 'patience' has no effect; RecBole calls it 'stopping_step'" in said
    assert "unknown key 'min_user_events' has no effect; RecBole calls it 'user_inter_num_interval'" in said
    assert "unknown key 'where' has no effect; RecBole calls it 'val_interval'" in said
    assert any(message.startswith("unknown key 'horizon' has no effect") for message in said)


def test_settings_of_precision_are_warned_about_where_the_arm_has_none(built, caplog):
    with caplog.at_level(logging.WARNING, "recbft.recbole.adapter"):
        built(warmup_steps=7, precision_lr_multiplier=3)
        built(arm="published")
        assert not [record for record in caplog.records if record.name == "recbft.recbole.adapter"]
        built(arm="published", warmup_steps=7, precision_lr_multiplier=3)
    said = [record.getMessage() for record in caplog.records if record.name == "recbft.recbole.adapter"]
    why = "has no effect: this model has neither precision nor recency to learn"
    assert said == [f"precision_lr_multiplier {why}", f"warmup_steps {why}"]


def test_equal_seeds_give_equal_models(built):
    first, second = (built()[2].recommender.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_counts_of_split_files_are_those_of_whole_histories(prepared, at_home):
    data = at_home / "split"
    data.mkdir()
    header = "user_id:token\titem_id_list:token_seq\titem_id:token\n"
    parts = {
        "train": ["1\ta\tb", "1\ta b c\td", "1\ta b\tc", "3\tb\ta", "2\tb a\tc", "3\tb a\td"],
        "valid": ["1\ta b c d\te"],
        "test": ["1\ta b c d e\tf"],
    }
    for part, rows in parts.items():
        (data / f"split.{part}.inter").write_text(header + "\n".join(rows) + "\n")
    config, (train, _, _) = prepared(
        dataset="split", data_path=str(at_home), benchmark_filename=["train", "valid", "test"],
        alias_of_item_id=["item_id_list"], load_col={"inter": ["user_id", "item_id_list", "item_id"]}, topk=[2],
        valid_metric="NDCG@2",
    )  # fmt: skip
    counts = training_counts(config, train._dataset)
    number = train._dataset.field2token_id["item_id"]
    assert {token: counts[number[token]] for token in "abcdef"} == {"a": 3, "b": 3, "c": 2, "d": 2, "e": 0, "f": 0}
    assert np.array_equal(train._dataset.inter_feat["item_length"].numpy(), [1, 3, 2, 1, 2, 2])
