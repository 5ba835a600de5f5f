"""A RecBole config read by ``recbft train --config``; RecBole itself is not needed."""

from __future__ import annotations

import warnings

import pytest

from recbft.errors import UserError
from recbft.training.one_run import train
from recbft.training.run_config import load_run_config

EVALUATION = "eval_args: {split: {LS: valid_and_test}, order: TO, mode: full, group_by: user}\nrepeatable: True\n"


@pytest.fixture
def read(tmp_path):
    def read(text, settings=(), **named):
        (tmp_path / "run.yaml").write_text(text)
        return load_run_config(tmp_path / "run.yaml", settings, **named)

    return read


@pytest.mark.parametrize(
    ("line", "section", "key", "value"),
    [
        ("MAX_ITEM_LIST_LENGTH: 30", "backbone", "max_length", 30),
        ("hidden_dropout_prob: 0.3", "backbone", "dropout", 0.3),
        ("attn_dropout_prob: 0.1", "backbone", "attention_dropout", 0.1),
        ("layer_norm_eps: 1e-12", "backbone", "norm_eps", 1e-12),
        ("train_batch_size: 2048", "training", "batch_targets", 2048),
        ("stopping_step: 10", "training", "patience", 11),
        ("eval_step: 2", "training", "eval_every", 2),
        ("clip_grad_norm: {max_norm: 5, norm_type: 2}", "training", "clip_norm", 5.0),
        ("clip_grad_norm: ~", "training", "clip_norm", None),
        ("eval_step: 1\nvalid_metric: MRR", "training", "valid_metric", "mrr"),
        ("eval_step: 1\nvalid_metric: Recall@20", "training", "valid_metric", "hr@20"),
        ("eval_step: 1\nvalid_metric: MAP@10", "training", "valid_metric", "mrr@10"),
        ("use_gpu: no", "training", "device", "cpu"),  # RecBole reads YAML 1.1
        ("use_gpu: On\nrepeatable: yes", "training", "device", "auto"),
        ("gpu_id: -1", "training", "device", "cpu"),  # as CUDA_VISIBLE_DEVICES, which hides every GPU
        ("stopping_step: 10\nlearning_rate: 0.01", "training", "learning_rate", 0.01),
        ("topk: 10", "evaluation", "ks", (10,)),
        ("eval_step: 1\nvalid_metric: NDCG@7", "evaluation", "ks", (5, 7, 10, 20)),
        ("eval_step: 1\nks: [3, 7]\nvalid_metric: NDCG@7", "evaluation", "ks", (3, 7)),
        *((f"eval_step: 1\nvalid_metric: NDCG@{k}", "evaluation", "ks", (5, 10, 20)) for k in (5, 10, 20)),
        ("USER_ID_FIELD: uid", "data", "user", "uid"),
        ("TIME_FIELD: when", "data", "time", "when"),
        ("rm_dup_inter: last", "data", "deduplicate", "last"),
        ("user_inter_num_interval: '[5,inf)'", "data", "min_user_events", 5),
        ("item_inter_num_interval: '(5,inf)'", "data", "min_item_events", 6),
        ("item_inter_num_interval: '(4.5,inf)'", "data", "min_item_events", 5),
        ("item_inter_num_interval: '(-inf,inf)'", "data", "min_item_events", 0),
        ("load_col: ~\nval_interval: ~", "data", "where", None),
        ("eval_args: {split: {LS: valid_and_test}, order: TO, mode: {valid: full, test: full}}", "data", "where", None),
        ("item_inter_num_interval: '[1e1,Inf)'", "data", "min_item_events", 10),
        ("val_interval: {timestamp: '[9.8e8,+1E9)'}", "data", "where", "timestamp>=9.8e8 and timestamp<1e9"),
        ("eval_step: 1\nwhere: event in (buy, cart)", "data", "where", "event in (buy, cart)"),
        ("eval_step: 1\nwhere: timestamp >= 2024-01-01", "data", "where", "timestamp >= 2024-01-01"),
        ("val_interval: {rating: [4, 5]}", "data", "where", "rating>=4 and rating<=5"),
        ("val_interval: {rating: '[4,inf)', year: '(-inf,2000)'}", "data", "where", "rating>=4 and year<2000"),
        ("loss_type: BPR", "backbone", "loss", "bpr"),
        ("loss_type: BPR", "backbone", "num_negatives", None),
        (
            "loss_type: BPR\ntrain_neg_sample_args: {distribution: uniform, sample_num: 3}",
            "backbone",
            "num_negatives",
            3,
        ),
        ("loss_type: BPR\nneg_sampling: {uniform: 2}", "backbone", "num_negatives", 2),
        ("model: SASRec\nlayer: post_norm", "backbone", "output_projection", True),  # RecBole's own SASRec
        ("model: SASRec\nlayer: post_norm\noutput_projection: False", "backbone", "output_projection", False),
        ("log_wandb: True", "training", "trackers", ("wandb",)),
        ("log_wandb: True", "training", "project", None),
        ("log_wandb: yes\nwandb_project: ours", "training", "project", "ours"),
        ("log_wandb: False\nwandb_project: recbole", "training", "project", None),
        ("log_wandb: False\ntrackers: [mlflow]\nproject: ours", "training", "project", "ours"),
        ("model: BERT4Rec\nmask_ratio: 0.3", "backbone", "mask_probability", 0.3),
        ("model: BERT4Rec\nft_ratio: 0.25", "backbone", "last_item_probability", 0.25),
    ],
)
def test_a_key_is_honoured_with_recboles_meaning(read, line, section, key, value):
    assert getattr(getattr(read(line), section), key) == value


