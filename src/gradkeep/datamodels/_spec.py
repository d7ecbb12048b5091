"""The specification of a set of models, and what is kept of each."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import check_fields, checked
from gradkeep.datamodels._masks import as_array
from gradkeep.errors import DatamodelsError, StoreError
from gradkeep.store import Array, Schema

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    import torch

    from gradkeep.datamodels._masks import AnyArray
    from gradkeep.errors import GradkeepError


COMPLETED = "_completed"
"""The name of the flags that say which models are done; no array may have it."""

_ALIASES = {"float": "float64", "int": "int64", "bool": "bool", "bool_": "bool"}
_EXAMPLE = '{"num_models": 100, "schema": {"masks": {"shape": [50000], "dtype": "bool_"}}}'


@dataclass(frozen=True, slots=True)
class Field:
    """One stored output of each model."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def to_array(self) -> Array:
        """As the store keeps it: booleans as bits."""
        bits = self.dtype.kind == "b" and bool(self.shape)
        return Array(
            self.name,
            self.dtype.name,
            self.shape,
            kind="data" if self.shape else "scalar",
            encoding="bits" if bits else "plain",
        )


@dataclass(frozen=True, slots=True)
class Spec:
    """How many models, and the name, shape and dtype of each thing that a model returns.

    >>> spec = Spec.from_fields({"num_models": 2, "schema": {"m": {"shape": [], "dtype": "float"}}})
    >>> spec.fields[0].dtype, spec.to_fields()["schema"]["m"]["dtype"]
    (dtype('float64'), 'float64')
    """

    num_models: int
    fields: tuple[Field, ...]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Spec:
        """The spec in a JSON file."""
        file = _arguments.file_path("path", path, error=DatamodelsError)
        try:
            fields = json.loads(Path(file).read_text())
        except OSError as error:
            raise DatamodelsError(
                "the spec cannot be read",
                code="datamodels.spec_unreadable",
                path=path,
                found=error.strerror,
            ) from error
        except (ValueError, RecursionError) as error:
            document = f"{type(error).__name__}: {error}"[:200]
            raise DatamodelsError(
                "the spec is not JSON",
                code="datamodels.spec_not_json",
                path=path,
                found=document,
                expected=_EXAMPLE,
            ) from error
        return cls.from_fields(fields, path=path)

    @classmethod
    def from_fields(
        cls, fields: Mapping[str, Any], *, path: str | os.PathLike[str] | None = None
    ) -> Spec:
        """The spec from JSON fields; every problem names its field."""
        try:
            record = msgspec.convert(fields, _SpecRecord)
            spec = tuple(_field(name, item) for name, item in record.schema.items())
        except (msgspec.ValidationError, RecursionError) as error:
            raise DatamodelsError(
                f"the spec is wrong: {error}"[:300],
                code="datamodels.spec_invalid",
                path=path,
                expected=_EXAMPLE,
            ) from None
        return cls(record.num_models, spec)

    def to_fields(self) -> dict[str, Any]:
        """The spec as JSON fields."""
        schema = {
            field.name: {"shape": list(field.shape), "dtype": field.dtype.name}
            for field in self.fields
        }
        return {"num_models": self.num_models, "schema": schema}

    def to_schema(self) -> Schema:
        """The schema of the store's rows."""
        return Schema(tuple(field.to_array() for field in self.fields))

    @classmethod
    def of_schema(cls, schema: Schema, num_models: int) -> Spec:
        """The spec that a schema came from."""
        fields = (Field(a.name, a.shape, np.dtype(a.dtype)) for a in schema.arrays)
        return cls(num_models, tuple(fields))


class _FieldRecord(msgspec.Struct, forbid_unknown_fields=True):
    shape: list[Annotated[int, msgspec.Meta(ge=0, lt=2**40)]]
    dtype: str


class _SpecRecord(msgspec.Struct, forbid_unknown_fields=True):
    num_models: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    schema: Annotated[dict[str, Any], msgspec.Meta(min_length=1)]


def _field(name: str, fields: Any) -> Field:
    """Parse one output of a spec; errors name it."""
    if name == COMPLETED:
        raise msgspec.ValidationError(f"schema.{name} is a reserved name")
    try:
        item = msgspec.convert(fields, _FieldRecord)
    except msgspec.ValidationError as error:
        problem = str(error).replace("`$", f"`schema.{name}")
        raise msgspec.ValidationError(f"schema.{name}: {problem}") from None
    if math.prod(item.shape) >= 2**40:
        raise msgspec.ValidationError(f"schema.{name}.shape is too large: {item.shape}")
    kind = getattr(np, _ALIASES.get(item.dtype, item.dtype), None)
    try:
        dtype = None if kind is None else np.dtype(kind)
    except TypeError:
        dtype = None
    if dtype is None or dtype.kind not in "biuf":
        what = f"schema.{name}.dtype must be a numpy type such as float16 or bool_"
        raise msgspec.ValidationError(f"{what}, not {item.dtype!r}")
    field = Field(name, tuple(item.shape), dtype)
    try:
        field.to_array()  # refuses names that no array can have
    except StoreError as error:
        raise msgspec.ValidationError(f"schema.{name}: {error.message}") from None
    return field


