"""Each controller on cases worked by hand, in a training loop that stops and goes on, and gone at inference."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from recbft.datasets import Dataset
from recbft.datasets.batches import TrainingBatches, pack_histories
from recbft.datasets.split import leave_one_out
from recbft.datasets.synth import SyntheticConfig, generate
from recbft.errors import UserError
from recbft.mixers import SoftmaxAttention
from recbft.mixers.regime import RegimeAttention, RegimeConfig
from recbft.models.backbone import Backbone
from recbft.models.contract import read_histories
from recbft.models.layers import make_blocks
from recbft.models.sasrec import SASRecConfig
from recbft.runs.checkpoint import TrainState, load, snapshot, write
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

LENGTH, EPOCHS = 10, 4


@pytest.fixture(scope="module")
def dataset():
    events = generate(SyntheticConfig(num_users=60, num_items=64, mean_length=8.0, seed=1)).events
    return Dataset.from_frame(events)


def make_model(dataset, *, regime=True, seed=0):
    config = SASRecConfig(hidden_size=8, max_length=LENGTH, n_layers=2, dropout=0.3)

    def mixer():
        if regime:
            return RegimeAttention(8, 2, RegimeConfig(warm_in_steps=3, width=4), length=LENGTH)
        return SoftmaxAttention(8, 2)

    torch.manual_seed(seed)
    blocks = make_blocks(config, None, mixer, inner_size=16)
    counts = torch.from_numpy(np.asarray(dataset.training_counts))
    model = Backbone(config, None, counts, blocks, embedding_scale=1.0, seed=seed)
    return model


def batches_of(dataset):
    split = leave_one_out(dataset)
    return TrainingBatches(
        dataset.items, split.training_start, split.training_stop, max_length=LENGTH, batch_size=16, seed=0
    )


class Run:
    """A training loop with all hooks, as the run's own has them."""

    def __init__(self, dataset, config, *, regime=True):
        self.dataset, self.batches = dataset, batches_of(dataset)
        self.model = make_model(dataset, regime=regime)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.controllers = make_controllers(config, self.model, seed=7)
        self.epoch, self.step, self.losses, self.rates = 0, 0, [], []
        torch.manual_seed(3)

    @property
    def moment(self):
        return Moment(
            model=self.model,
            optimizer=self.optimizer,
            epoch=self.epoch,
            step=self.step,
            total_epochs=EPOCHS,
            total_steps=EPOCHS * self.batches.num_batches,
        )

    def train(self, epochs):
        for _ in range(epochs):
            self.controllers.on_epoch_start(self.moment)
            self.model.train()
            for batch in self.batches.epoch(self.epoch):
                self._step(self.controllers.on_batch(batch))
            self.epoch += 1
            with self.controllers.evaluation_weights(self.model):
                ce = validation_cross_entropy(self.model, self.dataset)
            row = {"epoch": self.epoch, VALIDATION_LOSS: ce, "valid_ndcg@10": -ce}
            self.losses.append(ce)
            self.controllers.on_epoch_end(self.moment, row)
        return self

    def _step(self, batch):
        self.controllers.before_step(self.moment)
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.optimizer.zero_grad()
        loss = self.model.loss(batch)
        loss.backward()
        self.optimizer.step()
        self.step += 1
        self.controllers.after_step(self.moment, loss.item())

    def save(self, folder):
        state = TrainState(
            epoch=self.epoch, step=self.step, seed=0, dataset="", content_hash="", vocabulary_hash="", config_hash=""
        )
        taken = snapshot(
            model_state=self.model.state_dict(),
            optimizer_state=self.optimizer.state_dict(),
            controllers_state=self.controllers.state_dict(),
            rng_state=torch.get_rng_state(),
            state=state,
        )
        write(folder, taken)

    def load(self, folder):
        loaded = load(folder)
        self.epoch, self.step = loaded.state.epoch, loaded.state.step
        self.model.load_state_dict(loaded.model_state)
        self.optimizer.load_state_dict(loaded.optimizer_state)
        self.controllers.load_state_dict(loaded.controllers_state)
        torch.set_rng_state(loaded.rng_state)
        return self


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


