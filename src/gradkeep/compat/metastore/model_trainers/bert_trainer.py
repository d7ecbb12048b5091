"""Bert on AG News: `python -m gradkeep.compat.metastore.model_trainers.bert_trainer`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from gradkeep.compat.metastore.model_trainers._trainer import run_trainer, trainer_flags

if TYPE_CHECKING:
    import torch
    from torch import nn

_FILES = ("train_file", "dev_file", "test_file", "unlabeled_file")
_UNREAD = (
    *("data_text", "log_path", "sample_interval", "cal_meta", "file_path", "data_selection"),
    *("num_labels", "init_val", "num_val", "data_strategy", "ratio_noisy_labels", "clean"),
    *("no_cuda", "unl_batch_size", "beta1", "beta2", "max_scale", "T"),
)
_NOT_DECAYED = ("bias", "LayerNorm.weight")
_VOCABULARY = "models/bert_models/vocab.txt"


def main(arguments: list[str] | None = None) -> int:
    """Train with AdamW from random weights, as MetaStore does, on JSON records; the classifier reads [CLS]."""
    parser = trainer_flags("bert_trainer", n_epochs=5, batch_size=32, lr=1e-5, unread=_UNREAD)
    for name in _FILES:
        parser.add_argument(
            f"--{name}", default=f"data/AGNews/{name.removesuffix('_file')}_data.json"
        )
    parser.add_argument("--hidden_size", type=int, default=768)
    parser.add_argument("--vocab_file", default=_VOCABULARY, help="the WordPiece tokens")
    options = parser.parse_args(arguments)
    return run_trainer(
        "bert",
        "AGNews",
        options,
        files={name: getattr(options, name) for name in _FILES},
        vocabulary=options.vocab_file,
        seed=2,
        make_optimizer=lambda net: _adamw(net, lr=options.lr, weight_decay=options.weight_decay),
    )


def _adamw(net: nn.Module, *, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Build AdamW without decay of biases and normalizations, with the epsilon of transformers."""
    import torch

    decayed: list[Any] = []
    others: list[Any] = []
    for name, parameter in net.named_parameters():
        small = any(part in name for part in _NOT_DECAYED)
        (others if small else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, eps=1e-6)


if __name__ == "__main__":
    sys.exit(main())
