"""What keeps a run's figures beside its folder: TensorBoard, MLflow and Weights & Biases, behind one interface.

    epoch      loss, seconds, tokens_per_second and validation/METRIC, by the epoch's number
    finished   test/METRIC and best_validation/METRIC, ranked as ``evaluation.filter_seen`` says; card.md, metrics.json
    settings   every key of the configuration

Each works in a thread of its own, for which training never waits. One that fails is warned about once, and the run
goes on without it. A resumed run goes on under the same id, which ``environment.json`` has in ``tracked``; epochs that
a tracker lacks are told again.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from recbft.config.fields import by_setting, to_dict
from recbft.errors import UserError
from recbft.evaluation.metrics import headline_setting
from recbft.runs.folder import RunFolder
from recbft.system.files import hold
from recbft.system.torchrun import this_process
from recbft.training.card import CARD_FILE
from recbft.training.run_config import RunConfig, TrainingConfig

LONGEST_WAIT = 60.0  # seconds for what is still to be sent when a run ends
USUAL_PROJECT = "recbft"
# MLflow's own store in the working folder is a database.
PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow-skinny sqlalchemy alembic", "wandb": "wandb"}
PARAMS_PER_CALL = 100  # of MLflow
_RECORDING = threading.Lock()  # of ids, which the threads of a run write into one file


class Tracker(Protocol):
    """One place that keeps a run's figures; any call may take long, or fail."""

    def open(self, run: RunFolder, config: RunConfig, known: str | None, epochs: int) -> tuple[str, int]:
        """Begin what is kept of the run, or go on with it.

        Args:
            known: the id that this returned when the run was begun; None if it was not.
            epochs: how many are over.

        Returns:
            The id, and the number of the last epoch that is kept already.
        """

    def epoch(self, number: int, values: Mapping[str, float]) -> None:
        """Keep the figures of an epoch, whose numbers begin with 1."""

    def finish(self, epochs: int, values: Mapping[str, float], files: Sequence[Path]) -> None:
        """Keep the figures and files of the finished run."""

    def close(self, *, finished: bool) -> None:
        """Nothing more comes; of a run that is not finished, until it is resumed."""


