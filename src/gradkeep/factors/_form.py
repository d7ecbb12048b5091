"""What every form that a gradient is kept in can do, whatever it is.

A form is a description without numbers: which arrays a layer's per-sample gradients are kept in, and
the formula that joins them. It is written into the schema of a capture, so that the arrays can be
understood without the model that they came from. The numbers of some samples are its rows.

A form of one's own is a class with this protocol in a file of its own, and its name in
`_FORMS` of this room.
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
from gradkeep.factors._arithmetic import RESTORED, pairwise, tiles

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from gradkeep.factors._arithmetic import Spans
    from gradkeep.factors._cost import Cost, ProductSize
    from gradkeep.factors._outer import Outer, OuterRows
    from gradkeep.factors._weights import WeightBlock

Compute = Literal["factored", "gram", "half", "restored", "dense"]
"""How products of gradients are computed from what is kept."""
Storage = Literal["factors", "dense", "low rank", "coordinates"]
"""In which way a layer is kept: its factors, the gradient itself, fewer positions than it had, or a
few coordinates in a basis."""
ArrayRole = Literal["prefix", "suffix", "gradient", "projection"]


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
        """The number of values."""
        return math.prod(self.shape)


class GradientRows:
    """The numbers of B samples of one layer, in the form they are kept in: a dataclass of tensors."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError

    def take(self, start: int, stop: int) -> Self:
        """A view of rows `start` to `stop`."""
        raise NotImplementedError

    def widened(self) -> Self:
        """The same rows with 32 bits a number at least."""
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
        """The number of positions of all rows together; what has none counts one a row."""
        return float(len(self))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return sum(value.nbytes for value in values if value is not None)

    def _arrays(self) -> list[tuple[str, Any]]:
        """Names and values of the arrays of numbers, without ids and offsets."""
        named = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return [
            (name, value)
            for name, value in named
            if isinstance(value, GradientRows) or (value is not None and value.is_floating_point())
        ]


class ArraySource(Protocol):
    """Where the arrays of some rows come from: a batch that was read, for instance."""

    def tensor(self, name: str) -> Tensor:
        """The values of an array, of all rows one after the other."""

    def offsets(self, name: str) -> Tensor | None:
        """`[B + 1]` int64: where each row begins and ends; None: one entry a row."""


@dataclass(frozen=True, slots=True, eq=False)
class OuterProducts:
    """Gradients of one weight as sums over positions t of `left_t right_t^T`, for some rows."""

    start: int
    """The first row."""
    right: Tensor
    """`[S, C']`: the first columns of the weight."""
    spans: Spans
    """Which positions belong to each of the rows."""
    left: Tensor | None = None
    """`[S, R']`: rows of the weight from `first` on."""
    ids: Tensor | None = None
    """`[S]` int64 instead of `left`: the only row of the weight that has a one."""
    first: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PositionProducts:
    """Products of single positions of some rows with K directions."""

    values: Tensor
    """`[K, S]`"""
    spans: Spans
    """Which positions belong to each of the rows."""


R = TypeVar("R", bound=GradientRows)


