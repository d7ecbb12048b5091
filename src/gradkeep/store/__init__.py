"""Bytes that survive: immutable, checksummed segments of rows under numbered manifests."""

from gradkeep._public import lazy_names
from gradkeep.store._decisions import Decision, standing
from gradkeep.store._gc import GcReport, gc
from gradkeep.store._keys import (
    BasisKey,
    BlockKey,
    CaptureKey,
    Checkpoint,
    EvaluationKey,
    Run,
    ScoresKey,
)
from gradkeep.store._store import Store, open
from gradkeep.store._verify import Damage, Verdict, verify
from gradkeep.store.backends import (
    Backend,
    Bucket,
    Durability,
    Entry,
    LocalDisk,
    Memory,
    Readable,
    backend_for,
    register_backend,
)
from gradkeep.store.blocks import (
    Array,
    Batch,
    Block,
    Encoding,
    Layer,
    Ragged,
    Schema,
    Writer,
    WriterShare,
    zarr_references,
    zarr_view,
)
from gradkeep.store.rows import Lease, RowCounts, Rows, RowState

__all__ = [
    "Array",
    "Backend",
    "BasisKey",
    "Batch",
    "Block",
    "BlockKey",
    "Bucket",
    "CaptureKey",
    "Checkpoint",
    "Damage",
    "Decision",
    "Durability",
    "Encoding",
    "Entry",
    "EvaluationKey",
    "GcReport",
    "Layer",
    "Lease",
    "LocalDisk",
    "Memory",
    "Ragged",
    "Readable",
    "RowCounts",
    "RowState",
    "Rows",
    "Run",
    "Schema",
    "ScoresKey",
    "Store",
    "Verdict",
    "Writer",
    "WriterShare",
    "backend_for",
    "gc",
    "open",
    "register_backend",
    "standing",
    "verify",
    "zarr_references",
    "zarr_view",
]

_CATALOG = (
    *("BlockFacts", "Catalog", "CheckpointFacts", "CheckpointInfo", "LayerFacts", "RowSetInfo"),
    *("RunFacts", "RunInfo", "SegmentFacts"),
)
_BLOCKS = ("Column", "Manifest", "Segment", "SegmentEntry")
_SHOWN = ("describe_rows", "describe_state", "format_ratio", "format_size")

__getattr__ = lazy_names(
    __name__,
    renamed={
        **{name: f"gradkeep.store.catalog.{name}" for name in _CATALOG},
        **{name: f"gradkeep.store.blocks.{name}" for name in _BLOCKS},
        **{name: f"gradkeep._display.{name}" for name in _SHOWN},
        "Info": "gradkeep.store.catalog.StoreInfo",
        "Place": "gradkeep.store.catalog.BlockAddress",
        "Result": "gradkeep.store.catalog.SqlResult",
        "Share": "gradkeep.store.WriterShare",
        "Swept": "gradkeep.store.GcReport",
        "Syscalls": "gradkeep.store.backends.Syscalls",
    },
)
