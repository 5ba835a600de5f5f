"""A run in progress: take up its state, train, validate, keep what is best, and report it when it ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pandas as pd
import torch

from recbft.datasets import Dataset
from recbft.errors import RunInterruptedError, UserError
from recbft.evaluation.evaluate import Evaluation, evaluate
from recbft.evaluation.metrics import EvaluationConfig, begun_from
from recbft.evaluation.new_item_bias import level_new_items
from recbft.evaluation.probability import calibrations
from recbft.evaluation.trace import saturated_layers
from recbft.evaluation.views import Part
from recbft.models.backbone import Backbone
from recbft.models.contract import SequenceModel, TrainableModel
from recbft.runs import checkpoint
from recbft.runs.checkpoint import Loaded, TrainState
from recbft.runs.environment import digits_from
from recbft.runs.folder import RunFolder
from recbft.system.torchrun import Process
from recbft.training.build import Parts
from recbft.training.bundle import write_vocabulary
from recbft.training.card import write_card
from recbft.training.controllers import CROSS_ENTROPY, validation_cross_entropy
from recbft.training.loop import Row, fit, moment_of
from recbft.training.process_settings import rng_state, set_rng_state
from recbft.training.process_team import Team, departure_explained
from recbft.training.progress import Progress
from recbft.training.run_config import RunConfig
from recbft.training.trackers import Trackers


class Session:
    """A run in progress; its random state is that of ``generator``."""

    def __init__(
        self,
        run: RunFolder,
        config: RunConfig,
        dataset: Dataset,
        device: torch.device,
        parts: Parts,
        state: TrainState,
        progress: Progress,
        generator: torch.Generator,
        team: Team,
    ) -> None:
        self.run, self.config, self.dataset, self.device = run, config, dataset, device
        self.model, self.batches, self.optimizer, self.controllers, self.graphs, _, self.content = parts
        self.state, self.progress, self.generator, self.team = state, progress, generator, team
        self.trackers = Trackers(run, config, leads=team.leads)
        self.rows: list[Row] = []
        self.state.run, self.state.digits_from = run.identity, digits_from(device)
        self.is_saved = False  # whether there is a state to go on from
        # Of several processes, each of which tells what is saved, the others wait for the first to write it.
        self.background = Background(in_thread=writes_in_background(device) and not team.several)
        team.draw_apart(config.seed, device)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The run in this process's hands alone, in the state saved last if there is one."""
        with ExitStack() as held:

            def take() -> Loaded | None:
                held.enter_context(self.run.locked())
                self.run.remove_leftovers()
                write_vocabulary(self.run.checkpoint, self.dataset, self.content)
                if not self.run.has_checkpoint:
                    return None
                loaded = checkpoint.load(self.run.checkpoint)
                checkpoint.tidy(self.run.checkpoint)
                self._tell_of_other_digits(loaded.state)
                return loaded

            loaded = self.team.first_does(take)
            if loaded is not None:
                self._restore(loaded)
            self.trackers.open(self.rows)
            try:
                yield
            finally:
                self.background.wait()
                self.trackers.close()

    def _tell_of_other_digits(self, saved: TrainState) -> None:
        """Warn, and write down, where the run goes on with what rounds otherwise than before."""
        before, now = saved.digits_from, self.state.digits_from
        changed = {key: [before[key], now[key]] for key in before if key in now and before[key] != now[key]}
        if changed:
            self.run.record_change(saved.epoch, changed)
            said = ", ".join(f"{key} {after} (so far {was})" for key, (was, after) in changed.items())
            warnings.warn(
                f"{self.run.path} goes on with {said}: its last digits will differ from those of a run that was not "
                f"stopped; {self.run.environment_file.name} says so",
                stacklevel=2,
            )

    def _restore(self, loaded: Loaded) -> None:
        checkpoint.take_up(self.model, loaded.model_state, folder=self.run.checkpoint)
        self.state, self.is_saved = (
            replace(loaded.state, run=self.state.run, digits_from=self.state.digits_from),
            True,
        )
        if self.optimizer is not None:
            self.optimizer.load_state_dict(loaded.optimizer_state)
        self.controllers.load_state_dict(loaded.controllers_state)
        set_rng_state(self.generator, self._own_rng(loaded.rng_state), self.device)
        self.rows = self.run.read_history(up_to_epoch=self.state.epoch)

    def _own_rng(self, saved: Any) -> Any:
        """This process's random state, of as many as trained the run so far."""
        states, here = saved.get("processes", [saved]), self.team.process
        if len(states) != here.size:
            raise UserError(
                f"{self.run.path} was trained by {_processes(len(states))}, and {_processes(here.size)} would draw "
                f"other numbers; go on with {self.run.command_to_resume(Process.of(len(states)))}"
            )
        return states[here.rank]

    def finish(self) -> RunFolder:
        """Train to the end, evaluate the best weights, write the results."""
        try:
            with departure_explained(self.team, self._way_on), self.locked():
                self._train()
                self.report()
        except KeyboardInterrupt:
            raise RunInterruptedError(f"interrupted; {self._way_on()}") from None
        return self.run

    def _way_on(self) -> str:
        saved = checkpoint.load_state(self.run.checkpoint).epoch if self.run.has_checkpoint else 0
        command = self.run.command_to_resume(self.team.process)
        return f"the state after epoch {saved} is saved, go on with: {command}"

    def _train(self) -> None:
        if self.batches is None:
            self._save(best=self.model.state_dict())
            return
        self.make_resumable()
        if self._would_gain_from_graphs():
            self.progress.note("the GPU waits for every launch; --set cuda_graphs=true gives it whole steps")
        assert self.optimizer is not None and isinstance(self.model, TrainableModel)
        fit(
            self.model,
            self.optimizer,
            self.batches,
            self.config.training,
            self.state,
            validate=self.validate,
            keep=self.keep,
            progress=self.progress,
            controllers=self.controllers,
            graphs=self.graphs,
            team=self.team,
        )
        self._offer_final_weights()

    def _would_gain_from_graphs(self) -> bool:
        if self.config.training.cuda_graphs is not None or self.team.several:
            return False
        begins = self.state.epoch == 0  # later on the settings of a run are what they are
        return self.device.type == "cuda" and begins and self.config.graph_hindrance is None

    def make_resumable(self) -> None:
        """Save the state before the first epoch, unless one is saved: from here on a killed run can be resumed."""
        if self.is_saved:
            return
        if self.config.training.warm_start is not None:
            self.progress.note(f"begins from {begun_from(self.run.protocol)}")
        if not self.config.training.epochs:
            level_new_items(self.model, self.dataset)
        self._save(best=None if self.config.training.epochs else self.model.state_dict())
        self.background.wait()

    def validate(self) -> dict[str, float]:
        """The validation metrics of the weights that controllers want judged, the model's own without them."""
        with self.controllers.evaluation_weights(self.model):
            level_new_items(self.model, self.dataset)
            metrics = self._evaluate("validation").headline
            if self.controllers.needs_validation_loss:
                loss = validation_cross_entropy(self.model, self.dataset)  # type: ignore[arg-type]
                metrics = {**metrics, CROSS_ENTROPY: loss}
        return metrics

    def _offer_final_weights(self) -> None:
        """Validate the weights that controllers have put together in the course of training, and keep better ones."""
        offered = self.controllers.final_weights(self.model)
        if offered is None:
            if self.config.controllers.swa is not None:
                self.progress.note("controllers.swa has averaged nothing: fewer than two epochs gained enough")
            return
        metric = self.config.training.valid_metric
        with offered:
            level_new_items(self.model, self.dataset)
            value = self._evaluate("validation").headline[metric]
            said = f"the averaged weights have valid {metric} {value:.4f}"
            if self.state.best_metric is not None and value <= self.state.best_metric:
                self.progress.note(f"{said}, and those of epoch {self.state.best_epoch} are kept")
                return
            self.state.best_metric, self.state.best_epoch = value, self.state.epoch
            best = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self._save(best=best)
        self.progress.note(f"{said}, and are kept")

    def _evaluate(self, part: Part) -> Evaluation:
        if isinstance(self.model, TrainableModel):
            self.model.refresh()
        settings = self.config.evaluation
        return evaluate(
            self.model,  # type: ignore[arg-type]
            self.dataset,
            part,
            filter_seen=settings.filter_seen,
            ks=settings.ks,
            memory_mb=settings.memory_mb,
            sharing=self.team,
        )

    def keep(self, row: Row, best: bool) -> None:
        """Save the state after an epoch, and the weights that were judged as the best ones if they are."""
        judged = None
        if best:  # before controllers move them
            with self.controllers.evaluation_weights(self.model):
                judged = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        if self.optimizer is not None and self.batches is not None:
            assert isinstance(self.model, TrainableModel)
            moment = moment_of(self.model, self.optimizer, self.batches, self.config.training, self.state)
            self.controllers.on_epoch_end(moment, row)
        self.rows.append(row)
        self.team.first_does(lambda: self.run.write_history(self.rows))
        self._save(best=judged)
        self.trackers.epoch(row)

    def _save(self, *, best: Mapping[str, torch.Tensor] | None) -> None:
        """Save the state as it is; on a GPU, whose state is copied anyway, it is written while training goes on."""
        random_states = self.team.gathered(rng_state(self.generator, self.device))

        def save() -> None:
            self.background.wait()  # so that one state at a time is held for it
            taken = checkpoint.snapshot(
                model_state=self.model.state_dict(),
                optimizer_state={} if self.optimizer is None else self.optimizer.state_dict(),
                rng_state={"processes": random_states} if self.team.several else random_states[0],
                controllers_state=self.controllers.state_dict(),
                state=self.state,
                best_model_state=best,
                apart=self.background.in_thread,
            )
            self.background.do(lambda: checkpoint.write(self.run.checkpoint, taken))

        self.team.first_does(save)
        self.is_saved = True

    def _tell_of_saturation(self) -> None:
        """Warn where the precision channel has lost much of its say."""
        if not (self.team.leads and isinstance(self.model, Backbone) and self.model.core is not None):
            return
        if layers := saturated_layers(self.model, self.dataset):
            named = "layer " + str(layers[0]) if len(layers) == 1 else "layers " + " and ".join(map(str, layers))
            warnings.warn(
                f"in {named}, more than a fifth of the observation precisions are the largest allowed "
                f"(core.lam_max {self.model.core.lam_max:g}), and tell no events apart: lists are as good, but their "
                "precision says little (`recbft probe`); with core.prior_variance=running nearly none are, and lists "
                "are no better",
                stacklevel=2,
            )

    def report(self) -> None:
        """Evaluate the best weights on validation and test, and close the run."""
        self.background.wait()
        self.progress.note("ranking each user's validation and test item")  # minutes where users and items are many
        self.model.load_state_dict(self.team.first_does(lambda: checkpoint.load_best(self.run.checkpoint)))
        if isinstance(self.model, TrainableModel):
            self.model.refresh()
        self._tell_of_saturation()
        metrics, ranks = results(self.model, self.dataset, self.config.evaluation, self.team)  # type: ignore[arg-type]
        metrics |= {
            "best_epoch": self.state.best_epoch,
            "epochs": self.state.epoch,
            "steps": self.state.step,
            "training_seconds": round(sum(float(row["seconds"]) for row in self.rows), 3),
        }
        self.team.first_does(lambda: write_card(self.run, metrics))
        self.team.first_does(lambda: self.run.finish(metrics, ranks))
        self.trackers.finish(metrics)


