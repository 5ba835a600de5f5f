"""What the precision channel does: every layer's figures by how often the item occurs in training, and the sink.

All figures are the model's own in evaluation mode (``trace``), over every token of the histories that the targets of a
part are ranked from. A token's figure is the mean over its D coordinates, or heads. By frequency: items stand in bins
that hold equal numbers of items as far as ties allow (``strata.item_frequency``); a bin's value is the mean over its
tokens. Correlations are Spearman's over items, each with the mean over its own tokens, so that a frequent item counts
once. At each user's last token, which scores the items, the share of attention on the first token (``trace``, (3)) is
held against the head's gain, over users, once more with the number of keys held fixed, since both change with it.

``mechanism`` returns the part ``mechanism`` of ``probe.json``; None stands wherever a model has no such figure:

    part, num_users, num_tokens, num_items      num_items: distinct items among the tokens
    tracks_precision                            false: only what attention itself says is reported
    cap                                         lam_max, the largest precision there is
    bins            list of {name, counts, num_items, num_tokens}; rarest first, "mask" last where the model reads one
    layers          list of {layer, quantities, jacobian_mode, process_noise: {mean, max}, recency_decay,
                    saturated: {incoming, observation, outgoing, last_token}, by_length, first_position}
      quantities    name -> {mean, bins (in the order of bins), rho, p, num_items, rho_reliability, p_reliability}
                    names: gain, incoming_precision, observation_precision, effective_sample_size, outgoing_precision,
                    jacobian (at the token), jacobian_used (what stood for it); rho with training count,
                    rho_reliability with the planted reliability
      saturated     shares of coordinates at cap; last_token: of the outgoing ones at users' last tokens
      by_length     list of {keys, num_tokens, effective_sample_size, observation_precision, gain, optimal_gain}: means
                    over the tokens that read so many; optimal_gain: r / (lam + r), whatever the update rule does
      first_position  list of {head, share, uniform, gain, rho, p, rho_given_keys, p_given_keys, num_users}; over users
                    with two keys or more; uniform: the mean of 1 / keys, what an even spread would give; rho: of share
                    and gain
    initial_precision  {mean, min, max, num_items, at_floor, at_cap, bins, rho, p, rho_reliability, p_reliability,
                    levels: list of {reliability, num_items, mean}}: tau before the first layer, over the items seen in
                    training; bins are means over items; at_floor, at_cap: shares of the items at either end of the
                    range, where the clamp lets no gradient through
    item_belief     {kappa, bins, weights}: means over items of kappa / (c + kappa), the share that content still has in
                    an item's vector after c training events, and of w(c), by which alike content counts in scores (or
                    None); None where items are known by number alone
    user_reliability  {rho, p, num_users, levels: list of {reliability, num_users, mean}}: posterior precision of users
                    against the planted reliability

Source: Precision Tracked Transformer (arXiv 2605.18832), appendices I and N; sinks: Xiao et al. (arXiv 2309.17453).
Shapes: B rows, T tokens, D model width, H heads, G as in ``trace``, S histories, V items.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recbft.datasets.batches import HISTORIES_PER_BATCH, Batch
from recbft.datasets.dataset import Dataset
from recbft.datasets.planted import PlantedReliability
from recbft.evaluation.association import spearman
from recbft.evaluation.strata import QUANTILES, Strata, item_frequency
from recbft.evaluation.trace import LayerTrace, at_cap, blocks_of, trace
from recbft.evaluation.views import Part, batches_of_view, evaluation_mode, view_of
from recbft.models.contract import SequenceModel
from recbft.models.precision_channel import LAM_MIN

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BY_LENGTH = ("effective_sample_size", "observation_precision", "gain", "optimal_gain")
COPIES = 6  # of a batch's (B, G, T, T) weights that may be alive at once


def mechanism(
    model: SequenceModel,
    dataset: Dataset,
    part: Part = "test",
    *,
    users: IntArray | None = None,
    planted: PlantedReliability | None = None,
    quantiles: int = QUANTILES,
    memory_mb: float = 256.0,
) -> dict[str, Any]:
    """The figures above, ready for JSON.

    Args:
        users: row numbers of the users to read; all unless given.
        planted: the truth behind generated data.
        quantiles: bins of item frequency.
        memory_mb: bound on the attention weights that are written out at a time.
    """
    view = view_of(dataset, part, users, next_events=True)
    layers: list[_LayerSums] = []
    tokens = np.zeros(dataset.num_items + 2, np.int64)
    posterior: list[Tensor] = []
    with torch.inference_mode(), evaluation_mode(model):
        device = model.item_table().weight.device
        for batch in batches_of_view(model, dataset, view, _histories_per_batch(model, memory_mb)):
            states, traces = trace(model, batch.to(device))
            real = batch.segment >= 0
            tokens += np.bincount(batch.items[real].numpy(), minlength=tokens.size)
            layers = layers or [_LayerSums(tokens.size) for _ in traces]
            for layer, found in zip(layers, traces, strict=True):
                layer.add(found, batch)
            posterior += [] if states.precision is None else [states.precision.cpu()]
        counts = np.asarray(dataset.training_counts)[1:]
        bins = item_frequency(counts, counts, quantiles=quantiles, new_apart=False)
        reliability = None if planted is None else planted.items
        return {
            "part": part,
            "num_users": int(view.target.size),
            "num_tokens": int(tokens.sum()),
            "num_items": int((tokens[1:-1] > 0).sum()),
            "tracks_precision": bool(posterior),
            "cap": None if model.core is None else float(model.core.lam_max),
            "bins": _bin_rows(bins, tokens),
            "layers": [
                {"layer": number, **layer.report(bins, tokens, counts, reliability)}
                for number, layer in enumerate(layers, start=1)
            ],
            "initial_precision": _initial(model, counts, bins, reliability),
            "item_belief": _of_content(model, bins),
            "user_reliability": _by_user(posterior, planted, view.user),
        }


class _LayerSums:
    """One layer's sums per item, and per user what attention does at the last token."""

    def __init__(self, size: int) -> None:
        self.size = size  # items 0..V and the mask V + 1
        self.sums: dict[str, FloatArray] = {}
        self.at_cap: dict[str, list[int]] = {}  # coordinates at the cap, and all of them
        self.lengths: dict[str, IntArray | FloatArray] = {}  # sums over tokens that read 1, 2 to 3, 4 to 7 ... others
        self.share: list[FloatArray] = []
        self.gain: list[FloatArray] = []
        self.keys: list[IntArray] = []
        self.constants: dict[str, Any] = {}  # what does not depend on the token

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
        self._add_lengths(layer, real, quantities)
        self._add_last_token(layer, batch)
        noise, precision = layer.noise, layer.block.precision
        self.constants = {
            "jacobian_mode": None if precision is None else precision.mode,
            "process_noise": None if noise is None else {"mean": float(noise.mean()), "max": float(noise.max())},
            "recency_decay": layer.recency_decay,
        }

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

    def _add_lengths(self, layer: LayerTrace, real: Tensor, quantities: Mapping[str, Tensor | None]) -> None:
        if quantities["gain"] is None:
            return
        named = {name: quantities[name] for name in ("effective_sample_size", "observation_precision", "gain")}
        incoming, observed = layer.incoming, layer.observation
        named["optimal_gain"] = None if incoming is None or observed is None else observed / (incoming + observed)
        keys = layer.context.allowed.sum(dim=-1).cpu()[real].numpy()  # (N,)
        octave = np.frexp(keys)[1] - 1  # floor of the binary logarithm
        for name, values in {"num_tokens": real[..., None], **named}.items():
            if values is not None:
                means = values.cpu()[real].double().mean(dim=-1).numpy()
                own = self.lengths.setdefault(name, np.zeros(64))
                own += np.bincount(octave, weights=means, minlength=64)

    def _by_length(self) -> list[dict[str, Any]] | None:
        """The entry of ``by_length``."""
        if not self.lengths:
            return None
        tokens = self.lengths["num_tokens"]
        rows = []
        for octave in np.flatnonzero(tokens):
            low, high = 2**octave, 2 ** (octave + 1) - 1
            row = {name: None if name not in self.lengths else float(self.lengths[name][octave] / tokens[octave])
                   for name in BY_LENGTH}  # fmt: skip
            rows.append(
                {"keys": f"{low}" if low == high else f"{low}-{high}", "num_tokens": int(tokens[octave]), **row}
            )
        return rows

    def _add_last_token(self, layer: LayerTrace, batch: Batch) -> None:
        """Share of attention on the first token and gain, head by head, at each history's last token: (S, H)."""
        if layer.shares is None:
            return
        T = batch.segment.shape[1]
        row, column = batch.last // T, batch.last % T
        before = batch.position.flatten()[batch.last]  # tokens of its history before it; they lie side by side
        share = layer.shares.cpu()[row, :, column, column - before].double()  # (S, G)
        H = layer.block.mixer.n_heads
        self.share.append(share.view(len(row), H, -1).mean(dim=-1).numpy())
        self.keys.append((before + 1).numpy())
        if layer.gain is not None:
            gain = layer.gain.flatten(0, 1).cpu()[batch.last].double()  # (S, D)
            if layer.block.mixer.mixes_heads:  # an output map mixes the heads: no coordinate is one head's own
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
            "by_length": self._by_length(),
            "first_position": self._first_position(),
        }

    def _first_position(self) -> list[dict[str, Any]] | None:
        if not self.share:
            return None
        share, keys = np.concatenate(self.share), np.concatenate(self.keys)
        asked = keys >= 2  # a token alone gives itself everything
        share, keys = share[asked], keys[asked]
        gain = np.concatenate(self.gain)[asked] if self.gain else None
        rows = []
        for head in range(share.shape[1]):
            own = None if gain is None else gain[:, head]
            one, fixed = spearman(share[:, head], own), spearman(share[:, head], own, given=keys)
            rows.append(
                {
                    "head": head + 1,
                    "share": mean(share[:, head]),
                    "uniform": mean(1 / keys),
                    "gain": None if own is None else mean(own),
                    "rho": one.rho,
                    "p": one.p,
                    "rho_given_keys": fixed.rho,
                    "p_given_keys": fixed.p,
                    "num_users": len(keys),
                }
            )
        return rows


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
    found, planted = spearman(counts, of_item), spearman(reliability, of_item)
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