@pytest.mark.parametrize(
    ("name", "model", "arm"),
    [
        ("SASRec", "sasrec", "published"),
        ("SASRecBFT", "sasrec", "bft"),
        ("BERT4Rec", "bert4rec", "published"),
        ("BERT4RecBFT", "bert4rec", "bft"),
        ("HSTU", "hstu", "published"),
        ("HSTUBFT", "hstu", "bft"),
        ("Pop", "pop", "published"),
    ],
)
def test_recboles_names_of_models_are_known(read, name, model, arm):
    config = read(f"model: {name}")
    assert (config.model, config.arm) == (model, arm)


def test_our_own_keys_may_stand_among_recboles_and_options_win(read):
    config = read("model: SASRecBFT\nstopping_step: 3\nlam_max: 7\ncore.q_max: 2\nseed: 2020\narm: bft\n", epochs=9)
    assert (config.core.lam_max, config.core.q_max, config.seed, config.training.epochs) == (7.0, 2.0, 2020, 9)
    assert read("model: SASRec\narm: matched").arm == "matched"


def test_the_samples_are_the_prefixes_that_recbole_makes_unless_told_otherwise(read):
    text = "model: SASRec\ntrain_batch_size: 64\n"
    assert read(text).training.samples == "prefixes"
    assert read(f"{text}samples: windows").training.samples == "windows"
    assert read(f"{text}training: {{samples: last}}").training.samples == "last"
    assert read(text, samples="windows").training.samples == "windows"
    assert read("model: sasrec\nbatch_size: 64").training.samples == "windows", "a config of recbft"


