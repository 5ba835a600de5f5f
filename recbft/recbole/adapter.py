"""One of our models as a RecBole ``SequentialRecommender``.

RecBole numbers the items (0 is padding, as here) and makes one row per event: a history and the event that follows it.
A row trains what that event asks: next-item models its own target only, since each position before it ends a row of its
own; BERT4Rec the Cloze of the history with its target. ``recbft train`` instead reads each history once an epoch and
trains on all of its positions.

Shapes: B rows, L the window, V items, D state width.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from recbole.model.abstract_recommender import SequentialRecommender
from torch import Tensor

from recbft.errors import UserError
from recbft.models import MODELS
from recbft.models.contract import ItemTable, read_histories
from recbft.recbole.item_features import content_of
from recbft.recbole.settings import run_config, warn_about_unknown
from recbft.training.build import check_clock
from recbft.training.optimiser import idle_settings, parameter_groups
from recbft.training.run_config import RunConfig

IntArray = NDArray[np.int64]

log = logging.getLogger(__name__)


class Adapter(SequentialRecommender):  # type: ignore[misc]
    """The model called ``name`` in ``ADAPTED``.

    Args:
        config: RecBole's Config.
        dataset: the training part of RecBole's data.
        run: describes the model in place of the config.
        content: (V + 1, F) what the model is to know of each item, in place of ``item_features`` of the data.
    """

    name: ClassVar[str]

    def __init__(self, config: Any, dataset: Any, run: RunConfig | None = None, content: Tensor | None = None) -> None:
        super().__init__(config, dataset)
        if run is None:
            run = run_config(self.name, config.final_config_dict)
            recbole_knows = {key for keys in config.parameters.values() for key in keys}
            warn_about_unknown(run, config.external_config_dict, recbole_knows | set(config.internal_config_dict))
        needed = run.backbone.max_length
        if self.max_seq_length < needed:  # it would cut histories that the model reads in full
            raise UserError(
                f"MAX_ITEM_LIST_LENGTH is {self.max_seq_length}, but the run reads {needed} events; set it to {needed} "
                "or more"
            )
        if run.reads_reliability:
            raise UserError(
                "backbone.reads_reliability has no effect in RecBole, which gives a model the items and times of a "
                "history alone; leave it out, or train with recbft"
            )
        self.run = run
        self.warmup_steps = run.training.warmup_steps  # of its own trainer; 0 where the weights come ramped in
        self.item_tokens = dataset.field2id_token[self.ITEM_ID]  # (V + 1,) raw ids as text, the first is padding
        counts = training_counts(config, dataset)
        if content is None:
            content = content_of(config, run, dataset, counts)
        self.recommender = cast(Any, run.build(torch.from_numpy(counts), content))
        for key, why in idle_settings(self.recommender, run.training).items():
            log.warning("%s has no effect: %s", key.removeprefix("training."), why)
        # Its own trainer begins the warm-up at 0; another, which knows of none, is to train the model as it is used.
        self.recommender.set_ramp(1.0)
        self.has_own_trainer = False
        self.time = config["TIME_FIELD"] if self.recommender.reads_times else None
        self.time_list = f"{self.time}{config['LIST_SUFFIX']}"
        if self.time is not None:
            self._check_times(config, dataset.inter_feat)

    def train(self, mode: bool = True) -> Adapter:
        """Set the mode; entering either brings what is kept from the weights up to date."""
        super().train(mode)
        self.recommender.refresh()
        return self

    def forward(self, item_seq: Tensor, item_seq_len: Tensor) -> Tensor:
        """The state after each history, (B, L) and (B,) -> (B, D)."""
        return self._states({self.ITEM_SEQ: item_seq, self.ITEM_SEQ_LEN: item_seq_len})

    def calculate_loss(self, interaction: Any) -> Tensor:
        """Mean loss of the rows."""
        if not self.has_own_trainer:
            self._warn_of_another_trainer()
        items, times, start, stop = self._histories(interaction, interaction[self.POS_ITEM_ID])
        make = MODELS[self.run.model].batches
        assert make is not None
        draw = int(torch.randint(2**31, ()))
        # A row's history is not cut for the Cloze: where it ends early, an earlier row does.
        whole: dict[str, Any] = {} if self.recommender.append is None else {"cut": False}
        batches = make(
            self.run.backbone,
            items,
            start,
            stop + 1,
            num_items=self.n_items - 1,
            batch_size=len(start),
            seed=draw,
            times=times,
            **whole,
        )
        [batch] = batches.epoch(draw)
        if self.recommender.append is None:  # a next-item model: the last target is the row's own
            batch = batch.with_last_targets()
        loss: Tensor = self.recommender.loss(batch.to(self.device))
        return loss

    def predict(self, interaction: Any) -> Tensor:
        """The score of each row's item, (B,)."""
        table: ItemTable = self.recommender.item_table()
        item = interaction[self.ITEM_ID]
        score = (self._states(interaction) * table.weight[item]).sum(-1)
        return score if table.bias is None else score + table.bias[item]

    def full_sort_predict(self, interaction: Any) -> Tensor:
        """The scores of all items, padding's among them, (B, V + 1)."""
        table: ItemTable = self.recommender.item_table()
        scores = self._states(interaction) @ table.weight.T
        return scores if table.bias is None else scores + table.bias

    def _states(self, interaction: Any) -> Tensor:
        items, times, start, stop = self._histories(interaction)
        [batch] = read_histories(
            self.recommender, items, start, stop, times=times, source="RecBole's row", histories_per_batch=len(start)
        )
        state: Tensor = self.recommender.user_states(batch.to(self.device)).state
        return state

    def _warn_of_another_trainer(self) -> None:
        """Say once what a training by RecBole's plain ``Trainer``, or by a loop of one's own, leaves out."""
        self.has_own_trainer = True
        if len(parameter_groups(self.recommender, self.run.training)) > 1:
            log.warning(
                "%s is not trained by its own trainer: there is no warm-up and one learning rate for all, whatever "
                "warmup_steps and precision_lr_multiplier say; make the trainer with "
                "get_trainer(config['MODEL_TYPE'], config['model'])(config, model)",
                self.name,
            )

    def _check_times(self, config: Any, rows: Any) -> None:
        """Refuse times that are scaled, not whole (they are read as whole numbers), or not known of every event.

        RecBole holds them in single precision: a warning says where that rounds them.
        """
        reads = f"{self.run.reads_times} reads {self.time!r}"
        if config["normalize_all"] or self.time in (config["normalize_field"] or ()):
            raise UserError(f"{reads}, but RecBole scales it to [0, 1]; set normalize_all: False")
        if self.time not in rows or self.time_list not in rows:
            raise UserError(
                f"{reads}, but the rows lack {self.time!r} or {self.time_list!r}; have both in the files and in "
                "load_col.inter"
            )
        times = rows[self.time]
        if (times != times.round()).any():
            example = times[times != times.round()][0].item()
            raise UserError(
                f"{reads}, which holds {example:g}, not a whole number; give integer seconds or milliseconds"
            )
        latest = times.max()
        check_clock(self.run, config["dataset"], int(latest))
        step = float(np.spacing(np.float32(latest.item())))
        if step > 1:
            log.warning(
                "%s, which RecBole holds in single precision, here in steps of %d: scores are not those of recbft, "
                "which reads exact times",
                reads,
                step,
            )

    def _histories(
        self, interaction: Any, target: Tensor | None = None
    ) -> tuple[IntArray, IntArray | None, IntArray, IntArray]:
        """Items, times, start and stop of the rows side by side; each row's own event stands at ``stop``.

        In RecBole's padded rows a history begins at the left.
        """
        length = interaction[self.ITEM_SEQ_LEN].cpu().numpy()
        if self.recommender.append is None and not length.all():
            raise UserError(
                f"the data hold a row with an empty history, which {self.name} cannot read; leave such rows out"
            )
        stop = np.cumsum(length + 1) - 1
        items = _joined(interaction[self.ITEM_SEQ], length, target)
        times = None
        if self.time is not None:
            times = _joined(interaction[self.time_list].long(), length, interaction[self.time].long())
        return items, times, stop - length, stop