def _bin_rows(bins: Strata, tokens: IntArray) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, (name, counts) in enumerate(zip(bins.names, bins.bounds, strict=True)):
        own = bins.users(number)  # the partition is one of items here
        rows.append(
            {"name": name, "counts": counts, "num_items": int(own.size), "num_tokens": int(tokens[1:-1][own].sum())}
        )
    if tokens[-1]:
        rows.append({"name": "mask", "counts": "0", "num_items": 1, "num_tokens": int(tokens[-1])})
    return rows


def _initial(
    model: SequenceModel, counts: IntArray, bins: Strata, reliability: FloatArray | None
) -> dict[str, Any] | None:
    """The precision of every item before the first layer."""
    item_precision = getattr(model, "item_precision", None)
    if item_precision is None:
        return None
    backbone: Any = model
    weight = model.item_table().weight[:, : backbone.config.hidden_size]  # without the content that is compared
    items = torch.arange(1, len(counts) + 1, device=weight.device)[None]
    tau = item_precision(items, weight[items])[0, :, 0].double().cpu().numpy()
    tau = np.where(counts > 0, tau, np.nan)  # an item never seen in training has learned nothing
    found, planted, seen = spearman(counts, tau), spearman(reliability, tau), ~np.isnan(tau)
    return {
        "mean": mean(tau[seen]),
        "min": float(tau[seen].min()) if seen.any() else None,
        "max": float(tau[seen].max()) if seen.any() else None,
        "num_items": int(seen.sum()),
        "at_floor": mean(tau[seen] <= LAM_MIN * (1 + 1e-6)),
        "at_cap": mean(tau[seen] >= item_precision.lam_max * (1 - 1e-6)),
        "bins": _over_items(tau[seen], bins.member[seen], len(bins.names)),
        "rho": found.rho,
        "p": found.p,
        "rho_reliability": planted.rho,
        "p_reliability": planted.p,
        "levels": None if reliability is None else _levels(reliability[seen], tau[seen], "num_items"),
    }


