"""``recbft sweep`` and ``recbft tune``: validation chooses, and a search goes on where it was stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from statistics import mean, stdev
from types import SimpleNamespace

import numpy as np
import pytest

from recbft.comparing.comparison import load_comparison
from recbft.datasets.synth import SyntheticConfig, generate
from recbft.errors import RunError, UserError
from recbft.evaluation.paired import compare_seeds, holm
from recbft.experiments import locks, tuning
from recbft.experiments.plan import Job
from recbft.experiments.search_space import parse_space
from recbft.experiments.sweep import plan_sweep, sweep_results
from recbft.reporting.documents import sweep_document
from recbft.reporting.tables import written
from recbft.runs.folder import RunFolder
from recbft.system.files import write_json
from tests.cli.conftest import run
from tests.comparing.test_results import MADE
from tests.experiments.conftest import RECBFT
from tests.experiments.test_queue import ENVIRONMENT, wait_for

SMALL = ["time=timestamp", "epochs=2", "hidden_size=8", "max_length=10", "batch_size=32", "device=cpu"]
SETTINGS = [word for setting in SMALL for word in ("--set", setting)]


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "tiny.parquet"
    generate(SyntheticConfig(num_users=60, num_items=60, mean_length=7.0, seed=3)).events.to_parquet(path)
    return path


def test_a_sweep_compares_each_value_with_the_default_and_chooses_by_validation(capsys, events, tmp_path):
    out_dir = tmp_path / "out"
    command = ["sweep", "-d", events, *SETTINGS, "--vary", "lam_max=0.5,100,5", "--seeds", "0-1", "--out", out_dir]
    code, out, _ = run(capsys, *command)
    assert code == 0
    names = {path.name for path in (out_dir / "runs").iterdir()}
    assert names == {f"{arm}-seed{s}" for arm in ("bft", "bft_lam_max=0.5", "bft_lam_max=5") for s in (0, 1)}
    result = json.loads((out_dir / "sweep.json").read_text())
    assert [(row["value"], row["is_default"]) for row in result["rows"]] == [(0.5, False), (5, False), (100, True)]
    values = {
        name: {part: [run.metrics[part]["unfiltered"]["ndcg@10"] for run in runs] for part in ("validation", "test")}
        for name in ("bft", "bft_lam_max=0.5")
        for runs in [[RunFolder(out_dir / "runs" / f"{name}-seed{seed}") for seed in (0, 1)]]
    }
    for part in ("validation", "test"):
        d = result["rows"][0][part]["difference"]
        expected = compare_seeds(values["bft"][part], values["bft_lam_max=0.5"][part])
        assert d["difference"] == expected.difference and d["p_t"] == expected.p_t
        others = [row[part]["difference"] for row in result["rows"][:2]]
        assert [d["p_holm"] for d in others] == holm([d["p_t"] for d in others])
        for row, name in ((0, "bft_lam_max=0.5"), (2, "bft")):
            found, of_arm = result["rows"][row][part], values[name][part]
            assert (found["mean"], found["sd"]) == (pytest.approx(mean(of_arm)), pytest.approx(stdev(of_arm)))
    assert result["rows"][2]["validation"]["difference"] is None and result["metric"] == "ndcg@10"
    best = max(result["rows"], key=lambda row: row["validation"]["mean"])
    assert result["chosen"] == best["value"] and result["key"] == "core.lam_max"
    assert f"core.lam_max={best['value']}. The test columns played no part" in out and "100.0 (default)" in out
    assert "validation difference" in out and "test difference" in out
    assert (out_dir / "sweep.md").read_text().startswith("`recbft sweep -d")
    assert load_comparison(out_dir).baseline == "bft"
    assert run(capsys, *command)[2].startswith("6 of 6 runs are finished already")
    assert run(capsys, *command, "--dry-run")[:2] == (0, "")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--vary", "lam_max"], "--vary 'lam_max' is not KEY=VALUE,VALUE,...; write for example core.lam_max=10,20,50"),
        (["--vary", "lam_max="], "is not KEY=VALUE,VALUE"),
        (["--vary", "lam_max=5", "--set", "seed=3"], "--set seed has no effect, since --seeds decides it for each run"),
        (["--vary", "lam_max=100"], "names only the default; give at least one other value"),
        (["--vary", "seed=1,2"], "--vary cannot vary seed: every value is trained on the seeds that --seeds gives"),
        (["--vary", "model=sasrec,hstu"], "--vary cannot vary model: its runs are of one model, -m; `recbft compare"),
        (["--vary", "arm=bft,matched"], "--vary cannot vary arm: its runs are of one arm, --arm; `recbft compare"),
        (["--vary", "data.dataset=a,b"], "--vary cannot vary data.dataset: its runs are on one data set, -d"),
        (["--vary", "k_core=0,2"], "--vary cannot vary k_core: its values are judged by one metric on one data set"),
        (["--vary", "valid_metric=hr@10"], "--vary cannot vary valid_metric: its values are judged by one metric"),
        (["--vary", "core={lam_max: 5},{q_max: 2}"], "changes core.lam_max and core.q_max; vary one setting at a time"),
        (["--vary", "controllers.ema=[5]"], "controllers.ema is [5]"),
        (["--vary", "mixer=attention,rfaa"], "mixer is 'rfaa'; did you mean 'rfa'?"),
        (["--vary", "lam_max=5,5.0"], "--vary names lam_max=5.0 twice; name each value once"),
        (["--vary", "lam_maxx=5"], "unknown key 'lam_maxx'; did you mean 'lam_max'?"),
        (["--vary", "lam_max=-5"], "lam_max is -5"),
        (["--vary", "lam_max=5", "--vary", "epochs=3"], "--vary is given twice; vary one setting at a time, or search"),
        (["--vary", "lam_max=5", "--seeds", "4"], "names one seed; paired differences need at least 2"),
        (
            ["--vary", "update=kalman,gate", "--batch-seeds", "2"],
            "--batch-seeds cannot be given with arm bft[update=gate]",
        ),
        (["--vary", "lam_max=5", "--arm", "matched"], "core.lam_max has no effect in arm 'matched'"),
    ],
)
def test_a_sweep_that_cannot_be_meant_is_refused(capsys, monkeypatch, events, tmp_path, more, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "sweep", "-d", events, *SETTINGS, "--out", "x", *more)
    assert code == 2 and out == "" and message in err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("vary", "values"),
    [
        ("mixer=attention,rfa,alibi", {"bft": "attention", "bft[mixer=rfa]": "rfa", "bft[mixer=alibi]": "alibi"}),
        ("controllers.ema=none,{},{decay: 0.5}", {"bft": None, "bft[controllers.ema={}]": {"decay": 0.999},
                                                  "bft[controllers.ema={decay: 0.5}]": {"decay": 0.5}}),
        ("ema={}", {"bft": None, "bft[ema={}]": {"decay": 0.999}}),
        ("mixing.time=false,true", {"bft": False, "bft[mixing.time=true]": True}),
    ],
)  # fmt: skip
def test_a_mixer_or_a_controller_can_be_varied(vary, values):
    settings = ("mixer=rfa",) if vary.startswith("mixing") else ()
    planned = plan_sweep(vary, "bft", lambda spec: spec.config(settings, dataset="synthetic"))
    assert planned.values == values and [arm.label for arm in planned.arms] == list(values)
    assert planned.default == values["bft"]


def swept(folder, figures, *settings):
    """The results of a sweep over lam_max (bft has 100) whose runs of seeds 0, 1, ... found these figures.

    ``figures`` are by value, then "validation" or "test", then "unfiltered" or "filtered"; what is left out is 0.
    """
    planned = plan_sweep(
        f"lam_max={','.join(map(str, figures))}", "bft", lambda arm: arm.config(settings, dataset="synthetic")
    )
    jobs = []
    for arm in planned.arms:
        found = figures[planned.values[arm.label]]
        for seed in range(len(next(iter(next(iter(found.values())).values())))):
            job = Job(arm, arm.config(settings, dataset="synthetic", seed=seed), folder / f"{arm.folder}-{seed}")
            metrics = {
                part: {
                    setting: {"ndcg@10": found.get(part, {}).get(setting, [0, 0, 0])[seed], "mrr": 0.5}
                    for setting in ("unfiltered", "filtered")
                }
                for part in ("validation", "test")
            }
            job.path.mkdir()
            write_json(job.path / "metrics.json", metrics)
            jobs.append(job)
    # Runs come seed by seed, as ``plan`` has them.
    return sweep_results(planned, sorted(jobs, key=lambda job: job.config.seed))


@pytest.mark.parametrize("setting", ["unfiltered", "filtered"])
def test_the_mean_validation_of_the_headline_setting_chooses_whatever_test_and_the_other_setting_say(tmp_path, setting):
    other = {"unfiltered": "filtered", "filtered": "unfiltered"}[setting]
    low, high = [0.1, 0.2, 0.6], [0.3, 0.3, 0.4]  # means 0.3 and 1/3, in which the best seed is the other's
    figures = {
        5.0: {"validation": {setting: high}, "test": {setting: low}},
        100.0: {"validation": {setting: low, other: high}, "test": {setting: high, other: high}},
        20.0: {"validation": {setting: low, other: high}, "test": {setting: high}},
    }
    found = swept(tmp_path, figures, f"filter_seen={setting == 'filtered'}")
    assert (found["chosen"], found["default"], found["setting"]) == (5.0, 100.0, setting)
    assert [row["value"] for row in found["rows"]] == [5.0, 20.0, 100.0]
    for row in found["rows"]:
        for part in ("validation", "test"):
            assert row[part]["values"] == figures[row["value"]][part][setting]
            if row["value"] != 100.0:
                expected = compare_seeds(figures[100.0][part][setting], row[part]["values"])
                assert row[part]["difference"]["difference"] == expected.difference
                assert row[part]["difference"]["p_t"] == expected.p_t
    for part in ("validation", "test"):
        tested = [row[part]["difference"] for row in found["rows"][:2]]
        assert [d["p_holm"] for d in tested] == holm([d["p_t"] for d in tested])


@pytest.mark.parametrize("best", [5.0, 100.0])
def test_every_number_of_a_sweeps_table_is_one_of_its_results(tmp_path, best):
    rng = np.random.default_rng(0)
    figures = {
        value: {
            part: {"unfiltered": list(0.1 + (value == best) + 0.01 * rng.random(3))} for part in ("validation", "test")
        }
        for value in (100.0, 5.0, 20.0)
    }
    found = swept(tmp_path, figures)
    header = {
        "made": MADE,
        "protocol": {"items": 9, "filter_seen": False, "config": {}},
        "seeds": [0, 1, 2],
        "notes": [],
    }
    text = sweep_document({**header, **found}, markdown=True)
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line.startswith("| ")]
    names = ["mean ± sd", "difference", "relative", "95 % interval", "p", "p Holm"]
    assert rows[0] == ["core.lam_max", *(f"{part} {name}" for part in ("validation", "test") for name in names)]
    assert [row[0] for row in rows[2:]] == ["5.0", "20.0", "100.0 (default)"]
    for row, result in zip(rows[2:], found["rows"], strict=True):
        for part, cells in (("validation", row[1:7]), ("test", row[7:])):
            of_part, d = result[part], result[part]["difference"]
            names = {"difference": "signed", "relative": "percent", "interval": "interval", "p_t": "p", "p_holm": "p"}
            told = ["-"] * 5 if d is None else [written(d[name], kind) for name, kind in names.items()]
            assert cells == [f"{mean(of_part['values']):.4f} ± {stdev(of_part['values']):.4f}", *told]
    assert "without an interval" not in text
    said = "the default, core.lam_max=100.0." if best == 100.0 else "core.lam_max=5.0."
    assert f"Chosen by validation: {said}" in text and "Holm over the 2 other values" in text


def test_a_sweep_says_whose_p_stands_beside_one_difference_in_every_seed(tmp_path):
    figures = {value: {"validation": {"unfiltered": [0.1 * up, 0.2 * up]}} for value, up in ((100.0, 1), (5.0, 2))}
    figures[20.0] = {"validation": {"unfiltered": [0.15, 0.25]}}
    found = {**swept(tmp_path, figures), "made": MADE, "seeds": [0, 1], "notes": [],
             "protocol": {"items": 9, "filter_seen": False, "config": {}}}  # fmt: skip
    text = " ".join(sweep_document(found, markdown=False).split())
    assert "Holm over the 2 other values. A difference without an interval is the same in every seed" in text


@pytest.mark.parametrize("order", [(5.0, 100.0, 20.0), (100.0, 5.0, 20.0), (20.0, 5.0, 100.0)])
def test_where_another_value_is_as_good_the_default_is_chosen(tmp_path, order):
    equal = {value: {"validation": {"unfiltered": [0.2, 0.4]}} for value in order}
    assert swept(tmp_path, equal)["chosen"] == 100.0


def test_two_values_that_would_share_a_folder_are_refused():
    with pytest.raises(UserError, match="--vary names ema=~ twice; name each value once"):
        plan_sweep("ema={},~", "bft", lambda spec: spec.config(("ema={decay: 0.5}",), dataset="synthetic"))


def test_a_sweep_over_a_controller_is_written_as_it_is_set(capsys, events, tmp_path):
    command = ["sweep", "-d", events, *SETTINGS, "--set", "epochs=1", "--vary", "ema={decay: 0.5}", "--seeds", "0-1"]
    code, out, _ = run(capsys, *command, "--out", tmp_path)
    assert code == 0 and '{"decay": 0.5} ' in out and "null (default)" in out and "controllers.ema=" in out
    assert json.loads((tmp_path / "sweep.json").read_text())["rows"][1]["value"] == {"decay": 0.5}


def tune(events, out, *more):
    space = ["--space", "training.learning_rate=log:1e-4..1e-1", "--space", "core.initial=hybrid,count"]
    return ["tune", "-d", events, *SETTINGS, *space, "--seeds", "0-1", "--out", out, *more]


@pytest.mark.slow
def test_a_search_goes_on_where_it_was_stopped_and_looks_at_validation_only(capsys, events, tmp_path):
    optuna = pytest.importorskip("optuna")
    code, out, err = run(capsys, *tune(events, tmp_path, "--trials", "2"))
    assert code == 0 and "trial 1 of 2: training.learning_rate=" in err and "The test was not looked at" in out
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    study = optuna.load_study(study_name="recbft", storage=storage)
    killed = study.ask()  # as a command leaves it that was killed
    rate, initial = killed.suggest_float("training.learning_rate", 1e-4, 1e-1, log=True), "count"
    killed.suggest_categorical("core.initial", ["hybrid", initial])
    code, out, err = run(capsys, *tune(events, tmp_path, "--trials", "3"))
    assert code == 0 and "trial 3 of 3" in err and f"learning_rate={rate}" in err
    result = json.loads((tmp_path / "tune.json").read_text())
    assert len(result["trials"]) == 3 and result["failed"] == 0
    values = [trial["validation"] for trial in result["trials"]]
    assert values == sorted(values, reverse=True)
    means = []  # two trials may rank alike
    for name in {path.name.rpartition("-")[0] for path in tmp_path.glob("runs/trial-*")}:
        found = [RunFolder(run).metrics["validation"] for run in tmp_path.glob(f"runs/{name}-*")]
        means.append(sum(metrics["unfiltered"]["ndcg@10"] for metrics in found) / len(found))
    assert sorted(means) == pytest.approx(sorted(values))
    code, _, err = run(capsys, *tune(events, tmp_path, "--set", "epochs=3"))
    assert code == 2 and "the study in --out was begun with training.epochs 2, and 3 is asked for; give another" in err


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "jobs"), [("0-2", "1"), ("0-1", "4")])
def test_a_trial_below_the_median_is_given_up_however_many_workers_there_are(capsys, events, tmp_path, seeds, jobs):
    pytest.importorskip("optuna")
    rates = "training.learning_rate=0.01,0.011,0.012,0.013,0.014,1e-9,2e-9,3e-9,4e-9"
    command = ["tune", "-d", events, *SETTINGS, "--space", rates, "--seeds", seeds, "--jobs", jobs, "--out", tmp_path]
    code, out, _ = run(capsys, *command, "--trials", "9", "--prune")
    assert code == 0 and " pruned, 0 failed" in out
    assert json.loads((tmp_path / "tune.json").read_text())["pruned"] > 0


@pytest.mark.parametrize("name", ["a?b=c", "lr%20grid", "{x}", "a b#"])
def test_a_study_lies_in_its_folder_whatever_that_is_called(capsys, monkeypatch, events, tmp_path, name):
    pytest.importorskip("optuna")
    monkeypatch.setattr(tuning, "_evaluate", lambda trial, *_, **__: float(trial.params["dropout"]))
    command = ["tune", "-d", events, *SETTINGS, "--space", "dropout=0.1,0.2", "--seeds", "0", "--out", tmp_path / name]
    for trials in ("1", "2"):
        code, out, _ = run(capsys, *command, "--trials", trials)
        assert code == 0 and f"{trials} trial" in out
    assert (tmp_path / name / "study.db").is_file() and [path.name for path in tmp_path.iterdir()] == [name]


def test_no_point_of_a_small_space_is_tried_twice(capsys, monkeypatch, events, tmp_path):
    pytest.importorskip("optuna")
    monkeypatch.setattr(tuning, "_evaluate", lambda trial, *_, **__: float(trial.params["dropout"]))
    space = ["--space", "dropout=0.1,0.2", "--space", "n_layers=1..3"]
    command = ["tune", "-d", events, *SETTINGS, *space, "--seeds", "0", "--out", tmp_path]
    for trials, said in (("4", ""), ("9", "all 6 points of the space were tried"), ("9", "all 6 points")):
        code, out, err = run(capsys, *command, "--trials", trials)
        found = [str(trial["settings"]) for trial in json.loads((tmp_path / "tune.json").read_text())["trials"]]
        assert code == 0 and said in err and len(set(found)) == len(found) == min(int(trials), 6)
    assert "6 trials, 0 pruned, 0 failed" in out


def test_ctrl_c_between_trials_loses_none_and_the_same_command_goes_on(capsys, monkeypatch, events, tmp_path):
    pytest.importorskip("optuna")
    command, began = tune(events, tmp_path, "--trials", "3"), []

    def evaluate(trial, *_, **__):
        began.append(trial.params)
        if len(began) == 2:
            raise KeyboardInterrupt
        return float(len(began))

    monkeypatch.setattr(tuning, "_evaluate", evaluate)
    code, out, err = run(capsys, *command)
    assert (code, out) == (1, "") and err.splitlines()[-1] == "error: interrupted; the same command goes on"
    assert run(capsys, *command)[0] == 0
    assert began[2] == began[1] and len(began) == 4
    assert [trial.state.name for trial in trials_of(tmp_path)] == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]


@pytest.mark.slow
def test_ctrl_c_ends_a_search_in_the_midst_of_a_trial_and_the_same_command_goes_on(events, tmp_path):
    pytest.importorskip("optuna")
    words = tune(events, tmp_path, "--seeds", "0-2", "--trials", "2", "--jobs", "2", "--set", "epochs=6")
    command = [*RECBFT, *map(str, words)]
    process = subprocess.Popen(
        command,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in what a shell runs with &
    )
    try:
        wait_for(lambda: list(tmp_path.glob("runs/*/history.csv")))
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1 and "Traceback" not in told
    assert told.splitlines()[-1] == "error: interrupted; the same command goes on with this trial"
    assert not list(tmp_path.glob("queue/*.lock"))
    again = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert again.stderr.startswith(told.splitlines()[0]) and "2 trials, 0 pruned, 0 failed" in again.stdout


def tail(run, epochs=7):
    """The tail objective of a run by hand: the best validation, and a fifth of what the last 5 epochs added to it."""
    values = [row["valid_ndcg@10"] for row in run.read_history()]
    return max(values) + 0.2 * (max(values) - max(values[: epochs - 5]))


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--prune", "--jobs", "1"]])
def test_with_the_tail_objective_trials_are_ranked_and_pruned_by_it(capsys, events, tmp_path, more):
    pytest.importorskip("optuna")
    rates = ["--set", "epochs=7", "--space", "training.learning_rate=0.03,0.01,0.001,1e-4,1e-6,1e-9"]
    command = ["tune", "-d", events, *SETTINGS, *rates, "--seeds", "0-1", "--trials", "6", "--out", tmp_path]
    code, out, _ = run(capsys, *command, "--objective", "tail", *more)
    assert code == 0 and "with its tail" in out and "Best by validation with its tail: --set" in out
    result = json.loads((tmp_path / "tune.json").read_text())
    assert result["objective"] == "tail"
    values = [trial["value"] for trial in result["trials"]]
    assert values == sorted(values, reverse=True)
    runs = {}
    for path in tmp_path.glob("runs/trial-*"):
        runs.setdefault(path.name.rpartition("-")[0], []).append(RunFolder(path))
    by_hand = {sum(map(tail, each)) / 2 for each in runs.values() if len(each) == 2}
    best = {sum(one.metrics["validation"]["unfiltered"]["ndcg@10"] for one in each) / 2 for each in runs.values()}
    assert all(min(abs(value - other) for other in by_hand) < 1e-12 for value in values)
    assert all(min(abs(trial["validation"] - other) for other in best) < 1e-12 for trial in result["trials"])
    assert any(trial["value"] > trial["validation"] for trial in result["trials"])
    reported = [value for trial in trials_of(tmp_path) for value in trial.intermediate_values.values()]
    first = [tail(each[0]) for each in runs.values()] + [tail(each[-1]) for each in runs.values()]
    assert bool(reported) == bool(more)
    assert all(min(abs(value - other) for other in [*first, *by_hand]) < 1e-12 for value in reported)


def test_a_study_goes_on_with_the_objective_it_was_begun_with(capsys, events, tmp_path):
    pytest.importorskip("optuna")
    epochs = ["--set", "epochs=6", "--seeds", "0", "--trials", "1"]
    assert run(capsys, *tune(events, tmp_path / "tail", *epochs, "--objective", "tail"))[0] == 0
    code, out, err = run(capsys, *tune(events, tmp_path / "tail", *epochs))
    assert (code, out) == (2, "") and err == (
        "error: the study in --out was begun with --objective tail, and best is asked for; give another --out, "
        "or --objective tail\n"
    )
    assert run(capsys, *tune(events, tmp_path / "best", *epochs))[0] == 0
    with sqlite3.connect(tmp_path / "best" / "study.db") as database:  # as earlier versions wrote it
        assert database.execute("DELETE FROM study_user_attributes WHERE key = 'objective'").rowcount == 1
        database.execute("DELETE FROM trial_user_attributes")
    code, _, err = run(capsys, *tune(events, tmp_path / "best", *epochs, "--objective", "tail"))
    assert code == 2 and "was begun with --objective best, and tail is asked for" in err
    code, _, err = run(capsys, *tune(events, tmp_path / "best", *epochs))
    (trial,) = json.loads((tmp_path / "best" / "tune.json").read_text())["trials"]
    assert (code, err) == (0, "") and trial["validation"] == trial["value"]


def test_a_study_goes_on_with_the_data_it_was_begun_with(capsys, events, tmp_path):
    pytest.importorskip("optuna")
    mine = tmp_path / "mine.parquet"
    shutil.copy(events, mine)
    command = tune(mine, tmp_path, "--set", "epochs=1", "--seeds", "0", "--trials", "1")
    assert run(capsys, *command)[0] == 0
    before = (tmp_path / "tune.json").read_bytes()
    generate(SyntheticConfig(num_users=61, num_items=60, mean_length=7.0, seed=4)).events.to_parquet(mine)
    code, out, err = run(capsys, *command[:-1], "2")
    assert (code, out) == (2, "") and "the study in --out was begun on data with content " in err
    assert "'mine' as loaded" in err
    assert (tmp_path / "tune.json").read_bytes() == before and len(trials_of(tmp_path)) == 1
    shutil.copy(events, mine)
    assert run(capsys, *command)[0] == 0
    moved = shutil.copy(events, tmp_path / "moved.parquet")
    assert run(capsys, *[moved if word == mine else word for word in command])[0] == 0
    with sqlite3.connect(tmp_path / "study.db") as database:  # as earlier versions wrote it
        assert database.execute("DELETE FROM study_user_attributes WHERE key = 'content_hash'").rowcount == 1
    assert run(capsys, *command)[0] == 0


class Trial:
    """What is asked of Optuna's trial, remembered; ``prunes`` is its answer after each report."""

    def __init__(self, prunes=()):
        self.asked, self.reports, self.attributes, self.prunes = [], [], {}, list(prunes)

    def __getattr__(self, name):
        return lambda *given, **more: self.asked.append((name, *given, more)) or given[0]

    def report(self, value, step):
        self.reports.append((pytest.approx(value), step))

    def should_prune(self):
        return self.prunes.pop(0)

    def set_user_attr(self, name, value):
        self.attributes[name] = pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("width=8..64", ("suggest_int", "width", 8, 64, {"log": False})),
        ("width=log:8..64", ("suggest_int", "width", 8, 64, {"log": True})),
        ("rate=0.5..2", ("suggest_float", "rate", 0.5, 2, {"log": False})),
        ("rate=log:1e-4..1e-2", ("suggest_float", "rate", 1e-4, 1e-2, {"log": True})),
        ("rate=-1.5..-0.5", ("suggest_float", "rate", -1.5, -0.5, {"log": False})),
        ("width=8, 16,32", ("suggest_categorical", "width", [8, 16, 32], {})),
        ("ema=~,{decay: 0.9}", ("suggest_categorical", "ema", [None, {"decay": 0.9}], {})),
    ],
)
def test_a_range_is_of_whole_numbers_where_both_bounds_are_and_by_ratio_after_log(text, asked):
    (dimension,), trial = parse_space([text]), Trial()
    dimension.suggest(trial)
    assert trial.asked == [asked] and dimension.first == (asked[2][0] if "categorical" in asked[0] else asked[2])


