"""`gradkeep gc`: free space."""

from __future__ import annotations

from typing import Annotated

import typer

from gradkeep.cli._options import JsonOption, StoreArgument  # noqa: TC001 - typer reads them
from gradkeep.cli._output import print_json


def gc(
    store: StoreArgument,
    keep_versions: Annotated[
        int, typer.Option("--keep-versions", min=1, help="How many versions of a block stay.")
    ] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Remove old versions, the segments only they needed, and unfinished writes.

    Safe at any moment, also while others read and write.
    """
    import gradkeep.store as stores

    opened = stores.open(store, create=False)
    swept = stores.gc(opened, keep_versions=keep_versions, dry_run=dry_run)
    if json:
        fields = {"dry_run": dry_run, "files": list(swept.files), "bytes": swept.bytes}
        print_json(fields)
        return
    verb = "would remove" if dry_run else "removed"
    for file in swept.files:
        print(f"{verb}  {file}")
    print(f"{verb} {len(swept.files)} files, {stores.format_size(swept.bytes)}")
