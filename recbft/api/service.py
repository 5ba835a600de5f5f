"""What a service answers to requests of plain JSON values, whichever run stands in its folder.

Nothing here knows of HTTP, which is ``recbft.api.web``. One run answers until the next is loaded and has answered once;
a request that has begun is answered by the run that it began with.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from logging import getLogger
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from recbft.api.recommender import Recommender
from recbft.config.fields import is_whole
from recbft.datasets.events import USUAL_TIME
from recbft.errors import UserError, did_you_mean, shown
from recbft.runs.folder import RunFolder
from recbft.serving.histories import RELIABILITY, as_list
from recbft.serving.lists import Recommended, check_k

BESIDE = {"times": USUAL_TIME, "reliability": RELIABILITY}  # what may stand beside items, and its column
# of a request for lists
KEYS = ("histories", *BESIDE, "k", "exclude", "candidates", "cap", "filter_seen", "fallback")
TRY_AGAIN = 30.0  # seconds after which a run that could not be loaded is tried again: it may have been half copied
Identity = tuple[tuple[str, int, int] | None, ...]
_EXAMPLE = 'such as {"histories": {"ann": ["tea", "milk"]}, "k": 10}'
_LOG = getLogger("recbft.service")


class Limits(NamedTuple):
    """What one request may ask for."""

    body: int = 2**20  # bytes
    users: int = 1000
    k: int = 1000


class Held(NamedTuple):
    """A run that has answered once."""

    recommender: Recommender
    identity: Identity | None

    @property
    def named(self) -> dict[str, Any]:
        """What an answer says of its run: the folder's name, and the first digits of the SHA-256 of its weights."""
        run = self.recommender.run
        assert run is not None
        weights = self.recommender.weights
        return {"run": run.path.name, "weights": None if weights is None else weights[:12]}


class Service:
    """The answers of the run in a folder, or of the one that a link leads to.

    Any number of threads may ask; ``refresh`` changes the run between two requests.

    Args:
        items: files with the features of new items, as ``Recommender.with_items`` reads them; read again when they
            change.

    Raises:
        UserError: as ``Recommender.load`` and ``with_items``, or the run cannot recommend.
    """

    def __init__(self, path: str | Path, limits: Limits | None = None, *, items: Sequence[str | Path] = ()) -> None:
        self.path, self.limits, self.items = Path(path), limits or Limits(), [Path(file) for file in items]
        self._asked_to_reload = False
        self._lacking = False  # whether the log says that nothing stands there that can be loaded
        self._refused: tuple[Identity | None, float] | None = None  # which run could not be loaded, and until when
        self._loading = threading.Lock()
        self._held = self._load()

    @property
    def named(self) -> dict[str, Any]:
        """The run that answers now; see ``Held.named``."""
        return self._held.named

    def ask_to_reload(self) -> None:
        """Let the next ``refresh`` load the run, whether or not it has changed; may be called in a signal handler."""
        self._asked_to_reload = True

    def refresh(self) -> Literal["loaded", "failed"] | None:
        """Load the run if another stands in its place by now, if items changed, or if that was asked for; else None.

        Where it cannot be loaded, the run of before goes on answering and the log says why.
        """
        with self._loading:
            asked, self._asked_to_reload = self._asked_to_reload, False
            identity = self._identity()
            if identity is None and not self._lacking:  # not finished, or between two
                _LOG.warning("%s holds no finished run now, %s goes on", self.path, self.named["run"])
            self._lacking = identity is None
            if not asked:
                if identity in (None, self._held.identity):
                    return None
                if self._refused is not None and self._refused[0] == identity and monotonic() < self._refused[1]:
                    return None
            try:
                held = self._load()
            except Exception as error:  # whatever is wrong with the new one, the old one answers
                self._refused = identity, monotonic() + TRY_AGAIN
                why = None if isinstance(error, UserError) else error
                _LOG.error("%s was not loaded, %s goes on: %s", self.path, self.named["run"], error, exc_info=why)
                return "failed"
            self._refused, self._held = None, held
            _LOG.info("loaded", extra={"fields": held.named})
            return "loaded"

    def recommend(self, request: Any) -> dict[str, Any]:
        """The lists of some users.

        Args:
            request: a mapping with ``histories``, raw item ids by user (a mapping, or a list of lists, whose users are
                numbered from 0), and what else ``Recommender.recommend_lists`` takes; None is not given. ``times``
                holds whole numbers in the form of the histories, in the unit of the training data, for a model that
                reads them, and ``reliability`` numbers, or None where it is missing.

        Returns:
            ``run``, ``weights`` and ``lists``: for each user, in the order of the request, ``user``, ``items``,
            ``scores``, ``probabilities``, ``precision`` and ``fallback``.

        Raises:
            UserError: a wrong request, or one beyond the limits.
        """
        if not isinstance(request, dict):
            raise UserError(f"the request is a {type(request).__name__}; give an object, {_EXAMPLE}")
        for key in request:
            if key not in KEYS:
                raise UserError(f"unknown key {key!r} in the request; {did_you_mean(key, KEYS)}")
        asked = {key: value for key, value in request.items() if value is not None}
        if "histories" not in asked:
            raise UserError(f"the request has no histories; give lists of item ids by user, {_EXAMPLE}")
        histories, beside = asked.pop("histories"), {key: asked.pop(key) for key in BESIDE if key in asked}
        if not isinstance(histories, (dict, list)):
            raise UserError(f"histories is {shown(histories)}; give lists of item ids by user, {_EXAMPLE}")
        if len(histories) > self.limits.users:
            raise UserError(
                f"the request has {len(histories):,} users, and this service takes {self.limits.users:,} at once; "
                "send several requests"
            )
        asked["k"] = self._checked_k(asked.get("k"))
        held, users = self._held, list(histories) if isinstance(histories, dict) else list(range(len(histories)))
        given = _with_columns(users, histories, beside) if beside else histories
        answers = held.recommender.recommend_lists(given, **asked)
        return {**held.named, "lists": [_as_json(*each) for each in zip(users, answers, strict=True)]}

    def similar(self, item: Any, k: Any = None) -> dict[str, Any]:
        """The k ``items`` (10 unless given) most like one, with their ``scores``.

        Beside them ``run``, ``weights`` and the ``item``.

        Raises:
            UserError: an unknown item, or a k that is none or beyond the limit.
        """
        held = self._held
        found = held.recommender.similar_items(item, self._checked_k(k))
        return {**held.named, "item": item, "items": found["item"].tolist(), "scores": found["score"].tolist()}

    def _checked_k(self, k: Any) -> int:
        k = min(10, self.limits.k) if k is None else k
        check_k(k)
        if k > self.limits.k:
            raise UserError(f"k is {k:,}, and this service makes lists of up to {self.limits.k:,}; ask for fewer")
        return int(k)

    def _load(self) -> Held:
        """The run as it stands now, after an answer: the first one builds what the others use."""
        identity = self._identity()  # before: a run that is put there meanwhile is loaded next
        recommender = Recommender.load(self.path)
        if self.items:
            recommender = recommender.with_items([str(file) for file in self.items])
        known = recommender.item_vectors().items[:1].tolist()
        recommender.recommend_lists(_with_columns([0, 1], [known, []], {"times": [[0], []]}), 1, fallback="popular")
        return Held(recommender, identity)

    def _identity(self) -> Identity | None:
        """What tells the runs in one place apart, and the items of another day; None where no run is finished."""
        run = _identity_of(RunFolder(Path(os.path.realpath(self.path))).metrics_file)  # which is written last
        return None if run is None else (run, *map(_identity_of, self.items))


