"""Other libraries' trainers inside a byte budget: the same weights, without touching their code."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gradkeep as gk

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries


def tokens(rows):
    order = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 50, (rows, 16), generator=order)
    labels = torch.randint(3, (rows,), generator=order)
    return [
        {"input_ids": one, "attention_mask": torch.ones(16, dtype=torch.int64), "labels": label}
        for one, label in zip(ids, labels, strict=True)
    ]


def by_transformers(folder, budget):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=3,
    )
    trainer = transformers.Trainer(
        model=transformers.BertForSequenceClassification(config),
        args=transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=32,
            max_steps=8,
            save_strategy="no",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            seed=3,
        ),
        train_dataset=tokens(128),
    )
    if budget is None:
        trainer.train()
    else:
        with budget:
            trainer.train()
    return trainer.model


def by_lightning(folder, budget):
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            parts = [
                part
                for _ in range(4)
                for part in (nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.2))
            ]
            self.net = nn.Sequential(*parts, nn.Linear(32, 3))

        def training_step(self, batch, number):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    torch.manual_seed(0)
    module = Module()
    data = TensorDataset(torch.randn(512, 32), torch.arange(512) % 3)
    trainer = lightning.Trainer(
        max_epochs=2,
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if budget is None:
        trainer.fit(module, DataLoader(data, batch_size=128))
    else:
        with budget:
            trainer.fit(module, DataLoader(data, batch_size=128))
    return module


@pytest.mark.parametrize("train", [by_transformers, by_lightning])
def test_the_weights_are_the_same_to_the_bit(tmp_path, train):
    plain = train(tmp_path, None)
    budget = gk.memory_budget(0.8)
    small = train(tmp_path, budget)
    for one, other in zip(plain.parameters(), small.parameters(), strict=True):
        assert torch.equal(one, other)
    report = budget.report()
    assert report.planned > 0
    assert report.measured_peak <= report.budget