def test_recboles_own_defaults_written_out_are_read_as_they_are(read):
    text = (
        "model: SASRec\nn_layers: 2\nn_heads: 2\nhidden_size: 64\ninner_size: 256\nhidden_dropout_prob: 0.5\n"
        "attn_dropout_prob: 0.5\nhidden_act: 'gelu'\nlayer_norm_eps: 1e-12\ninitializer_range: 0.02\nloss_type: 'CE'\n"
        "epochs: 300\ntrain_batch_size: 2048\nlearner: adam\nlearning_rate: 0.001\ntrain_neg_sample_args: ~\n"
        "weight_decay: 0.0\ndataset: ml-100k\nload_col:\n    inter: [user_id, item_id, rating, timestamp]\n"
        + EVALUATION
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = read(text)
    assert (config.data.dataset, config.training.epochs, config.backbone.activation) == ("ml-100k", 300, "gelu")


BERT4REC = (
    "n_layers: 2\nn_heads: 2\nhidden_size: 64\ninner_size: 256\nhidden_dropout_prob: 0.2\nattn_dropout_prob: 0.2\n"
    "hidden_act: 'gelu'\nlayer_norm_eps: 1e-12\ninitializer_range: 0.02\nmask_ratio: 0.3\nloss_type: 'CE'\n"
    "transform: mask_itemseq\nft_ratio: 0.5\n"
)


def test_recboles_own_file_for_bert4rec_is_read_as_it_is(read):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = read(f"model: BERT4Rec\n{BERT4REC}")
    assert (config.model, config.backbone.mask_probability) == ("bert4rec", 0.3)


def test_words_of_recbole_for_what_the_model_has_not_are_named(read):
    with pytest.warns(UserWarning, match=r"ignored: mask_ratio \('sasrec' has none\), ft_ratio \('sasrec' has none\)$"):
        assert read(f"model: SASRec\n{BERT4REC}").backbone.activation == "gelu"
    with pytest.warns(UserWarning, match=r"n_layers \('pop' has none\)"):
        assert read(BERT4REC, model="pop").model == "pop"
    with pytest.raises(UserError, match="key 'activation' has no effect with model 'bert4rec'"):
        read(f"model: BERT4Rec\nactivation: gelu\n{BERT4REC}")


def test_one_file_serves_all_models(read):
    text = "hidden_size: 32\ninner_size: 64\nhidden_act: gelu\nhidden_dropout_prob: 0.2\nattn_dropout_prob: 0.2\n"
    said = r"ignored: attn_dropout_prob \('hstu' has none\), inner_size \('hstu' has none\)$"
    with pytest.warns(UserWarning, match=said):
        config = read(text, model="HSTU")
    assert (config.model, config.arm, config.backbone.feed_forward) == ("hstu", "published", False)
    with pytest.warns(UserWarning, match=r"ignored: attn_dropout_prob \('hstu' has none\)$"):
        assert read(text, model="HSTUBFT").backbone.inner_size == 64
    with pytest.warns(UserWarning, match=r"ignored: attn_dropout_prob \('hstu' has none\)$"):
        assert read(text, ["feed_forward=true"], model="HSTU", arm="published").backbone.inner_size == 64
    for name in ("SASRec", "BERT4Rec"):
        assert read(text, model=name).backbone.inner_size == 64
    with pytest.warns(UserWarning, match=r"loss_type \('pop' has none\)"):
        assert read("loss_type: BPR\ntrain_neg_sample_args: {sample_num: 2}", model="Pop").model == "pop"


def test_recboles_names_are_taken_beside_its_config(read):
    for text in ("model: GRU4Rec\nstopping_step: 3\n", "model: BERT4Rec\n", "learning_rate: 0.01\n"):
        for given in ({"model": "SASRec"}, {"settings": ["model=SASRec"]}):
            config = read(text, **given)
            assert (config.model, config.arm, config.training.samples) == ("sasrec", "published", "prefixes")
    assert read("stopping_step: 3\n", model="SASRec", arm="bft").arm == "bft"
    assert read("stopping_step: 3\n", model="SASRecBFT").arm == "bft"
    with pytest.raises(UserError, match="model is 'SASRec'; did you mean 'sasrec'"):
        read("training: {epochs: 3}\n", model="SASRec")  # a config of recbft


def test_of_several_files_later_ones_win_as_in_recbole(tmp_path):
    for name, text in (
        ("data.yaml", "MAX_ITEM_LIST_LENGTH: 30\nlearning_rate: 0.1\ntopk: [10]\n"),
        ("model.yaml", "model: SASRec\nlearning_rate: 0.01\n"),
    ):
        (tmp_path / name).write_text(text)
    config = load_run_config([tmp_path / "data.yaml", tmp_path / "model.yaml"], ["epochs=3"])
    assert (config.model, config.backbone.max_length, config.evaluation.ks) == ("sasrec", 30, (10,))
    assert (config.training.learning_rate, config.training.epochs) == (0.01, 3)
    (tmp_path / "model.yaml").write_text("model: SASRec\nlearning_rate: none\n")
    with pytest.raises(UserError, match=r"data\.yaml and .*model\.yaml: learning_rate is 'none'; give a number"):
        load_run_config([tmp_path / "data.yaml", tmp_path / "model.yaml"])


def test_keys_without_meaning_are_named_once(read):
    with pytest.warns(UserWarning) as caught:
        read(
            "eval_batch_size: 4096\nshuffle: no\nworker: 4\nnormalize_all: False\nsave_dataset: no\n"
            "load_col: {inter: '*', item: [item_id]}\nmetrics: [Hit, GAUC, ItemCoverage]\n"
        )
    [warning] = caught
    assert str(warning.message).endswith(
        "run.yaml: without meaning in recbft and ignored: eval_batch_size, shuffle, worker, load_col.item, "
        "metrics: GAUC"
    )


def test_an_atomic_file_is_found_where_recbole_looks_and_ordered_by_time(read, tmp_path):
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "shop.inter").write_text("user_id:token\titem_id:token\ttimestamp:float\n")
    data = read(f"dataset: shop\ndata_path: {tmp_path}").data
    assert data.dataset == str(tmp_path / "shop" / "shop.inter")
    assert (data.user, data.item, data.time) == ("user_id", "item_id", "timestamp")
    timed = read(f"dataset: shop\ndata_path: {tmp_path}\nTIME_FIELD: when\n", mixer="rfa")  # which has a time too
    assert timed.data.time == "when" and timed.mixing.time is False
    assert read(f"dataset: shop\ndata_path: {tmp_path}\nTIME_FIELD: when").data.time == "when"


