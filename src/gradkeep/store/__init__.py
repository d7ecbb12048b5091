"""Bytes that survive: immutable, checksummed segments of rows under numbered manifests."""

from gradkeep.store._backend import Backend, Durability, Entry, Readable
from gradkeep.store._batch import Batch, Column, Ragged
from gradkeep.store._block import Block
from gradkeep.store._bucket import Bucket
from gradkeep.store._catalog import Catalog
from gradkeep.store._disk import LocalDisk
from gradkeep.store._display import format_ratio, format_size
from gradkeep.store._facts import (
    BlockFacts,
    CheckpointFacts,
    LayerFacts,
    Place,
    RunFacts,
    SegmentFacts,
)
from gradkeep.store._gc import Swept, gc
from gradkeep.store._info import (
    CheckpointInfo,
    Info,
    RowSetInfo,
    RunInfo,
    describe_rows,
    describe_state,
)
from gradkeep.store._lease import Lease
from gradkeep.store._manifest import Manifest, SegmentEntry
from gradkeep.store._memory import Memory
from gradkeep.store._names import BlockKey, CaptureKey, ScoresKey
from gradkeep.store._result import Result
from gradkeep.store._rows import Rows, RowState
from gradkeep.store._schema import Array, Encoding, Layer, Schema
from gradkeep.store._segment import Segment
from gradkeep.store._store import Checkpoint, Run, Store, backend_for, open
from gradkeep.store._syscalls import Syscalls
from gradkeep.store._verify import Damage, Verdict, verify
from gradkeep.store._writer import Share, Writer
from gradkeep.store._zarr import zarr_references, zarr_view

__all__ = [
    "Array",
    "Backend",
    "Batch",
    "Block",
    "BlockFacts",
    "BlockKey",
    "Bucket",
    "CaptureKey",
    "Catalog",
    "Checkpoint",
    "CheckpointFacts",
    "CheckpointInfo",
    "Column",
    "Damage",
    "Durability",
    "Encoding",
    "Entry",
    "Info",
    "Layer",
    "LayerFacts",
    "Lease",
    "LocalDisk",
    "Manifest",
    "Memory",
    "Place",
    "Ragged",
    "Readable",
    "Result",
    "RowSetInfo",
    "RowState",
    "Rows",
    "Run",
    "RunFacts",
    "RunInfo",
    "Schema",
    "ScoresKey",
    "Segment",
    "SegmentEntry",
    "SegmentFacts",
    "Share",
    "Store",
    "Swept",
    "Syscalls",
    "Verdict",
    "Writer",
    "backend_for",
    "describe_rows",
    "describe_state",
    "format_ratio",
    "format_size",
    "gc",
    "open",
    "verify",
    "zarr_references",
    "zarr_view",
]
