"""Schema of a block: its arrays, their encodings, and fingerprints of their source."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping  # noqa: TC003 - records are built from annotations
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradkeep._arguments import check_fields, count, optional, writable
from gradkeep.errors import DamagedError, SchemaMismatchError, StoreError
from gradkeep.store._document import (
    LARGEST_WHOLE,
    Count,
    Record,
    digest,
    malformed_document,
    parse_record,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

ArrayKind = Literal[
    "prefix", "suffix", "gradient", "projection", "embedding", "scalar", "mask", "data", "text"
]
Encoding = Literal["plain", "bfloat16", "float16", "float16-scaled", "int8-scaled", "bits"]
"""Storage of an array's numbers; all encodings but `plain` and `bits` round."""
NanPolicy = Literal["refuse", "keep"]

STORED_DTYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64"),
)
_GRADIENTS = ("suffix", "gradient", "projection")
_RESERVED = ("ids", "id", "run", "checkpoint", "split", "capture", "__metadata__")
_SEGMENT_BYTES = 128 << 20
_MOST_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class Array:
    """One named array of a block: a value of the same shape for every row.

    A ragged array holds `[T_i, *shape]` for row i. Bare `float16` is refused for gradients: at a converged
    model a third of them would become zero.

    Args:
        name: Name of the array.
        dtype: Dtype of the values.
        shape: Shape of one row, or of one token of a ragged row.
        kind: Role of the array; decides which encodings are allowed.
        encoding: `plain` stores values bit for bit; `bfloat16`, `float16-scaled` and `int8-scaled` (one
            scale per row, or per token of a ragged row) halve or quarter float32; `bits` packs a bool
            array to one bit per value.
        layer: Layer that the array belongs to, for the table of `gradkeep info`.
        ragged: Rows have different lengths.
        compression: `zstd`, or None.
        nan: `refuse` raises for NaN or infinity; `keep` stores them.

    Raises:
        StoreError: The combination is not supported.

    Example:
        >>> Array("fc1.suffix", shape=(256,), kind="suffix", layer="fc1", encoding="bfloat16").row_bytes
        512
    """

    name: str
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    kind: ArrayKind = "scalar"
    encoding: Encoding = "plain"
    layer: str | None = None
    ragged: bool = False
    compression: Literal["zstd"] | None = None
    nan: NanPolicy = "refuse"

    def __post_init__(self) -> None:
        shape = self.shape
        if isinstance(shape, list | tuple):
            object.__setattr__(self, "shape", tuple(shape))
        check_fields(self, StoreError)
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        if self.encoding in ("float32", "float64") and self.encoding == self.dtype:
            object.__setattr__(self, "encoding", "plain")
        problem = self._problem()
        if problem is not None:
            reason, message = problem
            raise StoreError(f"array {self.name!r}: {message}", code=f"store.array_{reason}")

    def _problem(self) -> tuple[str, str] | None:
        if not self.name or self.name in _RESERVED or any(c in self.name for c in '#/\\"\0\n:'):
            return (
                "name",
                "a name must not be empty, contain # / \\ : quotes or newlines, or be one of "
                + ", ".join(_RESERVED),
            )
        if not self.name.isascii() and not writable(self.name + (self.layer or "")):
            return (
                "name",
                "a name must be text that can be written as UTF-8, without lone surrogates",
            )
        if self.dtype not in STORED_DTYPES:
            return "dtype", f"dtype {self.dtype!r} is not one of {', '.join(STORED_DTYPES)}"
        if any(size < 0 for size in self.shape):
            return "shape", f"shape {self.shape} has a negative size"
        if 8 * math.prod(max(1, size) for size in self.shape) > LARGEST_WHOLE:
            return "shape", f"shape {self.shape} is too large for a file"
        if self.encoding == "bits" and (self.dtype != "bool" or not self.shape or self.ragged):
            return "bits", "'bits' packs bool arrays of fixed shape with at least one dimension"
        if self.encoding not in ("plain", "bits") and self.dtype != "float32":
            return "encoding", f"encoding {self.encoding!r} is for float32, not {self.dtype}"
        if self.scaled and self.nan == "keep":
            return (
                "nan",
                f"{self.encoding!r} scales a row by its largest value and cannot store NaN",
            )
        if self.is_text and (self.dtype != "uint8" or self.shape or not self.ragged):
            return "text", "kind 'text' needs a ragged array of uint8 with shape ()"
        half = self.encoding == "float16" or self.dtype == "float16"
        if half and self.kind in _GRADIENTS:
            return (
                "float16",
                "bare float16 loses small gradients; use bfloat16, float16-scaled or int8-scaled",
            )
        return None

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """Dtype of the bytes on disk; bfloat16 is stored as uint16."""
        by_encoding = {
            "bfloat16": "uint16",
            "float16": "float16",
            "float16-scaled": "float16",
            "int8-scaled": "int8",
            "bits": "uint8",
        }
        return np.dtype(by_encoding.get(self.encoding, self.dtype))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of one row (one token of a ragged row) on disk."""
        return (math.ceil(math.prod(self.shape) / 8),) if self.encoding == "bits" else self.shape

    def as_plain(self) -> Array:
        """Return the array as it is after decoding: stored bit for bit, NaN allowed."""
        return dataclasses.replace(
            self, encoding="plain", compression=None, nan="keep", kind="data"
        )

    @property
    def is_text(self) -> bool:
        """True if each row is a text, stored as UTF-8 bytes."""
        return self.kind == "text"

    @property
    def scaled(self) -> bool:
        """True if each row has a scale."""
        return self.encoding in ("float16-scaled", "int8-scaled")

    @property
    def row_bytes(self) -> int:
        """Bytes on disk of one row (of one token if ragged), before compression."""
        scale = 4 if self.scaled else 0
        return self.stored_dtype.itemsize * math.prod(self.stored_shape) + scale


@dataclass(frozen=True, slots=True)
class Layer:
    """A captured layer of the model.

    Args:
        name: Name of the layer.
        type: Class of the layer.
        parameters: Number of parameters, which is the size of the dense gradient.
        form: How the arrays make up the gradient, as JSON values; the store only compares it.
    """

    name: str
    type: str
    parameters: int
    form: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Schema:
    """Everything that must agree for two row ranges to belong to the same block.

    Args:
        arrays: Arrays of the block.
        num_rows: Rows of the complete block, or None if unknown until it is sealed.
        num_examples: Upper bound of the ids.
        rows_per_segment: Rows per file; 0 chooses a power of two near 128 MiB.
        layers: Captured layers.
        fingerprints: What the rows were computed from (weights, data, seed, code). They are compared like
            everything else, so rows of another checkpoint are refused.

    Raises:
        StoreError: Array names repeat, or a size is not a count.

    Example:
        >>> Schema((Array("loss"),), num_rows=1000).rows_per_segment
        1024
    """

    arrays: tuple[Array, ...]
    num_rows: int | None = None
    num_examples: int | None = None
    rows_per_segment: int = 0
    layers: tuple[Layer, ...] = ()
    fingerprints: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    _hash: str | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("arrays", "layers"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        check_fields(self, StoreError)
        ordered = {str(name): self.fingerprints[name] for name in sorted(self.fingerprints)}
        object.__setattr__(self, "fingerprints", ordered)
        names = [array.name for array in self.arrays]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise StoreError(
                "array names must be unique", code="store.repeated_array", found=", ".join(repeated)
            )
        for name in ("num_rows", "num_examples", "rows_per_segment"):
            optional(count, name, getattr(self, name), error=StoreError)
        if self.rows_per_segment == 0:
            object.__setattr__(self, "rows_per_segment", self._suitable_rows_per_segment())

    def _suitable_rows_per_segment(self) -> int:
        """Return the largest power of two that gives segments of at most 128 MiB and `num_rows` rows."""
        rows = 1
        most = _MOST_ROWS if self.num_rows is None else min(_MOST_ROWS, max(1, self.num_rows))
        while rows < most and 2 * rows * self.row_bytes <= _SEGMENT_BYTES:
            rows *= 2
        return rows

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in all arrays, ids included; a ragged row counts as one token."""
        return 8 + sum(array.row_bytes for array in self.arrays)

    @property
    def dense_row_bytes(self) -> int:
        """Bytes of one row's dense float32 gradient of the captured layers."""
        return 4 * sum(layer.parameters for layer in self.layers)

    @property
    def hash(self) -> str:
        """Fingerprint of the whole schema; every segment contains it."""
        # Cached: it is compared for every opened segment.
        known = self._hash
        if known is None:
            known = digest(self.to_fields())
            object.__setattr__(self, "_hash", known)
        return known

    def array(self, name: str) -> Array:
        """Return the array of that name.

        Args:
            name: Name of the array.

        Raises:
            StoreError: There is no such array; the message offers similar names.
        """
        for array in self.arrays:
            if array.name == name:
                return array
        names = [array.name for array in self.arrays]
        near = difflib.get_close_matches(name, names, n=3)
        raise StoreError(
            f"there is no array {name!r} in this block",
            code="store.no_such_array",
            found=", ".join(names),
            fix=f"Did you mean {' or '.join(near)}?" if near else None,
        )

    def to_fields(self) -> dict[str, Any]:
        """Return the schema as JSON fields."""
        return {
            "arrays": [_fields_of(array) for array in self.arrays],
            "num_rows": self.num_rows,
            "num_examples": self.num_examples,
            "rows_per_segment": self.rows_per_segment,
            "layers": [_fields_of(layer) for layer in self.layers],
            "fingerprints": dict(self.fingerprints),
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], *, path: str = "a schema") -> Schema:
        """Build a schema from its JSON fields.

        Args:
            fields: The fields.
            path: Path of the document, for messages.

        Returns:
            The schema.

        Raises:
            DamagedError: The fields are not those of a schema.
        """
        record = parse_record(_SchemaRecord, fields, path=path)
        layers = tuple(parse_record(Layer, layer, path=path) for layer in record.layers)
        for layer in layers:
            if not _is_count(layer.parameters):
                raise malformed_document(
                    path, f"layer {layer.name[:60]!r} of {layer.parameters} parameters"
                )
        try:
            return cls(
                arrays=tuple(parse_record(Array, array, path=path) for array in record.arrays),
                num_rows=record.num_rows,
                num_examples=record.num_examples,
                rows_per_segment=record.rows_per_segment,
                layers=layers,
                fingerprints=record.fingerprints,
            )
        except DamagedError:
            raise
        except StoreError as error:
            raise malformed_document(path, error.message[:200]) from None

    def diff(self, requested: Schema) -> list[str]:
        """List the differences between this, the stored schema, and a requested one.

        Args:
            requested: The other schema.

        Returns:
            One line for each difference.

        Example:
            >>> old = Schema((Array("loss"),), fingerprints={"weights": "1a"})
            >>> old.diff(Schema((Array("loss", "float64"),), fingerprints={"weights": "2b"}))
            ["array loss: dtype: stored 'float32', requested 'float64'", "fingerprint weights: stored '1a', requested '2b'"]
        """
        lines = _diff_named("array", self.arrays, requested.arrays)
        lines += _diff_named("layer", self.layers, requested.layers)
        for name in ("num_rows", "num_examples", "rows_per_segment"):
            lines += _diff_value(name, getattr(self, name), getattr(requested, name))
        for name in sorted({*self.fingerprints, *requested.fingerprints}):
            lines += _diff_value(
                f"fingerprint {name}",
                self.fingerprints.get(name, _ABSENT),
                requested.fingerprints.get(name, _ABSENT),
            )
        for what in ("arrays", "layers"):
            names = [item.name for item in getattr(self, what)]
            requested_names = [item.name for item in getattr(requested, what)]
            if not lines:
                lines += _diff_value(f"order of {what}", names, requested_names)
        return lines

    def require_same(self, requested: Schema, *, path: str) -> None:
        """Raise unless another schema equals this one.

        Args:
            requested: The other schema.
            path: Path of this schema, for messages.

        Raises:
            SchemaMismatchError: They differ; `found` lists the differences.
        """
        lines = self.diff(requested)
        if lines:
            raise SchemaMismatchError(
                "the stored rows have another schema",
                path=path,
                found="".join(f"\n    {line}" for line in lines),
                fix="Use another checkpoint, split or capture name, or delete this block first.",
            )