def moment(model=None, *, epoch=0, step=0, optimizer=None):
    return Moment(model=model, optimizer=optimizer, epoch=epoch, step=step, total_epochs=10, total_steps=100)


def test_a_run_that_stops_and_goes_on_equals_one_that_does_not(dataset, tmp_path):
    config = ControllersConfig(**EVERY)
    whole = Run(dataset, config).train(EPOCHS)
    first = Run(dataset, config).train(2)
    first.save(tmp_path)
    second = Run(dataset, config).load(tmp_path).train(EPOCHS - 2)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    assert whole.losses == first.losses + second.losses and whole.rates == first.rates + second.rates
    for one, two in zip(*(list(flat(run.controllers.state_dict())) for run in (whole, second)), strict=True):
        assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


def flat(value):
    if isinstance(value, dict):
        for part in value.values():
            yield from flat(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from flat(part)
    else:
        yield value


def test_a_trained_model_infers_as_one_that_never_had_a_controller(dataset):
    run = Run(dataset, ControllersConfig(**EVERY)).train(2)
    fresh = make_model(dataset, seed=9)
    assert set(fresh.state_dict()) == set(run.model.state_dict()), "controllers add nothing to a model"
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in run.model.modules())
    fresh.load_state_dict(run.model.state_dict())
    batch = next(batches_of(dataset).epoch(0))
    before = copy.deepcopy([*flat(run.controllers.state_dict())])
    random_state = torch.get_rng_state()
    states = [model.eval().user_states(batch).state for model in (run.model, fresh)]
    assert torch.equal(*states)
    assert torch.equal(torch.get_rng_state(), random_state)
    for one, two in zip(before, flat(run.controllers.state_dict()), strict=True):
        assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


def test_without_controllers_a_run_is_what_it_was(dataset):
    run, plain = Run(dataset, ControllersConfig()), Run(dataset, ControllersConfig())
    run.train(2)
    torch.manual_seed(3)
    for epoch in range(2):
        plain.model.train()
        for batch in plain.batches.epoch(epoch):
            plain.optimizer.zero_grad()
            loss = plain.model.loss(batch)
            loss.backward()
            plain.optimizer.step()
    for one, two in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_making_controllers_draws_no_random_number_of_the_run(dataset):
    model = make_model(dataset)
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


def test_a_state_of_other_controllers_is_refused():
    with pytest.raises(UserError, match=r"saved state has controllers \['chaos'\], this run \[\]; resume with the"):
        Controllers({}).load_state_dict({"chaos": {}})


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


def test_label_smoothing_decays_to_its_floor(dataset):
    model = make_model(dataset)
    smoothing = LabelSmoothing(LabelSmoothingConfig(start=0.1, floor=0.02, until=0.5), model)
    for step, expected in ((0, 0.1), (25, 0.06), (50, 0.02), (90, 0.02)):
        smoothing.on_epoch_start(moment(model, step=step))
        assert model.item_loss.label_smoothing == pytest.approx(expected)


def test_label_smoothing_is_refused_where_the_loss_is_not_smoothed():
    model = load_run_config(loss="bce", hidden_size=8, max_length=4).build(torch.arange(9))
    with pytest.raises(UserError, match="label_smoothing has no effect with loss 'bce'; leave it out, or take lo"):
        LabelSmoothing(LabelSmoothingConfig(), model)


def test_dropout_glides_from_the_rate_it_was_built_with(dataset):
    model = make_model(dataset)
    model.dropout.p = 0.04
    glide = DropoutGlide(DropoutGlideConfig(floor=0.1, until=0.6), model)
    for step, expected in ((0, 0.3), (30, 0.2), (60, 0.1), (100, 0.1)):
        glide.on_epoch_start(moment(model, step=step))
        assert model.blocks[0].dropout.p == pytest.approx(expected)
        assert model.dropout.p == 0.04, "a rate below the floor is left alone"


