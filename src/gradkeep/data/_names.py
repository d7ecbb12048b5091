"""Names that are looked up: a wrong one is answered with those that are near."""

from __future__ import annotations

import difflib
import os
from typing import TYPE_CHECKING

from gradkeep import _arguments
from gradkeep.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_LONGEST_NAME = 255


def check_name(path: Path, name: str) -> None:
    """Refuse what no file can be called, before the system does."""
    longest = max(len(os.fsencode(part)) for part in (*path.parts, name, "."))
    if longest > _LONGEST_NAME or not _arguments.writable(f"{path}{name}"):
        raise DataError("no file has such a name", found=_arguments.shown(name or str(path)))


def known_name(
    name: str,
    known: Iterable[str],
    *,
    what: str,
    path: str | os.PathLike[str] | None = None,
    fix: str | None = None,
) -> str:
    """The name itself, if it is known; `what` says what there is none of."""
    names = list(known)
    if isinstance(name, str) and name in names:
        return name
    near = difflib.get_close_matches(str(name)[:200], names, n=3, cutoff=0.4)
    raise DataError(
        f"there is no such {what}",
        path=path,
        found=_arguments.shown(name),
        expected=", ".join(near or names),
        fix=fix,
    )
