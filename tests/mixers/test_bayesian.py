"""The Bayesian layer and its family as mixers: what they read, write and refuse."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize, softplus

from recbft.config.fields import from_dict
from recbft.core import SequenceContext
from recbft.datasets.batches import pack_histories
from recbft.errors import UserError
from recbft.kernels.memory import check_positive, reference
from recbft.mixers import bayesian
from recbft.mixers.bayesian import BayesianConfig, BayesianMixer, MemoryEvent, MemoryState, filter_memory, step
from recbft.mixers.memory_family import DESIGN_MODELS, MemoryFamilyConfig, MemoryFamilyMixer, unfiltered_memory
from recbft.mixers.memory_maps import KeysAndValues

D, H = 8, 2
K = D // H
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}

BAYESIAN = [
    {},
    {"transition": "identity"},
    {"transition": "scalar", "noise_groups": 2},
    {"transition": "complex_pairs", "noise_groups": 4},
    {"transition": "complex_pairs", "chunk_size": 3, "key_precision": "off"},
]


def make_bayesian(settings=None, *, seed=0, scale=4.0, **options):
    torch.manual_seed(seed)
    return _lively(BayesianMixer(D, H, BayesianConfig(**(settings or {})), **options), scale)


def make_family(design, *, seed=0, scale=4.0, config=None, **options):
    torch.manual_seed(seed)
    return _lively(MemoryFamilyMixer(D, H, config or MemoryFamilyConfig(), design=design, **options), scale)


def _lively(mixer, scale):
    """Weights large enough for what depends on the input to show."""
    with torch.no_grad():
        for parameter in mixer.parameters():
            if parameter.dim() == 2:
                parameter.mul_(scale)
    return mixer.double()


EVERY = {f"bayesian {settings}": lambda settings=settings: make_bayesian(settings) for settings in BAYESIAN}
EVERY["bayesian with an output map"] = lambda: make_bayesian(output_projection=True)
EVERY |= {design: lambda design=design: make_family(design) for design in DESIGN_MODELS}
EVERY["longhorn with an output map"] = lambda: make_family("longhorn", output_projection=True)
over_all = pytest.mark.parametrize("make", EVERY.values(), ids=EVERY.keys())


def packed(lengths):
    stop = np.cumsum(lengths)
    batch = pack_histories(np.arange(1, stop[-1] + 1), stop - np.array(lengths), stop)
    return batch, SequenceContext(batch.segment, batch.position)


def inputs(batch, seed=0):
    """Input and precision per item number, so that a token brings the same values wherever it is packed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(100, D, generator=generator, dtype=torch.float64)
    precision = torch.rand(100, D, generator=generator, dtype=torch.float64) * 9 + 0.1
    return x[batch.items], precision[batch.items]


def observe(mixer, batch, context, x, precision, **how):
    """Innovation and precision of every real token, by item number."""
    real = batch.segment >= 0
    order = batch.items[real].argsort()
    return [None if part is None else part[real][order] for part in mixer(x, precision, context, **how)]


@over_all
def test_an_observation_is_as_wide_as_the_input_and_empty_on_padding(make):
    mixer = make()
    batch, context = packed([5, 3, 1, 4])
    innovation, precision = mixer(*inputs(batch), context)
    padding = batch.segment < 0
    assert padding.any() and innovation.shape == (*batch.items.shape, D) and not innovation[padding].any()
    assert (precision is not None) == mixer.gives_precision
    if precision is not None:
        assert precision.shape == innovation.shape and not precision[padding].any()
        assert ((precision[~padding] > 0) & (precision[~padding] <= mixer.cap)).all()


