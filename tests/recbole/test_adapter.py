from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from recbft.errors import UserError
from recbft.training.optimiser import DYNAMICS
from tests.recbole.conftest import NAMES, rows_of, trainer_of, warned


def counts_by_token(config, dataset):
    """Training events by raw id; those of padding among them."""
    from recbft.recbole.adapter import training_counts  # imports RecBole: not while tests are collected

    return dict(zip(dataset.field2id_token["item_id"], training_counts(config, dataset).tolist(), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_run_recbole_trains_and_tests_each_model(name, settings):
    from recbole.quick_start import run_recbole

    place = {"gpu_id": "0"} if torch.cuda.is_available() else {}
    result = run_recbole(model=name, dataset="tiny", config_dict={**settings, **place})
    assert set(result["test_result"]) == {"hit@10", "ndcg@10", "mrr@10"}
    assert all(0 <= value <= 1 for value in result["test_result"].values())


@pytest.mark.parametrize("window", [1, 2, 50])
def test_counts_are_those_of_the_training_events_whatever_the_window(window, built, dataset):
    config, (train, *_), model = built(MAX_ITEM_LIST_LENGTH=window)
    ours = zip(map(str, dataset.item_ids), dataset.training_counts[1:].tolist(), strict=True)
    assert counts_by_token(config, train._dataset) == {"[PAD]": 0, **dict(ours)}
    assert len(model.recommender.item_table().weight) == train._dataset.item_num == dataset.num_items + 1


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


def test_the_trainer_has_a_precision_group_and_warms_up(built):
    config, parts, model = built(warmup_steps=50, weight_decay=0.01, precision_lr_multiplier=10)
    trainer = trainer_of(config, model)
    backbone, precision = trainer.optimizer.param_groups
    assert (backbone["lr"], backbone["weight_decay"]) == (1e-3, 0.01)
    assert (precision["lr"], precision["weight_decay"]) == (1e-2, 0.0)
    trainer._train_epoch(parts[0], 2)
    assert float(model.recommender.ramp) == pytest.approx(min(1, (3 * len(parts[0]) - 1) / 50))


@pytest.mark.parametrize(("arm", "tells"), [("bft", True), ("published", False)])
def test_another_trainer_trains_the_model_as_it_is_used_and_is_warned_about(arm, tells, built, caplog):
    from recbole.trainer import Trainer

    config, parts, model = built(arm=arm)
    trainer = Trainer(config, model)
    trainer.tensorboard.close()
    with caplog.at_level(logging.WARNING, "recbft.recbole.adapter"):
        for epoch in range(2):
            trainer._train_epoch(parts[0], epoch)
        trainer_of(*built(arm=arm)[::2])._train_epoch(parts[0], 0)
    said = warned(caplog, "adapter")
    assert len(said) == tells and float(model.recommender.ramp) == 1
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
    config, parts, model = built()
    trainer = trainer_of(config, model)
    seen = []
    torch.autograd.set_detect_anomaly(True)

    def loss(rows):
        seen.append(torch.is_anomaly_enabled())
        return model.calculate_loss(rows)

    trainer._train_epoch(parts[0], 0, loss)
    assert set(seen) == {False} and torch.is_anomaly_enabled()


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
    [file] = Path(settings["checkpoint_dir"]).glob("*.pth")
    config, model, _, _, _, test_data = load_data_and_model(str(file))
    assert trainer_of(config, model).evaluate(test_data, load_best_model=False) == result["test_result"]


def test_a_training_resumed_from_a_checkpoint_goes_on_with_the_warm_up(built):
    config, parts, model = built(epochs=2, warmup_steps=1000)
    trainer = trainer_of(config, model)
    trainer.fit(parts[0], parts[1], verbose=False)
    ramp = float(model.recommender.ramp)
    again = trainer_of(config, built()[2])
    again.resume_checkpoint(trainer.saved_model_file)
    assert 0 < float(again.model.recommender.ramp) <= ramp
    assert float(again.model.recommender.ramp) == pytest.approx((again.start_epoch * len(parts[0]) - 1) / 1000)


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
        found = warned(caplog, "trainer")
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


def test_a_time_bias_reads_real_times_and_refuses_scaled_ones(built):
    _, parts, model = built("HSTU", time_bias=True)
    assert torch.isfinite(model.calculate_loss(rows_of(parts[2])))
    with pytest.raises(UserError, match=r"RecBole scales it to \[0, 1\]; set normalize_all: False"):
        built("HSTU", time_bias=True, normalize_all=True)


def write_data(folder, name, times, header="user_id:token\titem_id:token\ttimestamp:float"):
    """Six users' histories of events at these times; the keys of a config that reads them."""
    rows = [f"u{user}\ti{(user + step) % 9}\t{time}" for user in range(6) for step, time in enumerate(times)]
    (folder / name).mkdir()
    (folder / name / f"{name}.inter").write_text("\n".join([header, *rows]) + "\n")
    return {"dataset": name, "data_path": str(folder)}


def test_fields_by_other_names_are_loaded_without_load_col(built, at_home):
    data = write_data(at_home, "other", range(0, 420, 60), header="uid:token\tiid:token\twhen:float")
    names = {"USER_ID_FIELD": "uid", "ITEM_ID_FIELD": "iid", "TIME_FIELD": "when"}
    config, parts, model = built(**data, **names)
    assert config["load_col"] == {"inter": ["uid", "iid", "when"]}
    assert torch.isfinite(model.calculate_loss(rows_of(parts[2])))


def test_a_time_bias_refuses_times_that_are_not_whole(built, at_home):
    data = write_data(at_home, "parts", [step / 8 for step in range(7)])
    _, parts, model = built("HSTU", **data)
    assert torch.isfinite(model.calculate_loss(rows_of(parts[2])))
    with pytest.raises(UserError, match=r"time_bias reads 'timestamp', which holds 0\.\d+, not a whole number"):
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
    data = write_data(at_home, "late", range(begin, begin + 540, 60))
    with caplog.at_level(logging.WARNING, "recbft.recbole.adapter"):
        built("HSTU", time_bias=True, **data)
    assert said in caplog.text and bool(caplog.text) == bool(said)


def test_a_clock_of_seconds_is_refused_where_the_times_are_of_another_unit(built, at_home):
    seconds = range(1_700_000_000, 1_700_000_540, 60)
    clock = {"mixer": "rfa", "mixing": {"time": True}}
    built(**write_data(at_home, "seconds", seconds), **clock)
    with pytest.raises(UserError, match="a day of seconds, but the times of data set 'thousandths' are in ms"):
        built(**write_data(at_home, "thousandths", [1000 * second for second in seconds]), **clock)


def write_split(folder, rows):
    """A data set whose files are split, histories of events without times; the keys of a config that reads it."""
    (folder / "split").mkdir()
    for part in ("train", "valid", "test"):
        lines = ["user_id:token\titem_id_list:token_seq\titem_id:token", *rows[part]]
        (folder / "split" / f"split.{part}.inter").write_text("\n".join(lines) + "\n")
    return {
        "dataset": "split", "data_path": str(folder), "benchmark_filename": ["train", "valid", "test"],
        "alias_of_item_id": ["item_id_list"], "load_col": {"inter": ["user_id", "item_id_list", "item_id"]},
        "topk": [2], "valid_metric": "NDCG@2",
    }  # fmt: skip


@pytest.fixture
def split_files(at_home):
    return write_split(at_home, {part: ["1\ta b\tc", "2\tb a\tc"] for part in ("train", "valid", "test")})


def test_counts_of_split_files_are_those_of_whole_histories(prepared, at_home):
    rows = {
        "train": ["1\ta\tb", "1\ta b c\td", "1\ta b\tc", "3\tb\ta", "2\tb a\tc", "3\tb a\td"],
        "valid": ["1\ta b c d\te"],
        "test": ["1\ta b c d e\tf"],
    }
    config, (train, *_) = prepared(**write_split(at_home, rows))
    found = counts_by_token(config, train._dataset)
    assert found == {"[PAD]": 0, "a": 3, "b": 3, "c": 2, "d": 2, "e": 0, "f": 0}
    assert train._dataset.inter_feat["item_length"].tolist() == [1, 3, 2, 1, 2, 2]


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


def test_the_reliability_of_events_which_recbole_does_not_give_is_refused(built):
    with pytest.raises(UserError, match=r"reads_reliability has no effect in RecBole.*train with recbft"):
        built(reads_reliability="input")
