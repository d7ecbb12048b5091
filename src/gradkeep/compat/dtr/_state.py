"""What the prototype kept in globals of torch: here in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradkeep.remat import Recorder
    from gradkeep.remat._online import Online


@dataclass(slots=True, eq=False)
class State:
    """The runtime in force, and how it is to choose."""

    online: Online | None = None
    recorder: Recorder | None = None
    sampling: bool = False
    ignore_small: bool = False
    profiling: bool = True
    base: int = 0
    """Nanoseconds of runtimes that have ended; the others likewise."""
    remat: int = 0
    search: int = 0
    copy: int = 0


STATE = State()
