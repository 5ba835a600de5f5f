"""Synthetic data sets, and the truth behind them: how reliable each item and user is."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from recbft.datasets.dataset import Dataset
from recbft.datasets.loading import SYNTHETIC, source_files_of
from recbft.datasets.synth import SyntheticConfig, generate, synthetic_events, truth_files
from recbft.datasets.vocabulary import Vocabulary
from recbft.errors import UserError


class PlantedReliability(NamedTuple):
    """The truth behind generated data, for the items and users of a data set; NaN where it is not known."""

    items: NDArray[np.float64]  # (V,)
    users: NDArray[np.float64]  # (U,)


def synthetic_dataset(config: SyntheticConfig) -> Dataset:
    """The generated log as a data set called ``synthetic``, with its times."""
    return Dataset.from_events(synthetic_events(config), name="synthetic")


def planted_reliability(
    dataset: Dataset, source: str | Path, data_root: str | Path | None = None
) -> PlantedReliability | None:
    """The truth behind a data set, or None where there is none or it is not at hand.

    Args:
        source: what it was loaded from: ``synthetic``, whose truth is generated anew and taken if the events are the
            same, or a file of ``save_synthetic``, which has its truth beside it.
        data_root: as in ``Dataset.load``.
    """
    if str(source) == SYNTHETIC:
        config = SyntheticConfig()
        if config.num_users != dataset.num_users:  # nobody is dropped; saves generating what cannot be the same
            return None
        made = generate(config)
        if Dataset.from_frame(made.events, time="timestamp").content_hash != dataset.content_hash:
            return None
        items, users = made.items, made.users
    else:
        place = None
        with suppress(UserError):
            place = next(iter(source_files_of(source, data_root)), None)
        if place is None or not all(file.is_file() for file in truth_files(place)):
            return None
        items, users = map(pd.read_parquet, truth_files(place))
    return PlantedReliability(
        items=_reliability(items, "item_id", dataset.item_ids),
        users=_reliability(users, "user_id", dataset.user_ids),
    )


def _reliability(truth: pd.DataFrame, column: str, ids: NDArray[Any]) -> NDArray[np.float64]:
    """The reliability of each id, which may be text where the truth has numbers."""
    known = np.append(np.nan, truth["reliability"].to_numpy(np.float64))
    return known[Vocabulary(truth[column].to_numpy()).encode(ids)]