@pytest.mark.parametrize(
    ("prune", "workers", "prunes", "batches"),
    [
        (False, 2, (), [[0, 1, 2, 3, 4]]),
        (True, 2, (False, False), [[0, 1], [2, 3], [4]]),
        (True, 8, (False,), [[0, 1, 2], [3, 4]]),
        (True, 2, (False, True), [[0, 1], [2, 3]]),
    ],
)
def test_a_trial_is_worth_the_mean_of_its_objective_over_the_seeds(
    monkeypatch, tmp_path, prune, workers, prunes, batches
):
    values, trained, trial = [0.1, 0.4, 0.15, 0.9, 0.2], [], Trial(prunes)

    def prepare(arms, seeds, out, configure, *, dataset):
        trained.append(list(seeds))
        return [SimpleNamespace(seed=seed) for seed in seeds], dataset

    monkeypatch.setattr(tuning, "prepare", prepare)
    monkeypatch.setattr(tuning, "train_or_say", lambda *_, **__: None)
    monkeypatch.setattr(tuning, "best_validation", lambda job: values[job.seed])
    monkeypatch.setitem(tuning.OBJECTIVES, "tail", lambda job: 3 * values[job.seed] + 1)
    asked = tuning._Asked("bft", range(5), tmp_path, None, None, "tail", workers, prune, None)
    found = tuning._evaluate(trial, None, asked)
    assert trained == batches and trial.prunes == []
    done = [sum(map(len, batches[: n + 1])) for n in range(len(batches))]
    assert trial.reports == ([(3 * mean(values[:n]) + 1, n) for n in done] if prune else [])
    if done[-1] < 5:
        assert (found, trial.attributes) == (None, {})
    else:
        assert found == pytest.approx(3 * mean(values) + 1) and trial.attributes == {"validation": mean(values)}


