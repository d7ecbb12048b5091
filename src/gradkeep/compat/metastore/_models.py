"""MetaStore's three models with the weights of its checkpoints."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

import gradkeep as gk
from gradkeep._arguments import one_of
from gradkeep.capturing._weights import load_weights, put_weights
from gradkeep.data import model
from gradkeep.data._transformers import BertClassifier
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn

    from gradkeep.compat.metastore._config import MetaStoreExperiment

MODELS = ("vgg16", "bert", "resnet50")
BERT_BASE: dict[str, Any] = {
    "vocabulary": 30522,
    "length": 512,
    "dim": 768,
    "heads": 12,
    "layers": 12,
    "inner": 3072,
    "segments": 2,
    "classes": 4,
}
_UNREAD = re.compile(r"bert\.pooler\..*|bert\.embeddings\.(position_ids|token_type_ids)")
"""Entries of its Bert checkpoints that are never used: it reads [CLS] before the pooler."""
_SHAPES: dict[str, dict[str, tuple[str, int]]] = {
    "vgg16": {"width": ("conv1.weight", 0), "classes": ("l1.weight", 0)},
    "resnet50": {"width": ("model_base.conv1.weight", 0), "classes": ("l1.weight", 0)},
    "bert": {
        "vocabulary": ("bert.embeddings.word_embeddings.weight", 0),
        "dim": ("bert.embeddings.word_embeddings.weight", 1),
        "length": ("bert.embeddings.position_embeddings.weight", 0),
        "segments": ("bert.embeddings.token_type_embeddings.weight", 0),
        "inner": ("bert.encoder.layer.0.intermediate.dense.weight", 0),
        "classes": ("classifier.weight", 0),
    },
}
"""Weight and dimension that determine each size."""


class Customized_Bert_Model(BertClassifier):
    """BERT-base whose classifier reads [CLS] directly: logits `[N, num_classes]` of ids `[N, T]`.

    Args:
        hidden_size: Width of the encoder.
        num_classes: Number of classes.

    Example:
        >>> small = Customized_Bert_Model(hidden_size=24, num_classes=2)
        >>> small.bert.pooler is None, len(small.bert.encoder.layer)
        (True, 12)
    """

    def __init__(self, hidden_size: int = 768, num_classes: int = 4) -> None:
        super().__init__(**{**BERT_BASE, "dim": hidden_size, "classes": num_classes})


def build_model(experiment: MetaStoreExperiment, train: Any) -> nn.Module:
    """Build the model in the sizes of its checkpoint, with its weights, in eval mode on its device.

    Without a checkpoint the weights are random, with a warning.
    """
    import torch

    name = experiment.model_name.lower()
    where = f"target_model.{experiment.model_name}.model_name"
    one_of(
        where,
        name,
        MODELS,
        error=CaptureError,
        code="compat.unknown_model",
        path=experiment.config,
    )
    path = experiment.checkpoint
    state = None if path is None or not path.exists() else _state(path)
    sizes = {**default_sizes(name, train), **_sizes_of(name, state or {}), **experiment.sizes}
    if state is not None and name == "bert":
        _check_vocabulary(experiment, train, sizes["vocabulary"])
    network = model(name, seed=experiment.seed, **sizes)
    if state is not None:
        put_weights(network, state, name=str(path))
    else:
        warnings.warn(
            f"no checkpoint{'' if path is None else f' at {path}'}: the model has random weights "
            f"(seed {experiment.seed})",
            gk.CaptureWarning,
            stacklevel=2,
        )
    on_gpu = experiment.device == "cuda" and torch.cuda.is_available()
    return network.eval().to("cuda" if on_gpu else "cpu")


def default_sizes(name: str, train: Any) -> dict[str, Any]:
    """Return the default sizes of a model."""
    if name != "bert":
        return {"classes": len(train.classes)}
    words = {"vocabulary": max(BERT_BASE["vocabulary"], len(train.vocabulary))}
    return {**BERT_BASE, **words, "classes": len(train.classes)}


def choose_gradients(network: nn.Module, layers: list[str], *, weights_only: bool) -> None:
    """Enable gradients for the target layers only, optionally only for weights."""
    network.requires_grad_(False)
    for path in layers:
        layer = network.get_submodule(path)
        for name, parameter in layer.named_parameters(recurse=False):
            parameter.requires_grad_(name == "weight" or not weights_only)


def _check_vocabulary(experiment: MetaStoreExperiment, train: Any, rows: int) -> None:
    """Raise if the vocabulary has another size than the checkpoint: its tokens would mean other words."""
    if len(train.vocabulary) != rows:
        raise CaptureError(
            f"the vocabulary is not that of the checkpoint {experiment.checkpoint}",
            code="compat.vocabulary",
            path=experiment.vocabulary,
            found=f"{len(train.vocabulary)} tokens",
            expected=f"{rows}, one for each row of bert.embeddings.word_embeddings.weight",
            fix="Put the vocab.txt of the checkpoint's training next to it.",
        )


def _state(path: Any) -> Mapping[str, torch.Tensor]:
    state = {key.removeprefix("module."): value for key, value in load_weights(path).items()}
    return {key: value for key, value in state.items() if not _UNREAD.fullmatch(key)}


def _sizes_of(name: str, state: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Infer sizes from the shapes of the weights; the number of heads cannot be inferred."""
    sizes = {
        size: int(state[key].shape[dimension])
        for size, (key, dimension) in _SHAPES[name].items()
        if len(getattr(state.get(key), "shape", ())) > dimension
    }
    numbers = [re.match(r"bert\.encoder\.layer\.(\d+)\.", key) for key in state]
    layers = {int(number[1]) for number in numbers if number}
    return {**sizes, "layers": len(layers)} if layers else sizes
