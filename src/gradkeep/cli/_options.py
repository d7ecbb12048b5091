"""Arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

StoreArgument = Annotated[str, typer.Argument(metavar="STORE", help="The store's folder.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
