"""The training loop: forward, loss, backward, clip, step, log, validate, save."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from recbft.datasets.batches import Batch, EpochBatches
from recbft.errors import RunError
from recbft.models.contract import TrainableModel
from recbft.runs.checkpoint import TrainState
from recbft.training.autocast import autocast
from recbft.training.config import TrainingConfig
from recbft.training.controllers import Controllers, Moment
from recbft.training.graphs import GraphedSteps
from recbft.training.optimiser import clip_gradients, warmup_ramp
from recbft.training.process_team import ALONE, SharedLoss, Team
from recbft.training.progress import Progress

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
    shared = SharedLoss(model, team) if team.several else None
    plain = _PlainSteps(model, optimizer, config, shared)
    progress.start(config.epochs, state.epoch + 1)
    try:
        while not is_over(config, state):
            row = _train_epoch(model, optimizer, batches, config, state, progress, controllers, plain, graphs)
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
    """Validate where it is due, judge, save and tell; ``state`` counts the epoch already. Arguments as in ``fit``.

    Raises:
        RunError: a weight is not finite.
    """
    check_weights(model, config, state)
    improved = False
    if state.epoch % config.eval_every == 0 or state.epoch == config.epochs:
        metrics = validate()
        improved = _judge(state, metrics[config.valid_metric])
        row |= {f"valid_{name}": value for name, value in metrics.items()}
    keep(row, improved)
    progress.epoch(row)
    if is_over(config, state) and state.epoch < config.epochs:
        progress.note(
            f"stopped after epoch {state.epoch}: {config.valid_metric} has not risen for {state.bad_epochs} "
            f"validation{'s' * (state.bad_epochs != 1)}, the best was epoch {state.best_epoch}"
        )


def _train_epoch(
    model: TrainableModel,
    optimizer: torch.optim.Optimizer,
    batches: EpochBatches,
    config: TrainingConfig,
    state: TrainState,
    progress: Progress,
    controllers: Controllers,
    plain: _PlainSteps,
    graphs: GraphedSteps | None,
) -> Row:
    """One pass over the users, and its row."""
    began, done, tokens, total = time.perf_counter(), 0, 0, 0.0
    under_way: deque[tuple[_Loss, int]] = deque()  # of each step whose loss is not read: that, and its targets

    def now() -> Moment:
        return moment_of(model, optimizer, batches, config, state)

    model.train()
    model.refresh()
    controllers.on_epoch_start(now())
    coming = batches.epoch(state.epoch)
    batch = next(coming, None)
    while batch is not None:
        batch = controllers.on_batch(batch)
        assert batch.target is not None
        learned = int((batch.target > 0).sum())  # while it is on the CPU: reading from a device waits for it
        ramp = warmup_ramp(state.step, config.ramp_steps)
        model.set_ramp(ramp)
        steps = plain if graphs is None or ramp < 1 else graphs
        under_way.append((steps.begin(batch), learned))
        batch = next(coming, None)  # packed while a device is at work
        while len(under_way) > (0 if batch is None else steps.ahead):
            loss, learned = under_way.popleft()
            value = loss.item()  # a device is waited for once per step, when all its work is under way
            if not math.isfinite(value):
                raise not_finite(value, config, state)
            controllers.before_step(now())
            steps.end()
            state.step, done = state.step + 1, done + 1
            controllers.after_step(now(), value)
            tokens, total = tokens + learned, total + value * learned
            progress.batch(done, batches.num_batches, total / tokens, tokens)
    return epoch_row(state, total, tokens, time.perf_counter() - began)


def epoch_row(state: TrainState, total: float, tokens: int, seconds: float) -> Row:
    """Count an epoch whose losses of ``tokens`` tokens sum up to ``total``; the row of ``history.csv`` it earns."""
    state.epoch += 1
    return {
        "epoch": state.epoch,
        "loss": total / tokens,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds),
    }


class _Loss(Protocol):
    """Of a step: a tensor, or what is on its way."""

    def item(self) -> float: ...


@dataclass
class _PlainSteps:
    """Steps whose kernels are launched one by one."""

    ahead: ClassVar[int] = 0  # steps that may begin before the loss of one is read

    model: TrainableModel
    optimizer: torch.optim.Optimizer
    config: TrainingConfig
    shared: SharedLoss | None  # where several processes take them together

    def begin(self, batch: Batch) -> torch.Tensor:
        """The loss of a batch and its gradients."""
        device = next(self.model.parameters()).device
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.config.autocast, device):
            loss = self.model.loss(batch.to(device)) if self.shared is None else self.shared.of_share(batch)
        loss.backward()
        return loss.detach() if self.shared is None else self.shared.of_batch(loss)

    def end(self) -> None:
        """Change the weights."""
        clip_gradients(self.model, self.optimizer, self.config.clip_norm)
        self.optimizer.step()


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


def _judge(state: TrainState, metric: float) -> bool:
    """Whether this is the best validation so far; counts those since the best."""
    improved = state.best_metric is None or metric > state.best_metric
    if improved:
        state.best_metric, state.best_epoch, state.bad_epochs = metric, state.epoch, 0
    else:
        state.bad_epochs += 1
    return improved


def check_weights(model: torch.nn.Module, config: TrainingConfig, state: TrainState) -> None:
    """A finite loss can have a gradient that is not: what an epoch leaves of it is told before it is saved.

    Raises:
        RunError: a weight is not a number.
    """
    named = dict(model.named_parameters())
    finite = torch.stack([parameter.isfinite().all() for parameter in named.values()])
    if not bool(finite.all()):  # a device is waited for once
        name = list(named)[finite.tolist().index(False)]
        raise RunError(
            f"{name} is not finite after step {state.step} (epoch {state.epoch}), which is not saved: "
            f"lower learning_rate ({config.learning_rate:g}) or set clip_norm"
        )


def not_finite(loss: float, config: TrainingConfig, state: TrainState) -> RunError:
    """What is said of a run whose loss is not a number."""
    return RunError(
        f"the loss is {loss} at step {state.step + 1} (epoch {state.epoch + 1}), which is not saved: "
        f"lower learning_rate ({config.learning_rate:g}) or set clip_norm"
    )
