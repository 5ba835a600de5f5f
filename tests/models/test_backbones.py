"""Every backbone in every arm: whose past decides a score, what can be learned, what is saved and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch

from recbft.datasets.batches import pack_histories
from recbft.errors import UserError
from recbft.kernels.layer_norm import LayerNorm
from recbft.mixers.penalty import take_penalties
from recbft.mixers.rfa import RobustFilterConfig
from recbft.models import MODELS, CoreConfig
from recbft.models.fuzzy_moe import FuzzyMoEConfig
from recbft.training.config import TrainingConfig
from recbft.training.optimiser import make_optimizer
from recbft.training.run_config import load_run_config

V, D, T = 12, 8, 10

MOE = {"experts": 3, "gate_regimes": 2, "gate_width": 4, "gate_noise": False, "load_balance": 0.0}

# name: model, arm, backbone settings (and those of experts), core settings
CASES = {
    f"{model} {arm}{' ' if extra else ''}{' '.join(extra)}": (model, arm, extra, core)
    for model, arm, extra, core in (
        *((model, arm, {}, {}) for model in ("sasrec", "bert4rec", "hstu") for arm in ("published", "matched", "bft")),
        ("bert4rec", "matched", {"recency_decay": True}, {}),
        ("bert4rec", "bft", {"output_projection": True}, {"prior_scale": "per_layer"}),
        ("bert4rec", "bft", {"positions": "oldest"}, {"initial": "table"}),
        ("bert4rec", "bft", {"head": "gelu"}, {}),
        ("hstu", "published", {"time_bias": True}, {}),
        ("hstu", "bft", {"time_bias": True, "show_target_time": True}, {}),
        ("hstu", "bft", {"output_projection": True}, {"prior_scale": "per_layer"}),
        ("hstu", "bft", {"n_heads": 1, "n_layers": 3}, {"sandwich_centre": "innovation"}),
        ("bert4rec", "bft", {"absolute_positions": False}, {}),
        ("hstu", "matched", {"absolute_positions": False}, {}),
        ("sasrec", "matched", MOE, {}),
        ("sasrec", "bft", MOE, {}),
        ("bert4rec", "bft", MOE, {"jacobian": "off", "jacobian_in_evaluation": "off"}),
        ("hstu", "bft", MOE, {"jacobian_detach": True}),
    )
}
LOSSES = [
    {"loss": "ce"},
    {"loss": "sampled_softmax"},
    {"loss": "sampled_softmax", "negatives": "in_batch", "num_negatives": 5},
    {"loss": "bce"},
    {"loss": "gbce", "num_negatives": 4},
]
over_cases = pytest.mark.parametrize("case", list(CASES))
over_modes = pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])


def build(case, *, seed=0, num_items=V, **more):
    model, arm, extra, core = CASES[case]
    spec = MODELS[model]
    settings = {"hidden_size": D, "max_length": T, "dropout": 0.0, **spec.arms[arm], **extra, **more}
    moe = {key: settings.pop(key) for key in MOE if key in settings}
    chosen = CoreConfig(**{**spec.core, **core}) if arm in spec.precision_arms else None
    counts = torch.tensor([0, *range(num_items)])
    return spec.make(spec.config(**settings), chosen, counts, seed=seed, moe=FuzzyMoEConfig(**moe))


def packed(histories, model=None, *, targets=False):
    """A batch with the times of events, which follow from a history's own items, and what the model appends."""
    lengths = np.array([len(history) for history in histories])
    items = np.array([item for history in histories for item in [*history, 1]], dtype=np.int64)
    times = np.concatenate([np.cumsum([100 + 37 * item**2 for item in [*history, 1]]) for history in histories])
    stop = np.cumsum(lengths + 1) - 1
    shown = model is not None and model.shows_target_time
    append = None if model is None or targets else model.append
    return pack_histories(
        items, stop - lengths, stop - targets, times=times, with_next_times=shown, with_targets=targets, append=append
    )


