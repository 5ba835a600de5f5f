"""Robust filter attention as a mixer: its parts and switches, isolation, starts, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from recbft.config.fields import from_dict
from recbft.core import SequenceContext
from recbft.errors import UserError
from recbft.kernels.robust_filter import Variant, filtered, read_clock
from recbft.mixers.head_dynamics import ConfidenceGate, RobustFilterConfig, positive, raw_of
from recbft.mixers.rfa import RobustFilterAttention, sample_state
from tests.mixers.histories import D, H, K, inputs, packed

OUTSIDE_CONFIG = ("coupled", "output_projection", "dropout", "gives_precision", "lam_max")


def make(*, training=False, seed=0, **settings):
    torch.manual_seed(seed)
    own = {name: settings.pop(name) for name in OUTSIDE_CONFIG if name in settings}
    return RobustFilterAttention(D, H, RobustFilterConfig(**settings), **own).double().train(training)


@pytest.mark.parametrize("settings", [{"kernel": "gaussian"}, {"multiplicative": "off"}, {"rotate": "off"}], ids=str)
def test_attention_reports_what_is_left_of_each_key_that_may_be_read(settings):
    mixer = make(**settings)
    batch, context = packed([5, 3, 4])
    (x, precision), (source, _) = inputs(batch), inputs(batch, seed=1)
    weights = mixer.attention(x, precision, context, ramp=0.7, source=source)
    assert weights.shape == (*batch.items.shape[:1], H, *2 * batch.items.shape[1:])
    assert (weights >= 0).all() and (weights.sum(-1) <= 1 + 1e-12).all()
    assert not weights.masked_fill(context.allowed[:, None], 0.0).any()
    if settings.get("rotate") == "off":  # then nothing but the weights stands between the values and the estimate
        v = torch.view_as_complex(mixer.value(source).unflatten(-1, (H, K, 2))).transpose(1, 2)
        state = torch.view_as_real((weights.to(v.dtype) @ v).transpose(1, 2)).flatten(2)
        expected = state @ torch.block_diag(*mixer.read).T
        found = mixer(x, precision, context, ramp=0.7, source=source).innovation
        torch.testing.assert_close(found, expected)


# --- starts


def test_it_starts_integrative_nearly_gaussian_and_as_the_real_part_of_the_state():
    mixer = make()
    dynamics = mixer.sde()
    assert (dynamics.key_noise > dynamics.process).all()
    starts = {"process": (0.25, 0.001), "key_noise": (0.5, 0.5), "query_noise": (0.25, 0.25)}
    still = make(undamped_heads=1).sde()  # its last head does not decay
    for name, start in starts.items():
        torch.testing.assert_close(getattr(still, name), torch.tensor(start).double(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(dynamics.dof, torch.full((H,), 4.0 * K).double())
    torch.testing.assert_close(dynamics.temperature, torch.ones(H).double())
    batch, context = packed([1])
    x, _ = inputs(batch)
    value = mixer.value(x).view(1, 1, H, K, 2)
    torch.testing.assert_close(mixer(x, None, context).innovation, value[..., 0].flatten(2))


def test_frequencies_stand_in_pairs_and_bands_cut_one_range():
    whole, bands = (RobustFilterAttention(32, 4, coupled=coupled).sde() for coupled in (False, True))
    for frequency in (whole.frequency, bands.frequency):
        assert torch.equal(frequency[:, 0::2], -frequency[:, 1::2])
    assert (whole.frequency == whole.frequency[0]).all() and whole.frequency[0, 0] == 1
    one_range = bands.frequency[:, 0::2].flatten()
    torch.testing.assert_close(one_range, 10_000.0 ** (-torch.arange(16) / 16))
    expected = 0.05 * bands.frequency.amax(dim=-1)
    expected[3] = 0
    torch.testing.assert_close(bands.decay, expected)
    torch.testing.assert_close(whole.decay, expected)  # the same spread to start from


def test_only_uncoupled_decays_are_learned_and_heads_without_decay_stay_so():
    assert not any("decay" in name for name, _ in make(coupled=True).named_parameters())
    mixer = make(undamped_heads=1)
    with torch.no_grad():
        mixer.sde.decay.raw.add_(1.0)
    decay = mixer.sde().decay
    assert decay[0] > 0.05 and decay[1] == 0
    assert make(undamped_heads=2).sde.decay.raw is None


def test_a_flat_prior_has_one_variance_at_every_lag():
    mixer = make(precision_prior="flat", undamped_heads=1)
    dynamics = mixer.sde()
    assert torch.equal(dynamics.process, dynamics.key_noise * (dynamics.decay > 0))
    batch, context = packed([5])
    x, _ = inputs(batch)
    with torch.no_grad():
        for part in (mixer.query, mixer.key):
            part.weight.zero_()
            part.bias.zero_()
    weights = mixer.attention(x, None, context)[0, 1]  # the head without decay: no misfit, no prior
    torch.testing.assert_close(weights, torch.ones(5, 5).double().tril() / torch.arange(1, 6).double()[:, None])


def test_one_key_that_fits_exactly_starts_with_the_largest_reml_precision():
    mixer = make()
    with torch.no_grad():
        for part in (mixer.query, mixer.key):
            part.weight.zero_()
            part.bias.zero_()
    batch, context = packed([3])
    precision = mixer(inputs(batch)[0], None, context).precision
    torch.testing.assert_close(precision[0, 0], torch.full((D,), 2.0 * K).double(), rtol=1e-5, atol=0)
    assert (precision[0].diff(dim=0) > 0).all(), "every further key adds evidence"


def test_evidence_passes_an_output_projection_by_its_squared_weights():
    mixer = make(output_projection=True)
    batch, context = packed([4])
    x, lam = inputs(batch)
    found = mixer(x, lam, context).precision
    q, k, v = (
        torch.view_as_complex(f(x).unflatten(-1, (H, K, 2))).transpose(1, 2)
        for f in (mixer.query, mixer.key, mixer.value)
    )
    _, evidence = filtered(q, k, v, context, mixer.sde(), read_clock(context, dtype=x.dtype), Variant())
    per_head = (evidence * mixer.precision.log_scale.exp()[:, None]).clamp(max=100)  # (1, H, T)
    variance = (1 / per_head).transpose(1, 2).repeat_interleave(2 * K, dim=-1)
    torch.testing.assert_close(found, (1 / (variance @ mixer.out.weight.square().T)).clamp(max=100), rtol=1e-8, atol=0)


# --- parts


def test_precision_of_keys_weighs_them_by_the_ramp_and_can_be_ignored():
    batch, context = packed([5])
    x, precision = inputs(batch)
    mixer, deaf = make(), make(key_precision="off")
    deaf.load_state_dict(mixer.state_dict())
    plain = mixer(x, None, context).innovation
    assert not torch.allclose(mixer(x, precision, context).innovation, plain)
    torch.testing.assert_close(mixer(x, precision, context, ramp=0.0).innovation, plain)
    assert torch.equal(deaf(x, precision, context).innovation, plain)
    weighed, plain = (mixer.attention(x, lam, context)[0, :, -1] for lam in (precision, None))
    ratio = weighed / plain / precision[0].mean(-1)
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio))


def test_a_gate_that_is_shut_passes_the_tokens_own_value_and_an_open_one_the_estimate():
    batch, context = packed([5])
    x, _ = inputs(batch)
    plain, mixer = make(), make(confidence_gate=True)
    mixer.load_state_dict(plain.state_dict(), strict=False)
    estimate = plain(x, None, context).innovation
    assert torch.allclose(mixer(x, None, context).innovation, estimate, atol=0.05), "the gate starts open"
    with torch.no_grad():
        mixer.gate.log_prior.fill_(-60.0)
    torch.testing.assert_close(mixer(x, None, context).innovation, estimate)
    with torch.no_grad():
        mixer.gate.log_prior.fill_(60.0)
    own = mixer.value(x).view(1, 5, H, K, 2)[..., 0].flatten(2)
    torch.testing.assert_close(mixer(x, None, context).innovation, own)


def test_a_gate_starts_open_and_leans_to_the_estimate_by_the_log_of_its_evidence():
    gate, evidence = ConfidenceGate(1), torch.tensor([[[0.01, 1.0, 40.0]]])
    value, own = torch.ones(1, 1, 3, 2), torch.zeros(1, 1, 3, 2)
    with torch.no_grad():
        found = gate(value, own, evidence, torch.ones(1, 3, dtype=torch.bool))
    expected = torch.sigmoid(0.1 * evidence.log() + 5)
    torch.testing.assert_close(found, expected[..., None].expand_as(found), rtol=1e-6, atol=0)


def test_a_gate_shuts_where_evidence_underflows_and_leaves_padding_alone():
    gate = ConfidenceGate(1)
    value, own = torch.ones(1, 1, 4, 2), torch.zeros(1, 1, 4, 2)
    evidence = torch.tensor([[[1.0, 1e-38, 0.0, 0.0]]])
    with torch.no_grad():
        gate.raw_scale.copy_(raw_of(torch.ones(1)))
        found = gate(value, own, evidence, torch.tensor([[True, True, True, False]]))[0, 0, :, 0]
    assert found[0] > 0.9 and found[1] < 1e-6 and found[2] < 1e-6 and found[3] == 1


def test_the_state_is_drawn_in_training_alone_and_with_the_variance_of_its_distribution():
    batch, context = packed([4])
    x, _ = inputs(batch)
    mixer = make(latent_sampling=True)
    assert torch.equal(mixer(x, None, context).innovation, make()(x, None, context).innovation)
    mixer.train()
    one, two = (mixer(x, None, context).innovation for _ in range(2))
    assert not torch.allclose(one, two)
    value, evidence = (
        torch.zeros(1, H, 2, 20_000, dtype=torch.complex128),
        torch.tensor([[[2.0, 0.0], [0.5, 8.0]]]).double(),
    )
    noise, generator = torch.tensor([0.3, 0.1]).double(), torch.Generator().manual_seed(0)
    drawn = sample_state(value, evidence, noise, generator=generator)
    variance = drawn.abs().square().mean(-1)[0]
    expected = torch.tensor([[1 / 2 + 0.3, 1e6], [1 / 0.5 + 0.1, 1 / 8 + 0.1]]).double()
    torch.testing.assert_close(variance, expected, rtol=0.05, atol=0)
    padded = sample_state(value, evidence, noise, valid=torch.tensor([[True, False]]))
    assert (padded[:, :, 1] == 0).all() and (padded[:, :, 0] != 0).any()


@pytest.mark.parametrize("known", [0.0, 1e-39, 1e-30, 1e-10])
def test_a_draw_of_a_state_that_hardly_anything_is_known_of_is_finite(known):
    evidence = torch.full((1, 1, 1), known, requires_grad=True)
    noise = torch.ones(1, requires_grad=True)
    sample_state(torch.zeros(1, 1, 1, 2, dtype=torch.complex64), evidence, noise).abs().sum().backward()
    assert evidence.grad.isfinite().all() and noise.grad.isfinite().all()


def test_real_time_with_equal_gaps_is_position_and_a_longer_pause_decays_more():
    batch, context = packed([6])
    x, _ = inputs(batch)
    equal = SequenceContext(context.segment, context.position, 86_400 * context.position + 10**9)
    by_place, by_time = make(), make(time=True)
    by_time.load_state_dict(by_place.state_dict())
    torch.testing.assert_close(by_time(x, None, equal), by_place(x, None, context))
    learning = make(time=True, learn_time_unit=True, time_unit=50.0)
    learning.load_state_dict(by_place.state_dict(), strict=False)
    often = SequenceContext(context.segment, context.position, 50 * context.position)
    torch.testing.assert_close(learning(x, None, often), by_place(x, None, context), rtol=1e-5, atol=1e-6)
    paused = equal.time.clone()
    paused[:, 3:] += 86_400 * 50
    later = by_time.attention(x, None, SequenceContext(context.segment, context.position, paused))
    assert (later[0, 0, 3:, :3] < by_time.attention(x, None, equal)[0, 0, 3:, :3]).all()


# --- refusals


def test_odd_widths_and_too_many_undamped_heads_are_refused():
    with pytest.raises(
        UserError, match="3 complex coordinates per head do not make pairs of frequencies; give an even"
    ):
        RobustFilterAttention(6, 2)
    with pytest.raises(UserError, match="undamped_heads is 3, and there are 2 heads"):
        make(undamped_heads=3)
    with pytest.raises(UserError, match="damping has no effect with 2 undamped_heads of 2 heads; leave it out"):
        make(undamped_heads=2, damping=0.1)


@pytest.mark.parametrize("settings", [{"damping": 1e-6}, {"frequency_base": 1e12}])
def test_a_learned_decay_that_starts_at_nothing_is_refused_and_a_fixed_one_is_not(settings):
    with pytest.raises(UserError, match=r"a learned one must start above 1e-06; raise damping, lower frequency_base"):
        make(undamped_heads=0, **settings)
    assert torch.isfinite(make(coupled=True, undamped_heads=0, **settings).sde().decay).all()


def test_what_softplus_makes_of_a_start_is_the_start():
    starts = torch.tensor([2e-6, 1e-3, 1.0, 30.0, 800.0, 1e6])
    torch.testing.assert_close(positive(raw_of(starts)), starts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"latent_width": 1}, "latent_width is 1; give a whole number >= 2"),
        ({"frequency_base": 1.0}, "frequency_base is 1.0; give a number > 1"),
        ({"undamped_heads": -1}, "undamped_heads is -1"),
        ({"damping": 0.0}, "damping is 0.0"),
        ({"horizon": -1.0}, "horizon is -1.0; give a number >= 0"),
        ({"time_unit": 0.0, "time": True}, "time_unit is 0.0"),
        ({"time_unit": 3600.0}, "time_unit has no effect without real times; leave it out or set time: true"),
        ({"learn_time_unit": True}, "learn_time_unit has no effect without real times"),
        ({"rotate": "off", "rotate_values": "off"}, "rotate_values has no effect with rotate off"),
    ],
    ids=str,
)
def test_settings_out_of_range_or_without_effect_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        from_dict(RobustFilterConfig, settings)