def test_a_data_set_named_beside_the_config_lies_where_recbole_looks(read, tmp_path, monkeypatch):
    file = tmp_path / "shop" / "shop.inter"
    file.parent.mkdir()
    file.write_text("user_id:token\titem_id:token\ttimestamp:float\n")
    text = f"data_path: {tmp_path}\nITEM_ID_FIELD: sku\n"
    for config in (
        read(text, dataset="shop"),
        read(text, settings=["dataset=shop"]),
        read(f"{text}dataset: other\n", dataset="shop"),
        read("ITEM_ID_FIELD: sku\n", dataset=str(file)),
    ):
        data = config.data
        assert (data.dataset, data.user, data.item, data.time) == (str(file), "user_id", "sku", "timestamp")
    assert read(text, dataset="shop", settings=["time=when"]).data.time == "when"
    for name in ("ml-100k", "amazon-beauty", "ratings.csv"):
        assert (read(text, dataset=name).data.dataset, read(text, dataset=name).data.time) == (name, None)
    assert read("hidden_size: 8\n", dataset="shop").data.dataset == "shop"  # a config of our own
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dataset").mkdir()
    file.parent.rename(tmp_path / "dataset" / "shop")
    assert read("ITEM_ID_FIELD: sku\n", dataset="shop").data.dataset == "dataset/shop/shop.inter"


def test_a_model_named_beside_the_config_stands_in_place_of_its(read):
    assert read("model: GRU4Rec\nstopping_step: 3\n", model="bert4rec").model == "bert4rec"
    config = read("model: SASRec\nstopping_step: 3\n", model="sasrec")
    assert (config.model, config.arm) == ("sasrec", "published")


