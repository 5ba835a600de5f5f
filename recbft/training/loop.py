"""The training loop, for one seed and for many: forward, loss, backward, clip, step, log, validate, save."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from recbft.datasets.batches import Batch, EpochBatches
from recbft.errors import RunError
from recbft.models.contract import TrainableModel
from recbft.runs.checkpoint import TrainState
from recbft.training.controllers import Controllers, Moment
from recbft.training.graphs import GraphedSteps
from recbft.training.optimiser import clip_gradients, ramp_steps, warmup_ramp
from recbft.training.process_settings import autocast
from recbft.training.process_team import ALONE, SharedLoss, Team
from recbft.training.progress import Progress
from recbft.training.run_config import TrainingConfig

Row = dict[str, Any]
UNSTEERED = Controllers({})


def fit(
    model: TrainableModel,
    optimizer: torch.optim.Optimizer,
    batches: EpochBatches,
    config: TrainingConfig,
    state: TrainState,
    *,
    validate: Callable[[], dict[str, float]],
    keep: Callable[[Row, bool], None],
    progress: Progress,
    controllers: Controllers = UNSTEERED,
    graphs: GraphedSteps | None = None,
    team: Team = ALONE,
) -> None:
    """Train until the last epoch or until validation has stopped improving, going on from ``state``.

    Args:
        state: brought up to date after every epoch, before ``keep`` is called.
        validate: metrics of the model as it is, by name.
        keep: saves the epoch's row, and the weights as the best ones where the second argument is True.
        controllers: steer the steps of an epoch.
        graphs: take the steps after the warm-up, which no controller can steer then.
        team: the processes that train this model, each in a call of its own.

    Raises:
        RunError: the loss is not finite, or a weight is not after an epoch, which is not saved then.
    """
    if is_over(config, state):  # it was stopped after its last epoch
        return
    steps = ModelSteps(model, optimizer, config, SharedLoss(model, team) if team.several else None)

    def now() -> Moment:
        return moment_of(model, optimizer, batches, config, state)

    progress.start(config.epochs, state.epoch + 1)
    try:
        while not is_over(config, state):
            (row,) = train_epoch(
                [RunningEpoch(state, progress)],
                batches.epoch(state.epoch),
                batches.num_batches,
                config,
                steps,
                graphs=graphs,
                controllers=controllers,
                now=now,
            )
            if isinstance(row, RunError):
                raise row
            close_epoch(row, model, config, state, validate=validate, keep=keep, progress=progress)
    finally:
        progress.stop()


def is_over(config: TrainingConfig, state: TrainState) -> bool:
    """Whether no epoch is left, or validation has stopped improving."""
    return state.epoch >= config.epochs or state.bad_epochs >= config.patience


def close_epoch(
    row: Row,
    model: torch.nn.Module,
    config: TrainingConfig,
    state: TrainState,
    *,
    validate: Callable[[], dict[str, float]],
    keep: Callable[[Row, bool], None],
    progress: Progress,
) -> None:
    """Validate where it is due, judge, save and tell; ``state`` counts the epoch already. Arguments as in ``fit``."""
    check_weights(model, config, state)
    improved = False
    if state.epoch % config.eval_every == 0 or state.epoch == config.epochs:
        metrics = validate()
        value = metrics[config.valid_metric]
        improved = state.best_metric is None or value > state.best_metric
        if improved:
            state.best_metric, state.best_epoch, state.bad_epochs = value, state.epoch, 0
        else:
            state.bad_epochs += 1
        row |= {f"valid_{name}": metric for name, metric in metrics.items()}
    keep(row, improved)
    progress.epoch(row)
    if is_over(config, state) and state.epoch < config.epochs:
        progress.note(
            f"stopped after epoch {state.epoch}: {config.valid_metric} has not risen for {state.bad_epochs} "
            f"validation{'s' * (state.bad_epochs != 1)}, the best was epoch {state.best_epoch}"
        )


class Targets(NamedTuple):
    """What a run learns of a batch."""

    number: int
    weight: float  # of all together; their number where all count alike


@dataclass
class RunningEpoch:
    """The epoch of one run: where the run stands, who is told, and what it has learned from so far."""

    state: TrainState
    progress: Progress
    tokens: int = 0
    weight: float = 0.0  # of all tokens
    total: float = 0.0  # of their losses, times their weights
    failure: RunError | None = None

    def learned(self, loss: float, targets: Targets) -> None:
        self.state.step += 1
        self.tokens, self.weight = self.tokens + targets.number, self.weight + targets.weight
        self.total += loss * targets.weight

    @property
    def loss(self) -> float:
        """The mean so far."""
        return self.total / self.weight if self.weight else 0.0

    def row(self, seconds: float) -> Row | RunError:
        """Count the epoch; the row of ``history.csv`` that it earns, or why it failed."""
        if self.failure is not None:
            return self.failure
        self.state.epoch += 1
        return {
            "epoch": self.state.epoch,
            "loss": self.loss,
            "seconds": round(seconds, 4),
            "tokens_per_second": round(self.tokens / seconds),
        }


class Steps(Protocol):
    """How one model, or a stack of those of several runs, takes the steps of an epoch."""

    ahead: ClassVar[int]  # steps that may begin before the losses of one are read
    model: Any

    def begin_epoch(self) -> None:
        """Have the model learn, from its weights as they are."""

    def targets(self, batch: Any) -> list[Targets]:
        """How much each run has to learn of a batch."""

    def begin(self, batch: Any) -> Any:
        """The losses of a batch, whose ``tolist`` reads one per run, and, for ``end``, their gradients."""

    def end(self) -> None:
        """Change the weights."""


def train_epoch(
    runs: Sequence[RunningEpoch],
    batches: Iterator[Any],
    num_batches: int,
    config: TrainingConfig,
    plain: Steps,
    *,
    graphs: GraphedSteps | None = None,
    controllers: Controllers = UNSTEERED,
    now: Callable[[], Any] = lambda: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[Row | RunError]:
    """One pass over the users, of one run or of several that learn side by side: what each earns by it.

    Args:
        runs: with as many steps behind them.
        batches: one per step, as ``plain`` takes it; the numbers of a run that failed spoil no other run's.
        graphs: takes the steps after the warm-up.
        now: where training stands, for controllers.
        is_stopped: whether another thread has broken off.
    """
    began, done = time.perf_counter(), 0
    under_way: deque[tuple[Any, list[Targets]]] = deque()  # of each step whose losses are not read: those, its targets
    plain.begin_epoch()
    controllers.on_epoch_start(now())
    batch = next(batches, None)
    while batch is not None:
        if is_stopped():
            raise RunError("another run broke off")
        batch = controllers.on_batch(batch)
        targets = plain.targets(batch)  # while it is on the CPU: reading from a device waits for it
        ramp = warmup_ramp(runs[0].state.step, ramp_steps(config, runs[0].state.fresh_precision))
        plain.model.set_ramp(ramp)
        steps: Steps | GraphedSteps = plain if graphs is None or ramp < 1 else graphs
        under_way.append((steps.begin(batch), targets))
        batch = next(batches, None)  # packed while a device is at work
        while len(under_way) > (0 if batch is None else steps.ahead):
            losses, targets = under_way.popleft()
            values = losses.tolist()  # a device is waited for once per step, when all its work is under way
            for run, value in zip(runs, values, strict=True):
                if run.failure is None and not math.isfinite(value):
                    run.failure = _not_saved(f"the loss is {value} at", run.state.step + 1, run.state.epoch + 1, config)
            if all(run.failure is not None for run in runs):
                return [run.failure for run in runs if run.failure is not None]
            controllers.before_step(now())
            steps.end()
            done += 1
            for run, value, learned in zip(runs, values, targets, strict=True):
                run.learned(value, learned)
            controllers.after_step(now(), values[0])
            for run in runs:
                if run.failure is None:
                    run.progress.batch(done, num_batches, run.loss, run.tokens)
    # Each run's share: what the epoch would have cost if all had taken their turns.
    seconds = (time.perf_counter() - began) / len(runs)
    return [run.row(seconds) for run in runs]


@dataclass
class ModelSteps:
    """The ``Steps`` of one model, whose kernels are launched one by one."""

    model: TrainableModel
    optimizer: torch.optim.Optimizer
    config: TrainingConfig
    shared: SharedLoss | None  # where several processes take them together
    ahead: ClassVar[int] = 0

    def begin_epoch(self) -> None:
        self.model.train()
        self.model.refresh()

    def targets(self, batch: Batch) -> list[Targets]:
        return [targets_of(batch)]

    def begin(self, batch: Batch) -> torch.Tensor:
        device = next(self.model.parameters()).device
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.config.autocast, device):
            loss = self.model.loss(batch.to(device)) if self.shared is None else self.shared.of_share(batch)
        loss.backward()
        return (loss.detach() if self.shared is None else self.shared.of_batch(loss)).reshape(1)

    def end(self) -> None:
        clip_gradients(self.model, self.optimizer, self.config.clip_norm)
        self.optimizer.step()


def targets_of(batch: Batch) -> Targets:
    """The positions of a batch that have something to learn."""
    assert batch.target is not None
    return Targets(int((batch.target > 0).sum()), batch.learned_weight)


def moment_of(
    model: TrainableModel,
    optimizer: torch.optim.Optimizer,
    batches: EpochBatches,
    config: TrainingConfig,
    state: TrainState,
) -> Moment:
    """Where training stands, for controllers."""
    return Moment(
        model=model,
        optimizer=optimizer,
        epoch=state.epoch,
        step=state.step,
        total_epochs=config.epochs,
        total_steps=config.epochs * batches.num_batches,
    )


def check_weights(model: torch.nn.Module, config: TrainingConfig, state: TrainState) -> None:
    """A finite loss can have a gradient that is not: what an epoch leaves of it is told before it is saved."""
    named = dict(model.named_parameters())
    finite = torch.stack([parameter.isfinite().all() for parameter in named.values()])
    if not bool(finite.all()):  # a device is waited for once
        name = list(named)[finite.tolist().index(False)]
        raise _not_saved(f"{name} is not finite after", state.step, state.epoch, config)


def _not_saved(what: str, step: int, epoch: int, config: TrainingConfig) -> RunError:
    return RunError(
        f"{what} step {step} (epoch {epoch}), which is not saved: lower learning_rate ({config.learning_rate:g}) "
        "or set clip_norm"
    )
