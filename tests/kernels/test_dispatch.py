"""Which path is taken, and what is said of those that are not."""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext
from pathlib import Path as File
from subprocess import CalledProcessError
from types import SimpleNamespace

import pytest
import torch

from recbft.kernels import dispatch
from recbft.kernels.dispatch import LEAST_TRITON, Path, choose

RELEASE = dispatch.release


@pytest.fixture(autouse=True)
def a_triton_that_serves(monkeypatch):
    monkeypatch.setattr(dispatch, "release", lambda package: LEAST_TRITON)
    monkeypatch.setattr(dispatch, "_triton_is_installed", lambda: True)
    dispatch._log_once.cache_clear()


@pytest.fixture
def on_gpu(monkeypatch, caplog):
    """What is called for a tensor on a GPU of some capability, by the path asked for."""

    def called(impl="auto", capability=(8, 6)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        paths = {"triton": Path(lambda: lambda: "fast", "cuda"), "reference": Path(lambda: lambda: "plain")}
        with caplog.at_level(logging.INFO, logger="recbft"):
            return choose(impl, paths, SimpleNamespace(device=torch.device("cuda:0")))()

    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    return called


def paths():
    return {
        "triton": Path(lambda: "fast", "cuda"),
        "cpu": Path(lambda: "cpu", "cpu", lambda q, *, width: "needs an even width" if width % 2 else None),
        "reference": Path(lambda: "plain"),
    }


def test_auto_takes_the_first_path_that_is_made_for_the_tensor_and_does_not_decline(caplog):
    q = torch.zeros(1)
    with caplog.at_level(logging.INFO, logger="recbft"):
        assert choose("auto", paths(), q, width=2) == "cpu"
        assert caplog.messages == []
        for _ in range(3):
            assert choose("auto", paths(), q, width=3) == "plain"
        assert choose("auto", paths(), q.to("meta"), width=2) == "plain"
    assert caplog.messages == ["cpu path declined: needs an even width"]


def test_a_path_asked_for_must_serve(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
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


@pytest.mark.parametrize(
    "release, reason", [("3.2.0", "got 3.2"), ("3.3.0", None), ("3.10.0+git1", None), (None, None)]
)
def test_kernels_are_not_made_by_a_triton_that_ends_the_process(release, reason, monkeypatch):
    def version(name):
        if release is None:  # PyTorch's own builds have been called otherwise
            raise dispatch.metadata.PackageNotFoundError(name)
        return release

    monkeypatch.setattr(dispatch.metadata, "version", version)
    monkeypatch.setattr(dispatch, "release", RELEASE)
    RELEASE.cache_clear()
    try:
        whole = None if reason is None else f"needs Triton 3.3 or later, which comes with PyTorch 2.7, {reason}"
        assert dispatch.missing("triton") == whole and dispatch.missing("cpu") is None
    finally:
        RELEASE.cache_clear()


def test_the_interpreter_stands_for_a_gpu_where_triton_is_asked_for(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
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
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    second = torch.device("cuda:1")
    launching = {"triton": Path(lambda: lambda *given, **named: (given, named, list(current)), "cuda")}
    for impl in ("auto", "triton"):
        function = choose(impl, launching, SimpleNamespace(device=second))
        assert function(1, more=2) == ((1,), {"more": 2}, [second])
    assert current == []


@pytest.mark.parametrize(
    "capability, hip, reason",
    [
        ((8, 6), None, None),
        ((12, 0), None, None),
        ((7, 5), None, "needs a GPU of compute capability 8.0 or later, got 7.5"),
        ((9, 4), "7.0", "needs an NVIDIA GPU: on AMD's, Triton has no products of TF32 in three parts"),
    ],
)
def test_a_gpu_that_triton_does_not_serve_takes_another_path(capability, hip, reason, monkeypatch, caplog, on_gpu):
    monkeypatch.setattr(torch.version, "hip", hip)
    assert on_gpu(capability=capability) == ("fast" if reason is None else "plain")
    assert caplog.messages == ([] if reason is None else [f"triton path declined: {reason}"])
    if reason is not None:
        with pytest.raises(ValueError, match=f"triton path declined: {reason}"):
            on_gpu("triton", capability)


@pytest.mark.skipif(dispatch.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    "error, told",
    [
        (RuntimeError("Failed to find C compiler. Set CC."), "Failed to find C compiler. Set CC."),
        (CalledProcessError(1, ["gcc", "main.c"]), "the compiler failed"),
        (FileNotFoundError(2, "No such file", "gcc -mno-avx512f"), ".*gcc -mno-avx512f.*"),
        (AssertionError("libcuda.so cannot found!\nRun ldconfig."), "libcuda.so cannot found!"),
        (None, None),
    ],
)
def test_where_triton_can_launch_nothing_another_path_is_taken(error, told, monkeypatch, caplog, on_gpu):
    asked = []

    def target():
        asked.append(1)
        if error is not None:
            raise error

    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=target))
    monkeypatch.setattr(dispatch.import_module("triton.runtime"), "driver", driver)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    dispatch._launch_hindrance.cache_clear()
    try:
        assert [on_gpu() for _ in range(2)] == ["fast" if error is None else "plain"] * 2
        assert len(asked) == 1
        if error is not None:
            reason = rf"triton path declined: Triton cannot build what launches kernels here \({told}\); install gcc"
            assert len(caplog.messages) == 1
            with pytest.raises(ValueError, match=reason):
                on_gpu("triton")
    finally:
        dispatch._launch_hindrance.cache_clear()


def test_where_a_folder_has_a_torch_py_its_init_does_not_call_pytorch_by_that_name():
    # The name would become that of the file as soon as it is imported.
    for file in File(dispatch.__file__).parent.glob("*/torch.py"):
        assert "\nimport torch\n" not in file.with_name("__init__.py").read_text(encoding="utf-8"), file
