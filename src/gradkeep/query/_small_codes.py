"""Some bytes for each row, by which the best candidates of millions are found before any product is made."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep import _arguments
from gradkeep._annotations import checked
from gradkeep.errors import NotSealed, QueryError
from gradkeep.query._engine import GradientPair, ProductEngine
from gradkeep.query._largest import LargestRows
from gradkeep.store import Array, BasisKey, Schema, Store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.query._gradients import Gradients
    from gradkeep.store import CaptureKey

    Codes = np.ndarray[Any, np.dtype[np.int8]]

_SCANNED = 1 << 16
"""Rows whose codes are looked at together: they stay in the cache as numbers."""
_CODED = 4096
"""Rows that are encoded together."""
_STEPS = 100
"""Steps of a code up to the largest coordinate of the sample; larger ones have some more."""
_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class SmallCodes:
    """The leading coordinates of every row's gradient, a byte each; made by `gk.query.small_codes`."""

    key: CaptureKey
    """The capture whose rows these are."""
    codes: Codes
    """`[N, bytes]`"""
    directions: Mapping[str, torch.Tensor]
    """`[bytes, P]` by layer: orthonormal over all layers together"""
    steps: torch.Tensor
    """`[bytes]`: what one step of each byte is worth"""
    share: float
    """How much of the sample's squared lengths lies along the directions, from 0 to 1."""

    def __len__(self) -> int:
        return len(self.codes)

    def __repr__(self) -> str:
        return (
            f"SmallCodes({self.key.split} at {self.key.checkpoint}: {len(self)} rows, "
            f"{self.codes.shape[1]} bytes each, {self.share:.2f} of squared lengths)"
        )

    def nearest(self, asked: torch.Tensor, count: int, *, smallest: bool = False) -> torch.Tensor:
        """The rows `[Q, count]` with the largest products by codes, for coordinates `[Q, bytes]`.

        2 N bytes operations a query, and one read of all codes.
        """
        best = LargestRows(len(asked), min(count, len(self)))
        sign = -1.0 if smallest else 1.0
        weighed = (sign * asked * self.steps).t().contiguous()
        space = torch.empty(min(_SCANNED, len(self)), self.codes.shape[1])
        for start in range(0, len(self), _SCANNED):
            part = torch.from_numpy(self.codes[start : start + _SCANNED])
            numbers = space[: len(part)].copy_(part)
            best.add((numbers @ weighed).t().contiguous(), 0, start)
        return best.rows


@checked(QueryError)
def small_codes(
    train: Gradients, *, bytes: int = 64, sample: int = 2048, seed: int = 0
) -> SmallCodes:
    """A byte for each of the leading directions of the gradients, kept in the store beside the capture.

    The directions are those that the gradients of some rows mostly lie along. Made once, in one pass
    over all rows; later calls read them, `bytes` of memory a row. `gk.query.top(..., codes=...)` finds
    candidates by them and ranks those by exact products.

    >>> import gradkeep as gk, tempfile
    >>> store, model = gk.open(tempfile.mkdtemp()), torch.nn.Linear(4, 3)
    >>> data = [(torch.randn(50, 4), torch.arange(50) % 3)]
    >>> _ = gk.capture(store, model, data, task=gk.Classification(), split="train")
    >>> train = gk.gradients(store, split="train")
    >>> codes = small_codes(train, bytes=8)
    >>> codes.codes.shape, gk.query.top(train, train, 1, codes=codes).ids.shape
    ((50, 8), torch.Size([50, 1]))
    """
    _arguments.count("bytes", bytes, error=QueryError, least=1, most=_MOST_BYTES)
    _arguments.count("sample", sample, error=QueryError, least=1)
    _arguments.count("seed", seed, error=QueryError)
    store = Store(train.block.backend, durability=train.block.durability)
    key, home = _keys(train, bytes)
    told = _told(train, sample, seed)
    if not store.has(home):
        _write_directions(store, home, train, bytes, told)
    kept = store.read(home)
    if any(kept.schema.fingerprints.get(name) != value for name, value in told.items()):
        raise QueryError(
            f"other codes of {train.key.split} are kept in the store",
            path=kept.path,
            found=f"{dict(kept.schema.fingerprints)}",
            expected=f"{told}",
            fix="ask with the same layers, sample and seed, or delete them first: gradkeep delete",
        )
    directions = {
        name: torch.from_numpy(np.array(kept.column(f"{name}.direction"))) for name in train.forms
    }
    steps = torch.from_numpy(np.array(kept.column("step")))
    _write_codes(store, key, train, directions, steps, told)
    codes = store.read(key).column("code")
    return SmallCodes(train.key, codes, directions, steps, float(np.array(kept.column("share"))[0]))


def by_codes(
    pair: GradientPair,
    codes: SmallCodes,
    positions: list[int],
    k: int,
    *,
    candidates: int | None,
    smallest: bool,
    memory_budget: float | str | None,
) -> tuple[torch.Tensor, torch.Tensor, ProductEngine]:
    """The best `k` of each query among its candidates: values and rows `[Q, k]`, by exact products."""
    queries, train = pair.queries, pair.train
    _arguments.optional(_arguments.count, "candidates", candidates, error=QueryError, least=1)
    if codes.key != train.key or len(codes) != len(train):
        raise QueryError(
            "these codes are of other rows",
            found=f"{codes.key.split} at {codes.key.checkpoint}, {len(codes)} rows",
            expected=f"{train.key.split} at {train.key.checkpoint}, {len(train)} rows",
            fix="gk.query.small_codes(train)",
        )
    if list(codes.directions) != list(train.forms):
        raise QueryError(
            "these codes are of other layers", fix="gk.query.small_codes(train) of these layers"
        )
    wide = min(len(train), max(k, 100 * k if candidates is None else candidates))
    asked = _coordinates(queries, codes.directions, positions)
    near = codes.nearest(asked, wide, smallest=smallest).sort(1).values
    rows = torch.unique(near)
    engine = ProductEngine(
        [pair],
        memory_budget=memory_budget,
        answer=4 * len(positions) * len(rows),
        positions=positions,
        rows=rows.tolist(),
    )
    values = torch.empty(len(positions), len(rows))
    for tile in engine.tiles():
        part = tile.values[0]
        here = slice(tile.query_start, tile.query_start + len(part))
        values[here, tile.train_start : tile.train_start + part.shape[1]] = part
    own = values.gather(1, torch.searchsorted(rows, near))
    order = own.sort(dim=1, descending=not smallest, stable=True).indices[:, :k]
    return own.gather(1, order), near.gather(1, order), engine


