"""``recbft tune``: validation ranks the trials, and a search goes on where it was stopped."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import sys
from statistics import mean
from types import SimpleNamespace

import pytest

from recbft.datasets.synth import SyntheticConfig, generate
from recbft.errors import RunError
from recbft.experiments import tuning
from recbft.experiments.search_space import parse_space
from recbft.runs import locks
from recbft.runs.folder import RunFolder
from tests.cli.conftest import SETTINGS, run
from tests.experiments.conftest import begin, wait_for

optuna = pytest.importorskip("optuna")


def untrained(monkeypatch, worth=lambda trial: 0.5):
    """Trials are worth this, and nothing is trained."""

    def evaluate(trial, *_):
        value = worth(trial)
        trial.set_user_attr("validation", -value)
        return value

    monkeypatch.setattr(tuning, "_evaluate", evaluate)


def trials_of(folder):
    return optuna.load_study(study_name="recbft", storage=f"sqlite:///{folder / 'study.db'}").trials


def tune(events, out, *more):
    space = ["--space", "training.learning_rate=log:1e-4..1e-1", "--space", "core.initial=hybrid,count"]
    return ["tune", "-d", events, *SETTINGS, *space, "--seeds", "0-1", "--out", out, *more]


@pytest.mark.slow
def test_a_search_goes_on_where_it_was_stopped_and_looks_at_validation_only(capsys, events, tmp_path):
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


@pytest.mark.parametrize(("seeds", "jobs"), [("0-2", "1"), ("0-1", "4")])
def test_a_trial_below_the_median_is_given_up_however_many_workers_there_are(
    capsys, monkeypatch, events, tmp_path, seeds, jobs
):
    monkeypatch.setattr(tuning, "train_or_say", lambda *_, **__: None)
    monkeypatch.setattr(tuning, "best_validation", lambda job: job.config.training.learning_rate)
    monkeypatch.setitem(tuning.OBJECTIVES, "best", lambda job: job.config.training.learning_rate)
    rates = "training.learning_rate=0.01,0.011,0.012,0.013,0.014,1e-9,2e-9,3e-9,4e-9"
    command = ["tune", "-d", events, *SETTINGS, "--space", rates, "--seeds", seeds, "--jobs", jobs, "--out", tmp_path]
    code, out, _ = run(capsys, *command, "--trials", "9", "--prune")
    assert code == 0 and " pruned, 0 failed" in out
    assert json.loads((tmp_path / "tune.json").read_text())["pruned"] > 0


@pytest.mark.parametrize("name", ["a?b=c", "lr%20grid"])
def test_a_study_lies_in_its_folder_whatever_that_is_called(capsys, monkeypatch, events, tmp_path, name):
    untrained(monkeypatch)
    command = ["tune", "-d", events, *SETTINGS, "--space", "dropout=0.1,0.2", "--seeds", "0", "--out", tmp_path / name]
    for trials in ("1", "2"):
        code, out, _ = run(capsys, *command, "--trials", trials)
        assert code == 0 and f"{trials} trial" in out
    assert (tmp_path / name / "study.db").is_file() and [path.name for path in tmp_path.iterdir()] == [name]


def test_no_point_of_a_small_space_is_tried_twice(capsys, monkeypatch, events, tmp_path):
    untrained(monkeypatch, lambda trial: float(trial.params["dropout"]))
    space = ["--space", "dropout=0.1,0.2", "--space", "n_layers=1..3"]
    command = ["tune", "-d", events, *SETTINGS, *space, "--seeds", "0", "--out", tmp_path]
    for trials, said in (("4", ""), ("9", "all 6 points of the space were tried"), ("9", "all 6 points")):
        code, out, err = run(capsys, *command, "--trials", trials)
        found = json.loads((tmp_path / "tune.json").read_text())["trials"]
        assert code == 0 and said in err and len({str(trial["settings"]) for trial in found}) == len(found)
        assert len(found) == min(int(trials), 6)
        assert [trial["value"] for trial in found] == sorted((-trial["validation"] for trial in found), reverse=True)
    assert "6 trials, 0 pruned, 0 failed" in out


def test_ctrl_c_between_trials_loses_none_and_the_same_command_goes_on(capsys, monkeypatch, events, tmp_path):
    command, began = tune(events, tmp_path, "--trials", "3"), []

    def worth(trial):
        began.append(trial.params)
        if len(began) == 2:
            raise KeyboardInterrupt
        return float(len(began))

    untrained(monkeypatch, worth)
    code, out, err = run(capsys, *command)
    assert (code, out) == (1, "") and err.splitlines()[-1] == "error: interrupted; the same command goes on"
    assert run(capsys, *command)[0] == 0
    assert began[2] == began[1] and len(began) == 4
    assert [trial.state.name for trial in trials_of(tmp_path)] == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]


def test_a_search_that_was_stopped_again_and_again_tries_the_points_of_one_that_was_not(
    capsys, monkeypatch, events, tmp_path
):
    def found(folder):
        trials = [trial for trial in trials_of(folder) if trial.state.name == "COMPLETE"]
        return [trial.params for trial in trials], [trial.value for trial in trials]

    def worth(trial):
        stops.append(trial.number)
        if killed and len(stops) % 3 == 0:
            raise SystemExit
        return -abs(trial.params["dropout"] - 0.3)

    stops, killed = [], False
    untrained(monkeypatch, worth)
    early = functools.partial(optuna.samplers.TPESampler, n_startup_trials=2)  # draws by what was found from then on
    monkeypatch.setattr(optuna.samplers, "TPESampler", early)
    space = ["--space", "dropout=0.0..0.9", "--space", "n_layers=1..3", "--seeds", "0", "--trials", "5"]
    for folder in ("whole", "killed"):
        stops, killed = [], folder == "killed"
        codes = []
        while 0 not in codes:
            with contextlib.suppress(SystemExit):
                codes.append(run(capsys, "tune", "-d", events, *SETTINGS, *space, "--out", tmp_path / folder)[0])
    assert len(stops) == 7 and found(tmp_path / "killed") == found(tmp_path / "whole")


@pytest.mark.slow
def test_ctrl_c_ends_a_search_in_the_midst_of_a_trial_and_the_same_command_goes_on(capsys, events, tmp_path):
    words = tune(events, tmp_path, "--trials", "1", "--jobs", "2", "--set", "epochs=20")
    process = begin(words)
    try:
        wait_for(lambda: list(tmp_path.glob("runs/*/history.csv")))
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to the command and its workers
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1 and "Traceback" not in told
    assert told.splitlines()[-1] == "error: interrupted; the same command goes on with this trial"
    assert not list(tmp_path.glob("queue/*.lock"))
    code, out, err = run(capsys, *words)
    assert code == 0 and err.startswith(told.splitlines()[0]) and "1 trial, 0 pruned, 0 failed" in out


def test_a_study_goes_on_with_the_objective_it_was_begun_with(capsys, monkeypatch, events, tmp_path):
    untrained(monkeypatch)
    epochs = ["--set", "epochs=6", "--seeds", "0", "--trials", "1"]
    code, out, _ = run(capsys, *tune(events, tmp_path, *epochs, "--objective", "tail"))
    assert code == 0 and "Best by validation with its tail: --set" in out
    assert json.loads((tmp_path / "tune.json").read_text())["objective"] == "tail"
    code, out, err = run(capsys, *tune(events, tmp_path, *epochs))
    assert (code, out) == (2, "") and err == (
        "error: the study in --out was begun with --objective tail, and best is asked for; give another --out, "
        "or --objective tail\n"
    )


def test_a_study_goes_on_with_the_data_it_was_begun_with(capsys, monkeypatch, events, tmp_path):
    untrained(monkeypatch)
    mine = shutil.copy(events, tmp_path / "mine.parquet")
    command = tune(mine, tmp_path, "--seeds", "0", "--trials", "1")
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


def test_a_range_of_a_real_setting_with_whole_bounds_is_all_between_them(capsys, monkeypatch, events, tmp_path):
    untrained(monkeypatch)
    settings = ["--set", "epochs=1", "--set", "loss=gbce", "--set", "hidden_size=8"]
    space = ["--space", "gbce_t=0..1", "--space", "num_negatives=1..8"]
    command = ["tune", "-d", events, *settings, *space, "--seeds", "0", "--trials", "3", "--out", tmp_path]
    assert run(capsys, *command)[0] == 0
    trials = [trial["settings"] for trial in json.loads((tmp_path / "tune.json").read_text())["trials"]]
    assert len(trials) == 3 and all(0 < trial["gbce_t"] < 1 for trial in trials)
    assert all(type(trial["num_negatives"]) is int for trial in trials)


@pytest.mark.parametrize(
    ("space", "more", "message"),
    [
        ("seed=0,1", [], "--space cannot vary seed: every value is trained on the seeds that --seeds gives"),
        ("filter_seen=false,true", [], "--space cannot vary filter_seen: its values are judged by one metric on one"),
        ("epochs", [], "--space 'epochs' is not KEY=VALUES; write a,b,c or low..high or log:low..high"),
        ("dropout=0.5..0.1", [], "give numbers low..high with low < high"),
        ("dropout=log:0..0.5", [], "low > 0 after log:"),
        ("dropout=a..b", [], "give numbers low..high"),
        ("dropout=0.1...inf", [], "give numbers low..high"),
        ("n_layers=1..2.5", [], "--space n_layers=1..2.5: it takes whole numbers; give whole bounds"),
        ("training.epochs=1,1", [], "--space 'training.epochs=1,1' names 1 twice; name each value once"),
        (
            "core.lam_max=10",
            ["--space", "lam_max=20"],
            "--space names core.lam_max twice, with its section or without;",
        ),
        ("core={lam_max: 5}", ["--space", "lam_max=20"], "--space names core.lam_max twice"),
        (
            "dropout=0,1",
            ["--prune", "--seeds", "3"],
            "--prune has no effect with one seed, after which a trial is over",
        ),
        ("dropout=0,1", ["--prune", "--jobs", "0"], "--jobs is 0; give a whole number >= 1"),
        ("dropout=0,1", ["--objective", "tail", "--set", "epochs=5"], "raise training.epochs to 6 or more"),
    ],
)
def test_a_search_that_cannot_be_meant_is_refused(capsys, events, tmp_path, space, more, message):
    code, _, err = run(capsys, "tune", "-d", events, *SETTINGS, "--space", space, *more, "--out", tmp_path / "x")
    assert code == 2 and message in err and not (tmp_path / "x").exists()


def test_a_command_that_was_killed_as_it_began_a_study_is_gone_on_with(capsys, events, tmp_path, monkeypatch):
    def killed(**_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(optuna, "create_study", killed)
        assert run(capsys, *tune(events, tmp_path, "--trials", "1"))[0] == 1
    untrained(monkeypatch)
    for trials in ("1", "2"):
        assert run(capsys, *tune(events, tmp_path, "--trials", trials))[0] == 0
    assert len(trials_of(tmp_path)) == 2


def test_a_file_that_holds_no_study_is_refused_by_its_name(capsys, events, tmp_path):
    study = tmp_path / "study.db"
    study.write_text("not a database " * 100)
    code, _, err = run(capsys, *tune(events, tmp_path))
    assert code == 2 and f"{study} cannot be read as a study (" in err and "file is not a database" in err
    assert err.count("\n") == 1 and "move it away to begin anew, or give another --out" in err


def test_a_second_search_in_one_folder_is_refused(capsys, events, tmp_path):
    lock = locks.acquire(tmp_path / "queue", "recbft")
    code, _, err = run(capsys, *tune(events, tmp_path))
    lock.release()
    assert code == 2 and f"another `recbft tune` is at work in {tmp_path}; wait for its end, or give another" in err
    assert not (tmp_path / "study.db").exists()


def test_without_optuna_one_line_says_how_to_get_it(capsys, monkeypatch, events, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, out, err = run(capsys, *tune(events, tmp_path / "x"))
    assert (code, out) == (2, "")
    assert err == "error: tuning needs Optuna, which is not installed; pip install optuna\n"


def test_a_point_that_no_run_can_have_is_a_failed_trial_and_not_the_end(capsys, events, tmp_path):
    settings = [*SETTINGS, "--set", "epochs=1", "--set", "n_heads=2"]
    space = ["--space", "backbone.hidden_size=8,9", "--trials", "6"]
    code, _, err = run(capsys, "tune", "-d", events, *settings, *space, "--seeds", "0-1", "--out", tmp_path)
    assert code == 0 and "this trial cannot be run: arm bft: backbone.n_heads is 2, which does not divide" in err
    assert 0 < json.loads((tmp_path / "tune.json").read_text())["failed"] < 6


def test_a_point_whose_parts_do_not_go_together_is_none_that_a_run_can_have(capsys, events, tmp_path):
    space = ["--space", "mixer=linear_attention,gla", "--trials", "2", "--seeds", "0-1", "--out", tmp_path]
    why = "error: none of the 2 trials can be run; the last: update 'kalman' needs an observation precision"
    for _ in range(2):
        code, _, err = run(capsys, "tune", "-d", events, *SETTINGS, *space)
        assert code == 2 and err.splitlines()[-1].startswith(why) and not (tmp_path / "runs").exists()
        assert err.endswith("; give another --out, and values that go together\n") and "queue" not in err


def failing(monkeypatch, *reasons):
    """The next trainings fail for these reasons; those with None, and all after them, are done."""
    train, left = tuning.train_or_say, list(reasons)

    def train_or_fail(*arguments, **options):
        if left and (reason := left.pop(0)) is not None:
            raise RunError(f"1 of 2 runs failed ({reason}); mend the cause and give the same command again")
        train(*arguments, **options)

    monkeypatch.setattr(tuning, "train_or_say", train_or_fail)


def test_a_trial_whose_training_failed_is_taken_up_by_the_same_command(capsys, monkeypatch, events, tmp_path):
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
    command = tune(events, tmp_path, "--trials", "2")
    for _ in range(2):
        failing(monkeypatch, "diverged", "diverged")
        code, _, err = run(capsys, *command)
        assert code == 1 and err.count("this trial failed") == 2 and "none of the trials came to its end" in err
    assert len({str(trial.params) for trial in trials_of(tmp_path)}) == 2


def test_a_database_without_room_says_that_the_same_command_goes_on(capsys, monkeypatch, events, tmp_path):
    from sqlalchemy.exc import OperationalError

    def full(*_):
        raise OperationalError("COMMIT", {}, Exception("database or disk is full"))

    monkeypatch.setattr(tuning, "_evaluate", full)
    code, _, err = run(capsys, *tune(events, tmp_path, "--seeds", "0", "--trials", "1"))
    assert code == 1 and "database or disk is full" in err and "the same command" in err
