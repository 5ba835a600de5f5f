"""One layer's figures, summed over batches: per item over all tokens, and per user at the last token.

Shapes: B rows, T tokens, D model width, H heads, G as in ``trace``, S histories, V items.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from recbft.datasets.batches import Batch
from recbft.evaluation.association import NO_ASSOCIATION, spearman
from recbft.evaluation.strata import Strata
from recbft.evaluation.trace import LayerTrace, at_cap

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class LayerSums:
    """One layer's sums per item, and per user what attention does at the last token."""

    def __init__(self, size: int) -> None:
        self.size = size  # items 0..V and the mask V + 1
        self.sums: dict[str, FloatArray] = {}
        self.at_cap: dict[str, list[int]] = {}  # coordinates at the cap, and all of them
        self.share: list[FloatArray] = []
        self.gain: list[FloatArray] = []
        self.keys: list[IntArray] = []
        self.constants: dict[str, Any] = {}

    def add(self, layer: LayerTrace, batch: Batch) -> None:
        """Add a batch."""
        B, T = batch.items.shape
        real = batch.segment >= 0
        items = batch.items[real].numpy()
        size, used = layer.effective_sample_size, layer.jacobian_used
        quantities = {  # (B, T, D), or heads last
            "gain": layer.gain,
            "incoming_precision": layer.incoming,
            "observation_precision": layer.observation,
            "effective_sample_size": None if size is None else size.mT,
            "jacobian": layer.jacobian,
            "jacobian_used": None if used is None else used.expand(B, T, -1),
            "outgoing_precision": layer.outgoing,
        }
        for name, values in quantities.items():
            if values is not None:
                means = values.cpu()[real].double().mean(dim=-1).numpy()
                own = self.sums.setdefault(name, np.zeros(self.size))
                own += np.bincount(items, weights=means, minlength=self.size)
        self._add_saturated(layer, batch, real)
        self._add_last_token(layer, batch)
        self.constants = _constants(layer)

    def _add_saturated(self, layer: LayerTrace, batch: Batch, real: Tensor) -> None:
        if layer.block.precision is None:
            return
        cap = layer.block.precision.core.lam_max
        found = {name: getattr(layer, name) for name in ("incoming", "observation", "outgoing")}
        parts = {name: values.cpu()[real] for name, values in found.items() if values is not None}
        if layer.outgoing is not None:
            parts["last_token"] = layer.outgoing.flatten(0, 1).cpu()[batch.last]
        for name, values in parts.items():
            counted = self.at_cap.setdefault(name, [0, 0])
            counted[0] += int(at_cap(values, cap).sum())
            counted[1] += values.numel()

    def _add_last_token(self, layer: LayerTrace, batch: Batch) -> None:
        """Share of attention on the first token and gain, head by head, at each history's last token: (S, H)."""
        if layer.shares is None:
            return
        T = batch.segment.shape[1]
        row, column = batch.last // T, batch.last % T
        before = batch.position.flatten()[batch.last]  # tokens of its history before it; they lie side by side
        share = layer.shares.cpu()[row, :, column, column - before].double()  # (S, G)
        H = layer.num_heads
        self.share.append(share.view(len(row), H, -1).mean(dim=-1).numpy())
        self.keys.append((before + 1).numpy())
        if layer.gain is not None:
            gain = layer.gain.flatten(0, 1).cpu()[batch.last].double()  # (S, D)
            if layer.mixes_heads:  # an output map mixes the heads: no coordinate is one head's own
                gain = gain.mean(dim=-1, keepdim=True).expand(-1, H)
            self.gain.append(gain.reshape(len(row), H, -1).mean(dim=-1).numpy())

    def report(
        self, bins: Strata, tokens: IntArray, counts: IntArray, reliability: FloatArray | None
    ) -> dict[str, Any]:
        """The entry of ``layers``."""
        saturated = {name: at / of for name, (at, of) in self.at_cap.items()}
        return {
            "quantities": {
                name: _by_frequency(sums, bins, tokens, counts, reliability) for name, sums in self.sums.items()
            },
            **self.constants,
            "saturated": saturated or None,
            "first_position": self._first_position(),
        }

    def _first_position(self) -> list[dict[str, Any]] | None:
        if not self.share:
            return None
        share, keys = np.concatenate(self.share), np.concatenate(self.keys)
        gain = np.concatenate(self.gain) if self.gain else None
        asked = keys >= 2  # a token alone gives itself everything
        rows = []
        for head in range(share.shape[1]):
            own = None if gain is None else gain[asked, head]
            one = NO_ASSOCIATION if own is None else spearman(share[asked, head], own)
            fixed = NO_ASSOCIATION if own is None else spearman(share[asked, head], own, given=keys[asked])
            rows.append(
                {
                    "head": head + 1,
                    "share": mean(share[asked, head]),
                    "uniform": mean(1 / keys[asked]),
                    "gain": None if own is None else mean(own),
                    "rho": one.rho,
                    "p": one.p,
                    "rho_given_keys": fixed.rho,
                    "p_given_keys": fixed.p,
                    "num_users": int(asked.sum()),
                }
            )
        return rows


def _constants(layer: LayerTrace) -> dict[str, Any]:
    """What does not depend on the token."""
    noise = layer.noise
    return {
        "jacobian_mode": None if layer.block.precision is None else layer.block.precision.mode,
        "process_noise": None if noise is None else {"mean": float(noise.mean()), "max": float(noise.max())},
        "recency_decay": layer.recency_decay,
    }


def _by_frequency(
    sums: FloatArray, bins: Strata, tokens: IntArray, counts: IntArray, reliability: FloatArray | None
) -> dict[str, Any]:
    """The entry of ``quantities``."""
    own, of = sums[1:-1], tokens[1:-1]
    size = len(bins.names)
    by_bin = ratio(
        np.bincount(bins.member, weights=own, minlength=size), np.bincount(bins.member, weights=of, minlength=size)
    )
    if tokens[-1]:
        by_bin = np.append(by_bin, sums[-1] / tokens[-1])
    of_item = ratio(own, of)
    found = spearman(counts, of_item)
    planted = NO_ASSOCIATION if reliability is None else spearman(reliability, of_item)
    return {
        "mean": float(sums.sum() / tokens.sum()),
        "bins": plain(by_bin),
        "rho": found.rho,
        "p": found.p,
        "num_items": found.n,
        "rho_reliability": planted.rho,
        "p_reliability": planted.p,
    }


def ratio(total: NDArray[Any], number: NDArray[Any]) -> FloatArray:
    """NaN where there is nothing to average over."""
    found: FloatArray = np.divide(total, number, out=np.full(len(total), np.nan), where=number > 0)
    return found


def plain(values: FloatArray) -> list[float | None]:
    """For JSON, which has no NaN."""
    return [None if np.isnan(value) else float(value) for value in values]


def mean(values: NDArray[Any]) -> float | None:
    """None where there is nothing to average over."""
    return float(values.mean()) if values.size else None
