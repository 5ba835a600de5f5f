"""A split, weights and reliability of one's own in the commands: train, show, prepare, evaluate and compare."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from tests.cli.conftest import run

SMALL = ["--set", "hidden_size=8", "--set", "max_length=8", "--set", "epochs=1", "--set", "device=cpu"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """train.csv, valid.csv and test.csv with times, weights and stars, and all.csv with a column that says the part."""
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    rows = [(f"u{u}", f"i{rng.integers(12)}", 100 * t, rng.choice([0.5, 2])) for u in range(20) for t in range(1, 7)]
    frame = pd.DataFrame(rows, columns=["user_id", "item_id", "when", "value"])
    frame["stars"] = np.where(frame["when"] == 300, np.nan, frame["when"] / 100)
    frame["part"] = np.where(frame["when"] < 500, "train", np.where(frame["when"] < 600, "valid", "test"))
    for part, own in frame.groupby("part"):
        own.drop(columns="part").to_csv(folder / f"{part}.csv", index=False)
    frame.sample(frac=1, random_state=0).to_csv(folder / "all.csv", index=False)
    return folder


def of_files(files):
    return [files / "train.csv", "--validation", files / "valid.csv", "--test", files / "test.csv", "--time", "when"]


def test_three_files_train_a_run_that_is_evaluated_and_compared_as_they_say(capsys, files, tmp_path):
    words = ["train", "-d", *of_files(files), "--weight", "value", *SMALL, "--out", tmp_path]
    code, _, err = run(capsys, *words, "--name", "a")
    assert code == 0, err
    assert "validation: 20 targets of 20 users (0 new)" in err and "test: 20 targets of 20 users" in err
    protocol = json.loads((tmp_path / "a" / "protocol.json").read_text())
    assert protocol["split"].startswith("given with the data") and protocol["config"]["data"]["weight"] == "value"
    code, evaluated, err = run(capsys, "evaluate", tmp_path / "a")
    assert code == 0 and "given with the data" in evaluated, err
    # the same parts by a column, in any order of rows
    by_column = ["-d", files / "all.csv", "--set", "split_column=part", "--set", "weight=value", "--set", "time=when"]
    arms = ["--arms", "matched,bft", "--seeds", "0-1", "-j", "1", *SMALL, "--set", "epochs=0", "--out", tmp_path / "d"]
    code, out, err = run(capsys, "compare", *by_column, *arms)
    assert code == 0 and "given with the data" in out, err


def test_show_and_prepare_keep_parts_weights_and_reliability(capsys, files, tmp_path):
    numbers = ["--weight", "value", "--reliability", "stars"]
    code, shown, err = run(capsys, "data", "show", *of_files(files), *numbers)
    assert code == 0, err
    assert "1 to 6, mean 3.6; 20 events without" in shown
    assert "split: given with the data" in shown and "weights" in shown and "0.5 to 2, mean" in shown
    words = ["data", "prepare", *of_files(files), *numbers, "--out"]
    code, _, err = run(capsys, *words, tmp_path / "kept.parquet")
    assert code == 0, err
    _, again, _ = run(capsys, "data", "show", tmp_path / "kept.parquet")
    assert again.splitlines()[1:] == shown.splitlines()[1:]
    code, _, err = run(capsys, *words, tmp_path / "recbole", "--to", "recbole")
    assert code == 2 and "a split of the data's own cannot be written for RecBole; take --to parquet" in err
    code, _, err = run(capsys, *words, files / "test.csv")
    assert code == 2 and "is the file that is read" in err


def test_weights_and_reliability_are_written_for_recbole_and_read_back(capsys, files, tmp_path):
    numbers = ["--weight", "value", "--reliability", "stars"]
    words = ["data", "prepare", files / "all.csv", "--time", "when", *numbers, "--to", "recbole", "--out"]
    code, _, err = run(capsys, *words, tmp_path / "atomic")
    assert code == 0, err
    config = next((tmp_path / "atomic").glob("*.yaml"))
    by_name = ["train", "-d", files / "all.csv", "--time", "when", *numbers]
    hashes = []
    for words in (["train", "--config", config], by_name):
        more = [*SMALL, "--set", "reads_reliability=input", "--out", tmp_path, "--name", f"run{len(hashes)}", "-q"]
        code, _, err = run(capsys, *words, *more)
        assert code == 0, err
        hashes.append(json.loads((tmp_path / more[-2] / "protocol.json").read_text())["content_hash"])
    data = json.loads((tmp_path / "run0" / "protocol.json").read_text())["config"]["data"]
    assert data["weight"] == "weight" and data["reliability"] == "reliability" and hashes[0] == hashes[1]


def test_training_says_where_reliability_is_not_read(capsys, files, tmp_path):
    words = ["train", "-d", files / "all.csv", "--time", "when", "--reliability", "stars", *SMALL, "--set", "epochs=0"]
    for name, more, said in (("a", (), True), ("b", ("--set", "reads_reliability=precision"), False)):
        code, _, err = run(capsys, *words, *more, "--out", tmp_path, "--name", name)
        assert code == 0 and ("reliability is not read" in err) == said, err


def test_half_a_split_is_refused_in_one_line(capsys, files, tmp_path):
    words = ["train", "-d", files / "train.csv", "--out", tmp_path]
    code, _, err = run(capsys, *words, "--test", files / "test.csv")
    assert code == 2 and "validation is missing: a split in files of its own has one that validates" in err
    code, _, err = run(capsys, *words, "--validation", files / "valid.csv", "--test", files / "nothing.csv")
    assert code == 2 and "nothing.csv: no such file" in err
