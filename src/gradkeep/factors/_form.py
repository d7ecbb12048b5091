"""Protocol of the forms that gradients are stored in.

A form is a description without values: the arrays of a layer's per-sample gradients, and the formula that
combines them. It is written into the schema of a capture, so that the arrays can be read without the model.
The values of some samples are its rows.

To add a form, implement this protocol in a module of its own, and add the class to `_FORMS` in `__init__.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeVar

import torch

from gradkeep import _arguments
from gradkeep._arguments import check_fields
from gradkeep.errors import GradkeepError, QueryError
from gradkeep.factors._arithmetic import (
    CACHED,
    RESTORED,
    Spans,
    pairwise,
    spans,
    squared_lengths,
    tiles,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from gradkeep.factors._weights import WeightBlock

Compute = Literal["factored", "gram", "half", "restored", "dense"]
"""How products of gradients are computed from the stored factors."""
Storage = Literal["factors", "dense", "low rank", "coordinates"]
"""How a layer is stored: its factors, the gradient itself, fewer positions than it had, or a few
coordinates in a basis."""


OMIT_DEFAULT = {"omit default": True}
"""Metadata of a field that schemas hold only if it is set: earlier versions did not have it."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the model: its full name and shape."""

    name: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_fields(self, QueryError)
        for size in self.shape:
            _arguments.count("shape", size, error=QueryError)

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


