"""What a notebook user does: fit, evaluate, recommend, save, load."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import re
import shutil
import tempfile
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from recbft import Dataset, Recommender
from recbft.config import yaml_text
from recbft.datasets import ItemFeatures, Preparation
from recbft.datasets.planted import synthetic_dataset
from recbft.datasets.synth import SyntheticConfig
from recbft.errors import RunError, UserError
from recbft.training import bundle, one_run
from recbft.training.progress import Silent
from tests.serving.conftest import SMALL, dataset

__all__ = ["dataset"]

ARMS = ["published", "matched", "bft"]


@pytest.fixture(scope="module")
def fitted(dataset):
    """One trained recommender per arm; nobody changes them."""
    return {arm: Recommender("sasrec", arm=arm, **SMALL).fit(dataset) for arm in ARMS}


def histories_of(dataset, back=1):
    """Raw test histories: all but the last events."""
    return {
        user: dataset.decode(dataset.items[start : stop - back]).tolist()
        for user, start, stop in zip(dataset.user_ids.tolist(), dataset.offsets[:-1], dataset.offsets[1:], strict=True)
    }


@pytest.mark.parametrize("arm", ARMS)
def test_a_saved_recommender_gives_identical_lists_and_metrics_when_loaded(fitted, dataset, tmp_path, arm):
    one = fitted[arm]
    one.save(tmp_path / "kept")
    two = Recommender.load(tmp_path / "kept")
    histories = histories_of(dataset)
    for filter_seen in (True, False):
        lists = [recommender.recommend(histories, 5, filter_seen=filter_seen) for recommender in (one, two)]
        pd.testing.assert_frame_equal(*lists, check_exact=True)
    for part in ("validation", "test"):
        pd.testing.assert_frame_equal(one.evaluate(dataset, part).per_user, two.evaluate(dataset, part).per_user)
    assert one.config == two.config
    assert os.listdir(tmp_path) == ["kept"]
    with pytest.raises(UserError, match="kept is a folder with files in it; name another"):
        one.save(tmp_path / "kept")


class StopAfter(Silent):
    """Ctrl-C at the end of an epoch."""

    def __init__(self, epoch):
        self.at = epoch

    def epoch(self, row):
        if row["epoch"] == self.at:
            raise KeyboardInterrupt


def place_of(error):
    """The folder that an interruption's message says to go on with in Python."""
    return Path(re.search(r"Recommender\.resume\('(.*)', dataset\)", str(error.value)).group(1))


@pytest.mark.parametrize("named", [True, False])
def test_an_interrupted_fit_goes_on_as_its_message_says_as_if_nothing_had_been(fitted, dataset, tmp_path, named):
    out = tmp_path / "run" if named else None
    with pytest.raises(RunError, match="the state after epoch 1 is saved") as error:
        Recommender("sasrec", arm="bft", **SMALL).fit(dataset, out=out, progress=StopAfter(1))
    place = place_of(error)
    try:
        assert out in (None, place)
        assert os.path.isdir(place), "what is said to be saved is there"
        told = r"stopped after epoch 1; .* \(in Python: Recommender\.resume\('.*run', dataset\)\)"
        with pytest.raises(UserError, match=told):
            Recommender("sasrec", arm="bft", **SMALL).fit(dataset, out=place)
        resumed = Recommender.resume(place, dataset)
        assert resumed.run.metrics["epochs"] == 2
        expected = fitted["bft"].evaluate(dataset).per_user
        pd.testing.assert_frame_equal(resumed.evaluate(dataset).per_user, expected)
        again = Recommender.resume(place, dataset)  # a finished run is only opened
        assert again.run.metrics == resumed.run.metrics
        with pytest.raises(
            UserError, match=r"holds a finished run; name another folder, or load it with Recommender\.load\('.*run'\)$"
        ):
            Recommender("sasrec", **SMALL).fit(dataset, out=place)
        (place / "protocol.json").unlink()
        with pytest.raises(UserError, match=r"a folder with other files in it; name another folder for the run$"):
            Recommender("sasrec", **SMALL).fit(dataset, out=place)
    finally:
        shutil.rmtree(place.parent if out is None else place)


def test_what_a_cell_ends_with_is_told_in_a_line(fitted, dataset):
    one = fitted["bft"]
    assert repr(Recommender("sasrec", arm="bft", seed=3)) == "<Recommender sasrec bft, seed 3: not trained>"
    assert repr(one) == f"<Recommender sasrec bft, seed 0: trained on 'synthetic', run folder {one.run.path}>"
    counts = f"50 users, {dataset.num_items} items, {dataset.num_events} events"
    assert repr(dataset) == f"<Dataset 'synthetic': {counts}, with times>"
    assert repr(replace(dataset, times=None)) == f"<Dataset 'synthetic': {counts}, no times>"
    told, value = repr(one.evaluate(dataset)), one.run.metrics["test"]["unfiltered"]["mrr"]
    assert re.fullmatch(r"<Evaluation, test targets of 50 users among all items: hr@5 .*, mrr .*>", told)
    assert f"mrr {value:.4f}" in told
    assert "among all items but those seen: " in repr(replace(one.evaluate(dataset), filter_seen=True))


def test_a_fit_says_a_line_per_epoch_in_a_log_if_asked(dataset, capsys):
    Recommender("sasrec", arm="matched", **SMALL).fit(dataset, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("epoch")] == ["epoch 1/2", "epoch 2/2"]
    Recommender("pop").fit(dataset)
    assert capsys.readouterr().err == ""


