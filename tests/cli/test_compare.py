"""``recbft compare``: train and compare, compare what is there, pool; and what it says and leaves behind."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from recbft.comparing.comparison import load_comparison
from tests.cli.conftest import SETTINGS, comparing, run


def test_the_folder_of_a_comparison_holds_what_a_reader_needs(made, events):
    assert {path.name for path in made.iterdir()} == {
        "comparison.json", "comparison.md", "commands.txt", "queue", "runs"
    }  # fmt: skip
    assert {path.name for path in (made / "runs").iterdir()} == {
        "matched-seed0", "matched-seed1", "bft_lam_max=10-seed0", "bft_lam_max=10-seed1"
    }  # fmt: skip
    text = (made / "comparison.md").read_text()
    assert text.startswith("`recbft compare -d tiny.parquet --set data.time=timestamp ")
    assert "--out OUT" in text.splitlines()[0]
    for part in ("1 thread per process, load average", "commit", "60 users, 59 items", "content", "Seeds 0,1."):
        assert part in text
    for row in ("| bft[lam_max=10] | NDCG@10 | seen masked |", "Difference from matched over users"):
        assert row in text
    assert str(made.parent) not in text and str(events.parent) not in text
    lines = (made / "commands.txt").read_text().splitlines()
    assert len(lines) == 4 and all(line.startswith("recbft train -m sasrec -d ") for line in lines)
    found = load_comparison(made)
    saved = json.loads((made / "comparison.json").read_text())
    for name in ("matched", "bft[lam_max=10]"):
        figures = saved["arms"][name]["metrics"]["filtered"]["ndcg@10"]
        assert figures["values"] == pytest.approx(found.values(name, "filtered", "ndcg@10").tolist(), rel=1e-12)
        assert saved["arms"][name]["runs"]["0"] == f"runs/{name.replace('[', '_').replace(']', '')}-seed0"


def test_the_same_command_trains_nothing_again(capsys, made, events):
    before = {path: path.stat().st_mtime_ns for path in made.glob("runs/*/metrics.json")}
    code, out, err = run(capsys, "compare", *comparing(events, made))
    assert code == 0 and "4 of 4 runs are finished already" in err and "Difference from matched" in out
    assert {path: path.stat().st_mtime_ns for path in before} == before
    code, out, err = run(capsys, "compare", *comparing(events, made, "--dry-run"))
    assert (code, out, err) == (0, "", "")
    code, out, err = run(capsys, "compare", *comparing(events, made, "--set", "epochs=3"))
    assert code == 2 and "matched-seed0 holds a run with training.epochs 2, and 3 is asked for" in err


def test_a_dry_run_prints_the_commands_and_leaves_nothing(capsys, events, tmp_path):
    code, out, err = run(capsys, "compare", *comparing(events, tmp_path / "out", "--dry-run", "--data-root", tmp_path))
    assert code == 0 and err == "" and len(out.splitlines()) == 4 and list(tmp_path.iterdir()) == []
    line = out.splitlines()[1]
    assert "--arm bft --seed 0" in line and "--set core.lam_max=10.0" in line and "training.threads=1" in line
    assert line.endswith(f"--data-root {tmp_path} --out {tmp_path}/out/runs --name bft_lam_max=10-seed0")


def test_several_models_are_compared_each_in_a_folder_of_its_own(capsys, events, tmp_path):
    common = ["-d", events, *SETTINGS, "--arms", "published,matched", "--seeds", "0-1", "--set", "epochs=1"]
    code, out, _ = run(capsys, "compare", "-m", "sasrec,hstu", *common, "--out", tmp_path / "all", "--jobs", "2")
    assert code == 0 and out.count("Difference from matched, paired by seed") == 2
    for model in ("sasrec", "hstu"):
        assert load_comparison(tmp_path / "all" / model).protocol["config"]["model"] == model
    code, _, err = run(capsys, "compare", "-m", "sasrec,hstu,sasrec", *common, "--out", tmp_path / "other")
    assert code == 2 and "names a model twice" in err and not (tmp_path / "other").exists()


def test_runs_that_exist_and_another_systems_ranks_are_compared(capsys, made, tmp_path):
    runs = sorted(made.glob("runs/*"))
    per_user = pd.read_parquet(runs[0] / "per_user.parquet")
    ranks = tmp_path / "ranks.csv"
    per_user.rename(columns={"rank_unfiltered": "rank"})[["user", "rank", "rank_filtered"]].to_csv(ranks, index=False)
    code, out, err = run(
        capsys, "compare", *runs, "--out", tmp_path / "out", "--external", f"other={ranks}", "--baseline", "bft",
        "--metrics", "ndcg@10,hr@5,ndcg@10",
    )  # fmt: skip
    assert code == 0 and err == ""
    command = "compare --out OUT --external other=FILE --baseline bft --metrics ndcg@10,hr@5,ndcg@10 RUN_DIR..."
    assert out.splitlines()[0] == f"`recbft {command}`"
    assert "Difference from bft, paired by seed" in out and "note: arm other is external" in out and "HR@5" in out
    assert "MRR" not in out and "Holm over the 8 t-tests" in " ".join(out.split())  # a metric named twice counts once
    ranks.unlink()
    assert list(load_comparison(tmp_path / "out").arms) == ["bft", "matched", "other"]


def test_copies_of_ranks_change_their_names_in_the_same_folder(capsys, made, tmp_path):
    runs, out = sorted(made.glob("runs/*")), tmp_path / "out"
    for name, seed in (("a", 0), ("b", 1)):
        per_user = pd.read_parquet(made / f"runs/matched-seed{seed}/per_user.parquet")
        per_user[["user", "rank_unfiltered"]].to_csv(tmp_path / f"{name}.csv", index=False)
    first, second = ((tmp_path / f"{name}.csv").read_bytes() for name in "ab")
    assert run(capsys, "compare", *runs, "--out", out, "--external", f"b={tmp_path / 'a.csv'}")[0] == 0
    assert (out / "external/b.csv").read_bytes() == first
    again = ["--external", f"b={tmp_path / 'b.csv'}", "--external", f"a={out / 'external/b.csv'}"]
    assert run(capsys, "compare", *runs, "--out", out, *again)[0] == 0
    assert (out / "external/b.csv").read_bytes() == second and (out / "external/a.csv").read_bytes() == first
    assert list(load_comparison(out).arms) == ["bft", "matched", "b", "a"]


def test_ranks_of_names_that_differ_in_capitals_alone_are_two_files_anywhere(capsys, made, tmp_path):
    runs, out, given = sorted(made.glob("runs/*")), tmp_path / "out", []
    for name, seed in (("gru", 0), ("GRU", 1)):
        per_user = pd.read_parquet(made / f"runs/matched-seed{seed}/per_user.parquet")
        per_user[["user", "rank_unfiltered"]].to_csv(tmp_path / f"{seed}.csv", index=False)
        given += ["--external", f"{name}={tmp_path / f'{seed}.csv'}"]
    assert run(capsys, "compare", *runs, "--out", out, *given)[0] == 0
    kept = sorted(file.name for file in (out / "external").iterdir())
    assert len({name.casefold() for name in kept}) == 2, kept
    arms = load_comparison(out).arms
    assert [arms[name].ranks["unfiltered"].tolist() for name in ("gru", "GRU")] == [
        [pd.read_csv(tmp_path / f"{seed}.csv")["rank_unfiltered"].tolist()] * 2 for seed in (0, 1)
    ]


def test_a_recorded_command_has_no_run_folders_however_they_are_written(capsys, made, tmp_path, monkeypatch):
    monkeypatch.chdir(shutil.copytree(made / "runs", tmp_path / "here"))
    Path("bft_lam_max=10-seed0").rename("bft")
    runs = ["bft/", "./bft_lam_max=10-seed1", "matched-seed0/", "matched-seed1"]
    code, out, _ = run(capsys, "compare", *runs, "--baseline", "bft", "--out", tmp_path / "out")
    assert code == 0 and out.splitlines()[0] == "`recbft compare --baseline bft --out OUT RUN_DIR...`"


def test_the_header_is_of_the_machines_that_trained(capsys, made, tmp_path):
    moved = shutil.copytree(made, tmp_path / "moved")
    elsewhere = moved / "runs" / "matched-seed0" / "environment.json"
    here = json.loads(elsewhere.read_text())
    elsewhere.write_text(json.dumps(here | {"cpu": "A far processor", "date": "2001-01-01"}))
    code, out, _ = run(capsys, "compare", *sorted((moved / "runs").iterdir()), "--out", tmp_path / "read")
    assert code == 0 and f"2001-01-01 or {here['date']}, " in out and "A far processor" in out
    assert "load average" not in out  # which nobody took there


def test_run_folders_are_compared_where_a_data_root_is_set_for_other_commands(capsys, made, monkeypatch, tmp_path):
    monkeypatch.setenv("RECBFT_DATA_ROOT", str(tmp_path / "gone"))
    code, out, err = run(capsys, "compare", *sorted((made / "runs").iterdir()), "--out", tmp_path / "read")
    assert code == 0 and "Mean ± standard deviation" in out, err


def test_a_broken_run_is_left_out_when_asked(capsys, made, tmp_path):
    copied = Path(shutil.copytree(made, tmp_path / "copied"))
    runs = sorted(copied.glob("runs/*"))
    extra = copied / "runs" / "extra"
    extra.mkdir()
    code, _, err = run(capsys, "compare", *runs, extra, "--out", tmp_path / "out")
    assert code == 2 and "extra is not a run folder" in err and "--skip-broken` leaves such a run out" in err
    code, out, _ = run(capsys, "compare", *runs, extra, "--out", tmp_path / "out", "--skip-broken")
    assert code == 0 and "note: left out, broken: " in out


def test_comparisons_of_different_data_are_pooled(capsys, made, tmp_path):
    other = Path(shutil.copytree(made, tmp_path / "other"))
    saved = json.loads((other / "comparison.json").read_text())
    saved["protocol"] |= {"content_hash": "f" * 64, "target_hash": "e" * 64, "dataset": "another"}
    (other / "comparison.json").write_text(json.dumps(saved))
    code, out, err = run(capsys, "compare", made, other, "--pool", "--out", tmp_path / "pooled")
    assert code == 0 and err == "" and "Fisher's p" in out and "another" in out
    assert {path.name for path in (tmp_path / "pooled").iterdir()} == {"pooled.md", "pooled.json"}
    code, _, err = run(capsys, "compare", made, made, "--pool")
    assert code == 2 and "two comparisons are on the same data" in err
    code, _, err = run(capsys, "compare", made, "--out", tmp_path / "x")
    assert code == 2 and "is a comparison, not a run; give its runs" in err and "--pool" in err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--out", "x", "--seeds", "3"], "--seeds '3' names one seed; a comparison needs at least 2, such as 0-9"),
        (["--out", "x", "--arms", "bft[core.update=kalman],bft"], "and bft are the same configuration; leave one out"),
        (["--out", "x", "--arms", "matched,bft[lam_maxx=3]"], "arm bft[lam_maxx=3]: unknown key 'lam_maxx'"),
        (["--out", "x", "--set", "seed=3"], "--set seed has no effect, since --seeds decides it for each run; give"),
        (["--out", "x", "--external", "ranks.csv"], "--external 'ranks.csv' is not NAME=FILE"),
        (["--out", "x", "--external", "bft=r.csv"], "--external has the name of an arm"),
        (["--out", "x", "--external", "a=r.csv", "--external", "a=s.csv"], "'a' twice; name each arm once, with"),
        (["--out", "x", "--external", "a/b=r.csv"], "--external names an arm 'a/b'; give it a name of at most 200"),
        (["run", "--out", "x", "--external", "a\nb=r.csv"], "--external names an arm 'a\\nb'"),
        (["run", "--out", "x", "--external", "é" * 101 + "=r.csv"], "; give it a name of at most 200 bytes"),
        (["--out", "x", "-m", "sasrec,hstu", "--arms", "matched,bft", "--batch-seeds", "2"], "together with mixer Poi"),
        (["-m", "pop", "--arms", "published,published[ks=5]", "--out", "x"], "model 'pop' is not trained"),
        ([], "--out is missing; name the folder that gets the results"),
        (["run", "--out", "x"], "there is no run folder run"),
        (["run", "--out", "x", "--seeds", "0-3"], "--seeds has no effect with run folders"),
        (["run", "--pool", "--metrics", "hr@10"], "--metrics has no effect with --pool; give it to each comparison"),
        (["--out", "x", "--external", "other=none.csv"], "--external other: there is no file none.csv"),
        (["run", "--pool"], "run holds no comparison.json; finish the comparison with the command that began it"),
    ],
)
def test_bad_usage_is_refused_before_anything_is_written(capsys, monkeypatch, tmp_path, events, more, message):
    monkeypatch.chdir(tmp_path)
    data = [] if "run" in more else ["-d", events, "--set", "time=timestamp"]
    code, out, err = run(capsys, "compare", *more, *data)
    assert code == 2 and out == "" and err.startswith("error: ") and message in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ("user,rank,target\n" + "".join(f"{n},1,x\n" for n in range(1, 61)), "ranks other targets than the runs, such"),
        ("user,rank,seed\n" + "".join(f"{n},1,{seed}\n" for seed in (1, 2) for n in range(1, 61)), "share 1 seed, and"),
    ],
)
def test_ranks_that_cannot_be_compared_are_refused_before_training(capsys, events, tmp_path, ranks, message):
    file, users = tmp_path / "ranks.csv", sorted(set(pd.read_parquet(events)["user_id"]))
    file.write_text(re.sub(r"^\d+", lambda found: str(users[int(found[0]) - 1]), ranks, flags=re.MULTILINE))
    code, out, err = run(capsys, "compare", *comparing(events, tmp_path / "out"), "--external", f"other={file}")
    assert code == 2 and out == "" and message in err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", ["training", "runs"])
def test_an_out_that_is_a_file_is_refused_and_left_as_it_is(capsys, made, events, tmp_path, given):
    out = tmp_path / "results.txt"
    out.write_text("mine")
    command = {"training": comparing(events, out), "runs": [*sorted((made / "runs").iterdir()), "--out", out]}
    code, _, err = run(capsys, "compare", *command[given])
    assert code == 2 and err == f"error: cannot write {out}: not a folder; name another place\n"
    assert out.read_text() == "mine"
