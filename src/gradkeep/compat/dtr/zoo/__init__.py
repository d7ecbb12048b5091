"""Models of the DTR experiments as workloads with generated inputs; listing them does not load torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradkeep import _arguments
from gradkeep._arguments import checked, one_of
from gradkeep.errors import RematError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    Sizes = Mapping[str, int | float]


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """One training step: forward, loss, backward; the optimizer is left to the caller."""

    name: str
    model: torch.nn.Module
    loss: Callable[[], torch.Tensor]
    """Forward pass on the generated inputs."""
    sizes: dict[str, int | float]
    """Sizes of the model, the batch size included."""

    @property
    def parameters(self) -> int:
        """Number of trainable parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def step(self) -> torch.Tensor:
        """Run forward, loss and backward into fresh gradients; return the loss."""
        for parameter in self.model.parameters():
            parameter.grad = None
        loss = self.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


_MAX_VALUE = 2**24
"""Upper limit of sizes, to catch typing errors before they exhaust memory."""


@dataclass(frozen=True, slots=True)
class _WorkloadEntry:
    make: str
    """`module.function` of this package that builds the model and its loss from name and sizes."""
    small: Sizes
    """Sizes for one core: a step takes well under a second."""
    published: Sizes
    """Sizes of the published experiments that differ from `small`."""


def _sizes(text: str) -> Sizes:
    """Parse sizes.

    >>> _sizes("batch_size=4 dropout=0.2")
    {'batch_size': 4, 'dropout': 0.2}
    """
    pairs = (part.split("=") for part in text.split())
    return {name: float(value) if "." in value else int(value) for name, value in pairs}


def _image(batch: int, side: int, classes: int = 10) -> Sizes:
    return {"batch_size": batch, "height": side, "width": side, "classes": classes}


def _entry(make: str, small: str, published: str) -> _WorkloadEntry:
    return _WorkloadEntry(make, _sizes(small), _sizes(published))


_CIFAR = {
    "resnet20": (_image(8, 32), _image(56, 224)),
    "resnet32": (_image(8, 32), _image(56, 224)),
    "resnet44": (_image(4, 32), _image(56, 32)),
    "resnet56": (_image(4, 32), _image(56, 32)),
    "resnet110": (_image(2, 32), _image(64, 32)),
    "resnet1202": (_image(1, 32), _image(64, 32)),
}
_IMAGENET = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
_DENSE = ("densenet121", "densenet161", "densenet169", "densenet201")
_CELLS = (
    "_sequences.recurrent_workload",
    "batch_size=8 length=16 in_dim=16 mem_dim=32",
    "batch_size=512 length=256 in_dim=512 mem_dim=1700",
)
_WORDS = "batch_size=4 length=20 tokens=300 dim=32 hidden=32 layers=2 dropout=0.2"
_WIKITEXT = "batch_size=32 length=35 tokens=33278 dim=200 hidden=200"