@pytest.mark.parametrize("model", ["sasrec", "hstu"])
def test_dropout_within_mixers_glides_too(model):
    made = load_run_config(model=model, arm="published", hidden_size=8, max_length=4, dropout=0.2).build(
        torch.arange(9)
    )
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
        swa.on_epoch_end(moment(model, epoch=epoch), {"epoch": epoch, **_valid(metric, epoch)})
    # gains of 10 % or more after epoch 2: epochs 3 (2 to 2.3), 6 (2.4 to 2.7) and 8 (1 to 1.2)
    with swa.final_weights(model):
        assert model.weight.item() == pytest.approx((3 + 6 + 8) / 3)
    assert model.weight.item() == 8.0
    assert SelectiveSwa(SwaConfig()).final_weights(model) is None
    with pytest.raises(UserError, match=r"swa.value reads 'valid_hr@10' of an epoch, which has valid_mrr; name one"):
        swa.on_epoch_end(moment(model, epoch=9), {"epoch": 9, "valid_mrr": 0.1})


def _valid(metric, epoch):
    return {"valid_hr@10": metric[epoch]} if epoch in metric else {}


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


def test_the_guardian_learns_at_validated_epochs_alone_and_needs_a_regime_mixer(dataset):
    model = RegimeAttention(8, 2)
    guardian = Guardian(GuardianConfig(), model)
    guardian.on_epoch_end(moment(model, epoch=1), {"epoch": 1})
    assert guardian.taken is None
    guardian.on_epoch_end(moment(model, epoch=2), {"epoch": 2, VALIDATION_LOSS: 5.0})
    assert guardian.taken is not None and guardian.zone == 5.0 and model.temperature != 1.0
    with pytest.raises(UserError, match="moves the temperature of mixer 'regime', which this model does not have"):
        Guardian(GuardianConfig(), make_model(dataset, regime=False))


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


def test_the_validation_loss_is_the_mean_cross_entropy_over_all_items(dataset):
    model = make_model(dataset).double()
    view = leave_one_out(dataset).validation
    batch = pack_histories(dataset.items, np.maximum(view.start, view.stop - LENGTH), view.stop)
    scores = model.eval().user_states(batch).state @ model.item_table().weight[1:].T
    expected = F.cross_entropy(scores, torch.from_numpy(view.target) - 1).item()
    model.train()
    assert validation_cross_entropy(model, dataset) == pytest.approx(expected)
    assert model.training
    some = validation_cross_entropy(model, dataset, most_users=7)
    assert some != expected and some == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("most_users", [4096, 43])
def test_the_validation_loss_does_not_depend_on_how_many_users_and_scores_are_held_at_once(
    most_users, dataset, monkeypatch
):
    model = load_run_config(model="bert4rec", hidden_size=8, max_length=LENGTH, head="gelu").build(
        torch.from_numpy(dataset.training_counts)
    )
    model.double()
    with torch.no_grad():
        model.item_bias.copy_(torch.linspace(-3, 3, len(model.item_bias)))
    whole = validation_cross_entropy(model, dataset, most_users=most_users)
    monkeypatch.setattr(guardian, "BLOCK_SCORES", 5 * dataset.num_items + 1)
    monkeypatch.setattr(
        guardian,
        "read_histories",
        lambda *given, **named: read_histories(*given, **named, histories_per_batch=8),
    )
    assert validation_cross_entropy(model, dataset, most_users=most_users) == pytest.approx(whole, rel=1e-12)
    users = np.unique(np.linspace(0, dataset.num_users - 1, min(dataset.num_users, most_users)).astype(int))
    view = leave_one_out(dataset).validation
    batch = pack_histories(
        dataset.items, np.maximum(view.start, view.stop - LENGTH + 1), view.stop, append=model.append
    )
    table = model.item_table()
    scores = model.eval().user_states(batch).state @ table.weight[1:].T + table.bias[1:]
    wanted = torch.from_numpy(view.target) - 1
    assert whole == pytest.approx(F.cross_entropy(scores[users], wanted[users]).item(), rel=1e-9)


def test_a_mean_that_was_loaded_goes_to_where_the_parameters_are():
    """A checkpoint is read to the CPU; tensors without content stand for another device."""
    model = torch.nn.Linear(2, 2, device="meta")
    mean = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    take_in(mean, model, 0.5)
    assert {value.device.type for value in mean.values()} == {"meta"}
