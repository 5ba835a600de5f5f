"""Work in another thread: batches made ahead, and states written while training goes on."""

from __future__ import annotations

import errno
import signal
import threading

import pytest
import torch

from recbft.errors import RunError, RunInterruptedError
from recbft.runs import checkpoint
from recbft.runs.folder import RunFolder
from recbft.system.files import explained
from recbft.training import one_run, session
from recbft.training.many_seeds import prefetched
from recbft.training.session import Background
from tests.training.conftest import StopAt, assert_equal_runs, config
from tests.training.test_many_seeds import together

# What may take long where something is wrong.
PATIENCE = 30


def test_items_come_in_order():
    assert list(prefetched(iter(range(100)))) == list(range(100))
    assert list(prefetched(iter([]))) == []
    assert list(prefetched(iter([None, 0, None]))) == [None, 0, None]


def test_the_next_one_is_made_while_one_is_worked_on():
    made = [threading.Event() for _ in range(3)]

    def items():
        for number, event in enumerate(made):
            event.set()
            yield number

    given = prefetched(items())
    assert next(given) == 0
    assert made[1].wait(30), "nothing is made ahead"
    assert not made[2].is_set()
    assert list(given) == [1, 2]


def test_what_making_one_raises_comes_where_it_would_be_given():
    def items():
        yield 1
        raise ValueError("no more")

    given = prefetched(items())
    assert next(given) == 1
    with pytest.raises(ValueError, match="no more"):
        next(given)


def test_given_up_early_it_ends_its_thread():
    before = threading.active_count()
    given = prefetched(iter(range(10)))
    next(given)
    given.close()
    assert threading.active_count() == before


@pytest.fixture
def in_background(monkeypatch):
    """Runs on a CPU write their states as those on a GPU do."""
    monkeypatch.setattr(session, "writes_in_background", lambda device: True)


def test_pieces_are_done_in_order_by_one_other_thread():
    done, worker = [], Background()
    for n in range(5):
        worker.do(lambda n=n: done.append((n, threading.get_ident())))
    worker.wait()
    assert [n for n, _ in done] == list(range(5))
    threads = {thread for _, thread in done}
    assert len(threads) == 1 and threading.get_ident() not in threads
    worker.wait()


def test_without_a_thread_a_piece_is_done_at_once_and_raises_there():
    done, worker = [], Background(in_thread=False)
    worker.do(lambda: done.append(threading.get_ident()))
    assert done == [threading.get_ident()]
    with pytest.raises(ZeroDivisionError):
        worker.do(lambda: 1 // 0)
    worker.wait()


@pytest.mark.parametrize("asks", ["do", "wait"])
def test_what_a_piece_raises_is_raised_once_at_the_next_call(asks):
    worker = Background()
    worker.do(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        worker.do(lambda: None) if asks == "do" else worker.wait()
    worker.do(lambda: None)
    worker.wait()


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals of POSIX")
def test_an_interrupt_while_waiting_loses_nothing():
    worker, go_on, done = Background(), threading.Event(), []
    worker.do(lambda: done.append(go_on.wait(PATIENCE)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs with &
    try:
        threading.Timer(0.2, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            worker.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not done
    go_on.set()
    worker.wait()
    assert done == [True]


def test_a_snapshot_stays_what_it_was():
    weights = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(weights.parameters())
    weights(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = checkpoint.TrainState(
        epoch=1, step=1, seed=0, dataset="d", content_hash="c", vocabulary_hash="v", config_hash="h"
    )
    taken = checkpoint.snapshot(
        model_state=weights.state_dict(),
        optimizer_state=optimizer.state_dict(),
        rng_state=torch.get_rng_state(),
        state=state,
        best_model_state=weights.state_dict(),
    )
    before = {name: tensor.clone() for name, tensor in taken.tensors.items()}
    best = {name: tensor.clone() for name, tensor in taken.best.items()}
    optimizer.step()
    state.epoch = 2
    assert taken.state["epoch"] == 1 and any("step" in name for name in before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in taken.tensors.items())
    assert all(torch.equal(tensor, best[name]) for name, tensor in taken.best.items())


def test_a_run_is_the_same_however_its_states_are_written(in_background, whole, dataset, tmp_path):
    assert_equal_runs(whole, one_run.train(config(), tmp_path / "behind", dataset=dataset))
    with pytest.raises(RunError, match="the state after epoch 2 is saved"):
        one_run.train(config(), tmp_path / "cut", dataset=dataset, progress=StopAt(2, 1, KeyboardInterrupt))
    assert_equal_runs(whole, one_run.resume(tmp_path / "cut", dataset=dataset))


def test_training_goes_on_while_a_state_is_written(in_background, dataset, tmp_path, monkeypatch):
    write, training = checkpoint.write, threading.Event()

    class TellsWhen(StopAt):
        def batch(self, done, total, loss, tokens):
            if self.left == 0:  # of its epochs
                training.set()

    def late(folder, taken):
        if taken.state["epoch"] == 1:
            assert training.wait(PATIENCE), "training waits for the disk"
        write(folder, taken)

    monkeypatch.setattr(checkpoint, "write", late)
    run = one_run.train(config(epochs=2), tmp_path / "run", dataset=dataset, progress=TellsWhen(1, steps=10**9))
    assert run.is_finished and training.is_set()


@pytest.mark.parametrize("epoch", [0, 4])
def test_a_full_disk_is_told_and_leaves_the_state_before(epoch, in_background, whole, dataset, tmp_path, monkeypatch):
    write = checkpoint.write

    def full(folder, taken):
        if taken.state["epoch"] == epoch:
            with explained(folder / "state.json"):
                raise OSError(errno.ENOSPC, "No space left on device")
        write(folder, taken)

    with monkeypatch.context() as patched, pytest.raises(RunError, match="no space left while writing"):
        patched.setattr(checkpoint, "write", full)
        one_run.train(config(), tmp_path / "run", dataset=dataset)
    run = RunFolder.open(tmp_path / "run")
    assert not run.is_finished
    if epoch:
        assert checkpoint.load_state(run.checkpoint).epoch == epoch - 1
        assert_equal_runs(whole, one_run.resume(run.path, dataset=dataset))


def test_seeds_together_are_the_same_however_their_states_are_written(dataset, tmp_path, monkeypatch):
    expected = together(config(threads=1), tmp_path / "expected", dataset, (0, 1))
    monkeypatch.setattr(session, "writes_in_background", lambda device: True)
    with pytest.raises(RunInterruptedError, match="interrupted; every run's last full epoch is saved, the same call"):
        listeners = [StopAt(2, 1, KeyboardInterrupt) for _ in expected]
        together(config(threads=1), tmp_path / "found", dataset, (0, 1), progresses=listeners)
    saved = [checkpoint.load_state(tmp_path / f"found/seed{run.protocol['seed']}/checkpoint") for run in expected]
    assert {state.epoch for state in saved} == {2}
    for one, two in zip(expected, together(config(threads=1), tmp_path / "found", dataset, (0, 1)), strict=True):
        assert_equal_runs(one, two)
