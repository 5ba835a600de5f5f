"""The mechanism report against the equations written out, one history at a time, and on planted truth."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

from recbft.datasets import leave_one_out
from recbft.datasets.batches import HISTORIES_PER_BATCH
from recbft.datasets.planted import PlantedReliability
from recbft.evaluation import mechanism as looking
from recbft.evaluation.evaluate import evaluate
from recbft.evaluation.mechanism import mechanism
from recbft.evaluation.strata import item_frequency
from recbft.evaluation.trace import saturated_layers, trace
from recbft.evaluation.views import batches_of_view
from recbft.mixers import Mixer
from recbft.models import MODELS, Popularity
from recbft.models.contract import read_histories
from recbft.system.files import json_text
from recbft.training.run_config import load_run_config

BINS = 3


def normalised(x, norm):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def by_hand(model, history):
    """What SASRec's bft does to one history, token by token and head by head, as SPEC sections 2 to 5 read."""
    items = torch.tensor(history[-model.max_length :])
    T, H, w = len(items), model.config.n_heads, float(model.ramp)
    emb = model.item_embedding.weight[items]
    D = emb.shape[1]
    K = D // H
    h = math.sqrt(D) * emb + model.position_embedding.weight[:T]
    start = model.item_precision
    tau = start.range * start.base[items] + torch.nn.functional.softplus(start.read(emb))[:, 0]
    lam = tau.clamp(1e-3, 100)[:, None].expand(T, D)
    layers = []
    for block in model.blocks:
        x, mixer = normalised(h, block.norm_mixer), block.mixer
        rho = torch.sigmoid(mixer.decay_logit)
        e, r = torch.zeros(T, D).double(), torch.zeros(T, D).double()
        weights, size = torch.zeros(H, T, T).double(), torch.zeros(H, T).double()
        for head in range(H):
            own = slice(head * K, (head + 1) * K)
            q, k, v = (part(x)[:, own] for part in (mixer.query, mixer.key, mixer.value))
            for t in range(T):
                logits = torch.stack([
                    q[t] @ k[j] / math.sqrt(K) + w * lam[j].mean().log() + w * (t - j) * rho.log() for j in range(t + 1)
                ])  # fmt: skip
                a = logits.softmax(0)
                e[t, own] = a @ v[: t + 1]
                S = a @ (v[: t + 1] - e[t, own]).square()
                n = 1 / a.square().sum()
                r[t, own] = ((n + 1) / (S + 1 / K)).clamp(max=100)
                weights[head, t, : t + 1], size[head, t] = a, n
        gain = 1 - w * (1 - r / (lam + r))
        incoming, h, lam = lam, h + gain * e, lam + r
        a = block.inner(normalised(h, block.norm_ffn))
        slope = 0.5 * (1 + torch.erf(a / math.sqrt(2))) + a * torch.exp(-a.square() / 2) / math.sqrt(2 * math.pi)
        J = slope @ (block.outer.weight * block.inner.weight.T).T
        h = h + block.outer(torch.nn.functional.gelu(a))
        Q = torch.nn.functional.softplus(block.precision.noise_logits)
        used = block.precision.mean_jacobian
        lam = (1 / ((1 + used).square().clamp(min=0.01) / lam + Q)).clamp(1e-3, 100)
        figures = {
            "gain": gain, "incoming_precision": incoming, "observation_precision": r, "effective_sample_size": size.T,
            "jacobian": J, "jacobian_used": used.expand(T, D), "outgoing_precision": lam,
        }  # fmt: skip
        heads = gain[-1].view(H, K).mean(-1)
        layers.append((figures, weights[:, -1, 0], heads, (lam >= 100).double()))
    return items.numpy(), layers