@pytest.mark.parametrize("more", [["--set", "epochs=5"], ["--set", "epochs=9", "--set", "eval_every=5"]])
def test_a_tail_that_no_run_is_long_enough_for_is_refused(capsys, events, tmp_path, more):
    pytest.importorskip("optuna")
    code, _, err = run(capsys, *tune(events, tmp_path / "x", *more, "--objective", "tail"))
    assert code == 2 and "nothing is validated before them; raise training.epochs to" in err
    assert not (tmp_path / "x").exists()


def test_a_range_of_a_real_setting_with_whole_bounds_is_all_between_them(capsys, events, tmp_path):
    pytest.importorskip("optuna")
    settings = ["--set", "epochs=1", "--set", "loss=gbce", "--set", "hidden_size=8"]
    space = ["--space", "gbce_t=0..1", "--space", "num_negatives=1..8"]
    command = ["tune", "-d", events, *settings, *space, "--seeds", "0", "--trials", "3", "--out", tmp_path]
    assert run(capsys, *command)[0] == 0
    trials = [trial["settings"] for trial in json.loads((tmp_path / "tune.json").read_text())["trials"]]
    assert len(trials) == 3 and all(0 < trial["gbce_t"] < 1 for trial in trials)
    assert all(type(trial["num_negatives"]) is int for trial in trials)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ("seed=0,1", "--space cannot vary seed: every value is trained on the seeds that --seeds gives"),
        ("data.dataset=a.csv,b.csv", "--space cannot vary data.dataset: its runs are on one data set, -d"),
        ("training.valid_metric=ndcg@10,hr@10", "--space cannot vary training.valid_metric: its values are judged"),
        ("filter_seen=false,true", "--space cannot vary filter_seen: its values are judged by one metric on one data"),
        ("data.k_core=0..5", "--space cannot vary data.k_core"),
        ("epochs", "--space 'epochs' is not KEY=VALUES; write a,b,c or low..high or log:low..high"),
        ("dropout=0.5..0.1", "give numbers low..high with low < high"),
        ("dropout=log:0..0.5", "low > 0 after log:"),
        ("dropout=a..b", "give numbers low..high"),
        ("n_layers=1..2.5", "--space n_layers=1..2.5: it takes whole numbers; give whole bounds"),
        ("dropout=0.1...inf", "give numbers low..high"),
        ("dropoutt=0.1..0.5", "unknown key 'dropoutt'; did you mean 'dropout'?"),
    ],
)
def test_a_space_that_cannot_be_meant_is_refused(capsys, events, tmp_path, space, message):
    pytest.importorskip("optuna")
    code, _, err = run(capsys, "tune", "-d", events, "--space", space, "--out", tmp_path / "x")
    assert code == 2 and message in err and not (tmp_path / "x").exists()


