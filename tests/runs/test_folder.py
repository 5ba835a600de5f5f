from __future__ import annotations

import errno
import getpass
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from recbft.errors import RunError, UserError
from recbft.runs import checkpoint
from recbft.runs import environment as environments
from recbft.runs.environment import environment
from recbft.runs.folder import RunFolder

CONFIG = "model: sasrec\ntraining:\n  epochs: 3\n"


def create(path, **options):
    return RunFolder.create(path, config=CONFIG, protocol={"seed": 0}, environment=environment(), **options)


def save_checkpoint(run, epoch):
    state = checkpoint.TrainState(
        epoch=epoch, step=1, seed=0, dataset="d", content_hash="c", vocabulary_hash="v", config_hash="f"
    )
    taken = checkpoint.snapshot(
        model_state={"w": torch.ones(2)}, optimizer_state={}, rng_state=torch.get_rng_state(), state=state
    )
    checkpoint.write(run.checkpoint, taken)


def test_a_new_run_holds_its_config_protocol_and_environment(tmp_path):
    run = create(tmp_path / "runs" / "a")
    assert sorted(os.listdir(run.path)) == ["checkpoint", "config.yaml", "environment.json", "protocol.json"]
    assert run.config == {"model": "sasrec", "training": {"epochs": 3}} and run.protocol == {"seed": 0}
    assert not run.is_finished and not run.has_checkpoint
    assert os.listdir(tmp_path / "runs") == ["a"]
    assert RunFolder.open(tmp_path / "runs" / "a").config_file == run.config_file


def test_a_run_is_finished_when_its_metrics_stand(tmp_path):
    run = create(tmp_path / "a")
    with pytest.raises(UserError, match=r"a is not finished; go on with `recbft train --resume .*a`"):
        _ = run.metrics
    run.finish({"test": {"hr@10": 0.5}}, pd.DataFrame({"user": ["u"], "rank_unfiltered": [3]}))
    assert run.is_finished and run.metrics == {"test": {"hr@10": 0.5}}
    assert pd.read_parquet(run.per_user_file)["rank_unfiltered"].tolist() == [3]


def test_a_taken_folder_is_refused_with_what_stands_there_and_what_to_do(tmp_path):
    with pytest.raises(UserError, match=r"a holds a run that stopped after epoch 0; go on with `recbft train --resume"):
        create(tmp_path / "a")
        create(tmp_path / "a")
    save_checkpoint(RunFolder.open(tmp_path / "a"), 12)
    with pytest.raises(
        UserError, match=r"a holds a run that stopped after epoch 12; go on with `recbft train --resume .*a`"
    ):
        create(tmp_path / "a")
    RunFolder.open(tmp_path / "a").finish({}, pd.DataFrame({"user": ["u"]}))
    with pytest.raises(UserError, match=r"a holds a finished run; name another folder, or replace it with --overwrite"):
        create(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"b is a folder with other files in it; name another folder"):
        create(tmp_path / "b")
    with pytest.raises(UserError, match=r"thesis.tex is a file; name another folder for the run"):
        create(tmp_path / "b" / "thesis.tex")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"] and os.listdir(tmp_path / "b") == ["thesis.tex"]


def test_a_run_is_replaced_when_the_new_one_stands(tmp_path, monkeypatch):
    old, removed = create(tmp_path / "a"), []
    old.history_file.write_text("old")
    rmtree = shutil.rmtree

    def recorded(path, **options):
        if (path / "history.csv").exists():
            removed.append(path.name)
            assert old.config_file.is_file() and not old.history_file.exists()
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", recorded)
    new = create(tmp_path / "a", overwrite=True)
    assert len(removed) == 1 and os.listdir(tmp_path) == ["a"] and not new.history_file.exists()
    assert create(tmp_path / "b", overwrite=True).config_file.is_file(), "there need be nothing to replace"


@pytest.mark.parametrize("call", [1, 2])  # the old folder gets another name, then the new one gets its own
def test_a_run_that_cannot_be_replaced_is_left_as_it_was(tmp_path, monkeypatch, call):
    create(tmp_path / "a").history_file.write_text("old")
    kept, calls = os.replace, []

    def refused(*arguments):
        calls.append(1)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        kept(*arguments)

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(RunError, match=r"no space left while writing .*a; nothing there was changed"):
        create(tmp_path / "a", overwrite=True)
    assert (tmp_path / "a" / "history.csv").read_text() == "old" and os.listdir(tmp_path) == ["a"]


