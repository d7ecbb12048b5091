"""What commands share: arguments that several take, answers to stdout."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import typer

from gradkeep.cli._edges import LARGEST, MOST_WORKERS

StoreArgument = Annotated[
    str, typer.Argument(metavar="STORE", help="The store: its folder or URL.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
QueriesOption = Annotated[str, typer.Option(help="The split that the queries are from.")]
TrainOption = Annotated[str, typer.Option(help="The split that is scored.")]
CheckpointOption = Annotated[
    list[str] | None, typer.Option("--checkpoints", help="May be repeated.")
]
RunOption = Annotated[list[str] | None, typer.Option("--run", help="May be repeated.")]
CaptureOption = Annotated[str, typer.Option("--capture", help="The capture's name.")]
MethodOption = Annotated[
    str | None,
    typer.Option(
        "--method", help="`gradkeep methods` lists them; by default the one that won for the task."
    ),
]
RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="MODULE:NAME",
        help="A gk.evaluate.Recipe, as module:name or file.py:name.",
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(min=0, max=MOST_WORKERS, help="Processes that train; 0 trains in this one."),
]
SeedsOption = Annotated[int, typer.Option(min=1, max=LARGEST, help="Models for each set of rows.")]


def print_json(fields: Any) -> None:
    """Print one JSON document; what JSON has no number for becomes null."""
    print(json.dumps(_plain(fields), indent=2, ensure_ascii=False, allow_nan=False))


def _plain(value: Any) -> Any:
    """The value in the types of JSON."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return str(value)
