"""What a process shares with others: the user's cache folder, and the cores."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def cache_folder() -> Path:
    """Where this user's caches of ours are: below `XDG_CACHE_HOME`, or else `~/.cache`.

    RuntimeError where nobody is at home.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gradkeep"


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch take so many threads while the block runs.

    One is best for thousands of short steps: several wait for each other after every one, for
    minutes where other processes are running too.

    >>> import torch
    >>> with torch_threads(1):
    ...     torch.get_num_threads()
    1
    """
    import torch  # here: commands that run no model never load it

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
