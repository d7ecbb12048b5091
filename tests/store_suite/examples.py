"""Rows to write, and what may come back: one array for every way to store one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.store import Array, Batch, Ragged, Schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    AnyArray = np.ndarray[Any, np.dtype[Any]]

ARRAYS = (
    Array("loss"),
    Array("exact", "float64", (2,), kind="data", nan="keep"),
    Array("label", "int64"),
    Array("flag", "bool", (3,), kind="data"),
    Array("mask", "bool", (11,), kind="mask", encoding="bits"),
    Array("prefix", shape=(5,), kind="prefix", encoding="float16"),
    Array("suffix", shape=(2, 3), kind="suffix", encoding="bfloat16"),
    Array("scaled", shape=(7,), kind="suffix", encoding="float16-scaled"),
    Array("small", shape=(6,), kind="projection", encoding="int8-scaled"),
    Array("tokens", shape=(2,), kind="prefix", ragged=True),
    Array("deltas", shape=(3,), kind="suffix", ragged=True, encoding="int8-scaled"),
    Array("cold", shape=(4,), kind="data", compression="zstd"),
)


def schema(rows_per_segment: int = 4, **fields: Any) -> Schema:
    """A schema with an array of every kind."""
    return Schema(ARRAYS, rows_per_segment=rows_per_segment, **fields)


@dataclass(frozen=True, slots=True, order=True)
class ExampleRow:
    """A row's values are all made from its id and a salt, so that a model need not keep them."""

    id: int
    salt: int = 0

    def values(self) -> dict[str, AnyArray]:
        """One value per array."""
        return _values(self.id, self.salt)


@lru_cache(maxsize=4096)
def _values(number: int, salt: int) -> dict[str, AnyArray]:
    random = np.random.default_rng([number, salt])
    # Rows of very different size, some all zero: what a shared scale would lose.
    size = np.float32(random.choice([0, 1e-6, 1, 1e3]))

    def floats(*shape: int) -> AnyArray:
        return np.asarray(random.standard_normal(shape, np.float32) * size)

    exact = random.standard_normal(2)
    exact[number % 2] = random.choice([np.nan, np.inf, -0.0, 1.5])
    return {
        "loss": floats(),
        "exact": exact,
        "label": np.array(random.integers(-9, 9)),
        "flag": random.random(3) < 0.5,
        # The same for every salt: two trainings of one subset share it.
        "mask": np.random.default_rng(number).random(11) < 0.5,
        "prefix": floats(5),
        "suffix": floats(2, 3),
        "scaled": floats(7),
        "small": floats(6),
        "tokens": floats(int(random.integers(4)), 2),
        "deltas": floats(int(random.integers(4)), 3),
        "cold": floats(4),
    }


def ids_of(rows: Iterable[ExampleRow]) -> list[int]:
    """The ids of some rows."""
    return [row.id for row in rows]


def batch_of(rows: Sequence[ExampleRow]) -> dict[str, Any]:
    """Rows as `Writer.append` takes them."""
    values = [row.values() for row in rows]
    return {
        array.name: [value[array.name] for value in values]
        if array.ragged
        else np.array([value[array.name] for value in values], array.dtype).reshape(
            len(rows), *array.shape
        )
        for array in ARRAYS
    }


def check(batch: Batch, rows: Sequence[ExampleRow]) -> None:
    """Assert that a batch holds exactly these rows, as exactly as their encoding promises."""
    assert batch.ids.tolist() == ids_of(rows)
    expected = [row.values() for row in rows]
    for array in (column.array for column in batch.columns):
        actual = batch[array.name]
        assert len(actual) == len(rows), array.name
        for index, value in enumerate(expected):
            _check_value(array, actual[index], value[array.name])


def check_column(array: Array, actual: AnyArray | Ragged, rows: Sequence[ExampleRow]) -> None:
    """Assert the same of the values of one array."""
    assert len(actual) == len(rows), array.name
    for index, row in enumerate(rows):
        _check_value(array, actual[index], row.values()[array.name])


def _check_value(array: Array, actual: Any, expected: AnyArray) -> None:
    got = np.asarray(actual)
    assert got.dtype == array.dtype, array.name
    assert got.shape == expected.shape, array.name
    if array.encoding in ("plain", "bits"):
        # Bytes, not values: NaN must come back, and with its sign.
        assert got.tobytes() == expected.astype(array.dtype).tobytes(), array.name
        return
    error = np.abs(got.astype(np.float64) - expected)
    allowed = _allowed_error(array, expected.astype(np.float64))
    assert (error <= allowed).all(), f"{array.name}: {got} is too far from {expected}"


def _allowed_error(array: Array, expected: AnyArray) -> AnyArray:
    """Half a unit in the last place that the encoding keeps, for every value."""
    size = np.abs(expected)
    if array.encoding == "bfloat16":
        return np.asarray(size * 2.0**-8)
    if array.encoding == "float16":
        return np.asarray(np.maximum(size * 2.0**-11, 2.0**-25))
    # One scale per row, and in ragged arrays per token.
    axes = tuple(range(1 if array.ragged else 0, expected.ndim))
    largest = size.max(axis=axes, keepdims=True, initial=0.0)
    if array.encoding == "float16-scaled":
        return np.asarray(np.maximum(size * 2.0**-11, largest * 2.0**-38))
    return np.asarray(np.broadcast_to(largest / 127 * 0.5001, expected.shape))
