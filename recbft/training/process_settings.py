"""What a run needs of its process: device, threads, determinism, rounding and random state, put back afterwards."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from logging import getLogger
from threading import RLock, local
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from recbft.errors import OneProcessError, UserError
from recbft.system.memory import is_shortage
from recbft.system.torch_state import one_thread_if_forked, set_aside
from recbft.system.torchrun import Process, this_process
from recbft.training.run_config import RunConfig, TrainingConfig

_turns = [RLock()]  # of this process's runs, in a list so that a forked process can have its own
_thread = local()
_DRAWS = {
    *("uniform_", "normal_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_"),
    *("xavier_normal_", "orthogonal_", "random_", "bernoulli_", "exponential_", "rand", "randn", "randint", "randperm"),
}  # of PyTorch's functions, those that draw and can be given a generator


@contextlib.contextmanager
def run_settings(config: TrainingConfig) -> Iterator[torch.device]:
    """Device, threads, determinism and random state of a run; all put back afterwards.

    They belong to the process, so a run in another thread waits until this one is through. What the caller works
    within, such as ``torch.no_grad()``, is set aside.
    """
    device = chosen_device(config.device, this_process())
    with _turn(), _current(device), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        try:
            if config.threads is not None:
                torch.set_num_threads(config.threads)
            one_thread_if_forked()
            if config.deterministic:
                if device.type == "cuda":
                    # PyTorch 2.6 refuses products without it, and looks once: at the first product.
                    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                torch.use_deterministic_algorithms(True)
                # Nothing here reads memory before it is written.
                torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            with set_aside(), torch.inference_mode(False), torch.enable_grad():
                yield device
        finally:
            torch.set_num_threads(threads)
            # PyTorch imports its compiler for it, which Ctrl-C may just have broken off: not where nothing has changed.
            if (
                torch.are_deterministic_algorithms_enabled() != deterministic
                or torch.is_deterministic_algorithms_warn_only_enabled() != warn_only
            ):
                torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
            torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def work_for_run(gpu: int | None) -> None:
    """Mark this thread as one of the run whose turn it is: what its listeners train does not wait for a turn.

    Args:
        gpu: what is to be its current GPU, which every thread has for itself and which else is the first.
    """
    _thread.works = True
    if gpu is not None:
        torch.cuda.set_device(gpu)


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    if getattr(_thread, "works", False):
        yield
        return
    turn = _turns[0]
    if not turn.acquire(blocking=False):
        getLogger("recbft").info("another run trains in this process; this one waits for it: they share random numbers")
        turn.acquire()
    try:
        yield
    finally:
        turn.release()


if hasattr(os, "register_at_fork"):  # who held the turn is not there after a fork
    os.register_at_fork(after_in_child=lambda: _turns.__setitem__(0, RLock()))


def chosen_device(name: str, here: Process | None = None) -> torch.device:
    """The device of a process by the name that ``training.device`` has; several of a run have a GPU each.

    Args:
        here: the process; one that works alone unless given.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device, there = torch.device(name), torch.cuda.device_count()
    if device.type == "cpu":
        return device
    here = Process() if here is None else here
    if here.size > 1 and device.index is not None:
        raise UserError(f"device is {name!r}, but {here.size} processes train this run, each on a GPU; give cuda")
    if here.local_size > there > 0:
        raise UserError(
            f"{here.local_size} processes began on this machine, but PyTorch sees {there} CUDA devices; begin as many "
            "processes as there are GPUs, or set training.device to cpu"
        )
    if (device.index or 0) >= there:
        raise UserError(f"device is {name!r}, but PyTorch sees {there} CUDA devices; use cpu or auto")
    return device if here.size == 1 else torch.device("cuda", here.local_rank)


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A GPU chosen by number is the current one: pinned memory and the like would open the first one beside it."""
    return contextlib.nullcontext() if device.index is None else torch.cuda.device(device)


@contextlib.contextmanager
def memory_explained(config: RunConfig) -> Iterator[None]:
    """Turn an allocator's refusal into one line with the settings that say most about the memory of a run."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        batch = "batch_size" if config.training.batch_targets is None else "batch_targets"
        named = [f"training.{batch} ({getattr(config.training, batch)})"]
        for key in ("max_length", "hidden_size", "num_negatives"):
            if getattr(config.backbone, key, None) is not None:
                named.append(f"backbone.{key} ({getattr(config.backbone, key)})")
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OneProcessError(
            f"out of memory ({said}); lower {', '.join(named)} or, where it was ranking users, "
            f"evaluation.memory_mb ({config.evaluation.memory_mb:g})"
        ) from error


def autocast(name: str | None, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """What ``training.autocast`` names, around the forward pass of a step; None leaves it in float32.

    Products with learned weights are in bfloat16, all else and every weight in float32. bfloat16 has float32's range,
    so gradients need no scaling. Validation and evaluation stay in float32.
    """
    return contextlib.nullcontext() if name is None else torch.autocast(device.type, dtype=torch.bfloat16)


def seed_everything(seed: int, device: torch.device) -> None:
    """Begin the random numbers of a run on a device anew: those of ``rng_state``.

    ``torch.manual_seed`` would begin those of all GPUs anew, which belong to the caller.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)  # of the current one, which is the run's


def rng_state(generator: torch.Generator, device: torch.device) -> dict[str, Any]:
    """The random state of a run: of what dropout is drawn from and, where it trains on one, of its GPU.

    A generator on the GPU stands for the GPU's own.
    """
    if generator.device.type == "cuda":
        return {"cpu": torch.get_rng_state(), "cuda": generator.get_state()}
    state: dict[str, Any] = {"cpu": generator.get_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(generator: torch.Generator, state: dict[str, Any], device: torch.device) -> None:
    """Take up what ``rng_state`` gave."""
    if generator.device.type == "cuda":
        if "cuda" in state:  # else the run was on a CPU so far, and goes on with the generator as it is
            generator.set_state(state["cuda"])
        return
    generator.set_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


class OwnRandomNumbers(TorchFunctionMode):
    """Modules made in here, on this thread, start from random numbers of their own.

    PyTorch's default generator belongs to the caller and to what other threads are training: to put its state back
    afterwards, as ``fork_rng`` does, would make them draw again what they have drawn.

    Args:
        parameters: whether parameters are drawn; False leaves in them whatever the memory held, for weights of a file.
    """

    def __init__(self, *, parameters: bool = True) -> None:
        super().__init__()
        self.parameters, self.generator = parameters, torch.Generator()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(function, "__name__", "") in _DRAWS:
            drawn = args[0] if args else kwargs.get("tensor")  # by this name of ``nn.init``
            if not self.parameters and isinstance(drawn, nn.Parameter):
                return drawn
            if kwargs.get("generator") is None:
                kwargs["generator"] = self.generator
        return function(*args, **kwargs)
