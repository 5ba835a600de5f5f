"""Runs that differ in their seed alone, trained together in one process.

The models are trained as stacks (``models.stacked``), one forward for all seeds of a stack. Every run keeps a folder
of its own, the same as if it had been trained alone: saved after every epoch, resumable one by one or together, stopped
early by its own validation. A seed that has stopped leaves its stack, the rest goes on.

A run equals one trained alone to rounding, not bit for bit: the size of its stack decides in which order numbers are
added. So do runs that go on after an interrupt (3e-6): those that it left an epoch behind catch up in a smaller stack.

On a CPU a stack holds as many seeds as fit the cache; each of the threads that a run would have trains a stack of its
own, one operation at a time, so no thread ever waits for another within an operation. On a GPU it holds as many as its
memory may, and dropout is drawn there by each run's own generator, where a run alone leaves it to PyTorch.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import nn

from recbft.config.fields import to_dict
from recbft.datasets import Dataset
from recbft.datasets.batches import Batch
from recbft.datasets.side_by_side import SideBySide, lay_side_by_side
from recbft.errors import RunError, RunInterruptedError, UserError
from recbft.models.backbone import Backbone
from recbft.models.stacked import Stacked
from recbft.runs.folder import RunFolder
from recbft.system.torch_state import set_aside
from recbft.system.torchrun import refuse_several
from recbft.training.build import loaded
from recbft.training.bundle import own_config, refuse_other_data, refuse_other_settings
from recbft.training.loop import Row, RunningEpoch, Targets, close_epoch, is_over, targets_of, train_epoch
from recbft.training.one_run import begin, go_on
from recbft.training.optimiser import make_optimizer
from recbft.training.process_settings import OwnRandomNumbers, memory_explained, run_settings, work_for_run
from recbft.training.progress import Progress, Silent
from recbft.training.run_config import RunConfig
from recbft.training.session import Session
from recbft.training.trackers import check_trackers

T = TypeVar("T")
STACK_TOKENS = 10_000  # per step and stack: beyond that, fewer operations save nothing more
CLOSING_ON_GPU = 4  # runs at once, so that what their validations hold at a time stays within gigabytes
GPU_STACK_TOKENS = 400_000  # so that what a step keeps for its backward pass takes gigabytes in single figures
_WITHOUT_EFFECT = {  # settings of training that have no effect on such runs, and why
    "autocast": "whose products are float32",
    "cuda_graphs": "whose kernels are large enough to be launched one by one",
}


def train_seeds(
    configs: Sequence[RunConfig],
    paths: Sequence[str | Path],
    *,
    dataset: Dataset | None = None,
    progresses: Sequence[Progress] | None = None,
) -> list[RunFolder]:
    """Train runs that differ in their seed alone; finished ones are kept, and those that were stopped go on.

    Args:
        configs: one per seed.
        paths: the folder of each run.
        dataset: data that is loaded already; otherwise the configs say which.
        progresses: one listener per run, called from several threads.

    Returns:
        The finished runs, in the order of ``configs``.

    Raises:
        UserError: the configs differ in more than the seed, the model cannot be stacked, a folder is taken by another
            run, data and config do not fit, or another process trains one of the runs.
        RunError: training was interrupted, or some runs failed, the others being finished.
    """
    refuse_several("one process trains several seeds together")
    check_together(configs)
    first = configs[0]
    check_trackers(first.training)
    data, dataset = loaded(first.data, dataset)
    configs = [replace(config, data=data) for config in configs]
    runs = [_existing(config, path, dataset) for config, path in zip(configs, paths, strict=True)]
    with ExitStack() as held, memory_explained(first), run_settings(first.training) as device:
        # Before a folder is made; without epochs nothing is trained together.
        check_stackable(first, with_features=dataset.features is not None and first.training.epochs > 0)
        remarks = {"trained_together": [config.seed for config in configs]}
        sessions: dict[int, Session] = {}
        # Runs that stand there go first: what is refused of them is refused before a folder is made.
        for n in sorted(range(len(runs)), key=lambda n: runs[n] is None):
            config, run = configs[n], runs[n]
            listener = Silent() if progresses is None else progresses[n]
            generator = torch.Generator(device).manual_seed(config.seed)
            if run is None:
                made = begin(config, paths[n], dataset, device, listener, generator=generator, remarks=remarks)
                sessions[n] = made
            elif not run.is_finished:
                sessions[n] = go_on(run, own_config(run, to_train=True), dataset, device, listener, generator=generator)
            if n in sessions:
                held.enter_context(sessions[n].locked())
        workers, closing = _threads_on(device)
        if device.type == "cpu":
            torch.set_num_threads(1)
        _Group([sessions[n] for n in sorted(sessions)], workers, closing).finish()
    return [RunFolder.open(path) for path in paths]


def check_together(configs: Sequence[RunConfig]) -> None:
    """Refuse runs that cannot share a stack by their settings."""
    if not configs:
        raise UserError("there are no runs to train; give at least one seed")
    if configs[0].controllers.named:
        raise UserError(
            f"controllers.{configs[0].controllers.named[0]} steers one run, and these are trained together; leave it "
            "out, or train the seeds one by one"
        )
    for key, why in _WITHOUT_EFFECT.items():
        if getattr(configs[0].training, key):
            raise UserError(
                f"training.{key} has no effect on seeds that are trained together, {why}; leave it out, or train the "
                "seeds one by one"
            )
    seeds = [config.seed for config in configs]
    for config in configs:
        if replace(config, seed=seeds[0]) != configs[0]:
            raise UserError(f"seeds {seeds[0]} and {config.seed} differ in more than the seed; train them one by one")
        if seeds.count(config.seed) > 1:
            raise UserError(f"seed {config.seed} is given twice; give each once")


def check_stackable(config: RunConfig, *, with_features: bool) -> None:
    """Refuse a model whose seeds cannot share a stack, before there are data."""
    with set_aside(), OwnRandomNumbers():
        reads = with_features and config.content_config is not None
        model = config.build(torch.tensor([0, 1, 1]), torch.eye(3) if reads else None)
    Stacked([_backbone(model)], [torch.Generator()])


def _existing(config: RunConfig, path: str | Path, dataset: Dataset) -> RunFolder | None:
    """The run that stands in a folder already, if it is this one, wherever its data were read from."""
    if not (Path(path) / "config.yaml").is_file():
        RunFolder.refuse_taken(path)
        return None
    run = RunFolder.open(path)
    remedy = "give another folder, or remove that one"
    refuse_other_settings(run.protocol["config"], to_dict(config), f"{run.path} holds a run with", remedy)
    refuse_other_data(run.protocol, dataset, f"{run.path} holds a run", remedy)
    return run


def _threads_on(device: torch.device) -> tuple[int, int]:
    """How many train a stack each, and how many of its runs are validated and saved at once."""
    return (torch.get_num_threads(), 1) if device.type == "cpu" else (1, CLOSING_ON_GPU)


class _Group:
    """All runs that are not finished, some of them in a stack at any time."""

    def __init__(self, sessions: Sequence[Session], workers: int, closing: int) -> None:
        """``workers`` threads train a stack each, whose runs they validate and save, ``closing`` of them at once."""
        self.sessions, self.workers, self.closing = list(sessions), workers, closing
        self.failed: dict[int, RunError] = {}  # by seed
        self.stop = threading.Event()
        self.stacks: list[_Stack] = []
        self.has_closed = False  # an epoch of a stack

    def finish(self) -> None:
        """Train, evaluate and close them all."""
        for session in self.sessions:
            session.make_resumable()
            session.progress.start(session.config.training.epochs, session.state.epoch + 1)
        try:
            with self._threads(self.workers) as pool:
                try:
                    self._rounds(pool)
                except BaseException:
                    self.stop.set()  # the other threads end within a step
                    raise
        except KeyboardInterrupt:
            raise RunInterruptedError(
                "interrupted; every run's last full epoch is saved, the same call goes on from there"
            ) from None
        finally:
            for session in self.sessions:
                session.progress.stop()
        if self.failed:
            seed, error = next(iter(self.failed.items()))
            others = len(self.failed) - 1
            also = f"; so did {others} other {'run' if others == 1 else 'runs'}" if others else ""
            raise RunError(f"the run of seed {seed} failed: {error}{also}")

    def _threads(self, number: int) -> ThreadPoolExecutor:
        """That work for these runs, on the GPU that is current here."""
        gpu = torch.cuda.current_device() if self.sessions and self.sessions[0].device.type == "cuda" else None
        return ThreadPoolExecutor(number, initializer=work_for_run, initargs=(gpu,))

    def _rounds(self, pool: ThreadPoolExecutor) -> None:
        """An epoch of every run at a time; those that were stopped earlier than others catch up first."""
        over = [session for session in self.sessions if is_over(session.config.training, session.state)]
        list(pool.map(self._close_epoch, over, [None] * len(over)))
        while active := [s for s in self.sessions if not self._is_done(s)]:
            epoch = min(session.state.epoch for session in active)
            self._restack([session for session in active if session.state.epoch == epoch])
            list(pool.map(self._epoch, self.stacks))

    def _is_done(self, session: Session) -> bool:
        return session.run.is_finished or session.config.seed in self.failed

    def _restack(self, sessions: list[Session]) -> None:
        """Spread the runs evenly over stacks, unless they are stacked already."""
        if sessions == [session for stack in self.stacks for session in stack.sessions]:
            return
        batches = sessions[0].batches
        assert batches is not None
        tokens = STACK_TOKENS if sessions[0].device.type == "cpu" else GPU_STACK_TOKENS
        most = max(1, tokens * batches.num_batches // max(1, batches.num_tokens))
        pieces = -(-len(sessions) // most)
        pieces = min(len(sessions), -(-pieces // self.workers) * self.workers)
        bounds = [len(sessions) * piece // pieces for piece in range(pieces + 1)]
        self.stacks = [_Stack(sessions[a:b]) for a, b in itertools.pairwise(bounds)]

    def _epoch(self, stack: _Stack) -> None:
        """Train one epoch of a stack, then validate and save its runs."""
        trained = list(zip(stack.sessions, stack.train_epoch(self.stop.is_set), strict=True))
        # The first of all compiles what it is the first to call.
        alone = len(trained) if self.closing == 1 else 0 if self.has_closed else 1
        for session, row in trained[:alone]:
            self._close_epoch(session, row)
        if rest := trained[alone:]:
            with self._threads(self.closing) as closers:
                list(closers.map(self._close_epoch, *zip(*rest, strict=True)))
        self.has_closed = True

    def _close_epoch(self, session: Session, row: Row | RunError | None) -> None:
        """Validate and save a run, unless that is done, and evaluate it if it is over."""
        if self.stop.is_set():
            return
        try:
            if isinstance(row, RunError):
                raise row
            if row is not None:
                close_epoch(
                    row,
                    session.model,
                    session.config.training,
                    session.state,
                    validate=session.validate,
                    keep=session.keep,
                    progress=session.progress,
                )
            if is_over(session.config.training, session.state):
                session.report()
        except RunError as error:
            self.failed[session.config.seed] = error


class _SideBySide(NamedTuple):
    """A batch of every run of a stack, and all of them laid side by side."""

    each: tuple[Batch, ...]
    laid: SideBySide


class _Stack:
    """Runs with as many epochs behind them, as one model with one optimiser, which takes their ``Steps``."""

    ahead: ClassVar[int] = 0

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.sessions = list(sessions)
        self.config = sessions[0].config.training
        models = [_backbone(session.model) for session in sessions]
        self.model = Stacked(models, [session.generator for session in sessions])
        self.optimizer = make_optimizer(self.model, self.config)
        named = [dict(model.named_parameters()) for model in models]
        for name, parameter in self.model.named_parameters():
            self._join_moments(parameter, [own[name] for own in named])

    def train_epoch(self, is_stopped: Callable[[], bool]) -> list[Row | RunError]:
        """One pass over the users of every run: the row of ``history.csv`` that each earns, or why it failed."""
        own = [session.batches for session in self.sessions if session.batches is not None]
        epochs = [batches.epoch(s.state.epoch) for batches, s in zip(own, self.sessions, strict=True)]
        coming: Iterator[_SideBySide]
        coming = (_SideBySide(batches, lay_side_by_side(batches)) for batches in zip(*epochs, strict=True))
        if self.sessions[0].device.type != "cpu":  # else the threads have stacks of their own
            coming = prefetched(coming)
        runs = [RunningEpoch(session.state, session.progress) for session in self.sessions]
        return train_epoch(runs, coming, own[0].num_batches, self.config, self, is_stopped=is_stopped)

    def begin_epoch(self) -> None:
        self.model.body.train()
        self.model.refresh()

    def targets(self, batch: _SideBySide) -> list[Targets]:
        return [targets_of(each) for each in batch.each]

    def begin(self, batch: _SideBySide) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        losses = self.model.losses(batch.laid)
        losses.sum().backward()
        return losses.detach()

    def end(self) -> None:
        self._clip()
        self.optimizer.step()

    def _clip(self) -> None:
        """Clip each run's gradients by its own norm."""
        if self.config.clip_norm is None:
            return
        for n, session in enumerate(self.sessions):
            for name, parameter in session.model.named_parameters():
                stacked = self.model.parameters[name].grad
                parameter.grad = None if stacked is None else stacked[n]
            nn.utils.clip_grad_norm_(session.model.parameters(), self.config.clip_norm)

    def _join_moments(self, parameter: nn.Parameter, each: Sequence[nn.Parameter]) -> None:
        """Stack what the runs' optimisers remember of a parameter, and leave them views of it."""
        memories = [session.optimizer.state for session in self.sessions if session.optimizer is not None]
        known = [memory.get(own) for memory, own in zip(memories, each, strict=True)]
        moments = {
            name: torch.stack(
                [torch.zeros_like(own) if m is None else m[name] for m, own in zip(known, each, strict=True)]
            )
            for name in ("exp_avg", "exp_avg_sq")
        }
        step = parameter.new_zeros((), dtype=torch.float32) if known[0] is None else known[0]["step"].clone()
        self.optimizer.state[parameter] = {"step": step, **moments}
        for n, (memory, own) in enumerate(zip(memories, each, strict=True)):
            memory[own] = {"step": step, **{name: moment[n] for name, moment in moments.items()}}


def prefetched(items: Iterator[T]) -> Iterator[T]:
    """The same items, each made by another thread while the caller works on the one before it.

    What making one raises is raised where it would be given. Given up early, it waits for the one being made.
    """
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as maker:
        coming = maker.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = maker.submit(next, items, end)
            yield item  # type: ignore[misc]


def _backbone(model: nn.Module) -> Backbone:
    if not isinstance(model, Backbone):
        raise UserError(f"a model of kind {type(model).__name__} is not trained; train its seeds one by one")
    return model
