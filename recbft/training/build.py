"""What a run is made of: its untrained model, its batches, the state it begins in, and the protocol it is judged by.

A run may begin from the weights of an older one, so that what it learned goes on being used as its data grow.

    w = keep w_older + (1 - keep) w_initial                                                      (a)

Initial weights are those that the run would have begun with. Of what has a row per item, rows go together that stand
for one item, by its raw id, and items that the older run has not keep their initial rows. Running means and the warm-up
are taken over; what is counted in the data, such as where precision starts, is that of the new data.

A model that tracks precision may begin from one that does not: its precision is then fresh and is ramped in, so that
with ``keep`` 1 the two give the same scores before the first step.

With ``keep`` 1 a run stays near where the older one ended, and can generalise worse than one begun from scratch;
shrunk and perturbed as in (a) it is not shown to, and is still done sooner (docs/serving.md has the figures).

Source: Ash and Adams, On Warm-Starting Neural Network Training (arXiv 1910.08475).
Shapes: V items of the new data.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from recbft.config.fields import to_dict
from recbft.datasets import Dataset
from recbft.datasets.batches import EpochBatches
from recbft.datasets.config import DataConfig
from recbft.datasets.content import ItemContent
from recbft.datasets.events import TICKS_PER_SECOND, guessed_unit
from recbft.datasets.vocabulary import Vocabulary
from recbft.errors import UserError
from recbft.evaluation.metrics import config_hash, protocol
from recbft.mixers.head_dynamics import DAY
from recbft.mixers.interface import DECAY, DECAY_KEPT
from recbft.models import MODELS
from recbft.models.backbone import Backbone
from recbft.models.contract import TrainableModel
from recbft.runs.checkpoint import TrainState, best_digest, vocabulary_hash
from recbft.runs.folder import RunFolder
from recbft.system.torch_state import set_aside
from recbft.training.bundle import content_of, differences, load_trained
from recbft.training.controllers import Controllers, make_controllers
from recbft.training.graphs import GraphedSteps
from recbft.training.optimiser import make_optimizer
from recbft.training.process_settings import seed_everything
from recbft.training.run_config import RunConfig

CPU = torch.device("cpu")
KEEP = 0.4
# in names, beside the optimiser's group
_OF_PRECISION = {"precision", "item_precision", "reliability_precision", "update", "unit", "log_scale"}


class Parts(NamedTuple):
    """What a run trains with; batches and optimiser are None where the model is not trained."""

    model: nn.Module
    batches: EpochBatches | None
    optimizer: torch.optim.Optimizer | None
    controllers: Controllers
    graphs: GraphedSteps | None  # where ``training.cuda_graphs`` asks for them
    begun_from: dict[str, Any] | None  # the older run whose weights the model has, as ``warm_start`` returns it
    content: ItemContent | None  # how item features become vectors, where the model reads some


def loaded(data: DataConfig, dataset: Dataset | None) -> tuple[DataConfig, Dataset]:
    """What a run says of its data, with their name, and the data: those given, else those that it names."""
    if dataset is None:
        data = data.resolved()
        dataset = data.load()
    dataset = data.split_as_asked(dataset)
    return replace(data.split_as(dataset), dataset=data.dataset or dataset.name), dataset


def make_parts(config: RunConfig, dataset: Dataset, device: torch.device, *, began: Path | None = None) -> Parts:
    """All of them as a run begins, before there is a folder: what config and data cannot have is refused here.

    Args:
        began: the folder of the run's own weights where it has some, and needs no older run's.
    """
    content = content_of(config, dataset, began=began)
    model = build_model(config, dataset, device, content=content)
    begun_from = warm_start(model, config, dataset) if began is None else None
    model = model.to(device)
    optimizer = make_optimizer(model, config.training) if isinstance(model, TrainableModel) else None
    return Parts(
        model=model,
        batches=training_batches(config, dataset),
        optimizer=optimizer,
        controllers=make_controllers(config.controllers, model, seed=config.seed),
        graphs=GraphedSteps(model, optimizer, config.training) if optimizer and config.training.cuda_graphs else None,
        begun_from=begun_from,
        content=content,
    )


def check_begins(config: RunConfig, dataset: Dataset) -> None:
    """Refuse what ``make_parts`` would refuse on any device, before a process is begun for it."""
    with set_aside(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run says them
        model = build_model(config, dataset)
        warm_start(model, config, dataset)
        training_batches(config, dataset)
        make_controllers(config.controllers, model, seed=config.seed)


def build_model(
    config: RunConfig, dataset: Dataset, device: torch.device = CPU, *, content: ItemContent | None = None
) -> nn.Module:
    """The untrained model of a run, on the CPU.

    Args:
        device: where it will be trained, of whose random numbers those of the run begin here.
        content: how item features become vectors; ``content_of`` says unless given.
    """
    content = content_of(config, dataset) if content is None else content
    counts, vectors = torch.from_numpy(np.asarray(dataset.training_weights)), None
    if content is not None and dataset.features is not None:
        vectors = torch.from_numpy(content.matrix(dataset.features).values)
    model = config.build(counts, vectors)
    if isinstance(model, Backbone) and model.reads_reliability:
        known = dataset.split.training_reliability
        if known is None:
            raise UserError(
                f"backbone.reads_reliability is {config.backbone.reads_reliability!r}, but data set {dataset.name!r} "
                "has no reliability; name its column as data.reliability, in a shell by --reliability, in Python as "
                "reliability in Dataset.from_frame or Dataset.load"
            )
        model.fit_reliability(known)
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
    split = dataset.split
    if split.weights is not None and not split.training_weights(dataset.num_items).any():
        raise UserError(
            f"data set {dataset.name!r} has nothing to learn from: every event that trains has weight 0; give some a "
            "weight above 0, or leave weight out"
        )
    batches = make(
        config.backbone,
        split.items,
        split.training_start,
        split.training_stop,
        num_items=dataset.num_items,
        samples=config.training.samples,
        batch_size=config.training.batch_size,
        seed=config.seed,
        times=split.times,
        weights=split.weights,
        reliability=split.reliability if config.reads_reliability else None,
    )
    if batches.num_batches == 0:
        raise UserError(
            f"data set {dataset.name!r} has nothing to learn from: no user has "
            + (
                "4 events (two to train, one to validate, one to test)"
                if dataset.splitting.is_plain
                else f"two events that train ({split.text})"
            )
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


def is_fresh(begun_from: Mapping[str, Any] | None) -> bool:
    """Whether a run begins from one without precision; ``begun_from`` as in ``Parts``."""
    return begun_from is not None and bool(begun_from.get("fresh_precision"))


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


def warm_start(model: torch.nn.Module, config: RunConfig, dataset: Dataset) -> dict[str, Any] | None:
    """Give a new model (a) of the best weights of the run that ``training.warm_start`` names.

    Args:
        model: of ``config`` and ``dataset``, with its initial weights.

    Returns:
        What a protocol keeps of it: the older ``run``, the SHA-256 of its ``weights``, its data's ``content_hash``, how
        much was ``kept``, how many of the new data's items it knew, ``known_items``, and ``fresh_precision`` where it
        tracks no precision; None where no run is named.
    """
    path = config.training.warm_start
    if path is None:
        return None
    assert isinstance(model, TrainableModel)  # a setting of training is refused of others
    folder, weights = RunFolder.open(path).checkpoint, None
    while (now := best_digest(folder)) != weights:  # a training that goes on may put better ones in their place
        weights, (run, their_config, vocabulary, _, _, older) = now, load_trained(path)
    changed = differences(to_dict(config), to_dict(their_config))
    fresh = config.arm == "bft" != their_config.arm
    if fresh:
        changed = {key: pair for key, pair in changed.items() if key not in ("arm", "core", "backbone.recency_decay")}
    differing = [f"{key} {theirs!r} (here {ours!r})" for key, (ours, theirs) in changed.items()]
    rows = _rows_of(dataset, vocabulary, run.path)
    keep = config.training.warm_start_keep
    if keep is None:
        keep = 1.0 if fresh else KEEP
    try:
        state = _taken_over(model, older.state_dict(), rows, len(vocabulary), keep, fresh=fresh)
    except _MisfitError as misfit:
        why = f"it has {', '.join(differing[:3])}" if differing else str(misfit)
        raise UserError(
            f"the weights of {run.path} do not fit this model: {why}; begin from a run of the same model, arm and "
            "sizes (--config with its config.yaml takes its settings), or without warm_start"
        ) from None
    if differing:
        warnings.warn(
            f"this run begins from the weights of {run.path}, which has other settings: {', '.join(differing)}",
            stacklevel=2,
        )
    if not run.is_finished:
        warnings.warn(f"{run.path} is not finished; this run begins from the best of its epochs so far", stacklevel=2)
    model.load_state_dict(state)
    return {
        **({"fresh_precision": True} if fresh else {}),
        "run": str(run.path.absolute()),
        "weights": weights,
        "content_hash": run.protocol["content_hash"],
        "kept": keep,
        "known_items": int((rows[1:] > 0).sum()),
    }


class _MisfitError(Exception):
    """A tensor has no counterpart of its shape."""


def _rows_of(dataset: Dataset, vocabulary: Vocabulary, run: Path) -> Tensor:
    """The older run's row for padding and each item, (V + 1,); 0 for items that are new."""
    index = vocabulary.encode(dataset.item_ids)
    if not index.any():
        theirs = "" if len(vocabulary) == 0 else f", such as {vocabulary.example!r}"
        raise UserError(
            f"{run} knows none of the {dataset.num_items:,} items of data set {dataset.name!r}, such as "
            f"{dataset.vocabulary.example!r}; its own have other ids{theirs}. Begin without warm_start, or give ids "
            "that agree"
        )
    return torch.from_numpy(np.concatenate([[0], index]))