@over_all
@pytest.mark.parametrize("training", [False, True])
def test_a_token_knows_its_own_past_alone(make, training):
    mixer = make().train(training)
    batch, context = packed([6, 4, 2, 3])
    x, precision = (value.requires_grad_() for value in inputs(batch))
    found = observe(mixer, batch, context, x, precision, ramp=0.7)
    items = batch.items[batch.segment >= 0].sort().values
    allowed = context.allowed
    place = {item: divmod(int((batch.items == item).flatten().nonzero()), x.shape[1]) for item in items.tolist()}
    for number, item in enumerate(items.tolist()):
        row, column = place[item]
        total = sum(part[number].sum() for part in found if part is not None)
        for gradient in torch.autograd.grad(total, [x, precision], retain_graph=True, allow_unused=True):
            if gradient is not None:
                reached = gradient.abs().sum(-1) > 0
                assert not (reached[row] & ~allowed[row, column]).any()
                assert not reached[torch.arange(len(x)) != row].any()


@over_all
def test_a_history_is_observed_alike_alone_packed_and_padded(make):
    mixer = make().eval()
    lengths = [6, 4, 2, 1, 5]
    batch, context = packed(lengths)
    whole = observe(mixer, batch, context, *inputs(batch), ramp=0.7)
    first = 0
    for length in lengths:
        alone, context = packed([length])
        alone = alone._replace(items=alone.items + first)
        for part, one in zip(observe(mixer, alone, context, *inputs(alone), ramp=0.7), whole, strict=True):
            if one is not None:
                torch.testing.assert_close(part, one[first : first + length], **TOLERANCE)
        first += length


@over_all
def test_a_token_at_a_time_equals_the_batch(make):
    mixer = make().eval()
    batch, context = packed([7, 7, 7])
    x, precision = inputs(batch)
    whole = mixer(x, precision, context, ramp=0.7)
    state = mixer.initial_state(len(x))
    for t in range(7):
        state, observation = mixer.step(state, x[:, t], precision[:, t], ramp=0.7)
        for one, all_of_them in zip(observation, whole, strict=True):
            assert (one is None) == (all_of_them is None)
            if one is not None:
                torch.testing.assert_close(one, all_of_them[:, t], **TOLERANCE)


@over_all
def test_every_parameter_learns(make):
    mixer = make()
    batch, context = packed([6, 4, 2])
    x, precision = (value.requires_grad_() for value in inputs(batch))
    innovation, found = mixer(x, precision, context, ramp=0.7)
    real = batch.segment >= 0
    (innovation.square().sum() + (0 if found is None else found[real].log().sum())).backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all() and parameter.grad.any(), name
    assert torch.isfinite(x.grad).all() and x.grad[real].any()
    assert (precision.grad is None) == (mixer.config.key_precision == "off")
    assert precision.grad is None or (torch.isfinite(precision.grad).all() and precision.grad[real].any())


@over_all
def test_weights_survive_a_state_dict(make):
    mixer, other = make(), make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    other.load_state_dict(mixer.state_dict())
    batch, context = packed([3, 2])
    for one, two in zip(mixer(*inputs(batch), context), other(*inputs(batch), context), strict=True):
        assert (one is None and two is None) or torch.equal(one, two)


@over_all
def test_keys_and_values_may_be_read_elsewhere(make):
    mixer = make().eval()
    batch, context = packed([5])
    (x, precision), (source, _) = inputs(batch), inputs(batch, seed=1)
    plain, elsewhere = (mixer(x, precision, context, source=read).innovation for read in (None, source))
    assert not torch.allclose(plain, elsewhere)
    state = mixer.initial_state(1)
    for t in range(5):
        state, observation = mixer.step(state, x[:, t], precision[:, t], source=source[:, t])
        torch.testing.assert_close(observation.innovation, elsewhere[:, t], **TOLERANCE)


def test_a_token_that_dropout_has_emptied_has_a_gradient_that_adam_can_square():
    maps = KeysAndValues(16, 2)
    torch.nn.init.zeros_(maps.query.bias)
    torch.nn.init.zeros_(maps.key.bias)
    x = torch.zeros(1, 1, 16, requires_grad=True)
    q, k, _ = maps(x, x)
    assert (q == 0).all() and (k == 0).all()
    (q + k).sum().backward()
    assert maps.query.bias.grad.abs().max() <= 1e3 and x.grad.abs().max() < 1e4