def test_a_run_outlives_one_that_cannot_be_written(tmp_path):
    create(tmp_path / "a").history_file.write_text("old")
    with pytest.raises(ValueError):
        RunFolder.create(tmp_path / "a", config=CONFIG, protocol={"x": float("nan")}, environment={}, overwrite=True)
    assert (tmp_path / "a" / "history.csv").read_text() == "old" and os.listdir(tmp_path) == ["a"]


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="the system has no /dev/full")
def test_a_full_disk_while_metrics_are_written_leaves_the_run_unfinished(tmp_path, monkeypatch):
    run = create(tmp_path / "a")

    def fsync(number):
        os.write(os.open("/dev/full", os.O_WRONLY), b"x")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(RunError, match=r"no space left while writing .*per_user.parquet"):
        run.finish({}, pd.DataFrame({"user": ["u"]}))
    assert not run.is_finished and not run.per_user_file.exists()
    assert not list(run.path.glob(".*"))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "there is no run folder .*a; give the folder that `recbft train` printed"),
        (lambda path: path.mkdir(), "a is not a run folder: config.yaml is missing; give the folder of a run$"),
        (lambda path: create(path / "b"), "config.yaml is missing; give the run in it, .*a/b$"),
        (
            lambda path: [create(path / "runs" / name) for name in "dc"],
            "config.yaml is missing; give one of the 2 runs in it, such as .*a/runs/c$",
        ),
    ],
)
def test_what_is_not_a_run_folder_is_refused(tmp_path, make, said):
    make(tmp_path / "a")
    with pytest.raises(UserError, match=said):
        RunFolder.open(tmp_path / "a")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is damaged"),
        ("[]", "does not hold keys and values"),
        ("[" * 100_000, "is damaged"),
    ],
)
def test_a_corrupt_metrics_file_is_refused_by_name(tmp_path, content, said):
    run = create(tmp_path / "a")
    run.metrics_file.write_text(content)
    with pytest.raises(UserError, match=rf"metrics\.json {said}"):
        _ = run.metrics


def test_a_pipe_in_the_place_of_metrics_is_refused_and_a_missing_file_is_named(tmp_path):
    run = create(tmp_path / "a")
    os.mkfifo(run.metrics_file)
    assert run.is_finished
    with pytest.raises(UserError, match=r"metrics\.json is damaged \(not a file\)"):
        _ = run.metrics
    run.protocol_file.unlink()
    with pytest.raises(UserError, match=r"protocol\.json is missing; the run folder is incomplete"):
        _ = run.protocol


def test_a_run_has_probabilities_where_a_fit_found_them(tmp_path):
    run = create(tmp_path / "a")
    assert run.calibration(filter_seen=True) is None
    run.metrics_file.write_text('{"probability": {"filtered": {"temperature": 1.5, "lapse": 0.1}, "unfiltered": null}}')
    assert run.calibration(filter_seen=True) == (1.5, 0.1) and run.calibration(filter_seen=False) is None


def test_history_comes_back_exactly_and_can_be_cut_at_an_epoch(tmp_path):
    run = create(tmp_path / "a")
    assert run.read_history() == []
    rows = [
        {"epoch": 1, "loss": 0.1 + 0.2, "seconds": 1e-05, "ndcg@10": None},
        {"epoch": 2, "loss": 5.0, "seconds": 2.0, "ndcg@10": 1 / 3, "note": "best, so far"},
    ]
    run.write_history(rows)
    assert run.history_file.read_text().splitlines()[0] == "epoch,loss,seconds,ndcg@10,note"
    assert run.read_history() == [{**rows[0], "note": None}, rows[1]]
    assert run.read_history(up_to_epoch=1) == [{**rows[0], "note": None}]
    assert [type(value) for value in run.read_history()[1].values()] == [int, float, float, float, str]


@pytest.mark.parametrize("content", ["epoch,loss\nthree,0.5\n", "epoch,loss,seconds\n1,0.5,2.0\n2,0.", ""])
def test_damaged_history_is_refused_by_name(tmp_path, content):
    run = create(tmp_path / "a")
    run.history_file.write_text(content)
    with pytest.raises(UserError, match=r"history\.csv is damaged; remove it to go on without its rows"):
        run.read_history(up_to_epoch=3)