def _taken_over(
    model: TrainableModel,
    theirs: Mapping[str, Tensor],
    rows: Tensor,
    num_their_items: int,
    keep: float,
    *,
    fresh: bool,
) -> dict[str, Tensor]:
    """The state of the new model with the older one's weights in it; with ``fresh`` its precision is its own."""
    mine, learned = model.state_dict(), {name for name, _ in model.named_parameters()}
    new: set[str] = set()
    if fresh:
        groups = model.optimiser_groups()
        of_precision = {n for n in mine if groups.get(n) == "precision" or _OF_PRECISION & set(n.split("."))}
        new = of_precision - theirs.keys() | {"ramp"}
    theirs = {name: their for name, their in theirs.items() if not name.endswith(DECAY_KEPT)}
    if alone := sorted((theirs.keys() ^ mine.keys()) - new):
        raise _MisfitError(f"only one of the two has {alone[0]}")
    taken: dict[str, Tensor] = {name: mine[name] for name in new}
    if fresh:  # a recency decay that is learned already is not ramped in again along with precision
        taken |= {n.replace(DECAY, DECAY_KEPT): torch.ones(()) for n in theirs if n.endswith(DECAY)}
    for name, own in mine.items():
        if name in new:
            continue
        their = theirs[name].to(own)
        if name in model.per_item:
            beyond = len(own) - len(rows)  # tokens that are no items, such as a mask
            if their.shape != (num_their_items + 1 + beyond, *own.shape[1:]):
                raise _MisfitError(f"{name} has shape {tuple(their.shape)} there")
            source = torch.cat([rows, num_their_items + 1 + torch.arange(beyond)])
            is_new = source == 0
            is_new[0] = False  # padding
            their = torch.where(is_new.view(-1, *[1] * (own.dim() - 1)), own, their[source])
        if their.shape != own.shape:
            raise _MisfitError(f"{name} has shape {tuple(their.shape)} there and {tuple(own.shape)} here")
        if name in learned:
            taken[name] = torch.lerp(own, their, keep)
        else:  # a running mean, or counted in the data
            taken[name] = own if name in model.per_item else their
    return taken