class Trackers:
    """The trackers that a run's configuration names; none where ``leads`` is False, of several processes."""

    def __init__(self, run: RunFolder, config: RunConfig, *, leads: bool) -> None:
        self._run, self._config = run, config
        self._threads = [_Thread(name, TRACKERS[name]()) for name in config.training.tracked_by if leads]

    def open(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Begin, or go on after the epochs of these rows of ``history.csv``."""
        over = list(rows)

        def begin(name: str, tracker: Tracker) -> None:
            known = self._run.environment.get("tracked", {}).get(name)
            identity, kept = tracker.open(self._run, self._config, known, len(over))
            with _RECORDING:
                self._run.record(tracked={**self._run.environment.get("tracked", {}), name: identity})
            for row in over:
                if row["epoch"] > kept:
                    tracker.epoch(row["epoch"], _figures(row))

        for thread in self._threads:
            thread.start()
        self._tell(begin)

    def epoch(self, row: Mapping[str, Any]) -> None:
        """An epoch is over and saved; ``row`` is its row of ``history.csv``."""
        self._tell(lambda _, tracker: tracker.epoch(row["epoch"], _figures(row)))

    def finish(self, metrics: Mapping[str, Any]) -> None:
        """The run is finished; ``metrics`` is the content of ``metrics.json``."""
        setting = headline_setting(metrics["filter_seen"])
        values = {f"test/{name}": value for name, value in metrics["test"][setting].items()}
        values |= {f"best_validation/{name}": value for name, value in metrics["validation"][setting].items()}
        values |= {name: metrics[name] for name in ("best_epoch", "training_seconds") if metrics[name] is not None}
        files = [self._run.path / CARD_FILE, self._run.metrics_file]
        self._tell(lambda _, tracker: tracker.finish(metrics["epochs"], values, files))

    def close(self) -> None:
        """End what was begun; waits up to a minute for what is still to be sent."""
        finished = self._run.is_finished
        self._tell(lambda _, tracker: tracker.close(finished=finished))
        for thread in self._threads:
            if thread.is_alive() and not thread.ended():
                warnings.warn(
                    f"{thread.name} has not taken everything within {LONGEST_WAIT:.0f} s; the rest may be lost there, "
                    f"and {self._run.path} has it all",
                    stacklevel=2,
                )
        self._tell_of_failures()

    def _tell(self, call: Callable[[str, Tracker], None]) -> None:
        self._tell_of_failures()
        for thread in self._threads:
            thread.calls.put(call)

    def _tell_of_failures(self) -> None:
        for thread in self._threads:
            if thread.failure is not None and not thread.is_told:
                thread.is_told = True
                said = " ".join(f"{type(thread.failure).__name__}: {thread.failure}".split())[:300]
                warnings.warn(f"{thread.name} keeps no more of {self._run.path}, which goes on: {said}", stacklevel=4)


class _Thread(threading.Thread):
    """Does what a tracker is told in order, until it fails; a daemon, so that no program waits for a server."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        super().__init__(name=name, daemon=True)
        self.calls: SimpleQueue[Callable[[str, Tracker], None] | None] = SimpleQueue()
        self.failure: Exception | None = None
        self.is_told = False
        self._tracker = tracker

    def run(self) -> None:
        while (call := self.calls.get()) is not None:
            if self.failure is None:
                try:
                    call(self.name, self._tracker)
                except Exception as error:
                    self.failure = error

    def ended(self) -> bool:
        """Whether everything so far was done within ``LONGEST_WAIT``."""
        self.calls.put(None)
        self.join(LONGEST_WAIT)
        return not self.is_alive()


class TensorBoard:
    """Event files in the run's own folder ``tensorboard``."""

    def open(self, run: RunFolder, config: RunConfig, known: str | None, epochs: int) -> tuple[str, int]:
        """A resumed run hides what was written after the epoch it resumes from."""
        from torch.utils.tensorboard import SummaryWriter

        folder = run.path / "tensorboard"
        kept = epochs if folder.is_dir() else 0
        self._writer: Any = SummaryWriter(str(folder), purge_step=epochs + 1)
        return folder.name, kept

    def epoch(self, number: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def finish(self, epochs: int, values: Mapping[str, float], files: Sequence[Path]) -> None:
        self.epoch(epochs, values)

    def close(self, *, finished: bool) -> None:
        self._writer.close()


class MLflow:
    """A run of MLflow, in the store that MLflow is set to (``MLFLOW_TRACKING_URI``); its names have _at_ for @."""

    def open(self, run: RunFolder, config: RunConfig, known: str | None, epochs: int) -> tuple[str, int]:
        from mlflow.entities import Param

        self._client: Any = _mlflow_client()
        if known is not None and self._has(known):
            self._id = known
            self._client.update_run(known, status="RUNNING")
            return known, max((one.step for one in self._client.get_metric_history(known, "loss")), default=0)
        self._id = self._client.create_run(
            self._experiment(config.training.project), run_name=run.path.name
        ).info.run_id
        params = [Param(key, str(value)) for key, value in by_setting(to_dict(config)).items()]
        for start in range(0, len(params), PARAMS_PER_CALL):
            self._client.log_batch(self._id, params=params[start : start + PARAMS_PER_CALL])
        return self._id, 0

    def epoch(self, number: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        named = {name.replace("@", "_at_"): value for name, value in values.items()}
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, number) for name, value in named.items()])

    def finish(self, epochs: int, values: Mapping[str, float], files: Sequence[Path]) -> None:
        self.epoch(epochs, values)
        self._client.set_terminated(self._id)
        for file in files:  # last: a store of files may lack a package where that of figures does not
            self._client.log_artifact(self._id, str(file))

    def close(self, *, finished: bool) -> None:
        if not finished:
            self._client.set_terminated(self._id, "KILLED")

    def _has(self, known: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            return bool(self._client.get_run(known).info.lifecycle_stage == "active")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False

    def _experiment(self, project: str | None) -> str:
        """The id of an experiment, which is made if there is none; another process may be as far."""
        from mlflow.exceptions import MlflowException

        if project is None and (given := os.environ.get("MLFLOW_EXPERIMENT_ID")):
            return given
        name = project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or USUAL_PROJECT
        try:
            found = self._client.get_experiment_by_name(name)
            return str(found.experiment_id if found else self._client.create_experiment(name))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            return str(self._client.get_experiment_by_name(name).experiment_id)


def _mlflow_client() -> Any:
    """A client whose store is there; processes and threads take turns, since a database that several make is spoilt."""
    import mlflow

    kind, _, path = mlflow.get_tracking_uri().partition(":///")
    if not kind.startswith("sqlite"):
        return mlflow.MlflowClient()
    folder = os.open(Path(path).parent, os.O_RDONLY)
    try:
        deadline = time.monotonic() + LONGEST_WAIT
        while not hold(folder) and time.monotonic() < deadline:
            time.sleep(0.1)
        client = mlflow.MlflowClient()
        client.search_experiments(max_results=1)
        return client
    finally:
        os.close(folder)


class WandB:
    """A run of Weights & Biases, which reads its own variables: ``WANDB_MODE=offline`` needs no key and no server."""

    def open(self, run: RunFolder, config: RunConfig, known: str | None, epochs: int) -> tuple[str, int]:
        import wandb

        project = config.training.project or (None if os.environ.get("WANDB_PROJECT") else USUAL_PROJECT)
        self._run: Any = wandb.init(
            project=project,
            name=run.path.name,
            id=known,
            resume=None if known is None else "allow",
            config=to_dict(config),
            allow_val_change=True,
            reinit="create_new",  # beside those of other seeds, and of the caller
            settings=wandb.Settings(console="off"),
        )
        return self._run.id, self._run.step - 1 if self._run.resumed else 0

    def epoch(self, number: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=number, commit=True)

    def finish(self, epochs: int, values: Mapping[str, float], files: Sequence[Path]) -> None:
        import wandb

        self._run.summary.update(dict(values))
        results = wandb.Artifact(f"results-{self._run.id}", type="results")
        for file in files:
            results.add_file(str(file))
        self._run.log_artifact(results)

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


TRACKERS: dict[str, Callable[[], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def check_trackers(config: TrainingConfig) -> None:
    """Refuse before any work is done where a tracker is asked for and is not installed; let W&B ask for its key."""
    missing = [name for name in config.tracked_by if not _is_installed(name)]
    if missing:
        packages = " ".join(PACKAGES[name] for name in missing)
        raise UserError(
            f"trackers {' and '.join(missing)} need packages that are not installed: pip install {packages}, or leave "
            "them out"
        )
    if "wandb" in config.tracked_by and this_process().leads and os.environ.get("WANDB_MODE", "online") == "online":
        import wandb

        with suppress(Exception):  # what is missing where nobody can be asked, its thread says
            wandb.login()


def _is_installed(name: str) -> bool:
    """Whether there is such a package; a folder ``wandb`` in the working folder, as W&B makes one, is none."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of ``history.csv``."""
    numbers = {name: value for name, value in row.items() if name != "epoch" and isinstance(value, (int, float))}
    return {name.replace("valid_", "validation/"): value for name, value in numbers.items()}
