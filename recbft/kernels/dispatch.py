"""Which path of a mechanism serves a call, and why another declined: said once per reason.

A mechanism lists its paths fastest first. ``auto`` takes the first that is made for the device of the tensors, is open
to the transform of torch.func that is at work, if any, and does not decline the call; a path asked for by name must
serve it. Nothing here imports Triton: a path is loaded when it is taken. Triton's interpreter (``TRITON_INTERPRET=1``)
runs the kernels on a CPU, for tests, where they are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, wraps
from importlib import import_module, metadata
from importlib.util import find_spec
from logging import getLogger
from subprocess import CalledProcessError
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from recbft.autograd.boundaries import autocast_device, in_full_precision
from recbft.autograd.transforms import beyond_first_gradients, transformed

LEAST_TRITON = (3, 3)  # the compiler of 3.2 ends the process at some kernels, and its interpreter at others
LEAST_CAPABILITY = (8, 0)  # of a GPU that Triton supports: earlier ones lack bfloat16 and TF32
SOME_READ = "some tokens that read among all are left to another path"  # what ``core.Readers`` asks for


def serves_all(*arguments: Any, **named: Any) -> None:
    """Decline nothing."""


@dataclass(frozen=True)
class Path:
    """One way to compute a mechanism.

    Args:
        load: what returns the function; may import.
        device: the kind of tensors it is made for, or None for any.
        decline: why it cannot serve a call, or None where it can; takes what ``choose`` is given.
        opened: torch.func's vmap and grad see through it (``transforms.applied``).
        takes_halves: it takes what autocast hands it, and sums up in float32; others are given float32.
    """

    load: Callable[[], Callable[..., Any]]
    device: str | None = None
    decline: Callable[..., str | None] = serves_all
    opened: bool = False
    takes_halves: bool = False

    def taken(self, tensor: Tensor) -> Callable[..., Any]:
        """The function, as a call with this tensor takes it."""
        function = self.load()
        if not (self.takes_halves or autocast_device() is None):
            function = in_full_precision(function)
        return launched_beside(tensor, function)


def triton_of(package: str) -> ModuleType:
    """A mechanism's Triton module, which nothing imports before it is taken."""
    return import_module(f"recbft.kernels.{package}.triton")


def late(package: str, name: str) -> Callable[[], Callable[..., Any]]:
    """What loads a function of that module."""
    return lambda: getattr(triton_of(package), name)


def late_decline(package: str) -> Callable[..., str | None]:
    """What asks that module, loaded when it is asked, why it cannot serve a call."""
    return lambda tensor, **call: triton_of(package).decline(tensor, **call)


def choose(impl: str, paths: Mapping[str, Path], tensor: Tensor, **call: Any) -> Callable[..., Any]:
    """The path for a call.

    Args:
        impl: ``auto``, or the name of a path that must serve.
        paths: by name, the fastest first and one that serves everything last.
        tensor: one of the call's, whose device and dtype decide.
        call: what else the paths ask about.

    Raises:
        ValueError: an unknown name, or the path cannot serve; the message says why.
    """
    reference = list(paths)[-1]

    def hindrance(name: str, path: Path) -> str | None:
        reason = missing(name) or _wrong_device(name, path, tensor) or _refuses(name, tensor)
        return reason or (None if name == reference else _closed(path)) or path.decline(tensor, **call)

    if impl == "auto":
        for name, path in paths.items():
            if path.device in (None, tensor.device.type):
                reason = hindrance(name, path)
                if reason is None:
                    return path.taken(tensor)
                _log_once(f"{name} path declined: {reason}")
        raise AssertionError("the last path serves everything")
    if impl not in paths:
        raise ValueError(f"unknown impl {impl!r}; choose one of auto, {', '.join(sorted(paths))}")
    reason = hindrance(impl, paths[impl])
    if reason is not None:
        raise ValueError(f"{impl} path declined: {reason}")
    return paths[impl].taken(tensor)


def _closed(path: Path) -> str | None:
    """Why a path cannot serve under the transforms of torch.func that are at work, or None where it can."""
    if not transformed():
        return None
    if not path.opened:
        return "a transform of torch.func is at work, which sees through the reference alone"
    if beyond_first_gradients():
        return "torch.func asks for more than vmap and one gradient, which the reference alone gives"
    return None


def missing(name: str) -> str | None:
    """Why a path cannot be loaded on this machine, or None."""
    if name != "triton":
        return None
    if not _triton_is_installed():
        return "Triton is not installed; pip install triton (Linux), or leave impl out"
    found = release("triton")
    if found < LEAST_TRITON:
        return f"needs Triton {dotted(LEAST_TRITON)} or later, which comes with PyTorch 2.7, got {dotted(found)}"
    return None


def capability(x: Tensor) -> tuple[int, int] | None:
    """The compute capability of the NVIDIA GPU that a tensor lies on, or None elsewhere."""
    if x.device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(x.device)


def on_hopper(x: Tensor) -> bool:
    """Whether a tensor's GPU is one of those of which Triton has large products read operands from shared memory."""
    found = capability(x)
    return found is not None and found[0] == 9


def _refuses(name: str, tensor: Tensor) -> str | None:
    """Why a GPU cannot run what Triton makes of a path, or None."""
    if name != "triton" or tensor.device.type != "cuda":
        return None
    found = capability(tensor)
    if found is None:
        return "needs an NVIDIA GPU: on AMD's, Triton has no products of TF32 in three parts"
    if found < LEAST_CAPABILITY:
        return f"needs a GPU of compute capability {dotted(LEAST_CAPABILITY)} or later, got {dotted(found)}"
    return None if interpreted() else _launch_hindrance()


@lru_cache
def _launch_hindrance() -> str | None:
    """Why Triton cannot launch a kernel on this machine, or None: what it launches by is built in C at first use."""
    try:
        import_module("triton.runtime").driver.active.get_current_target()
    except Exception as error:  # of no compiler, no headers and no libcuda each has a kind of its own
        told = "the compiler failed" if isinstance(error, CalledProcessError) else str(error).partition("\n")[0]
        return (
            f"Triton cannot build what launches kernels here ({told}); install gcc and Python's headers (python3-dev)"
        )
    return None


def dotted(version: tuple[int, int]) -> str:
    """A release, or a compute capability, as it is written."""
    return f"{version[0]}.{version[1]}"


def _wrong_device(name: str, path: Path, tensor: Tensor) -> str | None:
    found = tensor.device.type
    if path.device in (None, found) or (name == "triton" and found == "cpu" and interpreted()):
        return None
    kind = {"cpu": "CPU tensors", "cuda": "tensors on a CUDA GPU"}[str(path.device)]
    return f"needs {kind}, got {found}"


def launched_beside(tensor: Tensor, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on the tensor's GPU: Triton launches on the current one, whichever its arguments lie on."""
    if tensor.device.type != "cuda":
        return function

    @wraps(function)
    def launched(*arguments: Any, **named: Any) -> Any:
        with torch.cuda.device(tensor.device):
            return function(*arguments, **named)

    return launched


def interpreted() -> bool:
    """Whether Triton's interpreter stands for a GPU in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache
def _triton_is_installed() -> bool:
    return find_spec("triton") is not None


@lru_cache
def release(package: str) -> tuple[int, int]:
    """Major and minor of a package; of a Triton that goes by another name, those that are asked for."""
    try:
        major, minor = metadata.version(package).split(".")[:2]
    except metadata.PackageNotFoundError:
        return LEAST_TRITON
    return int(major), int(minor)


@lru_cache
def _log_once(reason: str) -> None:
    getLogger("recbft").info(reason)
