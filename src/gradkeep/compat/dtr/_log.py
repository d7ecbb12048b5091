"""Logs for the simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep.compat.dtr._state import STATE
from gradkeep.errors import RematError
from gradkeep.remat import record

if TYPE_CHECKING:
    import os


def toggle_log(*, on: bool, path: str | os.PathLike[str] = "default.log") -> None:
    """Begin or end a log of what runs, which `gradkeep remat simulate` reads."""
    if on and STATE.online is not None:
        raise RematError(
            "a log is of a step without a budget", fix="set_memory_budget(None) before it"
        )
    if STATE.recorder is not None:
        STATE.recorder.__exit__(None, None, None)
        STATE.recorder = None
    if on:
        STATE.recorder = record(path)
        STATE.recorder.__enter__()


def annotate_log(annotation: str) -> None:
    """`START` drops what was logged before it; other annotations are for people, and left out."""
    if STATE.recorder is not None and annotation == "START":
        path = STATE.recorder.path
        toggle_log(on=False)
        toggle_log(on=True, path=path)
