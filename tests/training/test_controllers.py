"""Each controller on cases worked by hand, in a training loop that stops and goes on, and gone at inference."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from recbft.datasets import leave_one_out
from recbft.datasets.batches import pack_histories
from recbft.errors import UserError
from recbft.mixers.regime import RegimeAttention
from recbft.models.contract import read_histories
from recbft.training.controllers import (
    VALIDATION_LOSS,
    Controllers,
    ControllersConfig,
    Moment,
    guardian,
    make_controllers,
    validation_cross_entropy,
)
from recbft.training.controllers.averaging import Ema, EmaConfig, SelectiveSwa, SwaConfig, replaced, take_in
from recbft.training.controllers.context_game import ContextGameConfig
from recbft.training.controllers.guardian import Guardian, GuardianConfig, act, reward
from recbft.training.controllers.schedules import (
    ChaosConfig,
    ChaosSchedule,
    DropoutGlide,
    DropoutGlideConfig,
    LabelSmoothing,
    LabelSmoothingConfig,
    LrFloor,
    LrFloorConfig,
)
from recbft.training.run_config import load_run_config

LENGTH = 10


EVERY = {
    "guardian": GuardianConfig(),
    "chaos": ChaosConfig(),
    "context_game": ContextGameConfig(lengths=(3, 6, 10)),
    "lr_floor": LrFloorConfig(),
    "label_smoothing": LabelSmoothingConfig(),
    "dropout_glide": DropoutGlideConfig(),
    "ema": EmaConfig(),
    "swa": SwaConfig(start=0.0, gain=0.0),
}


def make_model(**settings):
    small = {"mixer": "regime", "width": 4, "hidden_size": 8, "max_length": LENGTH, "dropout": 0.3, "arm": "matched"}
    return load_run_config(**{**small, **settings}).build(torch.arange(65))


def moment(model=None, *, epoch=0, step=0, optimizer=None):
    return Moment(model=model, optimizer=optimizer, epoch=epoch, step=step, total_epochs=10, total_steps=100)


def test_making_controllers_draws_no_random_number_of_the_run():
    model = make_model()
    state = torch.get_rng_state()
    make_controllers(ControllersConfig(**EVERY), model, seed=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_learning_rates_are_the_group_s_own_times_all_factors():
    class Half:
        def lr_factor(self, moment):
            return 0.5

    weights = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    optimizer = torch.optim.Adam([{"params": [weights[0]]}, {"params": [weights[1]], "lr": 0.3}], lr=0.1)
    for _ in range(3):
        Controllers({"one": Half(), "two": Half()}).before_step(moment(optimizer=optimizer))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.025, 0.075])


def test_chaos_follows_the_logistic_map_within_its_bounds():
    chaos = ChaosSchedule(ChaosConfig(r=4.0, start=0.25, amplitude=0.5, decay=math.log(2)))
    # x: 4 (1/4)(3/4) = 3/4, then 4 (3/4)(1/4) = 3/4; a: 1/4, then 1/8
    assert [chaos.lr_factor(moment()) for _ in range(2)] == pytest.approx([1 - 1 / 4 + 3 / 16, 1 - 1 / 8 + 3 / 32])
    wild = ChaosSchedule(ChaosConfig(decay=0.0))
    factors = [wild.lr_factor(moment()) for _ in range(2000)]
    assert 0.75 <= min(factors) < 0.78 and 0.98 < max(factors) <= 1
    with pytest.raises(UserError, match=r"r is 3.0; give a number > 3.57 and <= 4"):
        ChaosConfig(r=3.0)


def test_the_learning_rate_is_flat_then_a_cosine_to_its_floor():
    floor = LrFloor(LrFloorConfig(flat=0.4, floor=0.1))
    found = [floor.lr_factor(moment(step=step)) for step in (0, 40, 70, 100)]
    assert found == pytest.approx([1, 1, 0.1 + 0.9 / 2, 0.1])
    warm = LrFloor(LrFloorConfig(warmup=0.1, flat=0.4, floor=0.1))
    assert [warm.lr_factor(moment(step=step)) for step in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1, 1])
    assert LrFloor(LrFloorConfig(warmup=0.004)).lr_factor(moment(step=0)) == 1  # of less than one step


def test_label_smoothing_decays_to_its_floor():
    model = make_model()
    smoothing = LabelSmoothing(LabelSmoothingConfig(start=0.1, floor=0.02, until=0.5), model)
    for step, expected in ((0, 0.1), (25, 0.06), (50, 0.02), (90, 0.02)):
        smoothing.on_epoch_start(moment(model, step=step))
        assert model.item_loss.label_smoothing == pytest.approx(expected)


def test_label_smoothing_is_refused_where_the_loss_is_not_smoothed():
    model = make_model(loss="bce")
    with pytest.raises(UserError, match="label_smoothing has no effect with loss 'bce'; leave it out, or take lo"):
        LabelSmoothing(LabelSmoothingConfig(), model)


def test_dropout_glides_from_the_rate_it_was_built_with():
    model = make_model()
    model.dropout.p = 0.04
    glide = DropoutGlide(DropoutGlideConfig(floor=0.1, until=0.6), model)
    for step, expected in ((0, 0.3), (30, 0.2), (60, 0.1), (100, 0.1)):
        glide.on_epoch_start(moment(model, step=step))
        assert model.blocks[0].dropout.p == pytest.approx(expected)
        assert model.dropout.p == 0.04, "a rate below the floor is left alone"


@pytest.mark.parametrize("model", ["sasrec", "hstu"])
def test_dropout_within_mixers_glides_too(model):
    made = make_model(model=model, arm="published", mixer=None, width=None, dropout=0.2)
    glide = DropoutGlide(DropoutGlideConfig(floor=0.1), made)
    assert made.blocks[0].mixer.dropout == pytest.approx(0.2)
    glide.on_epoch_start(moment(made, step=100))
    assert made.blocks[0].mixer.dropout == pytest.approx(0.1)


def test_ema_is_the_decayed_mean_and_gives_the_weights_back():
    model = torch.nn.Linear(1, 1, bias=False)
    ema, values = Ema(EmaConfig(decay=0.5)), [1.0, 3.0, 7.0, 2.0]
    expected = values[0]
    for n, value in enumerate(values):
        model.weight.data.fill_(value)
        ema.after_step(moment(model), 0.0)
        decay = min(0.5, (1 + n) / (10 + n))
        expected = expected if n == 0 else decay * expected + (1 - decay) * value
    with ema.evaluation_weights(model):
        assert model.weight.item() == pytest.approx(expected)
    assert model.weight.item() == 2.0


def test_swa_averages_the_late_epochs_that_gained_enough():
    model = torch.nn.Linear(1, 1, bias=False)
    swa = SelectiveSwa(SwaConfig(start=0.2, gain=0.1, value="valid_hr@10"))
    metric = {1: 1.0, 2: 2.0, 3: 2.3, 4: 2.4, 6: 2.7, 7: 1.0, 8: 1.2}  # epoch 5 is not validated
    for epoch in range(1, 9):
        model.weight.data.fill_(float(epoch))
        swa.on_epoch_end(moment(model, epoch=epoch), {"valid_hr@10": metric[epoch]} if epoch in metric else {})
    # gains of 10 % or more after epoch 2: epochs 3 (2 to 2.3), 6 (2.4 to 2.7) and 8 (1 to 1.2)
    with swa.final_weights(model):
        assert model.weight.item() == pytest.approx((3 + 6 + 8) / 3)
    assert model.weight.item() == 8.0
    assert SelectiveSwa(SwaConfig()).final_weights(model) is None


def test_swa_with_a_zone_averages_epochs_whose_loss_fell_enough_within_it():
    model = torch.nn.Linear(1, 1, bias=False)
    swa = SelectiveSwa(SwaConfig(start=0.0, gain=0.1, value=VALIDATION_LOSS, zone=5.0))
    assert swa.needs_validation_loss and not SelectiveSwa(SwaConfig()).needs_validation_loss
    for epoch, loss in enumerate((8.0, 6.0, 5.0, 4.9, 4.0, 4.5, 4.0), start=1):
        model.weight.data.fill_(float(epoch))
        swa.on_epoch_end(moment(model, epoch=epoch), {VALIDATION_LOSS: loss})
    # losses of at most 5 that fell by 10 % or more: epochs 3 (6 to 5), 5 (4.9 to 4) and 7 (4.5 to 4)
    with swa.final_weights(model):
        assert model.weight.item() == pytest.approx((3 + 5 + 7) / 3)


def test_replaced_weights_are_put_back_after_an_error():
    model = torch.nn.Linear(1, 1)
    before = model.weight.item()
    with pytest.raises(RuntimeError), replaced(model, {"weight": torch.full((1, 1), 5.0)}):
        assert model.weight.item() == 5.0
        raise RuntimeError
    assert model.weight.item() == before


def test_the_reward_is_asymmetric_in_gain_and_level():
    config = GuardianConfig(gain_weight=0.6, zone_weight=1.2, zone_sharpness=8.0)
    assert reward(5.0, 5.5, 5.0, config) == pytest.approx(-5 + 0.6 * 0.5 + 1.2 / 2)
    assert reward(5.5, 5.0, 5.5, config) == pytest.approx(-5.5 + 0 + 1.2 / 2)
    assert reward(900.0, 1.0, 5.0, config) == pytest.approx(-900)


def test_the_guardian_s_steps_are_bounded():
    mixers = [RegimeAttention(8, 2), RegimeAttention(8, 2)]
    act(mixers, torch.tensor([1.0, 2.0, -1.0]))
    for mixer in mixers:
        assert mixer.temperature.item() == pytest.approx(1.03, abs=1e-5)
        assert mixer.drift.item() == pytest.approx(0.02) and mixer.pressure.item() == 0
        assert mixer.temperature_before == mixer.temperature
    for _ in range(300):
        act(mixers, torch.tensor([3.0, 3.0, 3.0]))
    assert mixers[0].temperature.item() < 1.6 and mixers[0].drift == 1.0
    assert mixers[0].pressure.item() == pytest.approx(0.6)


def test_reinforce_makes_a_rewarded_action_likelier():
    for sign in (1.0, -1.0):
        guardian = Guardian(GuardianConfig(learning_rate=1e-2), RegimeAttention(8, 2), seed=1)
        state, action = torch.tensor([0.0, 0.1, 1.0, 5.0]), torch.tensor([0.5, -1.0, 2.0])
        guardian.taken = (state, action)
        before = guardian.policy.log_probability(state, action).item()
        guardian._learn(sign)
        assert sign * (guardian.policy.log_probability(state, action).item() - before) > 0


def test_the_policy_s_density_is_the_normal_one():
    policy = Guardian(GuardianConfig(), RegimeAttention(8, 2)).policy
    with torch.no_grad():
        policy.log_deviation.copy_(torch.tensor([0.1, -0.4, 0.7]))
    state, action = torch.randn(4), torch.randn(3)
    mean, deviation = policy(state)
    expected = torch.distributions.Normal(mean, deviation).log_prob(action).sum()
    torch.testing.assert_close(policy.log_probability(state, action), expected)


def test_the_guardian_learns_at_validated_epochs_alone_and_needs_a_regime_mixer():
    model = RegimeAttention(8, 2)
    guardian = Guardian(GuardianConfig(), model)
    guardian.on_epoch_end(moment(model, epoch=1), {"epoch": 1})
    assert guardian.taken is None
    guardian.on_epoch_end(moment(model, epoch=2), {"epoch": 2, VALIDATION_LOSS: 5.0})
    assert guardian.taken is not None and guardian.zone == 5.0 and model.temperature != 1.0
    with pytest.raises(UserError, match="moves the temperature of mixer 'regime', which this model does not have"):
        Guardian(GuardianConfig(), torch.nn.Linear(1, 1))


def steady(guardian, action):
    """Make the policy take one action, whatever it sees."""
    with torch.no_grad():
        guardian.policy.mean.weight.zero_()
        guardian.policy.mean.bias.copy_(torch.tensor(action))
        guardian.policy.log_deviation.fill_(-50)


def test_the_guardian_draws_its_actions_from_its_policy(monkeypatch):
    model, mean, deviation = RegimeAttention(8, 2), torch.tensor([0.5, -1.0, 2.0]), torch.tensor([0.5, 1.0, 2.0])
    guardian, drawn = Guardian(GuardianConfig(), model, seed=1), []
    steady(guardian, mean.tolist())
    guardian.policy.log_deviation.data = deviation.log()
    monkeypatch.setattr(guardian, "_learn", lambda reward: None)
    for epoch in range(1, 101):
        guardian.on_epoch_end(moment(model, epoch=epoch), {VALIDATION_LOSS: 5.0})
        drawn.append(guardian.taken[1])
    score = (torch.stack(drawn) - mean) / deviation
    torch.testing.assert_close(score.mean(dim=0), torch.zeros(3), rtol=0, atol=0.4)  # four standard errors
    torch.testing.assert_close(score.std(dim=0), torch.ones(3), rtol=0, atol=0.3)


def test_the_guardian_s_actions_are_cut_and_grow_weaker_from_one_to_the_next(monkeypatch):
    model = RegimeAttention(8, 2)
    guardian = Guardian(GuardianConfig(decay=0.5), model)
    steady(guardian, [0.0, 7.0, 2.0])
    monkeypatch.setattr(guardian, "_learn", lambda reward: None)
    drifts, pressures = [], []
    for epoch in range(3):
        guardian.on_epoch_end(moment(model, epoch=epoch), {VALIDATION_LOSS: 5.0})
        drifts.append(model.drift.item())
        pressures.append(model.pressure.item())
    assert drifts == pytest.approx([0.03, 0.045, 0.0525])  # 0.01 x 3, halved from one to the next
    assert pressures == pytest.approx([0.02, 0.03, 0.035])
    assert guardian.taken[1].tolist() == pytest.approx([0, 7, 2]), "the density is that of what was drawn"


@pytest.mark.parametrize("zone", [None, 4.0])
def test_the_guardian_s_last_action_is_rewarded_by_the_loss_after_it(zone, monkeypatch):
    model, rewards, config = RegimeAttention(8, 2), [], GuardianConfig(zone=zone)
    guardian = Guardian(config, model)
    monkeypatch.setattr(guardian, "_learn", rewards.append)
    losses = [5.0, 4.5, 4.75]
    for epoch, loss in enumerate(losses):
        guardian.on_epoch_end(moment(model, epoch=epoch), {VALIDATION_LOSS: loss})
    expected = [reward(loss, before, zone or 5.0, config) for before, loss in pairwise(losses)]
    assert rewards == pytest.approx(expected)


def test_the_guardian_sees_the_mean_over_the_mixers_and_how_far_the_temperature_moved():
    model = torch.nn.ModuleList([RegimeAttention(8, 2), RegimeAttention(8, 2)])
    guardian = Guardian(GuardianConfig(), model)
    for mixer, entropy, saturated, step in zip(model, (0.5, 1.0), (0.25, 0.75), (-0.1, -0.3), strict=True):
        mixer.entropy.fill_(entropy)
        mixer.saturated.fill_(saturated)
        with torch.no_grad():
            mixer.move_temperature(step)
    steady(guardian, [0.0, 0.0, 0.0])
    guardian.on_epoch_end(moment(model, epoch=1), {VALIDATION_LOSS: 5.0})
    assert guardian.taken[0].tolist() == pytest.approx([0.2, 0.5, 0.75, 5.0], abs=1e-5)
    guardian.on_epoch_end(moment(model, epoch=2), {VALIDATION_LOSS: 4.0})
    assert guardian.taken[0].tolist() == pytest.approx([0, 0.5, 0.75, 4.0], abs=1e-5)


@pytest.mark.parametrize(("name", "most_users"), [("sasrec", 4096), ("bert4rec", 4096), ("bert4rec", 43)])
def test_the_validation_loss_is_the_mean_cross_entropy_however_much_of_it_is_held_at_once(
    name, most_users, dataset, monkeypatch
):
    settings = {"hidden_size": 8, "max_length": LENGTH} | ({"head": "gelu"} if name == "bert4rec" else {})
    model = load_run_config(model=name, **settings).build(torch.from_numpy(dataset.training_counts))
    model.double().train()
    if name == "bert4rec":
        model.item_bias.data.copy_(torch.linspace(-3, 3, len(model.item_bias)))
    whole = validation_cross_entropy(model, dataset, most_users=most_users)
    assert model.training
    monkeypatch.setattr(guardian, "BLOCK_SCORES", 5 * dataset.num_items + 1)
    monkeypatch.setattr(
        guardian,
        "read_histories",
        lambda *given, **named: read_histories(*given, **named, histories_per_batch=8),
    )
    assert validation_cross_entropy(model, dataset, most_users=most_users) == pytest.approx(whole, rel=1e-12)
    users = np.unique(np.linspace(0, dataset.num_users - 1, min(dataset.num_users, most_users)).astype(int))
    view = leave_one_out(dataset).validation
    start = np.maximum(view.start, view.stop - LENGTH + (model.append is not None))
    batch = pack_histories(dataset.items, start, view.stop, append=model.append)
    table = model.item_table()
    scores = model.eval().user_states(batch).state @ table.weight[1:].T
    scores = scores if table.bias is None else scores + table.bias[1:]
    wanted = torch.from_numpy(view.target) - 1
    assert whole == pytest.approx(F.cross_entropy(scores[users], wanted[users]).item(), rel=1e-9)


def test_a_mean_that_was_loaded_goes_to_where_the_parameters_are():
    """A checkpoint is read to the CPU; tensors without content stand for another device."""
    model = torch.nn.Linear(2, 2, device="meta")
    mean = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    take_in(mean, model, 0.5)
    assert {value.device.type for value in mean.values()} == {"meta"}
