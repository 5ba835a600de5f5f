"""Which data a run uses, how it is prepared, and how it is split."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from recbft.datasets.dataset import Dataset
from recbft.datasets.formats import ending
from recbft.datasets.loading import default_dataset
from recbft.datasets.prepare import Preparation
from recbft.datasets.split import SETTINGS, Point, Splitting
from recbft.errors import MissingColumnError, UserError

READ_BY = ("user", "item", "time", "session", "separator", "columns")  # how a file is read


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
    separator: str | None = None
    columns: tuple[str, ...] | None = None  # the names of all columns of a delimited file without a header
    k_core: int = 0
    min_user_events: int = 0
    min_item_events: int = 0
    deduplicate: Literal["first", "last"] | None = None
    where: str | None = None
    drop_last_events: int = 0
    min_history: int = 3
    split: Literal["leave_one_out", "global_time"] | None = None  # None: leave_one_out
    split_at: Point | None = None  # where training ends: a share of the events such as 0.8, a date, or a time
    test_at: Point | None = None  # where the test begins; None: half of what is left after split_at
    split_targets: Literal["all", "first", "successive"] | None = None  # of a user in a part; None: all
    hold_out_items: float | None = None  # share of the items without any training event
    hold_out_seed: int | None = None  # what they are drawn by; None: 0

    def __post_init__(self) -> None:
        if self.dataset is not None and not self.dataset:
            raise UserError("dataset is empty; give a data set's name or a file")
        self.preparation()  # checks the values it holds
        self.splitting()

    @classmethod
    def behind(cls, dataset: Dataset, **more: Any) -> DataConfig:
        """What reads the file behind a data set that is given as it was read here: by its columns and with its filters.

        Args:
            more: other fields; filters among them hold where the data set is a card's or a canonical file's as it is.
        """
        filters = dataset.preparation.get("filters", {}) if dataset.columns else {}
        values: dict[str, Any] = {**more, "dataset": dataset.name, **dataset.columns, **filters}
        values |= dataset.splitting.chosen()
        return cls(**values)

    def resolved(self) -> DataConfig:
        """The same with the data set named; a warning says so where a stand-in takes the default's place."""
        if self.dataset is not None:
            return self
        name, notice = default_dataset(self.data_root)
        if notice is not None:
            warnings.warn(notice, stacklevel=2)
        return replace(self, dataset=name)

    def load(self) -> Dataset:
        """Read and prepare the data."""
        how = {name: getattr(self, name) for name in ("data_root", *READ_BY)}
        try:
            made = Dataset.load(str(self.resolved().dataset), **how, preparation=self.preparation())
        except MissingColumnError as error:
            if error.column not in ("user_id", "item_id"):  # which nobody has named
                raise
            role = error.column.removesuffix("_id")
            raise UserError(f"{error}; name the column as {role}: --{role} NAME, or --set {role}=NAME") from None
        return self.split_as_asked(made)

    def split_as_asked(self, dataset: Dataset) -> Dataset:
        """A data set with the split asked for here, or its own where none is; UserError where they differ."""
        asked, own = self.splitting(), dataset.splitting
        if asked.is_plain or own == asked:
            return dataset
        if own.is_plain:
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
        try:
            own = self.dataset if dataset is None else dataset
            place = replace(self, dataset=own, data_root=data_root or self.data_root)
            if ending(Path(str(place.dataset))) != ending(Path(str(self.dataset))):
                place = replace(place, separator=None, columns=None)
            return replace(place, **how).load()
        except UserError as error:
            if dataset is not None:
                raise
            raise UserError(
                f"{error} (the run's own data set is {self.dataset!r}: if it lies elsewhere, or was made of a frame in "
                "Python, give it with -d, or in Python as dataset)"
            ) from None

    def check_prepared(self, dataset: Dataset) -> None:
        """Refuse settings that would have made another data set than one that is given."""
        made = dataset.preparation.get("filters", {})
        for key in READ_BY:
            if getattr(self, key) not in (None, dataset.columns.get(key)):
                raise UserError(
                    f"data.{key} is {getattr(self, key)!r}, but a data set is given, which has its columns; "
                    "leave it out"
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
