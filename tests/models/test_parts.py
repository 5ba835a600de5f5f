"""The parts of models: what they start from, how wide they are, what they drop, take up and say of themselves."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

from recbft.core import Belief, SequenceContext, empirical_bayes_precision, fit_pseudo_count
from recbft.errors import UserError
from recbft.kernels.layer_norm import LayerNorm
from recbft.mixers import Mixer, Observation, SoftmaxAttention
from recbft.mixers.interface import take_penalties
from recbft.models import CoreConfig, Popularity
from recbft.models.block import Block
from recbft.models.precision_channel import LayerPrecision
from recbft.models.update_rules import FixedUpdate, GateUpdate, KalmanUpdate, make_update
from recbft.training.run_config import load_run_config

UPDATING = [
    {"update": "residual"},
    {"update": "fixed", "fixed_gain": 0.6},
    {"update": "gate", "gate": "elementwise"},
    {"update": "gate", "gate": "headwise"},
]


def test_bert4rec_norms_what_it_reads_out_where_its_layers_do_not_end_in_a_norm(lab):
    found = {
        (layer, head): type(lab.build("matched", "bert4rec", layer=layer, head=head).norm)
        for layer in ("pre_norm", "post_norm")
        for head in ("tied", "gelu")
    }
    assert found == {
        ("pre_norm", "tied"): LayerNorm,
        ("post_norm", "tied"): torch.nn.Identity,
        ("pre_norm", "gelu"): torch.nn.Sequential,
        ("post_norm", "gelu"): torch.nn.Sequential,
    }


@pytest.mark.parametrize(
    ("model", "arm", "times"),
    [("sasrec", "matched", 4), ("sasrec", "published", 1), ("bert4rec", "bft", 4), ("hstu", "bft", 4)],
)
def test_the_feed_forward_network_is_as_wide_as_its_authors_have_it_unless_asked(lab, model, arm, times):
    assert {block.inner.out_features for block in lab.build(arm, model).blocks} == {times * lab.D}
    assert {block.inner.out_features for block in lab.build(arm, model, inner_size=5).blocks} == {5}


@pytest.mark.parametrize(("model", "published"), [("sasrec", "original"), ("bert4rec", "post_norm")])
def test_attention_weights_are_dropped_as_asked_or_in_the_published_layer_as_all_else_is(lab, model, published):
    for settings, rate in (
        ({}, 0.0),
        ({"attention_dropout": 0.1}, 0.1),
        ({"layer": published}, 0.3),
        ({"layer": published, "attention_dropout": 0.0}, 0.0),
    ):
        blocks = lab.build("matched", model, dropout=0.3, **settings).blocks
        assert [block.mixer.dropout for block in blocks] == [rate, rate]


def test_hstu_drops_before_its_output_map_and_not_again_behind_it(lab):
    (block, _) = lab.build("published", "hstu", dropout=0.15).blocks
    assert (block.mixer.dropout, block.innovation_dropout.p) == (0.15, 0.0)


@pytest.mark.parametrize(("variant", "places"), [("published", 3), ("matched", 2), ("bft", 2)])
def test_a_layer_drops_its_innovation_and_its_network_s_output_and_the_authors_the_inside_of_it_too(
    lab, variant, places
):
    model, widths = lab.build(variant, dropout=0.5).train(), []
    model.blocks[0].dropout.register_forward_hook(lambda module, args, output: widths.append(output.shape[-1]))
    model.encode(lab.packed([[1, 2, 3]]))
    assert widths == [lab.D] * places


def test_what_mixers_and_experts_are_fined_for_is_added_to_the_loss(lab):
    histories, losses, fine = lab.draw_histories(0, 8, shortest=2), [], 0.0
    for weight in (0.0, 0.7):
        model = lab.build("matched", experts=3, gate_noise=False, load_balance=weight)
        batch = lab.training_batch(model.double().train(), histories)
        losses.append(model.loss(batch))
        model.encode(batch)
        fine = take_penalties(model) or fine
    assert fine > 0.01
    torch.testing.assert_close(losses[1], losses[0] + fine)


@pytest.mark.parametrize("arm", ["published", "matched", "bft"])
def test_bert4rec_reads_both_sides_but_never_what_is_masked(lab, arm):
    model = lab.shaken(lab.build(arm, "bert4rec")).eval()
    mask = model.append
    one, two = (lab.beliefs(model, [[3, mask, item, 5]], append=False)[0][0] for item in (7, 8))
    assert not torch.allclose(one[1], two[1], rtol=1e-3) and not torch.allclose(one[0], two[0], rtol=1e-3)
    batch = lab.training_batch(model, lab.draw_histories(0, shortest=2))
    masked = batch.target > 0
    assert (batch.items[masked] == mask).all() and (batch.items[~masked] != mask).all()


def test_the_mask_starts_with_the_precision_of_an_item_never_seen(lab):
    model = lab.build(model="bert4rec")
    lam = model.item_precision(torch.tensor([[1, model.append, lab.V]]), torch.zeros(1, 3, lab.D))[0, :, 0]
    assert lam[0] == lam[1] < lam[2]  # item 1 has count 0


def test_empirical_bayes_is_fitted_to_items_and_not_to_the_mask(lab):
    given = {"counts": torch.tensor([0, 0, 1, 2, 8, 30]), "core": {"initial": "empirical_bayes"}}
    tables = [lab.build(model=model, **given).item_precision.base for model in ("sasrec", "bert4rec")]
    assert torch.equal(tables[0], tables[1][:-1])
    assert tables[1][-1] == tables[1][0] == tables[1][1] < tables[1][2], "no item is an item that was never seen"


@pytest.mark.parametrize(
    ("model", "cores"),
    [
        (
            "sasrec",
            [{"initial": "table"}, {"initial": "credibility"}, {"prior_scale": "per_layer"}, {"update": "gate"}],
        ),
        ("bert4rec", [{}]),
        ("hstu", [{}]),
    ],
)
def test_equal_seeds_give_the_weights_that_arms_share_equal_values(lab, model, cores):
    torch.manual_seed(99)  # the global state must not matter
    matched = lab.build("matched", model, seed=3).state_dict()
    for core in cores:
        torch.manual_seed(3)
        tracked, again = (lab.build("bft", model, seed=3, core=core).state_dict() for _ in range(2))
        assert set(matched) <= set(tracked)
        for name, value in tracked.items():
            assert torch.equal(value, again[name]) and torch.equal(value, matched.get(name, value)), f"{core}: {name}"
    other = lab.build("matched", model, seed=4).state_dict()
    assert not torch.equal(other["item_embedding.weight"], matched["item_embedding.weight"])


@pytest.mark.parametrize(("model", "arm"), [("sasrec", "bft"), ("bert4rec", "published"), ("hstu", "published")])
def test_weights_start_normal_with_the_deviation_asked_for_and_biases_at_zero(lab, model, arm):
    model = lab.build(arm, model, hidden_size=64, counts=lab.counts_of(200), initializer_range=0.05)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and parameter.numel() > 500:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.1), name
            assert abs(parameter.mean().item()) < 0.005, name
        elif name.endswith("bias"):
            assert not parameter.any(), name


@pytest.mark.parametrize(("model", "arm"), [("sasrec", "bft"), ("hstu", "matched")])
def test_linear_maps_can_start_with_the_variance_of_xavier_from_the_same_draws(lab, model, arm):
    usual, wide = (lab.build(arm, model, hidden_size=64, linear_init=init, seed=3) for init in (None, "xavier"))
    scaled = {"value.weight": 1 / 8, "inner.weight": math.sqrt(2 / (5 * 64)), "outer.weight": math.sqrt(2 / (5 * 64))}
    for (name, one), other in zip(usual.named_parameters(), wide.parameters(), strict=True):
        std = next((s for end, s in scaled.items() if name.endswith(end)), None)
        if std is not None:
            torch.testing.assert_close(other, one * (std / 0.02), rtol=1e-5, atol=1e-7, msg=name)
        elif not (name.endswith("weight") and ".mixer." in name) or "norm" in name:
            assert torch.equal(one, other), name


@pytest.mark.parametrize("seed", range(3))
def test_xavier_starts_complex_maps_with_rayleigh_magnitudes_and_any_phase(lab, seed):
    model = lab.build("matched", mixer="sc_rfa", hidden_size=64, linear_init="xavier", seed=seed)
    scale = (1 / (64 + 64)) ** 0.5  # of the paper's appendix D.2, by inputs and complex outputs
    for part in (model.blocks[0].mixer.query, model.blocks[1].mixer.key, model.blocks[1].mixer.value):
        weight = torch.view_as_complex(part.weight.detach().unflatten(0, (-1, 2)).movedim(1, -1).contiguous())
        assert weight.shape == (64, 64)
        for quantile in (0.1, 0.5, 0.9):
            within = (weight.abs() <= scale * math.sqrt(-2 * math.log(1 - quantile))).double().mean().item()
            assert within == pytest.approx(quantile, abs=0.03)
        for harmonic in (1, 2, 4):
            assert torch.exp(1j * harmonic * weight.angle()).mean().abs() < 0.06


def test_process_noise_and_recency_decay_start_where_they_are_told_to(lab):
    model = lab.build("bft", core={"process_noise_start": -4.0}, recency_start=0.7)
    assert (model.blocks[0].precision.noise_logits == -4).all()
    assert model.blocks[1].mixer.recency_decay.item() == pytest.approx(0.7)


def test_a_seed_draws_the_same_weights_in_every_version(lab):
    config = load_run_config(model="sasrec", arm="bft", hidden_size=lab.D, initial="hybrid", seed=3)
    model = config.build(lab.counts_of())
    shared, own = (torch.Generator().manual_seed(number) for number in (6, 7))  # 2 seed, and one more for precision
    drawn = dict(model.named_parameters())
    for name, generator in (("item_embedding.weight", shared), ("item_precision.read.0.weight", own)):
        expected = torch.empty_like(drawn[name]).normal_(std=0.02, generator=generator)
        assert torch.equal(drawn[name], expected), name


@pytest.mark.parametrize("model", ["sasrec", "bert4rec", "hstu"])
def test_the_last_layer_alone_knows_that_no_score_hears_its_prediction(lab, model):
    assert [block.precision.is_last for block in lab.build(model=model, n_layers=3).blocks] == [False, False, True]


def test_the_ramp_is_what_was_last_written_there_by_whomever():
    model = load_run_config(model="sasrec", arm="bft", hidden_size=8, max_length=8).build(torch.arange(9))
    assert model._ramp() == 0
    model.set_ramp(0.25)
    assert model._ramp() == 0.25 == copy.deepcopy(model)._ramp()
    model.load_state_dict({**model.state_dict(), "ramp": torch.tensor(0.5)})
    assert model._ramp() == 0.5 == model.double()._ramp()
    model.ramp.fill_(0.75)
    assert model._ramp() == 0.75
    model.set_ramp(0.25)  # as it was set before the others wrote
    assert model._ramp() == float(model.ramp) == 0.25
    changes = model.ramp._version
    model.set_ramp(0.25)
    assert model.ramp._version == changes  # a launch less
    for num_set in range(4):  # a copy is not mistaken for what it was made of, however often either is written to
        for copied in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
            other = copied(model)
            for written in (0.1, 0.2, 0.3, 0.4):
                other.load_state_dict({**other.state_dict(), "ramp": torch.tensor(written)})
                assert other._ramp() == float(other.ramp) == pytest.approx(written), (num_set, written)
        model.set_ramp(0.75)
    with torch.inference_mode():
        other = load_run_config(model="sasrec", arm="bft", hidden_size=8, max_length=8).build(torch.arange(9))
        other.set_ramp(0.125)
        assert other._ramp() == 0.125


def test_empirical_bayes_gives_every_item_its_posterior_precision_from_the_start(lab):
    counts = torch.tensor([0, 0, 2, 3, 30, 1, 1, 90, 4, 7, 1, 0, 55])
    model = lab.build(counts=counts, core={"initial": "empirical_bayes"})
    items = torch.arange(1, 13)
    found = model.item_precision(items, model.item_embedding(items))[:, 0]
    expected = empirical_bayes_precision(counts[1:], fit_pseudo_count(counts[1:]))
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    assert not list(model.item_precision.parameters())
    alike = lab.build(counts=torch.tensor([0, *[4] * 12]), core={"initial": "empirical_bayes"})
    assert (alike.item_precision.base == 1).all()  # counts that vary no more than chance


def test_the_gate_starts_at_the_initial_gain_and_learns_at_the_rate_of_the_backbone(lab):
    for kind, rows in (("headwise", 2), ("elementwise", lab.D)):
        model = lab.build(core={"update": "gate", "gate": kind, "initial_gain": 0.7})
        update = model.blocks[0].update
        assert isinstance(update, GateUpdate) and update.weight.shape == (rows, lab.D)
        torch.testing.assert_close(torch.sigmoid(update.offset), torch.full((rows,), 0.7))
        assert not update.weight.any()
        assert {group for name, group in model.optimiser_groups().items() if "update" in name} == {"backbone"}


def test_each_rule_takes_up_its_share_of_the_innovation(lab):
    shares = {}
    for core in UPDATING:
        model = lab.build(core=core).double().eval()
        model.set_ramp(1.0)
        block, seen = model.blocks[0], {}
        block.mixer.register_forward_hook(lambda module, args, output, seen=seen: seen.update(e=output.innovation))
        block.register_forward_hook(lambda module, args, output, seen=seen: seen.update(h=args[0].mean))
        block.norm_ffn.register_forward_hook(lambda module, args, output, seen=seen: seen.update(after=args[0]))
        with torch.no_grad():
            model.encode(lab.packed([[1, 2, 3]]))
        share = (seen["after"] - seen["h"]) / seen["e"]
        shares[core["update"]] = share.mean().item()
        torch.testing.assert_close(share, share.mean().expand_as(share), rtol=1e-6, atol=1e-6)
    assert shares == {
        "residual": pytest.approx(1),
        "fixed": pytest.approx(0.6),
        "gate": pytest.approx(CoreConfig().initial_gain),
    }


def test_attention_dropout_spares_precision_and_drops_whole_pairs_for_all_coordinates(lab):
    torch.manual_seed(0)
    mixer = SoftmaxAttention(8, 2, estimator="reml", kriging="per_dimension", dropout=0.5).double().train()
    with torch.no_grad():
        mixer.value.weight.zero_()
        mixer.value.bias.fill_(1.0)
    x, precision = torch.randn(1, 6, 8).double(), torch.ones(1, 6, 8).double()
    context = SequenceContext(torch.zeros(1, 6).long(), torch.arange(6)[None])
    e, r = mixer(x, precision, context)
    _, again = mixer(x, precision, context)
    assert torch.equal(r, again)
    heads = e.view(6, 2, 4)
    torch.testing.assert_close(heads, heads[..., :1].expand_as(heads))  # equal trust, equal values, one mask
    assert not torch.allclose(e, torch.ones_like(e))


class Silent(Mixer):
    """A mixer that does not say how precise it is."""

    def forward(self, x, precision, context, *, ramp=1.0, source=None):
        return Observation(x, None)


def test_a_mixer_without_a_precision_takes_any_update_but_kalman_s_which_is_refused_with_those_that_have_one():
    shape = {"hidden_size": 8, "inner_size": 8, "dropout": 0.0, "norm_eps": 1e-8}
    core = CoreConfig(propagation="discount")
    for mixer, name in ((Silent(), "Silent"), (SoftmaxAttention(8, 2), "SoftmaxAttention")):
        layer = LayerPrecision(core, hidden_size=8, head_width=4)
        message = (
            f"update 'kalman' needs an observation precision, and {name} gives none as it is set up; choose "
            r"update residual, gate or fixed, or a mixer that has one: attention, .*regime \(estimator reml, "
            r"reml_naive, sandwich, delta, design_effect\); pointwise \(estimator sandwich\); rfa, .*longhorn "
            r"\(of their own\)"
        )
        for update in (KalmanUpdate(), None):
            with pytest.raises(UserError, match=message):
                Block(mixer, layer, update=update, **shape)
        for update in (FixedUpdate(), make_update(CoreConfig(update="gate"), hidden_size=8, n_heads=2)):
            block = Block(copy.deepcopy(mixer), copy.deepcopy(layer), update=update, **shape).eval()
            context = SequenceContext(torch.zeros(1, 3).long(), torch.arange(3)[None])
            _, precision = block(Belief(torch.randn(1, 3, 8), torch.ones(1, 3, 8)), context, 1.0)
            torch.testing.assert_close(precision, torch.full_like(precision, 0.99))  # discounted, nothing observed


def test_popularity_scores_every_history_by_training_counts_which_travel_with_the_state_dict(lab):
    model = Popularity(torch.zeros(4, dtype=torch.int64))
    model.load_state_dict(Popularity(torch.tensor([0, 3, 0, 2**24 + 1])).state_dict())
    states, table = model.user_states(lab.packed([[1, 2, 3], [1]])), model.item_table()
    assert (states.state @ table.weight.T).tolist() == [[0, 3, 0, 2**24 + 1]] * 2
    assert states.precision is None and table.bias is None


@pytest.mark.parametrize("shown", [False, True])
def test_a_model_is_shown_the_time_of_the_target_where_it_is_asked_to_and_nowhere_else(lab, shown):
    model = lab.shaken(lab.build(model="hstu", time_bias=True, show_target_time=shown)).eval()
    batch = lab.packed([[1, 2, 3], [4, 5]], model)
    one, two = (model.user_states(batch._replace(next_time=batch.time + after)).state for after in (5, 10**6))
    assert torch.equal(one, two) != shown
