"""Find the largest products in worker processes, each for a block of the queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep.errors import FarmError, QueryError
from gradkeep.farm._run import count_workers, run_parts, split_blocks
from gradkeep.query._gradients import gradients_of, open_capture
from gradkeep.store import Array, CaptureKey, Store
from gradkeep.store import open as open_store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradkeep.farm._run import Engine
    from gradkeep.query._engine import GradientPair
    from gradkeep.query._gradients import GradientOf, Gradients

    Ids = np.ndarray[Any, np.dtype[np.int64]]


def top_by_workers(
    pairs: Sequence[GradientPair],
    query_ids: Ids,
    k: int,
    arguments: Mapping[str, Any],
    *,
    workers: int | None,
    engine: Engine | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute values and ids `[Q, k]` of `top` for some queries, in blocks."""
    blocks = split_blocks(len(query_ids), count_workers(workers, engine))
    size = len(blocks[0])
    block = pairs[0].train.block
    store = Store(block.backend, durability=block.durability)
    job = _TopJob(
        store=store.location,
        queries=tuple(_Side.of_gradients(pair.queries) for pair in pairs),
        train=tuple(_Side.of_gradients(pair.train) for pair in pairs),
        blocks=tuple(query_ids[part.start : part.stop] for part in blocks),
        k=k,
        size=size,
        arguments=arguments,
    )
    arrays = (Array("values", "float32", (size, k)), Array("rows", "int64", (size, k)))
    try:
        parts = run_parts(
            store,
            f"the largest {k} of {len(query_ids)} queries",
            arrays,
            len(blocks),
            job,
            workers=workers,
            engine=engine,
        )
    except FarmError as error:
        raise QueryError(error.message, found=error.found, fix=error.fix) from error
    values, ids = (
        np.concatenate([parts[name][n][: len(part)] for n, part in enumerate(blocks)])
        for name in ("values", "rows")
    )
    return torch.from_numpy(values), torch.from_numpy(ids)


@dataclass(frozen=True, slots=True)
class _Side:
    """Reference to gradients that another process can open."""

    key: CaptureKey
    layers: tuple[str, ...]
    of: GradientOf

    @classmethod
    def of_gradients(cls, gradients: Gradients) -> _Side:
        return cls(gradients.key, tuple(gradients.forms), gradients.of)

    def open(self, store: Store) -> Gradients:
        return gradients_of(open_capture(store, self.key), self.key, list(self.layers), self.of)


@dataclass(frozen=True, slots=True, eq=False)
class _TopJob:
    """Farm job that finds the largest products of blocks of queries."""

    store: str
    queries: tuple[_Side, ...]
    train: tuple[_Side, ...]
    blocks: tuple[Ids, ...]
    k: int
    size: int
    arguments: Mapping[str, Any]

    def __call__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Search for the queries of these blocks."""
        from gradkeep.query._products import top

        store = open_store(self.store, create=False)
        queries, train = ([side.open(store) for side in one] for one in (self.queries, self.train))
        results = []
        for number in numbers:
            best = top(queries, train, self.k, ids=self.blocks[number], **self.arguments)
            beyond = ((0, self.size - len(best.ids)), (0, 0))
            results.append(
                {
                    "values": np.pad(best.values.float().numpy(), beyond),
                    "rows": np.pad(best.ids.numpy(), beyond),
                }
            )
        return results