@pytest.fixture(scope="module")
def worked(lab):
    """A tiny model, its report, and the same worked out by hand for every user."""
    model = lab.make_model(lab.dataset, core={"initial": "hybrid"})
    view = leave_one_out(lab.dataset).test
    with torch.no_grad():
        users = [by_hand(model, lab.dataset.items[a:b]) for a, b in zip(view.start, view.stop, strict=True)]
    return model, mechanism(model, lab.dataset, quantiles=BINS), users


def test_every_mean_equals_the_equations_written_out(lab, worked):
    _, report, users = worked
    items = np.concatenate([own for own, _ in users])
    counts = lab.dataset.training_counts
    edges = np.quantile(counts[1:], [1 / 3, 2 / 3], method="inverted_cdf")
    bins = [np.flatnonzero(np.searchsorted(edges, counts[items]) == q) for q in range(BINS)]
    assert report["num_tokens"] == len(items) and report["num_items"] == len(set(items))
    assert [row["num_tokens"] for row in report["bins"]] == [len(own) for own in bins if len(own)]
    for number, layer in enumerate(report["layers"]):
        assert layer["layer"] == number + 1
        assert set(layer["quantities"]) == set(users[0][1][number][0])
        for name, row in layer["quantities"].items():
            values = np.concatenate([own[number][0][name].mean(-1).numpy() for _, own in users])
            assert row["mean"] == pytest.approx(values.mean(), rel=1e-8)
            assert row["bins"] == pytest.approx([values[own].mean() for own in bins if len(own)], rel=1e-8)
            if name != "jacobian_used":
                seen = np.unique(items)
                expected = stats.spearmanr(counts[seen], [values[items == item].mean() for item in seen])
                assert (row["rho"], row["p"]) == (pytest.approx(expected.statistic), pytest.approx(expected.pvalue))
                assert row["num_items"] == len(seen) and row["rho_reliability"] is None


def test_means_by_how_many_tokens_are_read_equal_the_equations_written_out(worked):
    _, report, users = worked
    keys = np.concatenate([np.arange(1, len(items) + 1) for items, _ in users])
    names = {1: "1", 2: "2-3", 4: "4-7", 8: "8-15"}
    for number, layer in enumerate(report["layers"]):
        own = {name: np.concatenate([user[number][0][name].mean(-1).numpy() for _, user in users])
               for name in ("gain", "observation_precision", "effective_sample_size")}  # fmt: skip
        found = {row["keys"]: row for row in layer["by_length"]}
        assert list(found) == [name for low, name in names.items() if low <= keys.max()]
        for low, row in zip(names, found.values(), strict=False):
            inside = (keys >= low) & (keys < 2 * low)
            assert row["num_tokens"] == inside.sum()
            for name, values in own.items():
                assert row[name] == pytest.approx(values[inside].mean(), rel=1e-8), name


def test_the_optimal_gain_is_kalman_s_whatever_gain_is_used(lab):
    for settings, agree in (({}, True), ({"update": "fixed", "fixed_gain": 0.3}, False)):
        model = lab.make_model(lab.dataset, core=settings)
        model.set_ramp(1.0)
        row = mechanism(model, lab.dataset)["layers"][0]["by_length"][1]
        assert (row["gain"] == pytest.approx(row["optimal_gain"])) == agree


def test_layers_whose_observations_stand_at_the_cap_are_named(lab):
    named = {lam_max: saturated_layers(lab.make_model(lab.dataset, core={"lam_max": lam_max}), lab.dataset)
             for lam_max in (0.5, 1e5)}  # fmt: skip
    assert named == {0.5: [1, 2], 1e5: []}
    other = lab.make_model(lab.dataset, core={"lam_max": 0.5, "update": "fixed"})
    assert saturated_layers(other, lab.dataset) == [], "no gain comes of them"


