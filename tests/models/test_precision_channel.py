"""Where precision starts, what bounds it, what is remembered of it, and what it does to the scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from recbft.core import (
    SequenceContext,
    ffn_jacobian,
    gelu_slope,
    jacobian_factors,
)
from recbft.datasets import Dataset, SyntheticConfig
from recbft.datasets.synth import generate
from recbft.errors import RunError
from recbft.models import CoreConfig
from recbft.models.precision_channel import LayerPrecision
from recbft.training.bundle import load_trained
from recbft.training.one_run import train
from recbft.training.run_config import load_run_config

# Starting values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("gain", [0.5, 0.8, 0.9])
@pytest.mark.parametrize("initial", ["hybrid", "count"])
def test_an_item_of_full_count_starts_with_about_the_asked_gain(lab, gain, initial):
    model = lab.build("bft", core={"initial_gain": gain, "initial": initial}, hidden_size=64).eval()
    model.set_ramp(1.0)
    batch, seen = lab.packed([[lab.V], [1]]), []  # the item of full count, and one never seen
    model.blocks[0].mixer.register_forward_hook(lambda _, args, output: seen.extend((args[1], output.precision)))
    with torch.no_grad():
        model.encode(batch)
    lam, observed = seen
    found, own = observed / (lam + observed), batch.segment == 0
    torch.testing.assert_close(observed[own], torch.full((1, 64), 64.0))
    assert found[own].mean().item() == pytest.approx(gain, abs=0.015)
    assert found[~own].mean().item() > 0.98, "next to nothing is known of an item never seen"


@pytest.mark.parametrize(
    ("initial", "expected"),
    [
        ("uniform", lambda q, scale: torch.ones_like(q)),
        ("table", lambda q, scale: torch.full_like(q, 1 + math.log(2))),
        ("credibility", lambda q, scale: scale * q + math.log(2)),
        ("count", lambda q, scale: scale * q + math.log(2)),
        ("hybrid", lambda q, scale: scale * q + math.log(2)),
    ],
)
def test_initial_precision_starts_as_its_formula_says(lab, initial, expected):
    model = lab.build("bft", core={"initial": initial}).eval()
    items = torch.arange(1, lab.V + 1)[None]
    found = model.item_precision(items, model.item_embedding(items))[0, :, 0]
    quantiles = torch.tensor([0.0, *np.linspace(0, 1, lab.V - 1)], dtype=torch.float32)
    torch.testing.assert_close(found, expected(quantiles, 2 * (lab.D / 2) / 9), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("initial", ["uniform", "table", "count", "hybrid", "credibility", "empirical_bayes"])
def test_no_item_starts_above_the_largest_precision_nor_below_a_thousandth(lab, initial):
    counts = torch.tensor([0, 0, 1, *[3] * 9, 400])
    for lam_max in (0.25, 100.0):
        model = lab.build("bft", core={"initial": initial, "lam_max": lam_max}, counts=counts)
        items = torch.arange(1, lab.V + 1)
        with torch.no_grad():
            for parameter in model.item_precision.parameters():
                parameter.sub_(30.0)
            found = model.item_precision(items, model.item_embedding(items))
        assert found.min() >= 1e-3 and found.max() <= lam_max


def test_what_is_learned_of_an_item_counts_by_how_often_it_was_seen(lab):
    counts = torch.tensor([0, 0, 100, 300, 10**9])
    model = lab.build("bft", core={"initial": "credibility", "lam_max": 1e6}, counts=counts)
    items = torch.arange(1, 5)
    with torch.no_grad():
        before = model.item_precision(items, model.item_embedding(items))
        for learned in (0.1, 4.0):
            model.item_precision.table.fill_(learned)
            after = model.item_precision(items, model.item_embedding(items))
            expected = 4 * torch.tanh(learned * torch.tensor([0.0, 0.5, 0.75, 1.0]) / 4)
            torch.testing.assert_close((after / before).log()[:, 0], expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        model.item_precision.table.fill_(1e4)
    learned = model.item_precision(items, model.item_embedding(items))
    learned.sum().backward()
    assert torch.isfinite(learned).all() and learned[0] == before[0]
    torch.testing.assert_close((learned / before).log()[1:, 0], torch.full((3,), 4.0))  # 55 times, never beyond


# The precision channel --------------------------------------------------------------------------------


LOW_RANK = {"jacobian_in_evaluation": "low_rank", "jacobian_rank": 3}
CORES = [
    {},
    {"initial": "hybrid", "propagation": "discount"},
    {"initial": "table", "jacobian": "exact", "jacobian_in_evaluation": "exact"},
    {"initial": "credibility", "prior_scale": "per_layer"},
    {"initial": "uniform", "propagation": "decay"},
    {"estimator": "delta", "jacobian": "off", "jacobian_in_evaluation": "off", "lam_max": 10.0},
    {"prior_variance": "running"},
    {"read_out": "temperature"},
]


@pytest.mark.parametrize("core", CORES, ids=str)
def test_running_means_are_updated_in_training_and_in_training_alone(lab, core):
    model = lab.shaken(lab.build(core=core))
    histories = lab.draw_histories(0)
    before = {name: value.clone() for name, value in model.named_buffers()}
    lab.beliefs(model, histories, training=False, remember=True)  # of this model, not of a copy
    assert all(torch.equal(before[name], value) for name, value in model.named_buffers())
    lab.beliefs(model, histories, training=True, remember=True)
    changed = {name.split(".")[-1] for name, value in model.named_buffers() if not torch.equal(before[name], value)}
    expected = {"updates"}
    with_jacobian = model.core.propagation == "jacobian" and model.core.jacobian != "off"
    expected |= {"mean_jacobian"} if with_jacobian else set()
    expected |= {"variance"} if model.core.prior_variance == "running" else set()
    expected |= {"mean_precision"} if model.core.prior_scale == "per_layer" else set()
    expected |= {"mean_log_precision"} if model.core.read_out != "off" else set()
    assert changed == expected


def test_a_scale_per_layer_follows_the_mean_of_the_precision_that_came_in_before():
    core = CoreConfig(prior_scale="per_layer", initial_gain=0.8)
    layer = LayerPrecision(core, hidden_size=4, head_width=2).double().train()
    context = SequenceContext(torch.tensor([[0, 0, -1], [1, 2, 2]]), torch.tensor([[0, 1, 0], [0, 0, 1]]))
    incoming = (torch.rand(3, 2, 3, 4).double() + 0.5).requires_grad_()
    means = [each[context.valid].mean() for each in incoming]
    assert layer.log_kappa == 0
    with torch.no_grad():
        layer.log_kappa.fill_(0.3)
    mean = torch.tensor(1.0).double()
    for number, each in enumerate(incoming):
        found = layer.prior(each, context)
        torch.testing.assert_close(found, math.exp(0.3) * (2 * 2 * 0.2 / 0.8) * each / mean)
        mean = means[0] if number == 0 else 0.99 * mean + 0.01 * means[number]
        torch.testing.assert_close(layer.mean_precision, mean)
        assert not layer.mean_precision.requires_grad
        layer.predict(found, torch.zeros(()))  # an update is over
    extreme = layer.eval().prior(incoming[0] * torch.tensor([1e-9, 1.0, 1.0, 1e9]), context)
    assert (extreme[..., 0] == 1e-3).all() and (extreme[..., 3] == 100).all()


def test_what_is_remembered_of_one_token_is_that_token():
    layer = LayerPrecision(CoreConfig(prior_scale="per_layer"), hidden_size=4, head_width=2).double().train()
    incoming = torch.rand(1, 3, 4).double() + 0.5
    layer.prior(incoming, SequenceContext(torch.tensor([[-1, -1, 0]]), torch.zeros(1, 3).long()))
    torch.testing.assert_close(layer.mean_precision, incoming[0, 2].mean())


@pytest.mark.parametrize("propagation", ["jacobian", "discount", "decay"])
def test_a_layer_adds_little_noise_at_the_start_and_keeps_precision_above_a_thousandth(propagation):
    core = CoreConfig(**({"q_max": 2.0} if propagation == "jacobian" else {"propagation": propagation}))
    layer = LayerPrecision(core, hidden_size=4, head_width=2).double()
    precision = torch.tensor([1e-3, 1.0, 30.0, 1e3]).double()
    start = layer.predict(precision, torch.zeros(()).double())
    noise = 2 * math.log1p(math.exp(-9))
    left = {"jacobian": 1 / (1 / precision + noise), "discount": 0.99 * precision, "decay": precision}[propagation]
    torch.testing.assert_close(start, left.clamp(1e-3, 100))
    (parameter,) = layer.parameters()
    assert parameter.numel() == (4 if propagation == "jacobian" else 1)
    with torch.no_grad():
        parameter.fill_({"jacobian": 1e4, "discount": -20.0, "decay": 20.0}[propagation])
    assert (layer.predict(precision, torch.zeros(()).double())[:3] == 1e-3).all()


@pytest.mark.parametrize("lam_max", [20.0, 400.0])
@pytest.mark.parametrize("propagation", ["jacobian", "discount", "decay"])
def test_no_layer_works_with_or_predicts_more_than_the_largest_precision_asked_for(propagation, lam_max):
    core = CoreConfig(propagation=propagation, lam_max=lam_max, prior_scale="per_layer")
    layer = LayerPrecision(core, hidden_size=4, head_width=2).double().eval()
    more = torch.full((1, 1, 4), 2 * lam_max).double()
    assert (layer.predict(more, torch.zeros(()).double()) == lam_max).all()
    with torch.no_grad():
        layer.log_kappa.fill_(10.0)
    context = SequenceContext(torch.zeros(1, 1).long(), torch.zeros(1, 1).long())
    assert (layer.prior(more, context) == lam_max).all()


@pytest.mark.parametrize(
    ("is_last", "jacobian", "in_evaluation", "training", "evaluating"),
    [
        (False, "exact", "running_mean", "each", "mean"),
        (False, "low_rank", "low_rank", "each", "each"),
        (False, "running_mean", "exact", "mean", "each"),
        (False, "exact", "off", "each", "none"),
        (False, "off", "off", "none", "none"),
        (True, "exact", "exact", "mean", "each"),  # no score depends on what the last layer predicts
        (True, "low_rank", "running_mean", "mean", "mean"),
        (True, "off", "exact", "none", "each"),
    ],
)
def test_each_phase_has_the_jacobian_that_was_asked_for_it(is_last, jacobian, in_evaluation, training, evaluating):
    core = CoreConfig(jacobian=jacobian, jacobian_in_evaluation=in_evaluation)
    layer = LayerPrecision(core, hidden_size=4, head_width=2, is_last=is_last).double()
    layer.mean_jacobian.fill_(0.7)
    context = SequenceContext(torch.zeros(1, 3).long(), torch.arange(3)[None])
    a, w1, w2 = torch.randn(1, 3, 5).double(), torch.randn(5, 4).double(), torch.randn(4, 5).double()
    each = ffn_jacobian(a, w1, w2)  # of 4 coordinates, so that rank 16 is exact
    expected = {"each": each, "mean": torch.full((4,), 0.7).double(), "none": torch.zeros(()).double()}
    for phase, asked in ((True, training), (False, evaluating)):
        layer.train(phase)
        wanted = asked == "each" or (phase and asked == "mean")  # in training the mean is made of it
        assert layer.needs_jacobian == wanted
        layer.mean_jacobian.fill_(0.7)
        torch.testing.assert_close(layer.activate(a, w1, w2, context)[1], expected[asked])
        layer.mean_jacobian.fill_(0.7)
        torch.testing.assert_close(layer.take(each if wanted else None, context), expected[asked])


@pytest.mark.parametrize(("jacobian", "is_last"), [("exact", False), ("low_rank", False), ("low_rank", True)])
def test_a_low_rank_is_had_where_it_was_asked_for_whatever_the_other_phase_has(jacobian, is_last):
    core = CoreConfig(jacobian=jacobian, jacobian_in_evaluation="low_rank", jacobian_rank=1)
    layer = LayerPrecision(core, hidden_size=4, head_width=2, is_last=is_last).double()
    context = SequenceContext(torch.tensor([[0, 0, -1]]), torch.arange(3)[None])
    a, w1, w2 = torch.randn(1, 3, 5).double(), torch.randn(5, 4).double(), torch.randn(4, 5).double()
    left, right = jacobian_factors(w1, w2, 1)
    low = gelu_slope(a) @ right @ left.T
    torch.testing.assert_close(layer.eval().activate(a, w1, w2, context)[1], low)
    layer.train().activate(a, w1, w2, context)
    in_training = low if jacobian == "low_rank" else ffn_jacobian(a, w1, w2)
    torch.testing.assert_close(layer.mean_jacobian, in_training[0, :2].mean(dim=0))  # of real tokens


@pytest.mark.parametrize("jacobian", ["exact", "low_rank"])
@pytest.mark.parametrize("detach", [False, True])
def test_the_slope_passes_gradients_to_what_it_is_taken_at_unless_detached_and_none_to_the_weights(jacobian, detach):
    core = CoreConfig(jacobian=jacobian, jacobian_detach=detach)
    layer = LayerPrecision(core, hidden_size=4, head_width=2).double().train()
    context = SequenceContext(torch.zeros(1, 3).long(), torch.arange(3)[None])
    a, w1, w2 = (torch.randn(size).double().requires_grad_() for size in ((1, 3, 5), (5, 4), (4, 5)))
    own = ffn_jacobian(a, w1, w2)
    for found in (
        layer.activate(a, w1, w2, context)[1],
        layer.take(ffn_jacobian(a, w1.detach(), w2.detach()), context),
    ):
        torch.testing.assert_close(found, own)
        assert found.requires_grad == (not detach)
        if not detach:
            gradients = torch.autograd.grad(found.square().sum(), (a, w1, w2), allow_unused=True)
            expected = torch.autograd.grad(own.square().sum(), a, retain_graph=True)[0]
            torch.testing.assert_close(gradients[0], expected)
            assert gradients[1] is None and gradients[2] is None


def test_factors_of_the_jacobian_are_brought_up_to_date_where_they_are():
    layer = LayerPrecision(CoreConfig(jacobian_in_evaluation="low_rank"), hidden_size=4, head_width=2).double().eval()
    context = SequenceContext(torch.zeros(1, 3).long(), torch.arange(3)[None])
    places = set()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        a, w1, w2 = (torch.randn(*size, generator=generator).double() for size in ((1, 3, 5), (5, 4), (4, 5)))
        layer.refresh(w1, w2)
        torch.testing.assert_close(layer.activate(a, w1, w2, context)[1], ffn_jacobian(a, w1, w2))
        places.add(tuple(factor.data_ptr() for factor in layer.factors))  # where a captured step reads them
    assert len(places) == 1


def test_where_only_the_mean_jacobian_is_wanted_every_fourth_row_makes_it():
    layer = LayerPrecision(CoreConfig(jacobian="exact"), hidden_size=4, head_width=2, is_last=True).double().train()
    segment = torch.tensor([[0, 0, -1], *([[1, 1, 1]] * 5)])
    context = SequenceContext(segment, torch.arange(3).expand(6, 3))
    w1, w2 = torch.randn(5, 4).double(), torch.randn(4, 5).double()
    mean = torch.zeros(4).double()
    for number in range(3):
        a = torch.randn(6, 3, 5).double()
        hidden, found = layer.activate(a, w1, w2, context)
        torch.testing.assert_close(hidden, torch.nn.functional.gelu(a))
        torch.testing.assert_close(found, mean)  # as it stood before this batch
        new = ffn_jacobian(torch.cat([a[0, :2], a[4]]), w1, w2).mean(dim=0)
        mean = new if number == 0 else 0.99 * mean + 0.01 * new
        torch.testing.assert_close(layer.mean_jacobian, mean)
        layer.predict(torch.ones(6, 3, 4).double(), found)


def test_kept_factors_of_the_jacobian_go_with_the_weights_they_are_of(lab):
    model, other = (lab.build(core=LOW_RANK, seed=seed) for seed in (0, 1))
    model.refresh()
    model.double().train().encode(lab.packed([[1, 2, 3]]))  # of another type
    with torch.inference_mode():
        model.eval().encode(lab.packed([[1, 2, 3]]))  # factors made here serve in training
    states = model.train().encode(lab.packed([[1, 2, 3]]))
    states.mean.sum().backward()
    other = other.double()
    other.refresh()
    other.load_state_dict(model.state_dict())
    one, two = (lab.beliefs(each, [[1, 2, 3, 4]])[0] for each in (model, other))
    lab.assert_same(one, two)


def test_weights_that_are_too_large_for_a_jacobian_are_told(lab):
    model = lab.build(core=LOW_RANK)
    with torch.no_grad():
        for weight in (model.blocks[0].inner.weight, model.blocks[0].outer.weight):
            weight.mul_(1e30 / weight.abs().max())  # finite, and their products are not
    with pytest.raises(RunError, match=r"feed-forward weights are too large, up to 1e\+30, .* lower learning_rate"):
        model.refresh()


def test_credibility_finds_which_items_are_noise(tmp_path):
    """Where the reliability of items is known, the precision that is learned is that reliability."""
    planted = generate(
        SyntheticConfig(
            num_users=800,
            num_items=200,
            item_reliabilities=(1.0, 0.2),
            item_shares=(0.5, 0.5),
            user_reliabilities=(1.0,),
            user_shares=(1.0,),
            seed=0,
        )
    )
    dataset = Dataset.from_frame(planted.events, name="planted", time="timestamp")
    settings = ["hidden_size=32", "batch_size=32", "dropout=0.3", "epochs=12", "training.threads=1"]
    core = ["core.initial=credibility", "core.prior_events=30"]
    config = load_run_config(None, [*settings, *core], model="sasrec", arm="bft", seed=0)
    *_, model = load_trained(train(config, tmp_path / "run", dataset=dataset).path)
    items = torch.arange(1, dataset.num_items + 1)
    with torch.no_grad():
        learned = model.item_precision(items, model.item_embedding(items))[:, 0].numpy()
    truth = planted.items.set_index("item_id").loc[dataset.decode(items.numpy()), "reliability"].to_numpy()
    assert stats.spearmanr(learned, truth).statistic > 0.5  # .87 at most, since the truth has two levels
    noise, taste = (np.exp(np.log(learned[truth == level]).mean()) for level in (0.2, 1.0))
    assert taste > 4 * noise
