"""RecBole's trainer for our models, and its data set with one more check.

The trainer adds what the model needs: the groups of ``training.optimiser`` (precision at a higher rate and without
weight decay, stochastic dynamics with a clipped gradient), all from RecBole's rate and weight decay, and the warm-up,
which depends on the step alone, so that a resumed training goes on with it. It trains with autograd's anomaly mode off,
which importing RecBole's models switches on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from recbole.data.dataset import SequentialDataset
from recbole.trainer import Trainer, trainer
from torch import Tensor

from recbft.config.fields import to_dict
from recbft.config.recbole_yaml import ADAPTED
from recbft.errors import UserError
from recbft.recbole.item_features import KEY, named_in, read_features
from recbft.recbole.settings import MODEL_SECTIONS, run_config
from recbft.training.optimiser import clip_gradients, parameter_groups, warmup_ramp

log = logging.getLogger(__name__)


class PrecisionTrainer(Trainer):  # type: ignore[misc]
    """RecBole's ``Trainer`` with our parameter groups and the warm-up."""

    def _build_optimizer(self, **given: Any) -> torch.optim.Optimizer:
        model = self.model.recommender
        self.model.has_own_trainer = True
        # RecBole's numbers also where the model comes from a run that was trained with others.
        rates = {key: given.get(key, getattr(self, key)) for key in ("learning_rate", "weight_decay")}
        groups = parameter_groups(model, replace(self.model.run.training, **rates))
        optimizer: torch.optim.Optimizer = super()._build_optimizer(params=groups, **given)

        def clip_groups(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            clip_gradients(model, optimizer, clip_norm=None)  # clip_grad_norm is RecBole's to do

        optimizer.register_step_pre_hook(clip_groups)
        return optimizer

    def resume_checkpoint(self, resume_file: Any) -> None:
        """Go on with a checkpoint; a warning says where this config describes another model than the one it is of."""
        then = trainer.torch.load(resume_file, map_location="cpu")["config"]  # as RecBole's trainer reads it
        changed = "; ".join(_changes(then, self.config))
        if changed:
            log.warning("%s was trained as another model than this config describes: %s", resume_file, changed)
        super().resume_checkpoint(resume_file)

    def _train_epoch(
        self, train_data: Any, epoch_idx: int, loss_func: Any = None, show_progress: bool = False
    ) -> float | tuple[float, ...]:
        step = epoch_idx * len(train_data)

        def loss_after_warmup(interaction: Any) -> Tensor:
            nonlocal step
            self.model.recommender.set_ramp(warmup_ramp(step, self.model.warmup_steps))
            step += 1
            loss: Tensor = (loss_func or self.model.calculate_loss)(interaction)
            return loss

        with torch.autograd.set_detect_anomaly(False):
            total: float | tuple[float, ...] = super()._train_epoch(
                train_data, epoch_idx, loss_after_warmup, show_progress
            )
        return total


def _changes(then: Any, now: Any) -> Iterator[str]:
    """What two configs say of a model, where they differ; RecBole itself warns where the names do."""
    if then["model"] != now["model"] or then["model"] not in ADAPTED:
        return
    old, new = (to_dict(run_config(config["model"], config.final_config_dict)) for config in (then, now))
    for section in MODEL_SECTIONS:
        before, after = (known[section] or {} for known in (old, new))
        for key in sorted({*before, *after}):
            if before.get(key) != after.get(key):
                yield f"{section}.{key} was {before.get(key)!r} and is {after.get(key)!r}"
    yield from (f"{key} was {old[key]!r} and is {new[key]!r}" for key in ("arm", "mixer") if old[key] != new[key])
    features = [named_in(config[KEY]) for config in (then, now)]
    if features[0] != features[1]:
        yield f"{KEY} was {then[KEY]!r} and is {now[KEY]!r}"


class TimedDataset(SequentialDataset):  # type: ignore[misc]
    """RecBole's ``SequentialDataset``; a column that is missing is named as what it is, and item features are kept."""

    def _data_processing(self) -> None:
        self._refuse_missing_columns()
        self.features_read = read_features(self)
        super()._data_processing()
        if self.benchmark_filename_list is not None:
            self._refuse_two_numberings()

    def _user_item_feat_preparation(self) -> None:
        for column in named_in(self.config[KEY]):  # which are read, and RecBole has filtered by them
            self._del_col(self.item_feat, column)
        super()._user_item_feat_preparation()

    def _refuse_missing_columns(self) -> None:
        columns = [] if self.inter_feat is None else list(self.inter_feat.columns)
        wanted = {"user": (self.uid_field, "USER_ID_FIELD", ""), "item": (self.iid_field, "ITEM_ID_FIELD", "")}
        if self.benchmark_filename_list is None:
            wanted["time"] = (self.time_field, "TIME_FIELD", ", and histories are ordered by time")
        else:
            reason = ", and files that are split already hold histories"
            wanted["history"] = (self._history_field, "ITEM_ID_FIELD and LIST_SUFFIX", reason)
        for kind, (field, key, reason) in wanted.items():
            if field not in columns:
                raise UserError(
                    f"data set {self.dataset_name!r} has no {kind} column {field!r} among those read "
                    f"({', '.join(columns) or 'none'}){reason}; name the column in {key} and in load_col.inter"
                )

    def _refuse_two_numberings(self) -> None:
        """Refuse histories that RecBole has numbered apart from the targets, as it does where no alias is named."""
        if not np.array_equal(self.field2id_token[self._history_field], self.field2id_token[self.iid_field]):
            raise UserError(
                f"the items of column {self._history_field!r} are numbered apart from those of {self.iid_field!r}: "
                f"one number stands for two items; set alias_of_item_id: [{self._history_field}]"
            )

    @property
    def _history_field(self) -> str:
        return f"{self.iid_field}{self.config['LIST_SUFFIX']}"
