"""Deciding while a step runs: a dispatch mode under which storages are emptied and filled again."""

from gradkeep.remat._online._mode import Online
from gradkeep.remat._online._told import Told

__all__ = ["Online", "Told"]
