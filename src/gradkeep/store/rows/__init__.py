"""Rows that many processes write: one row, one file, one winner, with leases on what is under way."""

from gradkeep.store.rows._leases import Lease
from gradkeep.store.rows._rows import RowCounts, Rows, RowState

__all__ = ["Lease", "RowCounts", "RowState", "Rows"]
