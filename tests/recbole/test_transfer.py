"""A run and its RecBole model agree: scores to 1e-5, and the metrics of the two evaluators."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import recbft.recbole
from recbft.api import Recommender
from recbft.datasets import Dataset, leave_one_out
from recbft.datasets.atomic import save_atomic
from recbft.errors import UserError
from recbft.models.contract import read_histories
from recbft.training.bundle import load_trained
from recbft.training.one_run import train
from recbft.training.run_config import load_run_config
from tests.recbole.conftest import trainer_of

METRICS = {"hit@10": "hr@10", "ndcg@10": "ndcg@10", "mrr@10": "mrr@10"}
FEW = {"hidden_size": 8, "n_layers": 2, "max_length": 12, "epochs": 2, "batch_size": 32, "device": "cpu"}


def trained(dataset, out, model="sasrec", arm="bft", **changes):
    return train(load_run_config(model=model, arm=arm, **{**FEW, **changes}), out, dataset=dataset)


@pytest.fixture(scope="module")
def sasrec(dataset, tmp_path_factory):
    """A run of SASRec, one epoch of a warm-up of many steps."""
    return trained(dataset, tmp_path_factory.mktemp("sasrec") / "run", epochs=1, warmup_steps=1000)


def in_recbole(run, prepared, **data):
    settings = recbft.recbole.recbole_settings(run.path) | data
    config, parts = prepared(settings.pop("model"), **settings)
    return config, parts, recbft.recbole.from_run(run.path, config, parts[0]._dataset)


def our_scores(run, dataset):
    """Scores of every item for every test user by raw ids."""
    *_, model = load_trained(run.path)
    view = leave_one_out(dataset).test
    [batch] = read_histories(
        model, dataset.items, view.start, view.stop, times=dataset.times, source="t", histories_per_batch=10**6
    )
    table = model.item_table()
    with torch.no_grad():
        scores = model.user_states(batch).state @ table.weight.T
        return (scores if table.bias is None else scores + table.bias)[:, 1:].numpy()


def their_scores(model, loader, dataset):
    """The same, in the same order of users and items."""
    rows = [interaction for interaction, *_ in loader]
    with torch.no_grad():
        scores = np.concatenate([model.full_sort_predict(part).numpy() for part in rows])
    users = loader._dataset.field2id_token["user_id"][np.concatenate([part["user_id"].numpy() for part in rows])]
    place = {user: row for row, user in enumerate(users)}
    number = loader._dataset.field2token_id["item_id"]
    return scores[[place[str(u)] for u in dataset.user_ids]][:, [number[str(i)] for i in dataset.item_ids]]


def check_parity(run, dataset, config, parts, model):
    difference = np.abs(our_scores(run, dataset) - their_scores(model, parts[2], dataset))
    assert difference.max() <= 1e-5
    for part, loader in (("validation", parts[1]), ("test", parts[2])):
        ours, theirs = (
            run.metrics[part]["unfiltered"],
            trainer_of(config, model).evaluate(loader, load_best_model=False),
        )
        assert {name: theirs[name] for name in METRICS} == pytest.approx(
            {name: ours[key] for name, key in METRICS.items()}, abs=2e-8
        )


def test_a_run_with_a_time_bias_has_equal_metrics_in_recbole(dataset, prepared, at_home):
    # RecBole holds times in single precision: the bias is a function of their logarithm, so scores differ little.
    run = trained(dataset, at_home / "run", "hstu", "bft", time_bias=True)
    config, parts, model = in_recbole(run, prepared, dataset="tiny")
    ours = run.metrics["test"]["unfiltered"]
    theirs = trainer_of(config, model).evaluate(parts[2], load_best_model=False)
    assert theirs["ndcg@10"] == pytest.approx(ours["ndcg@10"], abs=0.05)


@pytest.mark.parametrize(
    "changes",
    [{"mixer": "rfa", "horizon": 3.0}, {"mixer": "boosted", "rounds": 1, "experts": 3}],
    ids=["mixer", "experts"],
)
def test_the_settings_of_a_run_build_its_model(changes, dataset, built, at_home):
    run = trained(dataset, at_home / "run", "sasrec", "bft", epochs=1, **changes)
    ours, (*_, weights) = load_run_config(run.config_file), load_trained(run.path)
    settings = recbft.recbole.recbole_settings(run.path)
    model = built(settings.pop("model"), **settings)[2]
    for part in ("model", "arm", "seed", "mixer", "mixing", "moe", "backbone", "core"):
        assert getattr(model.run, part) == getattr(ours, part), part
    shapes = {name: tensor.shape for name, tensor in model.recommender.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in weights.state_dict().items()}


def test_a_run_trained_further_takes_recboles_rate_in_every_group_and_is_not_warmed_up_again(sasrec, prepared):
    config, parts, model = in_recbole(sasrec, prepared, dataset="tiny", learning_rate=0.02, weight_decay=0.1)
    trainer = trainer_of(config, model)
    backbone, precision = trainer.optimizer.param_groups
    assert (backbone["lr"], backbone["weight_decay"]) == (0.02, 0.1)
    assert (precision["lr"], precision["weight_decay"]) == (pytest.approx(2.0), 0.0)
    trainer._train_epoch(parts[0], 0)
    assert float(model.recommender.ramp) == 1


def test_recbole_reads_the_exported_histories_in_their_exact_order(prepared, at_home):
    # Real seconds, closer than single precision can tell, of users that stand in no order of time.
    random = np.random.default_rng(0)
    users, items = random.permutation(np.repeat(np.arange(12), 9)), random.integers(0, 9, 108)
    events = pd.DataFrame({"user_id": users, "item_id": items, "at": 1_600_000_000 + random.integers(0, 300, 108)})
    dataset = Dataset.from_frame(events, time="at")
    save_atomic(dataset, at_home, "close")
    config, (*_, test) = prepared(dataset="close", data_path=str(at_home))
    rows = test._dataset.inter_feat
    user_of, item_of = (test._dataset.field2id_token[config[side]] for side in ("USER_ID_FIELD", "ITEM_ID_FIELD"))
    read = {
        user_of[user]: [*item_of[history[:length]], item_of[target]]
        for user, history, length, target in zip(
            *(rows[key].numpy() for key in ("user_id", "item_id_list", "item_length", "item_id")), strict=True
        )
    }
    ours = np.split(dataset.decode(dataset.items).astype(str), dataset.offsets[1:-1])
    assert read == {str(user): list(history) for user, history in zip(dataset.user_ids, ours, strict=True)}


@pytest.mark.slow
def test_parity_holds_on_ml_100k(prepared, at_home):
    dataset = Dataset.load("ml-100k")
    save_atomic(dataset, at_home, "ml-100k-sorted")
    run = trained(dataset, at_home / "run", "sasrec", max_length=50, hidden_size=16, epochs=1)
    found = in_recbole(run, prepared, dataset="ml-100k-sorted", data_path=str(at_home))
    check_parity(run, dataset, *found)


@pytest.mark.parametrize("name", ["SASRecBFT", "BERT4RecBFT", "HSTUBFT"])
def test_a_model_that_recbole_trained_becomes_a_run(name, built, dataset, at_home):
    config, parts, model = built(name)
    trainer = trainer_of(config, model)
    trainer.fit(parts[0], parts[1], saved=False, verbose=False)
    run = recbft.recbole.to_run(model.eval(), dataset, at_home / "exported")
    check_parity(run, dataset, config, parts, model)
    listed = Recommender.load(run.path).recommend([[str(dataset.item_ids[0])]], k=3)
    assert len(listed) > 0


@pytest.mark.parametrize(("model", "arm"), [("sasrec", "bft"), ("bert4rec", "published"), ("hstu", "bft")])
def test_a_run_that_numbers_the_items_otherwise_has_equal_scores_there_and_back(model, arm, dataset, prepared, at_home):
    turned = replace(dataset, item_ids=dataset.item_ids[::-1].copy())
    other = dataset.numbered_as(turned.vocabulary)
    run = trained(other, at_home / "run", model, arm)
    config, parts, theirs = in_recbole(run, prepared, dataset="tiny")
    assert theirs.item_tokens[1:].tolist() == [str(raw) for raw in dataset.item_ids] != [str(i) for i in other.item_ids]
    check_parity(run, other, config, parts, theirs)
    back = recbft.recbole.to_run(theirs, other, at_home / "back")
    first, second = (load_trained(each.path)[-1].state_dict() for each in (run, back))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert back.metrics["test"] == run.metrics["test"]


def test_other_items_are_refused_on_the_way_back(built, dataset, at_home):
    ids = np.array([f"other {i}" for i in dataset.item_ids], dtype=object)
    ids[3:] = dataset.item_ids[3:]
    with pytest.raises(UserError, match=r"the RecBole model has .* of which 3 are unknown to it, such as 'other "):
        recbft.recbole.to_run(built()[2], replace(dataset, item_ids=ids), at_home / "back")
    assert not (at_home / "back").exists()


def test_what_is_no_model_or_data_of_ours_is_refused_by_what_it_is(built, dataset, prepared, at_home):
    config, parts, model = built()
    with pytest.raises(UserError, match="dataset is a TrainDataLoader; give RecBole's data set, such as train_data"):
        recbft.recbole.from_run(at_home / "run", config, parts[0])
    theirs = at_home / "back"
    with pytest.raises(UserError, match=r"model is a Linear, and a run holds one of SASRecBFT, .* join a comparison"):
        recbft.recbole.to_run(torch.nn.Linear(1, 1), dataset, theirs)
    with pytest.raises(UserError, match=r"data is a str; load it with recbft\.Dataset\.load"):
        recbft.recbole.to_run(model, "ratings.csv", theirs)
    with pytest.raises(UserError, match="RecBole has trained on what leave-one-out trains on"):
        recbft.recbole.to_run(model, dataset.with_split(hold_out_items=0.1), theirs)
    assert not theirs.exists()
    recbft.recbole.to_run(model, dataset, theirs)
    with pytest.raises(UserError, match="back holds a finished run; name another folder, or remove this one first"):
        recbft.recbole.to_run(model, dataset, theirs)


def test_other_items_or_a_shorter_window_are_refused(dataset, sasrec, prepared, at_home):
    with pytest.raises(UserError, match="MAX_ITEM_LIST_LENGTH is 5, but the run reads 12 events; set it to 12 or more"):
        in_recbole(sasrec, prepared, dataset="tiny", MAX_ITEM_LIST_LENGTH=5)
    other = replace(dataset, item_ids=np.array([f"other {i}" for i in dataset.item_ids], dtype=object))
    run = trained(other, at_home / "run", epochs=1)
    with pytest.raises(UserError, match=r"items and the data .* are unknown to it, such as '.*'; use the data"):
        in_recbole(run, prepared, dataset="tiny")


def test_a_model_without_a_name_in_recbole_is_refused(dataset, at_home):
    run = train(load_run_config(model="pop", device="cpu"), at_home / "run", dataset=dataset)
    with pytest.raises(UserError, match="holds a 'pop' model, which RecBole has no name for"):
        recbft.recbole.recbole_settings(run.path)


def test_a_run_from_recbole_names_the_columns_of_the_data_it_was_given(built, dataset, events, at_home):
    frame = pd.read_parquet(events).rename(columns={"user_id": "who", "item_id": "what"})
    frame.to_parquet(at_home / "own.parquet")
    data = Dataset.load(at_home / "own.parquet", user="who", item="what", time="timestamp")
    run = recbft.recbole.to_run(built()[2], data, at_home / "back")
    own = load_run_config(run.config_file).data
    assert (own.dataset, own.user, own.item, own.time) == (str(at_home / "own.parquet"), "who", "what", "timestamp")
