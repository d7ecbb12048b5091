"""Folders as transformers and PEFT write them: tied models in pieces, adapters, Trainer checkpoints."""

import pytest
import torch
from raises import raises

import gradkeep as gk
from gradkeep.capturing._weights import load_weights, put_weights, read_adam
from gradkeep.errors import CaptureError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries


def gpt2(seed, **options):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 31, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16} | options
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def llama(seed, **options):
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 31,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 16,
        "tie_word_embeddings": True,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | options))


MODELS = {"gpt2": (gpt2, "c_attn"), "llama": (llama, "q_proj")}


def write(folder, model, kind):
    if kind == "one file":
        model.save_pretrained(folder)
    elif kind == "shards":
        model.save_pretrained(folder, max_shard_size="1KB")
        assert (folder / "model.safetensors.index.json").exists()
    else:
        folder.mkdir(exist_ok=True)
        state = model.state_dict()
        if kind == "bin without the head":
            del state["lm_head.weight"]
        torch.save(state, folder / "pytorch_model.bin")


@pytest.mark.parametrize("kind", ["one file", "shards", "bin", "bin without the head"])
@pytest.mark.parametrize("name", MODELS)
def test_folders_of_tied_models_load_and_stay_tied(tmp_path, name, kind):
    make, _ = MODELS[name]
    source, model = make(1), make(2)
    write(tmp_path, source, kind)
    put_weights(model, load_weights(tmp_path), name="final")
    assert model.lm_head.weight is model.get_input_embeddings().weight
    for key, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


def with_adapter(name, seed, **options):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    make, target = MODELS[name]
    settings = {"r": 2, "lora_alpha": 4, "target_modules": [target]} | options
    base = settings.pop("base", {})
    model = peft.get_peft_model(make(1, **base), peft.LoraConfig(**settings))
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


KINDS = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "with a head": {"modules_to_save": ["ln_f", "norm"]},
    "with an embedding": {"target_modules": ["c_attn", "q_proj", "wte", "embed_tokens"]},
    "by rank": {"rank_pattern": {"0.attn.c_attn": 1, "0.self_attn.q_proj": 1}},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_adapter_folders_load_as_peft_loads_them(tmp_path, name, kind):
    source = with_adapter(name, 1, **KINDS[kind])
    source.save_pretrained(tmp_path)
    model = with_adapter(name, 2, **KINDS[kind])
    put_weights(model, load_weights(tmp_path), name="final")
    for key, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"r": 3}, "other settings[\\s\\S]*r=3 for 2"),
        ({"lora_alpha": 8}, "other settings[\\s\\S]*lora_alpha=8 for 4"),
        ({"use_dora": True}, "other settings[\\s\\S]*use_dora=True for False"),
        ({"target_modules": ["c_proj"]}, "another adapter than the model's"),
        ({"base": {"n_embd": 4}}, "another size"),
        ({"base": {"n_layer": 3}}, "another adapter than the model's"),
    ],
)
def test_another_adapter_rank_or_base_is_refused(tmp_path, other, match):
    with_adapter("gpt2", 1, **other).save_pretrained(tmp_path)
    with pytest.raises(CaptureError, match=match):
        put_weights(with_adapter("gpt2", 2), load_weights(tmp_path), name="final")


def test_the_adapter_of_another_base_model_is_refused(tmp_path):
    with_adapter("llama", 1, target_modules=["q_proj"]).save_pretrained(tmp_path / "llama")
    with raises(CaptureError, "capture.adapter_base", mentions="LlamaForCausalLM"):
        put_weights(with_adapter("gpt2", 2), load_weights(tmp_path / "llama"), name="final")
    source = with_adapter("gpt2", 1)
    source.peft_config["default"].base_model_name_or_path = "team/one-model"
    source.save_pretrained(tmp_path / "other")
    model = with_adapter("gpt2", 2)
    model.peft_config["default"].base_model_name_or_path = "/models/another-model"
    with raises(CaptureError, "capture.adapter_base", mentions="team/one-model"):
        put_weights(model, load_weights(tmp_path / "other"), name="final")
    model.peft_config["default"].base_model_name_or_path = "/models/one-model"
    put_weights(model, load_weights(tmp_path / "other"), name="final")


def test_of_several_adapters_the_active_one_is_replaced(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    source = with_adapter("gpt2", 1)
    source.save_pretrained(tmp_path)
    model = with_adapter("gpt2", 2)
    model.add_adapter("second", peft.LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"]))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.set_adapter("second")
    put_weights(model, load_weights(tmp_path), name="final")
    for key, value in model.state_dict().items():
        expected = (
            source.state_dict()[key.replace("second", "default")]
            if "second" in key
            else before[key]
        )
        assert torch.equal(value, expected), key


def test_adapters_that_transformers_itself_attached_are_replaced(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], fan_in_fan_out=True)
    source, model = gpt2(1), gpt2(1)
    for one in (source, model):
        one.add_adapter(config)
    for name, parameter in source.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    source.save_pretrained(tmp_path)
    put_weights(model, load_weights(tmp_path), name="final")
    for key, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


@pytest.mark.parametrize("kind", ["LoRA", "DoRA"])
def test_an_adapter_folder_is_captured_as_the_model_is(tmp_path, kind):
    source = with_adapter("llama", 1, **KINDS[kind])
    source.save_pretrained(tmp_path / "adapter")
    store = gk.open(tmp_path / "store")
    batch = {"input_ids": torch.arange(24).remainder(31).view(4, 6)}
    options = {"task": gk.LanguageModeling(), "split": "train", "progress": False, "mode": "eval"}
    model = with_adapter("llama", 2, **KINDS[kind])
    gk.capture(store, model, [batch], checkpoints={"folder": tmp_path / "adapter"}, **options)
    gk.capture(store, source, [batch], checkpoints="here", **options)
    folder, here = (gk.gradients(store, split="train", checkpoints=c) for c in ("folder", "here"))
    for name, value in here.restore(here.ids).items():
        assert torch.equal(folder.restore(folder.ids)[name], value), name


@pytest.mark.parametrize("kind", ["whole", "adapter"])
def test_a_trainer_s_folder_gives_adam_s_second_moments(tmp_path, kind):
    pytest.importorskip("accelerate", reason="accelerate, which its Trainer needs, is missing")
    model = gpt2(1) if kind == "whole" else with_adapter("gpt2", 1, **KINDS["DoRA"])
    rows = torch.randint(31, (8, 6), generator=torch.Generator().manual_seed(0))
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            max_steps=3,
            save_steps=3,
            weight_decay=0.1,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )
    trainer.train()
    state = trainer.optimizer.state_dict()["state"]
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    expected = {
        n: optimizer.state[p]["exp_avg_sq"]
        for n, p in model.named_parameters()
        if p in optimizer.state
    }
    moments = read_adam(tmp_path / "checkpoint-3", model)
    assert len(expected) == len(state)
    assert moments.second.keys() == expected.keys()
    assert moments.step == 3
    for name, value in expected.items():
        assert torch.equal(moments.second[name], value), name
    with raises(CaptureError, "capture.optimizer_does_not_fit"):
        read_adam(tmp_path / "checkpoint-3", gpt2(1, n_layer=3))