def test_a_fit_that_is_stopped_leaves_the_one_before_it_as_it_was(dataset):
    recommender = Recommender("sasrec", arm="matched", **SMALL).fit(dataset)
    before = recommender.recommend([[1, 2, 3]], 3)
    with pytest.raises(RunError) as error:
        recommender.fit(dataset, progress=StopAfter(1))
    shutil.rmtree(place_of(error).parent)
    pd.testing.assert_frame_equal(recommender.recommend([[1, 2, 3]], 3), before)


def test_a_fit_that_cannot_begin_leaves_no_folder_behind(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UserError, match=r"data\.k_core is 3"):
        Recommender("sasrec", k_core=3, **SMALL).fit(dataset)
    with pytest.raises(RunError, match=r"not finite|loss is"):
        Recommender("sasrec", **{**SMALL, "learning_rate": 1e30}).fit(dataset)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("failure", ["diverges", "is interrupted"])
def test_an_error_that_is_kept_keeps_no_model(dataset, tmp_path, monkeypatch, failure):
    def spy(*arguments):
        parts = make_parts(*arguments)
        held.extend(map(weakref.ref, (parts.model, parts.optimizer)))
        return parts

    def of_the_caller():
        own = 1  # noqa: F841
        raise ValueError

    held, make_parts = [], one_run.make_parts
    monkeypatch.setattr(one_run, "make_parts", spy)
    settings = {**SMALL, "learning_rate": 1e30} if failure == "diverges" else SMALL
    progress = StopAfter(1) if failure == "is interrupted" else None
    with pytest.raises(RunError) as error:
        try:
            of_the_caller()
        except ValueError as handled:
            frame = handled.__traceback__.tb_next.tb_frame
            Recommender("sasrec", **settings).fit(dataset, out=tmp_path / "run", progress=progress)
    assert len(held) == 2 and [ref() for ref in held] == [None, None]
    assert error.value.__traceback__ is not None and frame.f_locals == {"own": 1}


@pytest.mark.parametrize("part", ["validation", "test"])
def test_evaluate_gives_what_the_run_recorded(fitted, dataset, part):
    for recommender in fitted.values():
        evaluation = recommender.evaluate(dataset, part)
        assert evaluation.metrics == recommender.run.metrics[part]
        if part == "test":
            recorded = pd.read_parquet(recommender.run.per_user_file)
            assert recorded["rank_filtered"].tolist() == evaluation.per_user["rank_filtered"].tolist()


@pytest.mark.parametrize(("arm", "part", "back"), [("published", "test", 1), ("bft", "validation", 2)])
def test_recommending_scores_like_evaluating(fitted, dataset, arm, part, back):
    table = fitted[arm].recommend(histories_of(dataset, back), dataset.num_items, filter_seen=False)
    evaluation = fitted[arm].evaluate(dataset, part)
    for number, row in evaluation.per_user.iterrows():
        own = table[table["user"] == row["user"]]
        assert sorted(own["item"]) == sorted(dataset.item_ids)
        assert (own["score"].diff().dropna() <= 0).all() and own["rank"].tolist() == list(range(1, len(own) + 1))
        score = own.loc[own["item"] == row["target"], "score"].item()
        assert (own["score"] >= score).sum() == row["rank_unfiltered"]
        if evaluation.precision is not None:
            assert own["precision"].tolist() == pytest.approx([evaluation.precision[number]] * len(own), rel=1e-6)


@pytest.mark.parametrize("filter_seen", [False, True])
def test_lists_of_a_run_have_probabilities_by_what_the_run_was_calibrated_to(fitted, dataset, filter_seen):
    histories = histories_of(dataset)
    for arm in ("matched", "bft"):
        recommender = fitted[arm]
        temperature, lapse = recommender.calibration(filter_seen=filter_seen)
        recorded = recommender.run.metrics["probability"]["filtered" if filter_seen else "unfiltered"]
        assert recorded == {"temperature": temperature, "lapse": lapse}
        table = recommender.recommend(histories, dataset.num_items, filter_seen=filter_seen)
        users = table.groupby("user")["score"]
        odds = np.exp((table["score"] - users.transform("max")) / temperature)
        softmax = odds / odds.groupby(table["user"]).transform("sum")
        expected = (1 - lapse) * softmax + lapse / users.transform("size")
        assert table["probability"].tolist() == pytest.approx(expected.tolist(), rel=1e-4), arm
        blocks = recommender.recommend_in_blocks(histories, 3, filter_seen=filter_seen)
        first = table[table["rank"] <= 3]["probability"]
        assert pd.concat(blocks)["probability"].tolist() == pytest.approx(first.tolist(), rel=1e-5)


@pytest.mark.parametrize("known", [None, {"filtered": None}])
def test_a_run_that_was_not_calibrated_gives_lists_without_probabilities(fitted, dataset, tmp_path, known):
    fitted["bft"].save(tmp_path / "old")
    path = tmp_path / "old/metrics.json"
    metrics = json.loads(path.read_text()) | {"probability": known}
    if known is None:
        del metrics["probability"]
    path.write_text(json.dumps(metrics))
    old = Recommender.load(tmp_path / "old")
    table = old.recommend(histories_of(dataset), 2)
    assert old.calibration() is None and table["probability"].isna().all() and len(table)


