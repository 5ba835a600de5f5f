"""What a run folder holds for serving, and whether it is that of the run asked for.

The vocabulary lies beside the best weights, so that no data set is needed:

checkpoint/vocabulary.parquet    item_id, training_count, and the categories and sets of item features by which lists
                                 can be capped, as feature:NAME; a row per item, index order
checkpoint/content/              how item features become vectors, where the model reads some; of a join a folder for
                                 each of its models, ``first`` and ``second``
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from recbft.config.fields import by_setting, to_dict
from recbft.config.yaml_text import read_yaml
from recbft.datasets import Dataset
from recbft.datasets.content import ItemContent
from recbft.datasets.split import Splitting
from recbft.datasets.vocabulary import Vocabulary
from recbft.errors import UserError
from recbft.evaluation.metrics import config_hash
from recbft.mixers import MIXERS
from recbft.models import MODELS
from recbft.models.join import Join
from recbft.runs import checkpoint
from recbft.runs.checkpoint import TrainState, vocabulary_hash
from recbft.runs.folder import RunFolder
from recbft.system.files import write_parquet
from recbft.system.torch_state import set_aside
from recbft.training.process_settings import OwnRandomNumbers
from recbft.training.run_config import RunConfig, run_config_of

CONTENT_FOLDER = "content"  # how item features become vectors
VOCABULARY_FILE = "vocabulary.parquet"
LABEL = "feature:"  # begins the name of a column of labels there
LABELS = ("category", "set")  # kinds of features
OF_THE_MODEL = ("model", "arm", "mixer", "backbone", "mixing", "moe", "core")  # of a configuration


def content_of(config: RunConfig, dataset: Dataset, *, began: Path | None = None) -> ItemContent | None:
    """How the item features that a model reads become vectors: fitted on training, but as in the run it begins from.

    What a warm start has learned of a column of these vectors is only true of that column.

    Args:
        began: the folder of the run's own state where it has one, which needs no older run.
    """
    if config.content_config is None or dataset.features is None:
        return None
    if config.training.warm_start is not None:
        folder = RunFolder.open(config.training.warm_start).checkpoint if began is None else began
        if (folder / CONTENT_FOLDER).is_dir():
            return ItemContent.load(folder / CONTENT_FOLDER)
    return dataset.content(config.content_config)


def write_vocabulary(folder: Path, dataset: Dataset, content: ItemContent | None = None) -> None:
    """Write the vocabulary and training counts, unless they stand there already, whole; and how features are read."""
    if content is not None:
        (folder / CONTENT_FOLDER).mkdir(parents=True, exist_ok=True)
        content.save(folder / CONTENT_FOLDER)
    path = folder / VOCABULARY_FILE
    try:
        ids, _, _ = _read_vocabulary(path)
        is_whole = vocabulary_hash(ids) == vocabulary_hash(dataset.item_ids)
    except UserError:  # missing, or damaged
        is_whole = False
    if not is_whole:
        frame = pd.DataFrame({"item_id": dataset.item_ids, "training_count": dataset.training_counts[1:]})
        table = pa.Table.from_pandas(frame, preserve_index=False)
        known = {} if dataset.features is None else dataset.features.kinds
        for name in (name for name, kind in known.items() if kind in LABELS):
            assert dataset.features is not None
            table = table.append_column(LABEL + name, dataset.features.table.column(name))
        write_parquet(path, table)


class Trained(NamedTuple):
    """A trained model with its best weights, in evaluation mode, and what it takes to use it."""

    run: RunFolder
    config: RunConfig
    vocabulary: Vocabulary
    counts: torch.Tensor  # (V + 1,) events of each item in training, index 0 padding
    labels: Any  # pyarrow, a row per item: the categories and sets that are known of it
    model: nn.Module


def load_trained(path: str | Path) -> Trained:
    """The trained model of a run folder.

    Raises:
        UserError: no run, no best weights yet, or a file is damaged or belongs to another run.
    """
    run = RunFolder.open(path)
    config = own_config(run)
    state = checkpoint.load_state(run.checkpoint)
    ids, counts, labels = _read_vocabulary(run.checkpoint / VOCABULARY_FILE)
    if vocabulary_hash(ids) != state.vocabulary_hash:
        raise UserError(
            f"{run.checkpoint / VOCABULARY_FILE} is not the vocabulary that {run.path} was trained with; "
            "restore the file, or train again into a new folder"
        )
    check_checkpoint(run, state)
    weights = checkpoint.load_best(run.checkpoint)
    with set_aside(), OwnRandomNumbers(parameters=False):
        model = model_for(config, counts, weights)
    try:
        model.load_state_dict(weights)
    except RuntimeError:
        raise UserError(
            f"{run.config_file} describes another model than the weights in {run.checkpoint}; restore the file, or "
            "train again into a new folder"
        ) from None
    model.eval()
    return Trained(run, config, Vocabulary(ids), counts, labels, model)


def model_for(config: RunConfig, training_counts: Tensor, weights: Mapping[str, Tensor]) -> nn.Module:
    """The model of a configuration with room for its weights, which say how wide the content of items is."""
    parts: list[Any] = []
    for name, part in config.parts.items():
        own = {key.removeprefix(f"{name}."): each for key, each in weights.items() if key.startswith(f"{name}.")}
        parts.append(model_for(part, training_counts, own))
    if parts:
        return Join(parts[0], parts[1], training_counts, by_count=config.backbone.by_count)
    content = MODELS[config.model].content
    return config.build(training_counts, None if content is None else weights.get(content))


def own_config(run: RunFolder, *, to_train: bool = False) -> RunConfig:
    """The configuration of a run, as its ``config.yaml`` has it.

    Here alone it is held against the ``config`` in ``protocol.json``, with which the run was begun. Of a run that is
    only read, data, training and evaluation may be set otherwise.

    Args:
        to_train: whether the run is to go on, which it does as it was begun.

    Raises:
        UserError: the file cannot be read, or says something else than what the run was begun with: the weights might
            fit all the same.
    """
    written, begun = read_yaml(run.config_file), run.protocol.get("config", {})
    put_back = f"restore the file ({run.protocol_file.name} holds its values), or train again into a new folder"
    lacking = next(_lacking(written, begun), None)
    if lacking is not None:
        raise UserError(
            f"{run.config_file} lacks {lacking}, with which the run was begun, and may be cut off; {put_back}"
        )
    mixer = written.get("mixer")
    if isinstance(mixer, str) and mixer not in MIXERS:
        raise UserError(
            f"{run.config_file} has mixer {mixer!r}, which this program does not know; if it is one of your own, run "
            "the lines that enter it in recbft.mixers.MIXERS first, in a script: the command line knows none of them"
        )
    config = run_config_of(written, run.config_file)
    changed = differences(to_dict(config), begun, tuple(begun) if to_train else (*OF_THE_MODEL, "seed"))
    if changed:
        said = ", ".join(f"{key} is {now!r} and was {was!r}" for key, (now, was) in changed.items())
        raise UserError(f"{run.config_file} was changed since the run was begun: {said}; {put_back}")
    with suppress(UserError):  # who needs more of that file says what is wrong with it
        return replace(config, data=config.data.in_remembered(run.environment.get("data_root")))
    return config


def check_checkpoint(run: RunFolder, state: TrainState) -> None:
    """Refuse a checkpoint that was saved under another protocol than the run has: its configuration, data or seed."""
    protocol = run.protocol
    is_own = state.run in (None, run.identity)  # None: of a version that did not say it
    of_config = state.config_hash == config_hash(protocol.get("config", {}))
    if not (is_own and of_config and state.content_hash == protocol.get("content_hash")):
        raise UserError(
            f"{run.checkpoint} is of another run (seed {state.seed}, data set {state.dataset!r} with content "
            f"{state.content_hash[:12]}) than {run.protocol_file}; put the run's own files back, or train again into a "
            "new folder"
        )


def differences(
    here: Mapping[str, Any], there: Mapping[str, Any], keys: tuple[str, ...] = OF_THE_MODEL
) -> dict[str, tuple[Any, Any]]:
    """The settings that two configurations both have, with the two values, where these are not the same."""
    one, other = (by_setting({key: config[key] for key in keys if key in config}) for config in (here, there))
    # Where one has no such key, the model, the arm or the mixer differ too.
    return {key: (one[key], other[key]) for key in one if key in other and one[key] != other[key]}


def refuse_other_settings(there: Mapping[str, Any], now: Mapping[str, Any], what: str, remedy: str) -> None:
    """Refuse to go on with other settings than those begun with, wherever the data, split alike, were read from.

    Args:
        what: what was begun and the verb, such as "DIR holds a run with".
    """
    before, after = ({**one, "data": _split_asked(one.get("data") or {})} for one in (there, now))
    if config_hash(before) != config_hash(after):
        raise UserError(f"{what} {first_difference(before, after)}; {remedy}")


def _split_asked(data: Mapping[str, Any]) -> dict[str, Any]:
    """What settings say of the split, but for that it is the data's own: this the data say, and their hash."""
    chosen = Splitting.of(data).chosen()
    return {key: value for key, value in chosen.items() if (key, value) != ("split", "given")}


