"""`gradkeep import`: results of other systems, brought into a store."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads it
from typing import Annotated

import typer

from gradkeep.cli._options import JsonOption  # noqa: TC001 - typer reads it
from gradkeep.cli._output import print_json


def trak(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The save_dir of the released TRAK package.")
    ],
    store: Annotated[
        Path | None,
        typer.Option("--store", help="Where to; by default beside DIR, as DIR-gradkeep."),
    ] = None,
    run: Annotated[str, typer.Option(help="The name that the run gets.")] = "trak",
    json: JsonOption = False,
) -> None:
    """Bring projected gradients, weights and scores of TRAK into a store; DIR is left as it is."""
    from gradkeep.compat.trak import import_save_dir

    whole = folder.resolve()
    target = store or whole.with_name(f"{whole.name}-gradkeep")
    found = import_save_dir(folder, target, run=run)
    if json:
        print_json(
            {
                "store": str(target),
                "checkpoints": found.checkpoints,
                "scores": found.scores,
                "skipped": found.skipped,
            }
        )
        return
    for name in found.checkpoints:
        print(f"imported   projected gradients of {name}")
    for name in found.scores:
        print(f"imported   scores {name}: gk.Scores.load(store, {name!r})")
    for reason in found.skipped:
        print(f"skipped    {reason}")
    print(f"next       gradkeep info {target}")
