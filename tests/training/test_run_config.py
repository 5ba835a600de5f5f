from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from recbft.config.fields import field_types
from recbft.errors import UserError
from recbft.experiments.plan import settings_of
from recbft.models import MODELS
from recbft.training.run_config import load_run_config, sections_of

ARMS = [(model, arm) for model, spec in MODELS.items() for arm in spec.arms]


@pytest.fixture
def write(tmp_path):
    def write(text):
        (tmp_path / "run.yaml").write_text(text)
        return tmp_path / "run.yaml"

    return write


@pytest.mark.parametrize("model", MODELS)
def test_leaf_names_differ_between_sections_so_that_a_bare_key_is_enough(model):
    sections = {name: set(field_types(cls)) for name, cls in sections_of(model).items()}
    for (a, names_a), (b, names_b) in itertools.combinations(sections.items(), 2):
        assert not names_a & names_b, (a, b)
        assert not names_a & {"model", "arm", "seed", *sections}


@pytest.mark.parametrize(("model", "arm"), ARMS)
def test_the_saved_text_reads_back_to_an_equal_config(model, arm, write):
    trained = {"epochs": 7} if MODELS[model].trainable else {"threads": 2}
    config = load_run_config(model=model, arm=arm, seed=3, k_core=5, ks=[1, 10], data_root="/somewhere", **trained)
    again = load_run_config(write(config.to_yaml()))
    assert again == config
    assert "/somewhere" not in config.to_yaml()


@pytest.mark.parametrize("name", ["none", "None", "null", "Null", "~"])
def test_data_and_columns_may_be_called_what_means_null_elsewhere(name, write):
    config = load_run_config(settings=[f"item='{name}'"], dataset=name)
    assert (config.data.dataset, config.data.item, config.data.user) == (name, name, None)
    assert load_run_config(write(config.to_yaml())) == config
    assert load_run_config(settings=settings_of(config), dataset=name) == config
    assert load_run_config(settings=[f"item={name}"]).data.item is None


@pytest.mark.parametrize(("model", "arm"), [one for one in ARMS if MODELS[one[0]].trainable])
def test_a_run_s_file_gives_another_arm_its_settings_and_not_its_arm(model, arm, write):
    own = {"hidden_size": 32, "epochs": 7, "seed": 3}
    for other in MODELS[model].arms:
        file = write(load_run_config(model=model, arm=other, **own).to_yaml())
        assert load_run_config(file, arm=arm) == load_run_config(model=model, arm=arm, **own), other
    file = write(load_run_config(model=model, arm="bft", lam_max=3).to_yaml())
    if arm == "bft":
        assert load_run_config(file, arm=arm).core.lam_max == 3
    else:
        with pytest.raises(UserError, match=rf"core.lam_max has no effect in arm '{arm}'"):
            load_run_config(file, arm=arm)


@pytest.mark.parametrize("text", ["arm: [matched]", "arm: {a: 1}", "arm: 3"])
def test_what_is_no_arm_in_a_file_is_refused_unless_another_is_asked_for(text, write):
    assert load_run_config(write(text), arm="bft") == load_run_config(arm="bft")
    with pytest.raises(UserError, match=r"^arm is "):
        load_run_config(write(text))
    with pytest.raises(UserError, match=r"^arm is \['bft'\]; give text"):
        load_run_config(write("arm: matched"), arm=["bft"])


def test_what_a_file_sets_beyond_its_arm_stays_in_another(write):
    file = write("arm: matched\nbackbone: {recency_decay: true}")
    assert load_run_config(file, arm="published").backbone.recency_decay
    assert load_run_config(write("arm: matched\nrecency_decay: false"), arm="bft").backbone.recency_decay


def test_nothing_given_is_sasrec_with_precision_tracking():
    config = load_run_config()
    assert (config.model, config.arm, config.seed, config.data.dataset) == ("sasrec", "bft", 0, None)
    assert config.training.epochs == 200


def test_several_columns_and_a_controller_s_own_settings_as_a_shell_gives_them():
    config = load_run_config(settings=["data.columns=user, item", "data.user=user"])
    assert config.data.columns == ("user", "item")
    with pytest.raises(UserError, match=r"^unknown key 'controllers.ema.decay'; write controllers.ema={decay: 0.5}$"):
        load_run_config(settings=["controllers.ema.decay=0.5"])
    with pytest.raises(UserError, match=r"^unknown key 'training.epochs.all'; did you mean"):
        load_run_config(settings=["training.epochs.all=1"])


