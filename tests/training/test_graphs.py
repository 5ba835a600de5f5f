"""Steps from CUDA graphs, with graphs that are played here: what was recorded is done again on the same memory."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from recbft.datasets import SyntheticConfig, synthetic_dataset
from recbft.datasets.batches import pack_histories
from recbft.errors import RunError, RunInterruptedError, UserError
from recbft.experiments.plan import parse_arms
from recbft.kernels import c_library
from recbft.training import graphs, one_run
from recbft.training.build import build_model, training_batches
from recbft.training.graphs import GraphedSteps, cut, pad, padded_loss
from recbft.training.run_config import load_run_config
from recbft.training.session import Session
from tests.training.conftest import StopAt, Stopped

SMALL = ["max_length=8", "hidden_size=8", "batch_size=12", "seed=3", "device=cpu"]
DATASET = synthetic_dataset(SyntheticConfig(num_users=45, num_items=80, mean_length=9))


def aliases(tree):
    return tree_map_only(torch.Tensor, torch.Tensor.detach, tree)  # which keep their shape when a tensor is squeezed


class Graph(TorchDispatchMode):
    """Every operation with the tensors that it read and wrote, and nothing of the Python between them."""

    def __init__(self):
        super().__init__()
        self.done, self.replays = [], 0

    def __torch_dispatch__(self, function, types, given=(), named=None):
        read = aliases((given, named or {}))
        found = function(*given, **(named or {}))
        self.done.append((function, read, aliases(found)))
        return found

    def replay(self):
        self.replays += 1
        if self.replays == 1:  # recording is no more than that on a GPU, and has done the work here
            return
        with torch._C._AutoDispatchBelowAutograd():
            for function, read, found in self.done:
                given, named = aliases(read)
                again = function(*given, **named)
                for kept, new in zip(tree_leaves(found), tree_leaves(again), strict=True):
                    if isinstance(kept, torch.Tensor) and kept.data_ptr() != new.data_ptr():
                        kept.copy_(new)


class Event:
    """Not before it is waited for has the host what was copied."""

    waited = False

    def synchronize(self):
        self.waited = True


@pytest.fixture
def made(monkeypatch):
    """The graphs that are made, on the CPU and by PyTorch's operations alone."""
    found = []
    monkeypatch.setattr(graphs, "STEPS_PER_DOUBLING", 1)  # few batches, fewer shapes

    @contextmanager
    def record(graph, pool, stream):
        found.append(graph)
        with graph:
            yield

    stream = SimpleNamespace(wait_stream=lambda other: None, record_event=Event)
    for name, stand_in in {
        "CUDAGraph": Graph,
        "graph": record,
        "graph_pool_handle": lambda: None,
        "Stream": lambda device: stream,
        "stream": nullcontext,
        "current_stream": lambda device: stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(graphs, "check_recordable", lambda model, device: None)
    monkeypatch.setattr(c_library, "missing", lambda: "played")
    return found


def config_of(arm, *settings, model="sasrec"):
    return parse_arms(arm)[0].config([*SMALL, *settings], model=model, dataset="synthetic")


@pytest.mark.parametrize(
    "model, arm, settings",
    [
        ("sasrec", "published", ()),
        ("sasrec", "matched", ("samples=prefixes",)),
        ("sasrec", "bft", ()),
        ("sasrec", "bft", ("jacobian=running_mean", "prior_scale=per_layer")),
        ("sasrec", "bft", ("prior_variance=running", "read_out=shrinkage")),
        ("sasrec", "bft", ("mixer=boosted",)),
        ("sasrec", "bft", ("mixer=twicing",)),
        ("bert4rec", "published", ("samples=windows",)),
        ("bert4rec", "bft", ()),
        ("hstu", "bft", ()),
        ("hstu", "matched", ("time_bias=true",)),
    ],
    ids=lambda part: part if isinstance(part, str) else "-".join(part),
)
def test_a_padded_batch_has_the_loss_and_the_gradients_of_its_own(model, arm, settings):
    config = config_of(arm, "dropout=0", *settings, model=model)
    batch = next(iter(training_batches(config, DATASET).epoch(0)))
    found = {}
    for way in ("its own", "padded"):
        net = build_model(config, DATASET).double().train()
        net.set_ramp(1.0)
        net.refresh()
        shape, numbers = pad(batch, 11)
        loss = net.loss(batch) if way == "its own" else padded_loss(net, cut(numbers, shape))
        loss.backward()
        found[way] = {"loss": loss} | {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        found[way] |= {f"kept {name}": buffer for name, buffer in net.named_buffers()}
    assert found["its own"].keys() == found["padded"].keys()
    for name, exact in found["its own"].items():
        torch.testing.assert_close(found["padded"][name], exact, rtol=1e-9, atol=1e-12, msg=name)


def test_what_is_added_is_padding_and_an_eighth_at_most():
    rng = np.random.default_rng(0)
    shapes = set()
    for _ in range(60):
        lengths = rng.integers(1, 9, rng.integers(100, 140))
        stop = np.cumsum(lengths + 1)
        start = stop - lengths - 1
        batch = pack_histories(rng.integers(1, 50, int(stop[-1])), start, stop - 1, with_targets=True)
        shape, numbers = pad(batch, 8)
        padded = cut(numbers, shape)
        N, rows = int((batch.target > 0).sum()), len(batch.items)
        assert N <= shape.positions <= N * 9 / 8 and rows <= shape.rows <= max(rows + 1, rows * 9 / 8)
        assert (padded.wanted[:N] == batch.target[batch.target > 0] - 1).all() and (padded.wanted[N:] == -1).all()
        assert (padded.batch.segment[rows:] == -1).all() and (padded.batch.items[rows:] == 0).all()
        last = padded.batch.last[: len(lengths)]
        assert (padded.batch.position.flatten()[last] == lengths - 1).all()
        shapes.add(shape)
    assert len(shapes) < 40


@pytest.mark.parametrize("model, arm", [("sasrec", "matched"), ("sasrec", "bft"), ("bert4rec", "bft"), ("hstu", "bft")])
def test_a_run_from_graphs_is_the_run_whose_padded_steps_are_launched(model, arm, made, monkeypatch, tmp_path):
    graphs = config_of(arm, "cuda_graphs=true", "epochs=4", "warmup_steps=5", "clip_norm=1", model=model)
    replayed = one_run.train(graphs, tmp_path / "replayed", dataset=DATASET)
    assert made and max(graph.replays for graph in made) > 3

    def launch(self, shape, numbers):
        return self._work(cut(numbers, shape))

    monkeypatch.setattr(GraphedSteps, "_take", launch)
    launched = one_run.train(graphs, tmp_path / "launched", dataset=DATASET)
    drop = ("seconds", "tokens_per_second")
    own, other = (
        [{key: row[key] for key in row if key not in drop} for row in run.read_history()]
        for run in (replayed, launched)
    )
    assert own == other and len(own) == 4
    assert replayed.metrics["test"] == launched.metrics["test"]


def test_a_loss_is_read_when_the_next_step_has_begun(made, monkeypatch, tmp_path):
    done, losses, begin, read = [], [], GraphedSteps.begin, graphs._Coming.tolist

    def begin_one(self, batch):
        done.append(("begin", len(losses)))
        losses.append(begin(self, batch))
        return losses[-1]

    def read_one(self):
        [number] = [n for n, loss in enumerate(losses) if loss is self]
        done.append(("read", number))
        value = read(self)
        assert self.arrived.waited
        return value

    monkeypatch.setattr(GraphedSteps, "begin", begin_one)
    monkeypatch.setattr(graphs._Coming, "tolist", read_one)
    one_run.train(
        config_of("bft", "cuda_graphs=true", "samples=last", "epochs=2", "warmup_steps=0"),
        tmp_path / "run",
        dataset=DATASET,
    )
    steps = -(-len(DATASET.user_ids) // 12)
    expected = []
    for first in (0, steps):
        expected.append(("begin", first))
        for step in range(first, first + steps - 1):
            expected += [("begin", step + 1), ("read", step)]
        expected.append(("read", first + steps - 1))
    assert done == expected


def test_a_loss_that_is_not_finite_is_told_of_its_own_step(made, monkeypatch, tmp_path):
    read, seen = graphs._Coming.tolist, []

    def broken_at_the_third(self):
        seen.append(self)
        return [float("nan")] if len(seen) == 3 else read(self)

    monkeypatch.setattr(graphs._Coming, "tolist", broken_at_the_third)
    with pytest.raises(RunError, match=r"the loss is nan at step 3 \(epoch 1\), which is not saved"):
        one_run.train(config_of("bft", "cuda_graphs=true", "warmup_steps=0"), tmp_path / "run", dataset=DATASET)


def test_a_run_from_graphs_that_was_stopped_goes_on_as_if_it_had_not_been(made, monkeypatch, tmp_path):
    config = config_of("bft", "cuda_graphs=true", "epochs=4", "warmup_steps=5")
    whole = one_run.train(config, tmp_path / "whole", dataset=DATASET)
    with pytest.raises(Stopped):
        one_run.train(config, tmp_path / "stopped", dataset=DATASET, progress=StopAt(2))
    resumed = one_run.resume(tmp_path / "stopped", dataset=DATASET)
    assert [row["loss"] for row in resumed.read_history()] == [row["loss"] for row in whole.read_history()]
    assert resumed.metrics["test"] == whole.metrics["test"]


def test_what_cannot_be_recorded_ends_the_run_in_one_line(made, monkeypatch, tmp_path):
    def refuse(*arguments, **named):
        raise RuntimeError("operation not permitted when stream is capturing\nCompile with ...")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    config = config_of("bft", "cuda_graphs=true", "epochs=4", "warmup_steps=2")
    with pytest.raises(RunError, match=r"\(operation not permitted.*capturing\); leave out training.cuda_graphs$"):
        one_run.train(config, tmp_path / "run", dataset=DATASET)


@pytest.mark.parametrize(
    "broken_by, error, message",
    [
        (RuntimeError("operation not permitted"), RunError, r"cannot be a CUDA graph \(operation not permitted\)"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
            RunError,
            r"^out of memory \(CUDA out of memory. Tried to allocate 2.00 GiB\); lower",
        ),
        (KeyboardInterrupt(), RunInterruptedError, "^interrupted"),
    ],
    ids=lambda part: type(part).__name__ if isinstance(part, BaseException) else "",
)
def test_what_broke_a_recording_is_told_and_not_that_it_could_not_be_ended(
    broken_by, error, message, made, monkeypatch, tmp_path
):
    record = torch.cuda.graph

    @contextmanager
    def ends_badly(graph, pool, stream):
        try:
            with record(graph, pool, stream):
                monkeypatch.setattr(GraphedSteps, "_work", lambda self, padded: fail())
                yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    def fail():
        raise broken_by

    monkeypatch.setattr(torch.cuda, "graph", ends_badly)
    config = config_of("bft", "cuda_graphs=true", "epochs=4", "warmup_steps=2")
    with pytest.raises(error, match=message):
        one_run.train(config, tmp_path / "run", dataset=DATASET)


@pytest.mark.parametrize(
    "settings, reason",
    [
        (["controllers.ema={}"], "controllers.ema"),
        (["mixer=rope"], "mixer 'rope'"),
        (["mixer=regime"], "mixer 'regime'"),
        (["loss=bce"], "loss 'bce'"),
        (["moe.experts=4"], "experts"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_cannot_be_repeated_is_refused(settings, reason):
    with pytest.raises(UserError, match=f"training.cuda_graphs repeats .* cannot with {reason}.*; leave it out"):
        load_run_config(None, [*settings, "training.cuda_graphs=true"], model="sasrec", arm="bft")


def test_a_cpu_has_no_graphs(tmp_path):
    config = config_of("bft", "cuda_graphs=true", "device=cpu")
    with pytest.raises(UserError, match=r"cuda_graphs is true, and the run is on cpu"):
        one_run.train(config, tmp_path / "run", dataset=DATASET)
    assert not (tmp_path / "run").exists()


def test_models_of_other_kinds_are_refused():
    with pytest.raises(UserError, match="models of kind Linear"):
        graphs.check_recordable(torch.nn.Linear(1, 1), torch.device("cuda"))


@pytest.mark.parametrize(
    "settings, device, several, told",
    [
        ((), "cuda", False, True),
        ((), "cpu", False, False),
        ((), "cuda", True, False),
        (("cuda_graphs=true",), "cuda", False, False),
        (("cuda_graphs=false",), "cuda", False, False),
        (("mixer=bayesian",), "cuda", False, False),
    ],
)
def test_a_run_on_a_gpu_is_told_of_graphs_that_it_could_have(settings, device, several, told):
    session = SimpleNamespace(
        config=config_of("bft", *settings),
        device=torch.device(device),
        team=SimpleNamespace(several=several),
        state=SimpleNamespace(epoch=0),
    )
    assert Session._would_gain_from_graphs(session) == told
    session.state.epoch = 1  # a run that is gone on with takes no other settings
    assert not Session._would_gain_from_graphs(session)
