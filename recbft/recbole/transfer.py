"""A run of ``recbft train`` as a RecBole model, and back.

Both sides number the items, each in its own way; the raw ids say which number is which. What has a row per item
(``TrainableModel.per_item``) is put in the other side's order, the rest is copied.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recbft.config.fields import to_dict
from recbft.config.recbole_yaml import ADAPTED
from recbft.datasets import Dataset
from recbft.datasets.config import DataConfig
from recbft.datasets.content import ItemContent
from recbft.datasets.loading import AUTO
from recbft.errors import UserError
from recbft.evaluation.evaluate import Evaluation, evaluate
from recbft.evaluation.probability import calibrations
from recbft.models import OF_BACKBONES
from recbft.recbole.adapter import Adapter
from recbft.recbole.item_features import KEY
from recbft.recbole.models import adapter_for
from recbft.recbole.settings import MODEL_SECTIONS, OWN_TRAINING
from recbft.runs import checkpoint
from recbft.runs.environment import environment
from recbft.runs.folder import RunFolder
from recbft.training.build import build_model, new_state, run_protocol
from recbft.training.bundle import CONTENT_FOLDER, content_of, load_trained, own_config, write_vocabulary
from recbft.training.card import write_card


def recbole_settings(run: str | Path) -> dict[str, Any]:
    """What a RecBole config must say for this run's model: give it as ``config_dict``, with what names the data."""
    folder = RunFolder.open(run)
    config = own_config(folder)
    known = [name for name, adapted in ADAPTED.items() if adapted.model == config.model]  # any: the arm is written
    if not known:
        raise UserError(f"{run} holds a {config.model!r} model, which RecBole has no name for here")
    written = to_dict(config)
    from_item_file = (folder.checkpoint / CONTENT_FOLDER).is_dir() and any(
        file == AUTO or file.endswith(".item") for file in config.data.items or ()
    )
    return {
        "model": known[0],
        "arm": config.arm,
        "seed": config.seed,
        "MAX_ITEM_LIST_LENGTH": config.backbone.max_length,
        **{key: written[key] for key in ("mixer", *MODEL_SECTIONS) if written[key] is not None},
        **{key: written["training"][key] for key in ("learning_rate", "weight_decay", *OWN_TRAINING)},
        **({KEY: ItemContent.load(folder.checkpoint / CONTENT_FOLDER).kinds} if from_item_file else {}),
    }


def from_run(run: str | Path, config: Any, dataset: Any) -> Adapter:
    """The trained model of a run folder, its items in the order of RecBole's data set, in evaluation mode.

    A training that goes on with it in RecBole has no warm-up.

    Args:
        run: the folder.
        config: RecBole's Config; what it says of the model is not used, the window must hold what the model reads.
        dataset: RecBole's training data (``train_data._dataset``), made of the run's data.

    Raises:
        UserError: the folder holds no trained model, the data set is none, or the items are not the same.
    """
    if not hasattr(dataset, "field2id_token"):
        raise UserError(f"dataset is a {type(dataset).__name__}; give RecBole's data set, such as train_data._dataset")
    _, run_config, vocabulary, _, _, model = load_trained(run)
    content = model.state_dict().get(OF_BACKBONES)
    adapter: Adapter = adapter_for(run_config.model)(config, dataset, run_config, content)
    numbers = vocabulary.encode(adapter.item_tokens[1:].tolist())
    _check_same_items(numbers, adapter.item_tokens[1:], model, str(run))
    adapter.recommender.load_state_dict(_reordered(model, numbers))
    adapter.warmup_steps = 0  # as ``training.warm_start``: the precision channel is not to be switched off again
    adapter.to(config["device"]).eval()
    return adapter


