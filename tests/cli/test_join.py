"""``recbft join``: what it prints and leaves, and that the run it leaves serves the other commands."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from recbft_cli.main import main
from tests.cli.conftest import run


@pytest.fixture(scope="module")
def two(events, finished, tmp_path_factory):
    """A trained run, and one that is not trained."""
    out = tmp_path_factory.mktemp("two")
    told = ["train", "-m", "pop", "-d", str(events), "--set", "time=timestamp", "--set", "device=cpu", "-q"]
    assert main([*told, "--out", str(out)]) == 0
    return finished, out / "pop-published-tiny-seed0"


def test_a_join_prints_its_weights_and_results_and_is_asked_as_any_run(capsys, two, tmp_path):
    code, out, err = run(capsys, "join", *two, "--out", tmp_path)
    folder = tmp_path / "join-by_count-tiny-seed0"
    assert (code, err.splitlines()) == (
        0, ["fitting the weights on validation targets", "ranking each user's validation and test item"]
    )  # fmt: skip
    lines = out.splitlines()
    heads = ["training count", "items", "targets", "weight of 1 (sasrec bft)", "weight of 2 (pop published)"]
    assert lines[0].split() == " ".join(heads).split()
    joined = json.loads((folder / "protocol.json").read_text())["joined"]
    for line, row in zip(lines[1:], joined["bins"], strict=False):
        assert line.startswith(row["bin"])
        numbers = [float(word) for word in line.removeprefix(row["bin"]).split()]
        assert numbers == [row["items"], row["targets"], *(float(f"{row[part]:.3g}") for part in ("first", "second"))]
    assert f"joined from {two[0]} (" in out and f"{joined['targets']} validation targets" in out
    assert lines[-1] == f"run folder: {folder}"
    metrics = json.loads((folder / "metrics.json").read_text())["test"]
    code, out, err = run(capsys, "evaluate", folder, "--both")
    assert (code, err) == (0, "") and all(f"{metrics[each]['ndcg@10']:.4f}" in out for each in metrics)
    histories = tmp_path / "histories.csv"
    pd.DataFrame({"user_id": "ann", "item_id": [3, 5], "timestamp": [1, 2]}).to_csv(histories, index=False)
    code, out, err = run(capsys, "recommend", folder, "--histories", histories, "-k", "2")
    assert (code, err, len(out.splitlines())) == (0, "", 3)
    code, out, err = run(capsys, "stratify", folder, "--baseline", two[1], "--by", "first-time")
    assert (code, err) == (0, "") and "join/by_count" in out


def test_a_bin_without_targets_says_whose_weights_it_has(capsys, two, tmp_path):
    code, out, _ = run(capsys, "join", *two, "--out", tmp_path, "--by", "none", "--name", "mine", "-q")
    assert code == 0 and out.splitlines()[1].startswith("all items") and (tmp_path / "mine").is_dir()
    from recbft.reporting.run_tables import format_join

    rows = [{"bin": "none", "items": 3, "targets": 0, "first": 1.0, "second": 2.0, "weights_of": "1-4"}]
    runs = [{"model": "sasrec", "arm": "bft"}, {"model": "content-cosine", "arm": "published"}]
    *_, elsewhere, prior = format_join({"runs": runs, "bins": rows, "prior_targets": 2.345}).splitlines()
    assert elsewhere == "none: no target to fit on, so the weights of 1-4"
    assert prior == "prior: as if each bin had 2.35 more targets that ask for the weights of all"


def test_rare_items_are_raised_at_a_price_that_is_told(capsys, two, tmp_path):
    code, out, _ = run(capsys, "join", *two, "--out", tmp_path, "--for-rare", "0.05", "-q")
    told = json.loads((tmp_path / "join-by_count-tiny-seed0" / "protocol.json").read_text())["joined"]["for_rare"]
    said = next(line for line in out.splitlines() if line.startswith("items with fewer than 5 training events"))
    assert code == 0 and f"{told['level']:g} added to their scores" in said and f"{told['ndcg'][1]:.4f}" in said
    code, out, err = run(capsys, "join", *two, "--out", tmp_path, "--by", "none", "--for-rare", "0.05")
    assert (code, out) == (2, "") and "for_rare needs weights by the item's training count" in err


@pytest.mark.parametrize(
    ("more", "message"),
    [(["--name", "a/b"], "--name is 'a/b'; give the name of one folder"), (["--by", "size"], "'size' is not one of")],
)
def test_bad_usage_is_said_in_one_line(capsys, two, more, message):
    code, out, err = run(capsys, "join", *two, *more)
    assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1
    code, out, err = run(capsys, "join", two[0], two[0])
    assert (code, out) == (2, "") and "are the same model; join two that differ" in err
