"""Training curves for TensorBoard, beside whoever else listens."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from recbft.errors import UserError
from recbft.training.progress import Progress


def check_available() -> None:
    """Refuse before any work is done where the package is missing.

    Raises:
        UserError: TensorBoard is not installed.
    """
    if find_spec("tensorboard") is None:
        raise UserError(
            "tensorboard: true needs a package: pip install 'recbft[tensorboard]', or leave the setting out"
        )


class TensorBoard:
    """Writes each number of an epoch's row as a scalar, and passes everything on to another listener."""

    def __init__(self, folder: Path, listener: Progress) -> None:
        self._folder, self._listener = folder, listener
        self._writer: Any = None

    def start(self, total_epochs: int, first_epoch: int) -> None:
        """Open the event file; a resumed run hides what was written after the epoch it resumes from."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=first_epoch)
        self._listener.start(total_epochs, first_epoch)

    def batch(self, done: int, total: int, loss: float, tokens: int) -> None:
        """Pass on."""
        self._listener.batch(done, total, loss, tokens)

    def epoch(self, row: Mapping[str, object]) -> None:
        """Write the row."""
        for name, value in row.items():
            if name != "epoch" and isinstance(value, (int, float)):
                self._writer.add_scalar(name.replace("valid_", "validation/"), value, int(str(row["epoch"])))
        self._writer.flush()
        self._listener.epoch(row)

    def note(self, message: str) -> None:
        """Pass on."""
        self._listener.note(message)

    def stop(self) -> None:
        """Close the event file."""
        self._writer.close()
        self._listener.stop()
