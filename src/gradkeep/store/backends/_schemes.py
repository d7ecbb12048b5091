"""Choose the backend for a path or URL: folder, bucket or a registered scheme."""

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
"""Group of entry points in which installed packages register schemes."""

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


def folder_of_url(url: str) -> LocalDisk:
    """Return the folder of a `file://` URL, like any other folder: links in it are not followed.

    >>> folder_of_url("file:///data/my%20runs").root
    '/data/my runs'
    """
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.strip("/") or "\0" in path:
        raise StoreError(
            "the URL does not name a folder",
            code="store.invalid_url",
            path=url,
            fix="Write file:///path/to/folder, with three slashes, or the plain path.",
        )
    return LocalDisk(path)


_factories: dict[str, Callable[[str], Backend]] = dict.fromkeys(SCHEMES, Bucket) | {
    "file": folder_of_url
}


def register_backend(scheme: str, factory: Callable[[str], Backend]) -> None:
    """Make `gk.open("scheme://...")` and every command use `factory(url)`.

    Registering the same factory again does nothing. To make a scheme known to commands, an installed
    package declares the factory as an entry point named after the scheme in the group
    `gradkeep.backends`; it is loaded when such a URL is opened.

    Args:
        scheme: Scheme of the URL, without `://`.
        factory: Function that takes the URL and returns a `Backend`.

    Raises:
        StoreError: The scheme is invalid or has another factory.

    Example:
        >>> import gradkeep as gk
        >>> backends = {"memo://a": gk.store.Memory()}
        >>> gk.store.register_backend("memo", backends.__getitem__)
        >>> gk.open("memo://a").uuid == gk.open("memo://a", create=False).uuid
        True
    """
    if not isinstance(scheme, str) or _SCHEME.fullmatch(scheme) is None:
        raise StoreError(
            "invalid URL scheme",
            code="store.invalid_scheme",
            found=repr(scheme),
            expected="lowercase letters, digits, + . or -, starting with a letter, without ://",
        )
    if not callable(factory):
        raise StoreError(
            f"the factory for {scheme}:// is not callable",
            code="store.invalid_factory",
            found=repr(factory),
            expected="a function that returns a Backend",
        )
    known = _factories.get(scheme)
    if known is not None and known != factory:
        raise StoreError(
            f"the scheme {scheme}:// is already registered",
            code="store.scheme_taken",
            found=_name(known),
            fix="Use another scheme, or pass the backend itself to gk.open.",
        )
    _factories[scheme] = factory


def backend_for(path: str | os.PathLike[str] | Backend) -> Backend:
    """Return the backend for a path or URL; a backend is returned unchanged."""
    if not isinstance(path, str | os.PathLike):
        return path
    text = os.fspath(path)
    scheme, separator, _ = text.partition("://")
    if not separator:
        return LocalDisk(path)
    backend = _factory(scheme, text)(text)
    if not isinstance(backend, Backend):
        raise StoreError(
            f"the factory for {scheme}:// did not return a gradkeep.store.Backend",
            code="store.not_a_backend",
            path=text,
            found=type(backend).__name__,
        )
    return backend


def _factory(scheme: str, url: str) -> Callable[[str], Backend]:
    if scheme not in _factories:
        from importlib.metadata import entry_points  # slow to import, seldom needed

        for point in entry_points(group=ENTRY_POINTS, name=scheme):
            register_backend(scheme, point.load())
    if scheme not in _factories:
        raise StoreError(
            f"no backend is registered for {scheme}://",
            code="store.unknown_scheme",
            path=url,
            expected=", ".join(f"{name}://" for name in sorted(_factories)) + " or a folder",
            fix=f'Call gk.store.register_backend("{scheme}", factory); for commands, declare an entry '
            f"point {scheme!r} in the group {ENTRY_POINTS!r}.",
        )
    return _factories[scheme]


def _name(factory: Callable[[str], Backend]) -> str:
    return f"{factory.__module__}.{getattr(factory, '__qualname__', repr(factory))}"