def _of_content(model: SequenceModel, bins: Strata) -> dict[str, Any] | None:
    """What content is worth in the items' vectors and scores, by how often they occur."""
    belief = getattr(model, "item_belief", None)
    if belief is None or belief.kappa_logit is None:
        return None

    def means(of_items: Tensor) -> list[float | None]:
        return _over_items(of_items.detach().double().cpu().numpy(), bins.member, len(bins.names))

    counts = belief.counts[1:]
    weights = None if belief.base_weight is None else means(belief.weights(counts))
    return {"kappa": belief.kappa.item(), "bins": means(belief.prior_share(counts)), "weights": weights}


def _over_items(values: FloatArray, member: IntArray, size: int) -> list[float | None]:
    """Means over the items of each of so many bins; None of an empty one."""
    in_bin = np.bincount(member, minlength=size)
    return plain(ratio(np.bincount(member, weights=values, minlength=size), in_bin))


def _by_user(posterior: list[Tensor], planted: PlantedReliability | None, users: IntArray) -> dict[str, Any] | None:
    if not posterior or planted is None:
        return None
    reliability = planted.users[users]
    precision = torch.cat(posterior).double().numpy()
    found = spearman(reliability, precision)
    return {
        "rho": found.rho,
        "p": found.p,
        "num_users": found.n,
        "levels": _levels(reliability, precision, "num_users"),
    }


def _levels(reliability: FloatArray, values: FloatArray, count: str) -> list[dict[str, Any]]:
    rows = []
    for level in np.unique(reliability[~np.isnan(reliability)]):
        own = values[reliability == level]
        rows.append({"reliability": float(level), count: int(own.size), "mean": mean(own)})
    return rows


def _histories_per_batch(model: SequenceModel, memory_mb: float) -> int:
    """As many histories as leave their attention weights within the memory."""
    most = 1  # G
    weight = model.item_table().weight
    for block in blocks_of(model):
        most = max(most, weight.shape[1] if block.mixer.by_coordinate else block.mixer.n_heads)
    each = COPIES * weight.element_size() * most * model.max_length**2
    return max(1, min(HISTORIES_PER_BATCH, int(memory_mb * 2**20) // each))