def results(
    model: SequenceModel, dataset: Dataset, settings: EvaluationConfig, team: Team
) -> tuple[dict[str, Any], pd.DataFrame]:
    """What ``metrics.json`` has of a finished model's validation and test, and the ranks of its test."""
    how: dict[str, Any] = {"filter_seen": settings.filter_seen, "ks": settings.ks, "memory_mb": settings.memory_mb}
    validation = evaluate(model, dataset, "validation", sharing=team, **how)
    test = evaluate(model, dataset, "test", sharing=team, lists=True, **how)
    probability = team.first_does(lambda: calibrations(model, dataset, memory_mb=settings.memory_mb))
    metrics = {
        "filter_seen": settings.filter_seen,
        "test": test.metrics,
        "validation": validation.metrics,
        "exposure": test.exposure,
        "probability": probability,
    }
    return metrics, test.per_user


class Background:
    """One piece of work at a time, by a thread; what a piece raises there is raised at the next call.

    Args:
        in_thread: whether there is a thread; a piece is done at once where there is none.
    """

    def __init__(self, *, in_thread: bool = True) -> None:
        self.in_thread = in_thread
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="background")  # its thread begins with the first piece
        self._under_way: Future[None] | None = None

    def do(self, work: Callable[[], None]) -> None:
        """Begin a piece of work, once that before it is done."""
        self.wait()
        if self.in_thread:
            self._under_way = self._worker.submit(work)
        else:
            work()

    def wait(self) -> None:
        """Until nothing is under way; an interrupt leaves under way what is. The thread ends with the object."""
        if self._under_way is not None:
            wait([self._under_way])
            done, self._under_way = self._under_way, None
            done.result()


def writes_in_background(device: torch.device) -> bool:
    """Whether a state is written while training goes on: where it is copied anyway, and the CPU has time left over."""
    return device.type != "cpu"


def _processes(number: int) -> str:
    return "one process" if number == 1 else f"{number} processes"
