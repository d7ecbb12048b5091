"""Making small codes: directions from a sample, a code for every row, both kept beside the capture."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from gradkeep import _arguments
from gradkeep._arguments import checked
from gradkeep._budgets import format_bytes
from gradkeep.errors import NotSealedError, QueryError, StoreError
from gradkeep.query._engine import GradientPair, ProductEngine
from gradkeep.query._small_codes import BESIDE, SmallCodes, coordinates_of
from gradkeep.store import Array, BasisKey, Schema, Store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.query._gradients import FactorBatch, Gradients
    from gradkeep.store import Block

    Numbers = np.ndarray[Any, np.dtype[Any]]

_FORMAT = "3"
_CODE_ARRAYS = ("code", "length", "part")
_SEGMENT = 1 << 18
"""Rows of a segment of codes."""
_MOST_BYTES = 4096
_MOST_FOR_DIRECTIONS = 4 << 30
_SAMPLED_AT_ONCE = 512
_TOGETHER = 64
"""Segments of the capture whose codes are all known, or are all made."""
_VERSION = re.compile(r"\.v(\d+)-")
_BEYOND, _ROUNDS = 32, 8
"""Of the search for leading directions: how many more are carried along, and how often they are turned."""


@checked(QueryError)
def small_codes(
    train: Gradients, *, bytes: int = 64, sample: int = 4096, seed: int = 0
) -> SmallCodes:
    """Codes of so many bytes for every row, kept in the store beside the capture.

    Six bytes say how long the row is, and how much of it lies along the leading directions of a sample of
    rows, each brought to length one; the others say in four bits each where along them it points. Made once, in one pass over all rows, and
    resumed where it was interrupted; later calls read them, `bytes` of memory a row. When rows were
    appended or dropped since, codes of segments that stayed are kept, and the rest is made. `gk.query.top(...,
    codes=...)` finds candidates by them and ranks those by exact products.

    >>> import gradkeep as gk, tempfile
    >>> store, model = gk.open(tempfile.mkdtemp()), torch.nn.Linear(4, 3)
    >>> data = [(torch.randn(50, 4), torch.arange(50) % 3)]
    >>> _ = gk.capture(store, model, data, task=gk.Classification(), split="train")
    >>> train = gk.gradients(store, split="train")
    >>> codes = small_codes(train, bytes=10)
    >>> codes.codes.shape, gk.query.top(train, train, 1, codes=codes).ids.shape
    ((50, 4), torch.Size([50, 1]))
    """
    _arguments.count("bytes", bytes, error=QueryError, least=BESIDE + 1, most=_MOST_BYTES)
    _arguments.count("sample", sample, error=QueryError, least=1)
    _arguments.count("seed", seed, error=QueryError)
    making = _CodeMaking(train, bytes, sample, seed)
    directions = making.directions()
    block = making.codes(directions)
    codes = np.empty((len(train), bytes - BESIDE), np.uint8)
    lengths, parts = np.empty(len(train), np.float32), np.empty(len(train), np.uint16)
    for batch in block.stream():
        here = slice(batch.first_row, batch.first_row + len(batch.ids))
        codes[here], lengths[here] = batch["code"], batch["length"]
        parts[here] = batch["part"]
    return SmallCodes(
        train.key,
        making.manifest,
        codes,
        torch.from_numpy(lengths),
        torch.from_numpy(parts),
        directions.by_layer,
        directions.steps,
        directions.share,
        directions.spread,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Directions:
    by_layer: Mapping[str, torch.Tensor]
    """`[D, P]` each"""
    steps: torch.Tensor
    """`[D]`"""
    share: float
    spread: float
    digest: str
    """Of the manifest that they were read by"""


class _CodeMaking:
    """Codes of one version of a capture: read where they are kept, else made."""

    def __init__(self, train: Gradients, bytes: int, sample: int, seed: int) -> None:
        self._train, self._bytes, self._sample, self._seed = train, bytes, sample, seed
        self._store = Store(train.block.backend, durability=train.block.durability)
        self.manifest = str(train.block.manifest.digest)
        self._told = {
            "format": _FORMAT,
            "weights": train.weights,
            "codes_of": train.of,
            "layers": " ".join(train.forms),
            "sample": f"{sample} rows by seed {seed}",
        }

    @property
    def _size(self) -> int:
        return 2 * (self._bytes - BESIDE)

    def _key(self, what: str) -> BasisKey:
        """Codes of other layers, or of another sample, lie elsewhere."""
        made_by = xxhash.xxh3_64_hexdigest(repr(sorted(self._told.items())).encode())[:8]
        return self._train.key.beside(f"codes-{self._bytes}-{made_by}.{what}")

    def directions(self) -> _Directions:
        """Those that are kept, of whichever version of the capture; made if there are none."""
        key, store = self._key("directions"), self._store
        kept = self._sealed(key)
        if kept is None:
            if store.has(key):
                store.delete(key)  # what an interrupted call left
            self._write_directions(key)
            kept = store.read(key)
        by_layer = {
            name: torch.from_numpy(np.array(kept.column(f"{name}.direction")))
            for name in self._train.forms
        }
        steps = torch.from_numpy(np.array(kept.column("step")))
        share, spread = (float(np.array(kept.column(name))[0]) for name in ("share", "spread"))
        return _Directions(by_layer, steps, share, spread, str(kept.manifest.digest))

    def codes(self, directions: _Directions) -> Block:
        """The sealed codes of all rows of this version."""
        version, store = self._train.block.version, self._store
        key = self._key(f"v{version}")
        told = self._told | {"directions": directions.digest, "manifest": self.manifest}
        # Of a capture that was deleted and made anew, versions have the same numbers.
        if store.has(key) and not _told_by(store.read(key, live=True), told):
            store.delete(key)
        if self._sealed(key) is None:
            self._write_codes(key, directions, told)
            for other in self._others():
                store.delete(self._key(f"v{other}"))
        return store.read(key)

    def _sealed(self, key: BasisKey) -> Block | None:
        if self._store.has(key):
            with contextlib.suppress(NotSealedError):
                return self._store.read(key)
        return None

    def _others(self) -> list[int]:
        """Other versions of the capture that codes are kept of, newest first."""
        kept = set(self._store.bases())
        numbers = (int(found[1]) for key in kept if (found := _VERSION.search(key.capture)))
        there = [number for number in set(numbers) if self._key(f"v{number}") in kept]
        return sorted((n for n in there if n != self._train.block.version), reverse=True)

    def _write_codes(self, key: BasisKey, directions: _Directions, told: dict[str, str]) -> None:
        """Codes of all rows: of segments that an earlier version had too, those; of the rest new ones."""
        train = self._train
        schema = Schema(
            (
                Array("code", "uint8", (self._bytes - BESIDE,), kind="data"),
                Array("length", kind="data"),
                Array("part", "uint16", kind="data"),
            ),
            num_rows=len(train),
            rows_per_segment=_SEGMENT,
            fingerprints=told,
        )
        earlier, slopes = self._earlier(directions), train.slopes()
        entries, starts = train.block.manifest.segments, train.block.starts
        with self._store.write(key, schema) as writer:
            for first in range(0, len(entries), _TOGETHER):
                last = min(first + _TOGETHER, len(entries))
                here = np.arange(starts[first], starts[last])
                if not writer.needs(len(here)):
                    writer.skip(here)
                    continue
                known = [earlier.get(entry.xxh3) for entry in entries[first:last]]
                if all(part is not None for part in known):
                    parts = [part.read() for part in known if part is not None]
                    made = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
                    writer.append(here, made)
                    continue
                # Rows that are encoded together.
                for some in train.stream(4096, segments=range(first, last)):
                    ids = np.arange(some.start, some.stop)
                    if writer.needs(len(ids)):
                        by = None if slopes is None else slopes[some.start : some.stop]
                        writer.append(ids, self._encoded(some, directions, by))
                    else:
                        writer.skip(ids)

    def _encoded(
        self, some: FactorBatch, directions: _Directions, slopes: torch.Tensor | None
    ) -> dict[str, Numbers]:
        along, squared = coordinates_of(self._train, some.factors, directions.by_layer, slopes)
        inside = along.square().sum(1)
        parts = torch.where(squared > 0, inside / squared, 0.0).clamp_(0, 1)
        inverse = torch.where(inside > 0, 1 / inside.sqrt(), 0.0)
        levels = along * inverse.unsqueeze(1) / directions.steps
        upper, lower = levels.floor_().clamp_(-8, 7).to(torch.int8).chunk(2, 1)
        codes = (upper << 4) | (lower + 8)
        return {
            "code": codes.numpy().view(np.uint8),
            "length": squared.sqrt().numpy(),
            "part": (parts * 65535).round_().numpy().astype(np.uint16),
        }

    def _earlier(self, directions: _Directions) -> dict[str, _KnownCodes]:
        """Codes of segments by their digests, as the newest other version has them."""
        for version in self._others():
            codes = self._sealed(self._key(f"v{version}"))
            wanted = self._told | {"directions": directions.digest}
            if codes is None or not _told_by(codes, wanted):
                continue
            try:
                old = self._store.read(self._train.key, version=version)
            except StoreError:  # it was cleaned up since
                continue
            if codes.schema.fingerprints.get("manifest") == old.manifest.digest:
                starts = old.starts.tolist()
                return {
                    entry.xxh3: _KnownCodes(codes, start, start + entry.rows)
                    for entry, start in zip(old.manifest.segments, starts, strict=False)
                }
        return {}

    def _write_directions(self, key: BasisKey) -> None:
        """Directions of the largest squared products, by the kernel of a sample of rows of length one."""
        train, size = self._train, self._size
        needed = 4 * size * sum(form.restored_size for form in train.forms.values())
        if needed > _MOST_FOR_DIRECTIONS:
            raise QueryError(
                "the directions of small codes would not fit into memory",
                found=f"{format_bytes(needed)} for {size} of them",
                expected=f"at most {format_bytes(_MOST_FOR_DIRECTIONS)}",
                fix="capture with keep='2KiB', choose layers, or ask for fewer bytes=",
            )
        draws = torch.Generator().manual_seed(self._seed)
        rows = torch.randperm(len(train), generator=draws)[: self._sample].sort().values.tolist()
        kernel = _kernel(train, rows)
        lengths = kernel.diagonal().clamp(min=0).sqrt()
        if not float(lengths.max()) > 0:
            raise QueryError("all gradients of the sample are zero", found=f"{len(rows)} rows")
        inverse = torch.where(lengths > 0, 1 / lengths, torch.zeros_like(lengths))
        kernel *= inverse
        kernel *= inverse.unsqueeze(1)
        values, vectors = _leading((kernel + kernel.t()) / 2, size, draws)
        roots = values.clamp(min=0).sqrt()
        there = roots > 1e-4 * roots[0]
        weights = (vectors * torch.where(there, 1 / roots.clamp(min=1e-30), 0.0)).t() * inverse
        along = vectors * torch.where(there, roots, 0.0)
        spread = _spread_beside(kernel, along)
        along = along / along.norm(dim=1, keepdim=True).clamp(min=1e-30)
        # Of 16 even levels the step that errs least on normal numbers of length one.
        steps = 0.335 * along.square().mean(0).sqrt()
        missing = size - len(steps)  # of fewer rows than directions the rest stays empty
        steps = torch.nn.functional.pad(torch.where(steps > 0, steps, 1.0), (0, missing), value=1.0)
        share = float(values.clamp(min=0).sum() / (lengths > 0).sum())
        columns = {"step": steps.numpy(), "share": np.full(size, share, np.float32)}
        columns["spread"] = np.full(size, spread, np.float32)
        arrays = [Array(name) for name in columns]
        for name, made in _weighted(train, rows, weights).items():
            arrays.append(Array(f"{name}.direction", shape=(made.shape[1],), kind="data"))
            columns[f"{name}.direction"] = torch.nn.functional.pad(made, (0, 0, 0, missing)).numpy()
        schema = Schema(tuple(arrays), num_rows=size, fingerprints=self._told)
        with self._store.write(key, schema) as writer:
            writer.append(np.arange(size), columns)


@dataclass(frozen=True, slots=True, eq=False)
class _KnownCodes:
    """Codes that another version of the capture has of a segment."""

    codes: Block
    start: int
    stop: int

    def read(self) -> dict[str, Numbers]:
        """The arrays of its rows."""
        batch = self.codes.read_rows(np.arange(self.start, self.stop), _CODE_ARRAYS)
        return {name: np.asarray(batch[name]) for name in _CODE_ARRAYS}


def _kernel(train: Gradients, rows: list[int]) -> torch.Tensor:
    """Products `[S, S]` of some rows with each other."""
    pair, parts = GradientPair(train, train), []
    for begin in range(0, len(rows), _SAMPLED_AT_ONCE):
        some = rows[begin : begin + _SAMPLED_AT_ONCE]
        answer = 4 * len(some) * len(rows)
        parts.append(ProductEngine([pair], answer=answer, positions=some, rows=rows).matrix())
    return torch.cat(parts)


def _spread_beside(kernel: torch.Tensor, along: torch.Tensor) -> float:
    """The root mean square of cosines of what is beside the directions, by the kernel of rows of length one."""
    beside = kernel - along @ along.t()
    lengths = beside.diagonal().clamp(min=0).sqrt()
    there = lengths > 1e-2
    if int(there.sum()) < 2:
        return 0.0
    beside = beside[there][:, there] / lengths[there] / lengths[there].unsqueeze(1)
    squares = beside.fill_diagonal_(0).double().square().sum()
    return float((squares / (len(beside) * (len(beside) - 1))).sqrt())


def _leading(
    kernel: torch.Tensor, count: int, draws: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest eigenvalues, falling, and their vectors `[S, count]`; of large kernels by turning."""
    if len(kernel) <= max(1024, count + _BEYOND):
        values, vectors = torch.linalg.eigh(kernel.double())
    else:
        turned = torch.randn(len(kernel), count + _BEYOND, generator=draws)
        for _ in range(_ROUNDS):
            turned = torch.linalg.qr(kernel @ turned).Q
        values, inner = torch.linalg.eigh((turned.t() @ (kernel @ turned)).double())
        vectors = turned.double() @ inner
    return values.flip(0)[:count].float(), vectors.flip(1)[:, :count].float()


def _weighted(train: Gradients, rows: list[int], weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Weighted sums `[D, P]` of some rows' gradients, by layer, a few rows at a time."""
    found: dict[str, torch.Tensor] = {}
    for start in range(0, len(rows), _SAMPLED_AT_ONCE):
        some = rows[start : start + _SAMPLED_AT_ONCE]
        by = weights[:, start : start + len(some)]
        slopes = train.slopes_at(some)
        by = by if slopes is None else by * slopes
        read = train.rows(some)
        for name, form in train.forms.items():
            factors = read.factors[name].widened()
            part = form.weighted_sum(factors, by.to(factors.example.dtype)).float()
            found[name] = part if name not in found else found[name].add_(part)
    return found


def _told_by(block: Block, told: Mapping[str, str]) -> bool:
    return all(block.schema.fingerprints.get(name) == value for name, value in told.items())
