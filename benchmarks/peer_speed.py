"""Time the SASRec of RecTools or RePlay as ``train_speed`` times ours: epochs, evaluation, memory, HR and NDCG.

    python -m benchmarks.peer_speed --library rectools --dataset amazon-beauty --data-root DIR --json FILE
    python -m benchmarks.peer_speed --library replay --dataset ml-1m --data-root DIR --json FILE

Run it in an environment of its own that holds the library and recbft (``README.md``). The library gets the histories of
``recbft`` with ties in the same order, the last event of each for the test, the one before for validation, which is
left out; it trains on the others through its own public way. Width, depth, window, dropout, batch and rate are those of
our defaults.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from benchmarks import machine
from benchmarks.command import count, finish, parse, recorded, training_parser
from recbft.datasets import Dataset
from recbft.errors import UserError
from recbft.evaluation.metrics import hit_rate, ndcg
from recbft.reporting.tables import text_table
from recbft.system.files import write_json
from recbft.training.run_config import load_run_config

NAME = "peer_speed"
WIDTH, LAYERS, HEADS, NETWORK, WINDOW, DROPOUT, RATE, HISTORIES = 64, 2, 2, 256, 50, 0.5, 1e-3, 256
AT = 10


@dataclass(kw_only=True)
class Timed:
    """What a library took, and the place of each user's test item in its list: from 1, infinite where it is missing."""

    seconds: list[float]  # of each epoch, the first included
    evaluations: list[float] = field(default_factory=list)
    ranks: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    @property
    def per_epoch(self) -> float:
        """The median of the epochs but the first."""
        return statistics.median(self.seconds[1:] or self.seconds)


def with_rectools(dataset: Dataset, *, epochs: int, times: int, seed: int) -> Timed:
    """RecTools' SASRecModel by ``fit`` and ``recommend``."""
    import pytorch_lightning as lightning
    from rectools.dataset import Dataset as Interactions
    from rectools.models import SASRecModel

    lightning.seed_everything(seed)
    model = SASRecModel(
        n_factors=WIDTH, n_blocks=LAYERS, n_heads=HEADS, session_max_len=WINDOW, dropout_rate=DROPOUT, lr=RATE,
        batch_size=HISTORIES, loss="softmax", recommend_torch_device="cpu",
        get_trainer_func=lambda: _trainer(lightning, epochs),
    )  # fmt: skip
    model.fit(Interactions.construct(_table(dataset, left_out=2)))
    made = Timed(seconds=_clock(model.fit_trainer).seconds)
    known = Interactions.construct(_table(dataset, left_out=1))
    users, targets = np.arange(dataset.num_users), _targets(dataset)
    for _ in range(times):
        began = time.perf_counter()
        lists = model.recommend(users, known, k=AT, filter_viewed=False, on_unsupported_targets="ignore")
        hits = lists[lists["item_id"].to_numpy() == targets[lists["user_id"].to_numpy()]]
        made.ranks = np.full(len(users), np.inf)
        made.ranks[hits["user_id"].to_numpy()] = hits["rank"].to_numpy()
        made.evaluations.append(time.perf_counter() - began)
    return made


def with_replay(dataset: Dataset, *, epochs: int, times: int, seed: int) -> Timed:
    """RePlay's ``replay.nn`` SasRec in its Lightning module, fed from memory; ranks by a count of better scores."""
    import lightning
    from replay.data import FeatureHint, FeatureSource, FeatureType
    from replay.data.nn import TensorFeatureInfo, TensorFeatureSource, TensorSchema
    from replay.nn.lightning import LightningModule
    from replay.nn.lightning.optimizer import OptimizerFactory
    from replay.nn.sequential import SasRec

    lightning.seed_everything(seed)
    num_items = dataset.num_items
    item = TensorFeatureInfo(
        "item_id", is_seq=True, feature_type=FeatureType.CATEGORICAL, feature_hint=FeatureHint.ITEM_ID,
        cardinality=num_items, padding_value=num_items, embedding_dim=WIDTH,
        feature_sources=[TensorFeatureSource(FeatureSource.INTERACTIONS, "item_id")],
    )  # fmt: skip
    model = SasRec.from_params(
        TensorSchema([item]), embedding_dim=WIDTH, num_heads=HEADS, num_blocks=LAYERS, max_sequence_length=WINDOW,
        dropout=DROPOUT, hidden_dim=NETWORK,
    )  # fmt: skip
    module = LightningModule(model, optimizer_factory=OptimizerFactory(learning_rate=RATE))
    trainer = _trainer(lightning, epochs)
    trainer.fit(module, _Batches(_padded(dataset, left_out=2, length=WINDOW + 1), num_items, shift=1))
    made = Timed(seconds=_clock(trainer).seconds)
    module.eval()
    targets = torch.from_numpy(_targets(dataset))
    known = _Batches(_padded(dataset, left_out=1, length=WINDOW), num_items, shift=0)
    for _ in range(times):
        began = time.perf_counter()
        places = []
        with torch.inference_mode():
            for batch in known:
                scores = module(batch)["logits"]
                own = scores.gather(1, targets[batch["rows"], None])
                places.append((scores > own).sum(1) + 1)
        made.ranks = torch.cat(places).numpy().astype(float)
        made.evaluations.append(time.perf_counter() - began)
    return made


LIBRARIES: dict[str, tuple[str, Callable[..., Timed]]] = {  # the distribution, and how it is timed
    "rectools": ("rectools", with_rectools),
    "replay": ("replay-rec", with_replay),
}