class GradientRows:
    """Values of B samples of one layer, in their stored form: a dataclass of tensors."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(self._fields()[0][1])

    def take(self, start: int, stop: int) -> Self:
        """Return a view of rows `start` to `stop`."""
        parts = [
            value.take(start, stop)
            if isinstance(value, GradientRows)
            else (None if value is None else value[start:stop])
            for _, value in self._fields()
        ]
        return type(self)(*parts)

    def widened(self) -> Self:
        """Return the same rows with at least 32 bits per number."""
        wide = {
            name: value.widened() if isinstance(value, GradientRows) else widened(value)
            for name, value in self._arrays()
        }
        return dataclasses.replace(self, **wide)  # type: ignore[type-var]

    @property
    def example(self) -> Tensor:
        """One of the arrays, which has the dtype and device of all."""
        value = self._arrays()[-1][1]
        return value.example if isinstance(value, GradientRows) else value

    @property
    def positions(self) -> float:
        """Number of positions of all rows together; one per row without positions."""
        return float(len(self))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(value.nbytes for _, value in self._fields() if value is not None)

    def _fields(self) -> list[tuple[str, Any]]:
        return [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]  # type: ignore[arg-type]

    def _arrays(self) -> list[tuple[str, Any]]:
        """Return names and values of the arrays of numbers, without ids and offsets."""
        return [
            (name, value)
            for name, value in self._fields()
            if isinstance(value, GradientRows) or (value is not None and value.is_floating_point())
        ]


class RaggedRows(GradientRows):
    """Rows of several positions each, one after the other: S positions of B rows in total.

    A dataclass of two arrays of S positions, of which `g` is the second, and of their offsets.
    """

    __slots__ = ()
    g: Tensor
    offsets: Tensor | None

    def __len__(self) -> int:
        return len(self.g) if self.offsets is None else len(self.offsets) - 1

    @property
    def spans(self) -> Spans:
        """Positions of each row."""
        return spans(self.offsets, len(self.g))

    @property
    def positions(self) -> float:
        """Number of positions of all rows together."""
        return float(len(self.g))

    def take(self, start: int, stop: int) -> Self:
        """Return a view of rows `start` to `stop`."""
        if self.offsets is None:
            return GradientRows.take(self, start, stop)
        offsets = self.offsets[start : stop + 1]
        low, high = int(offsets[0]), int(offsets[-1])
        first, second = (value[low:high] for _, value in self._fields()[:2])
        return type(self)(first, second, offsets - low)  # type: ignore[call-arg]


class ArraySource(Protocol):
    """Source of the arrays of some rows, such as a batch from the store."""

    def tensor(self, name: str) -> Tensor:
        """Return the values of an array, of all rows one after the other."""

    def offsets(self, name: str) -> Tensor | None:
        """Return `[B + 1]` int64, the start and end of each row; None for one entry per row."""


@dataclass(frozen=True, slots=True, eq=False)
class OuterProducts:
    """Gradients of one weight as sums over positions t of `row_t col_t^T`, for some rows."""

    start: int
    """First row."""
    col_factor: Tensor
    """`[S, C']`: the first columns of the weight."""
    spans: Spans
    """Positions of each row."""
    row_factor: Tensor | None = None
    """`[S, R']`: rows of the weight from `first` on."""
    ids: Tensor | None = None
    """`[S]` int64 instead of `row_factor`: the only row of the weight that is one."""
    first: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PositionProducts:
    """Products of single positions of some rows with K directions."""

    values: Tensor
    """`[K, S]`"""
    spans: Spans
    """Positions of each row."""


R = TypeVar("R", bound=GradientRows)


class Form(Protocol[R]):
    """Form of one layer's stored per-sample gradients, and the algebra on them.

    Methods take rows and return tensors in the dtype of the rows; nothing is read or written here. Members with a
    body are defaults.
    """

    kind: ClassVar[str]
    """Name in the schema."""
    computes: ClassVar[tuple[Compute, ...]]
    """Ways in which its products can be computed."""
    rows_type: ClassVar[type[Any]]
    """Class of its rows."""
    sparse: ClassVar[bool] = False
    """True if a restored row is mostly zeros."""
    parameters: tuple[Parameter, ...]

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the arrays that hold the rows."""

    @property
    def gradient_size(self) -> int:
        """P, the number of values of the parameters' gradient."""
        return sum(parameter.size for parameter in self.parameters)

    @property
    def restored_size(self) -> int:
        """Number of values of a restored row: P, or those of a sketch."""
        return sum(parameter.size for parameter in self.restored_parameters)

    @property
    def restored_parameters(self) -> tuple[Parameter, ...]:
        """Parts of a restored row: the parameters, or the sketch itself."""
        return self.parameters

    @property
    def approximate(self) -> str | None:
        """Description of what is stored instead of the gradient; None for the gradient itself."""
        return None

    def read(self, source: ArraySource) -> R:
        """Read rows from arrays, without copying: the fields of the rows, in order."""
        tensors: list[Any] = [source.tensor(name) for name in self.arrays]
        if issubclass(self.rows_type, RaggedRows):
            tensors.append(source.offsets(self.arrays[-1]))
        rows: R = self.rows_type(*tensors)
        return rows

    def tensors(self, rows: R) -> dict[str, Tensor]:
        """Return the tensors of rows by the names of their arrays."""
        return dict(zip(self.arrays, (value for _, value in rows._fields()), strict=False))

    def offsets(self, rows: R, array: str) -> Tensor | None:
        """Return the start and end of each row in an array; None for one entry per row."""
        return rows.offsets if isinstance(rows, RaggedRows) else None

    def weight_blocks(self) -> tuple[WeightBlock, ...]:
        """Return the matrices and vectors of a restored gradient."""

    def restore(self, rows: R) -> Tensor:
        """Return the gradients `[B, P]`: the parameters in order, each flattened."""

    def squared_norms(self, rows: R) -> Tensor:
        """Return squared norms of the gradients `[B]`, in the cheapest exact way."""
        parts = restored_tiles(self, rows, CACHED)
        lengths = [squared_lengths(dense) for _, _, dense in parts]
        return torch.cat(lengths) if lengths else rows.example.new_empty(0)

    def weighted_sum(self, rows: R, weights: Tensor) -> Tensor:
        """Return weighted sums of gradients, weights `[K, B]` -> `[K, P]`."""
        out = weights.new_zeros(len(weights), self.restored_size)
        for start, stop, dense in restored_tiles(self, rows, RESTORED):
            out.addmm_(weights[:, start:stop], dense.to(out.dtype))
            del dense  # free it before the next one
        return out

    def products(self, queries: R, train: R, compute: Compute, *, scratch: int) -> Tensor:
        """Return inner products `[Q, N]` of stored rows, for computes other than half and restored."""

    def half(self, rows: R, directions: Tensor, *, scratch: int) -> Tensor:
        """Return products `[K, B]` with dense directions `[K, P]`, multiplied with the factors."""

    def temporaries(self, rows: R) -> int:
        """Return the temporary values per row while it is restored."""
        return 0

    def between(
        self, rows: R, block: WeightBlock, row_vectors: Tensor, col_vectors: Tensor
    ) -> Tensor:
        """Return L^T W R `[B, G, r, c]` of a block's gradients W `[G, R, C]`.

        L, `row_vectors`, is `[G, R, r]` and R, `col_vectors`, is `[G, C, c]`; a vector block `[R]` is treated as
        `[1, R, 1]`. By default rows are restored; forms with factors multiply those instead.
        """
        out = rows.example.new_empty(
            len(rows),
            row_vectors.shape[0],
            row_vectors.shape[2],
            col_vectors.shape[2],
            dtype=row_vectors.dtype,
        )
        (high, r), (wide, c) = row_vectors.shape[1:], col_vectors.shape[1:]
        is_left_first = r * wide * (high + c) < high * c * (wide + r)
        for start, stop, dense in restored_tiles(self, rows, 8 * CACHED):
            taken = block.matrices(dense).to(row_vectors.dtype)
            for group, into in enumerate(out[start:stop].unbind(1)):
                left, right = row_vectors[group], col_vectors[group]
                # One large product per side for all rows, not a small one per row.
                if is_left_first:
                    left_product = _flat_product(taken[:, group].mT, left).mT
                    into.copy_(_flat_product(left_product, right))
                else:
                    torch.matmul(left.mT, _flat_product(taken[:, group], right), out=into)
            del dense, taken  # free it before the next one
        return out

    def weighted_squares(self, rows: R, weights: Tensor) -> Tensor:
        """Return weighted sums of squared gradient entries, weights `[K, B]` -> `[K, P]`."""
        out = weights.new_zeros(len(weights), self.restored_size)
        for start, stop, dense in restored_tiles(self, rows, RESTORED):
            out.addmm_(weights[:, start:stop], (dense * dense).to(out.dtype))
            del dense  # free it before the next one
        return out


