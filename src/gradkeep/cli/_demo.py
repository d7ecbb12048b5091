"""`gradkeep demo`: see it work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    folder: Annotated[Path, typer.Argument(help="Where the demo's store goes.")] = Path(
        "gradkeep-demo"
    ),
) -> None:
    """Train a small network on real digits with planted wrong labels, and keep what is left behind.

    Kills a writer and resumes it, flips a bit and finds it, and asks for the wrong labels in SQL.
    """
    from gradkeep.cli._story import tell

    tell(folder)
