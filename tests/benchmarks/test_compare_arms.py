from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from benchmarks.compare_arms import main
from recbft.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def environment():
    """Commands of their own find this checkout and use one thread."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def test_arms_over_seeds_end_in_a_table_and_finished_runs_are_used_again(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    out, data = tmp_path / "out", Path(shutil.copy(small[1], tmp_path))
    command = ["--dataset", str(data), *small[2:], "--seeds", "0-1", "--out", str(out)]
    command += ["--arms", "matched,bft[lam_max=10]"]
    assert main([*command, "--jobs", "2"]) == 0
    printed, told = capsys.readouterr()
    result = json.loads((out / "compare_arms.json").read_text())
    values = result["arms"]["matched"]["metrics"]["unfiltered"]["ndcg@10"]["values"]
    folders = [out / f"matched-seed{seed}" / "metrics.json" for seed in (0, 1)]
    assert values == [json.loads(f.read_text())["test"]["unfiltered"]["ndcg@10"] for f in folders]
    found = result["comparisons"]["matched"]["bft[lam_max=10]"]["filtered"]["hr@10"]
    assert found["num_seeds"] == 2 and found["interval"][0] <= found["difference"] <= found["interval"][1]
    assert "[4/4]" in told and "Difference from matched" in printed
    markdown = (out / "compare_arms.md").read_text()
    assert "| bft[lam_max=10] | NDCG@10 | seen masked |" in markdown and "Seeds 0, 1;" in markdown
    assert str(tmp_path) not in markdown.replace(str(data), "")

    before = {path: path.stat().st_mtime_ns for path in out.glob("*-seed*/metrics.json")}
    assert main(command) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert "4 of 4 runs are finished already" in capsys.readouterr().err

    with pytest.raises(UserError, match=r"matched-seed0 holds a run with training.epochs 2, and 3 is asked for; give"):
        main([*command, "--set", "epochs=3"])
    pd.read_parquet(data)[:-1].to_parquet(data)
    with pytest.raises(
        UserError, match=r"holds a run on data with content \w{12}, and tiny as loaded has \w{12}; give"
    ):
        main(command)


@pytest.mark.slow
def test_ctrl_c_ends_the_workers_and_the_same_command_goes_on(small, tmp_path, environment):
    arms = ["--arms", "matched,bft", "--seeds", "0-1", "--set", "epochs=12", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "benchmarks.compare_arms", *small, *arms]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, start_new_session=True)
    try:
        while process.poll() is None and not list(tmp_path.glob("out/*/checkpoint/state.json")):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the command and its workers
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert told.decode().splitlines()[-1].startswith("error: interrupted; ")
    assert "of 4 runs are finished, the same command goes on" in told.decode() and "Traceback" not in told.decode()

    again = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert len(list(tmp_path.glob("out/*-seed*/metrics.json"))) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds", "3"], "--seeds '3' names one seed; a comparison needs at least 2"),
        (["--jobs", "0"], "--jobs is 0; give a whole number of at least 1"),
        (["--set", "ks=[5]", "--set", "valid_metric=ndcg@5"], r"evaluation.ks is \[5\]; the table needs 10 among them"),
        (["--arms", "matched,bft[lam_maxx=3]"], "lam_maxx"),
    ],
)
def test_bad_options_are_refused_before_any_training(small, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        main([*small, "--out", str(tmp_path / "out"), *options])
    assert not (tmp_path / "out").exists()
