"""`gradkeep verify`: check every byte of a store."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep._progress import progress
from gradkeep.cli._options import JsonOption, StoreArgument  # noqa: TC001 - typer reads them
from gradkeep.cli._output import print_json

if TYPE_CHECKING:
    from gradkeep.store import Verdict


def verify(
    store: StoreArgument,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Move damaged files to the store's quarantine and remove unfinished writes.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Read every file of a store and compare it with its checksums.

    Exits with 0 if the store is healthy, and with 1 after naming each damaged file and tensor.
    With --repair, running the work again afterwards recreates exactly what was moved aside.
    """
    import gradkeep.store as stores

    with progress("verify", "files") as report:
        verdict = stores.verify(stores.backend_for(store), repair=repair, progress=report)
    if json:
        print_json(_fields(verdict))
    else:
        _show(verdict)
    if not verdict.healthy:
        raise typer.Exit(1)


def _fields(verdict: Verdict) -> dict[str, Any]:
    return {
        "healthy": verdict.healthy,
        "files": verdict.files,
        "bytes": verdict.bytes,
        "damage": [
            {"path": item.path, "tensor": item.tensor, "what": item.what} for item in verdict.damage
        ],
        "orphans": list(verdict.orphans),
        "unknown": list(verdict.unknown),
        "repaired": list(verdict.repaired),
    }


def _show(verdict: Verdict) -> None:
    from gradkeep.store import format_size

    for item in verdict.damage:
        print(f"damaged  {item.path}  {item.what}")
    for path in verdict.orphans:
        print(f"unfinished  {path}  left by a writer that is gone")
    for path in verdict.unknown:
        print(f"unknown  {path}  not put there by gradkeep; left alone")
    for sentence in verdict.repaired:
        print(f"repair  {sentence}")
    read = f"{verdict.files} files, {format_size(verdict.bytes)}"
    if verdict.healthy:
        print(f"healthy: {read}")
        return
    files = len({item.path for item in verdict.damage})
    print(f"{files} of {read} damaged")
    if not verdict.repaired:
        print("next: add --repair to move them aside, then run the work again", file=sys.stderr)