def test_attention_on_the_first_token_equals_the_equations_written_out(worked):
    _, report, users = worked
    asked = [own for items, own in users if len(items) > 1]
    keys = [len(items) for items, _ in users if len(items) > 1]
    for number, layer in enumerate(report["layers"]):
        for head, row in enumerate(layer["first_position"]):
            share = [own[number][1][head].item() for own in asked]
            gain = [own[number][2][head].item() for own in asked]
            assert row["num_users"] == len(asked) and row["head"] == head + 1
            assert row["share"] == pytest.approx(np.mean(share), rel=1e-8)
            assert row["gain"] == pytest.approx(np.mean(gain), rel=1e-8)
            assert row["uniform"] == pytest.approx(np.mean([1 / n for n in keys]))
            assert row["rho"] == pytest.approx(stats.spearmanr(share, gain).statistic)
            assert row["rho_given_keys"] is not None


def traced(model, dataset):
    """All histories of the test in one batch, and what each layer did."""
    view = leave_one_out(dataset).test
    (batch,) = read_histories(model, dataset.items, view.start, view.stop, source="")
    with torch.no_grad():
        return batch, trace(model, batch)[1]


def test_weights_per_dimension_are_averaged_over_a_head_s_own_coordinates(lab):
    model = lab.make_model(lab.dataset, core={"kriging": "per_dimension"})
    batch, layers = traced(model, lab.dataset)
    row, column = batch.last // batch.items.shape[1], batch.last % batch.items.shape[1]
    before = batch.position.flatten()[batch.last]
    for layer, found in zip(layers, mechanism(model, lab.dataset)["layers"], strict=True):
        share = layer.shares[row, :, column, column - before][before > 0].mean(dim=0)  # (D,)
        expected = share.view(model.config.n_heads, -1).mean(dim=-1).tolist()
        assert [one["share"] for one in found["first_position"]] == pytest.approx(expected)


def test_the_saturated_shares_are_of_every_coordinate_of_the_tokens_read(lab):
    model = lab.make_model(lab.dataset, core={"lam_max": 6.0, "process_noise": False})
    report = mechanism(model, lab.dataset)
    batch, layers = traced(model, lab.dataset)
    real, shares = batch.segment >= 0, []
    assert not real.all()
    for layer, row in zip(layers, report["layers"], strict=True):
        parts = {name: getattr(layer, name)[real] for name in ("incoming", "observation", "outgoing")}
        parts["last_token"] = layer.outgoing.flatten(0, 1)[batch.last]
        expected = {name: (values >= 6.0).double().mean().item() for name, values in parts.items()}
        assert row["saturated"] == pytest.approx(expected)
        shares += expected.values()
    assert len({share for share in shares if 0 < share < 1}) > 3


def test_what_is_learned_of_the_layers_is_reported_as_it_stands(lab, worked):
    model, report, _ = worked
    for block, layer in zip(model.blocks, report["layers"], strict=True):
        noise = torch.nn.functional.softplus(block.precision.noise_logits)
        assert layer["process_noise"] == {"mean": pytest.approx(noise.mean().item()), "max": noise.max().item()}
        assert layer["recency_decay"] == pytest.approx(torch.sigmoid(block.mixer.decay_logit).item())
        assert layer["jacobian_mode"] == "running_mean"


def initial_of(model, dataset):
    """What the items' precision starts from, (V,)."""
    items = torch.arange(1, dataset.num_items + 1)[None]
    with torch.no_grad():
        return model.item_precision(items, model.item_table().weight[items])[0, :, 0].numpy()