def _keys(train: Gradients, bytes: int) -> tuple[CaptureKey, BasisKey]:
    key, name = train.key, f"{train.key.capture}.codes-{bytes}"
    codes = dataclasses.replace(key, capture=name)
    return codes, BasisKey(key.checkpoint, key.run, f"{name}.{key.split}")


def _told(train: Gradients, sample: int, seed: int) -> dict[str, str]:
    return {
        "weights": train.weights,
        "codes_of": train.of,
        "layers": " ".join(train.forms),
        "rows": str(len(train)),
        "sample": f"{sample} rows by seed {seed}",
    }


def _write_directions(
    store: Store, home: BasisKey, train: Gradients, bytes: int, told: dict[str, str]
) -> None:
    """Directions of the largest squared products, by the kernel of a sample of rows."""
    count, seed = int(told["sample"].split()[0]), int(told["sample"].split()[-1])
    draws = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(train), generator=draws)[:count].sort().values
    chosen = rows.tolist()
    engine = ProductEngine(
        [GradientPair(train, train)], answer=4 * len(rows) ** 2, positions=chosen, rows=chosen
    )
    kernel = torch.empty(len(rows), len(rows))
    for tile in engine.tiles():
        part = tile.values[0]
        here = slice(tile.query_start, tile.query_start + len(part))
        kernel[here, tile.train_start : tile.train_start + part.shape[1]] = part
    values, vectors = torch.linalg.eigh((kernel + kernel.t()).double() / 2)
    values, vectors = values.flip(0)[:bytes].clamp(min=0), vectors.flip(1)[:, :bytes]
    total = float(kernel.diagonal().double().sum())
    if not total > 0:
        raise QueryError("all gradients of the sample are zero", found=f"{len(rows)} rows")
    roots = values.sqrt()
    shares = torch.where(roots > 1e-6 * roots[0], 1 / roots.clamp(min=1e-300), 0.0)
    weights = (vectors * shares).t().float()
    slopes = train.slopes()
    if slopes is not None:
        weights = weights * slopes[rows]
    some = train.rows(chosen)
    made = {}
    for name, form in train.forms.items():
        factors = some.factors[name].widened()
        made[name] = form.weighted_sum(factors, weights.to(factors.example.dtype)).float()
    largest = (vectors * roots).abs().amax(0).float()
    steps = torch.where(largest > 0, largest / _STEPS, 1.0)
    missing = bytes - len(steps)  # of fewer rows than bytes the rest stays empty
    arrays = [Array("step"), Array("share")]
    arrays += [Array(f"{n}.direction", shape=(v.shape[1],), kind="data") for n, v in made.items()]
    columns = {
        "step": torch.nn.functional.pad(steps, (0, missing), value=1.0).numpy(),
        "share": np.full(bytes, float(values.sum()) / total, np.float32),
    }
    for name, value in made.items():
        filled = torch.nn.functional.pad(value, (0, 0, 0, missing))
        columns[f"{name}.direction"] = filled.numpy()
    schema = Schema(tuple(arrays), num_rows=bytes, fingerprints=told)
    with store.write(home, schema) as writer:
        writer.append(np.arange(bytes), columns)


def _write_codes(
    store: Store,
    key: CaptureKey,
    train: Gradients,
    directions: Mapping[str, torch.Tensor],
    steps: torch.Tensor,
    told: dict[str, str],
) -> None:
    """Encode all rows, or those that an interrupted call did not."""
    if store.has(key):
        with contextlib.suppress(NotSealed):
            store.read(key)
            return
    schema = Schema(
        (Array("code", "int8", (len(steps),), kind="projection"),),
        num_rows=len(train),
        fingerprints=told,
    )
    slopes, ids = train.slopes(), train.ids
    with store.write(key, schema) as writer:
        for some in train.stream(_CODED):
            here = ids[some.start : some.stop]
            if not writer.needs(len(here)):
                writer.skip(here)
                continue
            found = _along(train, some.factors, directions)
            if slopes is not None:
                found *= slopes[some.start : some.stop]
            levels = (found.t() / steps).round_().clamp_(-127, 127)
            writer.append(here, {"code": levels.to(torch.int8).numpy()})


def _coordinates(
    queries: Gradients, directions: Mapping[str, torch.Tensor], positions: list[int]
) -> torch.Tensor:
    found = _along(queries, queries.rows(positions).factors, directions)
    slopes = queries.slopes()
    return (found if slopes is None else found * slopes[positions]).t()


def _along(
    gradients: Gradients, factors: Mapping[str, Any], directions: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Products `[bytes, B]` of some rows with all directions."""
    total: torch.Tensor | None = None
    for name, form in gradients.forms.items():
        rows = factors[name].widened()
        moved = directions[name].to(rows.example.dtype)
        found = form.along(rows, moved, scratch=1 << 26).float()
        total = found if total is None else total.add_(found)
    assert total is not None
    return total
