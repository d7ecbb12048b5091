"""Bytes that survive: immutable, checksummed segments of rows under numbered manifests."""

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
from gradkeep.store.backends._backend import Backend, Durability, Entry, Readable
from gradkeep.store.backends._bucket import Bucket
from gradkeep.store.backends._disk import LocalDisk
from gradkeep.store.backends._memory import Memory
from gradkeep.store.backends._schemes import backend_for, register_backend
from gradkeep.store.blocks._block import Block
from gradkeep.store.blocks._columns import Batch, Ragged
from gradkeep.store.blocks._schema import Array, Encoding, Layer, Schema
from gradkeep.store.blocks._writer import Writer, WriterShare
from gradkeep.store.blocks._zarr import zarr_references, zarr_view
from gradkeep.store.rows._leases import Lease
from gradkeep.store.rows._rows import RowCounts, Rows, RowState

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
