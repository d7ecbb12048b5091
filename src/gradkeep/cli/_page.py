"""`gradkeep serve` and `report`: the local page, and the same in one file."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gradkeep._arguments import shown
from gradkeep._display import progress
from gradkeep._surroundings import install_hint
from gradkeep.cli._files import input_file, output_file
from gradkeep.cli._imports import imported, recipe_named, script_names
from gradkeep.cli._options import JsonOption, RecipeOption, StoreArgument, print_json
from gradkeep.errors import DataError, MissingExtra, RematError, StoreError

DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="MODULE:NAME",
        help="How rows are shown: a gk.Preview, or one by split, as module:name or file.py:name.",
    ),
]
LogOption = Annotated[
    list[Path] | None,
    typer.Option("--log", help="A recorded training step; may be repeated."),
]


def serve(
    store: StoreArgument,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8765,
    data: DataOption = None,
    recipe: RecipeOption = None,
    log: LogOption = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Let other machines in, with a token.")
    ] = False,
    open_browser: Annotated[
        bool | None,
        typer.Option("--open/--no-open", help="Open a browser; by default if there is one."),
    ] = None,
) -> None:
    """Serve the page about a store on this machine: why, suspects, clusters, budgets, evaluations.

    Ctrl-C ends it. Decisions about labels are kept in the store as they are made.
    """
    serve_page = _web_module("_serve").serve  # a missing extra is reported before anything else
    serve_page(
        store,
        host=host,
        port=port,
        data=_previews(data),
        recipe=None if recipe is None else recipe_named(recipe, None),
        logs=_logs(log),
        allow_remote=allow_remote,
        open_browser=_has_screen() if open_browser is None else open_browser,
        say=lambda line: print(line, flush=True),
    )


def report(
    store: StoreArgument,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The HTML file.")] = Path(
        "report.html"
    ),
    data: DataOption = None,
    recipe: RecipeOption = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Write the page about a store into one HTML file, which needs no server and no network.

    It explains the mistakes, the least sure queries and the first ones.
    """
    import gradkeep.store as stores

    write_report = _web_module("_report").write_report
    output_file(out, error=StoreError)
    opened = stores.open(store, create=False)
    with progress("report", "answers") as told:
        path = write_report(
            opened,
            out,
            data=_previews(data),
            recipe=None if recipe is None else recipe_named(recipe, None),
            logs=_logs(log),
            progress=told,
        )
    size = path.stat().st_size
    if json:
        print_json({"file": str(path), "bytes": size})
        return
    print(f"wrote {path}, {size / 1e6:.1f} MB; open it in any browser")


def _web_module(name: str) -> Any:
    """Import a module of the web UI, whose packages are an extra."""
    try:
        return importlib.import_module(f"gradkeep.web.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gradkeep"):
            raise
        raise MissingExtra("the page needs fastapi and uvicorn", fix=install_hint("web")) from error


def _logs(given: list[Path] | None) -> list[Path]:
    return [input_file(path, error=RematError) for path in given or []]


def _previews(source: str | None) -> Any:
    """What `--data` names: a preview, one for each split, or a function that gives either."""
    from gradkeep import Preview

    if source is None:
        return None
    place, _, name = source.rpartition(":")
    if place.endswith(".py"):
        found = script_names(place, error=DataError).get(name)
    else:
        found = imported(source, os.getcwd(), error=DataError)
    if callable(found) and not isinstance(found, Preview):
        found = found()
    by_split = isinstance(found, dict) and all(isinstance(one, Preview) for one in found.values())
    if not isinstance(found, Preview) and not by_split:
        raise DataError(
            f"{shown(source)} says nothing of how rows are shown",
            found=type(found).__name__,
            expected="a gk.Preview, one for each split, or a function that returns either",
        )
    return found


def _has_screen() -> bool:
    """Whether a browser would be seen: a terminal, and a display."""
    seen = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return sys.stdout.isatty() and (seen or sys.platform == "darwin")
