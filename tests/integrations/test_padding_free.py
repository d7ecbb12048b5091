"""Batches of transformers' padding-free collator: a row for each document, as if it came alone."""

import pytest
import torch
from torch.utils.data import DataLoader

import gradkeep as gk

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries


def models():
    sizes = {"vocab_size": 31, "tie_word_embeddings": True}
    torch.manual_seed(1)
    yield transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=16, **sizes)
    )
    yield transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
            **sizes,
        )
    )


@pytest.mark.parametrize(
    "collator_options", [{}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}], ids=str
)
def test_documents_of_a_flattened_batch_have_the_gradients_they_have_alone(
    tmp_path, collator_options
):
    order = torch.Generator().manual_seed(0)
    data = [
        {"input_ids": torch.randint(31, (length,), generator=order).tolist()}
        for length in (5, 3, 9, 2, 4, 7)
    ]
    collate = transformers.DataCollatorWithFlattening(**collator_options)
    for number, model in enumerate(models()):
        model.eval()
        store = gk.open(tmp_path / f"store-{number}")
        loader = DataLoader(data, batch_size=4, collate_fn=collate)
        done = gk.capture(
            store, model, loader, task=gk.LanguageModeling(), split="train", progress=False
        )
        assert done.rows == 6
        gradients = gk.gradients(store, split="train")
        assert gradients.ids.tolist() == list(range(6))
        for row, one in enumerate(data):
            tokens = torch.tensor([one["input_ids"]])
            model.zero_grad()
            (model(input_ids=tokens, labels=tokens).loss * (tokens.shape[1] - 1)).backward()
            weights = dict(model.named_parameters())
            for name, gradient in gradients.restore([row]).items():
                torch.testing.assert_close(gradient[0], weights[name].grad, rtol=1e-4, atol=1e-6)
