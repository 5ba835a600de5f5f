"""What trials are ranked by: hand-worked numbers, and histories in which hardly anything was validated."""

from __future__ import annotations

from fractions import Fraction

import pytest

from recbft.errors import UserError
from recbft.experiments.plan import ArmSpec, Job
from recbft.experiments.search_space import OBJECTIVES, check_reach, tail_value
from recbft.runs.folder import RunFolder
from recbft.system.files import write_json
from recbft.training.run_config import TrainingConfig, load_run_config
from tests.experiments.conftest import jobs_of


def rows(*values):
    """A history with a value per epoch; None is an epoch without validation, as ``read_history`` gives it."""
    return [{"epoch": epoch, "loss": 1.0, "valid_mrr": value} for epoch, value in enumerate(values, start=1)]


def value(*values, epochs=None, window=2, final=None):
    known = [each for each in values if each is not None]
    final = max(known) if final is None else final
    return tail_value(rows(*values), "mrr", final, epochs=epochs or len(values), window=window, alpha=0.2)


def test_what_the_last_epochs_gained_counts_a_fifth_besides():
    # kept after epochs 1 to 4: 1/10, 2/10, 3/10, 4/10; the last two gained 2/10
    assert value(0.1, 0.2, 0.3, 0.4) == pytest.approx(float(Fraction(4, 10) + Fraction(1, 5) * Fraction(2, 10)))
    # a validation below the best changes nothing that is kept: 1/10, 3/10, 3/10, 3/10, 4/10 gained 1/10
    assert value(0.1, 0.3, 0.2, 0.1, 0.4) == pytest.approx(float(Fraction(4, 10) + Fraction(1, 5) * Fraction(1, 10)))


def test_late_progress_is_preferred_to_early_progress_of_the_same_best():
    assert value(0.1, 0.2, 0.3, 0.4) > value(0.1, 0.4, 0.4, 0.4) == 0.4
    assert value(0.4, 0.1, 0.2, 0.3) == 0.4, "progress after a fall that it does not make up for is none"


def test_a_run_that_stopped_early_gained_nothing_in_the_rest_of_its_epochs():
    assert value(0.1, 0.2, 0.3, 0.4, epochs=6) == 0.4
    assert value(0.1, 0.2, 0.3, 0.4, epochs=5) == pytest.approx(0.4 + 0.2 * 0.1)


def test_an_epoch_without_validation_keeps_what_the_one_before_kept():
    assert value(None, 0.2, None, 0.3, None, 0.4, window=2) == pytest.approx(0.4 + 0.2 * 0.1)
    assert value(None, 0.2, None, 0.3, None, 0.4, window=3) == pytest.approx(0.4 + 0.2 * 0.2)


@pytest.mark.parametrize("values", [(0.3,), (None, None, 0.3), (None, 0.1, 0.3), (0.1, 0.3)])
def test_progress_from_the_first_validation_on_is_a_start_and_no_tail(values):
    assert value(*values) == 0.3


def test_weights_that_were_put_together_at_the_end_count_as_its_progress():
    assert value(0.1, 0.3, 0.3, final=0.35, window=1) == pytest.approx(0.35 + 0.2 * 0.05)


def test_runs_too_short_for_a_tail_are_refused():
    check_reach("tail", TrainingConfig(epochs=8, eval_every=3))
    check_reach("best", TrainingConfig(epochs=1))
    with pytest.raises(
        UserError, match=r"with training\.epochs 7 and training\.eval_every 3 .* to 8 or more, or leave"
    ):
        check_reach("tail", TrainingConfig(epochs=7, eval_every=3))


def test_the_objectives_of_a_finished_run_are_read_from_its_folder(events, copied):
    (job,) = [job for job in jobs_of(events, copied) if job.name == "bft seed 1"]
    run = RunFolder(job.path)
    best = max(row["valid_ndcg@10"] for row in run.read_history())
    assert OBJECTIVES["best"](job) == best == OBJECTIVES["tail"](job), "two epochs are shorter than the window"
    run.history_file.unlink()
    with pytest.raises(UserError, match=r"bft-seed1/history\.csv has no ndcg@10, which --objective tail needs"):
        OBJECTIVES["tail"](job)


@pytest.mark.parametrize("filter_seen", [False, True])
def test_the_objectives_are_of_the_headline_setting_and_of_the_epochs_that_the_run_may_have(tmp_path, filter_seen):
    settings = (f"filter_seen={filter_seen}", "epochs=9", "valid_metric=mrr")
    job = Job(ArmSpec("bft", "bft"), load_run_config(None, settings, dataset="synthetic"), tmp_path)
    kept = {"unfiltered": 0.3, "filtered": 0.4}
    found = {part: {name: {"mrr": value + 0.1 * n, "ndcg@10": 0.9} for name, value in kept.items()}
             for n, part in enumerate(("validation", "test"))}  # fmt: skip
    write_json(tmp_path / "metrics.json", found)
    values = [0.1, 0.2, 0.15, 0.21, 0.25, 0.26, 0.27]  # stopped after 7 of 9 epochs, of which 5 are the tail
    lines = ["epoch,valid_mrr", *(f"{epoch},{value}" for epoch, value in enumerate(values, start=1))]
    (tmp_path / "history.csv").write_text("\n".join(lines) + "\n")
    best = kept["filtered" if filter_seen else "unfiltered"]
    assert OBJECTIVES["best"](job) == best
    assert OBJECTIVES["tail"](job) == pytest.approx(best + 0.2 * (best - 0.21))