def test_two_recommenders_are_joined_and_the_join_outlives_them(fitted, dataset, tmp_path):
    words = [f"w{n % 5} v{n % 3}" for n in range(dataset.num_items)]
    features = ItemFeatures.from_frame(pd.DataFrame({"item_id": dataset.item_ids, "words": words}))
    content = Recommender("content-cosine").fit(dataset.with_features(features))
    joined = Recommender.join(fitted["bft"], content, dataset=dataset, progress=False)
    content.save(tmp_path / "content")
    again = Recommender.join(fitted["bft"].run.path, tmp_path / "content", dataset=dataset, by="count")
    del content
    gc.collect()
    for part in ("validation", "test"):
        found = joined.evaluate(dataset, part)
        assert found.metrics == joined.run.metrics[part] == again.run.metrics[part] and len(found.precision)
    histories = histories_of(dataset)
    table = joined.recommend(histories, 3)
    users, items = joined.user_vectors(histories), joined.item_vectors()
    scores = users.vectors @ items.vectors.T
    rows = pd.Index(users.users).get_indexer(table["user"]), pd.Index(items.items).get_indexer(table["item"])
    np.testing.assert_allclose(table["score"], scores[rows], rtol=1e-4)
    assert (
        table["probability"].between(0, 1).all() and joined.explain(next(iter(histories.values())), k=1).shape[1] == 6
    )
    own = joined.probe(dataset, users=20, samples=10)["uncertainty"]
    assert "precision" in own["confidences"]
    with pytest.raises(UserError, match=r"holds a finished run; .* load it with Recommender\.load"):
        Recommender.join(fitted["bft"], tmp_path / "content", dataset=dataset, out=tmp_path / "content")
    with pytest.raises(UserError, match="are the same model"):
        Recommender.join(fitted["bft"], fitted["bft"], dataset=dataset)


def test_ids_keep_the_type_of_the_training_data():
    rng = np.random.default_rng(0)
    rows = [(str(user), str(item)) for user in range(100, 120) for item in rng.permutation(15)[:6]]
    recommender = Recommender("pop").fit(
        Dataset.from_frame(pd.DataFrame(rows, columns=["who", "what"]), user="who", item="what")
    )
    table = recommender.recommend({"1": ["3", "4"]}, 3)
    assert all(type(item) is str for item in table["item"].tolist()) and table["user"].tolist() == ["1"] * 3
    same = recommender.recommend({1: [3, 4]}, 3)
    assert same["item"].tolist() == table["item"].tolist(), "the number 3 and the text 3 are one id"
    assert same["user"].tolist() == [1] * 3


def test_items_that_the_model_does_not_know_are_refused(fitted):
    other = synthetic_dataset(SyntheticConfig(num_users=50, num_items=70, mean_length=7, seed=2))
    said = r"is a model of data set 'synthetic': \d+ of the \d+ items of data set 'synthetic' are unknown"
    with pytest.raises(UserError, match=said):
        fitted["bft"].evaluate(other)


def test_items_are_found_by_their_raw_ids_whatever_their_order(fitted, dataset):
    users = np.repeat(dataset.user_ids, np.diff(dataset.offsets))[::-1]
    frame = pd.DataFrame({"user_id": users, "item_id": dataset.decode(dataset.items)[::-1].astype(str)})
    frame["place"] = np.arange(len(frame))[::-1]
    other = Dataset.from_frame(frame, time="place", name="other")
    assert other.item_ids.astype(str).tolist() != dataset.item_ids.astype(str).tolist()
    with pytest.warns(UserWarning, match=r"'other' has its items in another order .* among all \d+ of the mode"):
        found = fitted["bft"].evaluate(other)
    expected = fitted["bft"].evaluate(dataset).per_user.set_index("user")
    pd.testing.assert_frame_equal(found.per_user.set_index("user").loc[expected.index], expected, check_dtype=False)
    fewer = Dataset.from_frame(frame[frame["user_id"].isin(dataset.user_ids[:5])], time="place")
    with pytest.warns(UserWarning, match="'frame' has its items in another order"):
        some = fitted["bft"].evaluate(fewer).per_user.set_index("user")
    ranks = ["rank_unfiltered", "rank_filtered", "history_length"]
    pd.testing.assert_frame_equal(some[ranks], expected.loc[some.index, ranks], check_dtype=False)


def test_a_recommender_that_is_not_trained_says_so(dataset):
    recommender = Recommender("sasrec")
    for use in (
        lambda: recommender.recommend([[1]]),
        lambda: recommender.evaluate(),
        lambda: recommender.save("nowhere"),
        lambda: recommender.fit(dataset, warm_start=True),
    ):
        with pytest.raises(UserError, match=r"not trained; call fit\(dataset\), or Recommender.load"):
            use()
    assert not os.path.exists("nowhere")


@pytest.mark.parametrize(
    ("data", "how"), [("ratings.csv", r"Dataset\.load\(path\)"), (pd.DataFrame(), r"Dataset\.from_frame\(frame\)")]
)
def test_what_is_no_data_set_is_refused_with_what_makes_one(fitted, data, how):
    with pytest.raises(UserError, match=how):
        Recommender("sasrec").fit(data)
    with pytest.raises(UserError, match=how):
        fitted["bft"].evaluate(data)


def test_loading_parses_the_configuration_once(fitted, monkeypatch):
    read, parse = [], yaml_text.parse_yaml
    monkeypatch.setattr(yaml_text, "parse_yaml", lambda *text: read.append(text) or parse(*text))
    Recommender.load(fitted["bft"].run.path)
    assert len(read) == 1


