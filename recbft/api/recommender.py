"""What a notebook user imports from ``recbft``: a data set, and a recommender that is fitted, evaluated and asked.

>>> from recbft import Dataset, Recommender                              # doctest: +SKIP
>>> dataset = Dataset.from_frame(frame, user="user", item="item", time="when")  # doctest: +SKIP
>>> recommender = Recommender("sasrec", arm="bft", epochs=50).fit(dataset)  # doctest: +SKIP
>>> recommender.recommend({"ann": ["tea", "milk"]}, k=10)                # doctest: +SKIP
"""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pandas as pd

from recbft.api.own_run import TrainedRun, fitted_folder, free_folder, python_errors
from recbft.config.fields import is_whole
from recbft.datasets import Dataset
from recbft.datasets.config import DataConfig
from recbft.datasets.planted import planted_reliability
from recbft.errors import UserError, permissions_explained
from recbft.evaluation.evaluate import Evaluation, evaluate
from recbft.evaluation.mechanism import mechanism
from recbft.evaluation.new_items import new_items
from recbft.evaluation.probability import Calibration
from recbft.evaluation.uncertainty import uncertainty
from recbft.evaluation.views import view_of
from recbft.kernels import c_library
from recbft.reporting.progress import listener
from recbft.runs.folder import RunFolder
from recbft.serving.explanations import explanation_table
from recbft.serving.export import Checked, Format, Index, drawn_histories, export, histories_of
from recbft.serving.filters import Choice
from recbft.serving.histories import Histories, in_usual_columns
from recbft.serving.lists import (
    Fallback,
    Recommended,
    check_filter_seen,
    joined,
    recommend_in_blocks,
    recommend_lists,
)
from recbft.serving.new_items import with_items
from recbft.serving.served import Served
from recbft.serving.vectors import ItemVectors, UserVectors, item_vectors, similar_items, user_vectors
from recbft.system.files import new_folder, user_path
from recbft.system.torch_state import one_thread_if_forked
from recbft.training import one_run
from recbft.training.build import run_protocol
from recbft.training.bundle import CONTENT_FOLDER, own_config, refuse_other_data
from recbft.training.join import By
from recbft.training.join import join as join_runs
from recbft.training.process_team import join_team
from recbft.training.progress import Progress
from recbft.training.run_config import RunConfig, load_run_config

__all__ = ["Dataset", "Recommender"]

T = TypeVar("T")


