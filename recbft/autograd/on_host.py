"""Tensors of a device on the CPU: a device is waited for at every copy, so small ones come as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_SMALL = 2**20  # bytes; copying a larger one takes longer than waiting for it


def on_host(tensors: Mapping[str, Tensor], *, apart: bool) -> dict[str, Tensor]:
    """The same tensors on the CPU, contiguous.

    Args:
        tensors: by name, dense ones, on the CPU and one other device.
        apart: copies, which nothing else writes to; otherwise those that lie there already are not copied.
    """
    there = {name: tensor.detach() for name, tensor in tensors.items()}
    small = [name for name, own in there.items() if own.device.type != "cpu" and own.nbytes <= _SMALL]
    copied = dict(zip(small, joined_copies([there[name] for name in small]), strict=True))
    return {name: copied[name] if name in copied else _copied(own, apart) for name, own in there.items()}


def _copied(tensor: Tensor, apart: bool) -> Tensor:
    if apart and tensor.device.type == "cpu":
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.cpu().contiguous()


def joined_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the CPU of tensors on one device, which is waited for once."""
    if not tensors:
        return []
    # Wider numbers first, so that each stands at a multiple of its width.
    order = sorted(range(len(tensors)), key=lambda n: -tensors[n].element_size())
    joined = torch.cat([tensors[n].contiguous().view(-1).view(torch.uint8) for n in order]).cpu()
    copies = list(tensors)
    for n, piece in zip(order, joined.split([tensors[n].nbytes for n in order]), strict=True):
        copies[n] = piece.view(tensors[n].dtype).view(tensors[n].shape)
    return copies
