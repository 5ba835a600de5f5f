"""Which data a run uses, how it is prepared, and how it is split."""

from __future__ import annotations

import os
import shlex
import warnings
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from recbft.datasets.dataset import Dataset, check_parts_named
from recbft.datasets.features import kinds_in
from recbft.datasets.formats import ending, is_there, whole_path
from recbft.datasets.loading import AUTO, DATA_ROOT_VARIABLE, ROLES, SYNTHETIC, default_dataset, is_known, place_of
from recbft.datasets.prepare import Preparation
from recbft.datasets.split import SETTINGS, Point, Splitting
from recbft.errors import MissingColumnError, UserError

# how a file is read, and those beside it
PART_FILES = ("validation", "test")
READ_BY = (*ROLES, *PART_FILES, "separator", "columns")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A data set by name or file, the columns to read, the steps of ``Preparation``, and its ``Splitting``.

    Columns left out are those of the data set's card, or ``user_id`` and ``item_id`` in a file. Row order is time order
    within a user unless ``time`` or the card names a column.
    """

    dataset: str | None = None  # None: ml-100k where it is at hand, else the synthetic data set, see ``resolved``
    # Where data sets lie on this machine: it does not change results, so it is not saved with them.
    data_root: str | None = field(default=None, compare=False, metadata={"saved": False})
    user: str | None = None
    item: str | None = None
    time: str | None = None
    session: str | None = None  # each of its values a history: instead of a user, or of each user
    weight: str | None = None  # a number >= 0 per event, which multiplies its loss as a target; 0 teaches nothing
    reliability: str | None = None  # a number per event, or none, that a model may read: backbone.reads_reliability
    split_column: str | None = None  # says train, valid or test of each event: a split of the data's own
    validation: str | None = None  # a file of the events that validate, where dataset holds those that train
    test: str | None = None  # and one of those that test
    separator: str | None = None
    columns: tuple[str, ...] | None = None  # the names of all columns of a delimited file without a header
    k_core: int = 0
    min_user_events: int = 0
    min_item_events: int = 0
    deduplicate: Literal["first", "last"] | None = None
    where: str | None = None
    drop_last_events: int = 0
    min_history: int = 3
    # Files of item features: a table, and .npy files with a vector for each of its rows; "auto": RecBole's .item file.
    items: tuple[str, ...] | None = None
    item_kinds: tuple[str, ...] | None = None  # COLUMN=KIND, where a column's kind is not to be guessed
    # None: leave_one_out, and given with data that have a split of their own
    split: Literal["leave_one_out", "global_time", "given"] | None = None
    split_at: Point | None = None  # where training ends: a share of the events such as 0.8, a date, or a time
    test_at: Point | None = None  # where the test begins; None: half of what is left after split_at
    split_targets: Literal["all", "first", "successive"] | None = None  # of a user in a part; None: all
    hold_out_items: float | None = None  # share of the items without any training event
    hold_out_seed: int | None = None  # what they are drawn by; None: 0

    def __post_init__(self) -> None:
        if self.dataset is not None and not self.dataset:
            raise UserError("dataset is empty; give a data set's name or a file")
        if self.item_kinds is not None:
            if self.items is None:
                raise UserError("item_kinds has no effect without items; leave it out, or name a file of item features")
            kinds_in(self.item_kinds)
        self.preparation()  # checks the values it holds
        check_parts_named(self.split_column, self.validation, self.test)
        own = next((key for key in ("split_column", *PART_FILES) if getattr(self, key) is not None), None)
        if own is not None and self.split not in (None, "given"):
            raise UserError(
                f"split is {self.split!r}, but {own} names a split of the data's own; leave one of them out"
            )
        if own is not None:
            object.__setattr__(self, "split", "given")
        self.splitting()

    @classmethod
    def behind(cls, dataset: Dataset, **more: Any) -> DataConfig:
        """What reads the file behind a data set that is given as it was read here: from its place, by its columns and
        with its filters.

        Args:
            more: other fields; filters among them hold where the data set is a card's or a canonical file's as it is.
        """
        filters = dataset.preparation.get("filters", {}) if dataset.columns else {}
        values: dict[str, Any] = {**more, "dataset": dataset.name, **dataset.place, **dataset.columns, **filters}
        values |= dataset.splitting.chosen()
        if dataset.features is not None and dataset.features.files:
            named = tuple(f"{column}={kind}" for column, kind in dataset.features.named.items())
            values |= {"items": dataset.features.files, "item_kinds": named or None}
        return cls(**values)

    def resolved(self) -> DataConfig:
        """The same with the data set named, files by their whole paths, which any folder leads to.

        A warning says so where a stand-in takes the default's place.
        """
        items = self.items and tuple(file if file == AUTO else whole_path(file) for file in self.items)
        parts = {key: None if (file := getattr(self, key)) is None else whole_path(file) for key in PART_FILES}
        lasting = replace(self, items=items, validation=parts["validation"], test=parts["test"])
        if self.dataset is not None:
            with suppress(UserError):  # it is not there, as who reads it says
                found = place_of(self.dataset, self.data_root)["dataset"]
                return replace(lasting, dataset=found) if is_there(Path(found)) else lasting
            return lasting
        name, notice = default_dataset(self.data_root)
        if notice is not None:
            warnings.warn(notice, stacklevel=2)
        return replace(lasting, dataset=name)

    def load(self) -> Dataset:
        """Read and prepare the data."""
        how = {name: getattr(self, name) for name in ("data_root", "items", *READ_BY)}
        kinds = None if self.item_kinds is None else kinds_in(self.item_kinds)
        try:
            made = Dataset.load(str(self.resolved().dataset), **how, item_kinds=kinds, preparation=self.preparation())
        except MissingColumnError as error:
            if error.column not in ("user_id", "item_id"):  # which nobody has named
                raise
            role = error.column.removesuffix("_id")
            said = (
                f"{role}='NAME' in Python, in a shell --{role} NAME, or --set {role}=NAME where there is no such option"
            )
            said += f" (`recbft data look {shlex.quote(str(self.dataset))}` guesses all of them)"
            raise UserError(f"{error}; name the column as {role}: {said}") from None
        return self.split_as_asked(made)

    def split_as_asked(self, dataset: Dataset) -> Dataset:
        """A data set with the split asked for here, or its own where none is; UserError where they differ."""
        asked, own = self.splitting(), dataset.splitting
        if asked.is_plain or own == asked:
            return dataset
        if own.is_plain or (own == Splitting(split="given") and asked.split == "given"):
            return dataset.with_split(**asked.chosen())
        raise UserError(
            f"data set {dataset.name!r} has the split {own.chosen()}, and the settings ask for {asked.chosen()}; give "
            "the data without a split of their own, or both the same"
        )

    def split_as(self, dataset: Dataset) -> DataConfig:
        """These settings with the split of a data set."""
        own: dict[str, Any] = dict.fromkeys(SETTINGS)
        return replace(self, **(own | dataset.splitting.chosen()))

    def load_again(self, dataset: str | None = None, data_root: str | None = None, **how: Any) -> Dataset:
        """The data of a run that was begun earlier, from where they lie now.

        Args:
            dataset: data set or file to read in the place of the run's own, in the same way; separator and column
                names, which say how the run's own file is written, go with files of its ending alone.
            data_root: where to look for it.
            how: its columns, separator or column names where they are not those of the run's own.
        """
        own = self.dataset if dataset is None else dataset
        place = replace(self, dataset=own, data_root=data_root or self.data_root)
        no_split: dict[str, Any] = {"split": None, "split_targets": None}
        if dataset is not None and self.validation is not None:  # other data have no such files beside them
            place = replace(place, validation=None, test=None, **no_split)
        try:
            if ending(Path(str(place.dataset))) != ending(Path(str(self.dataset))):
                place = replace(place, separator=None, columns=None)
            return replace(place, **how).load()
        except UserError as error:
            missing = error.column if isinstance(error, MissingColumnError) else None
            if dataset is not None and missing is not None and missing == self.weight:  # trained by, not evaluated
                return replace(self, weight=None).load_again(dataset, data_root, **how)
            if dataset is not None and missing is not None and missing == self.reliability:
                warnings.warn(f"{error}: the reliability of its events counts as missing", stacklevel=2)
                return replace(self, reliability=None).load_again(dataset, data_root, **how)
            if dataset is not None and missing is not None and missing == self.split_column:
                return replace(self, split_column=None, **no_split).load_again(dataset, data_root, **how)
            if dataset is not None:
                raise
            give = "give it with -d, in Python as dataset"
            if self.is_unknown and not place.data_root:
                raise UserError(
                    f"the run was trained on a frame of Python, {self.dataset!r}, which is not kept with it: make the "
                    f"data set of the same events again and {give}"
                ) from None
            raise UserError(
                f"{error} (the run's own data set is {self.dataset!r}: if it lies elsewhere or was a frame, {give})"
            ) from None

    @property
    def is_unknown(self) -> bool:
        """Whether the data set is neither a name that is known nor the path of a file, as one made of a frame."""
        name = str(self.dataset)
        return self.dataset is not None and not is_known(name) and not os.path.isabs(name)

    def remembered(self) -> dict[str, str]:
        """The folder that a data set, or its items, was looked for in by its name, for whoever asks for it again."""
        with suppress(UserError):  # a frame's
            place = place_of(str(self.dataset), self.data_root)
            if "data_root" not in place and any(file != AUTO and not os.path.isabs(file) for file in self.items or ()):
                place = place_of(SYNTHETIC, self.data_root)
            return {key: path for key, path in place.items() if key == "data_root"}
        return {}

    def in_remembered(self, data_root: Any) -> DataConfig:
        """The same in the folder that was remembered, unless another is named or that is gone."""
        if self.data_root or os.environ.get(DATA_ROOT_VARIABLE) or not (data_root and os.path.isdir(data_root)):
            return self
        return replace(self, data_root=data_root)

    def check_prepared(self, dataset: Dataset) -> None:
        """Refuse settings that would have made another data set than one that is given."""
        made = dataset.preparation.get("filters", {})
        for key in READ_BY:
            if getattr(self, key) not in (None, dataset.columns.get(key), dataset.place.get(key)):
                raise UserError(
                    f"data.{key} is {getattr(self, key)!r}, but a data set is given, which has its columns; "
                    "leave it out"
                )
        if self.items is not None and dataset.features is None:
            raise UserError(
                f"data.items is {list(self.items)}, but a data set is given, which has no item features; give them to "
                "Dataset.from_frame or Dataset.load"
            )
        for key, value in self.preparation().to_dict().items():
            if value not in (made.get(key), getattr(Preparation(), key)):
                raise UserError(
                    f"data.{key} is {value!r}, but the data set that is given was prepared with {made.get(key)!r}; "
                    "leave it out here, and prepare the data with Dataset.from_frame or Dataset.load"
                )

    def preparation(self) -> Preparation:
        """What is done to the events before they become histories."""
        return Preparation(**{each.name: getattr(self, each.name) for each in fields(Preparation)})

    def splitting(self) -> Splitting:
        """How the data set is split."""
        return Splitting.of(vars(self))
