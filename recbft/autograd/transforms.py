"""torch.func's grad and vmap through gradients written by hand.

A Function whose forward keeps buffers for its backward is closed to them. ``applied`` opens it: under a transform its
forward runs for the values and, where gradients are asked for, again beside its backward, so that nothing but inputs
and outputs passes through the transform; what vmap has stacked is taken one after another, each by the fast path.
(Folded into rows instead, stacked seeds were no faster on a CPU.) Forward mode and gradients of gradients stay with the
references, which are plain operations; outside transforms a gradient that asks for one of its own is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp, ...) is at work on what runs now."""
    active: bool = torch._C._are_functorch_transforms_active()
    return active


def outside_transforms() -> AbstractContextManager[Any]:
    """What is computed in here is no part of a transform: for what batches are described by, which has no gradient."""
    disabled: AbstractContextManager[Any] = torch._C._DisableFuncTorch() if transformed() else nullcontext()
    return disabled


def untransformed(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, ``outside_transforms``: what it returns may be kept, since no transform has wrapped it."""

    @wraps(function)
    def outside(*arguments: P.args, **named: P.kwargs) -> R:
        with outside_transforms():
            return function(*arguments, **named)

    return outside


def behind_transforms(x: Tensor) -> Tensor:
    """All that vmap has stacked, as numbers: for what is decided for the whole stack, ``outside_transforms``."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def decline_dropout(dropout: float) -> str | None:
    """Why a path that draws for itself cannot serve a call, or None where it can."""
    if dropout > 0 and transformed():
        return "what is drawn under a transform of torch.func is drawn by PyTorch"
    return None


def beyond_first_gradients() -> bool:
    """Whether what runs now is under more than ``applied`` serves, vmap and one gradient."""
    if not transformed():
        return False
    levels = [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]
    kinds = torch._C._functorch.TransformType
    return levels.count(kinds.Grad) > 1 or any(level not in (kinds.Grad, kinds.Vmap) for level in levels)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward without a gradient of its own, refused where one may be asked for.

    PyTorch's decorator of this name refuses later, and not always: where what comes in has no gradient, as at a loss,
    and in ``autograd.grad``, the second derivative of a model would silently lack a part.
    """

    @wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradients written by hand have no gradient of their own; leave out create_graph, or take torch.func "
                "(hessian, jvp of grad), which references serve"
            )
        return backward(ctx, *gradients)

    return once


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply``, under transforms too; its forward draws nothing at random."""
    if not transformed():
        return function.apply(*arguments)
    at = tuple(i for i, argument in enumerate(arguments) if isinstance(argument, Tensor))
    constants = tuple(None if i in at else argument for i, argument in enumerate(arguments))
    call = _Call(function, at, constants, wanted=(False,) * len(at))
    return _Opened.apply(call, *(arguments[i] for i in at))


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of a Function but for its tensors."""

    function: type[torch.autograd.Function]
    at: tuple[int, ...]  # where tensors stand among the arguments
    constants: tuple[Any, ...]  # the other arguments, None where tensors stand
    wanted: tuple[bool, ...]  # which of the tensors need a gradient

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Any, _Kept]:
        """Its outputs, and what its backward needs."""
        arguments, needs = list(self.constants), [False] * len(self.constants)
        for position, tensor, wanted in zip(self.at, tensors, self.wanted, strict=True):
            arguments[position], needs[position] = tensor, wanted
        kept = _Kept(tuple(needs))
        return self.function.forward(kept, *arguments), kept

    def backward(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The gradients of the tensors that need one."""
        _, kept = self.forward(tensors)
        found = self.function.backward(kept, *gradients)
        pairs = zip(self.at, tensors, self.wanted, strict=True)
        return tuple(torch.zeros_like(x) if found[i] is None else found[i] for i, x, wanted in pairs if wanted)


class _Kept:
    """Stands for the context of a Function that is called by hand."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """A gradient is always a tensor here."""

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        """A backward leaves out the gradient of such an output by itself."""


class _Opened(torch.autograd.Function):
    """The values of a call."""

    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> Any:
        return call.forward(tensors)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        wanted = ctx.needs_input_grad[1:]
        call = replace(ctx.call, wanted=wanted)
        found = iter(_OpenedBackward.apply(call, *ctx.saved_tensors, *gradients))
        return None, *(next(found) if wants else None for wants in wanted)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _Call, *tensors: Tensor) -> Any:
        return _one_by_one(_Opened, info.batch_size, in_dims[1:], call, tensors)


class _OpenedBackward(torch.autograd.Function):
    """The gradients of a call, from its tensors and the gradients of its outputs."""

    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = len(call.at)
        return call.backward(tensors[:inputs], [g.contiguous() for g in tensors[inputs:]])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError("gradients written by hand have no gradient of their own; ask for impl='reference'")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _Call, *tensors: Tensor) -> Any:
        return _one_by_one(_OpenedBackward, info.batch_size, in_dims[1:], call, tensors)


def _one_by_one(
    function: type[torch.autograd.Function],
    size: int,
    dims: Sequence[int | None],
    call: _Call,
    tensors: Sequence[Tensor],
) -> Any:
    """What vmap asks of a Function: the outputs of each, stacked, and where; ``dims`` is what it has stacked along."""

    def of(i: int) -> tuple[Tensor, ...]:
        return tuple(x if dim is None else x.select(dim, i) for x, dim in zip(tensors, dims, strict=True))

    if size == 0:  # one that is not there has the shapes
        pairs = zip(tensors, dims, strict=True)
        tensors = [
            x if dim is None else x.new_zeros([1 if n == dim else m for n, m in enumerate(x.shape)]) for x, dim in pairs
        ]
    each = [function.apply(call, *of(i)) for i in range(max(size, 1))]
    if isinstance(each[0], Tensor):
        return torch.stack(each)[:size], 0
    return tuple(torch.stack(outputs)[:size] for outputs in zip(*each, strict=True)), (0,) * len(each[0])
