"""`gradkeep sql`: ask a store."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from gradkeep.cli._options import JsonOption, StoreArgument  # noqa: TC001 - typer reads them
from gradkeep.cli._output import print_json

if TYPE_CHECKING:
    from gradkeep.store import Result


def sql(
    store: StoreArgument,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="One reading SQL statement.")],
    json: JsonOption = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV; NULL is an empty cell.")] = False,
) -> None:
    """Ask a store in SQL, offline and reading only.

    Tables: samples (a row per sample: run, checkpoint, split, capture, id, all scalars), captures,
    scores, runs, checkpoints. "DESCRIBE samples" lists columns.
    """
    import gradkeep.store as stores

    if json and csv:
        raise typer.BadParameter("--json and --csv exclude each other")
    result = stores.open(store, create=False).sql(query)
    if json:
        print_json({"columns": result.columns, "rows": result.rows()})
    elif csv:
        _print_csv(result)
    else:
        print(result.text())


def _print_csv(result: Result) -> None:
    import csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(result.columns)
    writer.writerows(result.rows())