def test_the_initial_precision_is_over_items_seen_in_training(lab):
    dataset = lab.make_dataset(num_users=12, num_items=30, seed=4, longest=5)
    model = lab.make_model(dataset, core={"initial": "hybrid"})
    counts = dataset.training_counts[1:]
    seen = counts > 0
    assert 5 < seen.sum() < dataset.num_items
    tau = initial_of(model, dataset)[seen]
    report = mechanism(model, dataset, quantiles=BINS)
    initial = report["initial_precision"]
    assert (initial["num_items"], initial["min"], initial["max"]) == (seen.sum(), tau.min(), tau.max())
    assert initial["mean"] == pytest.approx(tau.mean())
    expected = stats.spearmanr(counts[seen], tau)
    assert (initial["rho"], initial["p"]) == (pytest.approx(expected.statistic), pytest.approx(expected.pvalue))
    bins = item_frequency(counts, counts, quantiles=BINS, new_apart=False)
    means = [tau[bins.member[seen] == stratum].mean() if seen[bins.users(stratum)].any() else None
             for stratum in range(len(bins.names))]  # fmt: skip
    assert initial["bins"] == [None if one is None else pytest.approx(one) for one in means]
    assert (initial["at_floor"], initial["at_cap"]) == (0, 0)
    assert initial["levels"] is None and report["user_reliability"] is None


@pytest.mark.parametrize("initial", ["evidence", "hybrid"])
def test_what_is_left_of_content_in_a_vector_is_a_mean_over_the_items_of_a_bin(lab, initial):
    dataset = lab.make_dataset(num_users=12, num_items=30, seed=4, longest=5)
    content = torch.nn.functional.normalize(
        torch.randn(dataset.num_items + 1, 5, generator=torch.Generator().manual_seed(2))
    )
    model = lab.make_model(dataset, core={"initial": initial}, content=content)
    report, counts = mechanism(model, dataset, quantiles=BINS), dataset.training_counts[1:]
    kappa = model.item_belief.kappa.item()
    share, bins = kappa / (counts + kappa), item_frequency(counts, counts, quantiles=BINS, new_apart=False)
    weight = model.item_belief.weights(model.item_belief.counts[1:]).detach().numpy()
    means, weights = (
        [values[bins.users(stratum)].mean() for stratum in range(len(bins.names))] for values in (share, weight)
    )
    assert report["item_belief"] == {
        "kappa": pytest.approx(kappa), "bins": pytest.approx(means), "weights": pytest.approx(weights),
    }  # fmt: skip
    assert report["initial_precision"]["num_items"] == (counts > 0).sum()
    for vector in ("additive", "id"):
        other = lab.make_model(dataset, content=content, item_vector=vector)
        assert mechanism(other, dataset)["item_belief"] is None
    assert mechanism(lab.make_model(dataset), dataset)["item_belief"] is None


# ln(1 + exp(-6.5)) is a half more than the floor.
@pytest.mark.parametrize(
    ("start", "ends"), [(-1e6, (1.0, 0.0)), (-6.5, (0.0, 0.0)), (99.9, (0.0, 0.0)), (1e6, (0.0, 1.0))]
)
def test_items_at_either_end_of_the_range_are_counted(lab, start, ends):
    model = lab.make_model(lab.dataset, core={"initial": "hybrid"})
    with torch.no_grad():
        model.item_precision.range.fill_(0.0)
        model.item_precision.read[2].weight.zero_()
        model.item_precision.read[2].bias.fill_(start)
    initial = mechanism(model, lab.dataset)["initial_precision"]
    assert (initial["at_floor"], initial["at_cap"]) == ends and initial["rho"] is None