class Form(Protocol[R]):
    """How one layer's per-sample gradients are kept, and all that can be asked of them.

    Rows go in and numbers come out, in the dtype of the rows; nothing is read or written here.
    """

    kind: ClassVar[str]
    """What the schema calls it."""
    computes: ClassVar[tuple[Compute, ...]]
    """The ways in which its products can be computed."""
    rows_type: ClassVar[type[Any]]
    parameters: tuple[Parameter, ...]

    # What it is made of.

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the arrays that hold the rows."""

    @property
    def gradient_size(self) -> int:
        """P, the number of values of the parameters' gradient."""
        return sum(parameter.size for parameter in self.parameters)

    @property
    def restored_size(self) -> int:
        """The number of values of a restored row: P, unless it is kept as a sketch."""

    @property
    def restored_parameters(self) -> tuple[Parameter, ...]:
        """What a restored row is made of: the parameters, or of a sketch the sketch itself."""
        return self.parameters

    @property
    def exact(self) -> bool:
        """Whether restored rows are the gradients, up to rounding."""
        return True

    @property
    def approximate(self) -> str | None:
        """What is kept in place of the gradient, in words; None: the gradient itself."""
        return None

    @property
    def basis(self) -> str | None:
        """The fingerprint of the basis that rows are coordinates in; None: they are gradients."""
        return None

    @property
    def repeated_error(self) -> float:
        """How far a row may be off, relative to its length, when it is made a second time."""
        return 0.0

    @property
    def whitened(self) -> bool:
        """Whether products are those of whitened gradients: influence, not inner products."""
        return False

    @property
    def factored(self) -> bool:
        """Whether prefixes and suffixes are kept as the layer had them."""
        return False

    @property
    def sparse(self) -> bool:
        """Whether a restored row is nearly all zeros."""
        return False

    @property
    def storage(self) -> Storage:
        """In which way it keeps a layer."""
        return "factors"

    @property
    def prefix_array(self) -> str | None:
        """The array of the prefix, where other layers that read the same input may share it."""
        return None

    @property
    def places_array(self) -> str | None:
        """The array that says which token every kept position is, where a capture has it."""
        return None

    def with_prefix(self, array: str) -> Self:
        """The same with the prefix in another array."""
        raise AssertionError(f"{self.kind} has no prefix to share with {array}")

    def as_outer(self, rows: R, *, prefix: str, suffix: str) -> tuple[Outer, OuterRows] | None:
        """The same gradients as those of one linear layer with several positions a row, if they are."""
        del rows, prefix, suffix
        return None

    @property
    def fixed_positions(self) -> float:
        """Positions of every row, where all rows have arrays of one shape."""
        return 1.0

    def read(self, source: ArraySource) -> R:
        """The rows that some arrays hold; nothing is copied."""

    def tensors(self, rows: R) -> dict[str, Tensor]:
        """The tensors of some rows by the names of their arrays."""

    def offsets(self, rows: R, array: str) -> Tensor | None:
        """Where each row begins and ends in an array; None: one entry a row."""
        del rows, array
        return None

    def role(self, array: str) -> ArrayRole:
        """What an array holds."""
        return "suffix" if array.endswith("suffix") else "prefix"

    def weight_blocks(self) -> tuple[WeightBlock, ...]:
        """The matrices and vectors that a restored gradient is made of."""

    # The algebra.

    def restore(self, rows: R) -> Tensor:
        """The gradients themselves `[B, P]`: the parameters in order, each flattened."""

    def squared_norms(self, rows: R) -> Tensor:
        """Squared lengths of the gradients `[B]`, the cheapest exact way."""

    def weighted_sum(self, rows: R, weights: Tensor) -> Tensor:
        """Weighted sums of gradients: weights `[K, B]` -> `[K, P]`, without restoring each."""

    def products(self, queries: R, train: R, compute: Compute, *, scratch: int) -> Tensor:
        """Inner products `[Q, N]` of rows as they are kept, in a way that is neither half nor restored."""

    def half(self, rows: R, directions: Tensor, *, scratch: int) -> Tensor:
        """Products `[K, B]` with dense directions `[K, P]`, which are moved through the factors."""

    def temporaries(self, rows: R) -> int:
        """Values of the temporaries of a row while it is restored."""
        del rows
        return 0

    def between(self, rows: R, block: WeightBlock, left: Tensor, right: Tensor) -> Tensor:
        """`left^T W right` `[B, G, r, c]` of a block's gradients W `[G, R, C]`.

        `left` is `[G, R, r]` and `right` `[G, C, c]`; a block without columns, a vector `[R]`, is
        taken as `[1, R, 1]`. Here rows are restored; forms with factors move those instead.
        """
        out = rows.example.new_empty(
            len(rows), left.shape[0], left.shape[2], right.shape[2], dtype=left.dtype
        )
        for start, stop, dense in self.restored_tiles(rows, RESTORED):
            taken = block.matrices(dense).to(left.dtype)
            for group, into in enumerate(out[start:stop].unbind(1)):
                # One large product for each side of all rows, not a small one for each row.
                high = _flat_product(taken[:, group].mT, left[group]).mT
                into.copy_(_flat_product(high, right[group]))
            del dense, taken  # before the next is made
        return out

    def outer_products(self, rows: R, *, scratch: int) -> Iterator[OuterProducts] | None:
        """The gradients of the first parameter as sums of outer products; None: there are none."""
        del rows, scratch
        return None

    def count_outer_products(self, rows: R) -> float:
        """How many outer products a row is the sum of, on average."""
        return rows.positions / max(1, len(rows))

    @property
    def tabled(self) -> bool:
        """Whether products begin with tables of the queries, which many rows at once are worth."""
        return False

    def chained(self, parts: Sequence[R]) -> R:
        """Rows that follow each other, as one."""
        if len(parts) != 1:
            raise QueryError("rows of this form are not chained", found=self.kind)
        return parts[0]

    def bias_gradients(self, rows: R) -> Tensor | None:
        """The gradients of the bias `[B, d]`, where `outer_products` leave it out."""
        del rows
        return None

    def weighted_squares(self, rows: R, weights: Tensor) -> Tensor:
        """Weighted sums of squared gradient entries: weights `[K, B]` -> `[K, P]`."""
        out = weights.new_zeros(len(weights), self.restored_size)
        for start, stop, dense in self.restored_tiles(rows, RESTORED):
            out.addmm_(weights[:, start:stop], (dense * dense).to(out.dtype))
            del dense  # before the next is made
        return out

    def dot(self, queries: R, train: R, *, compute: Compute, scratch: int) -> Tensor:
        """Inner products of gradients `[Q, N]`, with about `scratch` bytes of temporaries.

        - `factored`: from products of prefixes and of suffixes;
        - `gram`: for convolutions, from products of pixels;
        - `half`: queries restored, and moved through the factors of the others;
        - `restored`: both restored;
        - `dense`: of gradients that are kept as they are.

        All give the same numbers up to rounding.

        >>> import torch
        >>> from gradkeep.factors._outer import Outer, OuterRows
        >>> form = Outer((Parameter("w", (1, 2)),), "w.prefix", "w.suffix", d_in=2, d_out=1)
        >>> rows = OuterRows(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([[3.0], [1.0]]))
        >>> form.dot(rows, rows, compute="factored", scratch=1 << 20)
        tensor([[45.,  6.],
                [ 6.,  1.]])
        """
        self.check_rows(queries, train)
        if compute not in self.computes:
            raise QueryError(
                f"products of gradients kept as {self.kind!r} cannot be computed that way",
                found=compute,
                expected=f"one of {', '.join(self.computes)}",
                fix="let the planner choose",
            )
        if compute not in ("half", "restored"):
            return self.products(queries, train, compute, scratch=scratch)
        like = train.example
        out = like.new_empty(len(queries), len(train))
        size = self.gradient_size
        parts = list(tiles(len(queries), size, like.element_size(), scratch // 2))
        space = like.new_empty(parts[0][1] if parts else 0, size)
        for start, stop in parts:
            directions = space[: stop - start]
            some = queries.take(start, stop)
            for first, last, dense in self.restored_tiles(some, scratch // 2):
                directions[first:last] = dense
                del dense  # before the next is made
            out[start:stop] = self.along(train, directions, scratch=scratch // 2, compute=compute)
        return out

    def along(
        self, rows: R, directions: Tensor, *, scratch: int, compute: Compute | None = None
    ) -> Tensor:
        """Products of gradients with dense directions `[K, P]`, as `[K, B]`.

        `half` moves the directions through the factors, `restored` restores the rows; by default
        whichever needs less, which is `half` for few directions or few positions.
        """
        self.check_rows(rows)
        if compute is None:
            compute = "half" if self._half_is_less(rows, len(directions)) else "restored"
        if compute == "half":
            return self.half(rows, directions, scratch=scratch)
        out = directions.new_empty(len(directions), len(rows))
        for start, stop, dense in self.restored_tiles(rows, scratch):
            out[:, start:stop] = pairwise(directions, dense)
            del dense  # before the next is made
        return out

    def sketched(self, rows: R, directions: Tensor, *, scratch: int) -> Tensor:
        """`along`, good to a hundredth of a row's length: for codes that are rounded anyway."""
        return self.along(rows, directions, scratch=scratch)

    def along_positions(self, rows: R, directions: Tensor) -> tuple[PositionProducts, ...] | None:
        """What each position adds to `along`, for each use of the weight; None: it has no positions.

        The sum over a row's positions and over all uses is its product with each of the dense
        directions `[K, P]`.
        """
        del rows, directions
        return None

    def restored_tiles(self, rows: R, scratch: int) -> Iterator[tuple[int, int, Tensor]]:
        """`(start, stop, gradients [stop - start, P])`, with about `scratch` bytes for each tile."""
        values = self.restored_size + self.temporaries(rows)
        item = rows.example.element_size()
        for start, stop in tiles(len(rows), values, item, min(scratch, RESTORED)):
            yield start, stop, self.restore(rows.take(start, stop))

    def check_rows(self, *parts: GradientRows) -> None:
        """Raise unless the rows are of this form."""
        for part in parts:
            if not isinstance(part, self.rows_type):
                raise QueryError(
                    f"rows do not fit the form {self.kind!r}",
                    found=type(part).__name__,
                    expected=self.rows_type.__name__,
                    fix="pass the form that the rows were read with",
                )

    def _half_is_less(self, rows: R, directions: int) -> bool:
        """Whether K T products with a weight cost less than T to restore it, K after, and its bytes."""
        if self.sparse or "restored" not in self.computes:
            return True
        positions = rows.positions / max(1, len(rows))
        # Operations that take as long as to write and read one value of a restored gradient.
        return directions * positions <= directions + positions + 50

    # What the planner asks.

    def same_layout(self, other: Form[Any]) -> bool:
        """Whether rows of both can be multiplied, whatever their arrays are called."""
        return bool(self == other)

    def shared_prefix(self, other: Form[Any]) -> tuple[str, str] | None:
        """What this form and that of the queries read; layers with the same can be joined."""
        del other
        return None

    def join(self, parts: Sequence[R]) -> R:
        """Rows of layers that share a prefix, as those of one layer with all their outputs."""
        (only,) = parts
        return only

    def joined(self, rows: R) -> Form[R]:
        """The form of joined rows."""
        del rows
        return self

    def products_cost(self, load: ProductSize, compute: Compute) -> Cost:
        """Cost of `products`."""

    def half_cost(self, load: ProductSize) -> Cost:
        """Cost of `half`, with the queries as directions."""

    def restore_cost(self, rows: float, positions: float) -> Cost:
        """Cost of `restore` for so many rows of so many positions."""


def form_to_fields(form: Form[Any]) -> dict[str, Any]:
    """The form as JSON fields.

    >>> from gradkeep.factors._dense import Dense
    >>> from gradkeep.factors._registry import form_from_fields
    >>> form_from_fields(form_to_fields(Dense((Parameter("w", (2, 3)),), "w.gradient", 6))).size
    6
    """
    fields: dict[str, Any] = {"kind": form.kind}
    for part in dataclasses.fields(form):  # type: ignore[arg-type]
        value = getattr(form, part.name)
        if part.name == "parameters":
            value = [[parameter.name, list(parameter.shape)] for parameter in value]
        elif dataclasses.is_dataclass(value):
            value = form_to_fields(value)  # type: ignore[arg-type]
        elif isinstance(value, tuple):
            value = list(value)
        fields[part.name] = value
    return fields


def form_of_kinds(fields: Mapping[str, Any], kinds: Mapping[str, type[Any]]) -> Any:
    """The form from its JSON fields, if it is of one of these kinds."""
    if not isinstance(fields, Mapping):
        raise _arguments.argument_error(
            "fields", fields, error=QueryError, expected="a mapping from names"
        )
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise QueryError(
            "factors are kept in a form that this version does not know",
            found=_arguments.short_repr(kind),
            expected=f"one of {', '.join(kinds)}",
            fix="upgrade gradkeep, or capture again",
        )
    try:
        values = {
            name: _value(name, value, kinds) for name, value in fields.items() if name != "kind"
        }
        made = kinds[kind](**values)
        check_fields(made, QueryError)
    except GradkeepError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise QueryError(
            f"the form {kind!r} of a layer is not as it is written",
            found=_arguments.short_repr(dict(fields)),
            fix="gradkeep verify STORE, or capture again",
        ) from error
    return made


def _value(name: str, value: Any, kinds: Mapping[str, type[Any]]) -> Any:
    if name == "parameters":
        return tuple(Parameter(full, tuple(shape)) for full, shape in value)
    if isinstance(value, dict):
        return form_of_kinds(value, kinds)
    return tuple(value) if isinstance(value, list) else value


def _flat_product(rows: Tensor, matrix: Tensor) -> Tensor:
    """`[B, m, d] @ [d, k]`, as a single product."""
    return (rows.reshape(-1, rows.shape[2]) @ matrix).view(len(rows), rows.shape[1], -1)


def widened(values: Tensor) -> Tensor:
    """Numbers of 32 bits at least: 16 are for keeping, not for computing."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


AnyForm = Form[Any]
"""A form, whatever its rows are."""
