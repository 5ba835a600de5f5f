"""A pretrained model with a precision channel: equal to the original at warm-up 0, and a model of Hugging Face's."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from recbft.errors import UserError
from recbft.models.precision_channel import CoreConfig
from recbft.pretrained import PrecisionLlamaForCausalLM, track_precision

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8]])
RIGHT = torch.tensor([[1] * 10, [1] * 7 + [0] * 3])
LEFT = RIGHT.flip(1)


@pytest.mark.parametrize("mask", [None, RIGHT])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_at_warmup_0_logits_are_the_originals_to_the_last_bit(plain, family, dtype, attention, mask):
    original = plain(family, attention=attention, dtype=dtype)
    tracked = track_precision(original)
    expected = original(IDS, attention_mask=mask).logits
    assert torch.equal(expected, tracked(IDS, attention_mask=mask).logits)
    assert torch.equal(expected, tracked.train()(IDS, attention_mask=mask).logits)
    assert torch.equal(expected, original(IDS, attention_mask=mask).logits), "the original is as it was"


def test_the_original_and_the_tracked_model_share_their_modules(plain):
    original = plain()
    tracked = track_precision(original)
    own = dict(tracked.named_parameters())
    assert all(own[name] is parameter for name, parameter in original.named_parameters())
    new = [name for name in own if name not in dict(original.named_parameters())]
    assert new and all({"start", "precision", "update"} & set(name.split(".")) for name in new)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("mask", [None, LEFT])
def test_logits_with_a_cache_are_those_without(tiny, family, mask):
    model = tiny(family)
    model.set_ramp(1.0)
    with torch.no_grad():
        whole = model(IDS, attention_mask=mask).logits
        begun = model(IDS[:, :4], attention_mask=None if mask is None else mask[:, :4], use_cache=True)
        logits, cache = [begun.logits], begun.get("cache", begun.get("past_key_values"))
        for t in range(4, 10):
            given = None if mask is None else mask[:, : t + 1]
            position = None if mask is None else torch.full((2, 1), t)
            argument = "cache" if "cache" in begun else "past_key_values"
            step = model(IDS[:, t : t + 1], attention_mask=given, position_ids=position, **{argument: cache})
            logits.append(step.logits)
    read = torch.ones_like(IDS, dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(torch.cat(logits, dim=1)[read], whole[read], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("more", [{}, {"cache_implementation": "static"}, {"num_beams": 3}])
def test_generation_with_a_cache_is_that_without(tiny, more):
    model = tiny(dtype=torch.float32)
    model.set_ramp(1.0)
    asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with_cache = model.generate(IDS[:, :5], attention_mask=torch.ones_like(IDS[:, :5]), **asked, **more)
    more = {key: value for key, value in more.items() if key == "num_beams"}
    without = model.generate(IDS[:, :5], attention_mask=torch.ones_like(IDS[:, :5]), **asked, **more, use_cache=False)
    assert torch.equal(with_cache, without)


def test_padding_changes_no_logit_and_no_precision(tiny):
    model = tiny()
    model.set_ramp(1.0)
    with torch.no_grad():
        alone = model(IDS[1:, :7]).logits
        precision = model.posterior_precision
        padded = model(IDS, attention_mask=RIGHT).logits
    torch.testing.assert_close(padded[1:, :7], alone)
    torch.testing.assert_close(model.posterior_precision[1:, :7], precision)


def test_a_later_token_changes_nothing_before_it(tiny):
    model = tiny()
    model.set_ramp(1.0)
    changed = IDS.clone()
    changed[:, 6] = 0
    with torch.no_grad():
        before, after = model(IDS).logits, model(changed).logits
    assert torch.equal(before[:, :6], after[:, :6]) and not torch.equal(before[:, 6:], after[:, 6:])


def test_a_window_of_attention_is_kept(plain):
    """Mistral reads the last few tokens: what stands before them has no part in a layer's precision either."""
    model = track_precision(plain("mistral", sliding_window=3, num_hidden_layers=1))
    model.set_ramp(1.0)
    changed = IDS.clone()
    changed[:, 4] = 0
    with torch.no_grad():
        before, after = model(IDS).logits, model(changed).logits
    assert torch.equal(before[:, 7:], after[:, 7:]) and not torch.equal(before[:, 4:7], after[:, 4:7])


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_a_model_is_saved_and_loaded(tiny, family, tmp_path):
    model = tiny(family).train()
    model(IDS, labels=IDS).loss.backward()  # moves the running means
    model.eval().set_ramp(0.7)
    model.save_pretrained(tmp_path)
    for loaded in (
        type(model).from_pretrained(tmp_path, dtype=torch.float64),
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64),
    ):
        assert type(loaded) is type(model) and loaded.ramp == model.ramp
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
        assert not loaded.training


def test_weights_without_a_channel_are_refused_where_one_is_expected(plain, tmp_path):
    plain().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"config has no precision, .*track_precision"):
        PrecisionLlamaForCausalLM.from_pretrained(tmp_path)


