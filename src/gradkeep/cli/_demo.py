"""`gradkeep demo`: see it work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option("--out", help="Where the demo's store goes.")] = Path(
        "gradkeep-demo"
    ),
    seeds: Annotated[int, typer.Option(help="Retrainings that each accuracy is a mean of.")] = 5,
) -> None:
    """Train on real digits with wrong labels planted, find them, and retrain without them.

    Then a writer is killed and resumed, and a bit is flipped and found. Every number is computed
    in this run.
    """
    from gradkeep.cli._story import tell

    tell(out, seeds=seeds)
