"""A run that begins from an older one's weights: items by their raw ids, everything else as it was, nothing lost."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from recbft.datasets import Dataset
from recbft.datasets.synth import SyntheticConfig, generate
from recbft.errors import UserError
from recbft.evaluation.metrics import protocol_lines
from recbft.models.backbone import Backbone
from recbft.runs import checkpoint
from recbft.training import build, one_run
from recbft.training.build import build_model, make_parts
from recbft.training.bundle import load_trained
from recbft.training.many_seeds import train_seeds
from recbft.training.run_config import load_run_config
from tests.training.conftest import StopAt, Stopped, assert_equal_runs
from tests.training.conftest import config as small_config

CPU = torch.device("cpu")


def config(model="sasrec", arm="bft", **settings):
    return small_config(arm, model, **{"epochs": 3, **settings})


@pytest.fixture(scope="module")
def events():
    return generate(SyntheticConfig(num_users=60, num_items=60, mean_length=7, seed=1)).events


@pytest.fixture(scope="module")
def older_data(events):
    """Before some users came, and some items with them; its items stand in another order."""
    early = events[(events.user_id >= events.user_id.unique()[15]) & (events.item_id != events.item_id.iloc[-1])]
    return Dataset.from_frame(early.iloc[::-1], name="early", time="timestamp")


@pytest.fixture(scope="module")
def grown(events):
    return Dataset.from_frame(events, name="grown", time="timestamp")


@pytest.fixture(scope="module")
def older(older_data, tmp_path_factory):
    """Finished runs on the older data, by model and settings."""
    place, made = tmp_path_factory.mktemp("older"), {}

    def of(model="sasrec", arm="bft", **settings):
        key = (model, arm, *sorted(settings.items()))
        if key not in made:
            run = one_run.train(config(model, arm, **settings), place / str(len(made)), dataset=older_data)
            made[key] = str(run.path)
        return made[key]

    return of


def begun(asked, dataset):
    return make_parts(asked, dataset, CPU)


def stop_before_the_first_state(asked, path, dataset, monkeypatch):
    def killed(*_):
        raise Stopped

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(one_run.Session, "make_resumable", killed)
        one_run.train(asked, path, dataset=dataset)


MODELS = [
    ("sasrec", "bft", {}),
    ("sasrec", "bft", {"initial": "empirical_bayes"}),
    ("sasrec", "matched", {"mixer": "regime"}),
    ("bert4rec", "bft", {}),
    ("hstu", "bft", {}),
]


@pytest.mark.parametrize(("model", "arm", "settings"), MODELS)
def test_items_take_over_their_rows_by_raw_id_and_new_items_begin_as_in_any_run(
    model, arm, settings, older, older_data, grown
):
    asked = config(model, arm, warm_start=older(model, arm, **settings), warm_start_keep=1.0, **settings)
    made = begun(asked, grown).model
    fresh = build_model(asked, grown).state_dict()
    theirs = load_trained(asked.training.warm_start).model.state_dict()
    place = {raw: index for index, raw in enumerate(older_data.item_ids.tolist(), start=1)}
    beyond = len(theirs["item_embedding.weight"]) - older_data.num_items - 1
    assert beyond == (model == "bert4rec")
    assert 0 < len(place) < grown.num_items
    learned = dict(made.named_parameters())
    for name, now in made.state_dict().items():
        if name not in made.per_item:
            assert torch.equal(now, theirs[name]), name
        elif name not in learned:  # counted in the data
            assert torch.equal(now, fresh[name]) and not torch.equal(now[:5], theirs[name][:5]), name
        else:
            assert torch.equal(now[0], theirs[name][0])
            for index, raw in enumerate(grown.item_ids.tolist(), start=1):
                wanted = theirs[name][place[raw]] if raw in place else fresh[name][index]
                assert torch.equal(now[index], wanted), (name, raw)
            assert torch.equal(now[grown.num_items + 1 :], theirs[name][older_data.num_items + 1 :])


def test_what_is_not_kept_of_the_older_weights_is_initial_weights(older, grown):
    asked = config(warm_start=older(), seed=3)
    whole, most, usual = (
        begun(replace(asked, training=replace(asked.training, warm_start_keep=keep)), grown).model.state_dict()
        for keep in (1.0, 0.75, None)
    )
    initial = build_model(asked, grown)
    for name, own in initial.named_parameters():
        torch.testing.assert_close(most[name], 0.75 * whole[name] + 0.25 * own)
        torch.testing.assert_close(usual[name], 0.4 * whole[name] + 0.6 * own)
    for name in ("ramp", "blocks.0.precision.mean_jacobian"):
        assert torch.equal(usual[name], whole[name]) and usual[name].any(), name


PLAIN = [
    ("sasrec", "matched", {}),
    ("sasrec", "matched", {"recency_decay": True}),
    ("sasrec", "matched", {"mixer": "rfa"}),
    ("bert4rec", "matched", {"recency_decay": True}),
    ("hstu", "matched", {"recency_decay": True}),
]


@pytest.mark.parametrize(("model", "arm", "settings"), PLAIN, ids=str)
def test_precision_is_added_to_a_plain_run_whose_scores_it_has_before_the_first_step(
    model, arm, settings, older, older_data
):
    path = older(model, arm, **settings)
    added = {**settings, "recency_decay": True} if "mixer" not in settings else settings
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = begun(config(model, "bft", warm_start=path, **added), older_data)
    assert made.begun_from["fresh_precision"] and made.begun_from["kept"] == 1
    trained, net = load_trained(path).model.double().eval(), made.model.double().eval()
    batch = next(iter(build.training_batches(config(model, arm, **settings), older_data).epoch(0)))
    net.refresh()
    with torch.no_grad():
        assert torch.equal(net.encode(batch).mean, trained.encode(batch).mean)
        net.set_ramp(1.0)
        assert not torch.equal(net.encode(batch).mean, trained.encode(batch).mean)


def test_fresh_precision_is_ramped_in_and_a_learned_recency_decay_is_not(older, grown, tmp_path, monkeypatch):
    seen, set_ramp = [], Backbone.set_ramp
    monkeypatch.setattr(Backbone, "set_ramp", lambda model, ramp: (seen.append(ramp), set_ramp(model, ramp)))
    for recency in (False, True):
        path = older(arm="matched", recency_decay=recency)
        seen.clear()
        asked = config(warm_start=path, warmup_steps=40)
        whole = one_run.train(asked, tmp_path / f"whole-{recency}", dataset=grown)
        assert seen[:3] == [0, 1 / 40, 2 / 40]
        with pytest.raises(Stopped):
            one_run.train(asked, tmp_path / f"part-{recency}", dataset=grown, progress=StopAt(1, steps=1))
        assert_equal_runs(whole, one_run.resume(tmp_path / f"part-{recency}", dataset=grown))
        mixer = load_trained(whole.path).model.blocks[0].mixer
        assert (mixer.decay_kept is not None) == recency
        decay = mixer._log_decay(0.25)
        torch.testing.assert_close(decay, (1 if recency else 0.25) * mixer.recency_decay.log())
        assert "tracked no precision" in protocol_lines(whole.protocol)[-1]
        # precision that is there already is taken over, and whole
        again = begun(config(warm_start=str(whole.path)), grown)
        assert "fresh_precision" not in again.begun_from and again.model.blocks[0].mixer.decay_kept is None


def test_precision_is_not_added_to_another_layer(older, grown):
    with pytest.raises(UserError, match="do not fit this model"):
        begun(config(warm_start=older(arm="published")), grown)


def test_a_share_to_keep_belongs_to_a_warm_start():
    with pytest.raises(UserError, match="warm_start_keep has no effect without warm_start"):
        config(warm_start_keep=0.5)
    with pytest.raises(UserError, match="warm_start_keep is 0"):
        config(warm_start="runs/any", warm_start_keep=0.0)


def test_precision_and_recency_are_not_ramped_in_again(older, grown, tmp_path, monkeypatch):
    path, seen, set_ramp = older(), [], Backbone.set_ramp
    monkeypatch.setattr(Backbone, "set_ramp", lambda model, ramp: (seen.append(ramp), set_ramp(model, ramp)))
    one_run.train(config(epochs=1), tmp_path / "afresh", dataset=grown)
    assert seen[:3] == [0, 1 / 6, 2 / 6]
    seen.clear()
    with pytest.warns(UserWarning, match="training.warmup_steps has no effect: precision and recency begin from what"):
        one_run.train(config(warm_start=path, epochs=1), tmp_path / "run", dataset=grown)
    assert seen and set(seen) == {1.0}


def test_a_stopped_run_goes_on_as_if_it_had_not_been_and_needs_the_older_one_no_more(older, grown, tmp_path):
    lent = tmp_path / "lent"
    shutil.copytree(older(), lent)
    asked = config(warm_start=str(lent))
    whole = one_run.train(asked, tmp_path / "whole", dataset=grown)
    with pytest.raises(Stopped):
        one_run.train(asked, tmp_path / "part", dataset=grown, progress=StopAt(1, steps=1))
    shutil.rmtree(lent)
    assert_equal_runs(whole, one_run.resume(tmp_path / "part", dataset=grown))


def test_a_run_stopped_before_its_first_state_was_saved_begins_from_the_older_weights_again(
    older, grown, tmp_path, monkeypatch
):
    asked = config(warm_start=older())
    whole = one_run.train(asked, tmp_path / "whole", dataset=grown)

    stop_before_the_first_state(asked, tmp_path / "part", grown, monkeypatch)
    assert_equal_runs(whole, one_run.resume(tmp_path / "part", dataset=grown))


def test_a_run_whose_older_one_has_changed_before_it_began_is_refused(older_data, grown, tmp_path, monkeypatch):
    one_run.train(config(epochs=1), tmp_path / "lent", dataset=older_data)
    asked = config(warm_start=str(tmp_path / "lent"))

    stop_before_the_first_state(asked, tmp_path / "part", grown, monkeypatch)
    one_run.train(config(epochs=1, seed=1), tmp_path / "lent", dataset=older_data, overwrite=True)
    with pytest.raises(UserError, match=r"part was to begin from other weights than .*lent has now; train it anew"):
        one_run.resume(tmp_path / "part", dataset=grown)


def test_seeds_trained_together_begin_from_the_same_weights(older, grown, tmp_path):
    asked = config(warm_start=older(), epochs=1)
    runs = train_seeds([replace(asked, seed=seed) for seed in (0, 1)], [tmp_path / "0", tmp_path / "1"], dataset=grown)
    alone = one_run.train(asked, tmp_path / "alone", dataset=grown)
    for run in runs:
        assert run.protocol["begun_from"] == alone.protocol["begun_from"]
    together, one = (float(run.read_history()[0]["loss"]) for run in (runs[0], alone))
    assert together == pytest.approx(one, rel=1e-5)


def test_the_protocol_says_what_weights_a_number_began_from(older, older_data, grown, tmp_path):
    run = one_run.train(config(warm_start=older(), epochs=1), tmp_path / "run", dataset=grown)
    known = len(set(older_data.item_ids.tolist()) & set(grown.item_ids.tolist()))
    weights = checkpoint.best_digest(one_run.RunFolder.open(older()).checkpoint)
    assert run.protocol["begun_from"] == {
        "run": older(),
        "weights": weights,
        "content_hash": older_data.content_hash,
        "kept": 0.4,
        "known_items": known,
    }
    assert f"which knew {known} of the {grown.num_items} items" in protocol_lines(run.protocol)[-1]
    assert "begun_from" not in one_run.RunFolder.open(older()).protocol


def test_the_digest_kept_is_of_the_weights_taken_while_the_older_run_goes_on_training(
    older, older_data, grown, tmp_path, monkeypatch
):
    path = tmp_path / "older"
    shutil.copytree(older(), path)
    better = one_run.train(config(seed=5), tmp_path / "better", dataset=older_data)

    def replaced_while_read(asked):
        found = load_trained(asked)
        shutil.rmtree(path)
        shutil.copytree(better.path, path)
        monkeypatch.setattr(build, "load_trained", load_trained)
        return found

    monkeypatch.setattr(build, "load_trained", replaced_while_read)
    made = begun(config(warm_start=str(path), warm_start_keep=1.0), grown)
    assert made.begun_from["weights"] == checkpoint.best_digest(better.checkpoint)
    taken, theirs = made.model.state_dict(), load_trained(better.path).model.state_dict()
    assert torch.equal(taken["blocks.0.inner.weight"], theirs["blocks.0.inner.weight"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 16}, "it has backbone.hidden_size 8 (here 16)"),
        ({"model": "hstu"}, "it has model 'sasrec' (here 'hstu')"),
    ],
)
def test_weights_of_another_model_are_refused_by_what_differs(older, grown, tmp_path, settings, message):
    with pytest.raises(UserError) as refused:
        one_run.train(config(warm_start=older(), **settings), tmp_path / "run", dataset=grown)
    assert message in str(refused.value) and not (tmp_path / "run").exists()


def test_weights_of_a_model_of_other_settings_that_fit_are_taken_with_a_warning(older, grown):
    with pytest.warns(UserWarning, match=r"other settings: backbone\.n_heads 2 \(here 4\)"):
        begun(config(warm_start=older(), n_heads=4), grown)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        begun(config(warm_start=older(), learning_rate=0.01, epochs=7), grown)


def test_weights_of_a_run_that_is_not_finished_are_taken_with_a_warning(older, grown, tmp_path):
    path = shutil.copytree(older(), tmp_path / "older")
    (path / "metrics.json").unlink()
    with pytest.warns(UserWarning, match="older is not finished; this run begins from the best of its epochs so far"):
        begun(config(warm_start=str(path)), grown)


def test_ids_of_another_kind_are_refused(older, events):
    renamed = events.assign(item_id="product-" + events.item_id.astype(str))
    with pytest.raises(UserError, match=r"such as 'product-\d+'; its own have other ids, such as \d+\. Begin"):
        begun(config(warm_start=older()), Dataset.from_frame(renamed, name="grown", time="timestamp"))
    other = events.assign(item_id=events.item_id + 10**6)
    with pytest.raises(UserError, match=r"such as 10\d+; its own have other ids, such as \d"):
        begun(config(warm_start=older()), Dataset.from_frame(other, name="grown", time="timestamp"))


def test_ids_that_became_text_are_found(older, older_data, events, grown):
    as_text = Dataset.from_frame(events.assign(item_id=events.item_id.astype(str)), name="grown", time="timestamp")
    asked = config(warm_start=older())
    one, two = (begun(asked, dataset) for dataset in (grown, as_text))
    assert one.begun_from == two.begun_from
    order = np.concatenate([[0], as_text.vocabulary.encode(grown.item_ids)])
    assert torch.equal(one.model.item_embedding.weight[1:], two.model.item_embedding.weight[order][1:])


@pytest.mark.parametrize("path", ["missing", "", "."])
def test_what_is_no_run_is_refused(path, grown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"run folder|is empty"):
        one_run.train(config(warm_start=path), tmp_path / "run", dataset=grown)


def test_a_run_does_not_replace_the_one_that_it_begins_from(older, grown, tmp_path):
    shutil.copytree(older(), tmp_path / "lent")
    with pytest.raises(UserError, match="the run whose weights this one begins from"):
        one_run.train(config(warm_start=str(tmp_path / "lent")), tmp_path / "lent", dataset=grown, overwrite=True)
    assert one_run.RunFolder.open(tmp_path / "lent").is_finished


def test_a_model_that_is_not_trained_begins_from_none():
    with pytest.raises(UserError, match=r"training\.warm_start has no effect in model 'pop'"):
        load_run_config(model="pop", warm_start="runs/any")