def test_a_seed_among_the_settings_of_a_search_is_refused(capsys, events, tmp_path):
    code, _, err = run(
        capsys, "tune", "-d", events, "--space", "dropout=0,0.1", "--set", "seed=3", "--out", tmp_path / "x"
    )
    assert code == 2 and "--set seed has no effect, since --seeds decides it" in err and not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (["core.lam_max=10", "lam_max=20"], "--space names core.lam_max twice, with its section or without; name each"),
        (["lam_max=10", "lam_max=20"], "--space names core.lam_max twice"),
        (["core={lam_max: 5}", "lam_max=20"], "--space names core.lam_max twice"),
        (["mixer=rfa", "mixing.rotate=on,off", "rotate=off,on"], "--space names mixing.rotate twice"),
        (["training.epochs=1,1"], "--space 'training.epochs=1,1' names 1 twice; name each value once"),
        (["dropout=0.5,1e-1,0.50"], "--space 'dropout=0.5,1e-1,0.50' names 0.5 twice"),
    ],
)
def test_a_setting_or_a_value_that_is_named_twice_is_refused(capsys, events, tmp_path, space, message):
    pytest.importorskip("optuna")
    named = [word for each in space for word in ("--space", each)]
    code, _, err = run(capsys, "tune", "-d", events, *named, "--out", tmp_path / "x")
    assert code == 2 and message in err and not (tmp_path / "x").exists()