@pytest.mark.parametrize(
    "setting",
    ["context_game.lengths=20,50", "context_game.lengths=[20, 50]", "guardian.zone=null", "swa.value=valid_mrr"],
)
def test_what_is_said_to_be_written_for_a_controller_s_own_setting_can_be_written(setting):
    with pytest.raises(UserError, match=r"; write controllers\..*}$") as refused:
        load_run_config(settings=[f"controllers.{setting}"])
    name, _, key = setting.partition("=")[0].partition(".")
    made = getattr(load_run_config(settings=[str(refused.value).partition("; write ")[2]]).controllers, name)
    assert getattr(made, key) == {"lengths": (20, 50), "zone": None, "value": "valid_mrr"}[key]


@pytest.mark.parametrize("text", ["epochs: 3\ntraining: {epochs: 5}", "training.epochs: 3\nepochs: 5"])
def test_a_key_that_a_file_has_in_two_forms_is_refused(tmp_path, text):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=r"run.yaml: training\.epochs is given twice, as 3 and as 5; leave one of them"):
        load_run_config(file)
    file.write_text(text.splitlines()[0])
    assert load_run_config(file, ["epochs=7"], training={"epochs": 9}).training.epochs == 9, "layers may differ"


def test_experts_take_the_place_of_the_feed_forward_network():
    config = load_run_config(arm="matched", experts=3, hidden_size=8, max_length=4)
    assert (config.moe.experts, config.moe.experts_per_token) == (3, 2)
    blocks = config.build(torch.arange(5)).blocks
    assert all(block.moe is not None and block.inner is None for block in blocks)
    plain = load_run_config(arm="matched", hidden_size=8, max_length=4).build(torch.arange(5))
    assert all(block.moe is None for block in plain.blocks)


def test_experts_need_a_layer_with_a_place_for_them():
    with pytest.raises(UserError, match="experts need a pre-norm layer with a feed-forward network, got"):
        load_run_config(model="hstu", arm="published", experts=2).build(torch.arange(5))


def test_a_seed_is_a_whole_number_of_32_bits():
    assert [load_run_config(seed=seed).seed for seed in (0, 2**32 - 1)] == [0, 2**32 - 1]
    for seed in (-1, 2**32):
        with pytest.raises(UserError, match=f"seed is {seed}; give a whole number >= 0 and < 4294967296"):
            load_run_config(seed=seed)


def test_later_layers_win(write):
    file = write("epochs: 1\nbatch_size: 1\nseed: 1\nhidden_size: 32\n")
    config = load_run_config(file, ["epochs=2", "training.batch_size=2", "seed=2"], epochs=3, seed=None)
    assert (config.training.epochs, config.training.batch_size, config.seed) == (3, 2, 2)
    assert config.backbone.hidden_size == 32


def test_a_nested_and_a_flat_file_say_the_same(write):
    flat = load_run_config(write("model: sasrec\nepochs: 5\nlam_max: 10\njacobian: off\ndropout: 1e-1\n"))
    nested = load_run_config(
        write(
            "model: sasrec\ntraining: {epochs: 5}\ncore: {lam_max: 10.0, jacobian: 'off'}\nbackbone: {dropout: 0.1}\n"
        )
    )
    assert flat == nested and flat.core is not None and flat.core.jacobian == "off"


def test_an_arm_sets_its_defaults_below_the_users_values():
    assert load_run_config(arm="matched").backbone.recency_decay is False
    assert load_run_config(arm="matched", recency_decay=True).backbone.recency_decay is True


def test_arms_differ_in_nothing_but_their_presets():
    matched, bft = load_run_config(arm="matched"), load_run_config(arm="bft")
    preset = {name: getattr(bft.backbone, name) for name in MODELS["sasrec"].arms["matched"]}
    assert (
        dataclasses.replace(matched, arm="bft", core=bft.core, backbone=dataclasses.replace(matched.backbone, **preset))
        == bft
    )