def test_a_copy_is_a_model_of_its_own(tiny):
    model = tiny()
    model.set_ramp(1.0)
    other = copy.deepcopy(model)
    expected = model(IDS).logits
    other.set_ramp(0.0)
    assert torch.equal(model(IDS).logits, expected) and not torch.equal(other(IDS).logits, expected)


@pytest.mark.parametrize("seed", range(2))
def test_training_moves_backbone_and_channel_and_lowers_the_loss(tiny, seed):
    torch.manual_seed(seed)
    model = tiny(warmup=4, dtype=torch.float32).train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses, ramps = [], []
    for _ in range(12):
        ramps.append(model.ramp)
        loss = model(IDS, labels=IDS).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert ramps == [0, 0.25, 0.5, 0.75, *[1] * 8]
    assert losses[-1] < 0.5 * losses[0]
    still = {name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])}
    # No score depends on the last layer's prediction.
    assert still == {"model.layers.2.precision.noise_logits"}


@pytest.mark.slow
def test_the_trainer_of_hugging_face_trains_saves_and_resumes(tiny, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": row, "labels": row} for row in IDS.repeat(4, 1)]

    def trained(steps, **more):
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=steps,
            per_device_train_batch_size=2,
            save_steps=3,
            lr_scheduler_type="constant",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(model=tiny(warmup=5, dtype=torch.float32), args=arguments, train_dataset=data)
        trainer.train(**more)
        return trainer.model

    whole, resumed = trained(6), trained(6, resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert whole.ramp == resumed.ramp == 1
    for (name, one), (_, other) in zip(whole.state_dict().items(), resumed.state_dict().items(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_beside_half_weights_the_channel_stays_in_float32(plain, dtype, tmp_path):
    model = track_precision(plain(dtype=dtype)).train()
    channel = [p for name, p in model.named_parameters() if {"start", "precision"} & set(name.split("."))]
    assert {p.dtype for p in channel} == {torch.float32}
    model.set_ramp(1.0)
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    assert loss.isfinite() and model.posterior_precision.dtype == torch.float32
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    kinds = [{name: p.dtype for name, p in one.named_parameters()} for one in (loaded, model)]
    assert kinds[0] == kinds[1]


def test_a_channel_in_half_precision_is_not_trained(tiny):
    model = tiny().to(torch.bfloat16).train()
    with pytest.raises(
        UserError, match=r"trained in float32 or float64, got torch.bfloat16; leave the model in float32"
    ):
        model(IDS)
    model.eval()(IDS)


def test_autocast_trains(tiny):
    model = tiny(dtype=torch.float32).train()
    model.set_ramp(1.0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(IDS, labels=IDS).loss
    loss.backward()
    assert loss.isfinite() and model.posterior_precision.dtype == torch.float32


def test_hidden_states_are_given_and_attention_weights_refused(tiny):
    model = tiny()
    assert len(model(IDS, output_hidden_states=True).hidden_states) == 4
    with pytest.raises(UserError, match="returns no attention weights"):
        model(IDS, output_attentions=True)


def test_what_is_not_supported_is_refused_with_what_is(plain, tiny):
    other = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11))
    families = "give one of LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"
    with pytest.raises(UserError, match=f"GPT2LMHeadModel is not supported; {families}"):
        track_precision(other)
    with pytest.raises(UserError, match=f"PrecisionLlamaForCausalLM already tracks precision; {families}"):
        track_precision(tiny())
    with pytest.raises(UserError, match=r"core.estimator is 'delta'; choose one of reml"):
        track_precision(plain(), CoreConfig(estimator="delta", initial="hybrid"))
    with pytest.raises(UserError, match=r"core.initial is 'count'; choose one of hybrid, uniform"):
        track_precision(plain(), CoreConfig())
    with pytest.raises(UserError, match=r"core.prior_variance running is for models of recbft; give a number"):
        track_precision(plain(), CoreConfig(initial="hybrid", jacobian="exact", prior_variance="running"))
    with pytest.raises(UserError, match=r"core.read_out temperature is for models of recbft; leave it out"):
        track_precision(plain(), CoreConfig(initial="hybrid", jacobian="exact", read_out="temperature"))
    with pytest.raises(ValueError, match=r"does not support (gradient|activation) checkpointing"):
        tiny().gradient_checkpointing_enable()
    model = tiny()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match=r"attention 'flash_attention_2' tells no weights; model.set_attn"):
        model.model.layers[0]._check({})


@pytest.mark.parametrize("update", ["residual", "gate", "fixed"])
def test_other_update_rules_start_from_the_original_too(plain, update):
    original = plain()
    tracked = track_precision(original, CoreConfig(initial="uniform", update=update, jacobian="off"))
    assert torch.equal(tracked(IDS).logits, original(IDS).logits)
    tracked.set_ramp(1.0)
    assert not torch.equal(tracked(IDS).logits, original(IDS).logits), "the bias of (2.2) at least"


def test_a_model_is_made_from_its_config_too(tiny):
    config = tiny().config
    model = PrecisionLlamaForCausalLM(config)
    assert model.ramp == 0 and isinstance(model, LlamaForCausalLM)
    assert model(IDS).logits.isfinite().all()
