from __future__ import annotations

import pytest

from recbft.comparing.finished_runs import arm_name
from recbft.config.fields import by_setting, to_dict
from recbft.errors import UserError
from recbft.experiments.lists import parse_seeds
from recbft.experiments.plan import ArmSpec, check_distinct, check_varies, parse_arms, settings_of
from recbft.training.run_config import load_run_config


def test_an_arm_is_a_name_with_recency_and_settings_of_its_own():
    arms = parse_arms("matched, matched+recency, bft[lam_max=10,ks=[5,10]]")
    assert arms == [
        ArmSpec("matched", "matched"),
        ArmSpec("matched+recency", "matched", ("recency_decay=true",)),
        ArmSpec("bft[lam_max=10,ks=[5,10]]", "bft", ("lam_max=10", "ks=[5,10]")),
    ]
    assert [arm.folder for arm in arms] == ["matched", "matched+recency", "bft_lam_max=10_ks=_5_10"]


def test_a_folder_has_a_name_that_leaves_a_file_system_room_for_seed_lock_and_hidden_name():
    settings = ",".join(f"controllers.ema{n}={{decay: 0.{n}}}" for n in range(11, 20))
    arms = parse_arms(",".join(f"bft[{settings},{last}]" for last in ("warm_start=ä", "warm_start=ö")))
    assert len({arm.folder for arm in arms}) == 2
    for arm in arms:
        assert len(f".{arm.folder}-seed4294967295.lock.01234567.tmp".encode()) <= 255
        assert arm.folder.startswith("bft_controllers.ema11=_decay_0.11_")
    assert [len(ArmSpec("é" * n, "bft").folder.encode()) for n in (110, 111)] == [220, 219]
    assert ArmSpec("é" * 110, "bft").folder == "é" * 110


def test_an_arms_own_settings_win_over_common_ones():
    config = parse_arms("matched+recency[n_layers=3]")[0].config(["n_layers=1", "epochs=4"], dataset="synthetic")
    assert (config.arm, config.backbone.recency_decay, config.backbone.n_layers) == ("matched", True, 3)
    assert config.training.epochs == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("matched,,bft", r"arm '' cannot be read; write NAME, NAME\+recency or NAME\[key=value,...\]"),
        ("bft[lam_max=10", r"arm 'bft\[lam_max=10' cannot be read"),
        ("bft+decay", r"arm 'bft\+decay' cannot be read"),
        ("bft,matched,bft", r"arm 'bft' is named twice; name each once"),
        ("matched[model=hstu]", r"arm 'matched\[model=hstu\]' cannot vary model: its runs are of one model"),
        ("bft[seed=7]", r"arm 'bft\[seed=7\]' cannot vary seed"),
        ("bft[lam_max=10, lam_max=20]", r"sets lam_max twice; give one value"),
    ],
)
def test_a_list_that_is_not_of_arms_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_arms(text)


def test_two_names_for_one_configuration_are_refused():
    arms = parse_arms("matched,bft,bft+recency")
    configs = [arm.config(dataset="synthetic") for arm in arms]
    with pytest.raises(UserError, match=r"arms bft and bft\+recency are the same configuration; leave one out"):
        check_distinct(arms, configs)


def test_what_a_command_sets_is_named_by_section_and_key_and_a_controller_is_whole():
    config = ArmSpec("matched", "matched").config(("ema={decay: 0.9}", "mixer=rfa", "rotate=off"), dataset="synthetic")
    assert settings_of(config)[-1] == 'controllers.ema={"decay": 0.9}'
    assert {"mixer=rfa", "mixing.rotate=off"} <= set(settings_of(config))
    keys = {setting.partition("=")[0] for setting in settings_of(config)}
    assert not keys & {"model", "arm", "seed", "data.dataset"}, "which have options of their own"


@pytest.mark.parametrize(
    "key",
    ["data.k_core", "k_core", "data.time", " where", "evaluation.ks", "ks", "filter_seen", "evaluation.filter_seen",
     "training.valid_metric", "valid_metric"],
)  # fmt: skip
def test_what_values_are_judged_by_is_not_varied(key):
    with pytest.raises(UserError, match=f"--vary cannot vary {key}: its values are judged by one metric on one data"):
        check_varies("--vary", key, is_ranked=True)


def test_an_unknown_arm_is_named_with_the_nearest():
    with pytest.raises(UserError, match="'matchde'; did you mean 'matched'"):
        parse_arms("matchde")[0].config(dataset="synthetic")


def test_seeds_are_numbers_and_ranges():
    assert parse_seeds("0-2,7, 5") == [0, 1, 2, 7, 5]
    assert len(parse_seeds("0-9999")) == 10_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-", r"--seeds has '0-'; give numbers and ranges"),
        ("3-1", r"empty range '3-1'"),
        ("0-3,2", r"names a seed twice"),
        ("0-4294967295", r"'0-4294967295' names more than 10,000 seeds; give fewer"),
        ("0-9999,10000", r"'0-9999,10000' names more than 10,000 seeds; give fewer"),
        ("9" * 5000, r"give numbers and ranges"),
    ],
)
def test_seeds_that_cannot_be_meant_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_seeds(text)


def test_the_name_of_a_run_is_an_arm_that_can_be_asked_for():
    text = 'bft[controllers.ema={"decay": 0.5},controllers.swa={},core.lam_max=20.0]'
    config = parse_arms(text)[0].config(model="sasrec", dataset="x.csv")
    default = by_setting(to_dict(load_run_config(model="sasrec", arm="bft", dataset="x.csv")))
    own = {key: value for key, value in by_setting(to_dict(config)).items() if default[key] != value}
    again = parse_arms(arm_name("bft", own))
    assert len(again) == 1 and again[0].config(model="sasrec", dataset="x.csv") == config
