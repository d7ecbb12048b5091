"""How a layer's per-sample gradient is kept: which arrays, and the formula that joins them.

A form is a description without numbers. It is written into the schema of a capture, so that the
factors can be understood without the model that they came from.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gradkeep.errors import QueryError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the model: its full name and shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Outer:
    """Linear layers: gradient `[d_out, d_in]` = suffix `[T, d_out]`^T @ prefix `[T, d_in]`.

    With `bias`, the gradient of the bias, the sum of the suffix over T, follows the weight's; it
    is the same as a prefix with one more column of ones. `ones` says that the kept prefix has that
    column already (a truncated SVD does not leave it constant).
    """

    kind: ClassVar[str] = "outer"
    parameters: tuple[Parameter, ...]
    prefix: str
    suffix: str
    d_in: int
    d_out: int
    bias: bool = False
    ones: bool = False
    transposed: bool = False
    """Whether the weight is laid out `[d_in, d_out]`."""
    error: float = 0.0
    """The largest relative error of a kept gradient, where its rank was cut."""

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the arrays that hold the factors."""
        return (self.prefix, self.suffix)


@dataclass(frozen=True, slots=True)
class Conv:
    """Convolutions: `W[d, c, a]` = sum over i of `narrow[d, i] * wide[c, stride*i + dilation*a - padding]`.

    Of a convolution the wide array is the raw input `[C, *size]` and the narrow one the output's
    gradient `[D, *out]`; of a transposed one they change places. Positions outside of `wide` count
    as zero. With groups, `c` runs over the channels of the group of `d`: the weight is
    `[D, C / groups, *kernel]`.
    """

    kind: ClassVar[str] = "conv"
    parameters: tuple[Parameter, ...]
    wide: str
    narrow: str
    channels: int
    """C, the channels of the wide array."""
    filters: int
    """D, the channels of the narrow array."""
    size: tuple[int, ...]
    out: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    """Zeros before the first position of the wide array; those behind it follow from `out`."""
    dilation: tuple[int, ...]
    groups: int = 1
    bias: Literal["narrow", "wide"] | None = None
    """Which array is summed over its positions for the gradient of the bias."""

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the arrays that hold the factors."""
        return (self.wide, self.narrow)

    @property
    def positions(self) -> int:
        """T, the number of positions of the narrow array."""
        return math.prod(self.out)

    @property
    def taps(self) -> int:
        """The number of offsets of the kernel."""
        return math.prod(self.kernel)


@dataclass(frozen=True, slots=True)
class Lookup:
    """Embeddings: row `prefix[t]` of the gradient `[rows, width]` gains `suffix[t]`."""

    kind: ClassVar[str] = "lookup"
    parameters: tuple[Parameter, ...]
    prefix: str
    suffix: str
    rows: int
    width: int

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the arrays that hold the factors."""
        return (self.prefix, self.suffix)


@dataclass(frozen=True, slots=True)
class Dense:
    """Anything: the gradient itself `[P]`, or a sketch of it."""

    kind: ClassVar[str] = "dense"
    parameters: tuple[Parameter, ...]
    gradient: str
    size: int
    sketch: bool = False
    """Whether the array is a random projection, whose products are estimates."""

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the arrays that hold the gradient."""
        return (self.gradient,)


@dataclass(frozen=True, slots=True)
class Tied:
    """One weight `[rows, width]` used as an embedding and as a linear layer: the uses add up.

    The bias of the linear layer, if it has one, follows the weight.
    """

    kind: ClassVar[str] = "tied"
    parameters: tuple[Parameter, ...]
    lookup: Lookup
    outer: Outer

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the arrays that hold the factors of both uses."""
        return (*self.lookup.arrays, *self.outer.arrays)


Form = Outer | Conv | Lookup | Dense | Tied
_KINDS: dict[str, type[Any]] = {form.kind: form for form in (Outer, Conv, Lookup, Dense, Tied)}


def size_of(form: Form) -> int:
    """P, the number of values of the dense gradient."""
    return sum(parameter.size for parameter in form.parameters)


def to_fields(form: Form) -> dict[str, Any]:
    """The form as JSON fields.

    >>> from_fields(to_fields(Dense((Parameter("w", (2, 3)),), "w.gradient", 6))).size
    6
    """
    fields: dict[str, Any] = {"kind": form.kind}
    for part in dataclasses.fields(form):
        value = getattr(form, part.name)
        if part.name == "parameters":
            value = [[parameter.name, list(parameter.shape)] for parameter in value]
        elif isinstance(value, Outer | Lookup):
            value = to_fields(value)
        elif isinstance(value, tuple):
            value = list(value)
        fields[part.name] = value
    return fields


def from_fields(fields: Mapping[str, Any]) -> Form:
    """The form from its JSON fields."""
    kind = fields.get("kind")
    if kind not in _KINDS:
        raise QueryError(
            "factors are kept in a form that this version does not know",
            found=kind,
            expected=f"one of {', '.join(_KINDS)}",
            fix="upgrade gradkeep, or capture again",
        )
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "kind":
            continue
        if name == "parameters":
            value = tuple(Parameter(full, tuple(shape)) for full, shape in value)
        elif isinstance(value, dict):
            value = from_fields(value)
        elif isinstance(value, list):
            value = tuple(value)
        values[name] = value
    form: Form = _KINDS[kind](**values)
    return form