class FactoredForm(Form[R]):
    """Form whose rows are factors of the gradient of a weight."""

    __slots__ = ()

    @property
    def unchanged(self) -> bool:
        """True if prefixes and suffixes are stored as they were."""
        return True

    def outer_products(self, rows: R, *, scratch: int) -> Iterator[OuterProducts]:
        """Yield the gradients of the first parameter as sums of outer products."""
        raise NotImplementedError

    def bias_gradients(self, rows: R) -> Tensor | None:
        """Return the gradients of the bias `[B, d]`, the second parameter; None without a bias."""
        return None

    def along_positions(self, rows: R, directions: Tensor) -> tuple[PositionProducts, ...] | None:
        """Return what each position adds to `dot_directions`, for each use of the weight; None without positions.

        The sum over a row's positions and over all uses is its product with each of the dense directions `[K, P]`.
        """
        return None


def dot(form: Form[R], queries: R, train: R, *, compute: Compute, scratch: int) -> Tensor:
    """Return inner products of gradients `[Q, N]`, with about `scratch` bytes of temporaries.

    - `factored`: from products of prefixes and of suffixes;
    - `gram`: for convolutions, from products of pixels;
    - `half`: queries are restored, and multiplied with the factors of the others;
    - `restored`: both are restored;
    - `dense`: for gradients that are stored as they are.

    All give the same numbers up to rounding.

    >>> import torch
    >>> from gradkeep.factors._outer import Outer, OuterRows
    >>> form = Outer((Parameter("w", (1, 2)),), "w.prefix", "w.suffix", d_in=2, d_out=1)
    >>> rows = OuterRows(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([[3.0], [1.0]]))
    >>> dot(form, rows, rows, compute="factored", scratch=1 << 20)
    tensor([[45.,  6.],
            [ 6.,  1.]])
    """
    check_rows(form, queries, train)
    if compute not in form.computes:
        raise QueryError(
            f"products of gradients stored as {form.kind!r} cannot be computed this way",
            code="query.compute",
            found=compute,
            expected=f"one of {', '.join(form.computes)}",
            fix="Leave out compute= to let the planner choose.",
        )
    if compute not in ("half", "restored"):
        return form.products(queries, train, compute, scratch=scratch)
    like = train.example
    out = like.new_empty(len(queries), len(train))
    size = form.gradient_size
    parts = list(tiles(len(queries), size, like.element_size(), scratch // 2))
    space = like.new_empty(parts[0][1] if parts else 0, size)
    for start, stop in parts:
        directions = space[: stop - start]
        some = queries.take(start, stop)
        for first, last, dense in restored_tiles(form, some, scratch // 2):
            directions[first:last] = dense
            del dense  # free it before the next one
        out[start:stop] = dot_directions(
            form, train, directions, scratch=scratch // 2, compute=compute
        )
    return out


def dot_directions(
    form: Form[R], rows: R, directions: Tensor, *, scratch: int, compute: Compute | None = None
) -> Tensor:
    """Return products of gradients with dense directions `[K, P]`, as `[K, B]`.

    `half` multiplies the directions with the factors, `restored` restores the rows; by default the cheaper one,
    which is `half` for few directions or few positions.
    """
    check_rows(form, rows)
    if compute is None and not form.sparse and "restored" in form.computes:
        positions = rows.positions / max(1, len(rows))
        # K T products with a weight, against restoring it from T positions. Writing and reading
        # one value of a restored gradient takes as long as 50 operations.
        count = len(directions)
        compute = "half" if count * positions <= count + positions + 50 else "restored"
    if compute != "restored":
        return form.half(rows, directions, scratch=scratch)
    out = directions.new_empty(len(directions), len(rows))
    for start, stop, dense in restored_tiles(form, rows, scratch):
        out[:, start:stop] = pairwise(directions, dense)
        del dense  # free it before the next one
    return out


def has_factors(form: AnyForm) -> bool:
    """Return True if prefixes and suffixes are stored as they were."""
    return isinstance(form, FactoredForm) and form.unchanged


def restored_tiles(form: Form[R], rows: R, scratch: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield `(start, stop, gradients [stop - start, P])`, with about `scratch` bytes per tile."""
    values = form.restored_size + form.temporaries(rows)
    item = rows.example.element_size()
    for start, stop in tiles(len(rows), values, item, min(scratch, RESTORED)):
        yield start, stop, form.restore(rows.take(start, stop))


def check_rows(form: AnyForm, *parts: GradientRows) -> None:
    """Raise unless the rows are of this form."""
    for part in parts:
        if not isinstance(part, form.rows_type):
            raise QueryError(
                f"rows do not fit the form {form.kind!r}",
                code="query.rows_type",
                found=type(part).__name__,
                expected=form.rows_type.__name__,
                fix="Pass the form that the rows were read with.",
            )


def form_to_fields(form: Form[Any]) -> dict[str, Any]:
    """Convert the form to JSON fields.

    >>> from gradkeep.factors._dense import Dense
    >>> from gradkeep.factors import form_from_fields
    >>> form_from_fields(form_to_fields(Dense((Parameter("w", (2, 3)),), "w.gradient", 6))).size
    6
    """
    fields: dict[str, Any] = {"kind": form.kind}
    for part in dataclasses.fields(form):  # type: ignore[arg-type]
        value = getattr(form, part.name)
        if part.metadata == OMIT_DEFAULT and value == part.default:
            continue
        if part.name == "parameters":
            value = [[parameter.name, list(parameter.shape)] for parameter in value]
        elif dataclasses.is_dataclass(value):
            value = form_to_fields(value)  # type: ignore[arg-type]
        elif isinstance(value, tuple):
            value = list(value)
        fields[part.name] = value
    return fields


def form_of_kinds(fields: Mapping[str, Any], kinds: Mapping[str, type[Any]]) -> Any:
    """Build a form of one of these kinds from its JSON fields."""
    if not isinstance(fields, Mapping):
        raise _arguments.argument_error(
            "fields", fields, error=QueryError, expected="a mapping from names"
        )
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise QueryError(
            "factors are stored in a form that this version does not know",
            code="query.unknown_form",
            found=_arguments.short_repr(kind),
            expected=f"one of {', '.join(kinds)}",
            fix="Upgrade gradkeep, or capture again.",
        )
    try:
        values = {
            name: _value(name, value, kinds) for name, value in fields.items() if name != "kind"
        }
        form = kinds[kind](**values)
        check_fields(form, QueryError)
    except GradkeepError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise QueryError(
            f"the form {kind!r} of a layer is damaged",
            code="query.damaged_form",
            found=_arguments.short_repr(dict(fields)),
            fix="Run gradkeep verify STORE, or capture again.",
        ) from error
    return form


def _value(name: str, value: Any, kinds: Mapping[str, type[Any]]) -> Any:
    if name == "parameters":
        return tuple(Parameter(full, tuple(shape)) for full, shape in value)
    if isinstance(value, dict):
        return form_of_kinds(value, kinds)
    return tuple(value) if isinstance(value, list) else value


def _flat_product(rows: Tensor, matrix: Tensor) -> Tensor:
    """Return `[B, m, d] @ [d, k]`, as a single product."""
    return (rows.reshape(-1, rows.shape[2]) @ matrix).view(len(rows), rows.shape[1], -1)


def widened(values: Tensor) -> Tensor:
    """Convert to at least 32 bits: 16 bits are for storage, not for computing."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


AnyForm = Form[Any]
"""A form with any rows."""
