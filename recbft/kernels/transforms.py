"""torch.func's grad and vmap see through plain operations, not through gradients written by hand.

Where one of them is at work, every mechanism is served by its reference: models of several seeds or the gradients of an
ensemble come out right, at the speed of the equations. Seeds that train together fold into the heads of the fast paths
instead (``recbft.training.many_seeds``).
"""

from __future__ import annotations

import torch


def transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp, ...) is at work on what runs now."""
    active: bool = torch._C._are_functorch_transforms_active()
    return active
