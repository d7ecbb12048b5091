"""Blocks of rows: immutable, checksummed segments under numbered manifests."""

from gradkeep.store.blocks._block import Block
from gradkeep.store.blocks._columns import Batch, Column, Ragged
from gradkeep.store.blocks._manifest import Manifest, SegmentEntry
from gradkeep.store.blocks._schema import Array, Encoding, Layer, Schema
from gradkeep.store.blocks._segment import Segment
from gradkeep.store.blocks._writer import Writer, WriterShare
from gradkeep.store.blocks._zarr import zarr_references, zarr_view

__all__ = [
    "Array",
    "Batch",
    "Block",
    "Column",
    "Encoding",
    "Layer",
    "Manifest",
    "Ragged",
    "Schema",
    "Segment",
    "SegmentEntry",
    "Writer",
    "WriterShare",
    "zarr_references",
    "zarr_view",
]
