"""What the GPU suite runs: every mechanism that has a Triton path, as leaves and a function of them.

Shapes: B rows, H heads, T tokens, K head width, N positions, V items, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from recbft import core
from recbft.core import Belief, SequenceContext
from recbft.kernels.cross_entropy import full_cross_entropy
from recbft.kernels.filter_step import kalman_update, predict_precision
from recbft.kernels.gelu import gelu_with_slope
from recbft.kernels.layer_norm import layer_norms
from recbft.kernels.robust_filter import Dynamics, Variant, filtered, read_clock
from recbft.kernels.silu_moments import silu_moments
from recbft.kernels.softmax_moments import softmax_mean, softmax_moments, softmax_reml
from recbft.mixers.bayesian import filter_memory

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """One call of a mechanism.

    Args:
        leaves: tensors by name, in float64 on the CPU; their gradients are compared.
        run: outputs from the leaves (in the type and place that is measured), by the path named.
        fixed: leaves that stay in single precision where others are rounded to half.
        half: whether half-precision inputs are served.
        shape: what its maker was given, where it is timed.
    """

    name: str
    leaves: Mapping[str, Tensor]
    run: Callable[[Mapping[str, Tensor], str], Outputs]
    fixed: tuple[str, ...] = ()
    half: bool = True
    shape: str = ""

    def inputs(self, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
        """The leaves rounded to a type."""
        made = {}
        for name, leaf in self.leaves.items():
            kind = torch.promote_types(dtype, torch.float32) if name in self.fixed else dtype
            if leaf.is_complex():
                kind = torch.complex128 if dtype == torch.float64 else torch.complex64
            made[name] = leaf.to(device=device, dtype=kind).requires_grad_()
        return made


def packed(B: int, T: int, *, causal: bool = True, device: str = "cpu") -> SequenceContext:
    """Rows of T tokens that hold histories of many lengths side by side, some padding behind them."""
    generator = torch.Generator().manual_seed(0)
    segment, position = torch.full((B, T), -1), torch.zeros(B, T, dtype=torch.int64)
    for row in range(B):
        first, number = 0, 0
        while first < T and not (number and torch.rand((), generator=generator) < 0.15):
            length = min(int(torch.randint(1, max(2, T // 2), (), generator=generator)), T - first)
            segment[row, first : first + length] = number
            position[row, first : first + length] = torch.arange(length)
            first, number = first + length, number + 1
    return SequenceContext(segment.to(device), position.to(device), causal=causal)


def whole(B: int, T: int, *, device: str = "cpu") -> SequenceContext:
    """Rows of one history each."""
    position = torch.arange(T, device=device).expand(B, T)
    return SequenceContext(torch.zeros_like(position), position)


def _normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _as_taken(term: Tensor, q: Tensor, impl: str) -> Tensor:
    """What is added to logits: the yardstick is the reference in one type, the kernels add in single precision."""
    return term.to(q.dtype) if impl == "reference" else term


def kriging(B: int, H: int, T: int, K: int, *, causal: bool = True, offset: float = 0.0) -> Case:
    """Softmax moments over packed rows with precision and recency decay; values may stand far from 0."""

    def run(x: Mapping[str, Tensor], impl: str) -> Outputs:
        context = packed(B, T, causal=causal, device=str(x["q"].device))
        trust, decay = (_as_taken(x[name], x["q"], impl) for name in ("log_precision", "log_decay"))
        return tuple(softmax_moments(x["q"], x["k"], x["v"], context, log_precision=trust, log_decay=decay, impl=impl))

    leaves = {name: _normal(B, H, T, K, seed=seed) for seed, name in enumerate("qkv")}
    leaves["v"] = leaves["v"] + offset
    leaves["log_precision"] = _normal(B, T, seed=3, scale=0.5)
    leaves["log_decay"] = torch.tensor(-0.03, dtype=torch.float64)
    kind = "causal" if causal else "both ways"
    name = f"kriging moments, {kind}" + (f", values {offset:g} sd from 0" if offset else "")
    return Case(name, leaves, run, fixed=("log_precision", "log_decay"))


def unread(B: int, H: int, T: int, K: int) -> Case:
    """Kriging where nobody reads one of the keys: its log precision is the least float32, which half types round."""
    case = kriging(B, H, T, K)

    def run(x: Mapping[str, Tensor], impl: str) -> Outputs:
        trust = x["log_precision"].clone()
        trust[:, 3] = -1e4 if impl == "reference" else torch.finfo(torch.float32).min / K**0.5
        return case.run({**x, "log_precision": trust}, impl)

    return replace(case, name="kriging moments, a key nobody reads", run=run)


def reml(B: int, H: int, T: int, K: int) -> Case:
    """What a layer takes of softmax moments: the mean and its REML precision, here with a bias of pairs too."""
    prior = {"prior_scale": 0.2, "prior_dof": 2.0, "cap": 1e4}  # never reached: its edge has two gradients

    def run(x: Mapping[str, Tensor], impl: str) -> Outputs:
        heads, context = (x["q"], x["k"], x["v"]), packed(B, T, device=str(x["q"].device))
        terms = {name: _as_taken(x[name], x["q"], impl) for name in ("log_precision", "log_decay", "bias")}
        if impl == "reference":
            mean, S, n = softmax_moments(*heads, context, **terms, impl=impl)
            return mean, core.reml_precision_ref(S, n, **prior)
        return softmax_reml(*heads, context, **terms, **prior, impl=impl)

    leaves = dict(kriging(B, H, T, K).leaves) | {"bias": _normal(1, H, T, T, seed=4, scale=0.3)}
    return Case("kriging with REML and a bias", leaves, run, fixed=("log_precision", "log_decay", "bias"))


def silu(B: int, H: int, T: int, K: int) -> Case:
    """SiLU moments with a relative bias."""

    def run(x: Mapping[str, Tensor], impl: str) -> Outputs:
        context = packed(B, T, device=str(x["q"].device))
        bias = _as_taken(x["bias"], x["q"], impl)
        return tuple(silu_moments(x["q"], x["k"], x["v"], context, length=T, bias=bias, impl=impl))

    leaves = {name: _normal(B, H, T, K, seed=seed) for seed, name in enumerate("qkv")}
    leaves["bias"] = _normal(1, 1, T, T, seed=3, scale=0.3)
    return Case("SiLU moments", leaves, run, fixed=("bias",))


def vocabulary(N: int, V: int, D: int) -> Case:
    """Full cross-entropy."""
    target = torch.randint(V, (N,), generator=torch.Generator().manual_seed(9))

    def run(x: Mapping[str, Tensor], impl: str) -> Outputs:
        return (full_cross_entropy(x["states"], x["weight"], target.to(x["states"].device), impl=impl),)

    return Case("cross-entropy", {"states": _normal(N, D, seed=0), "weight": _normal(V, D, seed=1, scale=0.3)}, run)


def robust_filter(B: int, H: int, T: int, K: int) -> Case:
    """Robust filter attention."""
    heads = {"decay": 0.05, "process": 0.5, "key_noise": 0.8, "query_noise": 0.3, "dof": 4.0 * K}

    def run(x: Mapping[str, Tensor], impl: str) -> Outputs:
        context = packed(B, T, device=str(x["q"].device))
        dynamics = Dynamics(*(x[name] for name in ("frequency", *heads)), torch.ones_like(x["decay"]))
        clock = read_clock(context, dtype=x["decay"].dtype)
        return filtered(x["q"], x["k"], x["v"], context, dynamics, clock, Variant(), impl=impl)

    leaves = {
        n: torch.complex(_normal(B, H, T, K, seed=s), _normal(B, H, T, K, seed=s + 5)) for s, n in enumerate("qkv")
    }
    leaves["frequency"] = _normal(H, K, seed=3, scale=0.3)
    leaves |= {name: torch.full((H,), value, dtype=torch.float64) for name, value in heads.items()}
    return Case("robust filter attention", leaves, run, half=False)


def memory(B: int, H: int, T: int, K: int) -> Case:
    """The Bayesian layer with a scalar decay per token and process noise."""

    def run(x: Mapping[str, Tensor], impl: str) -> Outputs:
        k = x["k"] / x["k"].norm(dim=-1, keepdim=True)
        kept = torch.sigmoid(x["kept"] + 3)[..., None].expand_as(k)
        found = filter_memory(
            x["q"], k, x["v"], transition=kept, process_noise=x["process"].exp(),
            observation_noise=x["noise"].exp(), prior_variance=1.0, impl=impl,
        )  # fmt: skip
        return found.readout, found.readout_variance

    leaves = {name: _normal(B, H, T, K, seed=seed) for seed, name in enumerate("qkv")}
    leaves |= {
        n: _normal(B, H, T, seed=s, scale=0.2) - c for s, n, c in ((3, "kept", 0), (4, "process", 4), (5, "noise", 1))
    }
    return Case("Bayesian layer", leaves, run, half=False)


def filter_step(N: int, D: int) -> Case:
    """Kalman update, then prediction with a Jacobian per token."""

    def run(x: Mapping[str, Tensor], impl: str) -> Outputs:
        before, observed, noise = Belief(x["mean"], x["precision"].exp()), x["observed"].exp(), x["noise"].exp()
        after, _ = kalman_update(before, x["innovation"], observed, ramp=0.7, impl=impl)
        bounds = {"low": 0.01, "cap": 20.0}
        return (*after, predict_precision(after.precision, x["jacobian"], noise, **bounds, impl=impl))

    names = ("mean", "precision", "innovation", "observed", "jacobian")
    leaves = {name: _normal(N, D, seed=seed) for seed, name in enumerate(names)}
    return Case("update and prediction", leaves | {"noise": _normal(D, seed=9)}, run, half=False)


def norm(S: int, N: int, D: int) -> Case:
    """Layer normalisation with weights of each seed."""

    def run(x: Mapping[str, Tensor], impl: str) -> Outputs:
        return (layer_norms(x["x"], x["weight"], x["bias"], eps=1e-5, impl=impl),)

    leaves = {"x": _normal(S, N, D, seed=0) + 1, "weight": _normal(S, D, seed=1), "bias": _normal(S, D, seed=2)}
    return Case("layer norm", leaves, run, half=False)


def gelu(N: int, width: int, rank: int) -> Case:
    """GELU and the product with its slope."""
    factor = _normal(width, rank, seed=1)

    def run(x: Mapping[str, Tensor], impl: str) -> Outputs:
        a, right = x["a"], factor.to(x["a"])
        return gelu_with_slope(a, right, impl=impl)

    return Case("GELU with its slope", {"a": _normal(N, width, seed=0, scale=2.0)}, run, half=False)


def all_cases(*, small: bool) -> list[Case]:
    """What is checked; small sizes are for the interpreter."""
    B, H, T, K = (2, 2, 20, 16) if small else (8, 4, 200, 32)
    cases = [
        kriging(B, H, T, K),
        kriging(B, H, T, K, causal=False),
        kriging(B, H, T, K, offset=10.0),
        unread(B, H, T, K),
        reml(B, H, T, K),
        silu(B, H, T, K),
        vocabulary(*((20, 50, 16) if small else (3_000, 12_101, 64))),
        robust_filter(B, H, T, K),
        memory(B, H, T, K),
        filter_step(*((70, 16) if small else (12_800, 64))),
        gelu(*((70, 16, 4) if small else (12_800, 256, 16))),
        norm(*((2, 70, 16) if small else (2, 12_800, 64))),
    ]
    return cases if small else [*cases, kriging(4, 4, 1000, 64), vocabulary(500, 100_003, 64)]


def cases_of_heads(K: int) -> list[Case]:
    """The mechanisms whose kernels are compiled for a width of heads, at a small shape of that width."""
    return [make(2, 2, 20, K) for make in (kriging, reml, silu, robust_filter, memory)]


def timed_cases(*, small: bool) -> list[tuple[Case, torch.dtype]]:
    """Mechanisms that have no other part of the suite, at the shapes at which they are timed."""
    heads = [(2, 1, 20, 16)] if small else [(256, 2, 50, 32), (128, 4, 200, 32)]
    filtered = [(70, 16)] if small else [(12_800, 64)]
    widened = [(70, 16, 4)] if small else [(12_800, 256, 16)]
    normed = [(1, 70, 16)] if small else [(1, 12_800, 64), (1, 51_200, 64)]
    makers: list[tuple[Callable[..., Case], list[Any]]] = [
        (silu, heads), (robust_filter, heads), (memory, heads), (filter_step, filtered), (gelu, widened),
        (norm, normed),
    ]  # fmt: skip
    made, half = [], torch.float16 if small else torch.bfloat16
    for maker, shapes in makers:
        for shape in shapes:
            case = replace(maker(*shape), shape="x".join(map(str, shape)))
            made += [(case, dtype) for dtype in (torch.float32, *([half] if case.half else []))]
    return made


def attentions(
    q: Tensor, k: Tensor, v: Tensor, *, impl: str, others: Sequence[str] = ()
) -> dict[str, Callable[[], Any]]:
    """Ways to compute attention over whole rows, by name, stock first; ours by the path named, and by others."""
    context = whole(*q.shape[::2], device=str(q.device))
    trust = torch.zeros(q.shape[::2], device=q.device, requires_grad=True)
    decay = torch.tensor(-0.01, device=q.device, requires_grad=True)

    def stock(*backends: SDPBackend) -> Tensor:  # which gives the mean alone
        with sdpa_kernel(list(backends)) if backends else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def ours(impl: str) -> Callable[[], Any]:
        return lambda: softmax_moments(q, k, v, context, log_precision=trust, log_decay=decay, impl=impl)

    flash = {"FlashAttention": partial(stock, SDPBackend.FLASH_ATTENTION)}
    return {
        **(flash if q.is_cuda and q.dtype != torch.float32 else {}),
        "scaled_dot_product_attention": stock,
        "recbft mean": lambda: softmax_mean(q, k, v, context),
        "recbft moments": ours(impl),
        **{f"recbft moments, {other}": ours(other) for other in others},
        "eager moments": ours("reference"),
    }


def forward_pass(run: Callable[[], Any]) -> Callable[[], None]:
    """A call without gradients, to be timed."""

    def forward() -> None:
        with torch.no_grad():
            run()

    return forward


def both_passes(run: Callable[[], Any], leaves: Sequence[Tensor]) -> Callable[[], None]:
    """A call and its gradients, to be timed; those that come from above are dense, as a layer's are."""
    gradients: list[Tensor] = []

    def both() -> None:
        outputs = run()
        outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        outputs = tuple(output for output in outputs if output.requires_grad)  # a running mean has none
        if not gradients:
            gradients.extend(torch.randn_like(output) for output in outputs)
        torch.autograd.backward(outputs, gradients)
        for leaf in leaves:
            leaf.grad = None

    return both


def losses(states: Tensor, weight: Tensor, target: Tensor, *, impl: str) -> dict[str, Callable[[], Tensor]]:
    """Ways to compute the cross-entropy over all items, by name, stock first; ours by the path named."""
    ways = {
        "linear and cross_entropy": lambda: F.cross_entropy(F.linear(states, weight), target),
        "recbft": lambda: full_cross_entropy(states, weight, target, impl=impl),
    }
    if hasattr(F, "linear_cross_entropy"):  # since PyTorch 2.13; without options it is the first of these
        chunks = torch.nn.LinearCrossEntropyOptions()
        ways["linear_cross_entropy"] = lambda: F.linear_cross_entropy(states, weight, target, options=chunks)
    return ways
