"""The Bayesian layer as a mixer: an associative memory that knows what it has resolved.

    M, P       the belief about a memory of every head after each token: ``filter_memory``, with p0 = 1  (9.15, 9.16)
    noise      ell2_t and r2_t = softplus(W x_t + b), in units of the prior variance s; the r2_t of a write is
               divided by the mean incoming precision lbar_t^w                                                 (9.25)
    innovation = M_t' q_t of all heads, or W_out of them                                                       (9.17)
    lobs       = min(1 / (s_h (q_t' P_t q_t + r2_t)), lam_max) on the coordinates of head h                    (9.18)

Only the ratio of noise to prior moves the mean, so s, learned per head, is the scale of (9.18) alone. With G groups of
observation noise the values of a head are cut into G groups, each with a noise and so a covariance of its own.

Source: Dowling et al., Memory by Design, section 2 and appendix D. (9.18) and the weighing of a write by its precision
are new here.
Shapes: B rows, T tokens, D model width, H heads, K = D / H, G groups of noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from recbft.autograd.boundaries import eagerly
from recbft.config.fields import check_range
from recbft.core import SequenceContext
from recbft.errors import UserError
from recbft.kernels import memory
from recbft.kernels.memory.reference import MemoryEvent, MemoryTrace
from recbft.mixers.interface import Mixer, MixerOptions, Observation, joined, projected, refuse_idle
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
    """
    q, k, v = fitted_tokens(q, k, v)
    B, H, T, _ = k.shape
    process_noise, observation_noise = (x.to(v.dtype).expand(B, H, T) for x in (process_noise, observation_noise))
    events = MemoryEvent(q, k, v, fitted_transition(transition, k), process_noise, observation_noise)
    return memory.filter_memory(events, beside(v, prior_variance).expand(B, H), first, chunk=chunk, impl=impl)


@dataclass(frozen=True, kw_only=True)
class BayesianConfig(MixerOptions):
    """How the memory moves and is seen (the ``mixing`` section of a config).

    A head keeps of its memory at each token all (``identity``), one learned share (``scalar``), one per row
    (``diagonal``), or one and an angle per pair of rows (``complex_pairs``, an even head width).
    """

    only_with_precision = ("key_precision", "prior_variance")

    transition: Literal["identity", "scalar", "diagonal", "complex_pairs"] = "diagonal"
    retention: float = 0.98  # the share kept where it is learned, at the start
    noise_groups: int = 1  # G, observation noises per head; divides the head width
    process_noise: float = 0.01  # ell2 at the start, in units of the prior variance
    observation_noise: float = 0.1  # r2 likewise
    prior_variance: float | None = None  # s at the start; None means 1 / K, as of the REML estimator
    key_precision: Literal["on", "off"] = "on"  # weigh a write by its incoming precision, (9.25)
    chunk_size: int | None = None  # the longest chunk that the filter is evaluated in; None leaves it to the kernel

    def __post_init__(self) -> None:
        check_range("retention", self.retention, above=LEAST_TRANSITION, below=1)
        check_range("noise_groups", self.noise_groups, at_least=1)
        check_range("process_noise", self.process_noise, above=0)
        check_range("observation_noise", self.observation_noise, above=0)
        check_range("prior_variance", self.prior_variance, above=0)
        check_range("chunk_size", self.chunk_size, at_least=1)
        if self.transition == "identity":
            refuse_idle(self, ("retention",), "with transition 'identity', which keeps everything; leave it out")


class BayesianMixer(Mixer):
    """Equations (9.15) to (9.18) over a packed batch; the memory begins anew with every history."""

    def __init__(
        self,
        hidden_size: int,
        n_heads: int,
        config: BayesianConfig = BayesianConfig(),
        *,
        output_projection: bool = False,
        gives_precision: bool = True,
        lam_max: float = 100.0,
    ) -> None:
        super().__init__()
        K, G = hidden_size // n_heads, config.noise_groups
        if K % G:
            raise UserError(
                f"noise_groups is {G}, which does not divide the head width {K} (hidden size {hidden_size} / {n_heads} "
                f"heads); give a divisor of {K}"
            )
        self.n_heads, self.config, self.lam_max = n_heads, config, lam_max
        self.gives_precision, self.mixes_heads = gives_precision, output_projection
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
        """Observe every position, as ``Mixer`` says; the tokens of a history stand side by side in their order."""
        first = history_starts(context, "bayesian")
        source, G = x if source is None else source, self.config.noise_groups
        q, k, v = self.maps(x, source)
        r2 = self.observation(source, precision if self.config.key_precision == "on" else None, ramp)
        ell2, a = self.process(source), self.transition(source)
        if G > 1:  # each group of noise is a head of its own, (B, H G, T, ...)
            q, k, ell2 = (y.repeat_interleave(G, dim=1) for y in (q, k, ell2))
            a = None if a is None else a.repeat_interleave(G, dim=1)
            v = v.unflatten(-1, (G, -1)).movedim(-2, 2).flatten(1, 2)  # (B, H, T, K) -> (B, H G, T, K / G)
        noises = {"process_noise": ell2, "observation_noise": r2, "prior_variance": 1.0}
        trace = filter_memory(q, k, v, transition=a, **noises, first=first, chunk=self.config.chunk_size)
        real = context.valid[..., None]
        return self._observation(trace.readout, trace.readout_variance, x).each(lambda part: part * real)

    def _observation(self, readout: Tensor, variance: Tensor, x: Tensor) -> Observation:
        """(9.17) and (9.18) from what the groups read, (B, H G, T, K / G) and (B, H G, T)."""
        innovation = joined(readout).to(x.dtype)
        found = None
        if self.log_scale is not None:
            scale = self.log_scale.exp().repeat_interleave(self.config.noise_groups)[:, None]
            spread = scale * (variance.clamp(min=0) + self.observation(x))  # (B, H G, T)
            found = spread.clamp(min=1 / self.lam_max).reciprocal().mT.repeat_interleave(readout.shape[-1], dim=-1)
            found = found.to(x.dtype)
        return projected(Observation(innovation, found), self.out, cap=self.lam_max)
