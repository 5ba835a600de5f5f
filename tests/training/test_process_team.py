"""A run of several processes takes the steps of one: the shares of a batch add up, and a whole run by torchrun."""

from __future__ import annotations

import atexit
import gc
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest
import torch

from recbft.api import Recommender
from recbft.datasets.planted import synthetic_dataset
from recbft.datasets.synth import SyntheticConfig
from recbft.errors import RunError, UserError
from recbft.evaluation import evaluate
from recbft.mixers import MIXERS
from recbft.models import MODELS
from recbft.models.backbone import Backbone
from recbft.runs import checkpoint
from recbft.runs.checkpoint import flatten
from recbft.runs.folder import RunFolder
from recbft.system.torchrun import this_process
from recbft.training import one_run, process_team
from recbft.training.build import build_model, training_batches
from recbft.training.many_seeds import train_seeds
from recbft.training.process_settings import run_settings
from recbft.training.process_team import join_team, share_of
from recbft.training.run_config import RunConfig, load_run_config
from tests.training.conftest import SMALL, assert_equal_runs
from tests.training.conftest import config as small_config

# Its controller reads running means after every step; the first epoch is not validated.
GAME = {"mixer": "regime", "epochs": 2, "eval_every": 2, "controllers": {"context_game": {"lengths": [2, 8]}}}
PLAIN = {  # without draws, so that the batch's shares add up to what one process works out
    "sasrec": {"dropout": 0.0, "clip_norm": 1.0, "epochs": 2},
    "bert4rec": {"dropout": 0.0, "attention_dropout": 0.0, "epochs": 2},
    "hstu": {"dropout": 0.0, "epochs": 2},
}


TASKS = Path("/proc/self/task")


def make_dataset():
    # More users than one process evaluates at once.
    return synthetic_dataset(SyntheticConfig(num_users=300, num_items=60, mean_length=7, seed=1))


def config(model="sasrec", arm="bft", **settings) -> RunConfig:
    return small_config(arm, model, **{"epochs": 3, **settings})


def threads() -> list[str]:
    """The names of this process's threads, Python's and others, where the system tells them."""
    return [(task / "comm").read_text().strip() for task in TASKS.iterdir()] if TASKS.is_dir() else []


def main(out: Path) -> None:
    """What each of the processes does that torchrun begins: several runs, one after another, and some refused."""
    dataset, rank = make_dataset(), this_process().rank
    atexit.register(lambda: (out / f"threads-{rank}.log").write_text("\n".join(threads())))  # after the group's end
    join_team(config().training).wait()
    (out / f"threads-{rank}-before.log").write_text("\n".join(threads()))
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":  # torchrun begins them again, with the store it has
        sys.exit(1)
    keep = one_run.Session.keep

    def watched(self, row, best):
        """Note what this process holds after an epoch."""
        keep(self, row, best)
        digest, tensors = hashlib.sha256(), {}
        plain = flatten([self.model.state_dict(), self.optimizer.state_dict()], "learned", tensors)
        plain = [plain, flatten(self.controllers.state_dict(), "controllers", tensors), self.state]
        for name, value in tensors.items():
            digest.update(name.encode() + value.numpy().tobytes())
        with open(out / f"states-{rank}.log", "a") as file:
            print(self.run.path.name, self.state.epoch, digest.hexdigest(), plain, file=file)

    with mock.patch.object(one_run.Session, "keep", watched):
        runs(out, dataset, rank)


