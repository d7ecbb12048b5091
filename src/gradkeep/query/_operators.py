"""Inner products, norms and sums of per-sample gradients, from whatever they are kept as.

Nothing here reads or writes; rows go in and numbers come out, in the dtype of the rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradkeep.errors import QueryError
from gradkeep.query import _conv, _dense, _lookup, _outer, _tied
from gradkeep.query._factors import (
    ConvRows,
    DenseRows,
    LookupRows,
    OuterRows,
    TiedRows,
    example_of,
)
from gradkeep.query._forms import size_of
from gradkeep.query._inner import pairwise
from gradkeep.query._restored import restored
from gradkeep.query._tiles import RESTORED, tiles
from gradkeep.query._ways import How, hows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from gradkeep.query._factors import Factors
    from gradkeep.query._forms import Form

__all__ = [
    "How",
    "against",
    "concat",
    "dot",
    "hows",
    "nbytes",
    "restore",
    "squared_norms",
    "squares",
    "take",
    "total",
]

_ALGEBRA: dict[str, tuple[Any, type]] = {
    "outer": (_outer, OuterRows),
    "conv": (_conv, ConvRows),
    "lookup": (_lookup, LookupRows),
    "dense": (_dense, DenseRows),
    "tied": (_tied, TiedRows),
}
_BYTES = 50
"""Operations that take as long as to write and read one value of a restored gradient."""


def restore(form: Form, rows: Factors) -> Tensor:
    """The gradients themselves `[B, P]`: the form's parameters in order, each flattened.

    >>> import torch
    >>> from gradkeep.query._forms import Outer, Parameter
    >>> form = Outer((Parameter("w", (1, 2)),), "w.prefix", "w.suffix", d_in=2, d_out=1)
    >>> restore(form, OuterRows(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])))
    tensor([[3., 6.]])
    """
    dense: Tensor = _of(form, rows).restore(form, rows)
    return dense


def squared_norms(form: Form, rows: Factors) -> Tensor:
    """Squared lengths of the gradients `[B]`, the cheapest exact way."""
    norms: Tensor = _of(form, rows).squared_norms(form, rows)
    return norms


def dot(form: Form, queries: Factors, train: Factors, *, how: How, scratch: int) -> Tensor:
    """Inner products of gradients `[Q, N]`, with about `scratch` bytes of temporaries.

    - `factored`: from products of prefixes and of suffixes;
    - `gram`: for convolutions, from products of pixels;
    - `half`: queries restored, and moved through the factors of the others;
    - `restore`: both restored;
    - `dense`: of gradients that are kept as they are.

    All ways give the same numbers up to rounding.

    >>> import torch
    >>> from gradkeep.query._forms import Outer, Parameter
    >>> form = Outer((Parameter("w", (1, 2)),), "w.prefix", "w.suffix", d_in=2, d_out=1)
    >>> rows = OuterRows(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([[3.0], [1.0]]))
    >>> dot(form, rows, rows, how="factored", scratch=1 << 20)
    tensor([[45.,  6.],
            [ 6.,  1.]])
    """
    algebra = _of(form, queries, train)
    if how not in hows(form):
        raise QueryError(
            f"gradients kept as {form.kind!r} cannot be multiplied that way",
            found=how,
            expected=f"one of {', '.join(hows(form))}",
            fix="let the planner choose",
        )
    if how not in ("half", "restore"):
        products: Tensor = getattr(algebra, how)(form, queries, train, scratch=scratch)
        return products
    like = example_of(train)
    out = like.new_empty(len(queries), len(train))
    size = size_of(form)
    parts = list(tiles(len(queries), size, like.element_size(), scratch // 2))
    space = like.new_empty(parts[0][1] if parts else 0, size)
    for start, stop in parts:
        directions = space[: stop - start]
        some = take(form, queries, start, stop)
        for first, last, dense in _tiles_of(form, some, scratch // 2):
            directions[first:last] = dense
            del dense  # before the next is made
        out[start:stop] = against(form, train, directions, scratch=scratch // 2, how=how)
    return out


def total(form: Form, rows: Factors, weights: Tensor) -> Tensor:
    """Weighted sums of gradients: weights `[K, B]` -> `[K, P]`, without restoring each."""
    sums: Tensor = _of(form, rows).total(form, rows, weights)
    return sums


def squares(form: Form, rows: Factors, weights: Tensor) -> Tensor:
    """Weighted sums of squared gradient entries: weights `[K, B]` -> `[K, P]`."""
    algebra = _of(form, rows)
    direct: Tensor | None = None
    if hasattr(algebra, "squares"):
        direct = algebra.squares(form, rows, weights)
    if direct is not None:
        return direct
    out = weights.new_zeros(len(weights), size_of(form))
    for start, stop, dense in _tiles_of(form, rows, RESTORED):
        out.addmm_(weights[:, start:stop], dense * dense)
        del dense  # before the next is made
    return out


def against(
    form: Form,
    rows: Factors,
    directions: Tensor,
    *,
    scratch: int,
    how: How | None = None,
) -> Tensor:
    """Products of gradients with dense directions `[K, P]`, as `[K, B]`.

    `half` moves the directions through the factors, `restore` restores the rows; by default
    whichever needs less, which is `half` for few directions or few positions.
    """
    algebra = _of(form, rows)
    if how is None:
        how = "half" if _half_is_less(rows, len(directions)) else "restore"
    if how == "half":
        products: Tensor = algebra.half(form, rows, directions, scratch=scratch)
        return products
    out = directions.new_empty(len(directions), len(rows))
    for start, stop, dense in _tiles_of(form, rows, scratch):
        out[:, start:stop] = pairwise(directions, dense)
        del dense  # before the next is made
    return out


def concat(form: Form, parts: Sequence[Factors]) -> Factors:
    """Rows of several parts, one after the other."""
    joined: Factors = _of(form, *parts).concat(parts)
    return joined


def take(form: Form, rows: Factors, start: int, stop: int) -> Factors:
    """A view of rows `start` to `stop`."""
    some: Factors = _of(form, rows).take(rows, start, stop)
    return some


def nbytes(rows: Factors) -> int:
    """Bytes of the arrays of some rows."""
    if isinstance(rows, TiedRows):
        return nbytes(rows.lookup) + nbytes(rows.outer)
    arrays = (getattr(rows, name) for name in rows.__slots__)
    return sum(array.numel() * array.element_size() for array in arrays if array is not None)


def _tiles_of(form: Form, rows: Factors, scratch: int) -> Iterator[tuple[int, int, Tensor]]:
    """Gradients `[start:stop, P]`, some rows at a time."""
    values = size_of(form) + _of(form, rows).beside(form, rows)
    return restored(
        len(rows),
        values,
        example_of(rows).element_size(),
        scratch,
        lambda start, stop: restore(form, take(form, rows, start, stop)),
    )


def _half_is_less(rows: Factors, kinds: int) -> bool:
    """Whether K T products with a weight cost less than T to restore it, K after, and its bytes."""
    match rows:
        case OuterRows():
            positions = len(rows.g) / max(1, len(rows))
        case TiedRows():
            positions = len(rows.outer.g) / max(1, len(rows))
        case ConvRows():
            positions = rows.narrow[0, 0].numel() if len(rows) else 0
        case _:
            return True
    return kinds * positions <= kinds + positions + _BYTES


def _of(form: Form, *parts: Factors) -> Any:
    """The module that knows the form, once the rows are seen to be of it."""
    algebra, kind = _ALGEBRA[form.kind]
    for part in parts:
        if not isinstance(part, kind):
            raise QueryError(
                f"rows do not fit the form {form.kind!r}",
                found=type(part).__name__,
                expected=kind.__name__,
                fix="pass the form that the rows were read with",
            )
    return algebra
