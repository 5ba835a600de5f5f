"""Two finished runs as one that needs neither, evaluated as any other; what cannot be joined is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from recbft.datasets.features import ItemFeatures
from recbft.datasets.planted import synthetic_dataset
from recbft.datasets.synth import SyntheticConfig
from recbft.errors import UserError
from recbft.evaluation.evaluate import evaluate
from recbft.evaluation.metrics import ndcg
from recbft.evaluation.probability import rows_of_new_targets
from recbft.evaluation.views import view_of
from recbft.runs import checkpoint
from recbft.runs.folder import RunFolder
from recbft.training import join as joining
from recbft.training import one_run
from recbft.training.bundle import load_trained
from recbft.training.join import join, usual_name
from recbft.training.run_config import load_run_config
from tests.training.conftest import config


@pytest.fixture(scope="module")
def described(dataset):
    """The data set with what is known of its items."""
    rng = np.random.default_rng(0)
    words = [" ".join(f"w{n}" for n in rng.integers(0, 12, 3)) for _ in range(dataset.num_items)]
    return dataset.with_features(ItemFeatures.from_frame(pd.DataFrame({"item_id": dataset.item_ids, "words": words})))


@pytest.fixture(scope="module")
def runs(described, tmp_path_factory):
    """A run of ids, one of beliefs and one of content, by name; nobody changes them."""
    out = tmp_path_factory.mktemp("joined")
    configs = {
        "ids": config("matched", item_vector="id", epochs=2, seed=3),
        "belief": config("bft", epochs=1, content_width=8),
        "content": load_run_config(model="content-cosine", device="cpu", content_decay=0.5, content_width=16),
    }
    return {name: one_run.train(each, out / name, dataset=described).path for name, each in configs.items()}


def with_weights(monkeypatch, *weights):
    """Let every bin be fitted these weights."""
    fit = joining.fit_join

    def fitted(*given, **named):
        found = fit(*given, **named)
        return found._replace(weights=np.broadcast_to(weights, found.weights.shape))

    monkeypatch.setattr(joining, "fit_join", fitted)


@pytest.mark.parametrize(("by", "number"), [("count", 6), ("none", 1)])
def test_a_join_is_a_run_that_needs_neither_of_the_two(runs, described, tmp_path, by, number):
    first, second = (shutil.copytree(runs[name], tmp_path / name) for name in ("belief", "content"))
    made = join(first, second, tmp_path / "join", by=by, dataset=described)
    assert made.is_finished and sorted(path.name for path in tmp_path.iterdir()) == ["belief", "content", "join"]
    shutil.rmtree(first)
    shutil.rmtree(second)
    run, own, vocabulary, _, _, model = load_trained(shutil.move(made.path, tmp_path / "elsewhere"))
    assert (own.model, own.seed, model.weights.shape) == ("join", 0, (number, 2))
    assert [part.model for part in own.parts.values()] == ["sasrec", "content-cosine"]
    assert own.parts["second"].backbone.content_decay == 0.5 and vocabulary.ids.tolist() == described.item_ids.tolist()
    for part in ("validation", "test"):
        assert evaluate(model, described, part).metrics == run.metrics[part]
    assert run.metrics["exposure"] and run.metrics["probability"]["filtered"]["temperature"] > 0
    joined = run.protocol["joined"]
    assert [each["model"] for each in joined["runs"]] == ["sasrec", "content-cosine"] and joined["by"] == by
    assert all(each["weights"] == checkpoint.best_digest(runs[name] / "checkpoint")
               for name, each in zip(("belief", "content"), joined["runs"], strict=True))  # fmt: skip
    assert sum(row["targets"] for row in joined["bins"]) == joined["targets"] > 40
    assert sum(row["items"] for row in joined["bins"]) == described.num_items
    by_bin = {row["bin"]: [row["first"], row["second"]] for row in joined["bins"]}
    np.testing.assert_allclose(
        [by_bin[name] for name in by_bin],
        [row.tolist() for name, row in zip(model.names_of_bins, model.weights, strict=True) if name in by_bin],
        rtol=1e-6,
    )
    assert joined["prior_targets"] >= 1 if by == "count" else joined["prior_targets"] == 0
    likely = joined["log_likelihood"]
    assert likely["join"] >= max(likely["first"], likely["second"])


@pytest.mark.parametrize(("weights", "same"), [((1, 0), "ids"), ((0, 1), "content"), ((0, 2), "content")])
def test_a_join_that_weighs_one_run_alone_has_its_ranks(runs, described, tmp_path, monkeypatch, weights, same):
    with_weights(monkeypatch, *weights)
    made = join(runs["ids"], runs["content"], tmp_path / "join", dataset=described)
    own, theirs = (pd.read_parquet(run.per_user_file) for run in (made, RunFolder(runs[same])))
    pd.testing.assert_frame_equal(own, theirs)
    assert made.metrics["validation"] == RunFolder(runs[same]).metrics["validation"]


def test_rare_items_are_raised_as_far_as_validation_allows(runs, described, tmp_path):
    plain, free, some = (
        join(runs["ids"], runs["content"], tmp_path / f"{cost}", dataset=described, for_rare=cost)
        for cost in (None, 0.0, 0.2)
    )
    is_rare = torch.from_numpy(described.training_counts < 5)
    told, model = some.protocol["joined"]["for_rare"], load_trained(some.path).model
    before, after = (load_trained(run.path).model.item_table() for run in (plain, some))
    assert before.bias is None and torch.equal(before.weight, after.weight)
    assert torch.equal(after.bias != 0, is_rare | (torch.arange(len(is_rare)) == 0))
    assert after.bias.unique().tolist() == pytest.approx([0.0, told["level"]]) and told["level"] > 0
    assert told["ndcg"][1] >= 0.8 * told["ndcg"][0] and told["ndcg_rare"][1] > told["ndcg_rare"][0]
    assert free.protocol["joined"]["for_rare"]["level"] <= told["level"]
    # What the level was fitted by is what evaluation finds.
    validation = view_of(described, "validation")
    new = rows_of_new_targets(validation)
    for at, run in enumerate((plain, some)):
        found = evaluate(load_trained(run.path).model, described, "validation").per_user
        ranks = found["rank_filtered"].to_numpy()[new]
        assert ndcg(ranks, 10).mean() == pytest.approx(told["ndcg"][at])
        rare = is_rare.numpy()[validation.target[new]]
        assert ndcg(ranks[rare], 10).mean() == pytest.approx(told["ndcg_rare"][at])
    assert model.of_grown(model.first, model.second, 0).item_table().bias.equal(after.bias)


def test_the_seed_is_that_of_a_trained_run_and_data_are_those_with_features(runs, described, tmp_path):
    made = join(runs["content"], runs["ids"], tmp_path / "join", dataset=described)
    assert made.protocol["seed"] == 3
    assert usual_name(runs["content"], runs["ids"], "none") == "join-one_weight-synthetic-seed3"
    again = join(made.path, runs["belief"], tmp_path / "again", by="none", dataset=described)
    assert load_trained(again.path)[1].parts["first"].parts["second"].arm == "matched"


def test_equal_runs_give_equal_joins(runs, described, tmp_path):
    torch.manual_seed(5)
    one, two = (join(runs["ids"], runs["content"], tmp_path / name, dataset=described) for name in ("one", "two"))
    assert checkpoint.best_digest(one.checkpoint) == checkpoint.best_digest(two.checkpoint)
    assert {**one.metrics, "training_seconds": 0} == {**two.metrics, "training_seconds": 0}


def test_what_cannot_be_joined_is_refused(runs, described, dataset, stopped, tmp_path):
    def refused(first, second, message, data=described, **named):
        with pytest.raises(UserError, match=message):
            join(first, second, tmp_path / "join", dataset=data, **named)

    ids, content = runs["ids"], runs["content"]
    refused(ids, content, "for_rare is 1.5", for_rare=1.5)
    refused(ids, content, "for_rare needs weights by the item's training count", for_rare=0.01, by="none")
    refused(ids, ids, "are the same model; join two that differ")
    copy = shutil.copytree(ids, tmp_path / "copy")
    refused(ids, copy, "are the same model; join two that differ")
    refused(ids, stopped.path, "is not finished; go on with `recbft train --resume")
    shutil.rmtree(copy / "checkpoint")
    refused(copy, content, "copy/checkpoint holds no checkpoint")
    refused(ids, tmp_path / "nothing", "there is no run folder")
    refused(ids, content, "by is 'counts'; did you mean 'count'", by="counts")
    other = synthetic_dataset(SyntheticConfig(num_users=50, num_items=60, mean_length=7, seed=2))
    refused(
        ids, content, r"ids and .*content were trained on data with content \w{12}, .*; give their data with -d", other
    )
    reversed_ = replace(dataset, items=dataset.items[::-1].copy())
    elsewhere = one_run.train(load_run_config(model="pop"), tmp_path / "pop", dataset=reversed_).path
    refused(ids, elsewhere, r"differ in content_hash: \w{12} in .*; join runs of the same data and split")
    more = pd.DataFrame({"item_id": [*dataset.item_ids, 10**6], "words": "word"})
    wider = dataset.with_features(ItemFeatures.from_frame(more.assign(words=more.index.astype(str))))
    popular = one_run.train(load_run_config(model="pop"), tmp_path / "wider", dataset=wider).path
    refused(ids, popular, "differ in items: 59 in .*, 60 in .*; train both on the same data with the same --items")
    assert not (tmp_path / "join").exists()


def test_a_join_has_the_split_of_its_runs(dataset, tmp_path):
    split = {"split": "global_time", "split_at": 0.6}
    for seed in (0, 1):
        one_run.train(config("matched", epochs=1, seed=seed, **split), tmp_path / f"{seed}", dataset=dataset)
    made = join(tmp_path / "0", tmp_path / "1", tmp_path / "join", by="none", dataset=dataset)
    assert made.protocol["target_hash"] == dataset.with_split(**split).target_hash != dataset.target_hash
    pair = [one_run.train(config("matched", epochs=1, seed=n), tmp_path / f"plain{n}", dataset=dataset) for n in (0, 1)]
    with pytest.raises(UserError, match=r"has the split .*global_time.*, and .*plain0 and .*plain1 another: tar"):
        join(pair[0].path, pair[1].path, tmp_path / "no", dataset=dataset.with_split(**split))


def test_a_join_never_takes_the_place_of_what_it_is_made_of(runs, described, tmp_path):
    copy = shutil.copytree(runs["ids"], tmp_path / "copy")
    with pytest.raises(UserError, match="holds a finished run"):
        join(copy, runs["content"], copy, dataset=described)
    with pytest.raises(UserError, match="is one of the runs that are to be joined"):
        join(copy, runs["content"], copy, dataset=described, overwrite=True)
    join(copy, runs["content"], tmp_path / "join", dataset=described)
    made = join(copy, runs["content"], tmp_path / "join", by="none", dataset=described, overwrite=True)
    assert made.config["arm"] == "one_weight"


def test_a_broken_join_leaves_nothing_and_a_damaged_one_says_so(runs, described, tmp_path, monkeypatch):
    made = join(runs["ids"], runs["content"], tmp_path / "join", dataset=described)
    text = made.config_file.read_text()
    made.config_file.write_text(text.replace("content_decay: 0.5", "content_decay: 0.9"))
    with pytest.raises(UserError, match=r"was changed since the run was begun: backbone\.second"):
        load_trained(made.path)
    monkeypatch.setattr(joining, "results", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        join(runs["ids"], runs["content"], tmp_path / "broken", dataset=described)
    assert not (tmp_path / "broken").exists()


def test_a_join_cannot_be_trained(dataset, tmp_path):
    with pytest.raises(UserError, match="make it with `recbft join RUN RUN`"):
        one_run.train(load_run_config(model="join", device="cpu"), tmp_path / "run", dataset=dataset)
