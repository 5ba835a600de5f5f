"""Memory filters: the loop against a dense Kalman filter, and the chunked path against the loop."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from recbft.kernels import dispatch
from recbft.kernels.memory import FILTER, UNFILTERED, chunked, reference, transport
from recbft.kernels.memory.chunk import FilterChunk
from recbft.kernels.memory.chunked import history_masks
from recbft.kernels.memory.reference import MemoryEvent
from tests.tolerances import assert_as_near_as, assert_same

KINDS = ["identity", "scalar", "diagonal", "pairs"]
CHUNK = 8
LENGTHS = [1, CHUNK - 1, CHUNK, 50]


def drawn(T, *, B=2, H=2, K=6, M=5, kind="diagonal", seed=0, dtype=torch.float64, least=0.2):
    """Inputs of a filter that ask for gradients, by name."""
    g = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    q, k = (normalize(torch.randn(B, H, T, K, generator=g, dtype=torch.float64), dim=-1) for _ in range(2))
    transition = {
        "identity": None,
        "scalar": 0.5 + 0.5 * uniform(B, H, T, 1),
        "diagonal": least + (1 - least) * uniform(B, H, T, K),
        "pairs": torch.polar(0.5 + 0.5 * uniform(B, H, T, K // 2), 6 * uniform(B, H, T, K // 2) - 3),
    }[kind]
    made = {
        "q": q,
        "k": k,
        "v": torch.randn(B, H, T, M, generator=g, dtype=torch.float64),
        "transition": transition,
        "process_noise": 0.2 * uniform(B, H, T),
        "observation_noise": 0.05 + uniform(B, H, T),
        "prior_variance": 0.5 + uniform(B, H),
    }
    to = {torch.complex128: dtype.to_complex(), torch.float64: dtype}
    return {name: None if x is None else x.to(to[x.dtype]).requires_grad_() for name, x in made.items()}


def filtered(path, inputs, first=None, **options):
    """The trace of inputs by name, which stand in this order."""
    *events, prior_variance = inputs.values()
    return path(MemoryEvent(*events), prior_variance, first, **options)


def starts(T, B=2, seed=0, share=0.2):
    begins = torch.rand(B, T, generator=torch.Generator().manual_seed(seed)) < share
    begins[:, 0] = True
    return begins


def values_and_gradients(outputs, inputs, seed=9):
    """Outputs, and the gradients of a random weighing of all of them."""
    g = torch.Generator().manual_seed(seed)
    outputs = [x for x in outputs if x is not None]
    total = sum((x * torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype)).sum() for x in outputs)
    given = [x for x in inputs.values() if x is not None]
    gradients = torch.autograd.grad(total, given, allow_unused=True)
    filled = [torch.zeros_like(x) if one is None else one for x, one in zip(given, gradients, strict=True)]
    return [*outputs, *filled]


def dense_transition(a, K):
    """A of one token and head as a matrix."""
    if a is None:
        return torch.eye(K).double()
    if not a.is_complex():
        return torch.diag(a.expand(K))
    return torch.block_diag(*(torch.tensor([[z.real, -z.imag], [z.imag, z.real]]).double() for z in a))


def dense_kalman_filter(q, k, v, transition, process_noise, observation_noise, prior_variance):
    """The Kalman filter of one head on the columns of M in a row, all of whose covariance is kept."""
    T, K = k.shape
    M = v.shape[-1]
    mean, covariance = torch.zeros(K * M).double(), prior_variance * torch.eye(K * M).double()
    readings = []
    for t in range(T):
        A = torch.kron(torch.eye(M).double(), dense_transition(None if transition is None else transition[t], K))
        noisy = torch.ones(K).double()
        if transition is not None and transition.is_complex():
            noisy[1::2] = 0
        C, R = torch.kron(torch.eye(M).double(), k[t][None]), observation_noise[t] * torch.eye(M).double()
        mean, covariance = A @ mean, A @ covariance @ A.T + process_noise[t] * torch.diag(noisy.repeat(M))
        gain = covariance @ C.T @ torch.linalg.inv(C @ covariance @ C.T + R)
        mean, covariance = mean + gain @ (v[t] - C @ mean), covariance - gain @ C @ covariance
        at = torch.kron(torch.eye(M).double(), q[t][None])
        readings.append((at @ mean, (at @ covariance @ at.T), (C @ gain)))
    return readings, mean.view(M, K).T, covariance


@pytest.mark.parametrize("kind", KINDS)
def test_the_filter_is_the_dense_kalman_filter_on_all_columns(kind):
    T, K, M = 12, 4, 3
    inputs = drawn(T, B=1, H=2, K=K, M=M, kind=kind)
    trace = filtered(reference.filter_memory_ref, inputs)
    for h in range(2):
        one = [None if x is None else x[0, h].detach() for x in inputs.values()]
        readings, mean, covariance = dense_kalman_filter(*one)
        eye = torch.eye(M).double()
        for t, expected in enumerate(readings):
            assert_same([trace.readout[0, h, t], *(x[0, h, t] * eye for x in trace[1:3])], expected)
        assert_same([trace.mean[0, h], torch.kron(eye, trace.covariance[0, h].contiguous())], [mean, covariance])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T", LENGTHS)
def test_the_chunked_filter_equals_the_loop(T, kind, packed):
    inputs = drawn(T, kind=kind, seed=T)
    first = starts(T, seed=T) if packed else None
    loop = values_and_gradients(filtered(reference.filter_memory_ref, inputs, first=first), inputs)
    chunks = values_and_gradients(filtered(chunked.filter_memory, inputs, first=first, chunk=CHUNK), inputs)
    assert_same(chunks, loop)


@pytest.mark.parametrize("kind", KINDS)
def test_making_chunks_again_in_the_backward_changes_nothing(kind, monkeypatch):
    inputs, first, saved = drawn(30, kind=kind), starts(30), []

    def found():
        saved.append(0)

        def pack(x):
            saved[-1] += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            trace = filtered(chunked.filter_memory, inputs, first=first, chunk=CHUNK)
        return values_and_gradients(trace, inputs)

    kept = found()
    monkeypatch.setattr(chunked, "KEPT_BYTES", 0)
    for one, two in zip(kept, found(), strict=True):
        assert torch.equal(one, two)
    tokens, per_token = 2 * 2 * 32, 6 + 5 + 6 + 2 * CHUNK + 1  # R, E, F, B and L^-1, pivots
    assert saved[0] - saved[1] == tokens * per_token


@pytest.mark.parametrize("kind", ["scalar", "diagonal", "pairs"])
def test_sums_that_are_deterministic_on_a_gpu_are_the_same(kind, monkeypatch):
    inputs, found = drawn(20, kind=kind), []
    for refused in (False, True):
        monkeypatch.setattr(transport, "_sums_are_refused", lambda x, refused=refused: refused)
        trace = filtered(chunked.filter_memory, inputs, chunk=CHUNK)
        found.append(values_and_gradients(trace, inputs))
    assert_same(*found)


@pytest.mark.parametrize("wanted", range(5))
def test_each_output_alone_has_the_loops_gradient(wanted):
    inputs = drawn(20)
    loop = values_and_gradients([filtered(reference.filter_memory_ref, inputs)[wanted]], inputs)
    chunks = values_and_gradients([filtered(chunked.filter_memory, inputs, chunk=CHUNK)[wanted]], inputs)
    assert_same(chunks, loop)


def test_a_history_leaves_nothing_to_the_one_behind_it():
    inputs = drawn(24, kind="diagonal")
    first = torch.zeros(2, 24, dtype=torch.bool)
    first[:, [0, 5, 11]] = True
    whole = filtered(chunked.filter_memory, inputs, first=first, chunk=CHUNK)
    for start, stop in ((0, 5), (5, 11), (11, 24)):
        part = {name: x if name == "prior_variance" else x[:, :, start:stop] for name, x in inputs.items()}
        alone = filtered(chunked.filter_memory, part, chunk=CHUNK)
        assert_same([x[:, :, start:stop] for x in whole[:3]], alone[:3])
    assert_same(whole[3:], alone[3:])


@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_as_near_to_float64_as_the_loop(kind):
    T = 120
    exact = filtered(reference.filter_memory_ref, drawn(T, kind=kind))
    inputs = drawn(T, kind=kind, dtype=torch.float32)
    loop, chunks = (filtered(path, inputs) for path in (reference.filter_memory_ref, chunked.filter_memory))
    assert {x.dtype for x in chunks} == {torch.float32}
    assert_as_near_as(chunks, loop, exact, slack=1e-6)


def test_turns_late_in_a_long_history_are_as_exact_as_early_ones():
    inputs = drawn(3000, B=1, H=1, kind="pairs", dtype=torch.float32)
    inputs["transition"] = torch.polar(torch.full((1, 1, 3000, 3), 0.9), torch.full((1, 1, 3000, 3), 2.9))
    exact = {name: x.detach().to(torch.promote_types(x.dtype, torch.float64)) for name, x in inputs.items()}
    found, truth = (filtered(chunked.filter_memory, given).readout for given in (inputs, exact))
    error = (found - truth).abs().amax(dim=-1)[0, 0] / truth.abs().max()
    assert error[-500:].max() < 1e-5 > error[:500].max()


@pytest.mark.parametrize("keys", ["zero", "equal", "axes"])
def test_keys_that_say_nothing_or_the_same_again_do_no_harm(keys):
    inputs = drawn(40, kind="identity", K=4, dtype=torch.float32)
    with torch.no_grad():
        k = inputs["k"].zero_()
        if keys == "equal":
            k[..., 0] = 1
        elif keys == "axes":
            k.scatter_(-1, (torch.arange(40) % 4).expand(2, 2, 40)[..., None], 1)
    trace = filtered(chunked.filter_memory, inputs)
    if keys == "zero":
        assert not trace.readout.any() and trace.gain.abs().max() < 1e-6
        grown = inputs["prior_variance"] + inputs["process_noise"].sum(-1)
        torch.testing.assert_close(trace.covariance, grown[..., None, None] * torch.eye(4))
    assert ((trace.gain > -1e-6) & (trace.gain < 1)).all()
    assert (torch.linalg.eigvalsh(trace.covariance) > 0).all()
    for gradient in values_and_gradients(trace, inputs):
        assert torch.isfinite(gradient).all()


@pytest.mark.slow
def test_covariance_stays_positive_over_10_000_random_steps_in_float32():
    T, K = 10_000, 8
    g = torch.Generator().manual_seed(0)
    k = normalize(torch.randn(1, 1, T, K, generator=g), dim=-1)
    how = {
        "process_noise": torch.full((1, 1, T), 1e-6),
        "observation_noise": 0.01 + torch.rand(1, 1, T, generator=g),
        "prior_variance": torch.ones(1, 1),
    }
    trace = filtered(chunked.filter_memory, {"q": k, "k": k, "v": k[..., :1], "transition": None, **how})
    assert (torch.linalg.eigvalsh(trace.covariance.double()) > 0).all()
    assert (trace.readout_variance > 0).all() and (trace.gain > 0).all()


def test_a_pivot_that_is_not_positive_is_raised_and_reported():
    K, C = 2, 3
    k = torch.eye(K)[[0, 1, 0]].expand(2, C, K)
    masks = history_masks(None, C, like=torch.zeros(2, 1, C))[0]
    broken = torch.diag_embed(torch.tensor([[-1.0, 1.0], [-0.5, 1.0]]))  # what rounding would have to do to P
    # Of the first, pivots -1 + r2 and, of the same key again, that less (-1)^2 / r2: 10 and 110 times r2 too low.
    with pytest.warns(RuntimeWarning, match=r"lost positive definiteness at 4 of 6 steps \(worst variance -110 times"):
        readout, _, gain, *_ = FilterChunk.apply(
            broken, torch.zeros(2, K, 1), k, k, 0 * k, k[..., :1], torch.full((2, C), 0.1), None,
            torch.zeros(2, 1), None, *masks, True, True,
        )  # fmt: skip
    assert torch.isfinite(readout).all()
    torch.testing.assert_close(gain, torch.tensor([0.0, 1 / 1.1, 0.0]).expand(2, C))


@pytest.mark.parametrize(("packed", "by_column"), [(False, True), (True, False)])
@pytest.mark.parametrize("kind", ["identity", "scalar", "diagonal"])
@pytest.mark.parametrize("rule", ["reset", "additive"])
@pytest.mark.parametrize("T", LENGTHS)
def test_chunks_without_a_covariance_equal_the_loop(T, rule, kind, by_column, packed, monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK", CHUNK)
    inputs = {name: x for name, x in drawn(T, kind=kind, seed=T).items() if name in ("q", "k", "v", "transition")}
    g = torch.Generator().manual_seed(T)
    share = torch.rand(2, 2, T, 5 if by_column else 1, generator=g, dtype=torch.float64)
    inputs["share"] = share.requires_grad_()
    first = starts(T, seed=T) if packed else None
    loop = values_and_gradients(reference.unfiltered_memory_ref(**inputs, rule=rule, first=first), inputs)
    chunks = chunked.unfiltered_memory(**inputs, rule=rule, first=first)
    assert_same(values_and_gradients(chunks, inputs), loop)


def choose(paths, impl, transition, *, dtype=torch.float32):
    return dispatch.choose(impl, paths, torch.zeros(1, 1, 3, 2, dtype=dtype), key_width=2, transition=transition)


def test_auto_takes_chunks_and_the_loop_where_a_transition_clears_the_memory_at_once(caplog):
    kept = torch.full((1, 1, 3, 2), 0.5)
    assert choose(FILTER, "auto", kept) is chunked.filter_memory
    assert choose(FILTER, "auto", None) is chunked.filter_memory
    assert choose(UNFILTERED, "reference", kept) is reference.unfiltered_memory_ref
    dispatch._log_once.cache_clear()
    with caplog.at_level(logging.INFO, "recbft"):
        assert choose(FILTER, "auto", kept * 0) is reference.filter_memory_ref
    assert "chunked path declined: a transition of 0 leaves less than e^-80 of a memory within 4 tokens" in caplog.text
    with pytest.raises(ValueError, match="chunked path declined: a transition of 0 leaves less than e\\^-600"):
        choose(FILTER, "chunked", kept.double() * 0, dtype=torch.float64)
    with pytest.raises(ValueError, match="unknown impl 'loop'; choose one of auto, chunked, reference, triton"):
        choose(FILTER, "loop", None)


class Looks(TorchDispatchMode):
    """Counts how often a number is looked at, for which a device has to be waited for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_is_waited_for_as_often_for_many_chunks_as_for_few(kind, monkeypatch):
    monkeypatch.setattr(chunked, "_waits", lambda x: True)
    monkeypatch.setattr(chunked, "KEPT_BYTES", 0)
    counts = []
    for T in (CHUNK, 5 * CHUNK):
        inputs = drawn(T, kind=kind)
        with Looks() as looks:
            values_and_gradients(filtered(chunked.filter_memory, inputs, first=starts(T), chunk=CHUNK), inputs)
        counts.append(looks.count)
    assert 0 < counts[0] == counts[1] <= 2, counts