def to_run(model: Adapter, data: Dataset, out: str | Path) -> RunFolder:
    """Write a model that RecBole trained as a run folder, for ``recbft evaluate`` and ``recbft recommend``.

    Args:
        model: from ``load_data_and_model``, or one just trained.
        data: the same data, loaded here; its test part is evaluated.
        out: the run's own folder; must not hold anything.

    Raises:
        UserError: the model or the data are not of ours, items or their features are not the same, or the folder is
            taken.
    """
    if not isinstance(model, Adapter):
        raise UserError(
            f"model is a {type(model).__name__}, and a run holds one of {', '.join(ADAPTED)}; of another model the "
            "ranks join a comparison (recbft compare --external NAME=FILE, docs/protocol.md)"
        )
    if not isinstance(data, Dataset):
        raise UserError(f"data is a {type(data).__name__}; load it with recbft.Dataset.load or Dataset.from_frame")
    if not data.splitting.is_plain:
        raise UserError(
            f"data set {data.name!r} is split as {data.splitting.chosen()}, and RecBole has trained on what "
            "leave-one-out trains on; give it without a split of its own"
        )
    RunFolder.refuse_taken(out, remedy="remove this one first")
    config = replace(model.run, data=DataConfig.behind(data))
    place = {token: number for number, token in enumerate(model.item_tokens)}
    numbers = np.array([place.get(str(raw), 0) for raw in data.item_ids], dtype=np.int64)
    _check_same_items(numbers, data.item_ids, model.recommender, "the RecBole model")
    with torch.random.fork_rng(devices=[]):
        content = content_of(config, data)
        ours: Any = build_model(config, data, content=content)
    weights = _reordered(model.recommender, numbers)
    _check_same_features(weights.get(OF_BACKBONES), ours.state_dict().get(OF_BACKBONES), data.name)
    ours.load_state_dict(weights)
    run = RunFolder.create(
        out, config=config.to_yaml(), protocol=run_protocol(config, data, ours), environment=environment()
    )
    write_vocabulary(run.checkpoint, data, content)
    taken = checkpoint.snapshot(
        model_state=ours.state_dict(),
        optimizer_state={},
        rng_state={"cpu": torch.get_rng_state()},
        state=replace(new_state(config, data), run=run.identity),
        best_model_state=ours.state_dict(),
        apart=False,
    )
    checkpoint.write(run.checkpoint, taken)
    ours.eval()
    ours.refresh()
    settings = config.evaluation
    parts: dict[str, Evaluation] = {
        part: evaluate(ours, data, part, filter_seen=settings.filter_seen, ks=settings.ks, lists=part == "test")
        for part in ("validation", "test")
    }
    metrics = {
        "filter_seen": settings.filter_seen,
        **{part: evaluation.metrics for part, evaluation in parts.items()},
        "exposure": parts["test"].exposure,
        "probability": calibrations(ours, data),
        "trained_by": "recbole",
    }
    write_card(run, metrics)
    run.finish(metrics, parts["test"].per_user)
    return run


def _check_same_items(numbers: NDArray[np.int64], ids: NDArray[Any], model: Any, other: str) -> None:
    """Every id has a number on the other side, and every number there an id."""
    num_items = len(model.item_table().weight) - 1
    missing = np.flatnonzero(numbers == 0)
    if missing.size or len(ids) != num_items:
        example = f", such as {str(ids[missing[0]])!r}" if missing.size else ""
        raise UserError(
            f"{other} has {num_items:,} items and the data {len(ids):,}, of which {missing.size:,} are unknown to it"
            f"{example}; use the data that the model was trained on (`recbft data prepare --to recbole` writes it)"
        )


def _check_same_features(there: Tensor | None, here: Tensor | None, name: str) -> None:
    """What the RecBole model knows of each item, (V + 1, F), is what the data have: None where there is nothing."""
    if there is None and here is None:
        return
    if there is None:
        raise UserError(
            f"the RecBole model knows items by their numbers alone, and data set {name!r} has item features; load it "
            "without items"
        )
    if here is None or here.shape != there.shape or not torch.allclose(here, there, atol=1e-5):
        has = "has none as it is loaded here" if here is None else "has others as it is loaded here"
        raise UserError(
            f"the RecBole model reads item features, and data set {name!r} {has}; load it with the .item file that "
            f"RecBole read (items='auto'), and with item_kinds as the {KEY} of its config: a column that is not named "
            "there is skipped ({COLUMN: 'skip'})"
        )


def _reordered(model: Any, numbers: NDArray[np.int64]) -> dict[str, Tensor]:
    """The weights with row i + 1 of every item table taken from row ``numbers[i]``; padding and rows beyond stay."""
    order = torch.from_numpy(np.concatenate([[0], numbers]))
    moved = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    for name in moved.keys() & set(model.per_item):
        beyond = torch.arange(len(order), len(moved[name]))
        moved[name] = moved[name][torch.cat([order, beyond])]
    return moved
