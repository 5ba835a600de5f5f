"""The reliability of events: its quantiles, what it does to precision and to tokens, and where it is not known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from recbft.datasets.batches import ClozeBatches, TrainingBatches, history_batches
from recbft.datasets.samples import SAMPLE_KINDS
from recbft.datasets.side_by_side import lay_side_by_side
from recbft.errors import UserError
from recbft.models.inference import user_encoder
from recbft.models.join import Join
from recbft.models.reliability import KEPT, LARGEST_LOG_FACTOR, Quantiles, ReliabilityInput, ReliabilityPrecision
from recbft.models.stacked import Stacked
from recbft.training.controllers.context_game import cut as shortened
from recbft.training.graphs import cut, pad

NAN = math.nan


def fitted(part, values):
    part.quantiles.fit(np.asarray(values, dtype=np.float64))
    return part


def quantiles_of(values):
    made = Quantiles()
    made.fit(np.asarray(values, dtype=np.float64))
    return made


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_values", [2, 5, KEPT])
def test_a_quantile_is_the_middle_rank_of_its_ties(seed, num_values):
    rng = np.random.default_rng(seed)
    values = np.concatenate([rng.integers(0, num_values, 400) * 0.5 - 1, [-1, NAN]])
    known = values[~np.isnan(values)]
    expected = (stats.rankdata(known) - 1) / (known.size - 1)
    np.testing.assert_allclose(quantiles_of(values)(torch.from_numpy(known)), expected, atol=1e-6)


def test_many_values_keep_their_quantiles_closely_and_what_is_beyond_them_is_held():
    values = np.random.default_rng(0).lognormal(3, 2, 20_000)
    made, expected = quantiles_of(values), (stats.rankdata(values) - 1) / (values.size - 1)
    found = made(torch.from_numpy(values)).numpy()
    assert np.abs(found - expected).max() < 1 / (KEPT - 1)
    assert made(torch.tensor([-5.0, 1e9], dtype=torch.float64)).tolist() == [0, 1]
    assert quantiles_of([1, 3])(torch.tensor([1.0, 1.5, 3.0])).tolist() == [0, 0.25, 1]


@pytest.mark.parametrize("values", [[NAN, NAN], [4.0], [4.0, 4.0, NAN]])
def test_values_that_say_nothing_are_all_in_the_middle(values):
    assert quantiles_of(values)(torch.tensor([3.0, 4.0, 9.0])).tolist() == [0.5] * 3


def test_the_factor_starts_at_one_and_is_monotone_whatever_is_learned():
    part, values = fitted(ReliabilityPrecision(), np.arange(50)), torch.linspace(-3, 60, 200, dtype=torch.float64)[None]
    assert part(values).eq(1).all() and part(torch.tensor([[NAN]])).eq(1).all()
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            part.slope.fill_(float(torch.randn((), generator=generator)) * 6)
            part.step_logits.copy_(3 * torch.randn(8, generator=generator))
        factor = part(values)[0, :, 0]
        assert (factor.diff() * part.slope.sign() > -1e-6).all() and factor.min() != factor.max()
        assert factor.log().abs().max() <= LARGEST_LOG_FACTOR
        middle, missing = part(torch.tensor([[24.5, NAN]]))[0, :, 0].tolist()
        assert middle == pytest.approx(1, rel=1e-5) and missing == 1


def test_the_factor_is_its_formula():
    part = fitted(ReliabilityPrecision(), [1, 2, 3, 4, 5])
    with torch.no_grad():
        part.slope.fill_(3.0)
        part.step_logits.copy_(torch.arange(8.0))
    p = np.exp(np.arange(8)) / np.exp(np.arange(8)).sum()
    risen = [sum(p[k] * np.clip(8 * x - k, 0, 1) for k in range(8)) for x in (0, 0.25, 0.3125, 0.5)]
    expected = [np.exp(4 * np.tanh(3 * (one - risen[-1]) / 4)) for one in risen]
    found = part(torch.tensor([[1.0, 2.0, 2.25, 3.0]]))[0, :, 0]
    np.testing.assert_allclose(found.detach(), expected, rtol=1e-5)


def test_the_input_is_between_the_vectors_of_two_quantiles_and_none_where_it_is_missing():
    part = fitted(ReliabilityInput(3), [0, 8])
    assert part(torch.tensor([[0.0, 5.0]])).eq(0).all()
    with torch.no_grad():
        part.vectors.copy_(torch.arange(27.0).view(9, 3))
    found = part(torch.tensor([[0.0, 2.0, 2.5, 8.0, NAN]]))[0]
    m = part.vectors
    torch.testing.assert_close(found, torch.stack([m[0], m[2], (m[2] + m[3]) / 2, m[8], 0 * m[0]]))


def known(batch, seed=0):
    """A batch whose events have a reliability, of which some is missing."""
    drawn = torch.rand(batch.items.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return batch._replace(reliability=torch.where((batch.segment >= 0) & (drawn > 0.2), drawn, NAN))


def learned(model, seed=0):
    """The model where what is made of reliability is far from its start."""
    generator = torch.Generator().manual_seed(seed)
    model.fit_reliability(np.linspace(0, 1, 30))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("reliability_"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


@pytest.mark.parametrize("model", ["sasrec", "bert4rec", "hstu"])
@pytest.mark.parametrize(("arm", "read_as"), [("bft", "precision"), ("bft", "input"), ("matched", "input")])
def test_a_model_begins_as_the_one_that_reads_no_reliability_and_learns_from_it(lab, model, arm, read_as):
    plain, reads = (lab.build(arm, model, **more) for more in ({}, {"reads_reliability": read_as}))
    for one in (plain, reads):
        one.set_ramp(1.0)
        one.refresh()
    reads.fit_reliability(np.linspace(0, 1, 30))
    batch = known(lab.packed([[1, 2, 3, 4, 5], [6, 7, 8]], reads, with_targets=True))
    assert torch.equal(plain.loss(batch), reads.loss(batch))
    reads.loss(batch).backward()
    name = {"precision": "reliability_precision.slope", "input": "reliability_input.vectors"}[read_as]
    assert dict(reads.named_parameters())[name].grad.abs().max() > 0
    group = "precision" if read_as == "precision" else "backbone"
    assert reads.optimiser_groups()[name] == group
    with torch.no_grad():
        learned(reads)
        changed, unknown = reads.loss(batch), reads.loss(batch._replace(reliability=None))
    assert not torch.isclose(changed, plain.loss(batch)) and torch.equal(unknown, plain.loss(batch))


def test_a_more_reliable_event_starts_with_more_precision_within_the_bounds(lab):
    model = learned(lab.build(core={"lam_max": 5.0}, reads_reliability="precision").eval())
    with torch.no_grad():
        model.reliability_precision.slope.fill_(4.0)
    batch, seen = lab.packed([[lab.V] * 6]), []
    values = torch.tensor([[0.0, 0.2, 0.5, 0.8, 1.0, NAN]], dtype=torch.float64)
    model.blocks[0].mixer.register_forward_hook(lambda _, args, output: seen.append(args[1][0, :, 0]))
    model.encode(batch._replace(reliability=values))
    (lam,) = seen
    own = model.item_precision(batch.items, model.item_embedding(batch.items))[0, :, 0]
    expected = (own * model.reliability_precision(values)[0, :, 0]).clamp(1e-3, 5.0)
    torch.testing.assert_close(lam, expected)
    assert (lam[:5].diff() >= 0).all() and lam[4] == 5 and lam[5] == own[5]


def test_precision_that_a_model_does_not_track_is_refused(lab):
    with pytest.raises(
        UserError, match="'precision', but this model tracks none; take arm bft, or reads_reliability i"
    ):
        lab.build("matched", reads_reliability="precision")


def test_seeds_together_and_an_exported_encoder_are_refused(lab):
    model = lab.build(reads_reliability="precision").eval()
    with pytest.raises(UserError, match=r"together with backbone\.reads_reliability; train the seeds one by one"):
        Stacked([model], [torch.Generator()])
    with pytest.raises(
        UserError, match=r"reads_reliability has no form for export; take the vectors of Recommender.us"
    ):
        user_encoder(model)


# In batches ------------------------------------------------------------------------------------------


ITEMS = np.arange(1, 15)
RELIABILITY = ITEMS / 100
START, STOP = np.array([0, 6]), np.array([6, 14])


def assert_own(batch, mask=99):
    """Every item that is read has its own reliability, and nothing else has one."""
    is_item = (batch.items > 0) & (batch.items != mask)
    torch.testing.assert_close(batch.reliability[is_item], batch.items[is_item].double() / 100)
    assert batch.reliability[~is_item].isnan().all()


@pytest.mark.parametrize("cloze", [False, True])
@pytest.mark.parametrize("samples", SAMPLE_KINDS)
def test_every_event_that_is_read_has_its_own_and_what_is_masked_none(samples, cloze):
    how = {"max_length": 4, "batch_size": 3, "seed": 1, "samples": samples, "reliability": RELIABILITY}
    made = ClozeBatches if cloze else TrainingBatches
    batches = list(made(ITEMS, START, STOP, **how, **({"mask": 99} if cloze else {})).epoch(2))
    for batch in batches:
        assert_own(batch)
        assert_own(batch.of_rows(torch.tensor([0])))
        assert_own(shortened(batch, 2))
        moved = batch.to("meta")
        assert moved.reliability.shape == batch.items.shape and moved.reliability.dtype == torch.float64
        again = cut(*reversed(pad(batch, 4))).batch
        assert_own(again)
    assert_own(lay_side_by_side(batches[:2]).batch)


def test_what_is_appended_has_no_reliability():
    for append in (None, 99):
        for batch in history_batches(ITEMS, START, STOP, max_length=5, reliability=RELIABILITY, append=append):
            assert_own(batch)
            assert batch.reliability.isnan().any() == (append is not None)


def test_a_join_shows_each_part_what_it_reads(lab):
    parts = [learned(lab.shaken(lab.build(model="bert4rec", max_length=4, reads_reliability="input"))), lab.build()]
    join = Join(*parts, lab.counts_of(), by_count=False).eval()
    assert join.reads_reliability
    batch = known(lab.packed([[1, 2, 3, 4, 5, 6]]))
    found = join.user_states(batch).state[:, : lab.D]
    (own,) = history_batches(
        np.arange(1, 7), np.array([0]), np.array([6]), max_length=4, append=parts[0].append,
        reliability=batch.reliability[0].numpy(),
    )  # fmt: skip
    torch.testing.assert_close(found, parts[0].user_states(own).state)
