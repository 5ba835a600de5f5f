"""Item features by a RecBole config: what ``--items auto`` makes of the same file, and models alike."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import recbft.recbole
from recbft.api import Recommender
from recbft.datasets import Dataset
from recbft.errors import UserError
from recbft.training.bundle import load_trained
from tests.recbole.conftest import rows_of, trainer_of
from tests.recbole.test_transfer import in_recbole, our_scores, their_scores, trained

COLUMNS = ["class", "release_year", "movie_title"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The items of ml-100k as RecBole brings them, and the events of its first users, who know a part of them."""
    import recbole

    theirs = Path(recbole.__file__).parent / "dataset_example" / "ml-100k"
    folder = tmp_path_factory.mktemp("films") / "films"
    folder.mkdir()
    head, *rows = (theirs / "ml-100k.inter").read_text().splitlines()
    of_users = [[row for row in rows[:20_000] if row.startswith(f"{user}\t")][:9] for user in range(1, 30)]
    # RecBole keeps the order of the file where times are equal in its single precision.
    chosen = [row for own in of_users if len(own) > 4 for row in sorted(own, key=lambda row: int(row.split("\t")[3]))]
    (folder / "films.inter").write_text("\n".join([head, *chosen]) + "\n")
    (folder / "films.item").write_bytes((theirs / "ml-100k.item").read_bytes())
    return folder.parent


@pytest.fixture
def films(place, built):
    """Config, loaders and an untrained model."""

    def build(name="SASRecBFT", **changes):
        return built(name, **{"dataset": "films", "data_path": str(place), "item_features": COLUMNS, **changes})

    return build


def as_recbft_reads(place, **how):
    return Dataset.load(place / "films" / "films.inter", time="timestamp", items="auto", **how)


def numbers_of(model, data):
    """RecBole's number of padding and each item of ours."""
    number = {token: n for n, token in enumerate(model.item_tokens)}
    return torch.tensor([0, *(number[str(raw)] for raw in data.item_ids)])


@pytest.mark.parametrize(
    ("named", "kinds"),
    [(COLUMNS, {}), ({"class": "words", "movie_title": "words"}, None)],
    ids=["as the header says", "as asked"],
)
def test_the_content_is_that_of_recbfts_own_reading(named, kinds, films, place):
    model = films(item_features=named)[2]
    data = as_recbft_reads(place, item_kinds=kinds if kinds is not None else {**named, "release_year": "skip"})
    transform = data.content(model.run.content_config)
    ours = transform.matrix(data.features).values
    theirs = model.recommender.item_belief
    assert theirs.arm == "belief" and len(ours) == 1683 and not theirs.has_events.all()
    numbers = numbers_of(model, data)
    np.testing.assert_array_equal(theirs.content[numbers], ours)
    np.testing.assert_array_equal(theirs.counts[numbers], data.training_counts)


@pytest.mark.parametrize("name", ["SASRecBFT", "BERT4RecBFT", "HSTUBFT"])
def test_equal_weights_have_equal_scores_and_losses_in_a_run_and_in_recbole(name, films, place, at_home):
    _, parts, model = films(name, thinned_items=0, hidden_dropout_prob=0)
    data = as_recbft_reads(place)
    run = recbft.recbole.to_run(model.eval(), data, at_home / "run")
    np.testing.assert_allclose(their_scores(model, parts[2], data), our_scores(run, data), atol=1e-5)
    ours = load_trained(run.path).model
    rows = next(iter(parts[0]))
    losses = {}
    for whose in ("theirs", "ours"):
        if whose == "ours":  # the same rows, with items by the run's numbers
            place_of = torch.argsort(numbers_of(model, data))
            for key in (model.ITEM_SEQ, model.POS_ITEM_ID):
                rows.interaction[key] = place_of[rows[key]]
            model.recommender = ours
        model.train()
        torch.manual_seed(0)
        losses[whose] = model.calculate_loss(rows).item()
    assert losses["ours"] == pytest.approx(losses["theirs"], rel=1e-5)
    new = Recommender.load(run.path).with_items(pd.DataFrame({"item_id": ["a"], "class": ["Comedy"]}))
    assert len(new.item_vectors().items) == data.num_items + 1


def test_a_trained_model_comes_back_from_its_checkpoint_and_from_a_run(films, prepared, place, at_home):
    from recbole.quick_start import load_data_and_model

    config, parts, model = films(warmup_steps=0)
    trainer = trainer_of(config, model)
    before = model.recommender.item_belief.kappa.item()
    trainer.fit(parts[0], parts[1], saved=True, verbose=False)
    assert model.recommender.item_belief.kappa.item() != before
    trainer.resume_checkpoint(trainer.saved_model_file)  # the best epoch
    again = load_data_and_model(trainer.saved_model_file)[1].eval()
    rows = rows_of(parts[2])
    torch.testing.assert_close(again.full_sort_predict(rows), model.eval().full_sort_predict(rows))
    data = as_recbft_reads(place)
    run = recbft.recbole.to_run(again, data, at_home / "back")
    config, (*_, test), there = in_recbole(run, prepared, dataset="films", data_path=str(place))
    assert config["item_features"] == {"movie_title": "set: ", "release_year": "category", "class": "set: "}
    np.testing.assert_allclose(their_scores(there, test, data), our_scores(run, data), atol=1e-5)


