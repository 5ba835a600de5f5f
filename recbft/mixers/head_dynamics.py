"""Frequencies, decays and noises of heads, and what the heads of robust filter attention learn beside their maps.

    w_i  = base^(-i / n), i = 0 .. n - 1      n frequencies, falling geometrically from 1             (9.5)
    mu_h = b max(w_h)                         decay of a head over the highest frequency of its band  (9.4)
    mu, s2, eta2, gamma2, tau = softplus of free numbers,   nu = K softplus                             (a)
    z_t <- g_t z_t + (1 - g_t) v_t,   g_t = sigmoid(s log p_t - log p0)                              (9.13)
    lobs_t = min(c_h p_t, lam_max)                                                                   (9.14)

One range of frequencies is repeated in every head, or cut into one band per head, the highest first. Noises start in
the integrative regime, eta2 > s2, and nu at 4 K, where the kernel is nearly Gaussian. The gate starts open.

Source: RoFormer (arXiv 2104.09864), section 3.2.2; Robust Filter Attention (paper), section 3.4, appendices C.1, C.4,
D.1, D.2.
Shapes: B rows, H heads, T tokens, n frequencies per head, K complex coordinates per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbft.autograd.boundaries import HALVES
from recbft.config.fields import check_range
from recbft.errors import UserError
from recbft.kernels.robust_filter import Dynamics, Variant
from recbft.mixers.interface import MixerOptions, refuse_idle

OnOff = Literal["on", "off"]

SMALLEST = 1e-6  # of what is learned as a positive number
DAMPING = 0.05  # b unless given
DAY = 86_400.0  # seconds

# Where the noises start: measurement above process noise, the integrative regime; about 1 in sum.
PROCESS_START, KEY_NOISE_START, QUERY_NOISE_START = 0.25, 0.5, 0.25
DIFFUSION_START = 1e-3  # per unit of time, of heads that do not decay
DOF_START = 4.0  # nu / K
GATE_SCALE_START, GATE_PRIOR_START = 0.1, -5.0  # a gate that is open


@dataclass(frozen=True, kw_only=True)
class RobustFilterConfig(MixerOptions):
    """Parts and starting values of robust filter attention (the ``mixing`` section of a config)."""

    only_with_precision = ("key_precision",)

    kernel: Literal["student", "gaussian"] = "student"  # tails of the likelihood; gaussian has none
    precision_prior: Literal["on", "flat"] = "on"  # flat makes V the same at every lag
    multiplicative: OnOff = "on"  # precision weighs the residual; off: it is a prior weight alone
    rotate: OnOff = "on"  # whether the state rotates at all
    rotate_values: OnOff = "on"  # whether values do
    key_precision: OnOff = "on"  # weigh keys by their incoming precision, as softmax attention does
    latent_width: int | None = None  # K; None means the width of a head
    frequency_base: float = 10_000.0  # frequencies run from 1 towards 1 / frequency_base
    damping: float = DAMPING  # b, decay over the highest frequency of a band: fixed in sc_rfa, a start in rfa
    undamped_heads: int | None = None  # heads that do not decay; None means a quarter of them
    time: bool = False  # measure lags in real time, not in positions
    time_unit: float = DAY  # how much of the data's time makes one unit
    learn_time_unit: bool = False  # learn it, starting there
    horizon: float = 0.0  # units of time after the query that the estimate is for; the rotation leaves it out
    confidence_gate: bool = False  # take the token's own value where there is little evidence, (9.13)
    latent_sampling: bool = False  # draw the state from its distribution, in training

    def __post_init__(self) -> None:
        check_range("latent_width", self.latent_width, at_least=2)
        check_range("frequency_base", self.frequency_base, above=1)
        check_range("damping", self.damping, above=0)
        check_range("undamped_heads", self.undamped_heads, at_least=0)
        check_range("time_unit", self.time_unit, above=0)
        check_range("horizon", self.horizon, at_least=0)
        if not self.time:
            why = "without real times; leave it out or set time: true"
            refuse_idle(self, ("time_unit", "learn_time_unit"), why)
        if self.rotate == "off" and self.rotate_values == "off":
            raise UserError("rotate_values has no effect with rotate off; leave it out or set rotate: on")

    @property
    def reads_times(self) -> bool:
        """Whether lags are measured in real time."""
        return self.time

    @property
    def variant(self) -> Variant:
        """The settings that the kernel needs."""
        return Variant(self.kernel, self.multiplicative == "on", self.rotate_values == "on", self.horizon)


def frequency_range(n_heads: int, count: int, base: float, *, in_bands: bool) -> Tensor:
    """(9.5) for every head, (H, n): one range of n for each, or one of H n cut into bands; in the default dtype."""
    count, repeats = (n_heads * count, 1) if in_bands else (count, n_heads)
    exponent = -torch.arange(count, dtype=torch.float32) / count
    # Rounded to float32 whatever the dtype: frequencies are not saved, and have to be those a run was trained with.
    falling = torch.pow(torch.tensor(base, dtype=torch.float64), exponent).float()
    return falling.to(torch.get_default_dtype()).repeat(repeats).view(n_heads, -1)


def spread_decays(n_heads: int, base: float, damping: float, undamped: int | None) -> Tensor:
    """(9.4) of the bands, (H,), and 0 in the last heads, a quarter of them unless ``undamped`` says how many."""
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
    """The decay of each head: as it starts, or learned from there; a decay of 0 stays 0."""

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


def positive(raw: Tensor) -> Tensor:
    """softplus(raw) + 1e-6."""
    return F.softplus(raw) + SMALLEST


def raw_of(value: Tensor) -> Tensor:
    """The numbers whose ``positive`` is ``value``, > 1e-6, in the default dtype."""
    above = value.double() - SMALLEST
    raw = above + torch.log(-torch.expm1(-above))  # log(exp(x) - 1), without its overflow
    return raw.to(torch.get_default_dtype())


class HeadDynamics(Constants):
    """The dynamics that each head learns: an optimiser group of its own (half the rate, beta1 0, clipped to 1e-4)."""

    frequency: Tensor

    def __init__(self, n_heads: int, K: int, config: RobustFilterConfig, *, coupled: bool) -> None:
        super().__init__()
        if K % 2:
            raise UserError(
                f"{K} complex coordinates per head do not make pairs of frequencies; give an even width per head"
            )
        self.width, self.start_time_unit = K, config.time_unit
        base = config.frequency_base
        frequency = frequency_range(n_heads, K // 2, base, in_bands=coupled)
        frequency = torch.stack([frequency, -frequency], dim=-1).flatten(1)  # (H, K): w_1, -w_1, w_2, ...
        self.register_buffer("frequency", frequency if config.rotate == "on" else 0 * frequency, persistent=False)
        start = spread_decays(n_heads, base, config.damping, config.undamped_heads)
        self.decay = HeadDecay(start, learned=not coupled)
        process = torch.where(start > 0, PROCESS_START, DIFFUSION_START)
        self.raw_process = None if config.precision_prior == "flat" else nn.Parameter(raw_of(process))
        ones = torch.ones(n_heads)
        self.raw_key_noise = nn.Parameter(raw_of(KEY_NOISE_START * ones))
        self.raw_query_noise = nn.Parameter(raw_of(QUERY_NOISE_START * ones))
        self.raw_dof = nn.Parameter(raw_of(DOF_START * ones))
        self.raw_temperature = nn.Parameter(raw_of(ones))
        self.log_time_unit = nn.Parameter(torch.tensor(config.time_unit).log()) if config.learn_time_unit else None

    def forward(self) -> Dynamics:
        """The scalars in their ranges."""
        decay, key_noise = self.decay(), positive(self.raw_key_noise)
        # A process that adds up to what fades of the key noise makes the variance the same at every lag.
        process = key_noise * (decay > 0) if self.raw_process is None else positive(self.raw_process)
        return Dynamics(
            frequency=self.frequency,
            decay=decay,
            process=process,
            key_noise=key_noise,
            query_noise=positive(self.raw_query_noise),
            dof=self.width * positive(self.raw_dof),
            temperature=positive(self.raw_temperature),
        )

    def time_unit(self) -> float | Tensor:
        """How much of the data's time makes one unit."""
        if self.log_time_unit is None:
            return self.start_time_unit
        # A day of seconds is more than float16 holds.
        return self.log_time_unit.to(torch.promote_types(self.log_time_unit.dtype, torch.float32)).exp()


