"""Frequencies of rotating coordinates, and the decay of the heads that they belong to.

    w_i  = base^(-i / n), i = 0 .. n - 1      n frequencies, falling geometrically from 1                    (1)
    mu_h = b max(w_h)                         decay of a head over the highest frequency of its band         (2)

One range is repeated in every head, or cut into one band per head, the highest first.

Source: RoFormer (arXiv 2104.09864), section 3.2.2; Robust Filter Attention (paper), section 3.4, appendices C.1, D.2.
Shapes: H heads, n frequencies per head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recbft.autograd.full_precision import HALVES
from recbft.errors import UserError
from recbft.mixers.positive import SMALLEST, positive, raw_of

DAMPING = 0.05  # b unless given


def frequency_range(n_heads: int, count: int, base: float, *, in_bands: bool) -> Tensor:
    """(1) for every head, (H, n): one range of n for each, or one of H n cut into bands; in the default dtype."""
    count, repeats = (n_heads * count, 1) if in_bands else (count, n_heads)
    exponent = -torch.arange(count, dtype=torch.float32) / count
    # Rounded to float32 whatever the dtype: frequencies are not saved, and have to be those a run was trained with.
    falling = torch.pow(torch.tensor(base, dtype=torch.float64), exponent).float()
    return falling.to(torch.get_default_dtype()).repeat(repeats).view(n_heads, -1)


def spread_decays(n_heads: int, base: float, damping: float, undamped: int | None) -> Tensor:
    """(2) of the bands, (H,), and 0 in the last heads, a quarter of them unless ``undamped`` says how many.

    Raises:
        UserError: more undamped heads than heads, or a damping that no head is left for.
    """
    undamped = n_heads // 4 if undamped is None else undamped
    if undamped > n_heads:
        raise UserError(
            f"undamped_heads is {undamped}, and there are {n_heads} heads; give a whole number <= {n_heads}"
        )
    if undamped == n_heads and damping != DAMPING:
        raise UserError(f"damping has no effect with {undamped} undamped_heads of {n_heads} heads; leave it out")
    decay = damping * frequency_range(n_heads, 1, base, in_bands=True)[:, 0]
    decay[n_heads - undamped :] = 0.0
    return decay


class Constants(nn.Module):
    """A module whose buffers are no weights: half precision would round them, and turns of long lags with them."""

    def _apply(self, fn: Any, recurse: bool = True) -> Constants:
        before = dict(self._buffers)
        moved: Constants = super()._apply(fn, recurse)
        for name, wide in before.items():
            now = self._buffers[name]
            if wide is not None and now is not None and now.dtype in HALVES:
                self._buffers[name] = wide.to(now.device)
        return moved


class HeadDecay(nn.Module):
    """The decay of each head: as it starts, or learned from there; a decay of 0 stays 0.

    Raises:
        UserError: a learned decay that starts so low that it could not be learned.
    """

    start: Tensor

    def __init__(self, start: Tensor, *, learned: bool) -> None:
        super().__init__()
        self.register_buffer("start", start, persistent=False)
        learned = learned and bool((start > 0).any())
        lowest = float(start[start > 0].min()) if learned else 1.0
        if lowest <= SMALLEST:
            raise UserError(
                f"damping and frequency_base give a head a decay of {lowest:.2g}, and a learned one must start above "
                f"{SMALLEST:g}; raise damping, lower frequency_base, or take more undamped_heads"
            )
        self.raw = nn.Parameter(raw_of(torch.where(start > 0, start, start.amax()))) if learned else None

    def forward(self) -> Tensor:
        """(H,), >= 0."""
        return self.start if self.raw is None else positive(self.raw) * (self.start > 0)
