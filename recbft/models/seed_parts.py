"""The parts of a model that keep parameters of several seeds: what ``Stacked`` puts in the place of the plain ones.

The rows of a seed lie together, so a tensor of all tokens, (R, T, ..), is cut into those of each seed, (S, N, ..), by a
view. Every part computes what the plain one would for each seed alone.

Shapes: S seeds, B rows of each, R = S B rows, T tokens, N = B T, D model width, F feed-forward width, V items.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbft.core import SequenceContext, decay_precision, discount_precision, process_noise, remember
from recbft.datasets.side_by_side import SideBySide
from recbft.kernels.dropout import mask_of, random_bits
from recbft.kernels.filter_step import predict_precision
from recbft.kernels.gelu import gelu_with_slope, slope_product
from recbft.kernels.layer_norm import layer_norms
from recbft.kernels.product import linear
from recbft.mixers.value_unit import ValueUnit, mean_of_each, unit_of
from recbft.models.precision_channel import LAM_MIN, SAMPLED_ROWS, LayerPrecision
from recbft.models.precision_read_out import MOMENTUM, PrecisionReadOut, above, read


class SeedRows:
    """Which rows are whose in the batch at hand, and where each seed's random bits come from."""

    now: SideBySide  # on the CPU, where its numbers can be read without waiting for a device
    origin: Tensor  # (S, N) of ``now``, where the parameters are
    place: Tensor | None  # of ``now``, there too; None on the CPU, where launches cost nothing

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = list(generators)
        self._samples = False  # whether some part asks for them
        self._sample: tuple[Tensor, Tensor] | None = None

    def begin(self, side: SideBySide, device: torch.device) -> None:
        """Take up the next batch."""
        self.now, self.origin = side, side.origin.to(device)
        self.place = None if device.type == "cpu" else side.place.to(device)
        self._sample = self._sampled() if self._samples else None

    def apart(self, x: Tensor) -> Tensor:
        """(R, T, ..) -> (S, N, ..)."""
        return x.reshape(len(self.generators), -1, *x.shape[2:])

    def repeat(self, each: Tensor) -> Tensor:
        """What every seed has, (S, ..), for each of its rows, (R, ..)."""
        return each.repeat_interleave(self.now.num_rows, dim=0)

    def random_bits(self, width: int) -> Tensor:
        """(S, N, width): each seed draws for its own batch, and a token here gets what it gets there."""
        device = self.origin.device
        drawn = (
            random_bits((size, width), generator).to(device)
            for size, generator in zip(self.now.sizes, self.generators, strict=True)
        )
        if self.place is not None:
            return torch.cat(list(drawn)).index_select(0, self.place.flatten()).view(*self.place.shape, width)
        bits = torch.empty(*self.origin.shape, width, dtype=torch.int16)
        for own, words, out in zip(self.origin, drawn, bits, strict=True):
            torch.index_select(words, 0, own, out=out)
        return bits

    def sampled(self) -> tuple[Tensor, Tensor]:
        """Every fourth row of each seed's own batch: indices of tokens, (S, n), and which count; the rest fill up.

        Asked for once, they are on the device from the beginning of every batch: to copy them there waits for it.
        """
        if self._sample is None:
            self._samples, self._sample = True, self._sampled()
        return self._sample

    def _sampled(self) -> tuple[Tensor, Tensor]:
        now = self.now
        widths = torch.tensor(now.widths)[:, None]
        valid = now.batch.segment.view(now.num_seeds, -1) >= 0
        chosen = (now.origin // widths % SAMPLED_ROWS == 0) & valid  # (S, N)
        index = chosen.to(torch.uint8).argsort(dim=1, descending=True)[:, : int(chosen.sum(dim=1).amax())]
        first = torch.arange(len(chosen))[:, None] * chosen.shape[1]
        return (index + first).to(self.origin.device), chosen.gather(1, index).to(self.origin.device)


class SeedLinear(nn.Module):
    """A linear map per seed."""

    def __init__(self, seeds: SeedRows, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.seeds, self.weight, self.bias = seeds, weight, bias  # (S, O, I), (S, O)

    def forward(self, x: Tensor) -> Tensor:
        """(R, T, I) -> (R, T, O)."""
        y = linear(self.seeds.apart(x), self.weight, self.bias)
        return y.view(*x.shape[:-1], self.weight.shape[1])


class SeedNorm(nn.Module):
    """A layer norm per seed."""

    def __init__(self, seeds: SeedRows, weight: nn.Parameter, bias: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.seeds, self.weight, self.bias, self.eps = seeds, weight, bias, eps  # (S, D), (S, D)

    def forward(self, x: Tensor) -> Tensor:
        """(R, T, D)."""
        return layer_norms(self.seeds.apart(x), self.weight, self.bias, eps=self.eps).view_as(x)


class SeedEmbedding(nn.Module):
    """A table per seed."""

    def __init__(self, seeds: SeedRows, weight: nn.Parameter) -> None:
        super().__init__()
        self.seeds, self.weight = seeds, weight  # (S, V, D)

    def forward(self, index: Tensor) -> Tensor:
        """(R, T) -> (R, T, D)."""
        S, V, _ = self.weight.shape
        first = torch.arange(0, S * V, V, device=index.device)
        return F.embedding(index + self.seeds.repeat(first)[:, None], self.weight.flatten(0, 1))


class SeedDropout(nn.Module):
    """Dropout of each seed's tokens by its own generator."""

    def __init__(self, seeds: SeedRows, p: float) -> None:
        super().__init__()
        self.seeds, self.p = seeds, p

    def forward(self, x: Tensor) -> Tensor:
        """(R, T, D)."""
        if not self.training or self.p <= 0:
            return x
        return x * mask_of(self.seeds.random_bits(x.shape[-1]), self.p, x.dtype).view_as(x)


class SeedPrecision(nn.Module):
    """``LayerPrecision`` of several seeds, ``each``, whose running means become views of the ones here.

    ``plain``, a copy of one of them, knows the settings and whether it is in training; ``parameters`` are the stacked
    ones by their names in ``LayerPrecision``.
    """

    def __init__(
        self,
        seeds: SeedRows,
        plain: LayerPrecision,
        each: Sequence[LayerPrecision],
        parameters: dict[str, nn.Parameter],
    ) -> None:
        super().__init__()
        self.seeds, self.plain, self.each = seeds, plain, list(each)
        self.learned = parameters
        self.mean_precision, self.mean_jacobian, self.updates = (
            _of_all(each, name) for name in ("mean_precision", "mean_jacobian", "updates")
        )  # (S,), (S, D), (S,)
        self.factors: tuple[Tensor, Tensor] | None = None

    def refresh(self) -> None:
        """Take the factors that each seed's own layer keeps."""
        found = [one.factors for one in self.each if one.factors is not None]
        if found:
            left, right = (torch.stack(parts) for parts in zip(*found, strict=True))
            self.factors = (left, right)  # (S, D, r), (S, F, r)

    def prior(self, precision: Tensor, context: SequenceContext) -> Tensor:
        """As ``LayerPrecision``."""
        if "log_kappa" not in self.learned:
            return precision
        scale = self.learned["log_kappa"].exp() * self.plain.first_precision / self.mean_precision.clone()
        if self.training:
            mean = _mean(self.seeds.apart(precision.detach()), self.seeds.apart(context.valid))
            self._remember(self.mean_precision, mean.mean(dim=-1))
        return (self._per_row(scale) * precision).clamp(LAM_MIN, self.plain.core.lam_max)

    def activate(self, a: Tensor, w1: Tensor, w2: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor]:
        """As ``LayerPrecision``; w1 (S, F, D), w2 (S, D, F)."""
        if self.plain.mode == "off":
            return F.gelu(a), a.new_zeros(())
        left, right = self._factors(w1, w2)
        if self.plain.mode == "running_mean":
            mean = self._per_row(self.mean_jacobian.clone())
            if self.training:
                self._remember(self.mean_jacobian, self._sampled_jacobian(a, left, right))
            return F.gelu(a), mean
        if self.plain.core.jacobian_detach:
            hidden, reduced = F.gelu(a), slope_product(a, right)
        else:
            hidden, reduced = gelu_with_slope(a, right)
        each = _jacobian(self.seeds.apart(reduced), left)
        if self.training:
            self._remember(self.mean_jacobian, _mean(each.detach(), self.seeds.apart(context.valid)))
        return hidden, each.view(*a.shape[:-1], -1)

    def predict(self, precision: Tensor, jacobian: Tensor) -> Tensor:
        """As ``LayerPrecision``."""
        if self.training:
            self.updates += 1
        core, learned = self.plain.core, self.learned
        if core.propagation == "discount":
            discount = self._per_row(torch.sigmoid(learned["discount_logit"]))
            return discount_precision(precision, discount, cap=core.lam_max).clamp(min=LAM_MIN)
        if core.propagation == "decay":
            rate = self._per_row(learned["decay_rate"])
            return decay_precision(precision, rate, cap=core.lam_max).clamp(min=LAM_MIN)
        noise = precision.new_zeros(())
        if "noise_logits" in learned:
            noise = self._per_row(process_noise(learned["noise_logits"], core.q_max))
        return predict_precision(precision, jacobian, noise, low=LAM_MIN, cap=core.lam_max)

    def _factors(self, w1: Tensor, w2: Tensor) -> tuple[Tensor | None, Tensor]:
        core = self.plain.core
        if self.plain.mode == "exact" or (self.plain.mode == "running_mean" and core.jacobian == "exact"):
            return None, (w2.mT * w1).detach()
        assert self.factors is not None, "refresh comes before the first batch"
        return self.factors

    def _sampled_jacobian(self, a: Tensor, left: Tensor | None, right: Tensor) -> Tensor:
        """The mean Jacobian over the rows that are sampled, (S, D)."""
        index, chosen = self.seeds.sampled()
        sample = a.detach().view(-1, a.shape[-1]).index_select(0, index.flatten())
        reduced = slope_product(sample, right).view(*index.shape, -1)
        return _mean(_jacobian(reduced, left), chosen)

    def _remember(self, mean: Tensor, value: Tensor) -> None:
        """As ``LayerPrecision``; seeds that train together have taken as many steps."""
        remember(mean, value, self.updates[0])

    def _per_row(self, each: Tensor) -> Tensor:
        """(S,) -> (R, 1, 1), (S, D) -> (R, 1, D)."""
        rows = self.seeds.repeat(each)
        return rows.view(rows.shape[0], 1, -1)


class SeedUnit(nn.Module):
    """``ValueUnit`` of several seeds, ``each``, whose running means become views of the ones here."""

    def __init__(self, seeds: SeedRows, each: Sequence[ValueUnit]) -> None:
        super().__init__()
        self.seeds = seeds
        self.variance, self.updates = (_of_all(each, name) for name in ("variance", "updates"))  # (S,)

    def forward(self, v: Tensor) -> Tensor:
        """As ``ValueUnit``, for every row: (R, 1, 1, 1)."""
        return self.seeds.repeat(unit_of(self.variance))[:, None, None, None].to(v.dtype)

    @property
    def learns(self) -> bool:
        """As ``ValueUnit``."""
        return self.training

    def learn(self, spread: Tensor, unit: Tensor, context: SequenceContext) -> None:
        """As ``ValueUnit``, of every seed."""
        if self.learns:
            each = self.seeds.apart(mean_of_each(spread, unit))[..., None]  # (S, N, 1)
            value = _mean(each, self.seeds.apart(context.valid))[:, 0]
            remember(self.variance, value.to(self.variance.dtype), self.updates[0])
            self.updates += 1


class SeedReadOut(nn.Module):
    """``PrecisionReadOut`` of several seeds, ``each``, whose running means become views of the ones here."""

    def __init__(self, seeds: SeedRows, each: Sequence[PrecisionReadOut], strength: nn.Parameter) -> None:
        super().__init__()
        self.seeds, self.kind, self.strength = seeds, each[0].kind, strength  # (S,)
        self.mean_log_precision, self.updates = (
            _of_all(each, name) for name in ("mean_log_precision", "updates")
        )  # (S, D), (S,)

    def forward(self, state: Tensor, precision: Tensor, valid: Tensor, ramp: float) -> Tensor:
        """As ``PrecisionReadOut``."""
        z, level = above(precision, self.seeds.repeat(self.mean_log_precision)[:, None]), None
        if self.training:
            mean = _mean(self.seeds.apart(z), self.seeds.apart(valid))  # (S, D)
            level = self.seeds.repeat(mean)[:, None]
            remember(self.mean_log_precision, self.mean_log_precision + mean.detach(), self.updates[0], MOMENTUM)
            self.updates += 1
        strength = self.seeds.repeat(self.strength)[:, None, None]
        return read(state, z, level, strength, kind=self.kind, ramp=ramp)


def _of_all(each: Sequence[nn.Module], name: str) -> Tensor:
    """A buffer of several modules as one, of which theirs become views."""
    made = torch.stack([getattr(one, name) for one in each])
    for seed, one in enumerate(each):
        setattr(one, name, made[seed])
    return made


def _mean(values: Tensor, keep: Tensor) -> Tensor:  # (S, N, D), (S, N) -> (S, D)
    share = keep.to(values.dtype)
    return (share[:, None] @ values)[:, 0] / share.sum(dim=1, keepdim=True).clamp_(min=1)


def _jacobian(reduced: Tensor, left: Tensor | None) -> Tensor:
    """(S, N, r) -> (S, N, D)."""
    return reduced if left is None else reduced @ left.mT
