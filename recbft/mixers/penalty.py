"""What a module adds to the training loss beside its output: left by a pass in training, taken once by the loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class PenaltySlot:
    """Holds one scalar from a module's last pass in training until the loss takes it.

    Copies and pickles of a slot are empty: the scalar belongs to one pass and its gradient.
    """

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def leave(self, value: Tensor) -> None:
        """Put a scalar here, in place of one that nobody took."""
        self.value = value

    def take(self) -> Tensor | None:
        """The scalar, once."""
        value, self.value = self.value, None
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return PenaltySlot, ()


def take_penalties(model: nn.Module) -> Tensor | None:
    """The sum of what the modules of a model have left in their slots, or None where there is nothing."""
    slots = [slot for module in model.modules() if isinstance(slot := getattr(module, "penalty", None), PenaltySlot)]
    left = [value for value in (slot.take() for slot in slots) if value is not None]
    return sum(left[1:], left[0]) if left else None
