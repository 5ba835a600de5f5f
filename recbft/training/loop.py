"""The training loop: forward, loss, backward, clip, step, log, validate, save."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from recbft.datasets.batches import EpochBatches
from recbft.errors import RunError
from recbft.models.contract import TrainableModel
from recbft.training.autocast import autocast
from recbft.training.checkpoint import TrainState
from recbft.training.config import TrainingConfig
from recbft.training.controllers import Controllers, Moment
from recbft.training.optimiser import clip_gradients, warmup_ramp
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
) -> None:
    """Train until the last epoch or until validation has stopped improving, going on from ``state``.

    Args:
        state: brought up to date after every epoch, before ``keep`` is called.
        validate: metrics of the model as it is, by name.
        keep: saves the epoch's row, and the weights as the best ones where the second argument is True.
        controllers: steer the steps of an epoch.

    Raises:
        RunError: the loss is not finite, and the optimiser step is not taken; or a weight is not, after an epoch.
    """
    progress.start(config.epochs, state.epoch + 1)
    try:
        while not is_over(config, state):
            row = _train_epoch(model, optimizer, batches, config, state, progress, controllers)
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
            f"validations, the best was epoch {state.best_epoch}"
        )


def _train_epoch(
    model: TrainableModel,
    optimizer: torch.optim.Optimizer,
    batches: EpochBatches,
    config: TrainingConfig,
    state: TrainState,
    progress: Progress,
    controllers: Controllers,
) -> Row:
    """One pass over the users; the row of ``history.csv`` it earns."""
    began, tokens, total = time.perf_counter(), 0, 0.0
    device = next(model.parameters()).device
    model.train()
    model.refresh()
    controllers.on_epoch_start(moment_of(model, optimizer, batches, config, state))
    for done, batch in enumerate(batches.epoch(state.epoch), start=1):
        batch = controllers.on_batch(batch)
        assert batch.target is not None
        learned = int((batch.target > 0).sum())  # while it is on the CPU: reading from a device waits for it
        batch = batch.to(device)
        model.set_ramp(warmup_ramp(state.step, config.warmup_steps))
        optimizer.zero_grad(set_to_none=True)
        with autocast(config.autocast, device):
            loss = model.loss(batch)
        loss.backward()
        value = loss.item()  # a device is waited for once per step, when all its work is under way
        if not math.isfinite(value):
            raise not_finite(value, config, state)
        clip_gradients(model, optimizer, config.clip_norm)
        controllers.before_step(moment_of(model, optimizer, batches, config, state))
        optimizer.step()
        state.step += 1
        controllers.after_step(moment_of(model, optimizer, batches, config, state), value)
        tokens, total = tokens + learned, total + value * learned
        progress.batch(done, batches.num_batches, total / tokens, tokens)
    state.epoch += 1
    seconds = time.perf_counter() - began
    return {
        "epoch": state.epoch,
        "loss": total / tokens,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds),
    }


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
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise RunError(
                f"{name} is not finite after step {state.step} (epoch {state.epoch}), which is not saved: "
                f"lower learning_rate ({config.learning_rate:g}) or set clip_norm"
            )


def not_finite(loss: float, config: TrainingConfig, state: TrainState) -> RunError:
    """What is said of a run whose loss is not a number."""
    return RunError(
        f"the loss is {loss} at step {state.step + 1} (epoch {state.epoch + 1}); the step was not taken: "
        f"lower learning_rate ({config.learning_rate:g}) or set clip_norm"
    )