def test_what_stands_in_the_folder_by_now_is_not_taken_for_the_run_that_was_loaded(fitted, dataset, tmp_path):
    place = tmp_path / "live"
    fitted["matched"].save(place)
    serving = Recommender.load(place)
    shutil.rmtree(place)
    with pytest.raises(UserError, match=r"there is no run folder .*live"):
        serving.save(tmp_path / "copy")
    fitted["bft"].save(place)
    told = "live holds other weights than those that were loaded from it; load it again"
    for one in (serving, pickle.loads(pickle.dumps(serving))):
        with pytest.raises(UserError, match=told):
            one.save(tmp_path / "copy")
        with pytest.raises(UserError, match=told):
            one.fit(dataset, out=tmp_path / "warm", warm_start=True)
    assert os.listdir(tmp_path) == ["live"]
    histories = histories_of(dataset)
    pd.testing.assert_frame_equal(serving.recommend(histories), fitted["matched"].recommend(histories))


@pytest.mark.parametrize("meanwhile", [True, False])
def test_a_link_that_moves_on_does_not_move_what_is_loaded_by_it(fitted, dataset, tmp_path, monkeypatch, meanwhile):
    for arm in ("matched", "bft"):
        fitted[arm].save(tmp_path / arm)
    link, own_config = tmp_path / "current", bundle.own_config
    link.symlink_to("matched")

    def moving(run):
        config = own_config(run)
        link.unlink()
        link.symlink_to("bft")
        return config

    if meanwhile:
        monkeypatch.setattr(bundle, "own_config", moving)
    serving = Recommender.load(link)
    if not meanwhile:
        moving(serving.run)
    monkeypatch.undo()
    serving.save(tmp_path / "copy")
    for one in (serving, Recommender.load(tmp_path / "copy")):
        assert one.config.arm == "matched"
        pd.testing.assert_frame_equal(
            one.recommend(histories_of(dataset)), fitted["matched"].recommend(histories_of(dataset))
        )


def test_a_model_changed_in_the_config_is_refused_though_the_weights_fit(fitted, tmp_path):
    fitted["bft"].save(tmp_path / "kept")
    path = tmp_path / "kept" / "config.yaml"
    path.write_text(path.read_text().replace("n_heads: 2", "n_heads: 1").replace("seed: 0", "seed: 5"))
    said = r"config.yaml was changed since the run was begun: backbone.n_heads is 1 and was 2, seed is 5 and was 0; "
    with pytest.raises(UserError, match=rf"{said}restore the file \(protocol.json holds its values\)"):
        Recommender.load(tmp_path / "kept")


def test_a_vocabulary_that_is_missing_or_another_s_is_refused(fitted, tmp_path):
    fitted["bft"].save(tmp_path / "kept")
    path = tmp_path / "kept" / "checkpoint" / "vocabulary.parquet"
    table = pd.read_parquet(path)
    table.iloc[::-1].to_parquet(path)
    with pytest.raises(UserError, match=r"vocabulary.parquet is not the vocabulary that .*kept was trained with"):
        Recommender.load(tmp_path / "kept")
    path.unlink()
    with pytest.raises(UserError, match=r"vocabulary\.parquet is missing"):
        Recommender.load(tmp_path / "kept")


@pytest.mark.parametrize(
    "around",
    [torch.inference_mode, partial(torch.device, "meta"), partial(torch.autocast, "cpu", torch.bfloat16)],
    ids=["inference_mode", "device", "autocast"],
)
def test_what_a_caller_works_within_changes_no_number(fitted, dataset, around):
    def modes():
        return torch.is_grad_enabled(), torch.get_default_device(), torch.is_autocast_enabled("cpu")

    def answers(one):
        lists, explained = one.recommend(histories_of(dataset), 3), one.explain(dataset.item_ids[3:9].tolist())
        return lists, explained, one.evaluate(dataset).metrics

    expected = answers(fitted["bft"])
    with around():
        before = modes()
        new = Recommender("sasrec", arm="bft", **SMALL).fit(dataset)
        found = answers(Recommender.load(new.run.path))
        for frames in zip(found[:2], expected[:2], strict=True):
            pd.testing.assert_frame_equal(*frames, check_exact=True)
        assert found[2] == expected[2]
        assert modes() == before


def test_a_second_fit_starts_afresh_and_records_its_own_data(fitted, dataset, tmp_path):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    recommender = Recommender("sasrec", arm="bft", **SMALL).fit(replace(dataset, name="other"))
    first = recommender.run.path
    assert recommender.config.data.dataset == recommender.run.protocol["dataset"] == "other"
    recommender.fit(dataset, out=tmp_path / "run")
    assert recommender.config.data.dataset == recommender.run.protocol["dataset"] == "synthetic"
    lists = [one.recommend(histories_of(dataset), 3) for one in (recommender, fitted["bft"])]
    pd.testing.assert_frame_equal(*lists, check_exact=True)
    assert not first.exists(), "one temporary folder is enough"
    nothing = Dataset.from_frame(pd.DataFrame({"user_id": [1, 1, 1], "item_id": [1, 2, 3]}))
    with pytest.raises(UserError, match="has nothing to learn from"):
        recommender.fit(nothing)
    recommender.evaluate(dataset)
    recommender.save(tmp_path / "kept")
    Recommender.load(tmp_path / "kept")
    assert torch.equal(torch.get_rng_state(), before), "the caller's random state is left alone"