def test_an_arm_is_named_with_its_recency_decay_as_comparisons_name_it(tmp_path):
    wanted = load_run_config(arm="matched", recency_decay=True)
    (tmp_path / "mine.yaml").write_text("arm: matched+recency\n")
    assert wanted.backbone.recency_decay and not load_run_config(arm="matched").backbone.recency_decay
    assert load_run_config(arm="matched+recency") == wanted == load_run_config(tmp_path / "mine.yaml")
    assert load_run_config(None, ["arm=matched+recency"]) == wanted
    (tmp_path / "bft.yaml").write_text(load_run_config().to_yaml())
    assert load_run_config(tmp_path / "bft.yaml", arm="matched+recency") == wanted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "sasrek"}, "model is 'sasrek'; did you mean 'sasrec'?"),
        ({"arm": "btf"}, "arm of sasrec is 'btf'; did you mean 'bft'?"),
        ({"seed": 1.5}, "seed is 1.5; give a whole number"),
        ({"hidden_size": 30, "n_heads": 4}, "backbone.n_heads is 4, which does not divide hidden_size 30"),
        ({"epochs": "many"}, "training.epochs is 'many'; give a whole number"),
        ({"valid_metric": "NDCG@10"}, "training.valid_metric is 'NDCG@10'; give hr@K, ndcg@K, mrr@K or mrr"),
        ({"valid_metric": "hr@7"}, "training.valid_metric is 'hr@7', but evaluation.ks is [5, 10, 20]; add 7 to ks"),
        (
            {"controllers": {"swa": {"value": "valid_ndgc@10"}}},
            "controllers.swa.value is 'valid_ndgc@10'; give valid_hr",
        ),
        (
            {"controllers": {"swa": {}}, "ks": [5], "valid_metric": "mrr"},
            "controllers.swa.value is 'valid_ndcg@10', but",
        ),
        ({"device": "gpu"}, "training.device is 'gpu'; give auto, cpu, cuda or cuda:N"),
        ({"device": "cuda:128"}, "training.device is 'cuda:128'; give auto, cpu, cuda or cuda:N"),
        ({"ks": []}, "evaluation.ks is empty; give at least one cut-off"),
        ({"ks": [5, 5]}, "evaluation.ks is [5, 5]; give each cut-off once"),
        ({"arm": "matched", "lam_max": 3}, "core.lam_max has no effect in arm 'matched' of sasrec; leave it out"),
        ({"model": "pop", "epochs": 5}, "training.epochs has no effect in model 'pop', which is not trained; leave it"),
        ({"model": "pop", "controllers": {"ema": {}}}, "controllers.ema has no effect in model 'pop', which is not"),
        ({"experts": 2, "model": "pop"}, "experts has no effect in model 'pop', which has no layers"),
        ({"hiden_size": 3}, "unknown key 'hiden_size'; did you mean 'hidden_size'?"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(given, message):
    with pytest.raises(UserError) as error:
        load_run_config(**given)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_key_that_a_file_has_wrong_is_refused_by_the_files_name(write):
    with pytest.raises(UserError, match=r"run\.yaml: unknown key 'epocs'; did you mean 'epochs'\?"):
        load_run_config(write("epocs: 3\n"))


def test_a_run_may_leave_the_data_set_open_and_then_it_is_found_or_replaced_aloud(monkeypatch):
    config = load_run_config()
    assert config.data.dataset is None
    monkeypatch.setattr("recbft.datasets.config.default_dataset", lambda root: ("ml-100k", None))
    assert config.data.resolved().dataset == "ml-100k"
    monkeypatch.setattr(
        "recbft.datasets.config.default_dataset", lambda root: ("synthetic", "using 'synthetic' instead")
    )
    with pytest.warns(UserWarning, match="using 'synthetic' instead"):
        assert config.data.resolved().dataset == "synthetic"
    assert load_run_config(dataset="ml-100k").data.resolved().dataset == "ml-100k", "a named one is never replaced"


def test_what_a_machine_decides_may_be_said_of_a_model_that_is_not_trained():
    config = load_run_config(model="pop", device="cpu", threads=2, deterministic=True, epochs=200)
    assert (config.training.device, config.training.threads) == ("cpu", 2)


RECBOLE = "train_batch_size: 2048\nepochs: 5\nstopping_step: 3\nvalid_metric: NDCG@7\nuse_gpu: False\n"


def test_how_recbole_would_train_a_model_that_is_not_trained_is_ignored_aloud(write):
    with pytest.warns(
        UserWarning, match=r"ignored: train_batch_size \('pop' is not trained\), stopping_step \('pop' is not trained\)"
    ):
        config = load_run_config(write(f"model: Pop\n{RECBOLE}"))
    assert config.training == load_run_config(model="pop", device="cpu").training
    assert config.evaluation.ks == (5, 7, 10, 20)
    with pytest.warns(UserWarning, match="'pop' is not trained"):
        assert load_run_config(write(f"model: SASRec\n{RECBOLE}"), model="pop").training.epochs == 200
    assert load_run_config(write(f"model: Pop\n{RECBOLE}"), model="sasrec").training.epochs == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["recency_decay=true", "mixer=rope"], "recency_decay has no effect with mixer 'rope'"),
        (["mixer=rfa", "key_precision=off"], "key_precision has no effect in an arm without precision"),
        (["mixer=bayesian", "mixing.prior_variance=0.1"], "prior_variance has no effect in an arm without precision"),
        (["activation=relu", "moe.experts=2"], "activation relu has no effect with experts"),
        (["arm=bft", "moe.experts=2", "core.jacobian_rank=3"], "jacobian_rank has no effect with experts"),
        (["arm=bft", "n_layers=1", "core.jacobian_detach=true"], "jacobian_detach has no effect with n_layers 1"),
        (["mixer=bayesian", "attention_dropout=0.1"], "attention_dropout has no effect with mixer 'bayesian'"),
        (
            ["arm=bft", "mixer=rfa", "core.prior_variance=running"],
            "running is for mixers with attention weights; give a",
        ),
        (["arm=matched", "mixer=rope", "recency_start=0.9"], "recency_start has no effect without a recency decay"),
        (
            ["arm=bft", "mixer=rfa", "core.initial=uniform", "core.prior_variance=0.1"],
            "prior_variance has no effect with a mixer that has no attention weights",
        ),
    ],
)
def test_a_setting_that_a_layer_would_not_hear_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        load_run_config(settings=["arm=matched", "hidden_size=8", *settings]).build(torch.arange(5))


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (
            {"rounds": 3},
            "key 'rounds' has no effect with mixer 'attention'; leave it out, or take mixer boosted, which",
        ),
        (
            {"mixing": {"kernel": "student"}},
            "key 'mixing.kernel' has no effect with mixer 'attention'; .* rfa, sc_rfa",
        ),
        ({"time_bias": True}, "key 'time_bias' has no effect with model 'sasrec'; leave it out, or take model hstu,"),
        ({"model": "pop", "hidden_size": 8}, "key 'hidden_size' has no effect with model 'pop'; .* sasrec, bert4rec,"),
        ({"mixing": {"no_such": 3}}, "unknown key 'mixing.no_such'; there is none here; leave it out"),
    ],
)
def test_a_key_of_another_model_or_mixer_is_refused_by_the_names_of_those(named, message):
    with pytest.raises(UserError, match=f"^{message}"):
        load_run_config(**named)


