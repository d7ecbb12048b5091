"""Savers under their released names."""

from gradkeep.compat.trak._abstract_saver import (
    AbstractSaver,
    MissingTargetsError,
    ModelIDException,
)
from gradkeep.compat.trak._store_saver import MmapSaver

__all__ = ["AbstractSaver", "MissingTargetsError", "MmapSaver", "ModelIDException"]
