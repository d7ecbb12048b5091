"""`gradkeep demo`: see it work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradkeep.cli._edges import output_folder
from gradkeep.errors import StoreError


def demo(
    out: Annotated[Path, typer.Option("--out", help="Where the demo's store goes.")] = Path(
        "gradkeep-demo"
    ),
    seeds: Annotated[
        int, typer.Option(min=1, max=1000, help="Retrainings that each accuracy is a mean of.")
    ] = 5,
) -> None:
    """Train on real digits with wrong labels planted, find them, and retrain without them.

    Then a writer is killed and resumed, and a bit is flipped and found. Every number is computed
    in this run.
    """
    from gradkeep.cli._story import tell

    output_folder(out, error=StoreError)
    tell(out, seeds=seeds)
