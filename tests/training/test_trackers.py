"""What keeps a run's figures beside its folder: each epoch once, also when a run is resumed, and never in its way."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from recbft.errors import UserError
from recbft.training import one_run, trackers
from recbft.training.many_seeds import train_seeds
from recbft.training.run_config import load_run_config
from recbft.training.trackers import check_trackers
from tests.training.conftest import StopAt, Stopped, config

WANDB = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}


class Book:
    """Notes what a tracker is told, in all runs together."""

    notes: list

    def open(self, run, config, known, epochs):
        self.name = run.path.name
        self.note("open", known, epochs)
        return known or f"id of {self.name}", 0 if known is None else epochs

    def epoch(self, number, values):
        self.note("epoch", number, sorted(values))

    def finish(self, epochs, values, files):
        self.note("finish", epochs, sorted(values), [file.name for file in files if file.is_file()])

    def close(self, *, finished):
        self.note("close", finished)

    def note(self, *what):
        self.notes.append((self.name, *what))


@pytest.fixture
def book(monkeypatch):
    """In TensorBoard's place."""
    made = type("Book", (Book,), {"notes": []})
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", made)
    return made


def tracked(*names, **settings):
    return config(
        **{"arm": "matched", "epochs": 2, "warmup_steps": 50, "trackers": list(names or ("tensorboard",)), **settings}
    )


def interrupted(asked, path, dataset):
    """After the first of two epochs."""
    with pytest.raises(Stopped):
        one_run.train(asked, path, dataset=dataset, progress=StopAt(1))


def test_a_resumed_run_is_gone_on_with_under_its_id_and_every_epoch_is_told_once(book, dataset, tmp_path):
    interrupted(tracked(), tmp_path / "run", dataset)
    epochs = [note[2] for note in book.notes if note[1] == "epoch"]
    assert book.notes[0] == ("run", "open", None, 0) and book.notes[-1] == ("run", "close", False) and epochs == [1]
    del book.notes[:]
    run = one_run.resume(tmp_path / "run", dataset=dataset)
    assert run.environment["tracked"] == {"tensorboard": "id of run"}
    opened, second, finish, close = book.notes
    assert (opened[1:], close[1:]) == (("open", "id of run", 1), ("close", True))
    assert [second[2], finish[2]] == [2, 2]
    assert {"loss", "seconds", "tokens_per_second", "validation/hr@10", "validation/ndcg@10"} <= set(second[3])
    assert {"best_epoch", "best_validation/ndcg@10", "test/ndcg@10", "test/mrr", "training_seconds"} <= set(finish[3])
    assert finish[4] == ["card.md", "metrics.json"]


def losses(run):
    return [(row["epoch"], row["loss"], row["valid_ndcg@10"]) for row in run.read_history()]


@pytest.fixture(scope="module")
def alone(dataset, tmp_path_factory):
    """A run without a tracker."""
    return one_run.train(tracked(trackers=None), tmp_path_factory.mktemp("alone") / "run", dataset=dataset)


@pytest.mark.parametrize("at", ["open", "epoch", "finish", "close"])
def test_one_that_fails_is_warned_about_once_and_the_run_is_what_it_would_be(at, book, dataset, alone, tmp_path):
    def fails(*args, **kwargs):
        book.notes.append(at)
        raise ConnectionError("no\nserver")

    setattr(book, at, fails)
    with pytest.warns(UserWarning) as warned:
        run = one_run.train(tracked(), tmp_path / "run", dataset=dataset)
    said = f"tensorboard keeps no more of {run.path}, which goes on: ConnectionError: no server"
    assert [str(one.message) for one in warned] == [said] and book.notes.count(at) == 1
    assert ("tracked" in run.environment) is (at != "open")
    assert losses(run) == losses(alone)


def test_one_that_failed_is_told_all_epochs_when_the_run_is_resumed(book, dataset, tmp_path, monkeypatch):
    opens = book.open
    monkeypatch.setattr(book, "open", lambda *args: 1 / 0)
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        interrupted(tracked(), tmp_path / "run", dataset)
    monkeypatch.setattr(book, "open", opens)
    one_run.resume(tmp_path / "run", dataset=dataset)
    assert [note[2] for note in book.notes if note[1] == "epoch"] == [1, 2]


def test_training_waits_for_no_tracker_and_its_end_for_no_longer_than_set(book, dataset, tmp_path, monkeypatch):
    stuck = threading.Event()
    monkeypatch.setattr(book, "epoch", lambda *args: stuck.wait())
    monkeypatch.setattr(trackers, "LONGEST_WAIT", 0.05)
    with pytest.warns(UserWarning, match=r"tensorboard has not taken everything within 0 s; the rest may be lost ther"):
        assert one_run.train(tracked(), tmp_path / "run", dataset=dataset).is_finished
    stuck.set()


def test_seeds_trained_together_and_models_that_are_not_trained_are_kept_too(book, dataset, tmp_path):
    asked = [tracked(epochs=1, seed=seed) for seed in (0, 1)]
    train_seeds(asked, [tmp_path / "0", tmp_path / "1"], dataset=dataset)
    for name in ("0", "1"):
        assert [note[1] for note in book.notes if note[0] == name] == ["open", "epoch", "finish", "close"]
    one_run.train(load_run_config(model="pop", trackers="tensorboard"), tmp_path / "pop", dataset=dataset)
    assert [note[1:3] for note in book.notes if note[0] == "pop"] == [("open", None), ("finish", 0), ("close", True)]


