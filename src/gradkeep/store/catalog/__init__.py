"""What a store holds: facts found by looking at its files, kept in SQLite, asked for in SQL."""

from gradkeep.store.catalog._catalog import Catalog
from gradkeep.store.catalog._info import CheckpointInfo, RowSetInfo, RunInfo, StoreInfo
from gradkeep.store.catalog._scan import (
    BlockAddress,
    BlockFacts,
    CheckpointFacts,
    LayerFacts,
    RunFacts,
    SegmentFacts,
)
from gradkeep.store.catalog._sql import SqlResult

__all__ = [
    "BlockAddress",
    "BlockFacts",
    "Catalog",
    "CheckpointFacts",
    "CheckpointInfo",
    "LayerFacts",
    "RowSetInfo",
    "RunFacts",
    "RunInfo",
    "SegmentFacts",
    "SqlResult",
    "StoreInfo",
]