def test_a_run_brings_its_features_along_where_the_config_names_none(prepared, place, at_home):
    data = as_recbft_reads(place, item_kinds={"class": "skip"})
    run = trained(data, at_home / "run", epochs=1)
    load = {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id", "class"]}
    how = {"dataset": "films", "data_path": str(place), "load_col": load, "item_features": None}
    config, parts, model = in_recbole(run, prepared, **how)
    np.testing.assert_allclose(their_scores(model, parts[2], data), our_scores(run, data), atol=1e-5)
    trainer = trainer_of(config, model)
    trainer.fit(parts[0], saved=True, verbose=False)
    from recbole.quick_start import load_data_and_model

    again = load_data_and_model(trainer.saved_model_file)[1]
    torch.testing.assert_close(again.recommender.state_dict(), model.recommender.state_dict())


def test_a_missing_number_is_missing_and_none_is_scaled(place, built, at_home):
    folder = at_home / "few"
    folder.mkdir()
    rows = [f"u{user}\ti{(user + step) % 6}\t{step}" for user in range(8) for step in range(5)]
    (folder / "few.inter").write_text("user_id:token\titem_id:token\ttimestamp:float\n" + "\n".join(rows) + "\n")
    lines = ["item_id:token\tprice:float\tlook:float_seq", *(f"i{n}\t{2**n}\t{n} {n % 2}" for n in range(5)), "i5\t\t"]
    (folder / "few.item").write_text("\n".join(lines) + "\n")
    model = built(dataset="few", data_path=str(at_home), item_features=["price", "look"], normalize_all=True)[2]
    data = Dataset.load(folder / "few.inter", time="timestamp", items="auto")
    transform = data.content(model.run.content_config)
    theirs = model.recommender.item_belief.content[numbers_of(model, data)]
    np.testing.assert_allclose(theirs, transform.matrix(data.features).values, atol=1e-6)
    assert not theirs[6].any() and theirs[1:6].any(dim=1).all()


def test_a_data_set_keeps_its_features_where_recbole_saves_it(films):
    parts = films()[1]
    kept = pickle.loads(pickle.dumps(parts[0]._dataset.features_read))
    assert kept.hash == parts[0]._dataset.features_read.hash


LOAD = {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id", "class"]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"item_features": ["klass"]}, r"names 'klass', but .*films\.item has no such column; did you mean 'class'"),
        ({"load_col": LOAD}, r"names 'release_year', which RecBole has not read; name it in load_col\.item, besid"),
        ({"load_col": {"inter": LOAD["inter"]}}, r"names 'class', which RecBole has not read; name it in load_col"),
        ({"item_features": "class"}, r"item_features is 'class'; give columns of the \.item file, such as \[class"),
        ({"item_features": [1995]}, r"item_features has 1995: None; give names of columns"),
        ({"item_features": {"class": "colour"}}, r"the kind of column 'class' is 'colour'; choose one of category"),
        ({"item_features": {"class": "number"}}, r"column 'class' .* which is no number; name another kind"),
        ({"item_features": None, "item_vector": "gate"}, r"item_vector is 'gate', but the config names no item_feat"),
        ({"dataset": "tiny", "data_path": None}, r"names 'class', but there is no .*tiny\.item; put the features"),
    ],
)
def test_what_is_not_there_or_cannot_be_read_is_refused(changes, said, films, folder):
    if changes.get("dataset") == "tiny":
        changes = {**changes, "data_path": str(folder)}
    with pytest.raises(UserError, match=said):
        films(**changes)


def test_a_data_set_made_without_them_is_refused(films, prepared, place):
    from recbole.utils import get_model

    how = {"dataset": "films", "data_path": str(place)}
    config, _ = prepared(item_features=COLUMNS, **how)
    other = prepared("SASRec", loss_type="CE", train_neg_sample_args=None, load_col=LOAD, **how)[1]
    with pytest.raises(UserError, match=r"a SequentialDataset, was made for another model or config; make it with rec"):
        get_model("SASRecBFT")(config, other[0]._dataset)


def test_other_features_are_refused_on_the_way_to_a_run(films, built, place, at_home):
    model, plain = films()[2], films(item_features=None, load_col=LOAD)[2]
    bare = Dataset.load(place / "films" / "films.inter", time="timestamp")
    few = as_recbft_reads(place, item_kinds={"class": "skip"})
    for one, data, said in (
        (plain, few, "knows items by their numbers alone, and data set 'films' has item features; load it without"),
        (model, few, "has others as it is loaded here; load it with the .item file that RecBole read"),
        (built()[2], bare, "use the data that the model was trained on"),
    ):
        with pytest.raises(UserError, match=said):
            recbft.recbole.to_run(one, data, at_home / "back")


def test_a_training_that_goes_on_with_other_features_is_warned_about(films, caplog):
    config, parts, model = films(item_features=["class"])
    trainer = trainer_of(config, model)
    trainer.fit(parts[0], saved=True, verbose=False)
    other, _, same = films(item_features={"class": "set: "})
    trainer_of(other, same).resume_checkpoint(trainer.saved_model_file)
    assert "item_features was ['class'] and is {'class': 'set: '}" in caplog.text
