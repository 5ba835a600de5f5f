"""A run that has been read: its model, its vocabulary, and what answers by it need to know of its training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from recbft.datasets.vocabulary import Vocabulary
from recbft.errors import UserError
from recbft.evaluation.probability import Calibration
from recbft.runs import checkpoint
from recbft.runs.folder import RunFolder
from recbft.training.bundle import load_trained
from recbft.training.run_config import RunConfig


class TrainedRun(NamedTuple):
    """The run that a recommender answers by, and what is held of it."""

    run: RunFolder
    config: RunConfig
    model: Any  # a module that is a ``SequenceModel``
    vocabulary: Vocabulary
    weights: str | None  # the SHA-256 of their file
    protocol: dict[str, Any]  # the folder may go before this object does
    calibrations: dict[bool, Calibration | None]  # by filter_seen

    @classmethod
    def read(cls, path: Path) -> TrainedRun:
        """The run in a folder, with its best weights.

        Raises:
            UserError: there is no run, it has no weights yet, or a file is damaged.
        """
        # One folder, wherever the program goes, and a link to the next run.
        run = RunFolder(RunFolder.open(path).path.resolve())
        # Before they are read: those that a training puts there meanwhile are not taken for them.
        weights = checkpoint.best_digest(run.checkpoint)
        run, config, vocabulary, model = load_trained(run.path)
        calibrations = {filter_seen: run.calibration(filter_seen=filter_seen) for filter_seen in (False, True)}
        return cls(run, config, model, vocabulary, weights, run.protocol, calibrations)

    @property
    def time_unit(self) -> str | None:
        """The unit of the training data's times; None where it had none, or whole numbers."""
        unit: str | None = self.protocol.get("preparation", {}).get("time_unit")
        return unit

    def check_in_place(self) -> None:
        """UserError where the folder has gone, or holds other weights than were read from it."""
        if checkpoint.best_digest(RunFolder.open(self.run.path).checkpoint) != self.weights:
            raise UserError(
                f"{self.run.path} holds other weights than those that were loaded from it; load it again to have "
                "these, or put the run back"
            )