def runs(out: Path, dataset, rank: int) -> None:
    """The runs of one process."""

    def refused(name, go):
        try:
            go()
        except (UserError, RunError, OSError, KeyError) as error:
            (out / f"{name}-{rank}.txt").write_text(str(error))

    for model, settings in PLAIN.items():
        one_run.train(config(model, **settings), out / model, dataset=dataset)
    one_run.train(config(), out / "whole", dataset=dataset)
    keep = one_run.Session.keep

    def stop(self, row, best):
        keep(self, row, best)
        if self.state.epoch == 2:
            raise KeyboardInterrupt

    with mock.patch.object(one_run.Session, "keep", stop):
        refused("interrupted", lambda: one_run.train(config(), out / "stopped", dataset=dataset))
        refused("for-one", lambda: one_run.train(config(), out / "left", dataset=dataset))
    one_run.resume(out / "stopped", dataset=dataset)
    one_run.train(load_run_config(model="pop", device="cpu"), out / "popularity", dataset=dataset)
    refused("taken", lambda: one_run.train(config(), out / "whole", dataset=dataset))
    refused("graphs", lambda: one_run.train(config(cuda_graphs=True), out / "new", dataset=dataset))
    refused("together", lambda: train_seeds([config()], [out / "new"], dataset=dataset))
    one_run.train(config(**GAME), out / "game", dataset=dataset)

    def full(self, rows):
        raise OSError(28, "No space left on device")

    def broken(model, dataset, view, users, **settings):
        if users.start > 0:  # in the second process's part
            raise KeyError("broken")
        return rank_users(model, dataset, view, users, **settings)

    rank_users = evaluate._rank
    gc.disable()  # what the failed runs leave behind is there at the end
    with mock.patch.object(RunFolder, "write_history", full):
        refused("full", lambda: one_run.train(config(), out / "full", dataset=dataset))
    with mock.patch.object(evaluate, "_rank", broken):
        refused("broken", lambda: one_run.train(config(), out / "broken", dataset=dataset))
    fitted = Recommender("sasrec", **{**SMALL, "epochs": 1}).fit(dataset)
    temporary = fitted.run.path
    if rank == 0:
        del fitted
        assert not temporary.exists()
    join_team(config().training).wait()
    if rank == 1:
        assert fitted.run.metrics["epochs"] == 1

    def leave(self, row, best):
        keep(self, row, best)
        if rank == 1:
            os._exit(0)

    with mock.patch.object(one_run.Session, "keep", leave):
        refused("alone", lambda: one_run.train(config(), out / "alone", dataset=dataset))


@pytest.fixture(scope="module")
def dataset():
    return make_dataset()


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The folder of what two processes have done."""
    folder = tmp_path_factory.mktemp("several")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--max-restarts", "1", __file__, folder],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        timeout=600,  # rather than wait for each other
    )
    assert done.returncode == 0, done.stderr
    return folder


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("model", "mixer"), [(model, mixer) for model in PLAIN for mixer in MODELS[model].mixers])
def test_the_shares_of_a_batch_add_up_to_its_gradient(model, mixer, dataset):
    arm = "matched" if MIXERS[mixer].precision == "none" else "bft"
    made = config(model, arm, mixer=mixer, batch_size=24, **PLAIN[model])
    with run_settings(made.training):
        whole = build_model(made, dataset).double()
    assert isinstance(whole, Backbone)
    whole.train()
    whole.set_ramp(1.0)
    batches = training_batches(made, dataset)
    assert batches is not None
    batch = next(batches.epoch(0))
    state = {name: value.clone() for name, value in whole.state_dict().items()}
    loss = whole.loss(batch)
    loss.backward()
    wanted = gradients(whole)
    largest = max(float(value.abs().max()) for value in wanted.values())
    for size in (2, 3, len(batch.items) + 1):  # the last of so many has a row without weight
        total = 0.0
        whole.zero_grad()
        for rank in range(size):
            whole.load_state_dict(state)
            share, weight = share_of(batch, rank, size)
            part = weight * whole.loss(share)
            part.backward()
            total += part.item()
        assert total == pytest.approx(loss.item(), rel=1e-12)
        for name, value in gradients(whole).items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-8, atol=1e-12 * largest, msg=f"{name}, of {size}")


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_each_history_is_in_one_share_as_it_stood(size, dataset):
    batches = training_batches(config(batch_size=40), dataset)
    batch = next(batches.epoch(0))
    found = []
    for rank in range(size):
        share, weight = share_of(batch, rank, size)
        assert share.items.shape[1] == batch.items.shape[1]
        held = histories(share)
        assert len(held) == len(share.last)
        if weight > 0:
            found += held
        else:
            assert rank >= len(batch.items)
    assert sorted(found) == sorted(histories(batch))


def histories(batch):
    """Each history's tokens: item, position, target."""
    flat = [x.flatten() for x in (batch.items, batch.position, batch.target)]
    held = []
    for number, last in enumerate(batch.last.tolist()):
        tokens = (batch.segment.flatten() == number).nonzero().flatten()
        assert tokens[-1] == last
        held.append(tuple(tuple(x[tokens].tolist()) for x in flat))
    return held


def test_a_share_without_a_target_has_no_weight(dataset):
    batch = next(training_batches(config(batch_size=40), dataset).epoch(0))
    target = batch.target.clone()
    target[1::2] = 0
    share, weight = share_of(batch._replace(target=target), 1, 2)
    assert weight == 0 and int((share.target > 0).sum()) > 0
    assert share_of(batch._replace(target=target), 0, 2)[1] == 1


