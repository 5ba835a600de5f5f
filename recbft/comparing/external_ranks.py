"""Ranks that another system gave: a file that joins a comparison as one arm.

    user             raw id, as text or number; every user of the comparison once (per seed)
    rank             of the user's test target among all items, 1 is best; also read as rank_unfiltered
    rank_filtered    the same with the user's seen items masked
    seed             optional, from 0; without it the ranks stand for every seed
    target           optional, the raw id of the item ranked: another one than here is refused; where the split gives a
                     user several targets, a row for each, and this column says which

One kind of rank is enough. A run's own ``per_user.parquet`` is such a file too.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from recbft.datasets.vocabulary import canonical_text
from recbft.errors import UserError
from recbft.evaluation.metrics import owner_of
from recbft.experiments.lists import counted

IntArray = NDArray[np.int64]
_LAST_SEED = 2**32 - 1
_SETTINGS = {"rank": "unfiltered", "rank_unfiltered": "unfiltered", "rank_filtered": "filtered"}


class ExternalRanks(NamedTuple):
    """Ranks by setting in the order of the comparison's targets."""

    seeds: tuple[int, ...] | None  # None: one set of ranks for every seed
    ranks: dict[str, IntArray]  # setting -> (S, N), S = 1 without seeds
    others: int  # users of the file that the comparison does not have


def read_external(path: Path, users: NDArray[Any], targets: NDArray[Any], *, num_items: int) -> ExternalRanks:
    """Read a CSV or Parquet file of ranks.

    Args:
        users, targets: raw ids in the comparison's order, (N,).
        num_items: the worst rank there can be.

    Raises:
        UserError: a column is missing, a user is missing or listed twice, a rank or seed is not one, or a target is
            another.
    """
    table = _read(path)
    columns = {column: setting for column, setting in _SETTINGS.items() if column in table}
    if "user" not in table or not columns:
        found = ", ".join(repr(str(column)) for column in table)  # a blank beside a name is seen
        raise UserError(f"{path} has columns {found}; it needs 'user' and 'rank' or 'rank_filtered'")
    if len(set(columns.values())) < len(columns):
        raise UserError(f"{path} has both 'rank' and 'rank_unfiltered', which mean the same; keep one")
    for column in columns:
        table[column] = _whole(table[column], f"{path}: column {column!r}", "ranks", 1, num_items)
    if "seed" in table:
        table["seed"] = _whole(table["seed"], f"{path}: column 'seed'", "seeds", 0, _LAST_SEED)
    key, place = _texts(table["user"], path), {canonical_text(user): n for n, user in enumerate(users)}
    if owner_of(users) is not None:
        key, place = _by_target(table, key, users, targets, path)
    position = key.map(place)
    others = table["user"][position.isna()].unique()
    known = table[position.notna()].assign(position=position.dropna().astype(int))
    seeds: list[int | None] = [None]
    if "seed" in table and len(known):
        seeds = [*sorted(map(int, known["seed"].unique()))]
    parts = [known if seed is None else known[known["seed"] == seed] for seed in seeds]
    for seed, part in zip(seeds, parts, strict=True):
        _check_users(part, place, path if seed is None else f"{path}, seed {seed}", others)
    if "target" in known:
        _check_targets(known, targets, path)
    ordered = [part.sort_values("position") for part in parts]
    return ExternalRanks(
        seeds=None if "seed" not in table else tuple(seed for seed in seeds if seed is not None),
        ranks={
            setting: np.stack([part[column].to_numpy(np.int64) for part in ordered])
            for column, setting in columns.items()
        },
        others=len(others),
    )


def _by_target(
    table: pd.DataFrame, user: pd.Series[Any], users: NDArray[Any], targets: NDArray[Any], path: Path
) -> tuple[pd.Series[Any], dict[str | None, int]]:
    """What tells rows apart where users have several targets: user and target; and the place of each."""
    if "target" not in table:
        raise UserError(
            f"{path} has no column 'target', and the split gives a user several targets; give a row for each, as in a "
            "run's per_user.parquet"
        )
    pairs = zip(users, targets, strict=True)
    place: dict[str | None, int] = {f"{canonical_text(u)} {canonical_text(t)}": n for n, (u, t) in enumerate(pairs)}
    if len(place) < len(users):
        raise UserError(
            f"{path} cannot be read: this split asks a user for one item more than once, and no file says for which of "
            "them a rank is; compare under split_targets 'all' or 'first'"
        )
    return user + " " + _texts(table["target"], path), place


def _read(path: Path) -> pd.DataFrame:
    try:
        if path.suffix.lower() == ".parquet":
            return pd.read_parquet(path)
        if path.suffix.lower() == ".csv":
            return pd.read_csv(path, dtype={"user": str, "target": str}, keep_default_na=False)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give a .csv or .parquet file with columns user and rank") from None
    except (ValueError, OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())}); write it again") from None
    raise UserError(f"{path}: the ending {path.suffix!r} is not known; give a .csv or .parquet file")


def _whole(column: pd.Series[Any], name: str, kind: str, first: int, last: int) -> pd.Series[int]:
    values = pd.to_numeric(column, errors="coerce")
    bad = values.isna() | (values < first) | (values > last) | (values != values.round())
    if bad.any():
        worst = str(column[bad].iloc[0]) or "nothing"
        raise UserError(
            f"{name} holds {worst} ({int(bad.sum()):,} such values); give whole {kind} from {first} to {last:,}"
        )
    return values.astype(np.int64)


def _texts(ids: pd.Series[Any], path: Path) -> pd.Series[Any]:
    """The canonical texts of a column of ids."""
    return ids.map(partial(canonical_text, name=f"{path}: an id in column {ids.name!r}"))


def _check_users(part: pd.DataFrame, place: dict[str | None, int], name: object, others: NDArray[Any]) -> None:
    if len(twice := part["user"][part["position"].duplicated()].unique()):
        one = "one rank per user" if "seed" in part else "one rank per user, or the seed of each in a column 'seed'"
        raise UserError(f"{name} lists {counted(len(twice), 'user')} more than once, such as {twice[0]}; give {one}")
    if len(part) < len(place):
        there = set(part["position"])
        example = next(user for user, position in place.items() if position not in there)
        known = f" (and has {counted(len(others), 'other')}, such as {str(others[0])!r})" if len(others) else ""
        raise UserError(
            f"{name} lacks {len(place) - len(part):,} of {len(place):,} users, such as {example!r}{known}; "
            "rank every user's test target, with ids as they are in the data"
        )


def _check_targets(known: pd.DataFrame, targets: NDArray[Any], path: Path) -> None:
    here, there = _texts(pd.Series(targets[known["position"]], index=known.index), path), _texts(known["target"], path)
    if len(other := np.flatnonzero(there != here)):
        first = other[0]
        raise UserError(
            f"{path} ranks other targets than the runs, such as {there.iloc[first]!r} for user "
            f"{canonical_text(known['user'].iloc[first])!r}, whose target here is {here.iloc[first]!r} ({len(other):,} "
            "such rows); rank those in a run's per_user.parquet, or leave the column 'target' out if it says something "
            "else"
        )
