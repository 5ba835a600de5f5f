"""What a notebook user imports from ``recbft``: a data set, and a recommender that is fitted, evaluated and asked.

>>> from recbft import Dataset, Recommender                              # doctest: +SKIP
>>> dataset = Dataset.from_frame(frame, user="user", item="item", time="when")  # doctest: +SKIP
>>> recommender = Recommender("sasrec", arm="bft", epochs=50).fit(dataset)  # doctest: +SKIP
>>> recommender.recommend({"ann": ["tea", "milk"]}, k=10)                # doctest: +SKIP
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from torch import nn

from recbft.datasets import Dataset
from recbft.datasets.vocabulary import Vocabulary
from recbft.errors import UserError
from recbft.evaluation.evaluate import Evaluation, evaluate
from recbft.files import new_folder
from recbft.recommendation import Histories, recommend
from recbft.run_config import RunConfig, load_run_config
from recbft.training import session
from recbft.training.bundle import load_trained
from recbft.training.checkpoint import check_vocabulary, load_state, vocabulary_hash
from recbft.training.progress import Progress
from recbft.training.run_folder import RunFolder

__all__ = ["Dataset", "Recommender"]


class Recommender:
    """A model by name, from its settings to its recommendations.

    Args:
        model: a name of ``recbft models``.
        arm: one of the model's arms; its precision-tracking one where it has one.
        seed: decides initial weights, data order and dropout.
        config: a YAML file to start from.
        settings: any configuration key by its name, such as ``epochs=50``, or a section, such as
            ``core={"lam_max": 10}``.

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
        self.run: RunFolder | None = None
        self._model: nn.Module | None = None
        self._vocabulary: Vocabulary | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def fit(
        self, dataset: Dataset | None = None, *, out: str | Path | None = None, progress: Progress | None = None
    ) -> Recommender:
        """Train on a data set (the configured one unless given) and keep the best weights.

        Args:
            out: the run's folder; a temporary one, gone with this object, unless given.
            progress: who is told how it goes; nobody unless given.
        """
        if out is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="recbft-")
            out = Path(self._temporary.name) / "run"
        run = session.train(self.config, out, dataset=dataset, progress=progress)
        self._open(run.path)
        return self

    def evaluate(self, dataset: Dataset | None = None, part: Literal["validation", "test"] = "test") -> Evaluation:
        """Full-ranking metrics and ranks on a part of a data set with the vocabulary this model was trained with."""
        model, _, run = self._fitted()
        dataset = self.config.data.load() if dataset is None else dataset
        check_vocabulary(
            load_state(run.checkpoint),
            dataset=dataset.name,
            vocabulary_hash=vocabulary_hash(dataset.item_ids),
            folder=run.checkpoint,
        )
        settings = self.config.evaluation
        return evaluate(
            model,  # type: ignore[arg-type]
            dataset,
            part,
            filter_seen=settings.filter_seen,
            ks=settings.ks,
            memory_mb=settings.memory_mb,
        )

    def recommend(self, histories: Histories, k: int = 10, *, filter_seen: bool = True) -> pd.DataFrame:
        """The k best items for each history, with the posterior precision behind each list.

        Args:
            histories: raw item ids, oldest first, by user (a mapping), without users (a sequence of sequences,
                numbered from 0), or a data frame with columns ``user_id`` and ``item_id`` in time order. Users need
                not have been seen in training.
            filter_seen: leave out the items of the history itself.

        Returns:
            Columns user, item, score, rank (from 1), precision (NaN where the model keeps none). ``attrs`` counts what
            was skipped: ``unknown_events`` of items the model does not know, and ``skipped_users`` with no known item.
        """
        model, vocabulary, _ = self._fitted()
        return recommend(
            model,  # type: ignore[arg-type]
            vocabulary,
            histories,
            k,
            filter_seen=filter_seen,
            memory_mb=self.config.evaluation.memory_mb,
        )

    def save(self, path: str | Path) -> None:
        """Copy the run's folder; ``Recommender.load`` and the command line read it back."""
        _, _, run = self._fitted()
        RunFolder.refuse_taken(path)
        with new_folder(path) as made:
            shutil.copytree(run.path, made, dirs_exist_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> Recommender:
        """The recommender of a run folder, with its best weights.

        Raises:
            UserError: there is no run, it has no weights yet, or a file is damaged.
        """
        recommender = cls.__new__(cls)
        recommender._temporary = None
        recommender._open(Path(path))
        return recommender

    def _open(self, path: Path) -> None:
        self.run, self.config, self._vocabulary, self._model = load_trained(path)

    def _fitted(self) -> tuple[nn.Module, Vocabulary, RunFolder]:
        if self._model is None or self._vocabulary is None or self.run is None:
            raise UserError("this recommender is not trained; call fit(dataset), or Recommender.load(folder)")
        return self._model, self._vocabulary, self.run
