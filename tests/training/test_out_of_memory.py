"""What is said when memory runs out. The allocators are asked for more than any machine has, so they do refuse."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from recbft.datasets.planted import synthetic_dataset
from recbft.datasets.synth import SyntheticConfig
from recbft.errors import RunError
from recbft.evaluation import ranks
from recbft.models.backbone import Backbone
from recbft.system.torchrun import Process
from recbft.training import one_run
from recbft.training.out_of_memory import memory_explained
from recbft.training.process_team import Team, departure_explained
from recbft.training.run_config import load_run_config

TOO_MUCH = 1 << 50


@pytest.fixture(scope="module")
def dataset():
    return synthetic_dataset(SyntheticConfig(num_users=20, num_items=60, mean_length=7, seed=1))


def config(**settings):
    small = {"hidden_size": 8, "max_length": 8, "batch_size": 16, "epochs": 1, "device": "cpu"}
    return load_run_config(**{"model": "sasrec", **small, **settings})


def refused(tmp_path, config, dataset, message):
    with pytest.raises(RunError, match=f"^{re.escape(message)}$"):
        one_run.train(config, tmp_path / "run", dataset=dataset)


def test_a_model_that_does_not_fit_names_its_width(tmp_path, dataset):
    refused(
        tmp_path,
        config(hidden_size=1 << 40, n_heads=1),
        dataset,
        "out of memory while the model was built: a tensor of 4.0 TiB that models.precision_channel.__init__ makes "
        "does not fit; lower backbone.hidden_size (1099511627776)",
    )


@pytest.mark.parametrize(
    ("model", "settings", "named"),
    [
        ("sasrec", {"inner_size": 1 << 40}, "backbone.inner_size"),
        ("hstu", {"max_length": 1 << 40}, "backbone.max_length"),
        ("sasrec", {"mixer": "rfa", "latent_width": 1 << 40}, "mixing.latent_width"),
        ("sasrec", {"hidden_size": 1 << 62}, "backbone.hidden_size"),
    ],
)
def test_of_what_a_model_is_shaped_by_the_largest_is_named(tmp_path, dataset, model, settings, named):
    value = max(number for number in settings.values() if isinstance(number, int))
    with pytest.raises(RunError, match=rf"while the model was built: .* lower {named} \({value}\)$"):
        one_run.train(config(model=model, **settings), tmp_path / "run", dataset=dataset)


def test_negatives_that_do_not_fit_are_named(tmp_path, dataset):
    with pytest.raises(RunError, match=r"in a training step: .* lower backbone\.num_negatives \(1099511627776\), "):
        one_run.train(config(loss="bce", num_negatives=1 << 40), tmp_path / "run", dataset=dataset)


def test_a_training_step_that_does_not_fit_names_batch_and_length(tmp_path, dataset, monkeypatch):
    monkeypatch.setattr(Backbone, "loss", lambda self, batch: torch.empty(TOO_MUCH, dtype=torch.uint8))
    where = "out of memory in a training step: a tensor of 1.0 PiB that training.loop.begin makes does not fit"
    refused(tmp_path, config(), dataset, f"{where}; lower training.batch_size (16) or backbone.max_length (8)")
    by_targets = config(batch_targets=64)
    with pytest.raises(RunError, match=r"lower training.batch_targets \(64\) or"):
        one_run.train(by_targets, tmp_path / "other", dataset=dataset)


def test_a_ranking_that_does_not_fit_names_its_bound(tmp_path, dataset, monkeypatch):
    monkeypatch.setattr(ranks, "score_block", lambda *_: np.empty(TOO_MUCH, dtype=np.uint8))
    refused(
        tmp_path,
        config(),
        dataset,
        "out of memory while users were ranked: a tensor of 1.0 PiB that evaluation.ranks.full_ranks makes does not "
        "fit; lower evaluation.memory_mb (256)",
    )


def test_histories_that_do_not_fit_name_their_length(tmp_path, dataset, monkeypatch):
    encode = Backbone.encode

    def too_large(self, batch, **how):
        return encode(self, batch, **how) if self.training else torch.empty(TOO_MUCH)

    monkeypatch.setattr(Backbone, "encode", too_large)
    with pytest.raises(RunError, match=r"while histories were read for ranking: .* lower backbone.max_length \(8\)$"):
        one_run.train(config(), tmp_path / "run", dataset=dataset)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 139.80 GiB in all."),
            "a tensor of 2.0 GiB does not fit",
        ),
        (MemoryError(), "a tensor does not fit"),
        (RuntimeError("CUDA error: out of memory"), "a tensor does not fit"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "a tensor does not fit"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "a tensor does not fit"),
    ],
)
def test_the_words_of_a_gpu_are_understood_and_silence_is_not_made_up(error, message, dataset):
    with pytest.raises(RunError) as caught, memory_explained(config(), dataset):
        raise error
    assert str(caught.value) == (
        f"out of memory in a training step: {message}; lower training.batch_size (16) or backbone.max_length (8)"
    )


def test_a_shortage_that_nccl_tells_is_not_a_lost_process(dataset):
    told = (
        "NCCL error: ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
    )
    with (
        pytest.raises(RunError, match=r"^out of memory in a training step: a tensor does not fit"),
        memory_explained(config(), dataset),
        departure_explained(Team(Process.of(2))),
    ):
        raise torch.distributed.DistBackendError(told)


@pytest.mark.parametrize("rows", [0, 1, 2])  # without padding, with it, and with a mask
def test_what_has_the_size_of_the_item_table_is_called_so(rows, dataset):
    size = (dataset.num_items + rows) * 8 * 4
    error = RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {size} bytes.")
    with pytest.raises(RunError) as caught, memory_explained(config(), dataset):
        raise error
    assert str(caught.value) == (
        f"out of memory: a tensor as large as the item table ({dataset.num_items} x 8) of {size / 1024:.1f} KiB does "
        "not fit; lower backbone.hidden_size (8)"
    )


@pytest.mark.parametrize(
    ("asked", "is_table"),
    [("238.42 MiB", True), ("240.00 MiB", True), ("0.23 GiB", True), ("238.40 MiB", False), ("242.00 MiB", False)],
)
def test_a_gpu_s_rounded_size_of_the_item_table_is_known_too(asked, is_table, dataset):
    """A table of 250,000,000 bytes, 238.42 MiB, with padding."""
    error = torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has 79.00 GiB in all.")
    large = replace(dataset, item_ids=np.arange(976_562))
    with pytest.raises(RunError) as caught, memory_explained(config(hidden_size=64), large):
        raise error
    assert ("a tensor as large as the item table (976,562 x 64)" in str(caught.value)) == is_table


def test_other_errors_pass(dataset):
    with pytest.raises(RuntimeError, match="shapes differ") as caught, memory_explained(config(), dataset):
        raise RuntimeError("shapes differ")
    assert not isinstance(caught.value, RunError)