def refuse_other_data(begun: Mapping[str, Any], dataset: Dataset, what: str, remedy: str) -> None:
    """Refuse to go on with data of another content than those begun with, wherever they lie.

    Args:
        begun: the hashes of these, as a protocol has them.
        what: what was begun, such as "DIR holds a run".
    """
    if begun["content_hash"] != dataset.content_hash:
        raise UserError(
            f"{what} on data with content {begun['content_hash'][:12]}, and {dataset.name!r} as loaded has "
            f"{dataset.content_hash[:12]}; {remedy}"
        )
    refuse_other_features(begun, dataset, what, remedy)


def refuse_other_features(begun: Mapping[str, Any], dataset: Dataset, what: str, remedy: str) -> None:
    """Refuse to go on with other item features, as ``refuse_other_data``; where there were none, any go."""
    before, now = begun.get("features_hash"), dataset.hashes.get("features_hash")
    if before not in (None, now):
        has = "has none" if now is None else f"has features {now[:12]}"
        raise UserError(f"{what} with item features {before[:12]}, and {dataset.name!r} as loaded {has}; {remedy}")


def first_difference(there: Any, now: Any, key: str = "") -> str:
    """The first key in which two configs differ, with both values."""
    if isinstance(there, Mapping) and isinstance(now, Mapping):
        for name in [*now, *(name for name in there if name not in now)]:
            if config_hash({"": there.get(name)}) != config_hash({"": now.get(name)}):
                return first_difference(there.get(name), now.get(name), f"{key}.{name}" if key else str(name))
    return f"{key} {there!r}, and {now!r} is asked for"


def _lacking(written: Any, begun: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys of one tree that another has not."""
    for key, value in begun.items():
        if not isinstance(written, Mapping) or key not in written:
            yield f"{prefix}{key}"
        elif isinstance(value, Mapping):
            yield from _lacking(written[key], value, f"{prefix}{key}.")


def _read_vocabulary(path: Path) -> tuple[Any, torch.Tensor, Any]:
    try:
        with open(path, "rb") as file:  # the path itself need not be UTF-8
            table = pq.read_table(file)
        ids, counts = table["item_id"], table["training_count"].to_numpy().astype(np.int64)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; restore it from a copy, or train again into a new folder") from None
    except (pa.ArrowInvalid, OSError, KeyError) as error:
        raise UserError(f"{path} is damaged ({error}); restore it, or train again into a new folder") from None
    numeric = pa.types.is_integer(ids.type)
    raw = ids.to_numpy().astype(np.int64) if numeric else np.array(ids.to_pylist(), dtype=object)
    names = [name for name in table.column_names if name.startswith(LABEL)]
    labels = table.select(names).rename_columns([name.removeprefix(LABEL) for name in names])
    return raw, torch.from_numpy(np.concatenate([[0], counts])), labels