def _identity_of(file: Path) -> tuple[str, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return str(file), found.st_ino, found.st_mtime_ns


def _with_columns(users: Sequence[Any], histories: Any, beside: Mapping[str, Any]) -> Any:
    """Histories as a frame of events; of users without one there is a blank item, which no model knows.

    Args:
        beside: what stands beside the items, by its name in ``BESIDE``, in the form of the histories.
    """
    by_user = isinstance(histories, Mapping)
    lists = list(histories.values()) if by_user else histories
    lists = [as_list(items, f"the history of user {user!r} is") for user, items in zip(users, lists, strict=True)]
    if not any(lists):
        return dict.fromkeys(users, ())
    frame = pd.DataFrame(
        {
            "user_id": pd.Series(
                [user for user, own in zip(users, lists, strict=True) for _ in own or (0,)], dtype=object
            ),
            "item_id": pd.Series([item for own in lists for item in own or (None,)], dtype=object),
        }
    )
    for name, values in beside.items():
        if by_user and isinstance(values, Mapping):
            values = [values.get(user, ()) for user in users]
        elif by_user or not isinstance(values, list) or len(values) != len(users):
            raise UserError(f"{name} and histories have different forms; give a list of {name} for each history")
        found: list[Any] = []
        for user, items, given in zip(users, lists, values, strict=True):
            own = as_list(given, f"{name} of user {user!r} is")
            if len(items) != len(own):
                raise UserError(f"user {user!r} has {len(items)} items and {len(own)} {name}; give one for each item")
            for one in own:
                _check_beside(name, user, one)
            found += own or [None]
        known = next((one for one in found if one is not None), 0)
        kind = np.int64 if name == "times" else np.float64
        frame[BESIDE[name]] = np.array([known if one is None and name == "times" else one for one in found], kind)
    return frame


def _check_beside(name: str, user: Any, one: Any) -> None:
    if name == "times" and not (is_whole(one) and -(2**63) <= one < 2**63):
        raise UserError(f"a time of user {user!r} is {shown(one)}; give whole numbers of 64 bits")
    is_number = isinstance(one, (int, float)) and not isinstance(one, bool)
    if name == "reliability" and one is not None and not (is_number and abs(one) < np.inf):
        raise UserError(f"a reliability of user {user!r} is {shown(one)}; give numbers, or null where it is missing")


def _as_json(user: Any, answer: Recommended) -> dict[str, Any]:
    return {"user": user, **answer._asdict()}
