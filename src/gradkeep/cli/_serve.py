"""`gradkeep demo`, `serve` and `report`: see it work, and look at a store in the browser."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gradkeep._arguments import short_repr
from gradkeep._display import progress
from gradkeep._environment import install_hint
from gradkeep.cli._inputs import input_file, load_object, load_recipe, output_file, output_folder
from gradkeep.cli._options import JsonOption, RecipeOption, StoreArgument, print_json
from gradkeep.errors import DataError, MissingExtraError, RematError, StoreError

DataOption = Annotated[
    str | None,
    typer.Option(
        "--data", metavar="MODULE:NAME", help="A gk.Preview of the rows, or one for each split."
    ),
]
LogOption = Annotated[
    list[Path] | None, typer.Option("--log", help="A recorded training step; repeatable.")
]


def serve(
    store: StoreArgument,
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8765,
    data: DataOption = None,
    recipe: RecipeOption = None,
    log: LogOption = None,
    host: str = "127.0.0.1",
    allow_remote: bool = False,
    open_browser: Annotated[bool | None, typer.Option("--open/--no-open")] = None,
) -> None:
    """Serve the web UI of a store on this machine until Ctrl-C.

    Decisions about labels are saved in the store as they are made.

    Options:
        port: 0 takes any free port.
        host: Address to listen on.
        allow_remote: Admit other machines, with a token.
        open_browser: Open a browser; default: if possible.
    """
    serve_page = _web_module("_app").serve  # a missing extra is reported before anything else
    has_display = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    can_open = sys.stdout.isatty() and (has_display or sys.platform == "darwin")
    serve_page(
        store,
        host=host,
        port=port,
        allow_remote=allow_remote,
        open_browser=can_open if open_browser is None else open_browser,
        report=lambda line: print(line, flush=True),
        **_page_arguments(data, recipe, log),
    )


def report(
    store: StoreArgument,
    out: Annotated[Path, typer.Option(metavar="FILE")] = Path("report.html"),
    data: DataOption = None,
    recipe: RecipeOption = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Write the web UI of a store into one HTML file that needs no server and no network.

    It explains wrong predictions, the least certain queries and the first ones.

    Options:
        out: The HTML file.
    """
    import gradkeep.store as stores

    write_report = _web_module("_report").write_report
    output_file(out, error=StoreError)
    opened = stores.open(store, create=False)
    arguments = _page_arguments(data, recipe, log)
    with progress("report", "answers") as update:
        path = write_report(opened, out, progress=update, **arguments)
    size = path.stat().st_size
    if json:
        print_json({"file": str(path), "bytes": size})
        return
    print(f"wrote {path}, {size / 1e6:.1f} MB; open it in any browser")


def _web_module(name: str) -> Any:
    """Import a module of the web UI, whose dependencies are an extra."""
    try:
        return importlib.import_module(f"gradkeep.web.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gradkeep"):
            raise
        what = "the web UI needs fastapi and uvicorn"
        raise MissingExtraError(what, fix=install_hint("web")) from error


def _page_arguments(
    data: str | None, recipe: str | None, logs: list[Path] | None
) -> dict[str, Any]:
    return {
        "data": None if data is None else _load_preview(data),
        "recipe": None if recipe is None else load_recipe(recipe, None),
        "logs": [input_file(path, error=RematError) for path in logs or []],
    }


def _load_preview(source: str) -> Any:
    from gradkeep import Preview

    preview = load_object(source, Preview, error=DataError)
    previews = preview.values() if isinstance(preview, dict) else [preview]
    if not all(isinstance(one, Preview) for one in previews):
        raise DataError(
            f"{short_repr(source)} is not a preview of rows",
            code="cli.not_a_preview",
            found=type(preview).__name__,
            expected="a gk.Preview, one for each split, or a function that returns either",
        )
    return preview


def demo(
    out: Annotated[
        Path | None, typer.Option(show_default="gradkeep-demo, or gradkeep-demo-text")
    ] = None,
    text: bool = False,
    seeds: Annotated[int, typer.Option(min=1, max=1000)] = 5,
) -> None:
    """Train on real digits with wrong labels planted, find them, and retrain without them.

    One mistake is explained by groups of rows, scores are held against models trained on random
    halves, a network is trained in half of its memory, a writer is killed and resumed, and a bit is
    flipped and found. With --text, false sentences are planted in documents, and found by what they
    made a language model say. Every number is computed in this run.

    Options:
        out: Where the demo's store goes.
        text: A small language model and its documents instead.
        seeds: Retrainings that each accuracy is a mean of.
    """
    where = out or Path("gradkeep-demo-text" if text else "gradkeep-demo")
    output_folder(where, error=StoreError)
    if text:
        from gradkeep.cli._demo_text import run_text_demo

        run_text_demo(where)
        return
    from gradkeep.cli._demo_digits import run_digits_demo

    run_digits_demo(where, seeds=seeds)
