"""Random numbers for modules that are made beside others' work."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_DRAWS = {
    *("uniform_", "normal_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_"),
    *("xavier_normal_", "orthogonal_", "random_", "bernoulli_", "exponential_", "rand", "randn", "randint", "randperm"),
}  # of PyTorch's functions, those that draw and can be given a generator


class OwnDraws(TorchFunctionMode):
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
