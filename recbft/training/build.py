"""What a run is made of: its untrained model, its batches, the state it begins in, and the protocol it is judged by."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from recbft.config.fields import to_dict
from recbft.datasets import Dataset, leave_one_out
from recbft.datasets.batches import EpochBatches
from recbft.datasets.config import DataConfig
from recbft.datasets.events import TICKS_PER_SECOND, guessed_unit
from recbft.errors import UserError
from recbft.evaluation.metrics import config_hash, protocol
from recbft.mixers.head_dynamics import DAY
from recbft.models import MODELS
from recbft.models.contract import TrainableModel
from recbft.runs.checkpoint import TrainState, vocabulary_hash
from recbft.system.torch_state import set_aside
from recbft.training.controllers import Controllers, make_controllers
from recbft.training.graphs import GraphedSteps
from recbft.training.optimiser import make_optimizer
from recbft.training.process_settings import seed_everything
from recbft.training.run_config import RunConfig
from recbft.training.warm_start import warm_start

CPU = torch.device("cpu")


class Parts(NamedTuple):
    """What a run trains with; batches and optimiser are None where the model is not trained."""

    model: nn.Module
    batches: EpochBatches | None
    optimizer: torch.optim.Optimizer | None
    controllers: Controllers
    graphs: GraphedSteps | None  # where ``training.cuda_graphs`` asks for them
    begun_from: dict[str, Any] | None  # the older run whose weights the model has, as ``warm_start`` returns it


def loaded(data: DataConfig, dataset: Dataset | None) -> tuple[DataConfig, Dataset]:
    """What a run says of its data, with their name, and the data: those given, else those that it names."""
    if dataset is None:
        data = data.resolved()
        dataset = data.load()
    return (replace(data, dataset=dataset.name) if data.dataset is None else data), dataset


def make_parts(config: RunConfig, dataset: Dataset, device: torch.device, *, begins: bool = True) -> Parts:
    """All of them as a run begins, before there is a folder: what config and data cannot have is refused here.

    Args:
        begins: False where the run has weights of its own, and needs no older run's.
    """
    model = build_model(config, dataset, device)
    begun_from = warm_start(model, config, dataset) if begins else None
    model = model.to(device)
    optimizer = make_optimizer(model, config.training) if isinstance(model, TrainableModel) else None
    return Parts(
        model=model,
        batches=training_batches(config, dataset),
        optimizer=optimizer,
        controllers=make_controllers(config.controllers, model, seed=config.seed),
        graphs=GraphedSteps(model, optimizer, config.training) if optimizer and config.training.cuda_graphs else None,
        begun_from=begun_from,
    )


def check_begins(config: RunConfig, dataset: Dataset) -> None:
    """Refuse what ``make_parts`` would refuse on any device, before a process is begun for it."""
    with set_aside(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run says them
        model = build_model(config, dataset)
        warm_start(model, config, dataset)
        training_batches(config, dataset)
        make_controllers(config.controllers, model, seed=config.seed)


def build_model(config: RunConfig, dataset: Dataset, device: torch.device = CPU) -> nn.Module:
    """The untrained model of a run, on the CPU.

    Args:
        device: where it will be trained, of whose random numbers those of the run begin here.
    """
    counts = torch.from_numpy(np.asarray(dataset.training_counts))
    model = config.build(counts)
    # Making modules draws random numbers, more in one arm than in another: begin anew, so that arms share dropout.
    seed_everything(config.seed, device)
    return model


def training_batches(config: RunConfig, dataset: Dataset) -> EpochBatches | None:
    """What the model is trained on; None where it is not trained."""
    make = MODELS[config.model].batches
    if make is None:
        return None
    if config.reads_times is not None and dataset.times is None:
        raise UserError(
            f"{config.reads_times} is true, but data set {dataset.name!r} has no real times; "
            f"set {config.reads_times}: false, or give data with a time column, which data.time names"
        )
    if dataset.times is not None and dataset.times.size:
        check_clock(config, dataset.name, int(dataset.times.max()), dataset.preparation.get("time_unit"))
    split = leave_one_out(dataset)
    batches = make(
        config.backbone,
        dataset.items,
        split.training_start,
        split.training_stop,
        num_items=dataset.num_items,
        samples=config.training.samples,
        batch_size=config.training.batch_size,
        seed=config.seed,
        times=dataset.times,
    )
    if batches.num_batches == 0:
        raise UserError(
            f"data set {dataset.name!r} has nothing to learn from: no user has 4 events "
            "(two to train, one to validate, one to test)"
        )
    if config.training.batch_targets is not None:
        pieces = batches.samples.num_pieces
        # A prefix is there for one target, whatever else is masked in it.
        targets = pieces if config.training.samples == "prefixes" else batches.num_targets
        batches.batch_size = max(1, round(config.training.batch_targets * pieces / targets))
    return batches


def check_clock(config: RunConfig, name: str, latest: int, unit: str | None = None) -> None:
    """A mixer's clock starts at a day of seconds: refuse that where the data's times are no seconds.

    Args:
        latest: the largest of the times of the data set that has this ``name``.
        unit: theirs, guessed by their size unless given.
    """
    if config.reads_times is None or getattr(config.mixing, "time_unit", None) != DAY:
        return
    unit = guessed_unit(latest) if unit is None else unit
    if unit != "s":
        raise UserError(
            f"mixing.time_unit is {DAY:g}, a day of seconds, but the times of data set {name!r} are in {unit} "
            f"(up to {latest}); set mixing.time_unit to {DAY * TICKS_PER_SECOND[unit]:g} for a day of them"
        )


def run_protocol(
    config: RunConfig, dataset: Dataset, model: Any, begun_from: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What ``protocol.json`` holds: how the run's test metrics are made; ``begun_from`` as in ``Parts``."""
    target_time = "no times are read"
    if getattr(model, "reads_times", False):
        target_time = "shown" if model.shows_target_time else "not shown"
    return protocol(
        dataset,
        part="test",
        filter_seen=config.evaluation.filter_seen,
        max_length=model.max_length,
        seed=config.seed,
        config=to_dict(config),
        target_time=target_time,
        begun_from=begun_from,
    )


def new_state(config: RunConfig, dataset: Dataset) -> TrainState:
    """Where a run of this config on this data begins."""
    return TrainState(
        epoch=0,
        step=0,
        seed=config.seed,
        dataset=dataset.name,
        content_hash=dataset.content_hash,
        vocabulary_hash=vocabulary_hash(dataset.item_ids),
        config_hash=config_hash(to_dict(config)),
    )
