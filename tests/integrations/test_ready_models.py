"""Models of transformers as people run them: checkpointed, offloaded by accelerate, in 16 bits, with adapters."""

import copy

import pytest
import torch

import gradkeep as gk

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries
BATCH = {"input_ids": torch.arange(24).remainder(31).view(4, 6)}
COMMON = {"vocab_size": 31, "tie_word_embeddings": True}


def gpt2():
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        n_embd=8,
        n_layer=2,
        n_head=2,
        n_positions=16,
        attn_pdrop=0,
        embd_pdrop=0,
        resid_pdrop=0,
        **COMMON,
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        **COMMON,
    )
    return transformers.LlamaForCausalLM(config)


def mixtral():
    torch.manual_seed(1)
    config = transformers.MixtralConfig(
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        max_position_embeddings=16,
        vocab_size=31,
    )
    return transformers.MixtralForCausalLM(config)


MODELS = {"gpt2": gpt2, "llama": llama}


def capture(store, model, **options):
    options = {"task": gk.LanguageModeling(), "split": "train", "progress": False} | options
    return gk.capture(store, model, [BATCH], **options)


def assert_same(store, plain, other, **options):
    capture(store, plain, checkpoints="plain", **options)
    capture(store, other, checkpoints="other", **options)
    gradients = [gk.gradients(store, split="train", checkpoints=c) for c in ("other", "plain")]
    ours, theirs = (one.restore(one.ids) for one in gradients)
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        error = (ours[name] - value).norm() / value.norm().clamp(min=1e-9)
        assert error < 1e-5, (name, float(error))


@pytest.fixture
def store(tmp_path):
    return gk.open(tmp_path / "store")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gradient_checkpointing_changes_nothing(store, name, reentrant):
    model = MODELS[name]()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    assert_same(store, MODELS[name]().train(), model, mode="train")


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("name", MODELS)
def test_offloaded_models_have_the_gradients_of_loaded_ones(store, tmp_path, name, where):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = MODELS[name]().eval()
    if where == "cpu":
        model = accelerate.cpu_offload(model, execution_device="cpu")
    else:
        model = accelerate.disk_offload(model, str(tmp_path / "weights"), execution_device="cpu")
    assert any(p.is_meta for p in model.parameters())
    assert_same(store, MODELS[name]().eval(), model)
    assert any(p.is_meta for p in model.parameters())
    assert model(**BATCH).logits.isfinite().all()  # its hooks are as they were


def test_a_device_map_that_offloads_layers_changes_nothing(store, tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "disk"}
    places |= {"model.layers.1": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    model = accelerate.dispatch_model(
        llama().eval(),
        places,
        main_device="cpu",
        offload_dir=str(tmp_path / "weights"),
        force_hooks=True,
    )
    assert any(p.is_meta for p in model.parameters())
    assert_same(store, llama().eval(), model)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [gpt2, llama, mixtral])
def test_16_bit_models_have_the_gradients_of_widened_ones(store, make, kind):
    model = make().eval().to(kind)
    assert_same(store, copy.deepcopy(model).float(), model)


def test_an_adapter_on_a_16_bit_base_has_the_gradients_of_the_widened_model(store):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], use_dora=True)
    model = peft.get_peft_model(llama().to(torch.bfloat16), config).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    assert_same(store, copy.deepcopy(model).float(), model)
