"""Savers under their released names."""

from gradkeep.compat.trak._abstract_saver import AbstractSaver, MissingTargets, ModelIDException
from gradkeep.compat.trak._store_saver import MmapSaver

__all__ = ["AbstractSaver", "MissingTargets", "MmapSaver", "ModelIDException"]
