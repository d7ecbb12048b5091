"""The commands by name: where each one is, and what it does in a line.

`gradkeep NAME` imports only the module of NAME and calls the function of that name in it. To add a
command, add a line here.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Command:
    """One command of `gradkeep`."""

    name: str
    module: str
    """The module below `gradkeep.cli`."""
    summary: str
    """The line that `gradkeep --help` shows."""

    def load(self) -> Callable[..., Any]:
        """The function behind the command."""
        module = importlib.import_module(f"gradkeep.cli.{self.module}")
        function: Callable[..., Any] = getattr(module, self.name.replace("-", "_"))
        return function


COMMANDS = (
    Command("demo", "_demo", "Train on real digits, keep what is left behind, break it, ask it."),
    Command("info", "_info", "Show what a store holds: runs, captures, layers, sizes, ratios."),
    Command("verify", "_verify", "Check every byte of a store; name what is damaged."),
    Command("sql", "_sql", "Ask a store in SQL: samples, captures, scores, runs, checkpoints."),
    Command("gc", "_gc", "Free the space of old versions and unfinished writes."),
    Command("delete", "_delete", "Delete a capture or saved scores with all versions."),
)
