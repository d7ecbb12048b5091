"""Build small codes: directions from a sample, a code for every row, both stored with the capture."""

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
_MOST_FOR_DIRECTIONS = 4 << 30
_SAMPLED_AT_ONCE = 512
_TOGETHER = 64
"""Segments of the capture whose codes are reused or built together."""
_VERSION = re.compile(r"\.v(\d+)-")


@checked(QueryError)
def small_codes(
    train: Gradients, *, bytes: int = 64, sample: int = 4096, seed: int = 0
) -> SmallCodes:
    """Build codes for every row, stored with the capture, to find candidates among millions of rows.

    Six bytes hold the length of the row and its share along the leading directions of a sample of normalized
    rows; the others its position along these directions in four bits each. Codes are built once, in one pass
    over all rows, and resumed after an interruption; later calls read them, `bytes` of memory per row. After
    rows were appended or dropped, codes of unchanged segments are reused. `gk.query.top(..., codes=...)` finds
    candidates by codes and ranks them by exact products.

    Args:
        train: Gradients of the rows.
        bytes: Bytes per row, at least 7.
        sample: Number of rows from which the directions are computed.
        seed: Seed of the sample.

    Returns:
        The codes.

    Raises:
        QueryError: The directions do not fit into memory, or all gradients are zero.

    Example:
        >>> import gradkeep as gk, tempfile
        >>> store, model = gk.open(tempfile.mkdtemp()), torch.nn.Linear(4, 3)
        >>> data = [(torch.randn(50, 4), torch.arange(50) % 3)]
        >>> _ = gk.capture(store, model, data, task=gk.Classification(), split="train")
        >>> train = gk.gradients(store, split="train")
        >>> codes = small_codes(train, bytes=10)
        >>> codes.codes.shape, gk.query.top(train, train, 1, codes=codes).ids.shape
        ((50, 4), torch.Size([50, 1]))
    """
    _arguments.count("bytes", bytes, error=QueryError, least=BESIDE + 1, most=4096)
    _arguments.count("sample", sample, error=QueryError, least=1)
    _arguments.count("seed", seed, error=QueryError)
    builder = _CodeBuilder(train, bytes, sample, seed)
    directions = builder.directions()
    block = builder.codes(directions)
    codes = np.empty((len(train), bytes - BESIDE), np.uint8)
    lengths, parts = np.empty(len(train), np.float32), np.empty(len(train), np.uint16)
    for batch in block.stream():
        here = slice(batch.first_row, batch.first_row + len(batch.ids))
        codes[here], lengths[here] = batch["code"], batch["length"]
        parts[here] = batch["part"]
    return SmallCodes(
        train.key,
        builder.manifest,
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
    """Digest of the manifest that they were read with."""


class _CodeBuilder:
    """Reads or builds the codes of one version of a capture."""

    def __init__(self, train: Gradients, bytes: int, sample: int, seed: int) -> None:
        self._train, self._bytes, self._sample, self._seed = train, bytes, sample, seed
        self._store = Store(train.block.backend, durability=train.block.durability)
        self.manifest = str(train.block.manifest.digest)
        self._fingerprints = {
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
        """Return the key of codes, which depends on their layers and sample."""
        settings = xxhash.xxh3_64_hexdigest(repr(sorted(self._fingerprints.items())).encode())[:8]
        return self._train.key.beside(f"codes-{self._bytes}-{settings}.{what}")

    def directions(self) -> _Directions:
        """Return the stored directions of any version of the capture, or build them."""
        key, store = self._key("directions"), self._store
        stored = self._sealed(key)
        if stored is None:
            if store.has(key):
                store.delete(key)  # left by an interrupted call
            self._write_directions(key)
            stored = store.read(key)
        by_layer = {
            name: torch.from_numpy(np.array(stored.column(f"{name}.direction")))
            for name in self._train.forms
        }
        steps = torch.from_numpy(np.array(stored.column("step")))
        share, spread = (float(np.array(stored.column(name))[0]) for name in ("share", "spread"))
        return _Directions(by_layer, steps, share, spread, str(stored.manifest.digest))

    def codes(self, directions: _Directions) -> Block:
        """Return the sealed codes of all rows of this version."""
        version, store = self._train.block.version, self._store
        key = self._key(f"v{version}")
        fingerprints = self._fingerprints | {
            "directions": directions.digest,
            "manifest": self.manifest,
        }
        # Version numbers start again after a capture was deleted.
        if store.has(key) and not _has_fingerprints(store.read(key, live=True), fingerprints):
            store.delete(key)
        if self._sealed(key) is None:
            self._write_codes(key, directions, fingerprints)
            for other in self._others():
                store.delete(self._key(f"v{other}"))
        return store.read(key)

    def _sealed(self, key: BasisKey) -> Block | None:
        if self._store.has(key):
            with contextlib.suppress(NotSealedError):
                return self._store.read(key)
        return None

    def _others(self) -> list[int]:
        """List other versions of the capture that have codes, newest first."""
        stored = set(self._store.bases())
        numbers = (int(match[1]) for key in stored if (match := _VERSION.search(key.capture)))
        versions = [number for number in set(numbers) if self._key(f"v{number}") in stored]
        return sorted((n for n in versions if n != self._train.block.version), reverse=True)

    def _write_codes(
        self, key: BasisKey, directions: _Directions, fingerprints: dict[str, str]
    ) -> None:
        """Write codes of all rows: reused for segments of an earlier version, built for the rest."""
        train = self._train
        schema = Schema(
            (
                Array("code", "uint8", (self._bytes - BESIDE,), kind="data"),
                Array("length", kind="data"),
                Array("part", "uint16", kind="data"),
            ),
            num_rows=len(train),
            rows_per_segment=_SEGMENT,
            fingerprints=fingerprints,
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
                    joined = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
                    writer.append(here, joined)
                    continue
                for some in train.stream(4096, segments=range(first, last)):
                    ids = np.arange(some.start, some.stop)
                    if writer.needs(len(ids)):
                        by = None if slopes is None else slopes[some.start : some.stop]
                        writer.append(ids, self._encode(some, directions, by))
                    else:
                        writer.skip(ids)

    def _encode(
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
        """Return codes by segment digest from the newest other version."""
        for version in self._others():
            codes = self._sealed(self._key(f"v{version}"))
            fingerprints = self._fingerprints | {"directions": directions.digest}
            if codes is None or not _has_fingerprints(codes, fingerprints):
                continue
            try:
                old = self._store.read(self._train.key, version=version)
            except StoreError:  # removed by gc
                continue
            if codes.schema.fingerprints.get("manifest") == old.manifest.digest:
                starts = old.starts.tolist()
                return {
                    entry.xxh3: _KnownCodes(codes, start, start + entry.rows)
                    for entry, start in zip(old.manifest.segments, starts, strict=False)
                }
        return {}

    def _write_directions(self, key: BasisKey) -> None:
        """Compute the directions of the largest squared products from the kernel of sampled, normalized rows."""
        train, size = self._train, self._size
        needed = 4 * size * sum(form.restored_size for form in train.forms.values())
        if needed > _MOST_FOR_DIRECTIONS:
            raise QueryError(
                "the directions of small codes do not fit into memory",
                code="query.codes_too_large",
                found=f"{format_bytes(needed)} for {size} directions",
                expected=f"at most {format_bytes(_MOST_FOR_DIRECTIONS)}",
                fix="Capture with keep='2KiB', choose layers, or pass fewer bytes=.",
            )
        draws = torch.Generator().manual_seed(self._seed)
        rows = torch.randperm(len(train), generator=draws)[: self._sample].sort().values.tolist()
        kernel = _kernel(train, rows)
        lengths = kernel.diagonal().clamp(min=0).sqrt()
        if not float(lengths.max()) > 0:
            raise QueryError(
                "all gradients of the sample are zero",
                code="query.zero_gradients",
                found=f"{len(rows)} rows",
            )
        inverse = torch.where(lengths > 0, 1 / lengths, torch.zeros_like(lengths))
        kernel *= inverse
        kernel *= inverse.unsqueeze(1)
        values, vectors = _leading((kernel + kernel.t()) / 2, size, draws)
        roots = values.clamp(min=0).sqrt()
        significant = roots > 1e-4 * roots[0]
        weights = (
            vectors * torch.where(significant, 1 / roots.clamp(min=1e-30), 0.0)
        ).t() * inverse
        along = vectors * torch.where(significant, roots, 0.0)
        spread = _spread_beside(kernel, along)
        along = along / along.norm(dim=1, keepdim=True).clamp(min=1e-30)
        # The step of 16 even levels with the smallest error on standard normal numbers.
        steps = 0.335 * along.square().mean(0).sqrt()
        missing = size - len(steps)  # with fewer rows than directions the rest is zero
        steps = torch.nn.functional.pad(torch.where(steps > 0, steps, 1.0), (0, missing), value=1.0)
        share = float(values.clamp(min=0).sum() / (lengths > 0).sum())
        columns = {"step": steps.numpy(), "share": np.full(size, share, np.float32)}
        columns["spread"] = np.full(size, spread, np.float32)
        arrays = [Array(name) for name in columns]
        for name, layer_directions in _weighted(train, rows, weights).items():
            arrays.append(
                Array(f"{name}.direction", shape=(layer_directions.shape[1],), kind="data")
            )
            columns[f"{name}.direction"] = torch.nn.functional.pad(
                layer_directions, (0, 0, 0, missing)
            ).numpy()
        schema = Schema(tuple(arrays), num_rows=size, fingerprints=self._fingerprints)
        with self._store.write(key, schema) as writer:
            writer.append(np.arange(size), columns)


@dataclass(frozen=True, slots=True, eq=False)
class _KnownCodes:
    """Codes of a segment in another version of the capture."""

    codes: Block
    start: int
    stop: int

    def read(self) -> dict[str, Numbers]:
        """Read the arrays of its rows."""
        batch = self.codes.read_rows(np.arange(self.start, self.stop), _CODE_ARRAYS)
        return {name: np.asarray(batch[name]) for name in _CODE_ARRAYS}


def _kernel(train: Gradients, rows: list[int]) -> torch.Tensor:
    """Compute the products `[S, S]` of some rows with each other."""
    pair, parts = GradientPair(train, train), []
    for begin in range(0, len(rows), _SAMPLED_AT_ONCE):
        some = rows[begin : begin + _SAMPLED_AT_ONCE]
        answer = 4 * len(some) * len(rows)
        parts.append(ProductEngine([pair], answer=answer, positions=some, rows=rows).matrix())
    return torch.cat(parts)


def _spread_beside(kernel: torch.Tensor, along: torch.Tensor) -> float:
    """Return the root mean square cosine of the residuals outside the directions, for normalized rows."""
    residual = kernel - along @ along.t()
    lengths = residual.diagonal().clamp(min=0).sqrt()
    significant = lengths > 1e-2
    if int(significant.sum()) < 2:
        return 0.0
    residual = (
        residual[significant][:, significant]
        / lengths[significant]
        / lengths[significant].unsqueeze(1)
    )
    squares = residual.fill_diagonal_(0).double().square().sum()
    return float((squares / (len(residual) * (len(residual) - 1))).sqrt())


def _leading(
    kernel: torch.Tensor, count: int, draws: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest eigenvalues, decreasing, and their vectors `[S, count]`; large kernels by subspace iteration."""
    wide = count + 32  # extra vectors for subspace iteration
    if len(kernel) <= max(1024, wide):
        values, vectors = torch.linalg.eigh(kernel.double())
    else:
        basis = torch.randn(len(kernel), wide, generator=draws)
        for _ in range(8):
            basis = torch.linalg.qr(kernel @ basis).Q
        values, inner = torch.linalg.eigh((basis.t() @ (kernel @ basis)).double())
        vectors = basis.double() @ inner
    return values.flip(0)[:count].float(), vectors.flip(1)[:, :count].float()


def _weighted(train: Gradients, rows: list[int], weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compute weighted sums `[D, P]` of some rows' gradients by layer, a few rows at a time."""
    sums: dict[str, torch.Tensor] = {}
    for start in range(0, len(rows), _SAMPLED_AT_ONCE):
        some = rows[start : start + _SAMPLED_AT_ONCE]
        by = weights[:, start : start + len(some)]
        slopes = train.slopes_at(some)
        by = by if slopes is None else by * slopes
        read = train.rows(some)
        for name, form in train.forms.items():
            factors = read.factors[name].widened()
            part = form.weighted_sum(factors, by.to(factors.example.dtype)).float()
            sums[name] = part if name not in sums else sums[name].add_(part)
    return sums


def _has_fingerprints(block: Block, expected: Mapping[str, str]) -> bool:
    return all(block.schema.fingerprints.get(name) == value for name, value in expected.items())
