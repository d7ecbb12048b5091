"""`gradkeep delete`: delete a capture or saved scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gradkeep.cli._options import JsonOption, StoreArgument  # noqa: TC001 - typer reads them
from gradkeep.cli._output import print_json
from gradkeep.errors import StoreError

if TYPE_CHECKING:
    from gradkeep.store import BlockKey


def delete(
    store: StoreArgument,
    capture: Annotated[
        str,
        typer.Argument(
            metavar="CAPTURE", help="RUN/CHECKPOINT/SPLIT/CAPTURE as info shows it, or scores/NAME."
        ),
    ],
    yes: Annotated[
        bool, typer.Option("--yes", help="Really delete; there is no way back.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Delete a capture, or saved scores, with all versions."""
    import gradkeep.store as stores

    opened = stores.open(store, create=False)
    key = _key(capture)
    found = [block for block in opened.info().blocks if block.place.folder == key.folder]
    if not found:
        raise StoreError(
            f"there is no {capture!r} in this store",
            path=opened.location,
            fix=f"`gradkeep info {opened.location}` shows what there is",
        )
    block = found[0]
    if not yes:
        raise StoreError(
            "nothing was deleted",
            path=f"{opened.location}/{key.folder}",
            found=f"{block.rows} rows, {stores.format_size(block.bytes)}",
            fix="add --yes to delete this for ever",
        )
    opened.delete(key)
    if json:
        print_json({"deleted": key.folder, "rows": block.rows, "bytes": block.bytes})
    else:
        print(f"deleted {key.folder}: {block.rows} rows, {stores.format_size(block.bytes)}")


def _key(name: str) -> BlockKey:
    from gradkeep.store import CaptureKey, ScoresKey

    parts = name.strip("/").split("/")
    if len(parts) == 2 and parts[0] == "scores":
        return ScoresKey(parts[1])
    if len(parts) == 4:
        run, checkpoint, split, capture = parts
        return CaptureKey(checkpoint, split, run=run, capture=capture)
    raise StoreError(
        "this names no capture",
        found=name,
        expected="RUN/CHECKPOINT/SPLIT/CAPTURE, for example main/final/train/main, or scores/NAME",
    )