def test_pruning_within_one_seed_is_refused(capsys, events, tmp_path):
    pytest.importorskip("optuna")
    code, _, err = run(capsys, *tune(events, tmp_path / "x", "--prune", "--seeds", "3"))
    assert code == 2 and not (tmp_path / "x").exists()
    assert err == (
        "error: --prune has no effect with one seed, after which a trial is over; give more seeds or leave it out\n"
    )


@pytest.mark.parametrize("command", ["sweep", "tune"])
def test_an_out_that_is_a_file_is_refused(capsys, events, tmp_path, command):
    if command == "tune":
        pytest.importorskip("optuna")
    out = tmp_path / "out"
    out.write_text("mine")
    sweep = ["sweep", "-d", events, *SETTINGS, "--vary", "lam_max=5", "--seeds", "0-1", "--out", out]
    code, _, err = run(capsys, *(tune(events, out) if command == "tune" else sweep))
    assert code == 2 and err.startswith(f"error: cannot write {out}") and err.endswith("; name another place\n")
    assert err.count("\n") == 1 and out.read_text() == "mine"


@pytest.mark.parametrize("more", [[], ["--prune"]])
def test_no_workers_are_refused_before_a_study_is_begun(capsys, events, tmp_path, more):
    pytest.importorskip("optuna")
    code, _, err = run(capsys, *tune(events, tmp_path / "x", "--jobs", "0", *more))
    assert (code, err) == (2, "error: --jobs is 0; give a whole number of at least 1\n")
    assert not (tmp_path / "x").exists()


