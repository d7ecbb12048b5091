"""What a block of rows holds: its arrays, their encodings, and what they were made from."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping  # noqa: TC003 - records are built from annotations
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradkeep._arguments import check_fields, writable
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
"""How the numbers of an array are stored; all but `plain` and `bits` round."""
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
    """One named array of a block: for every row a value of the same shape.

    A ragged array holds `[T_i, *shape]` for row i, with its own T_i. `encoding` says how values
    are kept: `plain` is bit for bit; `bfloat16`, `float16-scaled` and `int8-scaled` (one scale per
    row, or per token of a ragged row) halve or quarter float32; `bits` packs a bool array to one
    bit a value. Bare `float16` is refused for gradients: at a converged model a third of them
    would silently become zero.

    >>> Array("fc1.suffix", shape=(256,), kind="suffix", layer="fc1", encoding="bfloat16").row_bytes
    512
    """

    name: str
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    kind: ArrayKind = "scalar"
    encoding: Encoding = "plain"
    layer: str | None = None
    """The layer whose factor this is, for the table of `gradkeep info`."""
    ragged: bool = False
    compression: Literal["zstd"] | None = None
    nan: NanPolicy = "refuse"
    """`refuse`: a NaN or infinity in this array is an error; `keep`: it is kept as it is."""

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
            raise StoreError(f"array {self.name!r}: {problem}")

    def _problem(self) -> str | None:
        if not self.name or self.name in _RESERVED or any(c in self.name for c in '#/\\"\0\n:'):
            return (
                f"a name must not be empty, contain # / \\ : quotes or newlines, "
                f"or be one of {', '.join(_RESERVED)}"
            )
        if not self.name.isascii() and not writable(self.name + (self.layer or "")):
            return "a name must be text that can be written as UTF-8, without lone surrogates"
        if self.dtype not in STORED_DTYPES:
            return f"dtype {self.dtype!r} is not one of {', '.join(STORED_DTYPES)}"
        if any(size < 0 for size in self.shape):
            return f"shape {self.shape} has a negative size"
        if 8 * math.prod(max(1, size) for size in self.shape) > LARGEST_WHOLE:
            return f"shape {self.shape} is larger than any file"
        if self.encoding == "bits" and (self.dtype != "bool" or not self.shape or self.ragged):
            return "'bits' packs bool arrays of fixed shape with at least one dimension"
        if self.encoding not in ("plain", "bits") and self.dtype != "float32":
            return f"encoding {self.encoding!r} is for float32, not {self.dtype}"
        if self.scaled and self.nan == "keep":
            return f"{self.encoding!r} scales a row by its largest value: it cannot keep NaN"
        if self.is_text and (self.dtype != "uint8" or self.shape or not self.ragged):
            return "a text is kept as the bytes of its UTF-8: a ragged array of uint8"
        half = self.encoding == "float16" or self.dtype == "float16"
        if half and self.kind in _GRADIENTS:
            return (
                "bare float16 loses small gradients (a third of them become zero at a converged "
                "model); use 'bfloat16', 'float16-scaled' or 'int8-scaled'"
            )
        return None

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The dtype of the bytes on disk; bfloat16 travels as uint16."""
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
        """The shape of one row (one token of a ragged row) on disk."""
        return (math.ceil(math.prod(self.shape) / 8),) if self.encoding == "bits" else self.shape

    def as_plain(self) -> Array:
        """The same values stored bit for bit, NaN allowed: the array after decoding."""
        return dataclasses.replace(
            self, encoding="plain", compression=None, nan="keep", kind="data"
        )

    @property
    def is_text(self) -> bool:
        """Whether each row is a text, as the bytes of its UTF-8."""
        return self.kind == "text"

    @property
    def scaled(self) -> bool:
        """Whether each row carries a scale."""
        return self.encoding in ("float16-scaled", "int8-scaled")

    @property
    def row_bytes(self) -> int:
        """Bytes on disk of one row (of one token if ragged), before compression."""
        scale = 4 if self.scaled else 0
        return self.stored_dtype.itemsize * math.prod(self.stored_shape) + scale


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of the model that was captured: what its dense gradient would have cost.

    `form` says how its arrays make up the gradient, in plain JSON values; the store keeps and
    compares it but does not read it.
    """

    name: str
    type: str
    parameters: int
    form: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Schema:
    """All that must agree for two row ranges to belong together.

    `num_rows` is the number of rows the block will have when it is complete, or None while that
    is unknown (it is then what was written when the block is sealed). `num_examples` bounds the
    ids. `fingerprints` name what the rows were made from (weights, data, seed, code); they are
    compared like everything else, so a changed checkpoint is refused instead of mixed in.
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
            raise StoreError(f"array names must differ, but these repeat: {', '.join(repeated)}")
        for name in ("num_rows", "num_examples", "rows_per_segment"):
            value = getattr(self, name)
            if value is not None and not _is_count(value):
                raise StoreError(
                    f"{name} must be a whole number of at least 0 and below 2**63, "
                    f"not {repr(value)[:60]}"
                )
        if self.rows_per_segment == 0:
            object.__setattr__(self, "rows_per_segment", self._suitable_rows_per_segment())

    def _suitable_rows_per_segment(self) -> int:
        """The largest power of two that keeps a segment near 128 MiB and holds no idle rows."""
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
        """A fingerprint of the whole schema; every segment carries it."""
        # Kept once computed: it is compared for every segment that is opened.
        known = self._hash
        if known is None:
            known = digest(self.to_fields())
            object.__setattr__(self, "_hash", known)
        return known

    def array(self, name: str) -> Array:
        """The array of that name; the nearest names are offered if there is none."""
        for array in self.arrays:
            if array.name == name:
                return array
        names = [array.name for array in self.arrays]
        near = difflib.get_close_matches(name, names, n=3)
        raise StoreError(
            f"no array {name!r} in this block",
            found=", ".join(names),
            fix=f"did you mean {' or '.join(near)}?" if near else None,
        )

    def to_fields(self) -> dict[str, Any]:
        """The schema as JSON fields."""
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
        """The schema from its JSON fields; raises `DamagedError` if they are not those of one."""
        record = parse_record(_SchemaRecord, fields, path=path)
        layers = tuple(parse_record(Layer, layer, path=path) for layer in record.layers)
        for layer in layers:
            if not _is_count(layer.parameters):
                raise malformed_document(path, f"layer {layer.name[:60]!r} of {layer.parameters} parameters")
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

    def diff(self, wanted: Schema) -> list[str]:
        """One line for every difference between this, the stored schema, and the wanted one.

        >>> old = Schema((Array("loss"),), fingerprints={"weights": "1a"})
        >>> old.diff(Schema((Array("loss", "float64"),), fingerprints={"weights": "2b"}))
        ["array loss: dtype: stored 'float32', asked for 'float64'", "fingerprint weights: \
stored '1a', asked for '2b'"]
        """
        lines = _diff_named("array", self.arrays, wanted.arrays)
        lines += _diff_named("layer", self.layers, wanted.layers)
        for name in ("num_rows", "num_examples", "rows_per_segment"):
            lines += _diff_value(name, getattr(self, name), getattr(wanted, name))
        for name in sorted({*self.fingerprints, *wanted.fingerprints}):
            lines += _diff_value(
                f"fingerprint {name}",
                self.fingerprints.get(name, _ABSENT),
                wanted.fingerprints.get(name, _ABSENT),
            )
        for what in ("arrays", "layers"):
            names = [item.name for item in getattr(self, what)]
            wanted_names = [item.name for item in getattr(wanted, what)]
            if not lines:
                lines += _diff_value(f"order of {what}", names, wanted_names)
        return lines

    def require_same(self, wanted: Schema, *, path: str) -> None:
        """Raise `SchemaMismatchError` with the diff unless the wanted schema is this one."""
        lines = self.diff(wanted)
        if lines:
            raise SchemaMismatchError(
                "the stored rows were made from something else; nothing was written",
                path=path,
                found="".join(f"\n    {line}" for line in lines),
                fix="choose another checkpoint, split or capture name, or delete this one first",
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
        del fields["form"]  # layers of the first stores had none: their hash must stay
    return fields


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


_ABSENT = _Absent()


def _diff_value(name: str, stored: object, wanted: object) -> list[str]:
    # 1 and 1.0 and True are equal to Python but not in the schema's hash, which segments carry.
    same = stored == wanted and json.dumps(stored) == json.dumps(wanted)
    return [] if same else [f"{name}: stored {stored!r}, asked for {wanted!r}"]


def _diff_named(
    what: str, stored: Iterable[Array | Layer], wanted: Iterable[Array | Layer]
) -> list[str]:
    have, want = {x.name: x for x in stored}, {x.name: x for x in wanted}
    lines = [f"{what} {name}: stored, but not asked for" for name in have if name not in want]
    lines += [f"{what} {name}: asked for, but not stored" for name in want if name not in have]
    for name in have:
        if name in want:
            for part in dataclasses.fields(have[name]):
                lines += _diff_value(
                    f"{what} {name}: {part.name}",
                    getattr(have[name], part.name),
                    getattr(want[name], part.name),
                )
    return lines
