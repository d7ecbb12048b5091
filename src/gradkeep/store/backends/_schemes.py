"""Which backend a path or URL means: folders, buckets, and schemes that others registered."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from gradkeep.errors import StoreError
from gradkeep.store.backends._backend import Backend
from gradkeep.store.backends._bucket import SCHEMES, Bucket
from gradkeep.store.backends._disk import LocalDisk

if TYPE_CHECKING:
    from collections.abc import Callable

ENTRY_POINTS = "gradkeep.backends"
"""The group of entry points in which an installed package names its schemes."""

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


def folder_of_url(url: str) -> LocalDisk:
    """The folder that a `file://` URL names, with all that holds for folders: no link is followed.

    >>> folder_of_url("file:///data/my%20runs").root
    '/data/my runs'
    """
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.strip("/") or "\0" in path:
        fix = "write file:///path/to/folder, with three slashes, or the folder itself"
        raise StoreError("this URL names no folder for a store", path=url, fix=fix)
    return LocalDisk(path)


_factories: dict[str, Callable[[str], Backend]] = dict.fromkeys(SCHEMES, Bucket) | {
    "file": folder_of_url
}


def register_backend(scheme: str, factory: Callable[[str], Backend]) -> None:
    """Make `gk.open("scheme://...")`, and every command, use `factory(url)`.

    Once per process and scheme; the same factory again is free. So that commands know it too, an
    installed package names the factory as an entry point `scheme` of the group
    `gradkeep.backends`: it is then loaded when such a URL is opened.

    >>> import gradkeep as gk
    >>> places = {"memo://a": gk.store.Memory()}
    >>> gk.store.register_backend("memo", places.__getitem__)
    >>> gk.open("memo://a").uuid == gk.open("memo://a", create=False).uuid
    True
    """
    if not isinstance(scheme, str) or _SCHEME.fullmatch(scheme) is None:
        raise StoreError(
            "this cannot be the scheme of a URL",
            found=repr(scheme),
            expected="small letters, digits, + . or -, a letter first, without ://",
        )
    if not callable(factory):
        raise StoreError(
            f"the factory for {scheme}:// must be a function that returns a Backend",
            found=repr(factory),
        )
    known = _factories.get(scheme)
    if known is not None and known != factory:
        raise StoreError(
            f"the scheme {scheme}:// is taken",
            found=_name(known),
            fix="register yours under another scheme, or hand the backend itself to gk.open",
        )
    _factories[scheme] = factory


def backend_for(path: str | os.PathLike[str] | Backend) -> Backend:
    """The backend that a path or URL names; a backend is handed back as it is."""
    if not isinstance(path, str | os.PathLike):
        return path
    text = os.fspath(path)
    scheme, separator, _ = text.partition("://")
    if not separator:
        return LocalDisk(path)
    found = _factory(scheme, text)(text)
    if not isinstance(found, Backend):
        raise StoreError(
            f"the factory for {scheme}:// returned no gradkeep.store.Backend",
            path=text,
            found=type(found).__name__,
        )
    return found


def _factory(scheme: str, url: str) -> Callable[[str], Backend]:
    if scheme not in _factories:
        from importlib.metadata import entry_points  # slow to import, seldom needed

        for point in entry_points(group=ENTRY_POINTS, name=scheme):
            register_backend(scheme, point.load())
    if scheme not in _factories:
        raise StoreError(
            f"this is not the URL of a store: nothing is registered for {scheme}://",
            path=url,
            expected=", ".join(f"{name}://" for name in sorted(_factories)) + " or a folder",
            fix=f'gk.store.register_backend("{scheme}", factory) makes it known, '
            f"and an entry point {scheme!r} of the group {ENTRY_POINTS!r} for commands",
        )
    return _factories[scheme]


def _name(factory: Callable[[str], Backend]) -> str:
    return f"{factory.__module__}.{getattr(factory, '__qualname__', repr(factory))}"
