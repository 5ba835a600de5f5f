"""``recbft report`` and ``recbft stratify`` on a comparison made by ``recbft compare``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import run


@pytest.fixture(scope="module")
def folder(made, tmp_path_factory):
    return Path(shutil.copytree(made, tmp_path_factory.mktemp("comparison") / "made"))


@pytest.fixture
def runs(folder):
    return sorted((folder / "runs").glob("*-seed*"))


def plain(out):
    """Without the line breaks of captions."""
    return " ".join(out.split())


def test_report_prints_answer_and_tables_and_says_where_files_are(capsys, folder):
    pytest.importorskip("matplotlib")
    code, out, err = run(capsys, "report", folder)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert " on tiny" in lines[0] and "top ten for" in lines[0] and lines[1].startswith("What to do: ")
    assert lines[2].startswith("Evidence: ") and "NDCG@10 (all items)" in lines[2] and "2 seeds" in lines[2]
    assert "Metrics of every arm" in lines and "NDCG@10 by item frequency" in lines
    assert "recbft probe RUN makes this section" in out
    assert "Lists of the 10 best items" in lines[lines.index("WHAT THE LISTS SHOW") :]
    assert lines.index("WHAT PRECISION DOES INSIDE") < lines.index("DOES IT KNOW WHEN IT IS RIGHT?")
    written = [Path(line.removeprefix("written: ")) for line in lines if line.startswith("written: ")]
    assert folder / "report" / "report.html" in written and all(path.is_file() for path in written)


def test_report_writes_only_what_is_asked_for(capsys, folder, tmp_path):
    code, _, _ = run(capsys, "report", folder, "--format", "md", "--out", tmp_path / "there")
    assert code == 0 and [path.name for path in (tmp_path / "there").iterdir()] == ["report.md"]


def test_without_matplotlib_tables_and_page_are_still_made(capsys, folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run(capsys, "report", folder, "--format", "html,csv", "--out", tmp_path)
    assert code == 0 and "Metrics of every arm" in out
    assert err.count("\n") == 1 and "pip install matplotlib" in err
    page = (tmp_path / "report.html").read_text()
    assert "<svg" not in page and "<table>" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "no-folder"], "no-folder holds no comparison.json"),
        (["report", "{folder}", "--format", "htlm"], "unknown format 'htlm'; did you mean 'html'?"),
        (["stratify", "no-folder"], "there is no folder no-folder"),
        (["stratify", "{folder}", "--by", ","], "--by is empty"),
        (["stratify", "{folder}", "--setting", "both"], "invalid value for '--setting'"),
        (["stratify", "{folder}", "--edges", "2,x"], "--edges is '2,x'; give rising training counts"),
        (
            ["stratify", "{folder}", "--by", "recency", "--edges", "2"],
            "have no effect without strata by item-frequency",
        ),
        (["stratify", "{folder}", "--baseline", "{folder}"], "--baseline has no effect on a comparison"),
    ],
)
def test_bad_usage_is_one_line(capsys, folder, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *(argument.format(folder=folder) for argument in arguments))
    assert code == 2 and out == "" and message in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_stratify_prints_each_partition_of_a_comparison(capsys, folder, tmp_path):
    code, out, err = run(
        capsys, "stratify", folder, "--metric", "hr@10", "--quantiles", "2", "--out", tmp_path / "strata"
    )
    assert (code, err) == (0, "")
    titles = [line for line in out.splitlines() if line.startswith("HR@10 by ")]
    assert titles == [
        "HR@10 by item frequency", "HR@10 by user activity", "HR@10 by item frequency x user activity",
        "HR@10 by first-time items", "HR@10 by recency of the target",
    ]  # fmt: skip
    assert plain(out).count("Confound check, whether") == 3 and "Holm over the" in plain(out)
    names = {path.name for path in (tmp_path / "strata").iterdir()}
    assert {"tables.md", "tables.tex", "strata-grid-hr-10.csv"} <= names


def test_strata_of_item_frequency_have_the_edges_that_are_given(capsys, folder):
    asked = ("stratify", folder, "--by", "item-frequency", "--metric", "hr@10")
    code, out, _ = run(capsys, *asked, "--edges", "2, 5")
    assert code == 0 and "3-5" in out
    assert run(capsys, *asked, "--equal", "counts")[1] != run(capsys, *asked)[1]


def test_files_of_an_earlier_call_are_named_and_kept(capsys, folder, tmp_path):
    metrics = ("--by", "first-time", "--out", tmp_path, "--metric")
    (tmp_path / "mine.csv").write_text("user,item\n")
    assert run(capsys, "stratify", folder, *metrics, "hr@10")[2] == ""
    note = f"note: {tmp_path} has 1 CSV file that this call did not write, maybe out of date, such as strata-first-time"
    assert run(capsys, "stratify", folder, *metrics, "mrr")[2].startswith(note)
    assert (tmp_path / "strata-first-time-hr-10.csv").is_file()
    csv = tmp_path / "csv"
    assert run(capsys, "report", folder, "--format", "csv,md", "--out", tmp_path)[2] == ""
    (csv / "seeds-against-gone.csv").touch()
    note = f"note: {csv} has 1 CSV file that this call did not write, maybe out of date, such as seeds-against-gone.csv"
    assert run(capsys, "report", folder, "--format", "csv,md", "--out", tmp_path)[2].startswith(note)


def test_stratify_takes_one_run_or_two(capsys, runs):
    code, out, _ = run(capsys, "stratify", runs[0], "--by", "user-activity", "--metric", "mrr", "--setting", "filtered")
    assert code == 0 and "MRR on tiny, seen masked" in plain(out) and "nothing is tested" in plain(out)
    code, out, _ = run(capsys, "stratify", runs[0], "--baseline", runs[-1], "--by", "first-time", "--metric", "mrr")
    assert code == 0 and "paired over users" in plain(out) and "it says nothing about other seeds" in plain(out)


def test_stratify_says_what_it_lacks_when_the_data_set_is_gone(capsys, folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    for path in copy.rglob("*"):
        if path.name in ("config.yaml", "protocol.json"):
            path.write_text(path.read_text().replace("tiny.parquet", "gone.parquet"))
    code, out, err = run(capsys, "stratify", copy, "--metric", "hr@10", "--quantiles", "2")
    assert code == 0 and "distinct targets only, since the data set is not at hand" in plain(out)
    assert err.startswith("recency is left out: ") and "gone.parquet" in err and err.count("\n") == 1