def test_what_is_found_late_to_have_no_factor_is_filtered_again(monkeypatch):
    inputs = drawn(20, kind="scalar")
    with torch.no_grad():
        inputs["prior_variance"].neg_()  # what rounding would have to do to P
    found = []
    for waits in (False, True):
        monkeypatch.setattr(chunked, "_waits", lambda x, waits=waits: waits)
        with pytest.warns(RuntimeWarning, match="lost positive definiteness"):
            found.append(values_and_gradients(filtered(chunked.filter_memory, inputs, chunk=CHUNK), inputs))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_the_least_that_is_kept_anywhere_bounds_the_length_of_chunks():
    kept = torch.full((1, 1, 64, 2), 0.9)
    assert chunked.chunk_length(64, 32, kept, 80.0) == chunked.chunk_length(64, 32, None, 80.0) == 32
    assert chunked.chunk_length(33, 32, kept, 80.0) == 17, "chunks are as equal as they can be"
    for least in (0.011, torch.tensor(0.011j)):
        kept = kept.to(torch.complex64) if isinstance(least, torch.Tensor) else kept
        kept[0, 0, 5, 1] = least  # 17 tokens of it leave e^-77
        assert chunked.chunk_length(64, 32, kept, 80.0) == 16


@pytest.mark.parametrize("kind", ["scalar", "diagonal", "pairs"])
def test_chunks_are_shorter_where_memories_are(kind, least=0.011):
    inputs = drawn(40, kind=kind, dtype=torch.float32)
    with torch.no_grad():
        a = inputs["transition"]
        share = torch.full_like(a.abs(), least)
        share[:, :, 8:20] = share[:, :, 30:] = 0.9
        a.copy_(a / a.abs() * share)
    exact = {
        name: x.detach().to(torch.complex128 if x.is_complex() else torch.float64).requires_grad_()
        for name, x in inputs.items()
    }
    truth = values_and_gradients(filtered(reference.filter_memory_ref, exact), exact)
    for one, two in zip(values_and_gradients(filtered(chunked.filter_memory, inputs), inputs), truth, strict=True):
        assert (one - two).abs().max() < 1e-4 * two.abs().max()
    if kind == "pairs":
        return
    some = {name: inputs[name] for name in ("q", "k", "v", "transition")}
    some["share"] = inputs["observation_noise"].detach()[..., None].requires_grad_()
    for rule in ("reset", "additive"):
        loop, chunks = (
            values_and_gradients(path(**some, rule=rule, first=None), some)
            for path in (reference.unfiltered_memory_ref, chunked.unfiltered_memory)
        )
        for one, two in zip(chunks, loop, strict=True):
            assert (one - two).abs().max() < 1e-4 * two.abs().max()
