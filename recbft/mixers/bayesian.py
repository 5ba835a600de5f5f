"""The Bayesian layer as a mixer: an associative memory that knows what it has resolved.

    M, P       the belief about a memory of every head after each token: ``filter_memory``, with p0 = 1          (1)
    noise      ell2_t and r2_t = softplus(W x_t + b), in units of the prior variance s; the r2_t of a write is
               divided by the mean incoming precision lbar_t^w                                                   (2)
    innovation = M_t' q_t of all heads, or W_out of them                                                         (3)
    lobs       = min(1 / (s_h (q_t' P_t q_t + r2_t)), lam_max) on the coordinates of head h                      (4)

Only the ratio of noise to prior moves the mean, so s, learned per head, is the scale of (4) alone. With G groups of
observation noise the values of a head are cut into G groups, each with a noise and so a covariance of its own.

Source: Dowling et al., Memory by Design, section 2 and appendix D; (4) is the variance of its readout, and weighing a
write by its precision the part that kriging leaves to the noise: both new here.
Shapes: B rows, T tokens, D model width, H heads, K = D / H, G groups of noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from recbft.autograd.eager import eagerly
from recbft.autograd.transforms import transformed
from recbft.config.fields import check_range
from recbft.core import SequenceContext
from recbft.errors import UserError
from recbft.kernels import memory
from recbft.kernels.memory import MemoryEvent, MemoryState, MemoryTrace, check_positive
from recbft.kernels.memory.reference import prior, step
from recbft.mixers.heads import joined
from recbft.mixers.interface import Observation, projected
from recbft.mixers.memory_maps import (
    LEAST_TRANSITION,
    OBSERVATION_FLOOR,
    PROCESS_FLOOR,
    KeysAndValues,
    Noise,
    Transition,
    beside,
    fitted_tokens,
    fitted_transition,
    history_starts,
)

__all__ = ["BayesianConfig", "BayesianMixer", "MemoryEvent", "MemoryState", "MemoryTrace", "filter_memory", "step"]


@eagerly
def filter_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    transition: Tensor | None,
    process_noise: Tensor,
    observation_noise: Tensor,
    prior_variance: float | Tensor,
    first: Tensor | None = None,
    impl: str = "auto",
    chunk: int | None = None,
) -> MemoryTrace:
    """Filter a memory M (K x M) of which every token sees v = M' k with noise, and read M' q after each.

    Equations and their meaning: ``kernels.memory.reference``. Linear in T.

    Args:
        q, k: queries and keys, (B, H, T, K).
        v: values, (B, H, T, M).
        transition: what is kept of each row at each token, broadcastable to (B, H, T, K), in (0, 1]; complex
            (B, H, T, K / 2) damps and turns pairs of rows; None keeps everything.
        process_noise: variance added to every row before each token (with pairs, to the first row of each),
            broadcastable to (B, H, T), >= 0.
        observation_noise: variance of a value about what its key reads, broadcastable to (B, H, T), > 0.
        prior_variance: p0, a number or (H,) or (B, H), > 0.
        first: (B, T) bool, True where a history begins and the memory with it; None for the first column alone.
        impl: ``auto`` takes the fastest path that serves the call; ``reference`` (the loop), ``chunked`` and ``triton``
            force one.
        chunk: the longest chunk of the chunked path; unless given, one that suits most sizes.

    Returns:
        Readouts, their variance and the gains of all tokens, and the belief after the last column, in float32 at least.

    Raises:
        ValueError: shapes that do not fit, values out of range, an unknown ``impl`` or one that cannot serve the call.
    """
    q, k, v = fitted_tokens(q, k, v)
    B, H, T, _ = k.shape
    process_noise, observation_noise = (x.to(v.dtype).expand(B, H, T) for x in (process_noise, observation_noise))
    _check_variance("process_noise", process_noise, or_zero=True)
    _check_variance("observation_noise", observation_noise)
    _check_variance("prior_variance", prior_variance)
    prior_variance = beside(v, prior_variance).expand(B, H)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; give the length of a chunk, 1 or more")
    transition = fitted_transition(transition, k)
    return memory.filter_memory(
        q,
        k,
        v,
        transition=transition,
        process_noise=process_noise,
        observation_noise=observation_noise,
        prior_variance=prior_variance,
        first=first,
        chunk=chunk,
        impl=impl,
    )


def _check_variance(name: str, x: float | Tensor, *, or_zero: bool = False) -> None:
    if isinstance(x, Tensor) and (transformed() or x.numel() == 0):
        return
    least = x.detach().min().item() if isinstance(x, Tensor) else x
    if least < 0 or (least == 0 and not or_zero):
        raise ValueError(f"{name} has {least:.3g}; give a variance {'>=' if or_zero else '>'} 0")


@dataclass(frozen=True, kw_only=True)
class BayesianConfig:
    """How the memory moves and is seen (the ``mixing`` section of a config).

    Args:
        transition: what a head keeps of its memory at each token: all (``identity``), one learned share (``scalar``),
            one per row (``diagonal``), or one and an angle per pair of rows (``complex_pairs``, an even head width).
        retention: the share kept where it is learned, at the start.
        noise_groups: G, observation noises per head; divides the head width.
        process_noise, observation_noise: ell2 and r2 at the start, in units of the prior variance.
        prior_variance: s at the start; None means 1 / K, as of the REML estimator.
        key_precision: weigh a write by its incoming precision, (2).
        chunk_size: the longest chunk that the filter is evaluated in; None leaves it to the kernel.
    """

    transition: Literal["identity", "scalar", "diagonal", "complex_pairs"] = "diagonal"
    retention: float = 0.98
    noise_groups: int = 1
    process_noise: float = 0.01
    observation_noise: float = 0.1
    prior_variance: float | None = None
    key_precision: Literal["on", "off"] = "on"
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        check_range("retention", self.retention, above=LEAST_TRANSITION, below=1)
        check_range("noise_groups", self.noise_groups, at_least=1)
        check_range("process_noise", self.process_noise, above=0)
        check_range("observation_noise", self.observation_noise, above=0)
        check_range("prior_variance", self.prior_variance, above=0)
        check_range("chunk_size", self.chunk_size, at_least=1)
        if self.transition == "identity" and self.retention != BayesianConfig.retention:
            raise UserError("retention has no effect with transition 'identity', which keeps everything; leave it out")


class BayesianMixer(nn.Module):
    """Equations (1) to (4) over a packed batch; the memory begins anew with every history.

    Args:
        hidden_size: D.
        n_heads: H, divides D.
        config: how the memory moves and is seen.
        output_projection: W_out of (3).
        gives_precision: whether to report lobs of (4).
        cap: lam_max.

    Raises:
        UserError: a head width that noise groups or pairs of rows do not divide.
    """

    def __init__(
        self,
        hidden_size: int,
        n_heads: int,
        config: BayesianConfig = BayesianConfig(),
        *,
        output_projection: bool = False,
        gives_precision: bool = True,
        cap: float = 100.0,
    ) -> None:
        super().__init__()
        K, G = hidden_size // n_heads, config.noise_groups
        if K % G:
            raise UserError(
                f"noise_groups is {G}, which does not divide the head width {K} (hidden size {hidden_size} / {n_heads} "
                f"heads); give a divisor of {K}"
            )
        self.n_heads, self.config, self.gives_precision, self.cap = n_heads, config, gives_precision, cap
        self.maps = KeysAndValues(hidden_size, n_heads, pairs=config.transition == "complex_pairs")
        self.transition = Transition(hidden_size, n_heads, config.transition, start=config.retention)
        self.process = Noise(hidden_size, n_heads, start=config.process_noise, floor=PROCESS_FLOOR)
        self.observation = Noise(hidden_size, n_heads * G, start=config.observation_noise, floor=OBSERVATION_FLOOR)
        self.out = nn.Linear(hidden_size, hidden_size) if output_projection else None
        self.log_scale: nn.Parameter | None = None
        if gives_precision:
            start = 1 / K if config.prior_variance is None else config.prior_variance
            self.log_scale = nn.Parameter(torch.full((n_heads,), start).log())

    def forward(
        self,
        x: Tensor,
        precision: Tensor | None,
        context: SequenceContext,
        *,
        ramp: float = 1.0,
        source: Tensor | None = None,
    ) -> Observation:
        """Observe every position.

        Args:
            x: normalised input, (B, T, D).
            precision: incoming precision, (B, T, D), or None for equal trust in every write.
            context: where histories begin; causal, the tokens of a history side by side in order of position.
            ramp: w of (2), in [0, 1].
            source: what keys and values are read from, (B, T, D); ``x`` unless given.

        Raises:
            UserError: the context is not causal.
        """
        first = history_starts(context, "bayesian")
        event = self._events(x, precision, ramp, x if source is None else source)
        trace = filter_memory(
            event.query,
            event.key,
            event.value,
            transition=event.transition,
            process_noise=event.process_noise,
            observation_noise=event.observation_noise,
            prior_variance=1.0,
            first=first,
            chunk=self.config.chunk_size,
        )
        real = context.valid[..., None]
        return self._observation(trace.readout, trace.readout_variance, x).each(lambda part: part * real)

    def initial_state(self, num_histories: int) -> MemoryState:
        """The memories of histories without a token yet, for ``step``."""
        weight = self.maps.value.weight
        H, G = self.n_heads, self.config.noise_groups
        K = weight.shape[0] // H
        empty = weight.new_zeros(num_histories, H * G, K, dtype=torch.promote_types(weight.dtype, torch.float32))
        return prior(empty, empty[..., : K // G], empty.new_ones(()))

    def step(
        self,
        state: MemoryState,
        x: Tensor,
        precision: Tensor | None = None,
        *,
        ramp: float = 1.0,
        source: Tensor | None = None,
    ) -> tuple[MemoryState, Observation]:
        """Observe one more token of each history, (B, D), from the belief that the tokens before it left: O(K^2)."""
        x, source = x[:, None], x[:, None] if source is None else source[:, None]
        event = self._events(x, None if precision is None else precision[:, None], ramp, source)
        dtype = state.mean.dtype
        q, k, v, ell2, r2 = (
            part[:, :, 0].to(dtype)
            for part in (event.query, event.key, event.value, event.process_noise, event.observation_noise)
        )
        a = fitted_transition(event.transition, event.key.to(dtype))
        event = MemoryEvent(q, k, v, None if a is None else a[:, :, 0], ell2, r2)
        state, reading = step(state, event)
        check_positive(reading.readout_variance, reading.gain, event.observation_noise)
        seen = self._observation(reading.readout[:, :, None], reading.readout_variance[:, :, None], x)
        return state, seen.each(lambda part: part[:, 0])

    def _events(self, x: Tensor, precision: Tensor | None, ramp: float, source: Tensor) -> MemoryEvent:
        """What every token writes and reads, each group of noise a head of its own: (B, H G, T, ...)."""
        q, k, v = self.maps(x, source)
        trust = precision if self.config.key_precision == "on" else None
        r2 = self.observation(source, trust, ramp)
        ell2, a = self.process(source), self.transition(source)
        G = self.config.noise_groups
        if G > 1:
            q, k, ell2 = (y.repeat_interleave(G, dim=1) for y in (q, k, ell2))
            a = None if a is None else a.repeat_interleave(G, dim=1)
            v = v.unflatten(-1, (G, -1)).movedim(-2, 2).flatten(1, 2)  # (B, H, T, K) -> (B, H G, T, K / G)
        return MemoryEvent(q, k, v, a, ell2, r2)

    def _observation(self, readout: Tensor, variance: Tensor, x: Tensor) -> Observation:
        """(3) and (4) from what the groups read, (B, H G, T, K / G) and (B, H G, T)."""
        innovation = joined(readout).to(x.dtype)
        found = None
        if self.log_scale is not None:
            scale = self.log_scale.exp().repeat_interleave(self.config.noise_groups)[:, None]
            spread = scale * (variance.clamp(min=0) + self.observation(x))  # (B, H G, T)
            found = spread.clamp(min=1 / self.cap).reciprocal().mT.repeat_interleave(readout.shape[-1], dim=-1)
            found = found.to(x.dtype)
        return projected(Observation(innovation, found), self.out, cap=self.cap)