def test_planted_truth_is_correlated_with_what_was_learned(lab, worked):
    model, _, _ = worked
    tau = initial_of(model, lab.dataset)
    rank = np.argsort(np.argsort(tau))
    truth = PlantedReliability(items=np.where(rank > 8, 1.0, 0.2), users=np.linspace(0.1, 1, lab.dataset.num_users))
    found = mechanism(model, lab.dataset, planted=truth)
    low, high = found["initial_precision"]["levels"]
    assert (low["reliability"], high["reliability"]) == (0.2, 1.0) and low["mean"] < high["mean"]
    seen = lab.dataset.training_counts[1:] > 0
    for level, own in ((low, seen & (rank <= 8)), (high, seen & (rank > 8))):
        assert (level["num_items"], level["mean"]) == (own.sum(), pytest.approx(tau[own].mean()))
    assert low["num_items"] + high["num_items"] == found["initial_precision"]["num_items"]
    assert found["initial_precision"]["rho_reliability"] > 0.7
    assert found["layers"][0]["quantities"]["incoming_precision"]["rho_reliability"] > 0.7
    assert found["user_reliability"]["num_users"] == lab.dataset.num_users
    nine = np.arange(1, 10)
    some = mechanism(model, lab.dataset, planted=truth, users=nine)
    assert some["user_reliability"]["num_users"] == some["num_users"] == 9
    precision = evaluate(model, lab.dataset, "test").precision
    for report, users in ((found, np.arange(lab.dataset.num_users)), (some, nine)):
        row, expected = report["user_reliability"], stats.spearmanr(truth.users[users], precision[users])
        assert (row["rho"], row["p"]) == (pytest.approx(expected.statistic), pytest.approx(expected.pvalue))
        assert [one["reliability"] for one in row["levels"]] == truth.users[users].tolist()
        assert [one["mean"] for one in row["levels"]] == pytest.approx(precision[users], rel=1e-5)
        assert all(one["num_users"] == 1 for one in row["levels"])


@pytest.mark.parametrize(("name", "arm"), [("sasrec", "published"), ("bert4rec", "matched"), ("hstu", "published")])
def test_a_plain_arm_reports_what_attention_says_and_no_precision(lab, name, arm):
    report = mechanism(lab.make_model(lab.dataset, name, arm), lab.dataset)
    assert not report["tracks_precision"] and report["initial_precision"] is None and report["cap"] is None
    for layer in report["layers"]:
        assert set(layer["quantities"]) == {"effective_sample_size"}
        assert layer["saturated"] is None and layer["process_noise"] is None
        for row in layer["first_position"]:
            assert 0 < row["share"] < 1 and row["gain"] is None and row["rho"] is None


def test_the_mask_has_a_column_of_its_own_and_enters_no_correlation(lab):
    model = lab.make_model(lab.dataset, "bert4rec")
    report = mechanism(model, lab.dataset)
    batch, traces = traced(model, lab.dataset)
    for found, layer in zip(traces, report["layers"], strict=True):
        gain = found.gain.flatten(0, 1)[batch.last].mean().item()  # the mask is every history's last token
        assert layer["quantities"]["gain"]["bins"][-1] == pytest.approx(gain)
    assert report["bins"][-1] == {"name": "mask", "counts": "0", "num_items": 1, "num_tokens": lab.dataset.num_users}
    for layer in report["layers"]:
        for row in layer["quantities"].values():
            assert len(row["bins"]) == len(report["bins"]) and row["num_items"] == report["num_items"]
    assert len(report["initial_precision"]["bins"]) == len(report["bins"]) - 1


def test_a_model_without_layers_and_a_mixer_that_mixes_heads_are_served(lab):
    report = mechanism(Popularity(lab.dataset.training_counts), lab.dataset)
    assert report["layers"] == [] and not report["tracks_precision"]
    model = lab.make_model(lab.dataset, output_projection=True)
    batch, layers = traced(model, lab.dataset)
    several = batch.position.flatten()[batch.last] > 0
    for layer, found in zip(layers, mechanism(model, lab.dataset)["layers"], strict=True):
        gains = [row["gain"] for row in found["first_position"]]
        assert len(set(gains)) == 1  # no coordinate is one head's own
        assert gains[0] == pytest.approx(layer.gain.flatten(0, 1)[batch.last][several].mean().item())


@pytest.mark.parametrize(
    "core", [{"kriging": "per_dimension"}, {"update": "residual"}, {"propagation": "decay"}], ids=str
)
def test_settings_without_a_part_leave_it_out(lab, core):
    report = mechanism(lab.make_model(lab.dataset, core=core), lab.dataset)
    names = set(report["layers"][0]["quantities"])
    assert ("jacobian" in names) == ("propagation" not in core)
    assert report["layers"][0]["first_position"][0]["num_users"] > 0