def test_the_data_root_is_known_after_a_fit(dataset, tmp_path):
    dataset.save(tmp_path / "mine.parquet")
    recommender = Recommender("pop", dataset="mine", data_root=str(tmp_path)).fit(out=tmp_path / "run")
    recommender.evaluate()
    Recommender.load(tmp_path / "run", data_root=tmp_path).evaluate()


def test_a_config_that_names_the_columns_of_the_data_set_that_is_given_is_taken(dataset, tmp_path):
    rows = {"who": np.repeat(dataset.user_ids, dataset.lengths), "what": dataset.decode(dataset.items)}
    given = Dataset.from_frame(pd.DataFrame(rows), user="who", item="what", name="frame")
    config = tmp_path / "recbole.yaml"
    config.write_text("USER_ID_FIELD: who\nITEM_ID_FIELD: what\n")
    assert Recommender("pop", config=config).fit(given).run is not None
    with pytest.raises(UserError, match=r"data.time is 'when', but a data set is given, which has its columns"):
        Recommender("pop", config=config, data={"time": "when"}).fit(given)


def test_a_run_reads_the_file_behind_its_frame_with_the_frame_s_filters(dataset, tmp_path):
    frame = pd.DataFrame({"who": np.repeat(dataset.user_ids, dataset.lengths), "what": dataset.decode(dataset.items)})
    frame = frame.assign(stars=np.arange(len(frame)) % 7, when=np.arange(len(frame))).sample(frac=1, random_state=0)
    frame.to_csv(tmp_path / "ratings.csv", index=False)
    preparation = Preparation(min_user_events=6, deduplicate="first", where="stars>0")
    given = Dataset.from_frame(frame, user="who", item="what", time="when", preparation=preparation)
    recommender = Recommender("pop").fit(given, out=tmp_path / "run")
    again = Recommender.load(tmp_path / "run").config.data
    assert again.load_again(str(tmp_path / "ratings.csv")).content_hash == given.content_hash
    recommender.run.metrics_file.unlink()  # as if it had been stopped before
    one_run.resume(tmp_path / "run", dataset=str(tmp_path / "ratings.csv"))
    other = Dataset.from_frame(frame, user="who", item="what", time="when")
    assert recommender.fit(other).config.data.preparation() == Preparation(), "each data set has its own"