def test_a_study_is_begun_whole_or_not_at_all(capsys, events, tmp_path, monkeypatch):
    optuna = pytest.importorskip("optuna")

    def killed(**_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(optuna, "create_study", killed)
        assert run(capsys, *tune(events, tmp_path))[0] == 1
    assert [path.name for path in tmp_path.iterdir() if path.name != "queue"] == []
    assert run(capsys, *tune(events, tmp_path))[0] == 0 and (tmp_path / "study.db").is_file()


def test_a_file_that_holds_no_study_is_refused_by_its_name(capsys, events, tmp_path):
    pytest.importorskip("optuna")
    study = tmp_path / "study.db"
    study.write_text("not a database " * 100)
    code, _, err = run(capsys, *tune(events, tmp_path))
    assert code == 2 and f"{study} cannot be read as a study (" in err and "file is not a database" in err
    assert err.count("\n") == 1 and "move it away to begin anew, or give another --out" in err
    study.unlink()
    study.mkdir()
    code, _, err = run(capsys, *tune(events, tmp_path))
    assert code == 2 and f"{study} cannot be read as a study (" in err


def test_a_second_search_in_one_folder_is_refused(capsys, events, tmp_path):
    pytest.importorskip("optuna")
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = {"pid": sleeper.pid, "host": socket.gethostname(), "started": locks.started(sleeper.pid)}
    (tmp_path / "queue").mkdir()
    (tmp_path / "queue" / "recbft.lock").write_text(json.dumps(owner))
    try:
        code, _, err = run(capsys, *tune(events, tmp_path))
    finally:
        sleeper.communicate()
    assert code == 2 and f"another `recbft tune` is at work in {tmp_path}; wait for its end, or give another" in err
    assert not (tmp_path / "study.db").exists()


def test_without_optuna_one_line_says_how_to_get_it(capsys, monkeypatch, events, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, out, err = run(capsys, *tune(events, tmp_path / "x"))
    assert (code, out) == (2, "")
    assert err == "error: tuning needs Optuna, which is not installed; pip install 'recbft[tune]'\n"


def test_a_point_that_no_run_can_have_is_a_failed_trial_and_not_the_end(capsys, events, tmp_path):
    pytest.importorskip("optuna")
    settings = [*SETTINGS, "--set", "epochs=1", "--set", "n_heads=2"]
    space = ["--space", "backbone.hidden_size=8,9", "--trials", "6"]
    code, _, err = run(capsys, "tune", "-d", events, *settings, *space, "--seeds", "0-1", "--out", tmp_path)
    assert code == 0 and "this trial cannot be run: arm bft: backbone.n_heads is 2, which does not divide" in err
    assert 0 < json.loads((tmp_path / "tune.json").read_text())["failed"] < 6


def test_a_point_whose_parts_do_not_go_together_is_none_that_a_run_can_have(capsys, events, tmp_path):
    pytest.importorskip("optuna")
    space = ["--space", "mixer=linear_attention,gla", "--trials", "2", "--seeds", "0-1", "--out", tmp_path]
    code, _, err = run(capsys, "tune", "-d", events, *SETTINGS, *space)
    why = "error: none of the 2 trials can be run; the last: update 'kalman' needs an observation precision"
    assert code == 2 and err.splitlines()[-1].startswith(why) and not (tmp_path / "runs").exists()


def test_points_none_of_which_a_run_can_have_end_in_one_line(capsys, events, tmp_path):
    pytest.importorskip("optuna")
    settings = [*SETTINGS, "--set", "epochs=1", "--set", "n_heads=2"]
    odd = ",".join(map(str, range(9, 201, 2)))  # all but the first, which is looked at before the search begins
    space = ["--space", f"backbone.hidden_size=8,{odd}", "--trials", "2"]
    why = "error: none of the 2 trials can be run; the last: arm bft: backbone.n_heads is 2, which does not divide"
    for _ in range(2):
        code, _, err = run(capsys, "tune", "-d", events, *settings, *space, "--seeds", "0-1", "--out", tmp_path)
        assert code == 2 and err.splitlines()[-1].startswith(why)
        assert err.endswith("; give another --out, and values that go together\n") and "queue" not in err


def failing(monkeypatch, *reasons):
    """The next trainings fail for these reasons; those with None, and all after them, are done."""
    train, left = tuning.train_or_say, list(reasons)

    def train_or_fail(*arguments, **options):
        if left and (reason := left.pop(0)) is not None:
            raise RunError(f"1 of 2 runs failed ({reason}); mend the cause and give the same command again")
        train(*arguments, **options)

    monkeypatch.setattr(tuning, "train_or_say", train_or_fail)


def trials_of(folder):
    optuna = pytest.importorskip("optuna")
    return optuna.load_study(study_name="recbft", storage=f"sqlite:///{folder / 'study.db'}").trials


def test_a_trial_whose_training_failed_is_taken_up_by_the_same_command(capsys, monkeypatch, events, tmp_path):
    pytest.importorskip("optuna")
    command = tune(events, tmp_path, "--set", "epochs=1", "--seeds", "0", "--trials", "2")
    failing(monkeypatch, None, "a worker crashed")
    code, out, err = run(capsys, *command)
    assert code == 0 and "1 trial, 0 pruned, 1 failed" in out and "this trial failed: 1 of 2 runs failed (a wor" in err
    failed = trials_of(tmp_path)[1].params
    code, out, err = run(capsys, *command)
    assert code == 0 and "2 trials, 0 pruned, 0 failed" in out
    assert err.startswith("trial 2 of 2: ") and f"learning_rate={failed['training.learning_rate']}" in err
    assert [trial.state.name for trial in trials_of(tmp_path)] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert trials_of(tmp_path)[2].params == failed
    code, out, err = run(capsys, *command)
    assert (code, err) == (0, "") and "2 trials, 0 pruned, 0 failed" in out


def test_trainings_that_fail_again_and_again_end_a_command_each_time(capsys, monkeypatch, events, tmp_path):
    pytest.importorskip("optuna")
    command = tune(events, tmp_path, "--trials", "2")
    for _ in range(2):
        failing(monkeypatch, "diverged", "diverged")
        code, _, err = run(capsys, *command)
        assert code == 1 and err.count("this trial failed") == 2 and "none of the trials came to its end" in err
    assert len({str(trial.params) for trial in trials_of(tmp_path)}) == 2


@pytest.mark.parametrize("free", [2**40, 0])
def test_a_full_disk_ends_the_search_and_uses_up_no_trial(capsys, monkeypatch, events, tmp_path, free):
    pytest.importorskip("optuna")
    command = tune(events, tmp_path, "--set", "epochs=1", "--seeds", "0", "--trials", "1")
    failing(monkeypatch, "No space left on device" if free else "ended without a word")
    with monkeypatch.context() as patch:
        patch.setattr(tuning.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        code, out, err = run(capsys, *command)
    assert (code, out) == (1, "") and err.splitlines()[-1].startswith("error: 1 of 2 runs failed (")
    assert err.count("trial ") == 1 and [trial.state.name for trial in trials_of(tmp_path)] == ["RUNNING"]
    code, out, _ = run(capsys, *command)
    assert code == 0 and "1 trial, 0 pruned, 0 failed" in out
    assert trials_of(tmp_path)[1].params == trials_of(tmp_path)[0].params


def test_a_database_without_room_is_a_full_disk_and_no_defect(capsys, monkeypatch, events, tmp_path):
    pytest.importorskip("optuna")
    from sqlalchemy.exc import OperationalError

    def full(*_, **__):
        raise OperationalError("COMMIT", {}, Exception("database or disk is full"))

    command = tune(events, tmp_path, "--set", "epochs=1", "--seeds", "0", "--trials", "1")
    leftover = tmp_path / ".study.db.0123abcd.tmp"
    leftover.write_text("of a killed command")
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "_evaluate", full)
        code, _, err = run(capsys, *command)
        assert code == 1 and "database or disk is full" in err and "the same command" in err and not leftover.exists()
        patch.setattr(tuning.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
        code, _, err = run(capsys, *command)
    assert code == 1 and "error: no space left while writing" in err and "defect" not in err
