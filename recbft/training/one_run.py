"""One run from its config to its finished folder: load and build, begin, and go on again after a stop.

A run's results depend on its config and data alone (and, in the last digits, on the number of threads): data order,
initial weights and dropout come from its seed, and the caller's random state is left as it was.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from recbft.datasets import Dataset
from recbft.errors import UserError
from recbft.models import MODELS
from recbft.models.contract import TrainableModel
from recbft.runs import checkpoint
from recbft.runs.environment import environment
from recbft.runs.folder import RunFolder
from recbft.system.files import user_path
from recbft.training.build import is_fresh, loaded, make_parts, new_state, run_protocol
from recbft.training.bundle import check_checkpoint, own_config, refuse_other_data, refuse_other_features
from recbft.training.optimiser import idle_settings
from recbft.training.process_settings import memory_explained, run_settings
from recbft.training.process_team import ALONE, Team, departure_explained, join_team
from recbft.training.progress import Progress, Silent
from recbft.training.run_config import RECENCY, RunConfig
from recbft.training.session import Session
from recbft.training.trackers import check_trackers


def run_name(config: RunConfig, dataset_name: str) -> str:
    """The folder a run gets inside ``--out``; a file may call its data by what would lead out of there."""
    usual = next(iter(MODELS[config.model].mixers), None)
    plain = MODELS[config.model].arms[config.arm].get("recency_decay", True)
    recency = RECENCY if not plain and config.backbone.recency_decay else ""
    mixer = "" if config.mixer == usual else f"-{config.mixer}"
    data = re.sub(r"[/\x00-\x1f\x7f-\x9f]", "_", dataset_name)
    return f"{config.model}-{config.arm}{recency}{mixer}-{data}-seed{config.seed}"


def train(
    config: RunConfig,
    out: str | Path,
    *,
    dataset: Dataset | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> RunFolder:
    """Train a new run and leave its folder; several processes that torchrun has begun train one together.

    Args:
        config: everything that decides the run.
        out: the run's own folder; must not hold anything.
        dataset: data that is loaded already; otherwise ``config.data`` says which.
        overwrite: ``out`` may hold a run, which is removed when the new one is sure to begin.

    Returns:
        The finished run.

    Raises:
        UserError: the folder is taken, data and config do not fit, or another process trains this run.
        RunError: training failed, was interrupted or ran out of memory; the message says how to go on.
    """
    team = join_team(config.training)
    team.first_does(lambda: RunFolder.refuse_taken(out, overwrite=overwrite))
    if (older := config.training.warm_start) is not None and user_path(older).resolve() == user_path(out).resolve():
        raise UserError(f"{out} is the run whose weights this one begins from; give it a folder of its own")
    check_trackers(config.training)
    data, dataset = loaded(config.data, dataset)
    config = replace(config, data=data)
    with memory_explained(config), run_settings(config.training) as device, departure_explained(team):
        listener = _listener(progress, team)
        return begin(config, out, dataset, device, listener, overwrite=overwrite, team=team).finish()


def resume(
    path: str | Path,
    *,
    data_root: str | Path | None = None,
    dataset: Dataset | str | None = None,
    progress: Progress | None = None,
) -> RunFolder:
    """Go on with a run that was stopped, exactly as if it had not been; a finished run is returned as it is.

    Args:
        path: the run's folder.
        data_root: where its data set lies now.
        dataset: its data, loaded or by name or file; otherwise ``config.yaml`` says which.

    Raises:
        UserError: there is no run, or the data are not those it was begun with.
        RunError: as in ``train``.
    """
    run = RunFolder.open(path)
    if run.is_finished and dataset is None:
        return run
    config = own_config(run, to_train=not run.is_finished)
    if not isinstance(dataset, Dataset):
        dataset = config.data.load_again(dataset, None if data_root is None else str(data_root))
    if run.is_finished:
        refuse_other_data(run.protocol, dataset, f"{run.path} is finished, and was trained", "give those, or no data")
        return run
    check_trackers(config.training)
    team = join_team(config.training)
    with memory_explained(config), run_settings(config.training) as device, departure_explained(team):
        return go_on(run, config, dataset, device, _listener(progress, team), team=team).finish()


def begin(
    config: RunConfig,
    out: str | Path,
    dataset: Dataset,
    device: torch.device,
    progress: Progress,
    *,
    generator: torch.Generator = torch.default_generator,
    remarks: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    team: Team = ALONE,
) -> Session:
    """A new run whose folder is made, within ``run_settings``.

    Args:
        generator: where dropout is drawn from; the model is built with its seed set.
        remarks: what ``environment.json`` says besides.
    """
    parts = make_parts(config, dataset, device)
    if team.leads and isinstance(parts.model, TrainableModel):
        for key, why in idle_settings(parts.model, config.training, fresh_precision=is_fresh(parts.begun_from)).items():
            warnings.warn(f"{key} has no effect: {why}", stacklevel=2)
    processes = {"processes": team.process.size} if team.several else {}
    run = team.first_does(
        lambda: RunFolder.create(
            out,
            config=config.to_yaml(),
            protocol=run_protocol(config, dataset, parts.model, parts.begun_from),
            environment=environment(device) | processes | config.data.remembered() | dict(remarks or {}),
            overwrite=overwrite,
        )
    )
    state = replace(new_state(config, dataset), fresh_precision=is_fresh(parts.begun_from))
    return Session(run, config, dataset, device, parts, state, progress, generator, team)


def go_on(
    run: RunFolder,
    config: RunConfig,
    dataset: Dataset,
    device: torch.device,
    progress: Progress,
    *,
    generator: torch.Generator = torch.default_generator,
    team: Team = ALONE,
) -> Session:
    """An unfinished run, within ``run_settings``; ``locked`` takes up the state saved last."""
    dataset = config.data.split_as_asked(dataset)
    if dataset.splitting != config.data.splitting():
        raise UserError(
            f"{run.path} was begun with {run.protocol['split']}, and data set {dataset.name!r} is split as "
            f"{dataset.splitting.chosen()}; give it without a split of its own"
        )
    # An epoch's line comes after a state, if only that before the first epoch.
    if not run.checkpoint.is_dir() or (run.history_file.is_file() and not run.has_checkpoint):
        lost = run.checkpoint / checkpoint.STATE_FILE if run.checkpoint.is_dir() else run.checkpoint
        raise UserError(f"{lost} is gone, and what was trained with it; restore it, or train with --overwrite")
    state = new_state(config, dataset)
    remedy = "load the data it was begun with, or train a new run"
    saved = checkpoint.load_state(run.checkpoint) if run.has_checkpoint else None
    if saved is not None:
        check_checkpoint(run, saved)
        checkpoint.check_dataset(
            saved,
            dataset=state.dataset,
            content_hash=state.content_hash,
            vocabulary_hash=state.vocabulary_hash,
            folder=run.checkpoint,
        )
        refuse_other_features(run.protocol, dataset, f"{run.path} was begun", remedy)
    else:
        refuse_other_data(run.protocol, dataset, f"{run.path} was begun", remedy)
    parts = make_parts(config, dataset, device, began=run.checkpoint if run.has_checkpoint else None)
    if parts.begun_from is not None and parts.begun_from["weights"] != run.protocol["begun_from"]["weights"]:
        raise UserError(
            f"{run.path} was to begin from other weights than {parts.begun_from['run']} has now; train it anew with "
            "--overwrite"
        )
    state = replace(state, fresh_precision=is_fresh(parts.begun_from))
    return Session(run, config, dataset, device, parts, state, progress, generator, team)


def _listener(progress: Progress | None, team: Team) -> Progress:
    """Who is told how it goes: of several processes, by the first."""
    return Silent() if progress is None or not team.leads else progress