def test_the_bayesian_observation_is_the_readout_and_one_over_its_variance():
    mixer = make_bayesian({"transition": "diagonal", "prior_variance": 0.3}).eval()
    batch, context = packed([9])
    x, precision = inputs(batch)
    with torch.no_grad():
        mixer.log_scale.add_(torch.tensor([0.2, -0.4]))
        innovation, found = mixer(x, precision, context, ramp=0.5)
        heads = [part(x)[0].unflatten(-1, (H, K)).transpose(0, 1) for part in (mixer.maps.query, mixer.maps.key)]
        q, k = (part / (part.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt() for part in heads)
        v = mixer.maps.value(x)[0].unflatten(-1, (H, K)).transpose(0, 1)
        moved = x[0] @ mixer.transition.to_share.weight.T + mixer.transition.share_start
        a = 0.01 + 0.99 * torch.sigmoid(moved).unflatten(-1, (H, K)).transpose(0, 1)
        ell2, r2 = (
            softplus(x[0] @ part.to_noise.weight.T + part.noise_start).T for part in (mixer.process, mixer.observation)
        )
        trusted = r2 / precision[0].mean(-1).sqrt() + 1e-4
        scale = 0.3 * torch.tensor([0.2, -0.4]).double().exp()
        for h in range(H):
            P, M = torch.eye(K).double(), torch.zeros(K, K).double()
            for t in range(9):
                P = a[h, t, :, None] * P * a[h, t] + (ell2[h, t] + 1e-6) * torch.eye(K).double()
                M = a[h, t, :, None] * M
                gain = P @ k[h, t] / (trusted[h, t] + k[h, t] @ P @ k[h, t])
                M = M + torch.outer(gain, v[h, t] - M.T @ k[h, t])
                P = P - torch.outer(gain, P @ k[h, t])
                mine = slice(h * K, (h + 1) * K)
                torch.testing.assert_close(innovation[0, t, mine], M.T @ q[h, t], **TOLERANCE)
                expected = 1 / (scale[h] * (q[h, t] @ P @ q[h, t] + r2[h, t] + 1e-4))
                torch.testing.assert_close(found[0, t, mine], expected.expand(K), rtol=1e-6, atol=1e-9)


def test_groups_of_noise_are_filters_of_their_own_columns():
    batch, context = packed([8])
    x, precision = inputs(batch)
    mixer = make_bayesian({"noise_groups": 2}).eval()
    innovation, found = mixer(x, precision, context)
    for group in range(2):
        alone = make_bayesian({"noise_groups": 1}).eval()
        own = dict(mixer.state_dict())
        for name in ("to_noise.weight", "noise_start"):
            own[f"observation.{name}"] = own[f"observation.{name}"][group::2]
        alone.load_state_dict(own)
        one, known = alone(x, precision, context)
        mine = [h * K + group * K // 2 + column for h in range(H) for column in range(K // 2)]
        torch.testing.assert_close(one[..., mine], innovation[..., mine], **TOLERANCE)
        torch.testing.assert_close(known[..., mine], found[..., mine], **TOLERANCE)


def test_more_of_the_same_makes_the_observation_more_precise():
    mixer = make_bayesian({"transition": "identity", "process_noise": 1e-9}).eval()
    x = torch.randn(1, 1, D, dtype=torch.float64).expand(1, 12, D)
    context = SequenceContext(torch.zeros(1, 12, dtype=torch.int64), torch.arange(12)[None])
    found = mixer(x, None, context).precision[0]
    assert (found[1:] > found[:-1] * (1 - 1e-5)).all() and (found[-1] > found[0]).all()  # noise is never quite none


def test_a_write_counts_for_more_where_the_token_is_known_better():
    mixer = make_bayesian({"transition": "identity"}).eval()
    batch, context = packed([2])
    x, _ = inputs(batch)
    known = torch.ones(1, 2, D).double()
    doubted = known.clone()
    doubted[:, 0] = 0.01
    believing, doubting = (mixer(x, precision, context).innovation[0, 0].norm() for precision in (known, doubted))
    assert doubting < 0.5 * believing
    torch.testing.assert_close(mixer(x, doubted, context, ramp=0.0).innovation, mixer(x, known, context).innovation)
    torch.testing.assert_close(mixer(x, None, context).innovation, mixer(x, known, context).innovation)


def drawn(T=11, B=2, M=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k = (normalize(torch.randn(B, H, T, K, generator=g, dtype=torch.float64), dim=-1) for _ in range(2))
    k[:, :, 4] = 0  # a write to nowhere
    k[:, :, 6] = k[:, :, 5]
    v = torch.randn(B, H, T, M, generator=g, dtype=torch.float64)
    r2 = 0.1 + torch.rand(B, H, T, generator=g, dtype=torch.float64)
    return q, k, v, r2, torch.rand(B, H, T, K, generator=g, dtype=torch.float64) * 0.6 + 0.4


TRANSITION_OF = {
    "deltanet": lambda a: None,
    "gated_deltanet": lambda a: a[..., :1],
    "kda": lambda a: a,
    "longhorn": lambda a: None,
    "linear_attention": lambda a: None,
    "retnet": lambda a: torch.full_like(a[..., :1], 0.9),
    "gla": lambda a: a,
    "mamba2": lambda a: a[..., :1],
}


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("design", [name for name, model in DESIGN_MODELS.items() if model.rule == "reset"])
def test_resets_are_the_delta_rules(design, impl):
    q, k, v, r2, a = drawn()
    transition, lam = TRANSITION_OF[design](a), 0.7
    noise = r2[..., None] * (1 + torch.arange(5)) if DESIGN_MODELS[design].by_column else r2
    trace = unfiltered_memory(
        q, k, v, transition=transition, observation_noise=noise, variance=lam, rule="reset", impl=impl
    )
    # As the architectures write it: a learning rate per token (Longhorn: and column) and the error of the retrieval.
    for b in range(2):
        for h in range(H):
            S = torch.zeros(K, 5).double()
            for t in range(11):
                if transition is not None:
                    S = transition[b, h, t].expand(K)[:, None] * S
                for column in range(5):
                    noise_here = noise[b, h, t, column] if noise.dim() == 4 else noise[b, h, t]
                    rate = lam / (noise_here + lam * k[b, h, t] @ k[b, h, t])
                    error = v[b, h, t, column] - S[:, column] @ k[b, h, t]
                    S[:, column] += rate * error * k[b, h, t]
                torch.testing.assert_close(trace.readout[b, h, t], S.T @ q[b, h, t], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(trace.mean[b, h], S, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("design", [name for name, model in DESIGN_MODELS.items() if model.rule == "reset"])
def test_the_observation_of_a_reset_is_its_readout_and_one_over_the_variance_after_the_write(design):
    mixer = make_family(design, config=MemoryFamilyConfig(prior_variance=0.3)).eval()
    batch, context = packed([6])
    x, precision = inputs(batch)
    with torch.no_grad():
        mixer.log_scale.add_(torch.tensor([0.2, -0.4]))
        innovation, found = mixer(x, precision, context, ramp=0.5)
        q, k, v = (part[0] for part in mixer.maps(x, x))
        a = mixer.transition(x)
        r2 = softplus(x[0] @ mixer.observation.to_noise.weight.T + mixer.observation.noise_start)  # (T, H) or (T, D)
        r2 = r2.view(6, H, -1).expand(6, H, K)  # a noise per head, or per column of its values
        trusted = r2 / precision[0].mean(-1).sqrt()[:, None, None] + 1e-4
    scale = 0.3 * torch.tensor([0.2, -0.4]).double().exp()
    for h in range(H):
        M = torch.zeros(K, K).double()
        for t in range(6):
            M = M if a is None else a[0, h, t].expand(K)[:, None] * M
            gain = k[h, t][:, None] / (trusted[t, h] + k[h, t] @ k[h, t])  # (K, M), of lam = 1
            M = M + gain * (v[h, t] - M.T @ k[h, t])
            left = q[h, t] @ q[h, t] - (q[h, t] @ k[h, t]) * (q[h, t] @ gain)  # q' P q after the write, by column
            mine = slice(h * K, (h + 1) * K)
            torch.testing.assert_close(innovation[0, t, mine], M.T @ q[h, t], **TOLERANCE)
            expected = 1 / (scale[h] * (left + r2[t, h] + 1e-4))
            torch.testing.assert_close(found[0, t, mine], expected.clamp(max=100), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("known", [{}, {"cap": 3.0}])
def test_a_precision_ends_at_the_cap_a_hundred_unless_another_is_given(known):
    surely = {"prior_variance": 1e-6}
    batch, context = packed([3])
    for mixer in (
        make_bayesian(surely, **known),
        make_family("longhorn", config=MemoryFamilyConfig(**surely), **known),
    ):
        found = mixer(*inputs(batch), context).precision
        torch.testing.assert_close(found, torch.full_like(found, known.get("cap", 100.0)))


def test_what_is_learned_starts_where_it_is_asked_to():
    asked = {"retention": 0.9, "observation_noise": 0.3}
    nothing = torch.zeros(1, 1, D).double()
    for mixer, variance in (
        (make_bayesian({**asked, "process_noise": 0.02}), 1 / K),
        (make_bayesian({**asked, "transition": "scalar", "prior_variance": 0.7}), 0.7),
        (make_bayesian({**asked, "transition": "complex_pairs"}), 1 / K),
        (make_family("kda", config=MemoryFamilyConfig(**asked)), 1 / K),
        (make_family("gated_deltanet", config=MemoryFamilyConfig(**asked, prior_variance=0.7)), 0.7),
    ):
        kept = mixer.transition(nothing)
        torch.testing.assert_close(kept.abs(), torch.full_like(kept.abs(), 0.9), rtol=1e-6, atol=0)
        if kept.is_complex():
            angles = 10_000.0 ** -(torch.arange(K // 2) / (K // 2)).double()
            torch.testing.assert_close(kept.angle()[0, :, 0], angles.expand(H, -1), rtol=1e-6, atol=0)
        noise = mixer.observation(nothing)
        torch.testing.assert_close(noise, torch.full_like(noise, 0.3 + 1e-4), rtol=1e-6, atol=0)
        torch.testing.assert_close(mixer.log_scale.exp(), torch.full((H,), variance).double(), rtol=1e-6, atol=0)
    noise = make_bayesian({"process_noise": 0.02}).process(nothing)
    torch.testing.assert_close(noise, torch.full_like(noise, 0.02 + 1e-6), rtol=1e-6, atol=0)


def test_what_is_learned_starts_slow_to_forget_and_sure_of_what_it_sees_unless_asked():
    nothing = torch.zeros(1, 1, D).double()
    for mixer in (make_bayesian(), make_family("kda")):
        for found, start in ((mixer.transition(nothing), 0.98), (mixer.observation(nothing), 0.1 + 1e-4)):
            torch.testing.assert_close(found, torch.full_like(found, start), rtol=1e-6, atol=0)
    noise = make_bayesian().process(nothing)
    torch.testing.assert_close(noise, torch.full_like(noise, 0.01 + 1e-6), rtol=1e-6, atol=0)


def test_the_filter_with_its_covariance_reset_is_deltanet():
    q, k, v, r2, _ = drawn()
    lam = 0.7
    rule = unfiltered_memory(q, k, v, transition=None, observation_noise=r2, variance=lam, rule="reset")
    isotropic = lam * torch.eye(K).double().expand(2, H, K, K)
    state = MemoryState(torch.zeros(2, H, K, 5).double(), isotropic)
    for t in range(11):
        event = MemoryEvent(q[:, :, t], k[:, :, t], v[:, :, t], None, torch.zeros(2, H).double(), r2[:, :, t])
        after, reading = step(state, event)
        state = MemoryState(after.mean, isotropic)
        torch.testing.assert_close(rule.readout[:, :, t], reading.readout, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(rule.readout_variance[:, :, t], reading.readout_variance, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(rule.gain[:, :, t], reading.gain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("design", [name for name, model in DESIGN_MODELS.items() if model.rule == "additive"])
def test_the_additive_family_is_its_closed_sum(design, impl):
    q, k, v, r2, a = drawn()
    transition, lam = TRANSITION_OF[design](a), 0.7
    trace = unfiltered_memory(
        q, k, v, transition=transition, observation_noise=r2, variance=lam, rule="additive", impl=impl
    )
    omega = lam / (lam + r2)
    kept = torch.ones_like(a) if transition is None else transition.expand_as(a)
    for t in range(11):
        decays = [kept[:, :, j + 1 : t + 1].prod(dim=2) for j in range(t + 1)]
        total = sum(
            (omega[:, :, j] * (q[:, :, t] * decays[j] * k[:, :, j]).sum(-1))[..., None] * v[:, :, j]
            for j in range(t + 1)
        )
        torch.testing.assert_close(trace.readout[:, :, t], total, rtol=1e-12, atol=1e-12)
    assert trace.readout_variance is None


def test_the_design_table_says_which_of_them_have_a_precision():
    assert make_bayesian().gives_precision
    with_one = {design for design in DESIGN_MODELS if make_family(design).gives_precision}
    assert with_one == {"deltanet", "gated_deltanet", "kda", "longhorn"}
    assert not make_family("kda", gives_precision=False).gives_precision
    mixer = make_bayesian(gives_precision=False)
    batch, context = packed([3])
    assert mixer(*inputs(batch), context).precision is None and mixer.log_scale is None


def test_retnet_keeps_the_share_of_its_authors():
    mixer = make_family("retnet")
    kept = mixer.transition(torch.zeros(1, 1, D).double())
    assert kept.flatten().tolist() == [1 - 1 / 32, 1 - 1 / 64]


def test_autocast_takes_the_loop_too():
    q, k, v = (torch.randn(1, 1, 4, 2) for _ in range(3))
    noises = {"process_noise": torch.ones(1, 1, 4), "observation_noise": torch.ones(1, 1, 4)}

    def read():
        return filter_memory(q, k, v, transition=None, prior_variance=1.0, **noises, impl="reference").readout

    plain = read()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(read(), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_filters_in_float32(dtype):
    torch.manual_seed(0)
    mixer = BayesianMixer(D, H, BayesianConfig()).to(dtype)
    batch, context = packed([6])
    x, precision = (value.to(dtype) for value in inputs(batch))
    observation = mixer(x, precision, context)
    assert observation.innovation.dtype == observation.precision.dtype == dtype
    state, one = mixer.step(mixer.initial_state(1), x[:, 0], precision[:, 0])
    assert state.covariance.dtype == torch.float32 and one.innovation.dtype == dtype


@over_all
def test_a_model_that_reads_both_ways_is_refused(make):
    mixer = make()
    batch, context = packed([4])
    both = dataclasses.replace(context, causal=False)
    with pytest.raises(UserError, match=r"cannot look ahead, as a bidirectional model needs; choose mixer attention"):
        mixer(*inputs(batch), both)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transition": "complex_pairs"}, "needs an even head width, got 3 (hidden size 6 / 2 heads)"),
        ({"noise_groups": 2}, "noise_groups is 2, which does not divide the head width 3"),
    ],
)
def test_head_widths_that_do_not_divide_are_refused(settings, message):
    with pytest.raises(UserError) as error:
        BayesianMixer(6, 2, BayesianConfig(**settings))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (BayesianConfig, {"retention": 1.0}, "retention is 1.0; give a number > 0.01 and < 1"),
        (BayesianConfig, {"noise_groups": 0}, "noise_groups is 0; give a whole number >= 1"),
        (BayesianConfig, {"observation_noise": 0.0}, "observation_noise is 0.0; give a number > 0"),
        (BayesianConfig, {"process_noise": 0.0}, "process_noise is 0.0; give a number > 0"),
        (BayesianConfig, {"prior_variance": 0.0}, "prior_variance is 0.0; give a number > 0"),
        (BayesianConfig, {"transition": "diag"}, "transition is 'diag'; did you mean 'diagonal'?"),
        (BayesianConfig, {"transition": "identity", "retention": 0.5}, "retention has no effect with transition 'id"),
        (BayesianConfig, {"chunk_size": 0}, "chunk_size is 0; give a whole number >= 1"),
        (MemoryFamilyConfig, {"observation_noise": 0.0}, "observation_noise is 0.0; give a number > 0"),
        (MemoryFamilyConfig, {"prior_variance": 0.0}, "prior_variance is 0.0; give a number > 0"),
        (MemoryFamilyConfig, {"retention": 0.0}, "retention is 0.0; give a number > 0.01 and < 1"),
    ],
)
def test_configs_refuse_what_cannot_be(cls, settings, message):
    with pytest.raises(UserError) as error:
        from_dict(cls, settings)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("design", "config", "message"),
    [
        ("deltanett", {}, "design is 'deltanett'; did you mean 'deltanet'?"),
        ("deltanet", {"retention": 0.5}, "retention has no effect in 'deltanet'"),
        ("gla", {"prior_variance": 0.5}, "prior_variance has no effect in 'gla', which has no precision"),
    ],
)
def test_designs_refuse_what_has_no_effect_in_them(design, config, message):
    with pytest.raises(UserError) as error:
        make_family(design, config=MemoryFamilyConfig(**config))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": torch.zeros(1, 1, 4, 3)}, "q, k and v must agree but in width"),
        ({"v": torch.zeros(1, 1, 3, 2)}, "q, k and v must agree but in width"),
        (dict.fromkeys("qkv", torch.zeros(1, 1, 0, 5)), "a history needs at least one token, got 0"),
        ({"observation_noise": torch.tensor([[[1.0, 0.5, 0.0, 2.0]]])}, "observation_noise has 0; give a variance > 0"),
        ({"process_noise": torch.tensor([[[0.0, 0.3, -0.1, 0.0]]])}, "process_noise has -0.1; give a variance >= 0"),
        ({"prior_variance": 0.0}, "prior_variance has 0; give a variance > 0"),
        ({"transition": torch.ones(1, 1, 4, 2)}, "transition has 2 rows for keys of width 5; give 5 or 1"),
        ({"transition": torch.ones(1, 1, 4, 2) + 0j}, "keys of width 5 need 2.5 of them, got 2"),
        ({"chunk": 0}, "chunk is 0"),
        ({"impl": "gpu"}, "unknown impl 'gpu'; choose one of auto, chunked, reference"),
    ],
)
def test_a_filter_refuses_what_does_not_fit(changed, message):
    given = {
        "q": torch.zeros(1, 1, 4, 5),
        "k": torch.zeros(1, 1, 4, 5),
        "v": torch.zeros(1, 1, 4, 2),
        "transition": None,
        "process_noise": torch.zeros(1, 1, 4),
        "observation_noise": torch.ones(1, 1, 4),
        "prior_variance": 1.0,
    }
    filter_memory(**given, chunk=1)
    none = {name: x[:0] if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    assert filter_memory(**none).readout.shape == (0, 1, 4, 2)
    with pytest.raises(ValueError) as error:
        filter_memory(**given | changed)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": torch.zeros(1, 1, 4, 3)}, "q, k and v must agree but in width"),
        ({"v": torch.zeros(1, 1, 3, 2)}, "q, k and v must agree but in width"),
        (dict.fromkeys("qkv", torch.zeros(1, 1, 0, 5)), "a history needs at least one token, got 0"),
        ({"rule": "delta"}, "rule is 'delta'; choose reset or additive"),
        ({"transition": torch.ones(1, 1, 4, 2) + 0j}, "takes real transitions, got complex ones; use filter_memory"),
        ({"transition": torch.ones(1, 1, 4, 2)}, "transition has 2 rows for keys of width 5; give 5 or 1"),
        ({"impl": "triton"}, "unknown impl 'triton'; choose one of auto, chunked, reference"),
    ],
)
def test_a_memory_without_covariance_refuses_what_does_not_fit(changed, message):
    given = {
        "q": torch.zeros(1, 1, 4, 5),
        "k": torch.zeros(1, 1, 4, 5),
        "v": torch.zeros(1, 1, 4, 2),
        "transition": None,
        "observation_noise": torch.ones(1, 1, 4),
        "variance": 1.0,
        "rule": "reset",
    }
    unfiltered_memory(**given)
    with pytest.raises(ValueError) as error:
        unfiltered_memory(**given | changed)
    assert message in str(error.value)


def test_a_covariance_that_lost_positive_definiteness_is_reported(monkeypatch):
    k = torch.eye(2)[[0, 1, 0]][None, None]
    noise = torch.full((1, 1, 3), 0.1)
    how = {"transition": None, "process_noise": 0 * noise, "observation_noise": noise}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        filter_memory(k, k, k, prior_variance=1.0, **how)
    broken = reference.prior(k[:, :, 0], k[:, :, 0], torch.tensor([[0.05]]))
    broken = broken._replace(covariance=broken.covariance * torch.tensor([-1.0, 1.0]))
    monkeypatch.setattr(reference, "prior", lambda *_: broken)
    with pytest.warns(RuntimeWarning, match=r"lost positive definiteness at 2 of 3 steps \(worst variance -"):
        filter_memory(k, k, k, prior_variance=1.0, impl="reference", **how)


def test_a_loss_of_positive_definiteness_beyond_all_numbers_is_reported_too():
    margin, gain = torch.tensor([0.5, -torch.inf]), torch.tensor([0.5, 1.0])
    with pytest.warns(RuntimeWarning, match=r"at 1 of 2 steps \(worst variance -inf"):
        check_positive(margin, gain, torch.ones(2))


def test_a_loss_is_told_in_units_of_the_noise_and_from_a_thousandth_of_it_on():
    noise = torch.full((5,), 2.0)
    variance, gain = torch.tensor([1.0, -0.0018, 0.0, 0.001, 3.0]), torch.tensor([0.5, 0.5, -0.0009, 0.0, 0.0005])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_positive(variance, gain, noise)
    # margins -0.2 and 0.5 times the noise; k' Pb k by the gain of -0.5 is -0.5 / 1.5 of it
    variance, gain = torch.tensor([1.0, -0.4, 1.0, -0.0018, 3.0]), torch.tensor([0.5, 0.5, -0.5, 0.5, 0.0005])
    with pytest.warns(RuntimeWarning, match=r"at 2 of 5 steps \(worst variance -0.333 times the observation noise"):
        check_positive(variance, gain, noise)
    with pytest.warns(RuntimeWarning, match=r"at 1 of 5 steps \(worst variance -0.0011 times"):
        check_positive(torch.tensor([1.0, -0.0022, 1.0, 1.0, 1.0]), gain.abs(), noise)


def test_names_that_others_rely_on():
    assert {"filter_memory", "step", "MemoryTrace", "MemoryState", "MemoryEvent"} <= set(dir(bayesian))