class _SchemaRecord(Record, frozen=True):
    arrays: list[dict[str, Any]]
    num_rows: Count | None
    num_examples: Count | None
    rows_per_segment: Count
    layers: list[dict[str, Any]]
    fingerprints: dict[str, str | int | float | bool | None]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_WHOLE


def _fields_of(record: Array | Layer) -> dict[str, Any]:
    # Not `asdict`: its deep copies took longer than all else in putting a small row.
    fields = {part.name: getattr(record, part.name) for part in dataclasses.fields(record)}
    if "form" in fields and not fields["form"]:
        del fields["form"]  # early stores have no form: their hash must not change
    return fields


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


_ABSENT = _Absent()


def _diff_value(name: str, stored: object, requested: object) -> list[str]:
    # 1 and 1.0 and True are equal to Python but not in the schema's hash, which segments carry.
    same = stored == requested and json.dumps(stored) == json.dumps(requested)
    return [] if same else [f"{name}: stored {stored!r}, requested {requested!r}"]


def _diff_named(
    what: str, stored: Iterable[Array | Layer], requested: Iterable[Array | Layer]
) -> list[str]:
    stored_items, requested_items = {x.name: x for x in stored}, {x.name: x for x in requested}
    lines = [
        f"{what} {name}: stored, but not requested"
        for name in stored_items
        if name not in requested_items
    ]
    lines += [
        f"{what} {name}: requested, but not stored"
        for name in requested_items
        if name not in stored_items
    ]
    for name in stored_items:
        if name in requested_items:
            for part in dataclasses.fields(stored_items[name]):
                lines += _diff_value(
                    f"{what} {name}: {part.name}",
                    getattr(stored_items[name], part.name),
                    getattr(requested_items[name], part.name),
                )
    return lines