class _Batches:
    """RePlay's batches of padded histories, shuffled anew in each epoch where a next item is to be learned."""

    def __init__(self, histories: torch.Tensor, padding: int, shift: int) -> None:
        self.histories, self.padding, self.shift = histories, padding, shift

    def __len__(self) -> int:
        return -(-len(self.histories) // HISTORIES)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        count = len(self.histories)
        order = torch.randperm(count) if self.shift else torch.arange(count)
        for rows in order.split(HISTORIES):
            items = self.histories[rows]
            inputs = items[:, : items.shape[1] - self.shift]
            batch = {
                "rows": rows,
                "feature_tensors": {"item_id": inputs},
                "padding_mask": inputs != self.padding,
            }
            if self.shift:
                labels = items[:, self.shift :, None]
                batch |= {"positive_labels": labels, "target_padding_mask": labels != self.padding}
                batch["target_padding_mask"] &= batch["padding_mask"][..., None]
            yield batch


def _padded(dataset: Dataset, *, left_out: int, length: int) -> torch.Tensor:
    """The latest ``length`` events of each user before the last ``left_out``, as 0.., at the right; V pads."""
    padded = np.full((dataset.num_users, length), dataset.num_items)
    for user, (first, end) in enumerate(zip(dataset.offsets[:-1], dataset.offsets[1:] - left_out, strict=True)):
        kept = dataset.items[max(first, end - length) : end] - 1
        padded[user, length - len(kept) :] = kept
    return torch.from_numpy(padded)


def _table(dataset: Dataset, *, left_out: int) -> pd.DataFrame:
    """All events but each user's last ``left_out``, users and items as 0..; the place in the history is the time."""
    user = np.repeat(np.arange(dataset.num_users), dataset.lengths)
    place = np.arange(len(user)) - np.repeat(dataset.offsets[:-1], dataset.lengths)
    kept = place < np.repeat(dataset.lengths, dataset.lengths) - left_out
    columns = {
        "user_id": user,
        "item_id": dataset.items - 1,
        "weight": 1.0,
        "datetime": pd.to_datetime(place, unit="s"),
    }
    return pd.DataFrame(columns)[kept]


def _targets(dataset: Dataset) -> NDArray[np.int64]:
    return dataset.items[dataset.offsets[1:] - 1] - 1


def _trainer(lightning: Any, epochs: int) -> Any:
    """A Lightning trainer that writes nothing and reads a clock; of either of Lightning's two packages."""

    class Clock(lightning.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            self.began = time.perf_counter()

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            self.seconds.append(time.perf_counter() - self.began)

    return lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Clock()],
    )  # fmt: skip


def _clock(trainer: Any) -> Any:
    return next(callback for callback in trainer.callbacks if hasattr(callback, "seconds"))


def result_of(timed: Timed) -> dict[str, Any]:
    """The fields of an arm of ``train_speed --json``."""
    return {
        "seconds_per_epoch": timed.per_epoch,
        "seconds_of_epochs": timed.seconds,
        "evaluation_seconds": statistics.median(timed.evaluations),
        "seconds_of_evaluations": timed.evaluations,
        "epochs": len(timed.seconds),
        f"hr@{AT}": float(hit_rate(timed.ranks, AT).mean()),
        f"ndcg@{AT}": float(ndcg(timed.ranks, AT).mean()),
    }


def main(arguments: Sequence[str]) -> int:
    options = training_parser(NAME, __doc__.split("\n", 1)[0])
    options.add_argument("--library", required=True, choices=sorted(LIBRARIES))
    options.add_argument("--epochs", type=count, default=4, metavar="N", help="the first is not timed")
    options.add_argument("--evaluations", type=count, default=3, metavar="N", help="times the evaluation is timed")
    options.add_argument("--threads", type=count, default=2, metavar="N")
    options.add_argument("--seed", type=int, default=0)
    given = parse(options, arguments)
    if given.model != "sasrec" or given.settings:
        raise UserError("--model and --set are not for this command: it times SASRec with the settings of README.md")
    distribution, run = LIBRARIES[given.library]
    if importlib.util.find_spec(given.library) is None:
        raise UserError(
            f"{given.library} is not installed here; in an environment of its own: "
            f'pip install "{distribution}[torch]" (benchmarks/README.md)'
        )
    torch.set_num_threads(given.threads)
    _hush()
    dataset = load_run_config(None, (), dataset=given.dataset, data_root=given.data_root).data.load()
    head = machine.header(recorded(NAME, arguments), dataset)
    timed = run(dataset, epochs=given.epochs, times=given.evaluations, seed=given.seed)
    head, made, memory = machine.close(head), result_of(timed), machine.peak_rss_mb()
    label = f"{distribution} {importlib.metadata.version(distribution)}"
    columns = ["library", "s/epoch", "evaluation s", "peak RSS, MB", "HR@10", "NDCG@10"]
    row = [
        label,
        f"{made['seconds_per_epoch']:.2f}",
        f"{made['evaluation_seconds']:.2f}",
        f"{memory:,}",
        f"{made['hr@10']:.4f}",
        f"{made['ndcg@10']:.4f}",
    ]
    print("\n".join([*machine.lines(head), "", text_table(columns, [row])]))
    print(f"s/epoch: median of {max(1, made['epochs'] - 1)} after the first; HR@10 and NDCG@10 unmasked, after all")
    if given.json:
        write_json(given.json, {"benchmark": NAME, **head, "peak_rss_mb": memory, "arms": {label: made}})
    return 0


def _hush() -> None:
    """Lightning's advice on workers and devices is not for this."""
    warnings.filterwarnings("ignore", module="lightning|pytorch_lightning|rectools|replay")
    for name in ("lightning", "pytorch_lightning", "lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    finish(main)
