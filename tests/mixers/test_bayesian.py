"""The Bayesian layer and its family as mixers: what they read, write and refuse."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from torch.nn.functional import normalize, softplus

from recbft.errors import UserError
from recbft.kernels.memory import reference
from recbft.kernels.memory.reference import MemoryEvent, check_positive
from recbft.mixers.bayesian import BayesianConfig, BayesianMixer, filter_memory
from recbft.mixers.memory_family import DESIGN_MODELS, MemoryFamilyConfig, MemoryFamilyMixer, unfiltered_memory
from recbft.mixers.memory_maps import KeysAndValues
from tests.mixers.histories import D, H, K, inputs, packed
from tests.tolerances import TOLERANCE


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
    (x, precision), (source, _) = inputs(batch), inputs(batch, seed=1)
    with torch.no_grad():
        mixer.log_scale.add_(torch.tensor([0.2, -0.4]))
        innovation, found = mixer(x, precision, context, ramp=0.5, source=source)
        maps = mixer.maps.query(x), mixer.maps.key(source), mixer.maps.value(source)
        q, k, v = (part[0].unflatten(-1, (H, K)).transpose(0, 1) for part in maps)
        q, k = (part / (part.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        moved = source[0] @ mixer.transition.to_share.weight.T + mixer.transition.share_start
        a = 0.01 + 0.99 * torch.sigmoid(moved).unflatten(-1, (H, K)).transpose(0, 1)
        ell2, r2, of_readout = (
            softplus(y[0] @ part.to_noise.weight.T + part.noise_start).T
            for part, y in ((mixer.process, source), (mixer.observation, source), (mixer.observation, x))
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
                torch.testing.assert_close(innovation[0, t, mine], M.T @ q[h, t], **TOLERANCE[torch.float64])
                expected = 1 / (scale[h] * (q[h, t] @ P @ q[h, t] + of_readout[h, t] + 1e-4))
                torch.testing.assert_close(found[0, t, mine], expected.expand(K), rtol=1e-6, atol=1e-9)


def test_groups_of_noise_are_filters_of_their_own_columns():
    batch, context = packed([8])
    x, precision = inputs(batch)
    mixer = make_bayesian({"noise_groups": 2}).eval()
    with torch.no_grad():
        mixer.log_scale.add_(torch.tensor([0.2, -0.4]))
    innovation, found = mixer(x, precision, context)
    for group in range(2):
        alone = make_bayesian({"noise_groups": 1}).eval()
        own = dict(mixer.state_dict())
        for name in ("to_noise.weight", "noise_start"):
            own[f"observation.{name}"] = own[f"observation.{name}"][group::2]
        alone.load_state_dict(own)
        one, known = alone(x, precision, context)
        mine = [h * K + group * K // 2 + column for h in range(H) for column in range(K // 2)]
        torch.testing.assert_close(one[..., mine], innovation[..., mine], **TOLERANCE[torch.float64])
        torch.testing.assert_close(known[..., mine], found[..., mine], **TOLERANCE[torch.float64])


def test_a_write_counts_for_more_where_the_token_is_known_better():
    mixer = make_bayesian({"transition": "identity"}).eval()
    batch, context = packed([2])
    x, _ = inputs(batch)
    known = torch.ones(1, 2, D).double()
    doubted = known * torch.tensor([0.01, 1.0])[:, None]
    believing, doubting = (mixer(x, precision, context).innovation[0, 0].norm() for precision in (known, doubted))
    assert doubting < 0.5 * believing
    torch.testing.assert_close(mixer(x, doubted, context, ramp=0.0).innovation, mixer(x, known, context).innovation)
    torch.testing.assert_close(mixer(x, None, context).innovation, mixer(x, known, context).innovation)
    deaf = make_bayesian({"transition": "identity", "key_precision": "off"}).eval()
    assert torch.equal(deaf(x, doubted, context).innovation, deaf(x, known, context).innovation)


def drawn(T=11, B=2, M=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k = (normalize(torch.randn(B, H, T, K, generator=g, dtype=torch.float64), dim=-1) for _ in range(2))
    k[:, :, 4] = 0  # a write to nowhere
    k[:, :, 6] = k[:, :, 5]
    v = torch.randn(B, H, T, M, generator=g, dtype=torch.float64)
    r2 = 0.1 + torch.rand(B, H, T, generator=g, dtype=torch.float64)
    return q, k, v, r2, torch.rand(B, H, T, K, generator=g, dtype=torch.float64) * 0.6 + 0.4


TRANSITION_OF = {
    "linear_attention": lambda a: None,
    "retnet": lambda a: torch.full_like(a[..., :1], 0.9),
    "gla": lambda a: a,
    "mamba2": lambda a: a[..., :1],
}


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
            torch.testing.assert_close(innovation[0, t, mine], M.T @ q[h, t], **TOLERANCE[torch.float64])
            expected = 1 / (scale[h] * (left + r2[t, h] + 1e-4))
            torch.testing.assert_close(found[0, t, mine], expected.clamp(max=100), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("known", [{}, {"lam_max": 3.0}])
def test_a_precision_ends_at_the_cap_a_hundred_unless_another_is_given(known):
    surely = {"prior_variance": 1e-6}
    batch, context = packed([3])
    for mixer in (
        make_bayesian(surely, **known),
        make_family("longhorn", config=MemoryFamilyConfig(**surely), **known),
    ):
        found = mixer(*inputs(batch), context).precision
        torch.testing.assert_close(found, torch.full_like(found, known.get("lam_max", 100.0)))


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


def test_the_filter_with_its_covariance_reset_is_deltanet():
    q, k, v, r2, _ = drawn()
    lam = 0.7
    rule = unfiltered_memory(q, k, v, transition=None, observation_noise=r2, variance=lam, rule="reset")
    isotropic = lam * torch.eye(K).double().expand(2, H, K, K)
    mean = torch.zeros(2, H, K, 5).double()
    for t in range(11):
        event = MemoryEvent(q[:, :, t], k[:, :, t], v[:, :, t], None, torch.zeros(2, H).double(), r2[:, :, t])
        reading = reference.step(mean, isotropic, event)
        mean = reading.mean
        torch.testing.assert_close(rule.readout[:, :, t], reading.readout, **TOLERANCE[torch.float64])
        torch.testing.assert_close(rule.readout_variance[:, :, t], reading.readout_variance, **TOLERANCE[torch.float64])
        torch.testing.assert_close(rule.gain[:, :, t], reading.gain, **TOLERANCE[torch.float64])


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("design", TRANSITION_OF)
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
        torch.testing.assert_close(trace.readout[:, :, t], total, **TOLERANCE[torch.float64])
    assert trace.readout_variance is None


def test_the_design_table_says_which_of_them_have_a_precision():
    with_one = {design for design in DESIGN_MODELS if make_family(design).gives_precision}
    assert with_one == {"deltanet", "gated_deltanet", "kda", "longhorn"}


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


def test_a_model_that_reads_both_ways_is_refused():
    batch, context = packed([4])
    for mixer in (make_bayesian(), make_family("gla")):
        with pytest.raises(UserError, match=r"cannot look ahead, as a bidirectional model needs; choose mixer atten"):
            mixer(*inputs(batch), dataclasses.replace(context, causal=False))


POSITIVE = ("observation_noise", "prior_variance", "process_noise", "noise_groups", "chunk_size")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BayesianMixer(6, 2, BayesianConfig(transition="complex_pairs")), "needs an even head width, got 3"),
        (lambda: BayesianMixer(6, 2, BayesianConfig(noise_groups=2)), "noise_groups is 2, which does not divide"),
        (lambda: BayesianConfig(retention=1.0), "retention is 1.0; give a number > 0.01 and < 1"),
        (lambda: BayesianConfig(transition="identity", retention=0.5), "retention has no effect with transition 'id"),
        (lambda: make_family("deltanett"), "design is 'deltanett'; did you mean 'deltanet'?"),
        (lambda: make_family("deltanet", config=MemoryFamilyConfig(retention=0.5)), "retention has no effect in"),
        (lambda: make_family("gla", config=MemoryFamilyConfig(prior_variance=0.5)), "prior_variance has no effect"),
        *((lambda name=name: BayesianConfig(**{name: 0}), f"{name} is 0") for name in POSITIVE),
        *((lambda name=name: MemoryFamilyConfig(**{name: 0}), f"{name} is 0") for name in (*POSITIVE[:2], "retention")),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_give(make, message):
    with pytest.raises(UserError) as error:
        make()
    assert message in str(error.value)


def test_a_covariance_that_lost_positive_definiteness_is_reported(monkeypatch):
    k = torch.eye(2)[[0, 1, 0]][None, None]
    noise = torch.full((1, 1, 3), 0.1)
    how = {"transition": None, "process_noise": 0 * noise, "observation_noise": noise}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        filter_memory(k, k, k, prior_variance=1.0, **how)
    mean, covariance = reference.prior(k[:, :, 0], k[:, :, 0], torch.tensor([[0.05]]))
    monkeypatch.setattr(reference, "prior", lambda *_: (mean, covariance * torch.tensor([-1.0, 1.0])))
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