class EvidencePrecision(nn.Module):
    """(9.14): evidence times a learned positive scale per head, at most the cap."""

    def __init__(self, n_heads: int, start: float) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.full((n_heads,), start).log())

    def forward(self, evidence: Tensor, cap: float) -> Tensor:
        """(B, H, T) -> (B, H, T), in [0, cap]."""
        return (evidence * self.log_scale.exp()[:, None]).clamp(max=cap)


class ConfidenceGate(nn.Module):
    """(9.13): the estimate where the evidence carries it, the token's own value elsewhere."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.raw_scale = nn.Parameter(raw_of(torch.full((n_heads,), GATE_SCALE_START)))
        self.log_prior = nn.Parameter(torch.full((n_heads,), GATE_PRIOR_START))

    def forward(self, value: Tensor, own: Tensor, evidence: Tensor, valid: Tensor) -> Tensor:
        """Mix value and own, (B, H, T, K), by the evidence (B, H, T); padding, not ``valid``, keeps its value."""
        # Evidence of a token that fits nothing may underflow to 0: the gate is then closed.
        log_evidence = evidence.clamp(min=torch.finfo(evidence.dtype).tiny).log()
        open_ = torch.sigmoid(positive(self.raw_scale)[:, None] * log_evidence - self.log_prior[:, None])
        return value + ((1 - open_) * valid[:, None])[..., None] * (own - value)
