"""Which items a list may hold: for everyone, or for each user by a mapping.

Shapes: S histories.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from recbft.datasets.samples import ranges
from recbft.datasets.vocabulary import Vocabulary, canonical_text, shown_id
from recbft.errors import UserError
from recbft.serving.histories import as_list

IntArray = NDArray[np.int64]
# Raw item ids for everyone, or such lists by user.
Choice = Iterable[Any] | Mapping[Any, Iterable[Any]]


class Pairs(NamedTuple):
    """Item indices of each history: those of history s are ``items[offsets[s]:offsets[s + 1]]``."""

    items: IntArray
    offsets: IntArray  # (S + 1,)

    def rows(self, rows: IntArray) -> Pairs:
        """Those of some histories."""
        start, stop = self.offsets[rows], self.offsets[rows + 1]
        return Pairs(self.items[ranges(start, stop)], np.concatenate([[0], np.cumsum(stop - start)]))

    def beside(self, other: Pairs | None) -> Pairs:
        """Each history's own and the other's."""
        if other is None:
            return self
        row = np.concatenate(
            [np.repeat(np.arange(len(each.offsets) - 1), np.diff(each.offsets)) for each in (self, other)]
        )
        items = np.concatenate([each.items[each.offsets[0] : each.offsets[-1]] for each in (self, other)])
        offsets = (self.offsets - self.offsets[0]) + (other.offsets - other.offsets[0])
        return Pairs(items[np.argsort(row, kind="stable")], offsets)


class Filters(NamedTuple):
    """What lists may hold; each None where nothing is asked."""

    among: IntArray | None = None  # the only items for anyone, each once and in order
    barred: IntArray | None = None  # items for nobody, each once and in order
    only: Pairs | None = None  # the only items for each history
    excluded: Pairs | None = None  # items that each history's list may not hold

    @classmethod
    def of(
        cls, vocabulary: Vocabulary, users: Sequence[Any], exclude: Choice | None, candidates: Choice | None
    ) -> Filters:
        """The filters of a request.

        Raises:
            UserError: candidates of which the model knows none, or that are given for none of the users.
        """
        among = barred = only = excluded = None
        if isinstance(candidates, Mapping):
            only = _by_user("candidates", vocabulary, users, candidates)
            among = np.unique(only.items)
        elif candidates is not None:
            among = _known("candidates", vocabulary, candidates)
        if isinstance(exclude, Mapping):
            excluded = _by_user("exclude", vocabulary, users, exclude)
        elif exclude is not None:
            barred = _known("exclude", vocabulary, exclude)
        return cls(among, barred, only, excluded)

    def rows(self, rows: IntArray) -> Filters:
        """The filters of some histories."""
        only, excluded = (None if each is None else each.rows(rows) for each in (self.only, self.excluded))
        return self._replace(only=only, excluded=excluded)


def _known(name: str, vocabulary: Vocabulary, given: Any) -> IntArray:
    """The indices of the items that the model knows."""
    ids = _ids(name, given)
    index = vocabulary.encode(ids)
    if not index.any():
        _refuse_or_warn(name, _unknown(name, vocabulary, ids))
    return np.unique(index[index > 0])


def _by_user(name: str, vocabulary: Vocabulary, users: Sequence[Any], given: Mapping[Any, Any]) -> Pairs:
    """The items of each user; none for one who is not named. Users are equal when their texts are, as items are."""
    named: dict[str | None, list[Any]] = {}
    for user, ids in given.items():
        text = _text(user)
        if text in named:
            raise UserError(f"{name} names user {shown_id(user)} twice, as number and as text; give each user one list")
        named[text] = list(_ids(f"{name} of user {shown_id(user)}", ids))
    texts = [_text(user) for user in users]
    if not any(text in named for text in texts) and (named or name == "candidates"):
        # A refusal goes to the caller, a warning to the log of a service, which holds no ids of users.
        first = [
            f", such as {shown_id(some[0])}" if some and name == "candidates" else "" for some in (list(given), users)
        ]
        _refuse_or_warn(
            name,
            f"{name} names {len(named):,} users{first[0]}, and none of the {len(users):,} users of the histories"
            f"{first[1]}; give lists of item ids by user",
        )
    lists = [named.get(text, ()) for text in texts]
    index = vocabulary.encode([raw for ids in lists for raw in ids])
    if len(index) and not index.any():
        _refuse_or_warn(name, _unknown(name, vocabulary, [raw for ids in lists for raw in ids]))
    user = np.repeat(np.arange(len(users)), [len(ids) for ids in lists])[index > 0]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(user, minlength=len(users)))])
    return Pairs(index[index > 0], offsets)


def _text(user: Any) -> str | None:
    return str(user) if isinstance(user, tuple) else canonical_text(user, "a user id")


def _unknown(name: str, vocabulary: Vocabulary, ids: Any) -> str | None:
    """What to say of item ids of which the model knows none; of none there is nothing to say."""
    such = shown_id(next(iter(ids))) if len(ids) else None
    if name == "candidates":
        shown = "" if such is None else f" (such as {such})"
        return f"none of the {len(ids):,} candidates is in the model's vocabulary{shown}; give some that are"
    return (
        None
        if such is None
        else (
            f"none of the {len(ids):,} excluded items is in the model's vocabulary (such as {such}, while the model "
            f"knows {vocabulary.example!r}), so that none is left out of the lists"
        )
    )


def _refuse_or_warn(name: str, message: str | None) -> None:
    """Without candidates there is no list; what is not left out is only warned about, at the caller of recbft."""
    if message is not None and name == "candidates":
        raise UserError(message)
    if message is not None:
        warnings.warn(message, stacklevel=7)


def _ids(what: str, ids: Any) -> Any:
    """The ids as ``Vocabulary.encode`` takes them."""
    is_column = isinstance(ids, (np.ndarray, pd.Series, pd.Index)) and ids.ndim == 1
    return ids if is_column else as_list(ids, f"{what} is", "a list of item ids", ordered=False)
