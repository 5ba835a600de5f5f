"""The commands on a run: train, evaluate, stop and go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from recbft.config.yaml_text import read_yaml
from recbft.reporting.progress import Lines
from tests.cli.conftest import SETTINGS, run, train


def test_training_prints_the_table_the_protocol_and_the_folder(capsys, events, tmp_path):
    code, out, err = train(capsys, events, tmp_path)
    folder = tmp_path / "sasrec-bft-tiny-seed0"
    assert code == 0
    lines = out.splitlines()
    assert "NDCG@10" in lines[0] and lines[1].startswith("all items") and lines[2].startswith("seen masked")
    assert "content" in out and "ties against" in out and lines[-1] == f"run folder: {folder}"
    shown = json.loads((folder / "metrics.json").read_text())["exposure"]
    words = [line.split() for line in lines[-5:-1]]
    for cells, setting in zip(words[1:3], ("unfiltered", "filtered"), strict=True):
        assert [float(cell) for cell in cells[2:]] == [
            round(shown[setting][f"{name}@10"], digits)
            for name, digits in (("coverage", 4), ("gini", 4), ("popularity", 1))
        ]
    targets = pd.read_parquet(folder / "per_user.parquet")["target_count"].mean()
    assert words[0][:4] == ["lists", "of", "10", "show"] and words[3] == ["the", "targets", f"{targets:.1f}"]
    *epochs, last = err.splitlines()[1:]
    assert [line.split()[:2] for line in epochs] == [["epoch", f"{n}/3"] for n in (1, 2, 3)]
    assert last == "ranking each user's validation and test item"
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_of_several_config_files_all_are_read(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("epochs: nine\n")
    Path("b.yaml").write_text("stopping_step: 3\n")
    for command in (["train"], ["compare", "--out", "x"], ["tune", "--out", "x", "--space", "epochs=1,2"]):
        code, _, err = run(capsys, *command, "-m", "SASRec", "--config", "a.yaml", "--config", "b.yaml")
        assert code == 2 and err.endswith("a.yaml and b.yaml: epochs is 'nine'; give a whole number\n")


def test_evaluate_repeats_the_numbers_of_the_run(capsys, finished):
    recorded = json.loads((finished / "metrics.json").read_text())
    metrics, exposure = recorded["test"], recorded["exposure"]
    code, out, err = run(capsys, "evaluate", finished)
    assert (code, err) == (0, "")
    assert f"{exposure['unfiltered']['gini@10']:.4f}" in out.splitlines()[-2]
    assert f"{metrics['unfiltered']['ndcg@10']:.4f}" in out.splitlines()[1] and "seen masked  " not in out
    _, out, _ = run(capsys, "evaluate", finished, "--filter-seen")
    assert out.splitlines()[1].startswith("seen masked") and f"{metrics['filtered']['mrr']:.4f}" in out.splitlines()[1]
    assert "filter_seen true" in out
    _, out, _ = run(capsys, "evaluate", finished, "--both")
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["all", "seen"]


@pytest.mark.parametrize("command", ["evaluate", "probe"])
def test_long_work_is_announced(capsys, finished, command, monkeypatch):
    monkeypatch.setattr("recbft_cli.evaluate.MANY_SCORES", 10)
    code, _, err = run(capsys, command, finished, *(["--no-write"] if command == "probe" else []))
    assert code == 0 and err.startswith("ranking the test items of ") and " users among " in err


@pytest.mark.parametrize("command", ["evaluate", "probe"])
def test_an_empty_name_of_other_data_is_not_the_run_s_own(capsys, finished, command):
    code, out, err = run(capsys, command, finished, "-d", "")
    assert (code, out) == (2, "") and "dataset is empty; give a data set's name or a file" in err


def test_other_data_are_read_by_the_columns_that_are_named(capsys, events, finished, tmp_path):
    file = tmp_path / "other.csv"
    frame = pd.read_parquet(events)
    frame.rename(columns={"user_id": "who", "item_id": "what", "timestamp": "when"}).to_csv(file, index=False)
    code, _, err = run(capsys, "evaluate", finished, "-d", file)
    assert code == 2 and "no column 'user_id'" in err
    named = ("-d", file, "--user", "who", "--item", "what", "--time", "when")
    _, own, _ = run(capsys, "evaluate", finished, "--both")
    code, other, err = run(capsys, "evaluate", finished, "--both", *named)
    assert (code, err) == (0, "") and other.splitlines()[:3] == own.splitlines()[:3]
    assert run(capsys, "probe", finished, "--no-write", *named)[0] == 0
    code, _, err = run(capsys, "evaluate", finished, "--user", "who")
    assert code == 2 and "--user has no effect without -d, which names other data than the run's; leave it out" in err


def test_a_finished_run_is_replaced_only_when_asked(capsys, events, tmp_path):
    assert train(capsys, events, tmp_path, "-q")[0] == 0
    code, _, err = train(capsys, events, tmp_path, "-q")
    assert code == 2 and "holds a finished run" in err
    assert train(capsys, events, tmp_path, "-q", "--overwrite", "--set", "epochs=1")[0] == 0
    folder = tmp_path / "sasrec-bft-tiny-seed0"
    assert len(pd.read_csv(folder / "history.csv")) == 1


def test_a_run_is_not_given_up_for_one_that_cannot_begin(capsys, events, tmp_path):
    assert train(capsys, events, tmp_path, "-q", "--name", "mine")[0] == 0
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "mine").iterdir()}
    refused = ["--name", "mine", "--mixer", "linear_attention", "--overwrite"]  # no precision for the Kalman update
    code, _, err = train(capsys, events, tmp_path, *refused)
    assert code == 2 and "mixer linear_attention gives none" in err and "training into" not in err
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "mine").iterdir()} == before


def test_ctrl_c_saves_and_says_how_to_go_on_and_the_rest_is_the_same(capsys, events, finished, tmp_path, monkeypatch):
    def interrupt(self, row):
        if row["epoch"] == 2:
            raise KeyboardInterrupt

    folder = tmp_path / finished.name
    with monkeypatch.context() as patch:
        patch.setattr(Lines, "epoch", interrupt)
        code, _, err = train(capsys, events, tmp_path)
    assert code == 1
    assert err.splitlines()[-1].endswith(
        f"the state after epoch 2 is saved, go on with: recbft train --resume {folder}"
    )
    known = pd.read_parquet(events).query("user_id == user_id.iloc[0]")
    known[["user_id", "item_id"]].to_csv(tmp_path / "one.csv", index=False)
    for command, asked in {
        ("evaluate",): "evaluated",
        ("probe",): "probed",
        ("recommend", "--histories", tmp_path / "one.csv"): "asked, and its lists have no probabilities",
    }.items():
        code, _, err = run(capsys, command[0], folder, *command[1:])
        assert code == 0 and f"warning: {folder} is not finished; the best of its epochs so far is {asked}\n" in err
        assert ("no probe.json: " in err and "weights that the run may not end with" in err) == (asked == "probed")
    assert not (folder / "probe.json").exists()
    code, out, err = run(capsys, "train", "--resume", folder)
    assert code == 0 and "continuing at epoch 3" in err and f"run folder: {folder}" in out
    pd.testing.assert_frame_equal(
        pd.read_parquet(folder / "per_user.parquet"), pd.read_parquet(finished / "per_user.parquet")
    )


@pytest.mark.parametrize("name", ["", "..", "a/b", "../mine"])
def test_a_run_s_name_is_that_of_one_folder(capsys, events, tmp_path, name):
    code, _, err = train(capsys, events, tmp_path, "--name", name)
    assert code == 2 and f"--name is {name!r}; give the name of one folder" in err and list(tmp_path.iterdir()) == []


def test_a_run_whose_data_moved_goes_on_with_the_file_that_is_named(capsys, events, finished, tmp_path, monkeypatch):
    moved, folder = tmp_path / "moved.parquet", tmp_path / finished.name
    moved.write_bytes(events.read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(Lines, "epoch", lambda self, row: (_ for _ in ()).throw(KeyboardInterrupt()))
        assert train(capsys, moved, tmp_path, "--name", finished.name)[0] == 1
    moved.unlink()
    code, _, err = run(capsys, "train", "--resume", folder)
    assert code == 2 and "moved.parquet" in err and "give it with -d" in err
    code, _, err = run(capsys, "train", "--resume", folder, "-d", events, "-q")
    assert (code, err) == (0, "")
    pd.testing.assert_frame_equal(
        pd.read_parquet(folder / "per_user.parquet"), pd.read_parquet(finished / "per_user.parquet")
    )
    fewer = tmp_path / "fewer.parquet"
    pd.read_parquet(events).iloc[:-1].to_parquet(fewer)
    for command, words in (("evaluate", ()), ("probe", ("--no-write",))):
        assert run(capsys, command, folder, *words)[0] == 2
        assert run(capsys, command, folder, "-d", events, *words)[0] == 0
    assert run(capsys, "probe", folder, "-d", events)[0] == 0 and (folder / "probe.json").is_file()
    (folder / "probe.json").unlink()
    code, _, err = run(capsys, "probe", folder, "-d", fewer)
    assert code == 0 and "no probe.json: it is of all users of the run's own test, and this is of other data; gi" in err
    for command, words in (("evaluate", ()), ("probe", ("--no-write",))):
        said = "training events in {}, not in what the model was trained on"
        assert said.format("fewer") in run(capsys, command, folder, "-d", fewer, *words)[1]
        assert said.format(events.stem) not in run(capsys, command, folder, "-d", events, *words)[1]
    assert not (folder / "probe.json").exists(), "a probe of other data is none that the run's report may show"


def test_data_named_for_a_finished_run_are_those_it_was_trained_on(capsys, events, finished, tmp_path):
    own = run(capsys, "train", "--resume", finished)
    assert own[0] == 0 and own[1].splitlines()[-1] == f"run folder: {finished}"
    assert run(capsys, "train", "--resume", finished, "-d", events) == own
    code, out, err = run(capsys, "train", "--resume", finished, "-d", tmp_path / "nowhere.csv")
    assert (code, out) == (2, "") and "nowhere.csv" in err
    pd.read_parquet(events).iloc[:-1].to_parquet(tmp_path / "fewer.parquet")
    code, out, err = run(capsys, "train", "--resume", finished, "-d", tmp_path / "fewer.parquet")
    assert (code, out) == (2, "") and err.startswith(f"error: {finished} is finished, and was trained on data with ")
    assert err.endswith("; give those, or no data\n")


def test_the_data_root_is_where_names_are_looked_for_and_is_not_saved(capsys, events, tmp_path):
    root = events.parent
    how = ["--data-root", root, "--out", tmp_path, "-q", *SETTINGS]
    code, _, err = run(capsys, "train", "-d", "tiny", *how)
    assert (code, err) == (0, "")
    assert str(root) not in Path(tmp_path / "sasrec-bft-tiny-seed0" / "config.yaml").read_text()


@pytest.mark.parametrize("content", [None, b"", b"PAR1"])
def test_a_finished_run_that_lost_its_ranks_is_not_printed_again(capsys, events, tmp_path, content):
    assert train(capsys, events, tmp_path, "-q", "--name", "mine", "--set", "epochs=1")[0] == 0
    ranks = tmp_path / "mine" / "per_user.parquet"
    ranks.unlink() if content is None else ranks.write_bytes(content)
    code, out, err = run(capsys, "train", "--resume", tmp_path / "mine", "-q")
    assert (code, out) == (2, "") and err.startswith(f"error: {ranks} is {'missing' if content is None else 'damaged'}")
    assert err.count("\n") == 1 and "restore it, or train again" in err


def test_a_run_begins_from_the_weights_and_settings_of_an_older_one(capsys, events, finished, tmp_path):
    grown = tmp_path / "grown.csv"
    frame = pd.read_parquet(events)
    more = frame.tail(30).assign(user_id="newcomer", item_id=[f"new {n % 5}" for n in range(30)])
    pd.concat([frame, more]).to_csv(grown, index=False)
    code, out, err = run(capsys, "train", "--warm-start", finished, "-d", grown, "--out", tmp_path, "--name", "next")
    assert code == 0, err
    assert f"begins from 0.4 of the weights of {finished}" in err and "which knew 59 of the 64 items" in err
    assert f"begun from 0.4 of the weights of {finished}" in out
    made, before = (read_yaml(folder / "config.yaml") for folder in (tmp_path / "next", finished))
    assert made["training"].pop("warm_start") == str(finished) and before["training"].pop("warm_start") is None
    assert made["data"].pop("dataset") == str(grown) != before["data"].pop("dataset")
    assert made == before
    code, out, _ = run(capsys, "evaluate", tmp_path / "next")
    assert code == 0 and f"begun from 0.4 of the weights of {finished}" in out


def test_a_run_does_not_begin_from_half_of_an_older_one_s_settings(capsys, finished, tmp_path):
    older = shutil.copytree(finished, tmp_path / "older")
    text = (older / "config.yaml").read_text()
    (older / "config.yaml").write_text(text[: text.index("\ncore:")])
    code, _, err = run(capsys, "train", "--warm-start", older)
    assert code == 2 and "config.yaml lacks core, with which the run was begun, and may be cut off" in err


def test_train_says_who_is_left_out_and_trains_on_short_histories_where_asked(tmp_path, capsys):
    rows = [f"u{user},i{(user * 3 + n) % 7}\n" for user in range(12) for n in range(2 if user < 4 else 5)]
    (tmp_path / "log.csv").write_text("user_id,item_id\n" + "".join(rows))
    words = ["train", "-m", "pop", "-d", tmp_path / "log.csv", "--out", tmp_path, "--name"]
    code, _, err = run(capsys, *words, "usual")
    assert code == 0 and "left out: 4 of 12 users, who have under 3 events; min_history=2 trains on those" in err
    code, out, err = run(capsys, *words, "all", "--set", "min_history=2")
    assert code == 0 and "trained on and not tested: 4 users of 2 events" in err and "12 users (8 tested)" in out
    assert "left out" not in run(capsys, *words, "quiet", "-q")[2]
    _, shown, _ = run(capsys, "data", "show", tmp_path / "log.csv", "--min-history", "2")
    assert "12, 8 of them tested" in shown