@pytest.mark.parametrize(("core", "weights"), [({}, 2), ({"kriging": "per_dimension"}, 8)], ids=str)
@pytest.mark.parametrize("histories", [0, 5])
def test_no_more_attention_weights_are_written_out_than_memory_allows(lab, monkeypatch, core, weights, histories):
    asked = []

    def watched(model, dataset, view, histories_per_batch):
        asked.append(histories_per_batch)
        return batches_of_view(model, dataset, view, histories_per_batch)

    monkeypatch.setattr(looking, "batches_of_view", watched)
    model = lab.make_model(lab.dataset, core=core)
    memory_mb = histories * looking.COPIES * weights * 8 * 8 * 8 / 2**20  # 8 tokens by 8 tokens of 8 bytes each
    mechanism(model, lab.dataset, memory_mb=memory_mb)
    mechanism(model, lab.dataset, memory_mb=1e6)
    assert asked == [max(1, histories), HISTORIES_PER_BATCH]


def test_little_memory_and_batches_change_no_figure(lab, arm):
    model = lab.make_model(lab.dataset, *arm)
    one, two = (mechanism(model, lab.dataset, memory_mb=memory) for memory in (256, 0.001))
    for a, b in zip(flat(one), flat(two), strict=True):
        assert a == b or a == pytest.approx(b, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("mixer", ["attention", "boosted", "regime"])
def test_weights_that_are_written_out_keep_within_the_memory_whatever_the_mixer(lab, mixer, monkeypatch):
    settings = {"hidden_size": 8, "n_heads": 2, "max_length": 8}
    run = load_run_config(model="sasrec", mixer=mixer, backbone=settings, core={"kriging": "per_dimension"})
    sizes = []

    def watched(model, batch):
        states, layers = trace(model, batch)
        sizes.append(layers[0].weights.nbytes)
        return states, layers

    monkeypatch.setattr("recbft.evaluation.mechanism.trace", watched)
    mechanism(run.build(torch.from_numpy(lab.dataset.training_counts)).eval(), lab.dataset, memory_mb=0.02)
    assert max(sizes) <= 0.02 * 2**20


def flat(value):
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in flat(part)]
    return [leaf for part in value for leaf in flat(part)] if isinstance(value, list) else [value]


def test_the_report_is_plain_json_and_the_model_is_left_as_it_was(lab, arm):
    model = lab.make_model(lab.dataset, *arm).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = mechanism(model, lab.dataset, "validation")
    assert json.loads(json_text(report)) == report and report["part"] == "validation"
    assert model.training and all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_one_user_of_one_event_has_no_correlation_but_means(lab):
    dataset = lab.make_dataset(num_users=1, longest=3)
    report = mechanism(lab.make_model(dataset), dataset, "validation")
    gain = report["layers"][0]["quantities"]["gain"]
    assert gain["rho"] is None and gain["mean"] > 0
    assert report["layers"][0]["first_position"][0] == {
        "head": 1, "share": None, "uniform": None, "gain": None, "rho": None, "p": None, "rho_given_keys": None,
        "p_given_keys": None, "num_users": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("number", "model", "mixer"),
    [(number, model, mixer) for model, spec in MODELS.items() for number, mixer in enumerate(spec.mixers)],
)
def test_every_mixer_of_every_model_can_be_looked_into(lab, number, model, mixer):
    settings = {"hidden_size": 8, "max_length": 8, "output_projection": number % 2 == 1}
    run = load_run_config(None, (), model=model, arm="matched", mixer=mixer, backbone=settings)
    made = run.build(torch.from_numpy(lab.dataset.training_counts))
    made.eval()
    made.refresh()
    found = mechanism(made, lab.dataset, quantiles=BINS)
    assert len(found["layers"]) == 2 and json_text(found)
    attends = type(made.blocks[0].mixer).attention is not Mixer.attention
    assert all((layer["first_position"] is not None) == attends for layer in found["layers"])