def test_what_is_not_installed_is_refused_at_once_with_what_to_install(monkeypatch):
    folder = SimpleNamespace(origin=None)  # as W&B leaves one called wandb
    monkeypatch.setattr(trackers, "find_spec", lambda name: folder if name == "wandb" else None)
    check_trackers(config().training)
    with pytest.raises(UserError) as error:
        check_trackers(tracked("mlflow", "wandb", "mlflow", tensorboard=True).training)
    assert str(error.value) == (
        "trackers mlflow and wandb and tensorboard need packages that are not installed: pip install mlflow-skinny "
        "sqlalchemy alembic wandb tensorboard, or leave them out"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"trackers": ["mlfow"]},
            "training.trackers is .*mlfow.*; give a list, each one of tensorboard, mlflow, wandb",
        ),
        (
            {"trackers": "tensorboard", "project": "p"},
            "project has no effect without trackers mlflow or wandb; leave it",
        ),
        ({"trackers": "wandb", "project": " "}, "project is empty; give a name, or leave it out"),
    ],
)
def test_settings_that_name_no_tracker_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        config(**settings)


def test_tensorboard_has_each_epoch_and_the_test(dataset, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    interrupted(tracked(), tmp_path / "run", dataset)
    run = one_run.resume(tmp_path / "run", dataset=dataset)
    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    assert [(one.step, round(one.value, 5)) for one in events.Scalars("loss")] == [
        (row["epoch"], round(row["loss"], 5)) for row in run.read_history()
    ]
    (test,) = events.Scalars("test/ndcg@10")
    assert test.value == pytest.approx(run.metrics["test"]["unfiltered"]["ndcg@10"])


def test_mlflow_goes_on_with_its_run_and_has_the_card(dataset, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    for key, value in {
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }.items():
        monkeypatch.setenv(key, value)
    interrupted(tracked("mlflow", project="ours"), tmp_path / "run", dataset)
    client = mlflow.MlflowClient()
    (experiment,) = [one for one in client.search_experiments() if one.name == "ours"]
    (begun,) = client.search_runs([experiment.experiment_id])
    assert (begun.info.run_name, begun.info.status, begun.data.params["training.epochs"]) == ("run", "KILLED", "2")
    run = one_run.resume(tmp_path / "run", dataset=dataset)
    (kept,) = client.search_runs([experiment.experiment_id])
    assert kept.info.run_id == run.environment["tracked"]["mlflow"] and kept.info.status == "FINISHED"
    for name, column in (("loss", "loss"), ("validation/ndcg_at_10", "valid_ndcg@10")):
        told = [(one.step, one.value) for one in client.get_metric_history(kept.info.run_id, name)]
        assert told == [(row["epoch"], row[column]) for row in run.read_history()]
    assert kept.data.metrics["test/ndcg_at_10"] == run.metrics["test"]["unfiltered"]["ndcg@10"]
    assert [one.path for one in client.list_artifacts(kept.info.run_id)] == ["card.md", "metrics.json"]

    client.delete_run(kept.info.run_id)  # by hand: what is gone is begun anew
    again = trackers.MLflow()
    assert again.open(run, tracked(), kept.info.run_id, 2)[1] == 0


def test_a_database_of_mlflow_s_is_made_by_one_at_a_time(tmp_path, monkeypatch):
    there, most = [], []

    class Client:
        def search_experiments(self, max_results):
            there.append(1)
            most.append(len(there))
            time.sleep(0.02)
            there.pop()

    made = SimpleNamespace(get_tracking_uri=lambda: f"sqlite:///{tmp_path}/mlflow.db", MlflowClient=Client)
    monkeypatch.setitem(sys.modules, "mlflow", made)
    with ThreadPoolExecutor(3) as pool:
        assert all(isinstance(client, Client) for client in pool.map(lambda _: trackers._mlflow_client(), range(3)))
    assert most == [1, 1, 1]


def test_wandb_keeps_a_run_without_key_and_server(dataset, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    places = {key: str(tmp_path) for key in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR")}
    for key, value in {**WANDB, **places}.items():
        monkeypatch.setenv(key, value)
    interrupted(tracked("wandb", project="ours"), tmp_path / "run", dataset)
    run = one_run.resume(tmp_path / "run", dataset=dataset)
    wandb.teardown()  # its process has written everything then
    first, second = ([*kept(file)] for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")))
    for records in (first, second):
        (begun,) = [one.run for one in records if one.WhichOneof("record_type") == "run"]
        assert (begun.run_id, begun.project, begun.display_name) == (run.environment["tracked"]["wandb"], "ours", "run")
        assert '"epochs":2' in str(begun.config).replace("\\", "")
    assert steps(first) == [1] and steps(second) == [1, 2], "the second, sent later, is whole"
    (results,) = [one.artifact for one in second if one.WhichOneof("record_type") == "artifact"]
    assert [one.path for one in results.manifest.contents] == ["card.md", "metrics.json"]
    codes = [
        [one.exit.exit_code for one in records if one.WhichOneof("record_type") == "exit"]
        for records in (first, second)
    ]
    assert codes == [[1], [0]]


def steps(records):
    found = [item for one in records if one.WhichOneof("record_type") == "history" for item in one.history.item]
    return [int(item.value_json) for item in found if "_step" in (item.key, *item.nested_key)]


def kept(file):
    """The records of W&B's own file, which is LevelDB's log: blocks of 32 KiB, each part with a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part, at = part + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(part)
            part = b""