class Recommender:
    """A model by name, from its settings to its recommendations.

    Args:
        model: a name of ``recbft models``.
        arm: one of the model's arms; its precision-tracking one where it has one.
        seed: decides initial weights, data order and dropout.
        config: a YAML file to start from.
        settings: any configuration key by its name, such as ``epochs=50``, or a section, such as
            ``core={"lam_max": 10}``. None means not given; where a key may be null, ``"none"`` says so.

    Raises:
        UserError: an unknown name, or a value of the wrong type or range.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        arm: str | None = None,
        seed: int | None = None,
        config: str | Path | None = None,
        **settings: Any,
    ) -> None:
        self.config: RunConfig = load_run_config(config, model=model, arm=arm, seed=seed, **settings)
        self._trained: TrainedRun | None = None

    @property
    def run(self) -> RunFolder | None:
        """The folder of the run; None before there is one."""
        return None if self._trained is None else self._trained.run

    @property
    def weights(self) -> str | None:
        """The SHA-256 of the file of the run's weights; None before there is one."""
        return None if self._trained is None else self._trained.weights

    def __repr__(self) -> str:
        state = (
            "not trained"
            if self.run is None
            else f"trained on {self.config.data.dataset!r}, run folder {self.run.path}"
        )
        return f"<Recommender {self.config.model} {self.config.arm}, seed {self.config.seed}: {state}>"

    def fit(
        self,
        dataset: Dataset | None = None,
        *,
        out: str | Path | None = None,
        progress: Progress | bool | None = None,
        warm_start: bool = False,
    ) -> Recommender:
        """Train on a data set (the configured one unless given) and keep the best weights.

        Args:
            out: the run's folder; a temporary one, gone with this object, unless given.
            progress: True or False for being told on stderr how it goes, as terminals and notebooks are unless it is
                given; or an object that is told, as ``recbft.training.progress.Progress``.
            warm_start: begin from the weights of the run that this recommender holds, of which
                ``training.warm_start_keep`` says how much is kept; without it one that holds a run trains from scratch.

        Raises:
            UserError: the folder is taken; data and settings do not fit; a data set is given, and settings of this
                object would have prepared another; a run to begin from is gone, or another stands in its place.
            RunError: training failed; after an interruption the folder stays, and ``resume`` goes on with it.
        """
        _check_dataset(dataset)
        watcher = listener(progress, self.config.training.valid_metric)
        config = self.config if dataset is None else self._config_for(dataset)
        if warm_start:
            older = str(self._own_run().path)
            config = replace(config, training=replace(config.training, warm_start=older))
        elif self.run is not None:  # what that run began from is not asked for here
            config = replace(config, training=replace(config.training, warm_start=None, warm_start_keep=None))
        together = join_team(config.training)
        with fitted_folder(out) as place:
            path = together.first_does(lambda: free_folder(place.path, dataset))
            with python_errors(path, dataset):
                run = one_run.train(config, path, dataset=dataset, progress=watcher)
                if out is None and not together.leads:  # the first process's folder goes with that process's object
                    shutil.copytree(run.path, place.path)
                    run = RunFolder.open(place.path)
                together.wait()
                self._open(run.path, config.data.data_root)
            place.go_with(self.run)
        return self

    @classmethod
    def resume(
        cls,
        path: str | Path,
        dataset: Dataset | None = None,
        *,
        data_root: str | Path | None = None,
        progress: Progress | bool | None = None,
    ) -> Recommender:
        """Go on with a fit that was stopped, exactly as if it had not been; a finished one is loaded.

        Args:
            path: the run's folder, as the interruption's message or ``fit``'s ``out`` names it.
            dataset: what it was fitted on; looked for by the name of the run's own unless given.
            data_root: the folder of data sets to look in.
            progress: as in ``fit``.

        Raises:
            UserError, RunError: as in ``fit``; there is no run, or the data are not those it was begun with.
        """
        _check_dataset(dataset)
        with python_errors(user_path(path), dataset):
            metric = own_config(RunFolder.open(path)).training.valid_metric
            watcher = listener(progress, metric)
            one_run.resume(path, data_root=data_root, dataset=dataset, progress=watcher)
        return cls.load(path, data_root=data_root)

    @classmethod
    def join(
        cls,
        first: Recommender | str | Path,
        second: Recommender | str | Path,
        *,
        by: By = "count",
        for_rare: float | None = None,
        dataset: Dataset | None = None,
        out: str | Path | None = None,
        data_root: str | Path | None = None,
        progress: Progress | bool | None = None,
    ) -> Recommender:
        """The recommender whose scores are those of two others, weighed by how often an item occurs in training.

        Weights are fitted on validation targets; ``run.protocol["joined"]`` has them.

        Args:
            first, second: fitted recommenders of the same data, or the folders of finished runs.
            by: "count" for weights by the item's training count, "none" for one pair for all items.
            for_rare: the share of validation NDCG@10 that may be lost so that items with fewer than 5 training events
                are listed more, as in 0.01.
            dataset: their data; looked for by the name that the runs have unless given.
            out, progress: as in ``fit``.
            data_root: the folder of data sets to look in.

        Raises:
            UserError: a run is not finished, the two are one or have other data, or the folder is taken.
        """
        _check_dataset(dataset)
        paths = [each._own_run().path if isinstance(each, Recommender) else each for each in (first, second)]
        with fitted_folder(out) as place:
            path = free_folder(place.path, dataset)
            how: dict[str, Any] = {"by": by, "for_rare": for_rare, "dataset": dataset, "data_root": data_root}
            run = join_runs(paths[0], paths[1], path, progress=listener(progress, ""), **how)
            made = cls.load(run.path, data_root=data_root)
            place.go_with(made.run)
        return made

    def with_items(
        self, items: Any, *, item: str | None = None, events: Mapping[Any, int] | None = None
    ) -> Recommender:
        """A recommender that lists new items too, and reads them in histories, by their content alone.

        The model is not trained again, and the run in its folder stays as it is: ``load`` knows none of them.

        Args:
            items: features, with the columns of those in training: a frame or a file, a row per item. Items that the
                model knows stay as they are.
            item: the column with the item ids, if it is neither that of those in training nor ``item_id``.
            events: raw id -> how many events a new item has had so far; 0 unless given. Nothing was learned of them,
                but they tell how surely the item is none of those that nobody chooses.

        Raises:
            UserError: the model reads no item features, or a column or value cannot be read.
        """
        trained = self._fitted()
        folder = self._own_run().checkpoint / CONTENT_FOLDER
        grown = with_items(trained.model, trained.vocabulary, trained.counts, folder, items, item=item, events=events)
        other = copy.copy(self)
        labels = trained.labels if grown.features is None else trained.labels.beside(grown.features)
        other._trained = trained._replace(
            served=Served(grown.model), vocabulary=grown.vocabulary, counts=grown.counts, labels=labels
        )
        return other

    def evaluate(self, dataset: Dataset | None = None, part: Literal["validation", "test"] = "test") -> Evaluation:
        """Full-ranking metrics and ranks on a part of a data set with the vocabulary this model was trained with.

        Args:
            dataset: as ``aligned`` takes it.
            part: which held-out item is ranked.

        Returns:
            ``headline``, the metrics by name, ranked as ``evaluation.filter_seen`` says; ``metrics`` has them
            "unfiltered" (among all items) and "filtered" (seen items masked), ``per_user`` a row for each user with
            both ranks, ``precision`` the posterior precision behind each, ``exposure`` what lists of the best show.
        """
        dataset = self.aligned(dataset)
        settings = self.config.evaluation
        return evaluate(
            self._fitted().model,
            dataset,
            part,
            filter_seen=settings.filter_seen,
            ks=settings.ks,
            memory_mb=settings.memory_mb,
            lists=True,
        )

    def recommend(
        self,
        histories: Histories,
        k: int = 10,
        *,
        filter_seen: bool = True,
        exclude: Choice | None = None,
        candidates: Choice | None = None,
        cap: Mapping[str, int] | None = None,
        fallback: Fallback | None = None,
    ) -> pd.DataFrame:
        """The k best items for each history, with their probabilities and the posterior precision behind each list.

        Args:
            histories: raw item ids, oldest first, by user (a mapping, or a pandas series of lists), without users (a
                sequence of sequences, numbered from 0), or a data frame (pandas, polars, pyarrow) in time order with
                columns ``user_id`` and ``item_id``, and ``timestamp`` for a model that reads times and ``reliability``
                for one that reads that (missing where it is left out), or with those of the frame or file that the run
                was trained on, sorted by its column of times if it had one and the frame has it. Users need not have
                been seen in training. Events are taken as they are: filter them as the training data were.
            filter_seen: leave out the items of the history itself.
            exclude: raw ids of items that no list may hold, such as what is sold out; or a mapping from users to such
                ids, for each user's own list.
            candidates: raw ids of the only items that lists may hold, or a mapping from users to them: a user without
                an entry gets an empty list. Unknown ids in ``exclude`` and ``candidates`` have no effect, unless all
                are: then the first is warned about and the second refused.
            cap: feature -> how many items of a list may share a value of it, at least 1, such as ``{"category": 3}``;
                the next best fill the list. Of a set of categories any shared one counts; items without a value are
                not capped. The run keeps the categories and sets of the item features of its data.
            fallback: "popular" gives users without a known item, and those of whom no item is left, the items that
                have most events in training; ``filter_seen`` does not apply to them, the other filters do.

        Returns:
            Columns user, item, score, rank (from 1), precision (NaN where the model keeps none), probability. A user of
            whom fewer than k items are left gets those: fewer rows, or none. ``probability`` is how likely the user's
            next event is of this item, if it is of one that the list may hold: one of the ``candidates``, not seen
            (``filter_seen``), not excluded. Its sum over a list is how likely the next item is on it. What
            makes it of the scores is ``calibration``; NaN where that is None. With a ``fallback`` a column of that name
            is true where a list is of popular items, whose score, precision and probability are NaN.

            ``attrs`` counts what was skipped, ``unknown_events`` of items the model does not know and ``skipped_users``
            with no known item; and ``short_lists``, of fewer than k items, with the length of the ``shortest_list``.

        Raises:
            ColdStartError: no user has a known item, and there is no fallback.
            UserError: as ``recbft.serving.lists.recommend_in_blocks``.
        """
        return joined(
            self._lists(
                recommend_in_blocks, histories, k, filter_seen=filter_seen, exclude=exclude, candidates=candidates,
                cap=cap, fallback=fallback,
            )
        )  # fmt: skip

    def recommend_lists(
        self,
        histories: Histories,
        k: int = 10,
        *,
        filter_seen: bool = True,
        exclude: Choice | None = None,
        candidates: Choice | None = None,
        cap: Mapping[str, int] | None = None,
        fallback: Fallback | None = None,
    ) -> list[Recommended]:
        """As ``recommend``, in plain Python values and in less time: for a service.

        Returns:
            For each history, in order, ``items`` with their ``scores`` and ``probabilities``, the ``precision`` behind
            them, and whether they are a ``fallback``. The list of a user with no known item is empty without one.

        Raises:
            UserError: as ``recommend``; a user with no known item is none.
        """
        return self._lists(
            recommend_lists, histories, k, filter_seen=filter_seen, exclude=exclude, candidates=candidates,
            cap=cap, fallback=fallback,
        )  # fmt: skip

    def recommend_in_blocks(
        self,
        histories: Histories,
        k: int = 10,
        *,
        filter_seen: bool = True,
        exclude: Choice | None = None,
        candidates: Choice | None = None,
        cap: Mapping[str, int] | None = None,
        fallback: Fallback | None = None,
    ) -> Iterator[pd.DataFrame]:
        """As ``recommend``, some thousand users after the other, so that memory does not grow with the lists.

        Returns:
            Tables whose rows, one after the other, are those of ``recommend``, each made when it is asked for; what is
            wrong with the request is said before the first. ``attrs`` count what no table before has counted.
        """
        return self._lists(
            recommend_in_blocks, histories, k, filter_seen=filter_seen, exclude=exclude, candidates=candidates,
            cap=cap, fallback=fallback,
        )  # fmt: skip

    def similar_items(self, item: Any, k: int = 10) -> pd.DataFrame:
        """The k items whose vectors in the model point most nearly where that of an item does.

        Args:
            item: a raw item id, which is not among them.

        Returns:
            Columns item, score (the cosine of the two vectors, without item biases) and rank (from 1).

        Raises:
            UserError: the model does not know the item, or it has no vectors, as ``pop``.
        """
        trained = self._fitted()
        return similar_items(trained.served, trained.vocabulary, item, k)

    def calibration(self, *, filter_seen: bool = True) -> Calibration | None:
        """``temperature`` T and ``lapse`` u of the probabilities (1 - u) softmax(scores / T) + u / n of ``recommend``.

        The n items are those that the list may hold. T and u were fitted on validation targets when the run ended. None
        where there were none to fit them on, and of a run that is not finished or whose ``metrics.json`` lacks them;
        its lists have no probabilities.
        """
        trained = self._fitted()
        check_filter_seen(filter_seen)
        return trained.calibrations[bool(filter_seen)]

    def user_vectors(self, histories: Histories) -> UserVectors:
        """What the model knows of each user, as a vector whose product with an item's is the score of ``recommend``.

        Histories and errors are those of ``recommend``; it returns ``users``, ``vectors`` (a row each), ``precision``,
        and what was skipped.
        """
        trained = self._fitted()
        named = self._in_usual_columns(histories)
        return user_vectors(trained.served, trained.vocabulary, named, time_unit=trained.time_unit)

    def item_vectors(self) -> ItemVectors:
        """The items of the model and a vector of each, for an index of nearest neighbours by inner product."""
        trained = self._fitted()
        return item_vectors(trained.served, trained.vocabulary)

    def export(self, path: str | Path, *, format: Format = "onnx", index: Index | None = None) -> dict[str, Any]:
        """Write the user encoder, item vectors and item ids to a new folder, for programs without recbft.

        Up to 1,000 histories of the run's data, or drawn ones where these are gone, are encoded by what was written:
        their ten best items must be those of ``recommend`` and scores within 1e-4, or nothing is written.

        Args:
            format: "onnx" for ONNX Runtime and others, "torch" for ``torch.export.load``.
            index: "faiss" for an index of the items, too, which finds the ten best of 99 % of those histories.

        Returns:
            What ``export.json`` says: files, inputs and outputs, versions, the run, how it was checked.

        Raises:
            UserError: the folder is taken, a package is not installed, or the model has no such form.
            RunError: the check failed.
        """
        trained = self._fitted()

        def histories() -> Checked:
            try:
                data = self.aligned()
            except UserError:  # gone, or others by now
                return drawn_histories(trained.model, len(trained.vocabulary))
            return histories_of(data.items, data.offsets, data.times if trained.model.reads_times else None)

        about = {
            "run": {"name": trained.run.path.name, "identity": trained.run.identity, "weights": trained.weights},
            "model": self.config.model,
            "arm": self.config.arm,
            "dataset": trained.protocol["dataset"],
            "calibration": {
                name: None if (found := trained.calibrations[filter_seen]) is None else found._asdict()
                for name, filter_seen in (("unfiltered", False), ("filtered", True))
            },
        }
        with permissions_explained():
            return export(
                trained.model, trained.vocabulary, user_path(path), histories, format=format, index=index, about=about
            )

    def explain(self, history: Sequence[Any] | pd.DataFrame, item: Any = None, k: int | None = None) -> pd.DataFrame:
        """Which events of a history speak for an item, or for the best ones.

        Args:
            history: raw item ids, oldest first, or a data frame of one user as ``recommend`` takes it.
            item: the raw id of the item to explain; the k best items that are not in the history unless given.
            k: how many of those, 3 unless given.

        Returns:
            A row per item and event that the model reads, by falling weight: item, score, position (place in the
            history, from 1), event (its item), weight (share of the last layer's attention at the last token, the same
            for every item; NaN for a model without attention), change (score with the event less score without it;
            NaN for the only event of a history). ``attrs``: ``precision`` behind the scores (None without one),
            ``own_weight`` of a token that is no event, such as a mask, and ``unknown_events``, which were skipped.
        """
        trained = self._fitted()
        return explanation_table(
            trained.model, trained.vocabulary, self._in_usual_columns(history), item, k,
            memory_mb=self.config.evaluation.memory_mb, time_unit=trained.time_unit,
        )  # fmt: skip

    def probe(
        self,
        dataset: Dataset | None = None,
        part: Literal["validation", "test"] = "test",
        *,
        users: int | None = None,
        samples: int = 1000,
    ) -> dict[str, Any]:
        """What the precision channel does, and whether it tells when the model is right; what ``recbft probe`` prints.

        Args:
            dataset: as ``aligned`` takes it.
            part: which held-out item is asked for.
            users: so many users, drawn from a fixed seed, instead of all.
            samples: bootstrap resamples behind each interval.

        Returns:
            ``mechanism``, ``uncertainty`` and ``new_items`` (None where no target is of a new item), the figures of
            ``recbft.evaluation.mechanism``, ``.uncertainty`` and ``.new_items``, and the ``protocol``, with the SHA-256
            of the ``weights``; ready for JSON.
        """
        trained, dataset = self._fitted(), self.aligned(dataset)
        model = trained.model
        num_users = view_of(dataset, part).first_rows.size
        if users is not None and not (is_whole(users) and 1 <= users <= num_users):
            raise UserError(f"users is {users!r}; give 1 to {num_users:,}, or leave it out for all of them")
        rows = None if users is None else np.sort(np.random.default_rng(0).permutation(num_users)[:users])
        if not (is_whole(samples) and samples >= 1):
            raise UserError(f"samples is {samples!r}; give a whole number of at least 1")
        memory_mb = self.config.evaluation.memory_mb
        planted, data = None, self.config.data
        if dataset.content_hash == trained.protocol["content_hash"]:  # of other data's users nothing is known
            planted = planted_reliability(dataset, str(data.dataset), data.data_root)
        return {
            "mechanism": mechanism(model, dataset, part, users=rows, planted=planted, memory_mb=memory_mb),
            "uncertainty": uncertainty(model, dataset, part, users=rows, samples=samples, memory_mb=memory_mb),
            "new_items": new_items(
                model, dataset, part, users=rows, filter_seen=self.config.evaluation.filter_seen, memory_mb=memory_mb
            ),
            "protocol": {
                **run_protocol(self.config, dataset, model, trained.protocol.get("begun_from")),
                "part": part,
                "filter_seen": False,
                "weights": trained.weights,
            },
        }

    def aligned(self, dataset: Dataset | None = None) -> Dataset:
        """A data set as ``evaluate`` and ``probe`` read it: its items have the indices that they have in the model.

        For a model that reads times, dates are in the unit of the training data.

        Args:
            dataset: ``own_dataset`` unless given; any whose items the model knows.
        """
        trained = self._fitted()
        _check_dataset(dataset)
        return trained.aligned(self.own_dataset() if dataset is None else dataset)

    def own_dataset(self) -> Dataset:
        """The data set that this model was trained on, from where it lies now; refused if it holds something else."""
        trained = self._fitted()
        dataset = self.config.data.load_again()
        remedy = (
            "restore the data it was trained on, or to use other data on purpose, give them with -d, or in Python as "
            "dataset"
        )
        refuse_other_data(trained.protocol, dataset, f"{trained.run.path} was trained", remedy)
        return dataset

    def save(self, path: str | Path) -> None:
        """Copy the run's folder; ``Recommender.load`` and the command line read it back.

        New items of ``with_items`` are no part of the run: a warning says so, and who loads it gives them again.

        Raises:
            UserError: something stands there, it lies in the run's own folder, or that is gone, holds another run or is
                being trained.
        """
        with permissions_explained():
            self._save(user_path(path))

    def _save(self, path: Path) -> None:
        run, trained = self._own_run(), self._fitted()
        if path.is_dir() and any(path.iterdir()):
            raise UserError(f"{path} is a folder with files in it; name another, or remove it first")
        RunFolder.refuse_taken(path)
        if run.path.resolve() in path.resolve().parents:
            raise UserError(f"{path} lies in the folder that is to be copied, {run.path}; name one outside it")
        with run.locked(alone=False), new_folder(path) as made:
            shutil.copytree(run.path, made, dirs_exist_ok=True)
        if more := len(trained.vocabulary) - trained.protocol["items"]:
            warnings.warn(
                f"{path} has the run alone, without the {more:,} items that came later: give their features again "
                "to with_items after Recommender.load, or to recbft serve or recommend as --items",
                stacklevel=3,
            )

    @classmethod
    def load(cls, path: str | Path, *, data_root: str | Path | None = None, unfinished: bool = False) -> Recommender:
        """The recommender of a run folder, with its best weights.

        Args:
            data_root: the folder of data sets in which ``evaluate`` and ``probe`` look for the run's own; unless given
                that in which it was found for training.
            unfinished: take a run too whose training was stopped or still goes on, with the best weights of its epochs
                so far. Its lists have no probabilities.

        Raises:
            UserError: there is no run, it is not finished or has no weights yet, or a file cannot be read.
        """
        c_library.missing()  # builds them now if ever, not while the first request waits
        recommender = cls.__new__(cls)
        recommender._open(user_path(path), None if data_root is None else str(data_root))
        run = recommender.run
        assert run is not None
        if not (unfinished or run.is_finished):
            raise UserError(
                f"{path} is not finished: training was stopped or still goes on; go on with {run.resume_command}"
                f", in Python with Recommender.resume({str(path)!r}) (and the dataset if it came from there), or give "
                "unfinished=True to take the best weights of its epochs so far"
            )
        return recommender

    def _open(self, path: Path, data_root: str | None) -> None:
        one_thread_if_forked()
        with permissions_explained():
            self._trained = TrainedRun.read(path)
        config = self._trained.config
        self.config = replace(config, data=replace(config.data, data_root=data_root or config.data.data_root))

    def _own_run(self) -> RunFolder:
        """The folder of this object's run, which has not been put there by somebody else since."""
        trained = self._fitted()
        trained.check_in_place()
        return trained.run

    def _config_for(self, dataset: Dataset) -> RunConfig:
        """The settings with the name of a data set that is given; UserError if they ask for another preparation."""
        own, asked = self.config.data, {}
        if self.run is None:  # else they are a run's, not asked for here
            own.check_prepared(dataset)
            asked = own.preparation().to_dict()
        dataset = own.split_as_asked(dataset)
        return replace(self.config, data=DataConfig.behind(dataset, data_root=own.data_root, **asked))

    def _lists(self, ask: Callable[..., T], histories: Histories, k: int, *, filter_seen: bool, **how: Any) -> T:
        """What ``ask`` makes of histories, with what it takes of the run for it."""
        trained, calibration = self._fitted(), self.calibration(filter_seen=filter_seen)
        return ask(
            trained.served, trained.vocabulary, self._in_usual_columns(histories), k, filter_seen=filter_seen,
            calibration=calibration, popular=trained.counts, labels=trained.labels,
            memory_mb=self.config.evaluation.memory_mb, time_unit=trained.time_unit, **how,
        )  # fmt: skip

    def _in_usual_columns(self, histories: Any) -> Any:
        """A frame of histories may have the names of columns that the run's data had."""
        data = self.config.data
        known = data.reliability if self.config.reads_reliability else None
        return in_usual_columns(histories, data.user, data.item, data.time, data.session, known)

    def _fitted(self) -> TrainedRun:
        if self._trained is None:
            raise UserError("this recommender is not trained; call fit(dataset), or Recommender.load(folder)")
        one_thread_if_forked()
        return self._trained


def _check_dataset(dataset: object) -> None:
    """UserError, with what makes one, where something else than a data set is given."""
    if dataset is not None and not isinstance(dataset, Dataset):
        how = "Dataset.load(path)" if isinstance(dataset, (str, Path)) else "Dataset.from_frame(frame)"
        raise UserError(f"dataset is a {type(dataset).__name__}; make a data set of it with {how}")
