"""What a training section may hold, and what it holds where nothing is asked for."""

from __future__ import annotations

import pytest

from recbft.errors import UserError
from recbft.training.controllers.averaging import EmaConfig, SwaConfig
from recbft.training.controllers.context_game import ContextGameConfig
from recbft.training.controllers.guardian import GuardianConfig
from recbft.training.controllers.schedules import ChaosConfig, DropoutGlideConfig, LabelSmoothingConfig, LrFloorConfig
from recbft.training.run_config import TrainingConfig


def test_without_a_wish_a_model_is_trained_as_it_was_published():
    config = TrainingConfig()
    assert (config.epochs, config.batch_size, config.learning_rate, config.weight_decay) == (200, 256, 1e-3, 0.0)
    assert (config.precision_lr_multiplier, config.warmup_steps, config.clip_norm) == (100.0, 50, None)
    assert (config.patience, config.valid_metric, config.eval_every) == (20, "ndcg@10", 1)
    assert (config.autocast, config.cuda_graphs, config.batch_targets) == (None, None, None)


def lengths_game(**settings):
    return ContextGameConfig(**{"lengths": (5, 10), **settings})


@pytest.mark.parametrize(
    ("config", "name", "allowed", "refused"),
    [
        *((TrainingConfig, name, (1,), (0,)) for name in ("batch_size", "patience", "eval_every")),
        (TrainingConfig, "epochs", (0, 1), (-1,)),
        (TrainingConfig, "batch_targets", (None, 1), (0,)),
        (TrainingConfig, "learning_rate", (0, 1e-9), (-1e-9,)),
        (TrainingConfig, "precision_lr_multiplier", (1e-9,), (0, -1.0)),
        (TrainingConfig, "clip_norm", (None, 1e-9), (0,)),
        (TrainingConfig, "weight_decay", (0,), (-1e-9,)),
        (TrainingConfig, "warmup_steps", (0,), (-1,)),
        (TrainingConfig, "threads", (None, 1, 1024), (0, 1025)),
        (TrainingConfig, "valid_metric", ("hr@5", "mrr", "mrr@20"), ("hr", "ndcg@", "loss", "ndcg@10 ")),
        (TrainingConfig, "device", ("auto", "cpu", "cuda", "cuda:3"), ("gpu", "cuda:", "cpu:0", "cuda:1 ")),
        (EmaConfig, "decay", (0, 0.9999), (-0.1, 1)),
        (SwaConfig, "start", (0, 0.99), (-0.1, 1)),
        (SwaConfig, "gain", (0,), (-1e-9,)),
        (SwaConfig, "zone", (None, 1e-9), (0,)),
        (SwaConfig, "value", ("valid_hr@5", "valid_mrr", "valid_cross_entropy"), ("hr@5", "valid_hr", "valid_loss")),
        (ChaosConfig, "r", (3.58, 4), (3.57, 4.01)),
        (ChaosConfig, "start", (0.01, 0.99), (0, 1)),
        (ChaosConfig, "amplitude", (0, 1), (-0.1, 1.1)),
        (ChaosConfig, "decay", (0,), (-1e-9,)),
        (lengths_game, "lengths", ((1, 2),), ((0, 2), (5, 5), (5,), (5, 10, 5))),
        (lengths_game, "eta", (1e-9,), (0,)),
        *((lengths_game, name, (0,), (-0.1,)) for name in ("saturation_weight", "saturation_free", "entropy_weight")),
        (GuardianConfig, "learning_rate", (1e-9,), (0,)),
        *((GuardianConfig, name, (0,), (-0.1,)) for name in ("gain_weight", "zone_weight", "zone_sharpness")),
        (GuardianConfig, "decay", (1e-9, 1), (0, 1.01)),
        (LrFloorConfig, "flat", (0, 0.99), (-0.1, 1)),
        (LrFloorConfig, "floor", (0, 1), (-0.1, 1.1)),
        (LabelSmoothingConfig, "start", (0.01, 0.99), (0.009, 1)),
        (LabelSmoothingConfig, "floor", (0, 0.015), (-0.1, 0.016)),
        (LabelSmoothingConfig, "until", (1e-9, 1), (0, 1.01)),
        (DropoutGlideConfig, "floor", (0, 0.99), (-0.1, 1)),
        (DropoutGlideConfig, "until", (1e-9, 1), (0, 1.01)),
    ],
)
def test_values_are_taken_up_to_their_bounds_and_refused_beyond(config, name, allowed, refused):
    for value in allowed:
        assert getattr(config(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(UserError):
            config(**{name: value})