def test_a_recommender_knows_its_folder_wherever_the_program_goes(dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recommender = Recommender("pop").fit(dataset, out="run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(recommender.recommend(histories_of(dataset), 3)) == 3 * dataset.num_users
    recommender.save("kept")
    assert (tmp_path / "elsewhere" / "kept" / "config.yaml").is_file()
    for path in (".", ""):
        monkeypatch.chdir(tmp_path / "elsewhere")
        with pytest.raises(UserError, match="folder"):
            recommender.save(path)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(UserError, match="not a folder that can be made; give it a name"):
        recommender.save(".")


def dated_frame(dataset, last):
    """The events of a data set, a second apart but for the last user's, who has the times that are given."""
    frame = pd.DataFrame({"user_id": np.repeat(dataset.user_ids, dataset.lengths)})
    times = np.arange(len(frame)) * 1000 + 10**12
    times[frame["user_id"] == dataset.user_ids[-1]] += last
    return frame.assign(item_id=dataset.decode(dataset.items), when=pd.to_datetime(times, unit="ms"))


@pytest.fixture(scope="module")
def timed(dataset):
    """A model that reads times, of dates in milliseconds, and its data."""
    fine = Dataset.from_frame(dated_frame(dataset, 1), time="when")
    return Recommender("hstu", time_bias=True, **SMALL).fit(fine), fine


@pytest.mark.filterwarnings("ignore:data set .* has its items in another order")
def test_a_model_that_reads_times_is_evaluated_on_dates_told_in_its_unit(timed, dataset):
    recommender, fine = timed
    frame = dated_frame(dataset, 1)
    sub = Dataset.from_frame(frame[frame["user_id"] != dataset.user_ids[-1]], time="when")
    assert [data.preparation["time_unit"] for data in (fine, sub)] == ["ms", "s"]
    expected = recommender.evaluate(fine).per_user.set_index("user")
    found = recommender.evaluate(sub).per_user.set_index("user")
    ranks = ["rank_unfiltered", "rank_filtered", "history_length"]
    pd.testing.assert_frame_equal(found[ranks], expected.loc[found.index, ranks])
    aligned = recommender.aligned(sub)
    assert aligned.times.tolist() == fine.times[: len(sub.times)].tolist()
    assert aligned.preparation["time_unit"] == "ms" and recommender.aligned(aligned) is aligned
    assert recommender.probe(sub, samples=10)["mechanism"]["num_users"] == dataset.num_users - 1


def test_whole_numbers_and_dates_that_a_model_of_milliseconds_reads_otherwise(timed, dataset):
    recommender, fine = timed
    plain = dated_frame(dataset, 1).assign(when=1_700_000_000 + np.arange(dataset.num_events))
    assert recommender.aligned(Dataset.from_frame(plain, time="when")).times.max() >= 1_700_000_000_000
    undated = plain.assign(when=plain["when"].where(plain.index > 0, 1))  # the first is no date of our time
    with pytest.warns(UserWarning, match="look like dates in s, but the model takes them for .* in ms") as told:
        recommender.evaluate(recommender.aligned(Dataset.from_frame(undated, time="when")))
    assert len(told) == 1
    finer = replace(fine, times=fine.times * 1000, preparation={**fine.preparation, "time_unit": "us"})
    assert recommender.evaluate(finer).metrics == recommender.evaluate(fine).metrics
    with pytest.raises(UserError, match="are in us, but the model reads times and its training data had ms; give the"):
        recommender.evaluate(replace(finer, times=finer.times + 1))


def test_numbers_in_another_unit_than_the_numbers_of_training_are_refused_or_converted(dataset):
    seconds = dated_frame(dataset, 1).assign(when=1_700_000_000 + 60 * np.arange(dataset.num_events))
    given = Dataset.from_frame(seconds, time="when")
    recommender = Recommender("hstu", time_bias=True, **SMALL).fit(given)
    finer = seconds.assign(when=seconds["when"] * 1000)
    assert recommender.aligned(Dataset.from_frame(finer, time="when")).times.tolist() == given.times.tolist()
    vectors = recommender.user_vectors(seconds).vectors
    np.testing.assert_array_equal(
        recommender.user_vectors(seconds.rename(columns={"when": "timestamp"})).vectors, vectors
    )
    dates = seconds.assign(when=pd.to_datetime(seconds["when"], unit="s"))
    np.testing.assert_array_equal(recommender.user_vectors(dates).vectors, vectors)
    with pytest.raises(UserError, match="look like dates in ms, but the model reads them in s"):
        recommender.user_vectors(finer)
    # The run's own column of times goes before one that is called as usual.
    np.testing.assert_array_equal(recommender.user_vectors(seconds.assign(timestamp=5)).vectors, vectors)


def test_data_that_were_changed_since_training_are_not_taken_for_the_run_s_own(tmp_path):
    frame = pd.DataFrame([(u, i) for u in range(20) for i in range(6)], columns=["user_id", "item_id"])
    file = tmp_path / "own.csv"
    frame.to_csv(file, index=False)
    recommender = Recommender("pop", dataset=str(file)).fit(out=tmp_path / "run")
    before = recommender.run.protocol["content_hash"]
    recommender.evaluate()
    frame.groupby("user_id").head(5).to_csv(file, index=False)  # its test targets were trained on
    changed = Dataset.load(file)
    told = (
        f"run was trained on data with content {before[:12]}, and 'own' as loaded has {changed.content_hash[:12]}; "
        "restore the data it was trained on, or .* give them with -d, or in Python as dataset"
    )
    for one in (recommender, Recommender.load(tmp_path / "run")):
        for ask in (one.evaluate, one.probe, one.own_dataset):
            with pytest.raises(UserError, match=told):
                ask()
    with pytest.warns(UserWarning, match="in another order"):
        assert recommender.evaluate(changed).per_user["history_length"].tolist() == [4] * 20


def test_a_run_of_the_synthetic_data_set_finds_it_again(dataset, tmp_path, monkeypatch):
    small = SyntheticConfig(num_users=60, num_items=60, mean_length=7)
    monkeypatch.setattr("recbft.datasets.dataset.SyntheticConfig", lambda: small)
    recommender = Recommender("pop").fit(Dataset.load("synthetic"), out=tmp_path / "run")
    for one in (recommender, Recommender.load(tmp_path / "run")):
        assert one.evaluate().metrics == recommender.run.metrics["test"]
    other = Recommender("pop").fit(dataset)  # generated with other settings, which no name stands for
    with pytest.raises(UserError, match=r"was trained on data with content .*, and 'synthetic' as loaded has"):
        other.evaluate()


def test_a_copy_is_not_saved_into_what_is_copied(dataset, tmp_path):
    recommender = Recommender("pop").fit(dataset, out=tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    before = sorted((tmp_path / "run").rglob("*"))
    for inner in ("run/inner", "run/one/two", "link/inner", "run/checkpoint/../inner"):
        with pytest.raises(UserError, match=r"(inner|two) lies in the folder that is to be copied, .*run; name one"):
            recommender.save(tmp_path / inner)
    assert sorted((tmp_path / "run").rglob("*")) == before
    recommender.save(tmp_path / "run-2")


def test_a_run_is_copied_by_many_at_once_and_not_while_it_is_trained(fitted, tmp_path):
    fitted["bft"].save(tmp_path / "run")
    recommender = Recommender.load(tmp_path / "run")
    with recommender.run.locked(), pytest.raises(UserError, match="run is being trained by another process; wait"):
        recommender.save(tmp_path / "copy")
    assert os.listdir(tmp_path) == ["run"]
    with recommender.run.locked(alone=False):  # as another copy does
        recommender.save(tmp_path / "copy")
        with pytest.raises(UserError, match="run is being trained by another process; wait"), recommender.run.locked():
            pass


def test_copies_outlive_the_recommender_that_was_fitted_without_a_folder(dataset):
    fitted = Recommender("sasrec", epochs=1, hidden_size=8, n_layers=1, max_length=6).fit(dataset)
    history = {"a": dataset.decode(dataset.items[:3]).tolist()}
    expected = fitted.recommend(history, k=2)
    copied, pickled, folder = copy.deepcopy(fitted), pickle.dumps(fitted), fitted.run.path
    del fitted
    gc.collect()
    assert folder.is_dir()
    pd.testing.assert_frame_equal(copied.recommend(history, k=2), expected)
    assert copied.evaluate(dataset).metrics
    del copied
    gc.collect()
    assert not folder.exists()
    pd.testing.assert_frame_equal(pickle.loads(pickled).recommend(history, k=2), expected)


def test_weights_that_a_file_holds_are_not_drawn_first(fitted, monkeypatch):
    run, made = fitted["bft"].run.path, []
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(nn.Module, "load_state_dict", lambda model, weights: made.append((model, weights)))
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        Recommender.load(run)
    finally:
        torch.use_deterministic_algorithms(False)
    ((model, weights),) = made
    drawn = {name for name, x in model.named_parameters() if not x.isnan().any()}
    assert "item_embedding.weight" not in drawn and drawn <= set(weights)


def test_a_recommender_is_fitted_again_from_its_own_weights_or_from_scratch(fitted, dataset, tmp_path):
    fitted["bft"].save(tmp_path / "older")
    older = Recommender.load(tmp_path / "older")
    warm = Recommender.load(tmp_path / "older").fit(dataset, out=tmp_path / "warm", warm_start=True)
    assert warm.run.protocol["begun_from"]["run"] == str(tmp_path / "older")
    histories = histories_of(dataset)
    afresh = Recommender.load(tmp_path / "warm").fit(dataset, out=tmp_path / "afresh")
    assert "begun_from" not in afresh.run.protocol
    pd.testing.assert_frame_equal(afresh.recommend(histories), older.recommend(histories))
    assert warm.probe(dataset, samples=5)["protocol"]["begun_from"] == warm.run.protocol["begun_from"]


def test_a_path_from_home_leads_there_wherever_it_comes_in(tmp_path, monkeypatch, dataset):
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    home.mkdir()
    (home / "c.yaml").write_text("model: pop\n")
    dataset.save("~/d.parquet")
    read = Dataset.load("~/d.parquet")
    recommender = Recommender(config="~/c.yaml").fit(read, out="~/runs/one")
    recommender.save("~/kept")
    assert Recommender.load("~/kept").run.path == home / "kept"
    assert sorted(path.name for path in home.iterdir()) == ["c.yaml", "d.parquet", "kept", "runs"]
    assert [path.name for path in tmp_path.iterdir()] == ["home"], "and no folder is called ~"


def test_pop_answers_whoever_asks_with_the_same_items(dataset):
    pop = Recommender("pop").fit(dataset)
    counts = pd.Series(dataset.training_counts[1:], index=dataset.item_ids)
    best = counts.sort_values(ascending=False, kind="stable").index[:3].tolist()
    table = pop.recommend({"new": [], "stranger": ["unheard of"], "ann": [best[0]]}, 2)
    lists = table.groupby("user", sort=False)["item"].agg(list).to_dict()
    assert lists == {"new": best[:2], "stranger": best[:2], "ann": best[1:]}
    assert table.attrs["skipped_users"] == [] and pop.recommend_lists([[]], 2)[0].items == best[:2]
    assert len(pop.user_vectors([[], ["unheard of"]]).vectors) == 2


def test_requests_of_a_run_are_those_of_its_lists(fitted, dataset):
    recommender, known = fitted["bft"], dataset.item_ids[:3].tolist()
    table = recommender.recommend({"ann": known, "new": ["unheard of"]}, 3, fallback="popular")
    assert table["fallback"].tolist() == [False] * 3 + [True] * 3
    counts = dataset.training_counts[dataset.encode(table["item"][3:])]
    assert counts.tolist() == sorted(dataset.training_counts[1:].tolist(), reverse=True)[:3]
    plain = recommender.recommend_lists([known], 3)[0]
    assert plain.items == table["item"][:3].tolist() and plain.probabilities == table["probability"][:3].tolist()
    own = {"ann": [dataset.item_ids[9]]}
    assert recommender.recommend({"ann": known}, 3, candidates=own)["item"].tolist() == [dataset.item_ids[9]]
    (block,) = recommender.recommend_in_blocks({"ann": known}, 3, exclude={"ann": plain.items[:1]})
    assert block["item"].tolist()[:2] == plain.items[1:]


@pytest.mark.parametrize("usual", [False, True])
def test_frames_have_the_columns_that_the_run_was_trained_on_or_the_usual_ones(timed, dataset, usual):
    own = {"user_id": "who", "item_id": "what", "when": "day"}
    frame = dated_frame(dataset, 1)
    trained = Dataset.from_frame(frame.rename(columns=own), user="who", item="what", time="day")
    recommender = Recommender("hstu", time_bias=True, **SMALL).fit(trained)
    names = {"when": "timestamp"} if usual else own
    asked = frame.groupby("user_id").head(3).rename(columns=names).assign(other=1)
    expected = timed[0].recommend(
        asked.rename(columns={**{new: old for old, new in own.items()}, "when": "timestamp", "day": "timestamp"}), 3
    )
    pd.testing.assert_frame_equal(recommender.recommend(asked, 3), expected)
    if not usual:  # its own column of times orders the rows, and others that have usual names are none of its own
        mixed = asked.groupby("who", sort=False).sample(frac=1, random_state=0)
        mixed = mixed.assign(user_id=0, item_id=asked["what"].iloc[0])
        pd.testing.assert_frame_equal(recommender.recommend(mixed, 3), expected)
    user = asked[asked[names.get("user_id", "user_id")] == dataset.user_ids[0]]
    assert len(recommender.explain(user, k=1)) == 3
    assert len(recommender.user_vectors(asked).users) == dataset.num_users
    with pytest.raises(UserError, match="the histories: no column 'user_id'"):
        recommender.recommend(asked.rename(columns={"who": "x", "user_id": "x"}), 3)


SHOP = pd.DataFrame(
    [(f"u{u}", f"i{(u * 7 + n * n) % 23}", n) for u in range(20) for n in range(6)], columns=["who", "what", "when"]
)


def test_a_run_that_was_stopped_is_loaded_on_purpose_alone(dataset, tmp_path):
    with pytest.raises(RunError):
        Recommender("sasrec", arm="bft", **SMALL).fit(dataset, out=tmp_path / "run", progress=StopAfter(1))
    told = (
        r"run is not finished: .*; go on with recbft train --resume .*run, in Python with Recommender\.resume\(.*run'\)"
        r" .*or give unfinished=True to take the best"
    )
    with pytest.raises(UserError, match=told):
        Recommender.load(tmp_path / "run")
    early = Recommender.load(tmp_path / "run", unfinished=True)
    assert early.recommend([dataset.item_ids[:3]], 2)["probability"].isna().all() and early.calibration() is None
    assert early.recommend_lists([dataset.item_ids[:3]], 2)[0].probabilities is None


@pytest.mark.parametrize(
    "how",
    [
        "by name",
        "by a relative path",
        "by a pattern",
        "as a data set",
        "with separator and columns",
        "with items",
        "with items as a data set",
        "with items by name",
    ],
)
def test_a_run_finds_its_data_again_from_any_folder(tmp_path, monkeypatch, how):
    (tmp_path / "there").mkdir()
    monkeypatch.setenv("RECBFT_DATA_ROOT", str(tmp_path / "there"))
    monkeypatch.chdir(tmp_path / "there")
    names = {"user": "who", "item": "what", "time": "when"}
    SHOP.to_csv("shop.csv", index=False)
    (tmp_path / "there" / "items.csv").write_text("what,kind\n" + "".join(f"i{n},{n % 3}\n" for n in range(24)))
    if how == "with separator and columns":
        SHOP.to_csv("bare.dat", index=False, header=False, sep=";")
        given = Dataset.load("bare.dat", separator=";", columns=list(SHOP.columns), **names)
        run = Recommender("pop").fit(given, out="run")
    elif "as a data set" in how:
        made = Dataset.load("shop.csv", items="items.csv" if "items" in how else None, **names)
        run = Recommender("pop").fit(made, out="run")
    else:
        name = "shop" if "by name" in how else "./shop*.csv" if "pattern" in how else "shop.csv"
        run = Recommender("pop", dataset=name, items=["items.csv"] if "items" in how else None, **names).fit(out="run")
    expected = run.run.metrics["test"]
    monkeypatch.delenv("RECBFT_DATA_ROOT")
    monkeypatch.chdir(tmp_path)
    for one in (Recommender.load("there/run"), *([] if "by name" in how else [run])):
        assert one.evaluate().metrics == expected
        file = str(
            tmp_path / "there" / ("bare.dat" if "sep" in how else "shop*.csv" if "pattern" in how else "shop.csv")
        )
        assert one.config.data.dataset == ("shop" if "by name" in how else file)
        assert one.config.data.items == ((str(tmp_path / "there" / "items.csv"),) if "items" in how else None)


@pytest.mark.parametrize("where", ["argument", "environment", "data set"])
def test_a_run_remembers_the_folder_of_a_data_set_with_a_card(tmp_path, monkeypatch, where):
    monkeypatch.delenv("RECBFT_DATA_ROOT", raising=False)
    (tmp_path / "root").mkdir()
    lines = [f"{user} " + " ".join(group["what"]) for user, group in SHOP.groupby("who")]
    (tmp_path / "root" / "Beauty.txt").write_text("\n".join(lines))
    if where == "environment":
        monkeypatch.setenv("RECBFT_DATA_ROOT", str(tmp_path / "root"))
    root = tmp_path / "root"
    with pytest.warns(UserWarning, match="the card of"):
        if where == "data set":
            run = Recommender("pop").fit(Dataset.load("amazon-beauty", data_root=root), out=tmp_path / "run")
        else:
            more = {} if where == "environment" else {"data_root": root}
            run = Recommender("pop", dataset="amazon-beauty", **more).fit(out=tmp_path / "run")
        monkeypatch.delenv("RECBFT_DATA_ROOT", raising=False)
        for one in (Recommender.load(tmp_path / "run"), *([] if where == "environment" else [run])):
            assert one.evaluate().metrics == run.run.metrics["test"] and one.own_dataset().num_users == 20
        shutil.move(root, tmp_path / "moved")
        with pytest.raises(UserError, match="not found"):
            Recommender.load(tmp_path / "run").evaluate()
        monkeypatch.setenv("RECBFT_DATA_ROOT", str(tmp_path / "moved"))
        assert Recommender.load(tmp_path / "run").own_dataset().num_users == 20


def test_a_run_of_a_frame_asks_for_the_events_again(tmp_path):
    data = Dataset.from_frame(SHOP, user="who", item="what", time="when")
    Recommender("pop").fit(data, out=tmp_path / "run")
    told = "the run was trained on a frame of Python, 'frame', which is not kept with it: make the data set of the same"
    again = Recommender.load(tmp_path / "run")
    with pytest.raises(UserError, match=told):
        again.evaluate()
    assert again.evaluate(data).metrics == again.run.metrics["test"]


def test_what_may_not_be_opened_is_told_as_the_user_s_error(fitted, tmp_path, monkeypatch):
    def refused(path, *more):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("recbft.runs.folder.read_json", refused)
    with pytest.raises(UserError, match=r"protocol\.json cannot be opened: permission denied; ask for the right to it"):
        Recommender.load(fitted["bft"].run.path)