def shaken(model, seed=0):
    """The model in float64 with weights far from their start, warmed up: nothing in it is idle."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.3)
            if name.endswith("noise_logits"):
                parameter.add_(8.0)
    model.set_ramp(1.0)
    model.refresh()
    with torch.no_grad():
        model.train().encode(packed([[1, 2, 3], [4, 5]], model))
    return model


def beliefs(model, histories, *, training=False, append=True):
    """Mean and precision at every token of each history, from one packed batch."""
    model = copy.deepcopy(model).train(training)
    batch = packed(histories, model if append else None)
    with torch.no_grad():
        belief = model.encode(batch)
    found = []
    for number in range(len(histories)):
        own = batch.segment == number
        order = batch.position[own].argsort()
        found.append((belief.mean[own][order], belief.precision[own][order]))
    return found


def draw_histories(seed, count=6, *, shortest=1):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, V + 1, rng.integers(shortest, T)).tolist() for _ in range(count)]


def training_batch(model, histories):
    """What the model is trained on, of these histories in one batch."""
    (spec,) = (spec for spec in MODELS.values() if spec.config is type(model.config))
    items = np.array([item for history in histories for item in history], dtype=np.int64)
    stop = np.cumsum([len(history) for history in histories])
    start = stop - [len(history) for history in histories]
    batches = spec.batches(
        model.config, items, start, stop, num_items=V, batch_size=99, seed=0, times=np.cumsum(1000 * items)
    )
    (batch,) = batches.epoch(0)
    return batch


def same(one, two):
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


# Whose past decides ---------------------------------------------------------------------------------


@over_cases
@over_modes
def test_beliefs_of_a_user_do_not_change_with_packing_batch_mates_or_padding(case, training):
    model = shaken(build(case))
    mine = [3, 7, 1, 7, 12]
    (alone,) = beliefs(model, [mine], training=training)
    for seed in range(3):
        others = draw_histories(seed)
        place = seed * 3 % len(others)
        same(alone, beliefs(model, [*others[:place], mine, *others[place:]], training=training)[place])


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("bert4rec")])
@over_modes
def test_beliefs_of_a_causal_model_do_not_change_with_later_items(case, training):
    model = shaken(build(case))
    past = [3, 7, 1, 7, 12]
    (now,) = beliefs(model, [past], training=training)
    (later,) = beliefs(model, [[*past, 1, 2, 9]], training=training)
    # Where the time of the next event is shown, the next item's time is: item 1 stands for both.
    same(now, [values[: len(past)] for values in later])


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("bert4rec")])
def test_bert4rec_reads_both_sides_but_never_what_is_masked(case):
    model = shaken(build(case)).eval()
    mask = model.append
    one, two = (beliefs(model, [[3, mask, item, 5]], append=False)[0][0] for item in (7, 8))
    assert not torch.allclose(one[1], two[1], rtol=1e-3) and not torch.allclose(one[0], two[0], rtol=1e-3)
    batch = training_batch(model, draw_histories(0, shortest=2))
    masked = batch.target > 0
    assert (batch.items[masked] == mask).all() and (batch.items[~masked] != mask).all()


@over_cases
def test_user_states_are_the_beliefs_at_each_last_token_in_order(case):
    model = shaken(build(case)).eval()
    histories = draw_histories(4)
    with torch.no_grad():
        state, precision = model.user_states(packed(histories, model))
    for number, (mean, lam) in enumerate(beliefs(model, histories)):
        torch.testing.assert_close(state[number], mean[-1])
        assert precision is None or torch.allclose(precision[number], lam[-1].mean())
    with torch.no_grad():
        assert model.train().user_states(packed(histories, model)).state.shape == state.shape
    assert (precision is None) == (" bft" not in case)


@over_cases
def test_the_gradient_of_one_user_s_loss_reaches_no_event_of_another(case):
    model, embedded = shaken(build(case)).train(), []

    def watch(module, args, output):
        output.retain_grad()
        embedded.append(output)

    model.item_embedding.register_forward_hook(watch)
    batch = training_batch(model, [[1, 2, 3, 4, 5], [6, 7, 8, 1, 2], [9, 10, 11, 12]])
    mine = batch.segment == 1
    model.loss(batch._replace(target=batch.target * mine)).backward()
    assert embedded[0].grad[mine].any() and not embedded[0].grad[~mine].any()


# Gradients, fitting, saving ---------------------------------------------------------------------------


@over_cases
@pytest.mark.parametrize("ramp", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: " ".join(map(str, loss.values())))
def test_every_parameter_that_can_learn_gets_a_finite_gradient(case, ramp, dtype, loss):
    model = build(case, **loss).to(dtype).train()
    model.set_ramp(ramp)
    model.loss(training_batch(model, draw_histories(0, 12, shortest=2))).backward()
    idle = {f"blocks.{len(model.blocks) - 1}.precision.noise_logits"}
    for name, parameter in model.named_parameters():
        if name not in idle:
            assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name


@over_cases
def test_a_state_dict_carries_everything_that_scores_depend_on(case):
    model = shaken(build(case))
    other = build(case, seed=9).double()
    other.load_state_dict(model.state_dict())
    for one, two in zip(*(beliefs(m, draw_histories(3)) for m in (model, other)), strict=True):
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


@pytest.mark.parametrize(
    ("case", "width"),
    [("sasrec matched", 4 * D), ("sasrec published", D), ("bert4rec bft", 4 * D), ("hstu bft", 4 * D)],
)
def test_the_feed_forward_network_is_as_wide_as_its_authors_have_it_unless_asked(case, width):
    assert {block.inner.out_features for block in build(case).blocks} == {width}
    assert {block.inner.out_features for block in build(case, inner_size=5).blocks} == {5}


def test_bert4rec_norms_what_it_reads_out_where_its_layers_do_not_end_in_a_norm():
    found = {
        (layer, head): type(build("bert4rec matched", layer=layer, head=head).norm)
        for layer in ("pre_norm", "post_norm")
        for head in ("tied", "gelu")
    }
    assert found == {
        ("pre_norm", "tied"): LayerNorm,
        ("post_norm", "tied"): torch.nn.Identity,
        ("pre_norm", "gelu"): torch.nn.Sequential,
        ("post_norm", "gelu"): torch.nn.Sequential,
    }


def test_what_mixers_and_experts_are_fined_for_is_added_to_the_loss():
    histories, losses, fine = draw_histories(0, 8, shortest=2), [], 0.0
    for weight in (0.0, 0.7):
        model = build("sasrec matched experts gate_regimes gate_width gate_noise load_balance", load_balance=weight)
        batch = training_batch(model.double().train(), histories)
        losses.append(model.loss(batch))
        model.encode(batch)
        fine = take_penalties(model) or fine
    assert fine > 0.01
    torch.testing.assert_close(losses[1], losses[0] + fine)


@pytest.mark.parametrize("model", ["sasrec", "bert4rec", "hstu"])
def test_equal_seeds_give_matched_and_bft_equal_weights(model):
    weights = [dict(build(f"{model} {arm}", seed=3).named_parameters()) for arm in ("matched", "bft")]
    shared = set(weights[0]) & set(weights[1])
    assert shared == set(weights[0])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in shared)


@pytest.mark.parametrize("case", ["sasrec bft", "bert4rec published", "bert4rec bft head", "hstu published"])
def test_weights_start_normal_with_the_deviation_asked_for_and_biases_at_zero(case):
    model = build(case, hidden_size=64, num_items=200, initializer_range=0.05)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and parameter.numel() > 500:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.1), name
            assert abs(parameter.mean().item()) < 0.005, name
        elif name.endswith("bias"):
            assert not parameter.any(), name


def test_a_seed_draws_the_same_weights_in_every_version():
    config = load_run_config(model="sasrec", arm="bft", hidden_size=D, initial="hybrid", seed=3)
    model = config.build(torch.arange(V + 1))
    shared, own = (torch.Generator().manual_seed(number) for number in (6, 7))  # 2 seed, and one more for precision
    drawn = dict(model.named_parameters())
    for name, generator in (("item_embedding.weight", shared), ("item_precision.read.0.weight", own)):
        expected = torch.empty_like(drawn[name]).normal_(std=0.02, generator=generator)
        assert torch.equal(drawn[name], expected), name


@pytest.mark.parametrize("model", ["sasrec", "bert4rec", "hstu"])
def test_the_last_layer_alone_knows_that_no_score_hears_its_prediction(model):
    assert [block.precision.is_last for block in build(f"{model} bft", n_layers=3).blocks] == [False, False, True]


@pytest.mark.parametrize(("options", "told"), [(None, False), ({}, False), ({"time": True}, True)])
@pytest.mark.parametrize("model", ["sasrec", "bert4rec"])
def test_a_model_wants_times_where_its_mixer_reads_them(model, options, told):
    spec = MODELS[model]
    config = spec.config(hidden_size=D, recency_decay=False)
    mixing = None if options is None else RobustFilterConfig(**options)
    assert spec.make(config, None, torch.arange(5), seed=0, mixer="rfa", mixing=mixing).reads_times is told


@pytest.mark.parametrize(("model", "published"), [("sasrec", "original"), ("bert4rec", "post_norm")])
def test_attention_weights_are_dropped_as_asked_or_in_the_published_layer_as_all_else_is(model, published):
    spec = MODELS[model]
    for settings, rate in (
        ({}, 0.0),
        ({"attention_dropout": 0.1}, 0.1),
        ({"layer": published}, 0.3),
        ({"layer": published, "attention_dropout": 0.0}, 0.0),
    ):
        config = spec.config(hidden_size=D, dropout=0.3, **settings)
        blocks = spec.make(config, None, torch.arange(5), seed=0).blocks
        assert [block.mixer.dropout for block in blocks] == [rate, rate]


@pytest.mark.parametrize("model", ["bert4rec", "hstu"])
@pytest.mark.parametrize("seed", range(2))
def test_before_the_warm_up_a_precision_layer_is_the_plain_layer_bit_for_bit(model, seed):
    tracked, plain = shaken(build(f"{model} bft"), seed), build(f"{model} matched", recency_decay=True).double()
    missing, unexpected = plain.load_state_dict(tracked.state_dict(), strict=False)
    assert not missing and all("precision" in name for name in unexpected)
    for each in (tracked, plain):
        each.set_ramp(0.0)
    for one, two in zip(*(beliefs(m, draw_histories(seed)) for m in (tracked, plain)), strict=True):
        assert torch.equal(one[0], two[0])


@pytest.mark.parametrize("case", list(CASES)[:9])
def test_eight_sequences_are_learned_by_heart(case):
    rng = np.random.default_rng(0)
    histories = [[first, *rng.permutation(np.arange(1, V + 1))[:6].tolist()] for first in range(1, 9)]
    model = build(case, hidden_size=32, **({"last_item_probability": 1.0} if "bert" in case else {})).train()
    optimizer = make_optimizer(model, TrainingConfig(learning_rate=1e-2, precision_lr_multiplier=10.0))
    losses = []
    for step in range(250):
        model.set_ramp(min(1.0, step / 50))
        optimizer.zero_grad()
        loss = model.loss(training_batch(model, histories))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.02 < losses[0]


def test_dropout_is_at_work_in_training_and_only_there():
    for case in ("bert4rec published", "bert4rec bft", "hstu published", "hstu bft"):
        model = shaken(build(case, dropout=0.2))
        (one,), (two,) = (beliefs(model, [[1, 2, 3, 4]], training=True) for _ in range(2))
        assert not torch.allclose(one[0], two[0])
        (one,), (two,) = (beliefs(model, [[1, 2, 3, 4]]) for _ in range(2))
        assert torch.equal(one[0], two[0])


def test_the_mask_starts_with_the_precision_of_an_item_never_seen():
    model = build("bert4rec bft")
    lam = model.item_precision(torch.tensor([[1, model.append, V]]), torch.zeros(1, 3, D))[0, :, 0]
    assert lam[0] == lam[1] < lam[2]  # item 1 has count 0


def test_empirical_bayes_is_fitted_to_items_and_not_to_the_mask():
    tables = []
    for model in ("sasrec", "bert4rec"):
        spec = MODELS[model]
        config = spec.config(hidden_size=8, max_length=5, **spec.arms["bft"])
        core = CoreConfig(initial="empirical_bayes")
        tables.append(spec.build(config, core, torch.tensor([0, 0, 1, 2, 8, 30])).item_precision.base)
    assert torch.equal(tables[0], tables[1][:-1])
    assert tables[1][-1] == tables[1][0] == tables[1][1] < tables[1][2], "no item is an item that was never seen"


def test_long_wide_and_deep_backbones_work():
    for case in ("sasrec bft", "bert4rec bft", "hstu bft"):
        model = build(case, max_length=200, hidden_size=512, n_layers=8, n_heads=8).train()
        model.set_ramp(1.0)
        loss = model.loss(training_batch(model, [np.random.default_rng(0).integers(1, V + 1, 200).tolist()]))
        loss.backward()
        assert torch.isfinite(loss)


# Configs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("bert4rec", {"mask_probability": 0.0}, "mask_probability is 0.0; give a number > 0 and < 1"),
        ("bert4rec", {"max_length": 1}, "max_length is 1; give a whole number >= 2"),
        ("bert4rec", {"last_item_probability": 1.5}, "last_item_probability is 1.5; give a number >= 0 and <= 1"),
        ("hstu", {"show_target_time": True}, "show_target_time has no effect without time_bias"),
        ("hstu", {"feed_forward": False, "inner_size": 8}, "inner_size has no effect with feed_forward false"),
        ("hstu", {"feed_forward": False, "activation": "relu"}, "activation has no effect with feed_forward false"),
        (
            "bert4rec",
            {"absolute_positions": False, "positions": "oldest"},
            "positions has no effect without absolute_p",
        ),
        ("sasrec", {"num_negatives": 5}, "num_negatives has no effect with loss 'ce'; leave it out or choose loss"),
        ("sasrec", {"loss": "bce", "negatives": "in_batch"}, "negatives has no effect with loss 'bce'"),
        ("sasrec", {"loss": "bce", "num_negatives": 0}, "num_negatives is 0; give a whole number >= 1"),
        ("sasrec", {"loss": "gbce", "gbce_t": 1.25}, "gbce_t is 1.25; give a number >= 0 and <= 1"),
        ("hstu", {"loss": "bce", "gbce_t": 0.5}, "gbce_t has no effect with loss 'bce'"),
        ("hstu", {"loss": "bpr"}, "loss is 'bpr'"),
        ("bert4rec", {"n_heads": 3}, "n_heads is 3, which does not divide hidden_size 64"),
    ],
)
def test_a_setting_that_cannot_be_is_named_with_what_to_give(model, settings, message):
    with pytest.raises(UserError, match=message):
        load_run_config(model=model, arm="matched", **settings)


SHARED = {
    "hidden_size": 64, "n_layers": 2, "n_heads": 2, "inner_size": None, "max_length": 50, "absolute_positions": True,
    "embedding_scale": None, "initializer_range": 0.02, "recency_decay": True, "output_projection": False,
    "loss": "ce", "num_negatives": None, "negatives": None, "gbce_t": None,
}  # fmt: skip
OWN = {
    "sasrec": {"attention_dropout": None, "activation": "gelu", "layer": "pre_norm", "dropout": 0.5, "norm_eps": 1e-8},
    "bert4rec": {
        "attention_dropout": None, "layer": "pre_norm", "head": "tied", "positions": "latest", "dropout": 0.5,
        "norm_eps": 1e-8, "mask_probability": 0.2, "last_item_probability": 0.5, "mask_seed": 0,
    },
    "hstu": {
        "feed_forward": True, "time_bias": False, "show_target_time": False, "activation": "gelu", "dropout": 0.2,
        "norm_eps": 1e-6,
    },
}  # fmt: skip


@pytest.mark.parametrize("model", OWN)
def test_what_runs_rely_on_without_asking_stays_as_it_is(model):
    assert dataclasses.asdict(MODELS[model].config()) == {**SHARED, **OWN[model]}


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("sasrec", {"hidden_size": 1, "n_heads": 1, "n_layers": 1, "inner_size": 1, "max_length": 1, "dropout": 0.0}),
        ("sasrec", {"loss": "bce", "num_negatives": 1, "attention_dropout": 0.0}),
        ("sasrec", {"loss": "gbce", "gbce_t": 0.0}),
        ("sasrec", {"loss": "gbce", "gbce_t": 1.0}),
        ("bert4rec", {"max_length": 2, "last_item_probability": 0.0, "mask_seed": 0}),
        ("bert4rec", {"last_item_probability": 1.0}),
        ("hstu", {"time_bias": True, "show_target_time": True}),
    ],
    ids=str,
)
def test_the_least_and_the_largest_values_that_can_be_are_taken(model, settings):
    assert settings.items() <= dataclasses.asdict(MODELS[model].config(**settings)).items()


def test_hstu_says_that_it_caps_dropout_and_saves_what_is_used():
    with pytest.warns(UserWarning, match=r"dropout is 0.5, but HSTU takes at most 0.2; 0.2 is used"):
        config = load_run_config(model="hstu", arm="bft", dropout=0.5)
    assert config.backbone.dropout == 0.2


@pytest.mark.parametrize(
    ("model", "backbone", "core", "message"),
    [
        ("hstu", {}, {"estimator": "reml"}, "estimator 'reml' is not defined for silu weights.*choose sandwich"),
        ("hstu", {"feed_forward": False}, {}, "backbone.feed_forward is false, but arm 'bft' needs true, to predict"),
        ("hstu", {"activation": "relu"}, {}, "backbone.activation is relu, but arm 'bft' needs gelu, to predict"),
        ("bert4rec", {"layer": "post_norm"}, {}, "'post_norm', but arm 'bft' needs 'pre_norm'; leave it out"),
        ("sasrec", {"loss": "bce"}, {}, "loss 'bce' needs items to draw from, but there is only one"),
    ],
)
def test_what_a_model_cannot_be_built_with_is_refused(model, backbone, core, message):
    config = load_run_config(model=model, arm="bft", backbone=backbone, core=core)
    counts = torch.tensor([0, 3]) if "loss" in backbone else torch.arange(5)
    with pytest.raises(UserError, match=message):
        MODELS[model].build(config.backbone, config.core, counts)


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
