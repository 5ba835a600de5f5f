"""How near numbers must be, by the type in which they were computed, and the yardstick for fast paths in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

TOLERANCE = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-11},
    torch.float32: {"rtol": 2e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


def values_and_gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor], dtype: torch.dtype, place: str
) -> list[Tensor]:
    """Outputs, and the gradients of a mixture of them, found in a type on a device; in float64."""
    leaves = [x.detach().to(place, dtype, copy=True).requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    mixed = sum((y * torch.arange(1, y.numel() + 1, dtype=dtype, device=place).cos().view_as(y)).sum() for y in outputs)
    return [x.detach().double().cpu() for x in (*outputs, *torch.autograd.grad(mixed, leaves))]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype = torch.float64) -> None:
    """Each of the tensors is near its other, as the type has it."""
    for number, (one, two) in enumerate(zip(found, expected, strict=True)):
        kind = torch.complex128 if two.is_complex() else torch.float64
        torch.testing.assert_close(
            one.to(kind), two.to(kind), **TOLERANCE[dtype], msg=lambda text, number=number: f"output {number}: {text}"
        )


def assert_as_near_as(
    found: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor], *, slack: float, least: float = 0.0
) -> None:
    """No farther from the exact values than twice what the plain path is, but for ``slack`` of the largest.

    Args:
        least: what the largest counts as where it is smaller: the size of numbers that cancel.
    """
    for number, (one, other, true) in enumerate(zip(found, plain, exact, strict=True)):
        error, usual = ((x - true).abs().max().item() if x.numel() else 0.0 for x in (one, other))
        size = max(least, true.abs().max().item() if true.numel() else 0.0)
        assert error <= 2 * usual + slack * size, f"output {number}: {error} off, the plain path {usual}, of {size}"
