"""Write a data set as a RecBole atomic file: tab-separated, a typed header, a row per event, user by user.

RecBole holds times in single precision, in which unix seconds have steps of 64 and more, and sorts them stably: equal
after rounding, a user's rows keep their order in the file. So only histories that are sorted already are read in their
exact order. Users stand in the data set's order, so that the file, read back, has the same hashes. Without real times
an event's number in its history takes their place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from recbft.datasets.columns import PANDAS_WORDS
from recbft.datasets.dataset import Dataset
from recbft.errors import UserError
from recbft.system.files import make_folder, write_atomic

HEADER = "user_id:token\titem_id:token\ttimestamp:float"


def save_atomic(dataset: Dataset, folder: str | Path, name: str) -> Path:
    """Write ``folder/name/name.inter``, where RecBole with ``data_path: folder`` and ``dataset: name`` looks for it.

    Raises:
        UserError: an id cannot be written so that RecBole reads it back; or the folder cannot be written.
        RunError: the disk is full.
    """
    users = np.repeat(_texts(dataset.user_ids, "user"), dataset.lengths)
    items = _texts(dataset.item_ids, "item")[dataset.items - 1]
    times = dataset.times
    if times is None:
        times = np.arange(dataset.num_events) - np.repeat(dataset.offsets[:-1], dataset.lengths)
    frame = pd.DataFrame({"user": users, "item": items, "time": times, **numbers_of(dataset)})
    header = "\t".join([HEADER, *(f"{name}:float" for name in numbers_of(dataset))])
    path = Path(folder) / name / f"{name}.inter"
    make_folder(path.parent)

    def write(file: BinaryIO) -> None:
        file.write(f"{header}\n".encode())
        frame.to_csv(file, sep="\t", index=False, header=False, lineterminator="\n", quoting=3)

    write_atomic(path, write)
    return path


def numbers_of(dataset: Dataset) -> dict[str, NDArray[np.float64]]:
    """Weights and reliability of the events by their roles, (E,) each, as far as there are some."""
    both = {"weight": dataset.weights, "reliability": dataset.reliability}
    return {role: numbers for role, numbers in both.items() if numbers is not None}


def _texts(ids: NDArray[Any], side: str) -> NDArray[Any]:
    """The ids as text; refuses those that do not survive the file."""
    texts = np.array([str(raw) for raw in ids], dtype=object)
    for text in texts:
        if text in PANDAS_WORDS:  # RecBole reads with pandas, and would drop such an id's events
            raise UserError(f"{side} id {text!r} is read as a missing value by RecBole; rename it")
        if any(sign in text for sign in '\t\n\r"'):
            raise UserError(
                f"{side} id {text!r} holds a tab, a line break or a quote, which an atomic file cannot; rename it"
            )
    return texts
