"""The columns of RecBole's ``.item`` file that a config names, as recbft reads such a file.

    item_features: [class, release_year]                     kinds by the typed header, as ``--items auto``
    item_features: {class: set, release_year: number}        kinds as ``--item-kind``

They are taken as they were read: RecBole would fill a missing number with the mean, scale it, and put the columns into
every batch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recbft.datasets.content import ItemContent
from recbft.datasets.features import TYPED_HEADER, ItemFeatures
from recbft.errors import UserError, did_you_mean
from recbft.training.run_config import RunConfig

KEY = "item_features"


def named_in(given: Any) -> dict[str, str | None]:
    """What the key says: column -> kind, or None for that of the header; empty where there is no such key."""
    if given is None:
        return {}
    named = dict(given) if isinstance(given, Mapping) else given
    if not isinstance(named, dict):
        if not isinstance(named, (list, tuple)):
            raise UserError(f"{KEY} is {given!r}; give columns of the .item file, such as [class, release_year]")
        named = dict.fromkeys(named)
    for column, kind in named.items():
        if not (isinstance(column, str) and (kind is None or isinstance(kind, str))):
            raise UserError(f"{KEY} has {column!r}: {kind!r}; give names of columns, or names with kinds")
    return named


def read_features(dataset: Any) -> ItemFeatures | None:
    """The columns that the config names, a row for each item of the file; None where it names none.

    Args:
        dataset: RecBole's, its files read and nothing else done.

    Raises:
        UserError: RecBole has not read the file or a column, or a value does not fit its kind.
    """
    named = named_in(dataset.config[KEY])
    if not named:
        return None
    file = os.path.join(dataset.dataset_path, f"{dataset.dataset_name}.item")
    frame, item = dataset.item_feat, dataset.iid_field
    columns = [] if frame is None else [column for column in frame.columns if column != item]
    for column in named:
        if column not in columns:
            raise UserError(f"{KEY} names {column!r}, {_why_not_read(dataset, file, column)}")
    separator = dataset.config["seq_separator"]
    # In the order of the file, as recbft reads it.
    frame = frame[[item, *(column for column in columns if column in named)]].dropna(subset=[item])
    kinds = {}
    for column, kind in named.items():
        header = dataset.field2type[column].value
        if header == "token_seq":  # as the text in the file, so that any kind of text can be asked for
            frame[column] = [separator.join(tokens) for tokens in frame[column]]
        of_header = f"set:{separator}" if header == "token_seq" else TYPED_HEADER[header]
        kinds[column] = of_header if kind is None else kind
    return ItemFeatures.from_frame(frame, item=item, kinds=kinds, source=file)


def content_of(config: Any, run: RunConfig, dataset: Any, counts: NDArray[np.int64]) -> Tensor | None:
    """What the model is to know of each item, (V + 1, F); None where it reads no features.

    Args:
        config: RecBole's.
        dataset: the training part of its data.
        counts: training events of each item, (V + 1,).
    """
    if not named_in(config[KEY]):
        return None
    if getattr(dataset, "features_read", None) is None:
        raise UserError(
            f"the config names {KEY}, and the data set, a {type(dataset).__name__}, was made for another model or "
            "config; make it with recbole.data.create_dataset(config)"
        )
    tokens = np.array(dataset.field2id_token[dataset.iid_field][1:], dtype=object)
    features = dataset.features_read.aligned(tokens).telling()
    if (how := run.content_config) is None:
        return None
    return torch.from_numpy(ItemContent.fit(features, counts, how).matrix(features).values)


def _why_not_read(dataset: Any, file: str, column: str) -> str:
    if not os.path.isfile(file):
        return f"but there is no {file}; put the features there, or leave {KEY} out"
    with open(file, encoding=dataset.config["encoding"]) as opened:
        header = opened.readline().rstrip("\n").split(dataset.config["field_separator"])
    columns = [field.partition(":")[0] for field in header]
    if column not in columns:
        return f"but {file} has no such column; {did_you_mean(column, columns, listed_as='columns')}"
    return f"which RecBole has not read; name it in load_col.item, beside {dataset.iid_field!r}, or leave load_col out"