_WORKLOADS: dict[str, _WorkloadEntry] = {
    **{
        name: _WorkloadEntry("_images.resnet_workload", small, full)
        for name, (small, full) in _CIFAR.items()
    },
    **{
        name: _WorkloadEntry("_images.resnet_workload", _image(2, 64), _image(32, 224, 1000))
        for name in _IMAGENET
    },
    "densenet100": _WorkloadEntry("_images.densenet_workload", _image(2, 32), _image(64, 32)),
    **{
        name: _WorkloadEntry("_images.densenet_workload", _image(2, 64), _image(84, 224, 1000))
        for name in _DENSE
    },
    "inceptionv3": _WorkloadEntry(
        "_inception.inception_workload", _image(2, 96), _image(32, 299, 1000)
    ),
    "inceptionv4": _WorkloadEntry(
        "_inception.inception_workload", _image(2, 96), _image(64, 299, 1001)
    ),
    "unet": _entry(
        "_images.unet_workload",
        "batch_size=2 height=64 width=64 channels=8",
        "batch_size=6 height=416 width=608 channels=64",
    ),
    "lstm": _entry(*_CELLS),
    "gru": _entry(*_CELLS),
    "lstm_encoder": _entry("_sequences.recurrent_workload", _WORDS, _WIKITEXT),
    "gru_encoder": _entry("_sequences.recurrent_workload", _WORDS, _WIKITEXT),
    "treelstm": _entry(
        "_sequences.tree_workload",
        "batch_size=4 depth=4 children=3 irregular=1 in_dim=16 mem_dim=32",
        "batch_size=640 depth=9 children=2 irregular=0 in_dim=100 mem_dim=300",
    ),
    "treelstm_old": _entry(
        "_sequences.similarity_workload",
        "batch_size=1 words=9 tokens=100 in_dim=16 mem_dim=32 hidden=16 classes=5",
        "batch_size=25 words=10 tokens=2412 in_dim=300 mem_dim=150 hidden=50",
    ),
    "transformer": _entry(
        "_sequences.transformer_workload",
        "batch_size=2 length=32 target_length=16 dim=64 heads=4 layers=2 decoder_layers=2 "
        "hidden=128 dropout=0.1",
        "batch_size=10 length=512 target_length=20 dim=512 heads=16 layers=12 decoder_layers=6 "
        "hidden=2048",
    ),
    "transformer_encoder": _entry(
        "_sequences.transformer_workload", f"{_WORDS} heads=2", f"{_WIKITEXT} heads=2"
    ),
    "unrolled_gan": _entry(
        "_images.gan_workload",
        "batch_size=16 noise_dim=16 g_hidden=32 d_hidden=32 unrolled_steps=3",
        "batch_size=512 noise_dim=4096 g_hidden=2048 d_hidden=2048 unrolled_steps=60",
    ),
}


def zoo() -> tuple[str, ...]:
    """List the names that `build` accepts.

    >>> "resnet32" in zoo(), "unet" in zoo()
    (True, True)
    """
    return tuple(_WORKLOADS)


def default_sizes(name: str) -> dict[str, int | float]:
    """Return the default sizes of a model, batch size included.

    >>> default_sizes("lstm")
    {'batch_size': 8, 'length': 16, 'in_dim': 16, 'mem_dim': 32}
    """
    return dict(_workload_entry(name).small)


def published_sizes(name: str) -> dict[str, int | float]:
    """Return the sizes of the published experiments; most need a large machine.

    >>> published_sizes("lstm")["length"]
    256
    """
    entry = _workload_entry(name)
    return {**entry.small, **entry.published}


@checked(RematError)
def build(name: str, *, batch_size: int | None = None, seed: int = 0, **sizes: float) -> Workload:
    """Build a model of the zoo with generated inputs; torch's random state is restored.

    >>> build("lstm", batch_size=4, length=3).parameters
    6272
    """
    if batch_size is not None:
        sizes["batch_size"] = batch_size
    full = {**default_sizes(name), **validate_sizes(name, sizes)}
    import torch

    module, _, function = _workload_entry(name).make.partition(".")
    make = getattr(importlib.import_module(f"gradkeep.compat.dtr.zoo.{module}"), function)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, loss = make(name, full)
    return Workload(name, model, loss, full)


@checked(RematError)
def validate_sizes(name: str, sizes: Sizes) -> dict[str, int | float]:
    """Return the sizes, converted to the types that the model expects; raise if one is wrong."""
    known = default_sizes(name)
    checked = {}
    if not isinstance(sizes, Mapping):
        raise _arguments.argument_error(
            "sizes", sizes, error=RematError, expected="a mapping from names"
        )
    for key, value in sizes.items():
        one_of(f"a size of {name}", key, known, error=RematError, code="compat.unknown_size")
        whole = isinstance(known[key], int)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not abs(value) < _MAX_VALUE or (whole and value != int(value)):
            raise RematError(
                f"{key} of {name} has a wrong type",
                code="compat.size_type",
                found=repr(value),
                expected="an integer" if whole else "a number",
            )
        # Zero disables dropout and irregular trees; other sizes cannot be zero.
        least = 0 if key in ("dropout", "irregular") else 1
        if value < least:
            raise RematError(
                f"{key} of {name} is too small",
                code="compat.size_too_small",
                found=value,
                expected=f"at least {least}",
            )
        checked[key] = int(value) if whole else float(value)
    return checked


def _workload_entry(name: str) -> _WorkloadEntry:
    return _WORKLOADS[
        one_of("the model", name, _WORKLOADS, error=RematError, code="compat.unknown_model")
    ]
