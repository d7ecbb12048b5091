"""MetaStore's trainers: flags, data and the training loop."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from gradkeep._environment import replaced_file
from gradkeep.capturing._batches import to_device
from gradkeep.compat.metastore._config import OWN_CHECKPOINTS, WorkingFolder
from gradkeep.compat.metastore._data import DataSource
from gradkeep.compat.metastore._models import default_sizes
from gradkeep.data import model
from gradkeep.errors import CaptureError, GradkeepError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn


def trainer_flags(
    name: str, *, n_epochs: int, batch_size: int, lr: float, unread: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """Build a parser with the flags of all trainers; `unread` flags are accepted and ignored, as in MetaStore."""
    parser = argparse.ArgumentParser(
        prog=f"python -m gradkeep.compat.metastore.model_trainers.{name}"
    )
    parser.add_argument("--n_epochs", type=_count, default=n_epochs)
    parser.add_argument("--batch_size", type=_count, default=batch_size)
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight_decay", type=float, default=5e-4)
    parser.add_argument(
        "--sizes", type=_sizes, default={}, metavar="width=8", help="a smaller model"
    )
    for flag in ("n_cpu", *unread):
        parser.add_argument(f"--{flag}", help="not used, as in MetaStore")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _sizes(text: str) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.split(",")]
    return {name: _count(value) for name, _, value in pairs}


def run_trainer(
    model_name: str,
    data_name: str,
    options: argparse.Namespace,
    *,
    files: Mapping[str, str] | None = None,
    vocabulary: str | None = None,
    seed: int = 1,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    augment: Callable[[torch.Tensor], torch.Tensor] | None = None,
    begin_from: str | None = None,
) -> int:
    """Train a model and return the exit code; print errors as messages.

    Data and weights, one file per epoch, are below the current folder. `vocabulary` is the file of tokens
    of the texts, saved next to the weights; `augment` changes the images of a training batch;
    `begin_from` is a file of initial weights.
    """
    places = WorkingFolder(Path.cwd(), Path.cwd())
    tokens = places.current if vocabulary is None else places.find(vocabulary)
    try:
        origin = f"{model_name}_trainer"
        train, test = DataSource(data_name, files or {}, places, tokens, origin).load()
        torch.manual_seed(seed)
        sizes = {**default_sizes(model_name, train), **options.sizes}
        if model_name == "bert":
            own = {"vocabulary": len(train.vocabulary), "dim": options.hidden_size}
            sizes = {**sizes, **own, **options.sizes}
        network = model(model_name, seed=seed, **sizes)
        if begin_from is not None:
            _begin(network, begin_from)
        network.to("cuda" if torch.cuda.is_available() else "cpu")
        if make_optimizer is None:
            optimizer: torch.optim.Optimizer = torch.optim.SGD(
                network.parameters(), lr=options.lr, momentum=options.momentum
            )
        else:
            optimizer = make_optimizer(network)
        order = torch.Generator().manual_seed(seed)
        loader = DataLoader(train, batch_size=options.batch_size, shuffle=True, generator=order)
        held_out = DataLoader(test, batch_size=options.batch_size)
        for epoch in range(options.n_epochs):
            loss = _train_epoch(network, optimizer, loader, augment)
            test_loss, accuracy = evaluate(network, held_out)
            file = Path(OWN_CHECKPOINTS[model_name].format(epoch, sizes.get("dim")))
            _save(network, file, tokens if tokens.is_file() else None)
            print(
                f"Epoch: {epoch} - Train Loss {loss:.6f}, Test Loss {test_loss:.6f}, "
                f"Test Acc: {accuracy:.6f}; {file}",
                flush=True,
            )
    except GradkeepError as error:
        print(f"trainer: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"trainer: {error.filename or ''}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # finished epochs are saved
        return 130
    return 0


def _train_epoch(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    augment: Callable[[torch.Tensor], torch.Tensor] | None,
) -> float:
    """Train one epoch and return the mean loss."""
    network.train()
    total, rows = 0.0, 0
    for batch in loader:
        inputs, labels = _parts(network, batch)
        if augment is not None:
            inputs = (augment(inputs[0]),)
        loss = F.cross_entropy(network(*inputs), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        total, rows = total + float(loss.detach()) * len(labels), rows + len(labels)
    return total / rows


def _save(network: nn.Module, file: Path, vocabulary: Path | None) -> None:
    with replaced_file(file) as temp:
        torch.save({key: value.cpu() for key, value in network.state_dict().items()}, temp)
    beside = file.parent / "vocab.txt"
    if vocabulary is not None and vocabulary.resolve() != beside.resolve():
        shutil.copyfile(vocabulary, beside)


@torch.no_grad()
def evaluate(network: nn.Module, loader: Any) -> tuple[float, float]:
    """Return the mean loss and the accuracy."""
    network.eval()
    loss, right, rows = 0.0, 0, 0
    for batch in loader:
        inputs, labels = _parts(network, batch)
        logits = network(*inputs)
        loss += float(F.cross_entropy(logits, labels, reduction="sum"))
        right += int((logits.argmax(1) == labels).sum())
        rows += len(labels)
    return loss / rows, right / rows


def _parts(network: nn.Module, batch: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return the model's inputs and the labels of a batch of images or texts."""
    batch = to_device(batch, next(network.parameters()).device)
    if isinstance(batch, dict):
        return (batch["input_ids"], batch["attention_mask"]), batch["labels"]
    return (batch[0],), batch[1]


def _begin(network: nn.Module, path: str) -> None:
    """Load initial weights; those of torchvision's ResNet-50 are put below `model_base`."""
    from gradkeep.capturing._weights import load_weights, put_weights

    own = network.state_dict()
    state = dict(load_weights(path))
    if not any(key in own for key in state):
        state = {f"model_base.{k}": v for k, v in state.items() if not k.startswith("fc.")}
        unknown = [key for key in state if key not in own]
        if unknown:
            raise CaptureError(
                "--weights: these are not the weights of a ResNet-50",
                code="compat.not_resnet50",
                path=path,
                found=unknown[:4],
            )
        state = {**own, **state}
    put_weights(network, state, name=path)