@pytest.mark.parametrize("model", PLAIN)
def test_two_processes_without_draws_train_the_model_of_one(model, out, dataset, tmp_path):
    alone = one_run.train(config(model, **PLAIN[model]), tmp_path / "alone", dataset=dataset)
    two = RunFolder.open(out / model)
    losses = [[row["loss"] for row in run.read_history()] for run in (alone, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    weights = [checkpoint.load(run.checkpoint).model_state for run in (alone, two)]
    for name, value in weights[0].items():
        if "mean_" not in name:  # running means are of the first process's shares
            torch.testing.assert_close(weights[1][name], value, rtol=2e-2, atol=2e-3, msg=name)
    ranks = [pd.read_parquet(run.per_user_file) for run in (alone, two)]
    known = [table.drop(columns=["rank_unfiltered", "rank_filtered"]) for table in ranks]
    assert known[0].equals(known[1])
    assert (ranks[0].rank_unfiltered - ranks[1].rank_unfiltered).abs().mean() < 1
    assert two.environment["processes"] == 2 and "processes" not in alone.environment


def test_two_processes_repeat_a_run_bit_for_bit_and_go_on_exactly(out):
    assert_equal_runs(*(RunFolder.open(out / name) for name in ("whole", "stopped")))
    assert RunFolder.open(out / "popularity").is_finished


def test_all_processes_hold_the_same_after_every_epoch(out):
    one, two = ((out / f"states-{rank}.log").read_text().splitlines() for rank in (0, 1))
    assert one == two
    assert {line.split()[0] for line in one} >= {*PLAIN, "whole", "stopped", "game"}


def test_processes_draw_different_dropout(out):
    states = checkpoint.load(out / "whole" / "checkpoint").rng_state["processes"]
    assert len(states) == 2 and not torch.equal(states[0]["cpu"], states[1]["cpu"])


def test_what_the_first_process_refuses_all_refuse(out):
    said = {path.stem: path.read_text() for path in out.glob("*.txt")}
    for name, wanted in {
        "taken": f"{out}/whole holds a finished run; name another folder, or replace it with --overwrite",
        "graphs": "training.cuda_graphs",
        "together": "WORLD_SIZE is 2: one process trains several seeds together; begin it without torchrun",
        "broken": ("process 1 failed: KeyError: 'broken'", "'broken'"),
        "full": ("[Errno 28] No space left", "process 0 failed: OSError: [Errno 28] No space left on device"),
        "interrupted": "interrupted; the state after epoch 2 is saved, go on with: "
        f"torchrun --standalone --nproc-per-node 2 --no-python recbft train --resume {out}/stopped",
    }.items():
        for rank in (0, 1):
            assert said[f"{name}-{rank}"].startswith(wanted if isinstance(wanted, str) else wanted[rank])
    assert not (out / "new").exists()


def test_who_is_left_alone_says_how_to_go_on(out):
    assert not (out / "alone-1.txt").exists()
    assert (out / "alone-0.txt").read_text() == (
        "process 0 does not hear from another one, which has ended; the state after epoch 1 is saved, go on with: "
        f"torchrun --standalone --nproc-per-node 2 --no-python recbft train --resume {out}/alone"
    )


def test_a_process_that_ends_has_ended_the_threads_of_its_group(out):
    # One that lets go of a tensor while Python is taken down would abort the process.
    if not TASKS.is_dir() or torch.__version__ < "2.7":
        pytest.skip("this system or PyTorch (2.6) names no threads of gloo's")
    assert "gloo" in (out / "threads-0-before.log").read_text()
    assert not [name for name in (out / "threads-0.log").read_text().splitlines() if "gloo" in name]


def test_a_folder_that_is_taken_names_the_command_of_as_many_processes(out, dataset):
    with pytest.raises(UserError, match=r"go on with `torchrun --standalone --nproc-per-node 2 .* --resume .*left`"):
        one_run.train(config(), out / "left", dataset=dataset)


def test_as_many_processes_go_on_as_began(out, dataset):
    before = checkpoint.load(out / "left" / "checkpoint")
    with pytest.raises(
        UserError,
        match=r"left was trained by 2 processes, and one process would draw other numbers; go on with torchrun "
        r"--standalone --nproc-per-node 2 --no-python recbft train --resume .*left$",
    ):
        one_run.resume(out / "left", dataset=dataset)
    after = checkpoint.load(out / "left" / "checkpoint")
    assert before.state == after.state and not RunFolder.open(out / "left").is_finished


@pytest.mark.parametrize(
    ("gpu", "nccl", "backend"),
    [(True, True, "cpu:gloo,cuda:nccl"), (True, False, "gloo"), (False, True, "gloo")],
)
def test_a_gpu_without_nccl_is_served_by_gloo(gpu, nccl, backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(process_team.dist, "is_nccl_available", lambda: nccl)
    assert process_team._backend() == backend


if __name__ == "__main__":
    main(Path(sys.argv[1]))
