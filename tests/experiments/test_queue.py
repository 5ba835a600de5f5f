"""Many runs from a queue of files: used again, gone on with, shared, and not undone by kills or failures."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import threading
import warnings

import pandas as pd
import pytest
import torch

from recbft.errors import RunError, UserError
from recbft.experiments import missing_runs, processes, queue, worker
from recbft.experiments.missing_runs import prepare, train_missing
from recbft.experiments.plan import ArmSpec, parse_arms, plan, status, write_commands
from recbft.experiments.queue import train_all
from recbft.runs import locks
from recbft.runs.folder import RunFolder
from recbft.training.one_run import train
from recbft_cli.main import main
from tests.experiments.conftest import SMALL, Watch, begin, jobs_of, runs_in, wait_for

LONG = ("epochs=40", "patience=1000")
SHORT = ("epochs=3",)


def ranks(path):
    return pd.read_parquet(path / "per_user.parquet")


def data_of(jobs):
    return jobs[0].config.data.load()


def no_lock_and_no_log_is_left(out):
    return list((out / "queue").iterdir()) == []


def test_the_queue_trains_what_is_missing_and_the_numbers_are_those_of_training_alone(events, trained, tmp_path):
    jobs, watch = jobs_of(events, tmp_path), Watch()
    before = dict(os.environ)
    assert train_all(jobs, data_of(jobs), tmp_path / "queue", 2, watch) == []
    assert dict(os.environ) == before and no_lock_and_no_log_is_left(tmp_path)
    assert watch.said[0] == "0 of 4" and sorted(watch.said[1:-1]) == [f"finished {p.name}" for p in runs_in(tmp_path)]
    for path in runs_in(tmp_path):
        pd.testing.assert_frame_equal(ranks(path), ranks(trained / "runs" / path.name))
    again = Watch()
    assert train_all(jobs, data_of(jobs), tmp_path / "queue", 2, again) == [] and again.said == ["4 of 4", "stop"]


def test_seeds_of_an_arm_are_trained_together_rank_as_when_alone_and_warn_once(events, trained, tmp_path):
    older = trained / "runs" / "bft-seed0"
    jobs, watch = jobs_of(events, tmp_path, f"bft,bft[warm_start={older},lam_max=50]"), Watch()
    train_missing(jobs, data_of(jobs), tmp_path, workers=1, watch=watch, batch_seeds=2)
    assert len([said for said in watch.said if said.startswith("finished ")]) == 4
    assert no_lock_and_no_log_is_left(tmp_path)
    for path in runs_in(tmp_path, "bft"):
        assert json.loads((path / "environment.json").read_text())["trained_together"] == [0, 1]
        pd.testing.assert_frame_equal(ranks(path), ranks(trained / "runs" / path.name))
    (said,) = [text for text in watch.said if "other settings" in text]
    assert re.fullmatch(
        r"bft\[.* seed 0 and 1 more: this run begins from .*, which has other settings: core.lam_m.*", said
    )


def test_seeds_that_are_finished_already_need_not_be_trained_together(events, tmp_path):
    def configure(arm, seed):
        return arm.config([*SMALL, "mixer=rfa"], dataset=str(events), seed=seed)

    asked = (parse_arms("matched"), (0, 1), tmp_path, configure)
    state = torch.get_rng_state()
    with pytest.raises(UserError, match="--batch-seeds cannot be given with arm matched: several seeds cannot be"):
        prepare(*asked, batch_seeds=2)
    assert torch.equal(state, torch.get_rng_state()) and list(tmp_path.iterdir()) == []
    jobs, _ = prepare(*asked)
    train(jobs[0].config, jobs[0].path)
    assert len(prepare(*asked, batch_seeds=2)[0]) == 2


def test_a_run_that_fails_is_named_and_the_others_go_on(events, tmp_path):
    jobs = jobs_of(events, tmp_path, "matched,bft[learning_rate=1e30]")
    watch = Watch()
    with pytest.raises(RunError) as caught:
        train_missing(jobs, data_of(jobs), tmp_path, workers=2, watch=watch)
    message = str(caught.value)
    assert message.startswith("2 of 4 runs failed (bft[learning_rate=1e30] seed 0, bft[learning_rate=1e30] seed 1: the")
    assert "the loss is" in message and message.endswith(
        "give the same command again, or leave that arm out: what is finished is kept"
    )
    assert [status(job, data_of(jobs)) for job in jobs] == ["finished", "unfinished"] * 2
    assert "the loss is" in (tmp_path / "queue" / "bft_learning_rate=1e30-seed0.log").read_text()
    assert len((tmp_path / "commands.txt").read_text().splitlines()) == 4


def test_no_run_is_trained_on_data_that_changed_since_the_command_began(events, tmp_path):
    file = shutil.copy(events, tmp_path / "mine.parquet")
    jobs = jobs_of(file, tmp_path, "matched")
    dataset = data_of(jobs)
    pd.read_parquet(events)[:-1].to_parquet(file)
    with pytest.raises(RunError, match=r"2 of 2 runs failed .*: this command began on data with content \w{12}, and"):
        train_missing(jobs, dataset, tmp_path, workers=1, watch=Watch())
    assert runs_in(tmp_path) == []


@pytest.mark.parametrize(("option", "said"), [("workers", "--jobs"), ("batch_seeds", "--batch-seeds")])
def test_a_number_of_processes_or_seeds_below_one_is_refused(events, tmp_path, option, said):
    jobs = jobs_of(events, tmp_path)
    with pytest.raises(UserError, match=f"{said} is 0; give a whole number >= 1"):
        train_missing(jobs, data_of(jobs), tmp_path, watch=Watch(), **{"workers": 1, option: 0})


@pytest.fixture
def begun(monkeypatch):
    """The ids of the processes that a queue of this process has begun."""
    start, pids = processes.start, []

    def started(*arguments):
        process, said = start(*arguments)
        pids.append(process.pid)
        return process, said

    monkeypatch.setattr(processes, "start", started)
    return pids


def test_a_run_that_another_command_trains_is_waited_for(events, tmp_path, begun):
    jobs, watch, elsewhere = jobs_of(events, tmp_path, "bft"), Watch(), set()
    theirs = locks.acquire(tmp_path / "queue", jobs[0].path.name)

    def look(running, waiting):
        elsewhere.update(run.job.name for run in running if run.elsewhere)
        if elsewhere:
            theirs.release()

    watch.look = look
    assert train_all(jobs, data_of(jobs), tmp_path / "queue", 2, watch) == []
    assert elsewhere == {jobs[0].name} and len(begun) == 2, "no process is begun for a run that is locked"


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_its_run_is_the_same(events, tmp_path, begun):
    jobs, whole = (jobs_of(events, tmp_path / name, "bft", (0,), LONG) for name in "ab")
    folder, watch, failed = tmp_path / "a" / "queue", Watch(), []
    thread = threading.Thread(target=lambda: failed.extend(train_all(jobs, data_of(jobs), folder, 1, watch)))
    thread.start()
    wait_for(lambda: len(queue._history(jobs[0])) >= 2)
    assert locks.is_held(folder, jobs[0].path.name)
    os.kill(begun[0], signal.SIGKILL)
    thread.join(240)
    assert failed == [] and "bft seed 0: ended by signal 9; going on with it" in watch.said
    assert len(begun) == 2 and no_lock_and_no_log_is_left(tmp_path / "a")
    train(whole[0].config, whole[0].path)
    pd.testing.assert_frame_equal(ranks(jobs[0].path), ranks(whole[0].path))


def test_a_worker_killed_again_and_again_without_progress_counts_as_failed(events, tmp_path, begun, monkeypatch):
    jobs, start = jobs_of(events, tmp_path, "bft", (0,)), processes.start

    def started(*arguments):
        process, said = start(*arguments)
        process.kill()
        return process, said

    monkeypatch.setattr(processes, "start", started)
    failed = train_all(jobs, data_of(jobs), tmp_path / "queue", 1, Watch())
    assert [failure.reason for failure in failed] == ["ended by signal 9"] and len(begun) == 2


@pytest.mark.slow
@pytest.mark.skipif(not processes.FORKS, reason="there is a fork server on Linux only")
def test_runs_whose_fork_server_is_killed_are_taken_up_again(events, tmp_path, monkeypatch):
    jobs, watch, failed, free = jobs_of(events, tmp_path, "bft", settings=LONG), Watch(), [], []
    end_lost, folder = queue._Queue._end_lost, tmp_path / "queue"

    def ended(self, worker):
        end_lost(self, worker)
        free.append(not any(map(self._is_locked, worker.jobs)))

    monkeypatch.setattr(queue._Queue, "_end_lost", ended)
    thread = threading.Thread(target=lambda: failed.extend(train_all(jobs, data_of(jobs), folder, 2, watch)))
    thread.start()
    wait_for(lambda: any(len(queue._history(job)) >= 2 for job in jobs))
    os.kill(processes.forkserver._forkserver._forkserver_pid, signal.SIGKILL)
    thread.join(240)
    assert failed == [] and all(status(job, data_of(jobs)) == "finished" for job in jobs)
    assert any(said.endswith(": ended with the process that had started it; going on with it") for said in watch.said)
    assert free and all(free), "none went on by itself"
    assert no_lock_and_no_log_is_left(tmp_path)


def command(events, out):
    settings = [word for setting in (*SMALL, *LONG) for word in ("--set", setting)]
    return ["compare", "-d", events, *settings, "--arms", "matched,bft", "--seeds", "0-1", "--jobs", "2", "--out", out]


@pytest.mark.slow
def test_a_killed_command_takes_its_workers_along_and_two_of_the_same_go_on_together(events, tmp_path):
    process = begin(command(events, tmp_path))
    wait_for(lambda: len(list(tmp_path.glob("runs/*/history.csv"))) == 2)
    process.kill()
    process.communicate()
    left = {path: len(RunFolder(path).read_history()) for path in runs_in(tmp_path)}
    wait_for(lambda: not any(locks.is_held(tmp_path / "queue", path.name) for path in left))
    assert not all(RunFolder(path).is_finished for path in left)
    both = [begin(command(events, tmp_path)) for _ in range(2)]
    told = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert len(runs_in(tmp_path)) == 4 and all(RunFolder(path).is_finished for path in runs_in(tmp_path))
    first, second = (out.split("\n\n", 1)[1] for out, _ in told)
    assert first == second and "Difference from matched" in first and (tmp_path / "comparison.json").is_file()
    assert sum(said.count("] ") for _, said in told) >= 4, "each run is told by the one that has trained it, or both"
    assert no_lock_and_no_log_is_left(tmp_path) and not list(tmp_path.glob("runs/.*"))


@pytest.mark.slow
def test_sigterm_ends_the_workers_and_says_how_to_go_on(events, tmp_path):
    process = begin(command(events, tmp_path))  # Ctrl-C ends a search in tests/cli/test_tune.py
    try:
        wait_for(lambda: list(tmp_path.glob("runs/*/history.csv")))
        process.terminate()
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1 and "Traceback" not in told
    assert told.splitlines()[-1] == "error: interrupted; 0 of 4 runs are finished, the same command goes on"
    assert not list(tmp_path.glob("queue/*.lock"))


OTHER_RUN = r"seed0 holds a run with training\.epochs 2, and 3 is asked for; give another --out"


def command_before_ours(trained, out, finished=True):
    """The runs of another command, of 2 epochs, appear in ``out``."""
    left_out = None if finished else shutil.ignore_patterns("metrics.json", "per_user.parquet")
    shutil.copytree(trained / "runs", out / "runs", ignore=left_out)


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_that_another_command_makes_with_other_settings_is_refused(events, trained, tmp_path, finished):
    jobs, watch = jobs_of(events, tmp_path, settings=SHORT), Watch()
    watch.start = lambda *_: command_before_ours(trained, tmp_path, finished)
    with pytest.raises(UserError, match=OTHER_RUN):
        train_missing(jobs, data_of(jobs), tmp_path, workers=1, watch=watch)
    assert watch.said == ["stop"] and RunFolder(jobs[0].path).is_finished == finished


@pytest.mark.parametrize("batch_seeds", [1, 2])
def test_a_worker_that_has_the_lock_looks_whose_run_it_is(events, trained, tmp_path, monkeypatch, batch_seeds):
    jobs = jobs_of(events, tmp_path, "matched", settings=SHORT)
    command_before_ours(trained, tmp_path, finished=False)
    monkeypatch.setattr(queue, "status", lambda job, dataset: "missing")  # in this process, not in the workers
    with pytest.raises(RunError, match=rf"2 of 2 runs failed \(.*{OTHER_RUN}"):
        train_missing(jobs, data_of(jobs), tmp_path, workers=1, watch=Watch(), batch_seeds=batch_seeds)


def test_what_the_queue_leaves_is_looked_at_before_it_is_compared(events, trained, tmp_path, monkeypatch):
    jobs = jobs_of(events, tmp_path, settings=SHORT)
    monkeypatch.setattr(missing_runs, "train_all", lambda *_: command_before_ours(trained, tmp_path))
    with pytest.raises(UserError, match=OTHER_RUN):
        train_missing(jobs, data_of(jobs), tmp_path, workers=1, watch=Watch())


def test_arms_that_cannot_be_compared_are_refused_before_training(events, tmp_path):
    def prepared(arms):
        return prepare(
            parse_arms(arms), (0, 1), tmp_path, lambda arm, seed: arm.config(SMALL, dataset=str(events), seed=seed)
        )

    with pytest.raises(UserError, match=r"arm bft\[k_core=2\] cannot .* with bft, which has data\.k_core 0, and 2 is"):
        prepared("bft,bft[k_core=2]")
    with pytest.raises(UserError, match=r"has evaluation\.filter_seen False, and True is asked for; give all arms"):
        prepared("bft,bft[filter_seen=true]")


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("bft[mixer=linear_attention]", r"update 'kalman' needs an observation precision"),
        ("bft[warm_start=nowhere]", "there is no run folder nowhere"),
        (
            "bft[warm_start=OLDER,hidden_size=16]",
            r"the weights of .* do not fit this model: it has backbone\.hidden_size",
        ),
        ("bft[controllers.label_smoothing={start: 0.1},loss=bce]", "label_smoothing has no effect with loss 'bce'"),
    ],
)
def test_an_arm_that_cannot_begin_is_refused_before_any_is_trained(events, trained, tmp_path, arm, message):
    before = torch.get_rng_state()
    arms = parse_arms(f"matched,{arm.replace('OLDER', str(runs_in(trained, 'bft')[0]))}")
    with pytest.raises(UserError, match=rf"^arm {re.escape(arms[1].label)}: .*{message}"):
        prepare(arms, (0, 1), tmp_path, lambda arm, seed: arm.config(SMALL, dataset=str(events), seed=seed))
    assert torch.equal(torch.get_rng_state(), before) and list(tmp_path.iterdir()) == []


def test_a_run_made_elsewhere_by_its_command_is_taken_up(events, tmp_path, capsys):
    job = jobs_of(events, tmp_path / "elsewhere", "bft[lam_max=10,ks=[5,10]]", (3,))[0]
    assert "--set 'evaluation.ks=[5, 10]'" in job.command
    assert main([*shlex.split(job.command)[1:], "-q"]) == 0
    capsys.readouterr()
    here = jobs_of(events, tmp_path / "here", "bft[lam_max=10,ks=[5,10]]", (3,))
    shutil.copytree(job.path, here[0].path)
    data, watch = data_of(here), Watch()
    assert train_all(here, data, tmp_path / "here" / "queue", 1, watch) == [] and watch.said == ["1 of 1", "stop"]
    assert status(here[0], data) == "finished"


CONTROLLERS = ("guardian", "chaos", "lr_floor", "label_smoothing", "dropout_glide", "ema")


@pytest.mark.parametrize(
    ("arm", "settings"),
    [
        ("matched", ("controllers.ema={decay: 0.9}", "clip_norm=1.5")),
        ("bft", tuple(f"controllers.{name}={{}}" for name in CONTROLLERS)),
        ("bft", ("controllers.swa={}", "controllers.context_game={lengths: [5, 10]}", "controllers.ema={}")),
        ("bft", ("experts=4", "lam_max=10", "process_noise=false", "prior_scale=off")),
        ("matched", ("mixer=rfa", "data.time=timestamp", "mixing.time=true", "rotate=off", "undamped_heads=1")),
        ("bft", ("mixer=bayesian", "ks=[5,10]", "where=rating >= 3 and item_id != 7", "columns=['1', 'b: c']")),
    ],
)
def test_the_command_of_a_run_makes_its_config(events, tmp_path, monkeypatch, arm, settings):
    made = []

    def stop_there(config, *_):
        made.append(config)
        raise UserError("enough")

    monkeypatch.setattr("recbft_cli.train._train", stop_there)
    jobs = plan(
        [ArmSpec(arm, arm)], (3,), tmp_path, lambda spec, seed: spec.config(settings, dataset=str(events), seed=seed)
    )
    write_commands(jobs, tmp_path / "commands.txt")
    for line in (tmp_path / "commands.txt").read_text().splitlines():
        assert main(shlex.split(line)[1:]) == 2
    assert made == [job.config for job in jobs]


@pytest.mark.parametrize(
    ("settings", "seeds", "there"),
    [(["epochs=3"], [0], "training.epochs 2, and 3"), (["threads=2"], [0], "training.threads 1, and 2")],
)
def test_a_run_with_another_config_is_refused_by_its_field(events, trained, settings, seeds, there):
    (job,) = jobs_of(events, trained, "matched", seeds, settings)
    with pytest.raises(UserError, match=rf"matched-seed0 holds a run with {there} is asked for; give another --out"):
        status(job, data_of([job]))


def test_a_run_on_other_data_or_of_another_version_is_refused(events, copied, tmp_path):
    shorter = tmp_path / "tiny.parquet"
    pd.read_parquet(events)[:-1].to_parquet(shorter)
    with pytest.raises(UserError, match=r"a run on data with content \w{12}, and 'tiny' as loaded has \w{12}; give"):
        status(jobs_of(shorter, copied)[0], jobs_of(shorter, copied)[0].config.data.load())
    protocol = copied / "runs" / "matched-seed0" / "protocol.json"
    protocol.write_text(protocol.read_text().replace('"recbft_version": "', '"recbft_version": "9'))
    with pytest.raises(UserError, match=r"holds a run of recbft_version 9\S+, and this is"):
        status(jobs_of(events, copied)[0], jobs_of(events, copied)[0].config.data.load())


def test_a_folder_with_other_files_is_not_trained_over(events, tmp_path):
    taken = tmp_path / "runs" / "matched-seed0" / "thesis.txt"
    taken.parent.mkdir(parents=True)
    taken.write_text("mine")
    jobs = jobs_of(events, tmp_path)
    with pytest.raises(UserError, match="other files in it"):
        prepare([job.arm for job in jobs[:1]], [0], tmp_path, lambda arm, seed: jobs[0].config)
    assert taken.read_text() == "mine"


def test_of_warnings_from_one_place_the_first_and_their_number_are_told(monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", lambda *_: None)
    heard = worker._listen()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        for number in range(3):
            warnings.warn(f"lost {number}", stacklevel=1)
        warnings.warn("once", stacklevel=1)
    texts = [worker._with_count(*each) for each in heard.values()]
    assert texts == ["lost 0 (the first of 3 such warnings)", "once"]


def test_workers_that_say_nothing_are_reported_so(tmp_path):
    assert queue._last_line(tmp_path / "no.log") == "ended without a message"
    (tmp_path / "a.log").write_text("some\nerror: the disk is full\n\n")
    assert queue._last_line(tmp_path / "a.log") == "the disk is full"