def training_counts(config: Any, dataset: Any) -> IntArray:
    """Events per item in RecBole's training rows, (V + 1,); index 0 holds 0.

    Every row's target is one event. A user's first event is no target, but stands alone in the history of the second:
    in the first row whose history has one event, or the only one where the window holds more.
    Pre-split files (``benchmark_filename``) hold whole histories instead: there, each user's longest row is counted.
    """
    rows, size = dataset.inter_feat, dataset.num(config["ITEM_ID_FIELD"])
    target = rows[config["ITEM_ID_FIELD"]].numpy()
    history = rows[config["ITEM_ID_FIELD"] + config["LIST_SUFFIX"]].numpy()
    length = rows[config["ITEM_LIST_LENGTH_FIELD"]].numpy()
    if config["benchmark_filename"] is not None and config["USER_ID_FIELD"] in rows:
        user = rows[config["USER_ID_FIELD"]].numpy()
        order = np.lexsort((length, user))
        longest = order[np.append(user[order][1:] != user[order][:-1], True)]
        events = [target[longest], history[longest].ravel()]
    else:
        alone = np.flatnonzero(length == 1)
        first = np.unique(rows[config["USER_ID_FIELD"]].numpy()[alone], return_index=True)[1]
        events = [target, history[alone[first], 0]]
    counts = np.bincount(np.concatenate(events), minlength=size)
    counts[0] = 0
    return counts.astype(np.int64)


def _joined(history: Tensor, length: IntArray, own: Tensor | None) -> IntArray:
    """Padded histories, (B, L), without the padding and each followed by its row's own event (0 where not given)."""
    rows = np.pad(history.cpu().numpy(), ((0, 0), (0, 1)))
    if own is not None:
        rows[np.arange(len(rows)), length] = own.cpu().numpy()
    joined: IntArray = rows[np.arange(rows.shape[1]) <= length[:, None]]
    return joined
