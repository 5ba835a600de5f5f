"""Which path is taken, and what is said of those that are not."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from recbft.kernels import dispatch
from recbft.kernels.dispatch import Path, choose


def paths():
    return {
        "triton": Path(lambda: "fast", "cuda"),
        "cpu": Path(lambda: "cpu", "cpu", lambda q, *, width: "needs an even width" if width % 2 else None),
        "reference": Path(lambda: "plain"),
    }


def test_auto_takes_the_first_path_that_is_made_for_the_tensor_and_does_not_decline(caplog):
    q = torch.zeros(1)
    dispatch._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="recbft"):
        assert choose("auto", paths(), q, width=2) == "cpu"
        assert caplog.messages == []
        for _ in range(3):
            assert choose("auto", paths(), q, width=3) == "plain"
        assert choose("auto", paths(), q.to("meta"), width=2) == "plain"
    assert caplog.messages == ["cpu path declined: needs an even width"]


def test_a_path_asked_for_must_serve(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(dispatch, "_triton_is_installed", lambda: True)
    q = torch.zeros(1)
    assert choose("reference", paths(), q, width=3) == "plain"
    for impl, tensor, message in (
        ("gpu", q, "unknown impl 'gpu'; choose one of auto, cpu, reference, triton"),
        ("cpu", q, "cpu path declined: needs an even width"),
        ("cpu", q.to("meta"), "cpu path declined: needs CPU tensors, got meta"),
        ("triton", q, "triton path declined: needs tensors on a CUDA GPU, got cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            choose(impl, paths(), tensor, width=3)
    monkeypatch.setattr(dispatch, "_triton_is_installed", lambda: False)
    with pytest.raises(ValueError, match="Triton is not installed; pip install triton"):
        choose("triton", paths(), q, width=3)


def test_the_interpreter_stands_for_a_gpu_where_triton_is_asked_for(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(dispatch, "_triton_is_installed", lambda: True)
    assert choose("triton", paths(), torch.zeros(1), width=2) == "fast"
    assert choose("auto", paths(), torch.zeros(1), width=2) == "cpu"


def test_a_kernel_is_launched_on_the_gpu_of_the_tensor(monkeypatch):
    current = []

    @contextmanager
    def device(found):
        current.append(found)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(dispatch, "_triton_is_installed", lambda: True)
    second = torch.device("cuda:1")
    launching = {"triton": Path(lambda: lambda *given, **named: (given, named, list(current)), "cuda")}
    for impl in ("auto", "triton"):
        function = choose(impl, launching, SimpleNamespace(device=second))
        assert function(1, more=2) == ((1,), {"more": 2}, [second])
    assert current == []
