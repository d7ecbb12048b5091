"""What is kept of a trained model: a number for each target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradkeep import _arguments
from gradkeep._annotations import check_fields, checked
from gradkeep.datamodels.fitting._masks import as_array
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch

    from gradkeep.errors import GradkeepError

_DTYPES = (
    *("float32", "float16", "float64", "int64", "int32", "int16", "int8", "bool"),
    *("uint8", "uint16", "uint32", "uint64"),
)


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """A function of a model with values of a known shape; made by `margins` and its friends.

    `of_logits(logits [..., t, C], labels [t])`, where there is one, serves many models at once.
    """

    shape: tuple[int, ...]
    of_model: Callable[[Any], Any]
    dtype: str = "float32"
    of_logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    examples: Any = None
    """What the model is asked about, for outputs that follow from logits."""

    def __post_init__(self) -> None:
        check_fields(self, DatamodelsError)
        for size in self.shape:
            _arguments.count("shape", size, error=DatamodelsError)
        _arguments.one_of("dtype", self.dtype, _DTYPES, error=DatamodelsError)

    def __call__(self, model: Any) -> np.ndarray[Any, np.dtype[Any]]:
        """The values for one model, `shape`."""
        return as_array(self.of_model(model)).astype(self.dtype, copy=False)


@checked(DatamodelsError)
def margins(examples: Any, *, dtype: str = "float32") -> Output:
    """Correct logit minus the best other one, for each of `examples`: inputs and labels `[t]`.

    >>> import torch
    >>> output = margins((torch.eye(2), torch.tensor([0, 1])))
    >>> output(torch.nn.Linear(2, 2, bias=False).requires_grad_(False)).shape
    (2,)
    """
    return _of_logits(examples, margins_of, dtype)


@checked(DatamodelsError)
def losses(examples: Any, *, dtype: str = "float32") -> Output:
    """The cross entropy of each of `examples` `[t]`."""
    return _of_logits(examples, losses_of, dtype)


@checked(DatamodelsError)
def confidences(examples: Any, *, dtype: str = "float32") -> Output:
    """The probability given to the right class of each of `examples` `[t]`."""
    return _of_logits(examples, confidences_of, dtype)


@checked(DatamodelsError)
def correct(examples: Any, *, dtype: str = "float32") -> Output:
    """1 where the right class has the largest logit, else 0, `[t]`."""
    return _of_logits(examples, correct_of, dtype)


@checked(DatamodelsError)
def output(
    of_model: Callable[[Any], Any], shape: tuple[int, ...] | int, *, dtype: str = "float32"
) -> Output:
    """Any function of a model, with the shape of what it returns."""
    return Output((shape,) if isinstance(shape, int) else tuple(shape), of_model, dtype)


def margins_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Margins `[..., t]` from logits `[..., t, C]` and labels `[t]`."""
    import torch

    if logits.shape[-1] < 2:
        raise DatamodelsError(
            "a margin needs at least two classes", found=f"{logits.shape[-1]} logits"
        )
    places = labels.expand(logits.shape[:-1]).unsqueeze(-1)
    right = logits.gather(-1, places).squeeze(-1)
    others = logits.scatter(-1, places, -torch.inf)
    return right - others.amax(-1)


def losses_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropies `[..., t]` from logits `[..., t, C]`."""
    places = labels.expand(logits.shape[:-1]).unsqueeze(-1)
    return -logits.log_softmax(-1).gather(-1, places).squeeze(-1)


def confidences_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Probabilities of the right class `[..., t]` from logits `[..., t, C]`."""
    return (-losses_of(logits, labels)).exp()


def correct_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Hits `[..., t]` from logits `[..., t, C]`."""
    return (logits.argmax(-1) == labels).float()


def tensors(examples: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """All inputs and labels of a dataset, a pair of tensors, or a pair of arrays."""
    if not hasattr(examples, "__len__") or not hasattr(examples, "__getitem__"):
        raise _no_examples(examples)
    try:
        inputs, labels = _whole(examples)
    except (TypeError, ValueError, IndexError, KeyError, RuntimeError) as error:
        if isinstance(error, DatamodelsError):
            raise
        raise _no_examples(examples) from error
    if inputs.ndim == 0 or labels.ndim == 0 or len(inputs) != len(labels):
        raise _no_examples(examples)
    return inputs, labels


def _whole(examples: Any) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    if not (isinstance(examples, tuple | list) and len(examples) == 2):
        try:
            examples = examples[:]
        except (TypeError, ValueError, IndexError, KeyError):
            items = [examples[place] for place in range(len(examples))]
            examples = tuple(
                torch.stack([torch.as_tensor(part) for part in column])
                for column in zip(*items, strict=True)
            )
    inputs, labels = examples
    return torch.as_tensor(inputs), torch.as_tensor(labels)


def _no_examples(examples: object) -> GradkeepError:
    return _arguments.refused(
        "examples",
        examples,
        error=DatamodelsError,
        expected="a dataset of pairs, or inputs [N, ...] and labels [N]",
    )


@dataclass(frozen=True, slots=True, eq=False)
class _FromLogits:
    """Runs a model over examples and takes something from its logits."""

    examples: Any
    of_logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def __call__(self, model: Any) -> torch.Tensor:
        import torch

        inputs, labels = tensors(self.examples)
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                logits = torch.cat([model(part) for part in torch.split(inputs, 1024)])
        finally:
            model.train(was_training)
        return self.of_logits(logits, labels)


def _of_logits(
    examples: Any,
    of_logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    dtype: str,
) -> Output:
    count = len(tensors(examples)[1])
    return Output((count,), _FromLogits(examples, of_logits), dtype, of_logits, examples)
