"""A small data set as RecBole reads it, and RecBole kept to itself: it writes where it runs and reads sys.argv."""

from __future__ import annotations

import importlib
import logging
import sys

import pytest
import torch

import recbft.recbole  # noqa: F401  the models by name, and what an old RecBole needs
from recbft.config.recbole_yaml import ADAPTED
from recbft.datasets import Dataset
from recbft.datasets.atomic import save_atomic
from recbft.datasets.synth import SyntheticConfig, generate

SMALL = {"hidden_size": 8, "n_heads": 2, "n_layers": 2, "MAX_ITEM_LIST_LENGTH": 12}
NAMES = tuple(ADAPTED)


def missing_recbole() -> str | None:
    """Why RecBole cannot be used here."""
    try:
        importlib.import_module("recbole.quick_start")
    except ImportError as error:
        return f"RecBole cannot be imported: {error}"
    return None


@pytest.fixture(scope="session", autouse=True)
def _needs_recbole(request):
    reason = missing_recbole()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def at_home(tmp_path, monkeypatch):
    """Undo what RecBole does to the process: folders, environment, loggers, anomaly mode."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield tmp_path
    for handler in [h for h in root.handlers if h not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    torch.autograd.set_detect_anomaly(False)


@pytest.fixture(scope="session")
def events(tmp_path_factory):
    """Raw events in a Parquet file, ids that are not their numbers."""
    path = tmp_path_factory.mktemp("data") / "tiny.parquet"
    generate(SyntheticConfig(num_users=60, num_items=64, mean_length=8.0, seed=5)).events.to_parquet(path)
    return path


@pytest.fixture(scope="session")
def dataset(events) -> Dataset:
    return Dataset.load(events, time="timestamp")


@pytest.fixture(scope="session")
def folder(dataset, tmp_path_factory):
    """The data set's atomic file under a data_path."""
    made = tmp_path_factory.mktemp("atomic")
    save_atomic(dataset, made, "tiny")
    return made


@pytest.fixture
def settings(folder, at_home):
    """What every RecBole config of these tests says: run on the CPU, where the batches lie that they hand over."""
    return {
        "gpu_id": "",
        "data_path": str(folder), "epochs": 1, "train_batch_size": 64, "show_progress": False, "state": "ERROR",
        "metric_decimal_place": 8, "metrics": ["Hit", "NDCG", "MRR"], "valid_metric": "NDCG@10", "seed": 3,
        "checkpoint_dir": str(at_home / "saved"), **SMALL,
    }  # fmt: skip


@pytest.fixture
def prepared(settings):
    """Config and the three loaders of a model, from changes to the settings."""

    def prepare(name="SASRecBFT", dataset="tiny", **changes):
        from recbole.config import Config
        from recbole.data import create_dataset, data_preparation
        from recbole.utils import init_seed

        config = Config(model=name, dataset=dataset, config_dict={**settings, **changes})
        init_seed(config["seed"], config["reproducibility"])
        return config, data_preparation(config, create_dataset(config))

    return prepare


@pytest.fixture
def built(prepared):
    """Config, loaders and an untrained model."""

    def build(name="SASRecBFT", **changes):
        from recbole.utils import get_model

        config, parts = prepared(name, **changes)
        return config, parts, get_model(name)(config, parts[0]._dataset)

    return build


def rows_of(loader):
    return next(iter(loader))[0]


def trainer_of(config, model):
    from recbole.utils import get_trainer

    trainer = get_trainer(config["MODEL_TYPE"], config["model"])(config, model)
    trainer.tensorboard.close()
    return trainer


def warned(caplog, module):
    return [record.getMessage() for record in caplog.records if record.name == f"recbft.recbole.{module}"]
