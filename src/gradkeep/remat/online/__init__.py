"""Deciding while a step runs: a dispatch mode under which storages are emptied and filled again."""

from gradkeep.remat.online._runtime import OnlineReport, OnlineRuntime

__all__ = ["OnlineReport", "OnlineRuntime"]