def test_a_data_path_is_kept_as_written_and_ml_100k_is_the_bundled_one(read, tmp_path):
    assert read("dataset: shop\ndata_path: ~nobody-here").data.dataset == "~nobody-here/shop/shop.inter"
    assert read(f"dataset: ml-100k\ndata_path: {tmp_path}").data.dataset == "ml-100k"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: BERT4Rec\nhidden_act: swish", "hidden_act is 'swish', but the activation of model 'bert4rec' is gelu"),
        ("loss_type: BPR\nneg_sampling: {popularity: 1}", "neg_sampling is {'popularity': 1}, but negatives are drawn"),
        ("loss_type: BPR\ntrain_neg_sample_args: {sample_num: 1, dynamic: True}", "negatives are drawn uniformly"),
        ("loss_type: BPR\ntraining_neg_sample_num: -1", "training_neg_sample_num is -1, but negatives are drawn unif"),
        ("loss_type: ce", "loss_type is 'ce'; write loss_type: CE"),
        ("train_neg_sample_args: {sample_num: 1}", "takes no sampled negatives; write train_neg_sample_args: ~"),
        ("MAX_ITEM_LIST_LENGHT: 50\nstopping_step: 3", "LENGHT'; did you mean 'MAX_ITEM_LIST_LENGTH'?"),
        ("load_col: {inter: [user_id, item_id]}", "without the time column 'timestamp'"),
        ("TIME_FIELD: ~", "TIME_FIELD is empty; histories are ordered by time: name the time column"),
        ("eval_args: {split: {RS: [8, 1, 1]}, order: TO}", "by leave-one-out: write split: {LS: valid_and_test}"),
        ("eval_args: {split: {LS: valid_and_test}}", "left out, which RecBole reads as RO: a random order"),
        ("eval_args: {split: {LS: valid_and_test}, order: TO, mode: uni100}", "among all items: write mode: full"),
        ("eval_args: full", "eval_args is 'full'; give keys and values"),
        ("repeatable: False", "RecBole's sequential models need True, and filter_seen: true masks what was seen"),
        ("benchmark_filename: [train, test]", "name the files that train, validate and test, such as [train, valid, t"),
        ("alias_of_item_id: [item_id_list]", "alias_of_item_id names columns that hold whole histories"),
        ("rm_dup_inter: first\nval_interval: {rating: '[4,inf)'}", "RecBole removes repeated pairs before it filters"),
        ("learner: sgd", "learner is 'sgd'; recbft trains with adam"),
        ("user_inter_num_interval: '[5,10]'", "recbft knows no upper bound: write '[5,inf)'"),
        ("item_inter_num_interval: five", "item_inter_num_interval is 'five'; write one interval, such as '[5,inf)'"),
        ("clip_grad_norm: 5", "clip_grad_norm is 5; write clip_grad_norm: {max_norm: 5}"),
        ("clip_grad_norm: {max_norm: 5, norm_type: 1}", "clip_grad_norm.norm_type is 1; gradients are clipped by th"),
        ("eval_step: 1\nvalid_metric: AUC", "valid_metric is 'AUC'"),
        ("field_separator: ','", "field_separator is ','; atomic files are read with tabs: leave it out"),
        ("repeatable: ~", "repeatable is None; write True or False"),
        ("stopping_step: many", "stopping_step is 'many'; give a whole number >= 0"),
        ("stopping_step: true", "stopping_step is True; give a whole number >= 0"),
        ("eval_step: 0", "eval_step is 0; give a whole number >= 1"),
        ("hidden_dropout_prob: .2\ndropout: .5", "hidden_dropout_prob is 0.2 and dropout is 0.5, but they are"),
        ("stopping_step: 3\npatience: 9", "stopping_step is 3 and patience is 9, but they are one setting"),
        ("model: [sasrec]\nstopping_step: 3", "model ['sasrec'] is not in recbft; choose one of SASRec"),
        ("5: 3\nstopping_step: 3", "unknown key 5; leave it out"),
        ("num_layers: 2\ntau: 1\nstopping_step: 3", "unknown keys 'num_layers' (n_layers?), 'tau'; correct each or l"),
        ("min_user_inter_num: 5\nstopping_step: 3", "'min_user_inter_num'; did you mean 'user_inter_num_interval'?"),
        ("model: GRU4Rec\nnum_layers: 1\nloss_type: BPR", "model 'GRU4Rec' is not in recbft; choose one of SASRec, B"),
        ("benchmark_filename: train\neval_args: {split: {RS: [8, 1, 1]}}", "benchmark_filename is 'train'; name the"),
        ("val_interval: {rating: 3}", "val_interval.rating is '3'; write one interval, such as '[5,inf)'"),
        ("item_inter_num_interval: '[1e400,inf)'", "which no number of events reaches; write one such as '[5,inf)'"),
        ("load_col: [user_id]", "load_col is ['user_id']; give keys and values, such as inter: [user_id, item_id"),
        ("load_col: {inter: 3}", "load_col.inter is 3; give a list, such as [user_id, item_id, timestamp], or '*'"),
        ("hidden_dropout_prob: 1.5", "run.yaml: hidden_dropout_prob is 1.5; give a number >= 0 and < 1"),
        ("user_inter_num_interval: '[1e30,inf)'", "run.yaml: user_inter_num_interval is about 2^99; give a whole"),
        ("topk: [5]\nvalid_metric: MRR@7", "run.yaml: valid_metric is 'mrr@7', but topk is [5]; add 7 to topk"),
        ("log_wandb: True\ntrackers: [mlflow]", "log_wandb is True and trackers is ['mlflow']; name wandb in"),
    ],
)  # fmt: skip
def test_what_recbft_does_not_do_is_refused_in_one_line_with_the_file(read, text, message):
    with pytest.raises(UserError) as error:
        read(text)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert "run.yaml: " in str(error.value)


