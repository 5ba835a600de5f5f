"""Two finished runs as one: both models in one checkpoint, and the weights of their scores fitted on validation.

The new run needs neither of the old ones. It is evaluated as any other, its test once and after the weights are fitted,
and its folder is made when all is done. ``protocol.json`` says in ``joined`` what it was made of:

    runs             run, weights (SHA-256), model, arm and seed of each
    bins             bin, items and targets in it, weights of first and second, and whose they are: ``weights_of``
    targets          how many the weights were fitted on
    prior_targets    how many more a bin has, as it were, that ask for the weights of all targets; 0 with ``by`` none
    log_likelihood   per target, of the join and of each model alone
    for_rare         where it was asked for: cost, the training events that items have fewer than, what is added to
                     their scores, and NDCG@10 of all and of rare validation targets before and after
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from recbft.config.fields import check_choice, check_range, to_dict
from recbft.datasets import Dataset
from recbft.errors import UserError
from recbft.evaluation.join_weights import JoinWeights, fit_join
from recbft.evaluation.rare_items import fit_rare_level
from recbft.models import MODELS
from recbft.models.contract import SequenceModel
from recbft.models.join import BINS, PARTS, RARE, Join
from recbft.runs import checkpoint
from recbft.runs.environment import digits_from, environment
from recbft.runs.folder import RunFolder
from recbft.system.files import user_path
from recbft.system.torchrun import refuse_several
from recbft.training.build import new_state, run_protocol
from recbft.training.bundle import (
    CONTENT_FOLDER,
    OF_THE_MODEL,
    load_trained,
    own_config,
    refuse_other_data,
    write_vocabulary,
)
from recbft.training.card import write_card
from recbft.training.one_run import run_name
from recbft.training.process_settings import memory_explained, run_settings
from recbft.training.process_team import ALONE
from recbft.training.progress import Progress, Silent
from recbft.training.run_config import RunConfig, load_run_config
from recbft.training.session import results

By = Literal["count", "none"]
ARMS: dict[str, str] = {"count": "by_count", "none": "one_weight"}


def join(
    first: str | Path,
    second: str | Path,
    out: str | Path,
    *,
    by: By = "count",
    for_rare: float | None = None,
    dataset: Dataset | str | None = None,
    data_root: str | Path | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> RunFolder:
    """Join two finished runs of the same data into a new one.

    Args:
        first, second: their folders.
        out: the new run's folder; must not hold anything.
        by: weights by the item's training count, or one pair for all.
        for_rare: the share of validation NDCG@10, from 0 to 1, that may be lost so that items with fewer than 5
            training events are listed more. Unless given they stand as the weights have it.
        dataset: their data, loaded or by name or file; otherwise the configuration of a run says which.
        data_root: where those lie now.
        overwrite: ``out`` may hold another run, which is replaced.

    Raises:
        UserError: a run is not finished or has no weights, the two are one or have other data, or the folder is taken;
            or ``for_rare`` is given without weights by count, or where no validation target is rare.
    """
    check_choice("by", by, ARMS)
    if for_rare is not None:
        check_range("for_rare", for_rare, at_least=0, below=1)
        if by != "count":
            raise UserError("for_rare needs weights by the item's training count; leave out by=none")
    refuse_several("runs are joined by one process")
    RunFolder.refuse_taken(out, overwrite=overwrite)
    folders = [RunFolder.open(path) for path in (first, second)]
    if user_path(out).resolve() in [run.path.resolve() for run in folders]:
        raise UserError(f"{out} is one of the runs that are to be joined; give the join a folder of its own")
    for run in folders:
        run.metrics  # noqa: B018  refused unless it is finished
    digests = [checkpoint.best_digest(run.checkpoint) for run in folders]
    loaded = [load_trained(run.path) for run in folders]
    configs, models = [one.config for one in loaded], [one.model for one in loaded]
    _check_joinable(folders, configs, digests)
    config = _config_of(configs, ARMS[by])
    if isinstance(dataset, Dataset):
        dataset = config.data.split_as_asked(dataset)
    else:
        dataset = config.data.load_again(dataset, None if data_root is None else str(data_root))
    # Of features nothing is asked: what models read of them is among their weights.
    begun = {"content_hash": folders[0].protocol["content_hash"]}
    refuse_other_data(begun, dataset, f"{first} and {second} were trained", "give their data with -d")
    if dataset.target_hash != folders[0].protocol["target_hash"]:
        raise UserError(
            f"data set {dataset.name!r} has the split {dataset.splitting.chosen()}, and {first} and {second} another: "
            "targets of the one are training events of the other; give the data without a split of their own"
        )
    listener = Silent() if progress is None else progress
    with memory_explained(config), run_settings(config.training) as device:
        began = time.monotonic()
        made = _joined(models, dataset, by_count=by == "count").to(device)
        listener.note("fitting the weights on validation targets")
        fitted = fit_join(made, dataset, memory_mb=config.evaluation.memory_mb)
        made.weights.copy_(made.weights.new_tensor(fitted.weights))
        record = {"by": by, "runs": _records(folders, configs, digests), **_bins(made, dataset, fitted)}
        if for_rare is not None:
            rare = fit_rare_level(made, dataset, for_rare, fewer_than=RARE, memory_mb=config.evaluation.memory_mb)
            made.levels[torch.tensor([least < RARE for least in BINS.values()])] = rare.level
            record["for_rare"] = {"cost": for_rare, "fewer_than": RARE, **rare._asdict()}
        seconds = round(time.monotonic() - began, 3)
        listener.note("ranking each user's validation and test item")
        metrics, ranks = results(made, dataset, config.evaluation, ALONE)
        new = RunFolder.create(
            out,
            config=config.to_yaml(),
            protocol={**run_protocol(config, dataset, made), "joined": record},
            environment=environment(device),
            overwrite=overwrite,
        )
        with new.locked():
            write_vocabulary(new.checkpoint, dataset)
            for name, run in zip(PARTS, folders, strict=True):
                if (content := run.checkpoint / CONTENT_FOLDER).is_dir():
                    shutil.copytree(content, new.checkpoint / CONTENT_FOLDER / name)
            state = replace(new_state(config, dataset), run=new.identity, digits_from=digits_from(device))
            checkpoint.write(new.checkpoint, _snapshot(made, state))
            done = {"best_epoch": None, "epochs": 0, "steps": 0, "training_seconds": seconds}
            write_card(new, metrics | done)
            new.finish(metrics | done, ranks)
    return new


def usual_name(first: str | Path, second: str | Path, by: By = "count") -> str:
    """The folder that a join gets unless it is given a name."""
    runs = [RunFolder.open(path) for path in (first, second)]
    return run_name(_config_of([own_config(run) for run in runs], ARMS[by]), runs[0].protocol["dataset"])


def _check_joinable(runs: Sequence[RunFolder], configs: Sequence[RunConfig], digests: Sequence[str]) -> None:
    """Refuse one run given twice, and runs of other data or targets."""
    one, two = runs
    if one.path.resolve() == two.path.resolve() or (
        digests[0] == digests[1] and _model_in(configs[0]) == _model_in(configs[1])
    ):
        raise UserError(f"{one.path} and {two.path} are the same model; join two that differ")
    here, there = one.protocol, two.protocol
    for field in ("items", "content_hash", "target_hash", "split"):
        if here.get(field) != there.get(field):
            remedy = "join runs of the same data and split"
            if field == "items":  # features bring items that have no event
                remedy = (
                    "train both on the same data with the same --items; item_vector: id keeps a model from reading them"
                )
            raise UserError(
                f"the runs differ in {field}: {_short(here.get(field))} in {one.path}, {_short(there.get(field))} in "
                f"{two.path}; {remedy}"
            )


def _snapshot(model: Join, state: checkpoint.TrainState) -> checkpoint.Snapshot:
    """What the checkpoint holds: the model alone, which is the best one too."""
    weights = model.state_dict()
    return checkpoint.snapshot(
        model_state=weights, optimizer_state={}, rng_state={}, state=state, best_model_state=weights
    )


def _joined(models: Sequence[Any], dataset: Dataset, *, by_count: bool) -> Join:
    first, second = models
    assert isinstance(first, SequenceModel) and isinstance(second, SequenceModel)
    joined = Join(first, second, torch.from_numpy(np.asarray(dataset.training_counts)), by_count=by_count)
    joined.eval()
    return joined


def _model_in(config: RunConfig) -> dict[str, Any]:
    """What says which model it is."""
    tree = to_dict(config)
    return {key: tree[key] for key in OF_THE_MODEL}


def _config_of(configs: Sequence[RunConfig], arm: str) -> RunConfig:
    """The configuration of the join: data, evaluation and seed of the first run that has a say in them."""
    first, second = configs
    seed = next((each.seed for each in configs if MODELS[each.model].trainable or each.parts), first.seed)
    usual = load_run_config(model="join", arm=arm, seed=seed)
    return replace(
        usual,
        data=next((each.data for each in configs if each.data.items), first.data),
        backbone=replace(usual.backbone, first=_model_in(first), second=_model_in(second)),
        evaluation=first.evaluation,
    )


def _records(runs: Sequence[RunFolder], configs: Sequence[RunConfig], digests: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"run": str(run.path.absolute()), "weights": weights, "model": own.model, "arm": own.arm, "seed": own.seed}
        for run, own, weights in zip(runs, configs, digests, strict=True)
    ]


def _bins(model: Join, dataset: Dataset, fitted: JoinWeights) -> Mapping[str, Any]:
    """The rest of ``joined``: a row for each bin that has items."""
    names = model.names_of_bins
    items = np.bincount(model.bins[1:].cpu().numpy(), minlength=len(names))
    rows = [
        {
            "bin": name,
            "items": int(items[number]),
            "targets": int(fitted.targets[number]),
            **dict(zip(PARTS, fitted.weights[number].tolist(), strict=True)),
            "weights_of": names[fitted.source[number]],
        }
        for number, name in enumerate(names)
        if items[number]
    ]
    likelihood = {"join": fitted.log_likelihood, "first": fitted.alone[0], "second": fitted.alone[1]}
    return {
        "bins": rows,
        "targets": int(fitted.targets.sum()),
        "prior_targets": fitted.prior_targets,
        "log_likelihood": likelihood,
    }


def _short(value: object) -> str:
    """A value for a message; of a hash the part that is printed elsewhere too."""
    text = str(value)
    return text[:12] if len(text) == 64 and " " not in text else text