def test_an_environment_tells_versions_and_not_whose_machine_it_is():
    made = environment()
    assert made["torch"] == torch.__version__ and made["device"] == "cpu" and made["threads"] >= 1
    assert made["dtype"] == "float32" and made["matmul_precision"] == "highest"
    text = json.dumps(made)
    for private in (platform.node(), str(Path.home()), os.getcwd()):
        assert len(private) < 3 or private not in text
    assert getpass.getuser() not in made.values()


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="since PyTorch 2.9")
def test_an_environment_tells_how_each_backend_rounds_where_they_were_set_one_by_one():
    on_gpus = torch.backends.cuda.matmul
    before, on_gpus.fp32_precision = on_gpus.fp32_precision, "tf32"
    try:
        assert environment()["matmul_precision"] == f"cuda tf32, mkldnn {torch.backends.mkldnn.matmul.fp32_precision}"
    finally:
        on_gpus.fp32_precision = before


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
@pytest.mark.parametrize("name", ["repository", "größe", os.fsdecode(b"caf\xe9")])
def test_the_commit_is_found_whatever_its_folder_is_called(name, tmp_path, monkeypatch):
    root = (tmp_path / name).resolve()
    try:
        root.mkdir()
    except OSError:
        pytest.skip("the file system takes no such name")
    own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for command in (["init"], ["commit", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *own, *command], cwd=root, check=True, capture_output=True)
    assert (environments.ROOT / "recbft" / "errors.py").is_file(), "that of the checkout"
    monkeypatch.setattr(environments, "ROOT", root)
    assert len(environments.commit()) == 12


@pytest.mark.skipif(environments.commit() == "unknown", reason="this is no checkout")
def test_a_build_knows_its_commit(tmp_path, monkeypatch):
    words = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", tmp_path]
    subprocess.run(words, cwd=environments.ROOT, check=True, capture_output=True)
    built = tmp_path / "recbft" / "runs" / "commit.txt"
    assert built.read_text() == environments.commit()
    built.write_text("0123456789ab\n")
    monkeypatch.setattr(environments, "BUILT_FROM", built)
    assert environments.commit() == "0123456789ab"


def test_a_replaced_run_that_cannot_be_removed_is_named(tmp_path, monkeypatch):
    create(tmp_path / "a")
    remove = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path, **how: None if path.suffix == ".old" else remove(path, **how))
    with pytest.warns(UserWarning, match=r"the run that was replaced cannot be removed: .*\.a\.\w+\.old; remove it"):
        create(tmp_path / "a", overwrite=True)
    assert len(list(tmp_path.glob(".a.*.old"))) == 1
    monkeypatch.undo()
    create(tmp_path / "a", overwrite=True)
    assert os.listdir(tmp_path) == ["a"], "the next one removes it"


def test_overwrite_replaces_runs_and_nothing_else(tmp_path):
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "config.yaml").write_text("foo: bar")
    (project / "src" / "code.py").write_text("x = 1")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="project is a folder with other files in it; name another folder"):
            create(project, overwrite=overwrite)
    assert (project / "src" / "code.py").read_text() == "x = 1"


def test_a_run_behind_a_link_is_replaced_where_it_lies(tmp_path):
    create(tmp_path / "disk" / "a").history_file.write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "a")
    made = create(tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink() and made.config_file.is_file() and not made.history_file.exists()
    assert os.listdir(tmp_path / "disk") == ["a"] and sorted(os.listdir(tmp_path)) == ["disk", "link"]


def test_a_replacement_that_was_killed_is_undone_or_ended(tmp_path):
    old, aside = create(tmp_path / "a"), tmp_path / ".a.0123abcd.old"
    old.metrics_file.write_text("{}")
    old.path.rename(aside)  # killed between the two renames
    (tmp_path / ".mine.0123abcd.old").mkdir()
    with RunFolder(aside).locked():  # or about to go on
        RunFolder.refuse_taken(tmp_path / "a")
        assert aside.is_dir()
    assert RunFolder.open(tmp_path / "a").is_finished and not aside.exists()
    (aside / "checkpoint").mkdir(parents=True)  # killed while the old run was removed
    with pytest.raises(UserError, match="a holds a finished run"):
        RunFolder.refuse_taken(tmp_path / "a")
    assert {path.name for path in tmp_path.iterdir()} == {"a", ".mine.0123abcd.old"}