def check_returned(spec: Spec, returned: Any, *, index: int) -> dict[str, AnyArray]:
    """Every field of the spec as an array of its shape and dtype; anything else is refused.

    Values may change their precision (float32 to float16) but not their kind, and none may be lost.

    >>> spec = Spec.from_fields({"num_models": 1, "schema": {"m": {"shape": [2], "dtype": "float16"}}})
    >>> check_returned(spec, {"m": np.array([0.5, 2.0])}, index=0)["m"].dtype
    dtype('float16')
    """
    names = [field.name for field in spec.fields]
    if not isinstance(returned, Mapping):
        raise _wrong(index, "must return a dictionary", type(returned).__name__, ", ".join(names))
    missing = [name for name in names if name not in returned]
    unknown = [str(name) for name in returned if name not in names]
    if missing or unknown:
        keys = f"missing {missing}, unknown {unknown}"
        raise _wrong(index, "must return exactly the spec's keys", keys, ", ".join(names))
    return {field.name: _array(field, returned[field.name], index) for field in spec.fields}


def _array(field: Field, value: Any, index: int) -> AnyArray:
    try:
        array = as_array(value)
    except ValueError as error:
        raise _wrong(index, f"{field.name!r} is no array", str(error), str(field.shape)) from error
    if array.shape != field.shape:
        raise _wrong(index, f"{field.name!r} has another shape", array.shape, field.shape)
    what = f"{field.name!r} does not fit the spec's dtype"
    if not np.can_cast(array.dtype, field.dtype, "same_kind"):
        # Python's own numbers come as int64, also for unsigned fields.
        whole = array.dtype.kind in "iu" and field.dtype.kind in "iu"
        if not whole:
            raise _wrong(index, what, array.dtype.name, field.dtype.name)
    with np.errstate(over="ignore"):
        cast = array.astype(field.dtype)
    if field.dtype.kind in "iu":
        lost = cast.astype(array.dtype) != array
    else:
        lost = ~np.isfinite(cast) if field.dtype.kind == "f" else np.zeros(array.shape, bool)
    if lost.any():
        bad = array[lost].reshape(-1)[0]
        raise _wrong(index, what, f"{bad} among its values", f"finite values of {field.dtype.name}")
    return cast


def _wrong(index: int, what: str, actual: object, expected: object) -> DatamodelsError:
    return DatamodelsError(
        f"model {index}: {what}",
        code="datamodels.returned_value",
        found=actual,
        expected=expected,
        fix="change what main returns, or the spec; nothing was written",
    )


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
    """Record the margins: correct logit minus the best other one, `[t]`.

    Args:
        examples: Inputs and labels of t examples.
        dtype: Stored dtype.

    Returns:
        The output, for `Study(outputs=...)`.

    Example:
        >>> import torch
        >>> output = margins((torch.eye(2), torch.tensor([0, 1])))
        >>> output(torch.nn.Linear(2, 2, bias=False).requires_grad_(False)).shape
        (2,)
    """
    return _of_logits(examples, margins_of, dtype)


@checked(DatamodelsError)
def losses(examples: Any, *, dtype: str = "float32") -> Output:
    """Record the losses, `[t]`: cross entropies, or squared errors of floating-point targets.

    Args:
        examples: Inputs and labels of t examples.
        dtype: Stored dtype.

    Returns:
        The output, for `Study(outputs=...)`.
    """
    return _of_logits(examples, losses_of, dtype)


@checked(DatamodelsError)
def confidences(examples: Any, *, dtype: str = "float32") -> Output:
    """Record the probabilities of the correct class, `[t]`.

    Args:
        examples: Inputs and labels of t examples.
        dtype: Stored dtype.

    Returns:
        The output, for `Study(outputs=...)`.
    """
    return _of_logits(examples, confidences_of, dtype)


@checked(DatamodelsError)
def output(
    of_model: Callable[[Any], Any], shape: tuple[int, ...] | int, *, dtype: str = "float32"
) -> Output:
    """Record any function of a model.

    Args:
        of_model: Function of a trained model.
        shape: Shape of its result.
        dtype: Stored dtype.

    Returns:
        The output, for `Study(outputs=...)`.
    """
    return Output((shape,) if isinstance(shape, int) else tuple(shape), of_model, dtype)


def margins_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Margins `[..., t]` from logits `[..., t, C]` and labels `[t]`."""
    import torch

    if logits.shape[-1] < 2:
        raise DatamodelsError(
            "a margin needs at least two classes",
            code="datamodels.one_class",
            found=f"{logits.shape[-1]} logits",
        )
    places = labels.expand(logits.shape[:-1]).unsqueeze(-1)
    right = logits.gather(-1, places).squeeze(-1)
    others = logits.scatter(-1, places, -torch.inf)
    return right - others.amax(-1)


def losses_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropies `[..., t]` from logits `[..., t, C]`; squared errors of targets that are not whole."""
    if is_regression(labels):
        values = logits.squeeze(-1) if logits.shape[-1] == 1 else logits
        return (values - labels) ** 2
    places = labels.expand(logits.shape[:-1]).unsqueeze(-1)
    return -logits.log_softmax(-1).gather(-1, places).squeeze(-1)


def is_regression(labels: torch.Tensor) -> bool:
    """Return True for targets of a regression: one floating-point number per example."""
    return labels.ndim == 1 and labels.is_floating_point()


def confidences_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Probabilities of the right class `[..., t]` from logits `[..., t, C]`."""
    return (-losses_of(logits, labels)).exp()


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
    return _arguments.argument_error(
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
