"""Storage of immutable, checksummed segments of rows with numbered manifests."""

from gradkeep.store._document import Checkpoint, Decision, Run
from gradkeep.store._document import current_decisions as current_decisions
from gradkeep.store._gc import GcReport as GcReport
from gradkeep.store._gc import gc
from gradkeep.store._keys import BasisKey, CaptureKey, EvaluationKey, ScoresKey
from gradkeep.store._keys import BlockKey as BlockKey
from gradkeep.store._store import Store, open
from gradkeep.store._verify import Damage as Damage
from gradkeep.store._verify import Verdict as Verdict
from gradkeep.store._verify import verify
from gradkeep.store.backends._backend import Backend, Memory, register_backend
from gradkeep.store.backends._backend import Durability as Durability
from gradkeep.store.backends._backend import Entry as Entry
from gradkeep.store.backends._backend import Readable as Readable
from gradkeep.store.backends._backend import backend_for as backend_for
from gradkeep.store.backends._bucket import Bucket
from gradkeep.store.backends._disk import LocalDisk
from gradkeep.store.blocks._block import Block
from gradkeep.store.blocks._columns import Batch, Ragged
from gradkeep.store.blocks._schema import Array, Layer, Schema
from gradkeep.store.blocks._schema import Encoding as Encoding
from gradkeep.store.blocks._writer import Writer as Writer
from gradkeep.store.blocks._zarr import zarr_references, zarr_view
from gradkeep.store.rows._rows import Lease as Lease
from gradkeep.store.rows._rows import RowCounts as RowCounts
from gradkeep.store.rows._rows import Rows
from gradkeep.store.rows._rows import RowState as RowState

__all__ = [
    "Array",
    "Backend",
    "BasisKey",
    "Batch",
    "Block",
    "Bucket",
    "CaptureKey",
    "Checkpoint",
    "Decision",
    "EvaluationKey",
    "Layer",
    "LocalDisk",
    "Memory",
    "Ragged",
    "Rows",
    "Run",
    "Schema",
    "ScoresKey",
    "Store",
    "gc",
    "open",
    "register_backend",
    "verify",
    "zarr_references",
    "zarr_view",
]
