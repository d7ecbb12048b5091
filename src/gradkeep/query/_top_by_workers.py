"""The largest products by many workers: each searches for some of the queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep.errors import FarmError, QueryError
from gradkeep.farm._run import blocks_of, share_out, size_of
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
    asked: Ids,
    k: int,
    arguments: Mapping[str, Any],
    *,
    workers: int | None,
    engine: Engine | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids `[Q, k]` that `top` finds for the queries `asked`, in blocks of them."""
    blocks = blocks_of(len(asked), size_of(workers, engine))
    size = len(blocks[0])
    block = pairs[0].train.block
    store = Store(block.backend, durability=block.durability)
    job = _TopJob(
        store=store.location,
        queries=tuple(_Side.of_gradients(pair.queries) for pair in pairs),
        train=tuple(_Side.of_gradients(pair.train) for pair in pairs),
        blocks=tuple(asked[part.start : part.stop] for part in blocks),
        k=k,
        size=size,
        arguments=arguments,
    )
    arrays = (Array("values", "float32", (size, k)), Array("rows", "int64", (size, k)))
    try:
        found = share_out(
            store,
            f"the largest {k} of {len(asked)} queries",
            arrays,
            len(blocks),
            job,
            workers=workers,
            engine=engine,
        )
    except FarmError as error:
        raise QueryError(error.message, found=error.found, fix=error.fix) from error
    values, ids = (
        np.concatenate([found[name][n][: len(part)] for n, part in enumerate(blocks)])
        for name in ("values", "rows")
    )
    return torch.from_numpy(values), torch.from_numpy(ids)


@dataclass(frozen=True, slots=True)
class _Side:
    """Some gradients as another process finds them."""

    key: CaptureKey
    layers: tuple[str, ...]
    of: GradientOf

    @classmethod
    def of_gradients(cls, given: Gradients) -> _Side:
        return cls(given.key, tuple(given.forms), given.of)

    def open(self, store: Store) -> Gradients:
        return gradients_of(open_capture(store, self.key), self.key, list(self.layers), self.of)


@dataclass(frozen=True, slots=True, eq=False)
class _TopJob:
    """A job of the farm: the largest products of blocks of queries."""

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
        told = []
        for number in numbers:
            found = top(queries, train, self.k, ids=self.blocks[number], **self.arguments)
            beyond = ((0, self.size - len(found.ids)), (0, 0))
            told.append(
                {
                    "values": np.pad(found.values.float().numpy(), beyond),
                    "rows": np.pad(found.ids.numpy(), beyond),
                }
            )
        return told
