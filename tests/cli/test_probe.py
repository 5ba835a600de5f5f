"""``recbft probe``: tables for people, a file for programs, and what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from recbft.datasets.synth import SyntheticConfig, generate, save_synthetic
from recbft_cli.main import main
from tests.cli.conftest import SETTINGS
from tests.cli.conftest import run as run_command


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "tiny.parquet"
    save_synthetic(generate(SyntheticConfig(num_users=120, num_items=80, mean_length=8.0, seed=3)), path)
    return path


@pytest.fixture(scope="module")
def runs(events, tmp_path_factory):
    """A finished run per backbone and arm that is asked for."""
    out, made = tmp_path_factory.mktemp("runs"), {}

    def get(model="sasrec", arm="bft"):
        if (model, arm) not in made:
            how = ["-m", model, "-d", str(events), "--out", str(out), "-q"]
            how += ["--set", "time=timestamp"] if model == "pop" else [*SETTINGS, "--arm", arm]
            assert main(["train", *how]) == 0
            made[model, arm] = next(out.glob(f"{model}-*" if model == "pop" else f"{model}-{arm}-*"))
        return made[model, arm]

    return get


def run(capsys, *arguments):
    return run_command(capsys, "probe", *arguments)


def test_a_run_is_probed_in_tables_with_words_under_them_and_a_protocol(capsys, runs):
    code, out, err = run(capsys, runs())
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("MECHANISM: ") and "of 120 test histories" in lines[0]
    words = " ".join(out.split())
    for text in ("layer 1", "layer 2", "training count", "gain", "effective sample size", "jacobian used",
                 "share of the coordinates at 100", "planted reliability", "UNCERTAINTY: right means",
                 "precision: ", "negative entropy: ", "At the cap of 100", "by chance", "sink"):  # fmt: skip
        assert text in words, text
    assert "fitted on the validation targets of 120 users among all items. Lists that leave seen items out" in words
    assert "protocol: test target" in lines[-1] and lines[-2].startswith("data: tiny")
    assert max(map(len, lines[:-2])) <= 150
    assert err == f"written: {runs() / 'probe.json'}\n"


def test_the_file_holds_what_was_printed_and_nothing_else_was_written(capsys, runs, tmp_path):
    folder = runs()
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != "probe.json"}
    code, out, _ = run(capsys, folder, "--json", "--out", tmp_path / "found.json")
    assert code == 0 and (tmp_path / "found.json").read_text() == out
    found = json.loads(out)
    assert list(found) == ["mechanism", "uncertainty", "new_items", "protocol"]
    metrics = json.loads((folder / "metrics.json").read_text())
    assert found["uncertainty"]["hit_rate"] == metrics["test"]["unfiltered"]["hr@10"]
    assert found["mechanism"]["initial_precision"]["rho_reliability"] is not None
    for name, content in before.items():
        assert (folder / name).read_bytes() == content
    assert not list(folder.glob(".*.tmp"))


def test_no_write_leaves_the_run_as_it_was_and_a_probe_can_be_repeated(capsys, runs):
    folder = runs("sasrec", "matched")
    assert run(capsys, folder, "--no-write")[2] == "" and not (folder / "probe.json").exists()
    _, one, _ = run(capsys, folder, "--json")
    _, two, _ = run(capsys, folder, "--json")
    assert one == two == (folder / "probe.json").read_text()


def test_a_probe_that_cannot_be_kept_is_shown(capsys, runs, tmp_path):
    code, out, err = run(capsys, runs("sasrec", "matched"), "--out", tmp_path / "nowhere" / "a.json")
    assert code == 2 and "MECHANISM" in out and "UNCERTAINTY" in out and "nowhere does not exist" in err
    assert err.splitlines()[-1].startswith("error: ") and list(tmp_path.iterdir()) == []


def test_the_planted_reliability_of_its_own_users_is_not_that_of_others(capsys, runs, events, tmp_path):
    frame = pd.read_parquet(events)
    frame["user_id"] = 121 - frame["user_id"]
    frame.to_parquet(tmp_path / "turned.parquet")
    code, out, err = run(capsys, runs(), "-d", tmp_path / "turned.parquet")
    assert code == 0 and "planted reliability" not in out, err


def test_a_plain_arm_says_that_there_is_no_precision_to_probe(capsys, runs):
    code, out, _ = run(capsys, runs("sasrec", "matched"), "--no-write")
    assert code == 0 and "tracks no precision: there is none to probe" in out and "none to judge by" in out
    assert "effective sample size" in out and "negative entropy" in out and "initial precision" not in out


@pytest.mark.parametrize("model", ["bert4rec", "hstu", "pop"])
def test_every_model_can_be_probed(capsys, runs, model):
    code, out, err = run(capsys, runs(model), "--no-write", "--part", "validation")
    assert code == 0 and "validation histories" in out, err
    assert ("mask" in out) == (model == "bert4rec")
    if model == "pop":
        assert "the same for every user, so it tells nothing: AUROC 0.5" in out and "layer 1" not in out


@pytest.mark.parametrize(
    ("part", "told"), [(("--users", 30), "30 users"), (("--split", "validation"), "its validation")]
)
def test_a_part_does_not_take_the_place_of_the_probe_that_reports_show(capsys, runs, part, told):
    run(capsys, runs())
    before = (runs() / "probe.json").read_bytes()
    code, _, err = run(capsys, runs(), *part)
    assert code == 0 and "written" not in err and (runs() / "probe.json").read_bytes() == before
    assert f"no probe.json: it is of all users of the run's own test, and this is of {told}; give --out" in err


def test_some_users_are_enough_and_the_file_says_how_many(capsys, runs, tmp_path):
    code, out, _ = run(capsys, runs(), "--users", 30, "--out", tmp_path / "some.json")
    assert code == 0 and "of 30 users" in out
    assert json.loads((tmp_path / "some.json").read_text())["uncertainty"]["num_users"] == 30


@pytest.mark.parametrize("model", ["sasrec", "bert4rec", "hstu", "pop"])
def test_a_user_s_best_items_are_explained_event_by_event(capsys, runs, events, model):
    frame = pd.read_parquet(events)
    own = frame[frame["user_id"] == 7]["item_id"].tolist()
    code, out, err = run(capsys, runs(model), "--explain", 7)
    assert code == 0, err
    assert f"user 7: {len(own) - 1} events before the test target" in out
    rows = [line.split() for line in out.splitlines() if line[:1].isdigit() and len(line.split()) == 4]
    assert len(rows) == 3 * min(len(own) - 1, 1 if model == "pop" else 9 if model == "bert4rec" else 10)
    assert all(int(event) == own[int(place) - 1] for place, event, _, _ in rows if event.isdigit())
    assert ("the mask keeps" in out) == (model == "bert4rec")
    assert not (runs(model) / "probe.json").exists() or model == "sasrec"


def test_an_explanation_can_be_json(capsys, runs):
    code, out, _ = run(capsys, runs(), "--explain", 7, "--json", "--split", "validation")
    found = json.loads(out)
    assert code == 0 and found["user"] == "7" and found["precision"] > 0
    assert set(found["events"][0]) == {"item", "score", "position", "event", "weight", "change"}
    assert np.isfinite([row["change"] for row in found["events"]]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--explain", "nobody"], "there is no user 'nobody' in 'tiny'; its users have ids such as '"),
        (["--explain", "7", "--users", "3"], "--users has no effect with --explain"),
        (["--explain", "7", "--no-write"], "--no-write has no effect with --explain"),
        (["--out", "x.json", "--no-write"], "--out has no effect with --no-write"),
        (["--users", "0"], "users is 0; give 1 to 120"),
        (["--split", "train"], "train"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys, runs, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, runs(), *arguments)
    assert code == 2 and out == "" and message in err and err.splitlines()[-1].startswith("error: ")
    assert list(tmp_path.iterdir()) == []


def test_of_a_user_who_has_had_every_item_nothing_can_be_explained_and_nothing_is_asked_that_a_shell_lacks(
    capsys, runs, events, tmp_path
):
    frame = pd.read_parquet(events)
    items = frame["item_id"].unique()
    had = pd.DataFrame({"user_id": 999, "item_id": [*items, items[0]], "timestamp": range(len(items) + 1)})
    pd.concat([frame[["user_id", "item_id", "timestamp"]], had]).to_parquet(tmp_path / "more.parquet")
    code, out, err = run(capsys, runs(), "--explain", 999, "-d", tmp_path / "more.parquet")
    said = "error: user '999' has had every item that the model knows, so none is left to explain; name another"
    assert (code, out, err.splitlines()[-1]) == (2, "", said)
    code, out, _ = run(capsys, runs(), "--explain", 999, "-d", tmp_path / "more.parquet", "--split", "validation")
    assert code == 0 and out.count(", score ") == 1


def test_a_user_of_other_data_is_explained_in_the_model_s_unit_of_time(capsys, tmp_path):
    made = generate(SyntheticConfig(num_users=40, num_items=64, mean_length=8.0, seed=3)).events
    when = {unit: pd.to_datetime(made["timestamp"] * 1000 + (unit == "ms"), unit="ms") for unit in ("ms", "s")}
    for unit, dates in when.items():
        made.assign(timestamp=dates).to_parquet(tmp_path / f"{unit}.parquet")
    how = ["-m", "hstu", "--set", "time_bias=true", "--out", str(tmp_path), "--name", "run", "-q"]
    assert main(["train", "-d", str(tmp_path / "ms.parquet"), *how, *SETTINGS]) == 0
    own, other = (run(capsys, tmp_path / "run", "--explain", 7, *data) for data in ([], ["-d", tmp_path / "s.parquet"]))
    assert own[0] == 0 and own == other
