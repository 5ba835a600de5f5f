"""Synthetic data sets, and the truth behind them: how reliable each item and user is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from recbft.datasets.dataset import Dataset
from recbft.datasets.loading import source_file_of
from recbft.datasets.reading.opening import one_line
from recbft.datasets.synth import SyntheticConfig, generate, synthetic_events
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
        dataset: the data.
        source: what it was loaded from: ``synthetic``, whose truth is generated anew and taken if the events are the
            same, or a file of ``save_synthetic``, which has its truth beside it.
        data_root: as in ``Dataset.load``.

    Raises:
        UserError: the truth is there and cannot be read.
    """
    if str(source) == "synthetic":
        config = SyntheticConfig()
        if config.num_users != dataset.num_users:  # nobody is dropped; saves generating what cannot be the same
            return None
        made = generate(config)
        if Dataset.from_frame(made.events, time="timestamp").content_hash != dataset.content_hash:
            return None
        items, users = made.items, made.users
    else:
        try:
            place = source_file_of(source, data_root)
        except UserError:
            return None
        assert place is not None, "only the generator has no file"
        files = [place.with_name(f"{place.stem}.truth-{side}.parquet") for side in ("items", "users")]
        if not all(file.is_file() for file in files):
            return None
        items, users = (_read_truth(file, f"{side}_id") for file, side in zip(files, ("item", "user"), strict=True))
    return PlantedReliability(
        items=_reliability(items, "item_id", dataset.item_ids), users=_reliability(users, "user_id", dataset.user_ids)
    )


def _read_truth(file: Path, column: str) -> pd.DataFrame:
    try:
        return pd.read_parquet(file, columns=[column, "reliability"])
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({one_line(error)}); generate the data again, or remove it") from None


def _reliability(truth: pd.DataFrame, column: str, ids: NDArray[Any]) -> NDArray[np.float64]:
    """The reliability of each id, which may be text where the truth has numbers."""
    known = np.append(np.nan, truth["reliability"].to_numpy(np.float64))
    return known[Vocabulary(truth[column].to_numpy()).encode(ids)]
