"""What every mixer owes the rest of the house, over the registry: shape, causality, isolation, gradients."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

from recbft.core import SequenceContext
from recbft.mixers import MIXERS
from recbft.mixers.bayesian import BayesianConfig
from recbft.mixers.boosted import BoostedConfig
from recbft.mixers.head_dynamics import RobustFilterConfig
from recbft.mixers.memory_family import MemoryFamilyConfig
from recbft.mixers.positional import PositionalConfig
from recbft.mixers.regime import RegimeConfig
from recbft.mixers.spectral import SpectralConfig
from tests.mixers.histories import D, H, inputs, packed
from tests.tolerances import TOLERANCE

# Each mixer with settings of its own; a new mixer adds its lines here.
SOFTMAX = [{}, {"estimator": "reml", "dropout": 0.5, "output_projection": True}]
OWN = [{}, {"gives_precision": True}, {"gives_precision": True, "output_projection": True}]
SETTINGS = {
    "attention": [
        *SOFTMAX,
        {"estimator": "reml", "recency_decay": 0.9},
        {"estimator": "reml", "running": True, "prior_variance": 1.0},
        {"estimator": "reml_naive"},
        {"recency_decay": 0.9, "dropout": 0.5},
        {"estimator": "sandwich", "recency_decay": 0.9},
        {"estimator": "delta", "output_projection": True},
        {"estimator": "design_effect", "dropout": 0.5},
        {"estimator": "reml", "kriging": "per_dimension", "recency_decay": 0.9},
        {"estimator": "delta", "kriging": "per_dimension", "dropout": 0.5},
    ],
    "pointwise": [
        {},
        {"estimator": "sandwich", "recency_decay": 0.9, "output_projection": True, "length": 6},
        {"output_projection": True, "dropout": 0.5},
        {"estimator": "sandwich", "running": True, "length": 6},
        {"estimator": "sandwich", "centre": "innovation", "time_bias": True, "length": 6},
    ],
    **{name: SOFTMAX for name in ("rope", "alibi", "decayed_rope", "sc_rope", "twicing")},
    "boosted": [
        *SOFTMAX,
        {"estimator": "reml", "config": BoostedConfig(rounds=3, gate="scalar"), "recency_decay": 0.9},
    ],
    "regime": [
        {**settings, "config": RegimeConfig(regimes=3, warm_in_steps=0, type2=type2), "length": 6}
        for settings, type2 in zip(SOFTMAX, (True, False), strict=True)
    ],
    "spectral": [
        *({**settings, "length": 6} for settings in SOFTMAX),
        {"estimator": "reml", "config": SpectralConfig(share=0.4, frequencies=1), "recency_decay": 0.9, "length": 5},
    ],
    "rfa": [
        *OWN[:2],
        {"gives_precision": True, "config": RobustFilterConfig(precision_prior="flat", undamped_heads=1)},
        {"gives_precision": True, "config": RobustFilterConfig(multiplicative="off", rotate_values="off")},
        {"gives_precision": True, "dropout": 0.4, "config": RobustFilterConfig(rotate="off")},
        {"config": RobustFilterConfig(confidence_gate=True, horizon=2.0, latent_width=6)},
        {"gives_precision": True, "config": RobustFilterConfig(time=True, learn_time_unit=True, time_unit=50.0)},
        {"output_projection": True, "config": RobustFilterConfig(latent_sampling=True, latent_width=2)},
    ],
    "sc_rfa": [{"gives_precision": True, "config": RobustFilterConfig(kernel="gaussian")}, OWN[2]],
    "bayesian": [
        *OWN,
        {"gives_precision": True, "config": BayesianConfig(transition="identity")},
        {"gives_precision": True, "config": BayesianConfig(transition="scalar", noise_groups=2)},
        {"gives_precision": True, "config": BayesianConfig(transition="complex_pairs", noise_groups=4, chunk_size=3)},
    ],
    **{name: OWN[1:2] for name in ("deltanet", "gated_deltanet", "kda")},
    "longhorn": OWN,
    **{name: [{}] for name in ("linear_attention", "retnet", "mamba2")},
    "gla": [{"output_projection": True}],
}
CASES = [(name, settings) for name, all_settings in SETTINGS.items() for settings in all_settings]
over_mixers = pytest.mark.parametrize(("name", "settings"), CASES, ids=lambda value: str(value))
BOTH_WAYS = [case for case in CASES if MIXERS[case[0]].both_ways]


def test_every_mixer_is_held_to_the_contract():
    assert set(SETTINGS) == set(MIXERS)


def make(name, settings, *, training=False, seed=0, converted=True):
    torch.manual_seed(seed)
    spec = MIXERS[name]
    plain = {} if spec.precision in ("softmax", "silu") else {"gives_precision": False}
    mixer = spec.kind(D, H, **{**plain, **spec.fixed, **settings}).train(training)
    return mixer.double() if converted else mixer


def gives_precision(settings):
    return "estimator" in settings or settings.get("gives_precision", False)


def observe(mixer, batch, context, x, precision, ramp=0.7):
    """Innovation and precision of every real token, by item number, with the same draws each time."""
    torch.manual_seed(1)
    innovation, found = mixer(x, precision, context, ramp=ramp)
    real = batch.segment >= 0
    order = batch.items[real].argsort()
    return innovation[real][order], None if found is None else found[real][order]


@over_mixers
def test_an_observation_has_the_shape_of_the_input_and_a_precision_where_one_is_estimated(name, settings):
    batch, context = packed([5, 3, 1, 4])
    mixer = make(name, settings)
    innovation, precision = mixer(*inputs(batch), context)
    assert innovation.shape == (*batch.items.shape, D) and innovation.dtype == torch.float64
    assert (precision is not None) == gives_precision(settings) == mixer.gives_precision
    if precision is not None:
        assert precision.shape == innovation.shape
        real = batch.segment >= 0
        assert (precision[real] > 0).all() and (precision <= 100).all()
        assert not precision[~real].any(), "padding reads nothing"


@over_mixers
@pytest.mark.parametrize("training", [False, True])
def test_a_batch_without_histories_is_observed_without_a_word(name, settings, training):
    none = torch.zeros(0, 5, dtype=torch.int64)
    mixer = make(name, settings, training=training)
    x, precision = torch.zeros(2, 0, 5, D, dtype=torch.float64, requires_grad=True)
    innovation, found = mixer(x, precision.detach(), SequenceContext(none, none, none))
    assert innovation.shape == x.shape and (found is None or found.shape == x.shape)
    innovation.sum().backward()
    assert all(buffer.isfinite().all() for buffer in mixer.buffers())


@over_mixers
def test_a_mixer_made_where_float64_is_the_default_is_the_one_made_in_float32(name, settings):
    batch, context = packed([5, 3, 1, 4])
    expected = make(name, settings)
    torch.set_default_dtype(torch.float64)
    try:
        mixer = make(name, settings, converted=False)
        mixer.load_state_dict(expected.state_dict())
        found = mixer(*inputs(batch), context)
    finally:
        torch.set_default_dtype(torch.float32)
    for one, two in zip(found, expected(*inputs(batch), context), strict=True):
        if two is not None:
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


@over_mixers
@pytest.mark.parametrize("training", [False, True])
def test_a_later_token_changes_nothing_before_it(name, settings, training):
    mixer = make(name, settings, training=training)
    batch, context = packed([6, 4, 2])
    x, precision = inputs(batch)
    changed_x, changed_precision = x.clone(), precision.clone()
    late = (batch.segment == 0) & (batch.position >= 3)
    changed_x[late], changed_precision[late] = 50.0, 0.01
    other = copy.deepcopy(mixer)  # running means move in training
    one = observe(mixer, batch, context, x, precision)
    two = observe(other, batch, context, changed_x, changed_precision)
    for before, after in zip(one, two, strict=True):
        if before is not None:
            # The mean that centres the values of a row is over all its tokens: it moves residuals by rounding alone.
            torch.testing.assert_close(before[:3], after[:3], **TOLERANCE[torch.float64])
            torch.testing.assert_close(before[6:], after[6:], **TOLERANCE[torch.float64])
            assert not torch.allclose(before[3:6], after[3:6])


@pytest.mark.parametrize(
    ("name", "settings", "causal"), [(*case, True) for case in CASES] + [(*case, False) for case in BOTH_WAYS], ids=str
)
def test_a_history_is_observed_alike_alone_packed_and_padded(name, settings, causal):
    mixer = make(name, settings)
    lengths = [6, 4, 2, 1, 5]
    batch, context = packed(lengths, causal=causal)
    whole = observe(mixer, batch, context, *inputs(batch))
    first = 0
    for length in lengths:
        alone, context = packed([length], causal=causal)
        alone = alone._replace(items=alone.items + first)
        for part, one in zip(observe(mixer, alone, context, *inputs(alone)), whole, strict=True):
            if one is not None:
                torch.testing.assert_close(part, one[first : first + length], **TOLERANCE[torch.float64])
        first += length


@over_mixers
def test_every_parameter_gets_a_finite_gradient_and_a_history_none_from_another(name, settings):
    mixer = make(name, settings, training=True)
    batch, context = packed([6, 4, 2])
    x, precision = (value.requires_grad_() for value in inputs(batch))
    innovation, found = mixer(x, precision, context, ramp=0.7)
    mine = batch.segment == 1
    total = innovation[mine].square().sum() + (0 if found is None else found[mine].log().sum())
    total.backward()
    for parameter_name, parameter in mixer.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), parameter_name
        # the softmax does not see a constant added to all of a query's logits
        assert parameter.grad.any() or parameter_name.endswith("key.bias"), parameter_name
    for gradient in (x.grad, precision.grad):
        assert torch.isfinite(gradient).all() and gradient[mine].any() and not gradient[~mine].any()


@over_mixers
def test_weights_survive_a_state_dict(name, settings):
    mixer = make(name, settings)
    other = make(name, settings, seed=9)
    other.load_state_dict(mixer.state_dict())
    batch, context = packed([3, 2])
    for one, two in zip(mixer(*inputs(batch), context), other(*inputs(batch), context), strict=True):
        assert (one is None and two is None) or torch.equal(one, two)


@over_mixers
def test_keys_and_values_may_be_read_elsewhere_and_weights_tell_which_keys_are_read(name, settings):
    mixer = make(name, settings)
    batch, context = packed([5, 2])
    (x, precision), (source, _) = inputs(batch), inputs(batch, seed=1)
    plain, elsewhere = (mixer(x, precision, context, source=read).innovation for read in (None, source))
    assert not torch.allclose(plain, elsewhere)
    torch.testing.assert_close(mixer(x, precision, context, source=x).innovation, plain, **TOLERANCE[torch.float64])
    weights = mixer.attention(x, precision, context, source=source)
    if weights is not None:
        assert weights.shape == (len(x), D if mixer.by_coordinate else mixer.n_heads, *2 * x.shape[1:2])
        assert not weights[:, :, ~context.allowed[0]].any()
        assert torch.equal(weights, mixer.attention(x, precision, context, ramp=1.0, source=source))
        assert not torch.allclose(weights, mixer.attention(x, precision, context))


@over_mixers
def test_unless_told_otherwise_the_warm_up_is_over(name, settings):
    mixer = make(name, settings)
    batch, context = packed([4, 2])
    given = *inputs(batch), context
    for one, two in zip(mixer(*given), mixer(*given, ramp=1.0), strict=True):
        assert (one is None and two is None) or torch.equal(one, two)
    assert not torch.equal(mixer(*given)[0], mixer(*given, ramp=0.0)[0])


@over_mixers
def test_single_precision_stays_so_and_observes_what_double_precision_does(name, settings):
    batch, context = packed([5, 3, 1, 4])
    exact, single = make(name, settings), make(name, settings, converted=False)
    found = single(*(x.float() for x in inputs(batch)), context, ramp=0.7)
    for one, two in zip(found, exact(*inputs(batch), context, ramp=0.7), strict=True):
        if one is not None:
            assert one.dtype == torch.float32
            torch.testing.assert_close(one.double(), two, **TOLERANCE[torch.float32])
    kept = [value for value in (*single.parameters(), *single.buffers()) if value.is_floating_point()]
    assert {value.dtype for value in kept} == {torch.float32}


@over_mixers
def test_nothing_is_saved_but_what_is_learned_and_what_training_remembers(name, settings):
    mixer = make(name, settings)
    learned = {key for key, _ in mixer.named_parameters()}
    remembered = {
        "alignment", "bias_mean", "bias_variance", "batches", "entropy", "saturated", "pressure", "drift",
        "temperature_before",
    }  # fmt: skip
    unit = {"unit.variance", "unit.updates"} if settings.get("running") else set()
    assert set(mixer.state_dict()) - learned == (remembered if name == "regime" else unit)


@pytest.mark.parametrize(
    "config",
    [
        RobustFilterConfig(
            kernel="student", precision_prior="on", multiplicative="on", rotate="on", rotate_values="on",
            key_precision="on", latent_width=None, frequency_base=10_000.0, damping=0.05, undamped_heads=None,
            time=False, time_unit=86_400.0, learn_time_unit=False, horizon=0.0, confidence_gate=False,
            latent_sampling=False,
        ),
        PositionalConfig(frequency_base=10_000.0, damping=0.05, undamped_heads=None),
        BayesianConfig(
            transition="diagonal", retention=0.98, noise_groups=1, process_noise=0.01, observation_noise=0.1,
            prior_variance=None, key_precision="on", chunk_size=None,
        ),
        MemoryFamilyConfig(observation_noise=0.1, retention=0.98, prior_variance=None, key_precision="on"),
        BoostedConfig(rounds=2, gate="mlp"),
        RegimeConfig(
            regimes=4, width=16, type2=False, alignment_temperature=0.7, sweeps=8, temperature=1.0, warm_in_steps=1200,
            distance_mix=0.1, residual_gate=True, value_gate=True, entropy_floor=0.5, entropy_weight=0.02,
        ),
    ],
    ids=lambda config: type(config).__name__,
)  # fmt: skip
def test_what_runs_rely_on_without_asking_stays_as_it_is(config):
    assert type(config)() == config


def test_a_mixer_that_is_not_told_bounds_precision_by_a_hundred_and_reads_fifty_tokens():
    parameters = [p for spec in MIXERS.values() for p in inspect.signature(spec.kind).parameters.values()]
    told = {(p.name, p.default) for p in parameters if p.name in ("lam_max", "length", "dropout", "prior_dof")}
    assert told == {("lam_max", 100.0), ("length", 50), ("dropout", 0.0), ("prior_dof", 1.0)}