def test_a_message_about_a_setting_made_beside_the_config_has_our_name(read):
    for beside in ({"settings": ["dropout=2"]}, {"settings": ["backbone.dropout=2"]}, {"backbone": {"dropout": 2}}):
        with pytest.raises(UserError) as error:
            read("hidden_dropout_prob: 0.5", **beside)
        assert str(error.value).startswith("backbone.dropout is 2")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("stopping_step=3", "'stopping_step'; recbft calls it 'patience', which is one more"),
        ("TIME_FIELD=when", "'TIME_FIELD'; recbft calls it 'time'"),
        ("num_heads=2", "'num_heads'; recbft calls it 'n_heads'"),
        ("eval_batch_size=9", "'eval_batch_size'; RecBole's keys are read in a config file alone"),
    ],
)
def test_a_setting_by_recboles_name_is_given_ours(read, setting, message):
    with pytest.raises(UserError) as error:
        read("train_batch_size: 512", [setting])
    assert str(error.value) == f"unknown key {message}"


def test_a_file_of_our_own_is_left_alone(read):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read("model: sasrec\nepochs: 5\nhidden_size: 32\n").training.batch_targets is None


def test_files_that_recbole_takes_as_split_are_the_parts_of_the_data(read, tmp_path):
    (tmp_path / "shop").mkdir()
    parts = {"train": "1\ta\t1\n1\tb\t2\n2\tb\t1\n", "valid": "1\tc\t3\n", "test": "1\ta\t4\n2\tc\t5\n"}
    for part, rows in parts.items():
        text = f"user_id:token\titem_id:token\ttimestamp:float\n{rows}"
        (tmp_path / "shop" / f"shop.{part}.inter").write_text(text)
    split = "benchmark_filename: [train, valid, test]\neval_args: {split: {RS: [8, 1, 1]}, order: TO}\n"
    config = read(f"dataset: shop\ndata_path: {tmp_path}\n{split}").data
    assert config.time == "timestamp" and config.splitting().split == "given"
    dataset = config.load()
    assert dataset.name == "shop" and dataset.split.counts["training"]["events"] == 3
    assert dataset.decode(dataset.split.test.target).tolist() == ["a", "c"]
    untimed = read(f"dataset: shop\ndata_path: {tmp_path}\nTIME_FIELD: ~\n{split}").data
    assert untimed.time is None and untimed.load().times is None
    augmented = "user_id:token\titem_id_list:token_seq\titem_id:token\ttimestamp:float\n1\ta b\tc\t1\n"
    (tmp_path / "shop" / "shop.train.inter").write_text(augmented)
    with pytest.raises(UserError, match="'item_id_list' holds whole histories"):
        config.load()


def test_a_batch_holds_about_as_many_targets_as_recboles_would(read, tmp_path):
    from recbft.datasets.planted import synthetic_dataset
    from recbft.datasets.synth import SyntheticConfig

    dataset = synthetic_dataset(SyntheticConfig(num_users=100, num_items=80, mean_length=10.0))
    targets = int((dataset.lengths - 3).sum())
    config = read(f"train_batch_size: {targets // 10}\nepochs: 1\nhidden_size: 8\n", device="cpu")
    run = train(config, tmp_path / "run", dataset=dataset)
    assert run.metrics["steps"] in (10, 11)
