"""Begin a run from the weights of an older one, so that what it learned goes on being used as its data grow.

    w = keep w_older + (1 - keep) w_initial                                                      (a)

Initial weights are those that the run would have begun with. Of what has a row per item, rows go together that stand
for one item, by its raw id, and items that the older run has not keep their initial rows. Running means and the warm-up
are taken over; what is counted in the data, such as where precision starts, is that of the new data.

With ``keep`` 1 a run stays near where the older one ended, and can generalise worse than one begun from scratch;
shrunk and perturbed as in (a) it is not shown to, and is still done sooner (docs/serving.md has the figures).

Source: Ash and Adams, On Warm-Starting Neural Network Training (arXiv 1910.08475).
Shapes: V items of the new data.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recbft.config.fields import to_dict
from recbft.datasets import Dataset
from recbft.datasets.vocabulary import Vocabulary
from recbft.errors import UserError
from recbft.models.contract import TrainableModel
from recbft.runs.checkpoint import best_digest
from recbft.runs.folder import RunFolder
from recbft.training.bundle import differences, load_trained
from recbft.training.run_config import RunConfig

KEEP = 0.4


def warm_start(model: torch.nn.Module, config: RunConfig, dataset: Dataset) -> dict[str, Any] | None:
    """Give a new model (a) of the best weights of the run that ``training.warm_start`` names.

    Args:
        model: of ``config`` and ``dataset``, with its initial weights.

    Returns:
        What a protocol keeps of it: the older ``run``, the SHA-256 of its ``weights``, its data's ``content_hash``, how
        much was ``kept``, and how many of the new data's items it knew, ``known_items``; None where no run is named.
    """
    path = config.training.warm_start
    if path is None:
        return None
    assert isinstance(model, TrainableModel)  # a setting of training is refused of others
    folder, weights = RunFolder.open(path).checkpoint, None
    while (now := best_digest(folder)) != weights:  # a training that goes on may put better ones in their place
        weights, (run, their_config, vocabulary, older) = now, load_trained(path)
    changed = differences(to_dict(config), to_dict(their_config))
    differing = [f"{key} {theirs!r} (here {ours!r})" for key, (ours, theirs) in changed.items()]
    rows = _rows_of(dataset, vocabulary, run.path)
    keep = KEEP if config.training.warm_start_keep is None else config.training.warm_start_keep
    try:
        state = _taken_over(model, older.state_dict(), rows, len(vocabulary), keep)
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
    model: TrainableModel, theirs: Mapping[str, Tensor], rows: Tensor, num_their_items: int, keep: float
) -> dict[str, Tensor]:
    """The state of the new model with the older one's weights in it."""
    mine, learned = model.state_dict(), {name for name, _ in model.named_parameters()}
    if alone := sorted(theirs.keys() ^ mine.keys()):
        raise _MisfitError(f"only one of the two has {alone[0]}")
    taken: dict[str, Tensor] = {}
    for name, own in mine.items():
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
