"""The local web server of the page."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import secrets
import socket
import threading
from typing import TYPE_CHECKING, Any, cast

import uvicorn

from gradkeep import _arguments
from gradkeep.errors import StoreError
from gradkeep.store import Store, backend_for
from gradkeep.web._app import create_app
from gradkeep.web._guard import Access, BoundedProtocol, ConnectionLimits, ConnectionTable

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from gradkeep._preview import Preview
    from gradkeep.evaluate import Recipe

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_CONNECTIONS = 128


def serve(
    store: Store | str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    data: Preview | Mapping[str, Preview] | None = None,
    recipe: Recipe | None = None,
    logs: Sequence[str | os.PathLike[str]] = (),
    allow_remote: bool = False,
    open_browser: bool = False,
    report: Callable[[str], None] = print,
) -> None:
    """Serve the page about a store until it is interrupted.

    It listens on this machine only. Another `host` needs `allow_remote=True`, and then every request
    must send the token that is printed. Port 0 takes any free port.
    """
    _arguments.text("host", host, error=StoreError)
    _arguments.count("port", port, error=StoreError, most=65535)
    opened = store if isinstance(store, Store) else backend_for(store)
    Store.require_store(opened.backend if isinstance(opened, Store) else opened)
    local = _is_loopback(host)
    if not local and not allow_remote:
        raise StoreError(
            f"{host!r} can be reached from other machines",
            code="web.remote_host",
            fix="Use 127.0.0.1 with an ssh tunnel, or --allow-remote, which requires a token.",
        )
    listening = _listen(host, port)
    port = listening.getsockname()[1]
    token = secrets.token_urlsafe(24)
    names = _LOOPBACK if local else (*_LOOPBACK, host.lower(), socket.gethostname().lower())
    access = Access(token, names, port, remote=not local)
    app = create_app(store, data=data, recipe=recipe, logs=logs, access=access)
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}/" + ("" if local else f"?token={token}")
    report(f"gradkeep serves {opened.location} at {url}")
    if not local:
        report("anyone with this address can read the store and record decisions, unencrypted")
    report("press Ctrl-C to stop")
    if open_browser:
        threading.Thread(target=_open, args=(url,), daemon=True).start()
    threading.Thread(target=_warm_up, daemon=True).start()
    build_server(app).run(sockets=[listening])


def build_server(app: Any, limits: ConnectionLimits | None = None) -> uvicorn.Server:
    """Build the server of an application, with limits of open connections."""
    config = uvicorn.Config(
        app,
        http=cast(
            "Any",
            functools.partial(BoundedProtocol, table=ConnectionTable(limits or ConnectionLimits())),
        ),
        log_level="error",  # clients are told about invalid requests
        access_log=False,
        server_header=False,
        limit_concurrency=_CONNECTIONS,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=2,
        ws="none",
    )
    return uvicorn.Server(config)


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        listening = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, port, error) from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_CONNECTIONS)
    except OSError as error:
        listening.close()
        raise _cannot_listen(host, port, error) from error
    return listening


def _cannot_listen(host: str, port: int, error: Exception) -> StoreError:
    return StoreError(
        f"cannot listen on {host[:100]} port {port}",
        code="web.cannot_listen",
        found=getattr(error, "strerror", None) or str(error),
        fix="--port 0 takes any free port",
    )


def _open(url: str) -> None:
    import webbrowser

    webbrowser.open(url)


def _warm_up() -> None:
    """Import what the first request would wait for."""
    import gradkeep.attribution
    import gradkeep.evaluate  # noqa: F401

    with contextlib.suppress(ImportError):  # an extra
        import sklearn.cluster  # noqa: F401
