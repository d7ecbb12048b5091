"""The local page and the report: what a store says, for people to look at.

`serve` starts the page, `write_report` writes the same screens into one file that needs no server.
Both ask the public functions that the commands ask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep._public import lazy_names
from gradkeep._surroundings import install_hint

if TYPE_CHECKING:
    from gradkeep._preview import ShownRow
    from gradkeep.web._app import create_app
    from gradkeep.web._guard import Access, RequestLimits
    from gradkeep.web._report import write_report
    from gradkeep.web._serve import serve

__all__ = ["Access", "RequestLimits", "ShownRow", "create_app", "serve", "write_report"]

_NEEDED = ("anyio", "fastapi", "h11", "pydantic", "starlette", "uvicorn")
"""Packages of the extra `web`, and those that come with them."""

if not TYPE_CHECKING:
    _lazy = lazy_names(
        __name__,
        {
            "Access": "gradkeep.web._guard",
            "RequestLimits": "gradkeep.web._guard",
            "ShownRow": "gradkeep._preview",
            "create_app": "gradkeep.web._app",
            "serve": "gradkeep.web._serve",
            "write_report": "gradkeep.web._report",
        },
    )

    def __getattr__(name: str) -> object:
        try:
            return _lazy(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in _NEEDED:
                raise
            from gradkeep.errors import MissingExtra

            raise MissingExtra(
                "the page needs fastapi and uvicorn", fix=install_hint("web")
            ) from error
