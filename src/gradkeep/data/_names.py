"""Names that are looked up: a wrong one is answered with those that are near."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from gradkeep.errors import DataError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable


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
    if name in names:
        return name
    near = difflib.get_close_matches(str(name), names, n=3, cutoff=0.4)
    raise DataError(
        f"there is no such {what}",
        path=path,
        found=repr(name),
        expected=", ".join(near or names),
        fix=fix,
    )