def test_a_later_batch_size_takes_the_place_of_a_number_of_targets(write):
    file = write("train_batch_size: 2048\nMAX_ITEM_LIST_LENGTH: 20")
    assert load_run_config(file).training.batch_targets == 2048
    assert load_run_config(file, ["epochs=3"]).training.batch_targets == 2048
    made = load_run_config(file, ["batch_size=8"]).training
    assert (made.batch_size, made.batch_targets) == (8, None)
    assert load_run_config(file, ["batch_size=8", "batch_targets=99"]).training.batch_targets == 99
    assert load_run_config(write("training: {batch_size: 8, batch_targets: 99}")).training.batch_targets == 99


def test_sections_of_several_files_are_put_together(tmp_path):
    (tmp_path / "one.yaml").write_text("training: {epochs: 5, batch_size: 7}\nevaluation: {ks: [10, 20]}\n")
    (tmp_path / "two.yaml").write_text("training: {epochs: 6}\nevaluation: {ks: [10]}\n")
    config = load_run_config([tmp_path / "one.yaml", tmp_path / "two.yaml"])
    assert (config.training.epochs, config.training.batch_size, config.evaluation.ks) == (6, 7, (10,))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"model": "gru4rec"}, "model is 'gru4rec'; choose one of bert4rec, content-cosine, hstu, join, pop, sasrec$"),
        ({"lr": 0.1}, "unknown key 'lr'; recbft calls it 'learning_rate'$"),
        ({"embedding_dim": 64}, "unknown key 'embedding_dim'; recbft calls it 'hidden_size'$"),
        ({"embedding_size": 64}, "unknown key 'embedding_size'; recbft calls it 'hidden_size'$"),
        ({"qqqqqq": 64}, "unknown key 'qqqqqq'; `recbft models NAME` lists all$"),
        ({"learning_rat": 1}, r"unknown key 'learning_rat'; did you mean 'learning_rate'\?$"),
    ],
)
def test_an_unknown_name_is_met_with_what_it_may_have_meant_and_few_others(asked, message):
    with pytest.raises(UserError, match=message) as told:
        load_run_config(**asked)
    assert len(str(told.value)) < 140
