"""The web application, one route for each question of the page, and its local server."""

from __future__ import annotations

import contextlib
import functools
import inspect
import ipaddress
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import anyio.to_thread
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from gradkeep import __version__, _arguments
from gradkeep._preview import Preview
from gradkeep.errors import (
    CaptureError,
    GradkeepError,
    MissingRowsError,
    NotAStoreError,
    StoreError,
)
from gradkeep.store import Store, backend_for
from gradkeep.web import _suspects_screen as suspects
from gradkeep.web import _why_screen as why
from gradkeep.web._background import BusyError
from gradkeep.web._clusters_screen import show_clusters
from gradkeep.web._guard import Access, BoundedProtocol, ConnectionLimits, ConnectionTable, Guard
from gradkeep.web._http import error_problem, problem, static_files, to_json
from gradkeep.web._memory_screen import HEURISTICS, show_budgets, show_timeline
from gradkeep.web._score_sources import score_sources
from gradkeep.web._served import ANY_SPLIT, ServedStore, show_rows
from gradkeep.web._store_screen import (
    list_evaluations,
    list_runs,
    show_health,
    show_store,
    verify_store,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gradkeep.evaluate import Recipe

TOKEN_PLACEHOLDER = b"GRADKEEP-TOKEN"


def show_session(served: ServedStore) -> dict[str, Any]:
    """Return what the page needs to know before its first question."""
    return {
        "version": __version__,
        "location": served.location,
        "recipe": served.recipe is not None,
        "previews": sorted(served.previews),
        "heuristics": HEURISTICS,
    }


Route = Callable[..., Any]
"""Takes the served store, then the parameters of the request."""
READS: dict[str, Route] = {
    "/api/session": show_session,
    "/api/runs": list_runs,
    "/api/store": show_store,
    "/api/health": show_health,
    "/api/sources": score_sources,
    "/api/queries": why.list_queries,
    "/api/queries/random": why.random_query,
    "/api/why": why.explain_query,
    "/api/why/layers": why.show_layers,
    "/api/why/groups": why.show_groups,
    "/api/why/tokens": why.show_tokens,
    "/api/rows": show_rows,
    "/api/suspects": suspects.list_suspects,
    "/api/suspects/suggestions": suspects.show_suggestions,
    "/api/suspects/retrained": suspects.show_retraining,
    "/api/decisions": suspects.list_decisions,
    "/api/decisions/export": suspects.export_decisions,
    "/api/clusters": show_clusters,
    "/api/memory": show_budgets,
    "/api/memory/timeline": show_timeline,
    "/api/evaluations": list_evaluations,
}
"""GET: changes nothing."""
WRITES: dict[str, Route] = {
    "/api/decisions": suspects.record_decision,
    "/api/health": verify_store,
    "/api/suspects/suggestions": suspects.start_suggestions,
    "/api/suspects/retrained": suspects.start_retraining,
}
"""POST: records a decision or starts work."""


def create_app(
    store: Any,
    *,
    data: Preview | Mapping[str, Preview] | None = None,
    recipe: Any = None,
    logs: Sequence[str | os.PathLike[str]] = (),
    access: Access | None = None,
) -> FastAPI:
    """Build the page about a store as an ASGI application.

    `data` is a preview of the rows, for all splits or by split; `recipe` (a `gk.evaluate.Recipe`)
    trains models; `logs` are recorded training steps. `access` limits who may connect, by default to
    this machine.
    """
    served = serve_store(store, data=data, recipe=recipe, logs=logs)
    access = access or Access(secrets.token_urlsafe(24))
    app = FastAPI(
        lifespan=_limit_threads,
        title="gradkeep",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
    )
    for method, routes in (("GET", READS), ("POST", WRITES)):
        for path, route in routes.items():
            app.add_api_route(path, _bind(route, served), methods=[method], response_model=None)
    _add_static_files(app, access.token)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Guard, access=access)
    return app


def serve_store(store: Any, *, data: Any, recipe: Any, logs: Sequence[Any]) -> ServedStore:
    """Build the `ServedStore` from the arguments of `create_app`."""
    location = getattr(store, "location", None) or os.fspath(store)
    previews = {ANY_SPLIT: data} if isinstance(data, Preview) else data or {}
    if not isinstance(previews, Mapping) or not all(
        isinstance(preview, Preview) for preview in previews.values()
    ):
        raise CaptureError(
            "data must be a preview of rows",
            code="web.not_a_preview",
            found=type(data).__name__,
            expected="a gk.Preview, or one for each split: {'train': ..., 'test': ...}",
        )
    paths = tuple(Path(log).resolve() for log in logs)
    previews = {str(split): preview for split, preview in previews.items()}
    return ServedStore(str(location), previews, recipe, paths)


@contextlib.asynccontextmanager
async def _limit_threads(_: FastAPI) -> AsyncIterator[None]:
    """Use few threads: the page serves one person, and each thread has a memory arena."""
    anyio.to_thread.current_default_thread_limiter().total_tokens = 6
    yield


def _bind(route: Route, served: ServedStore) -> Callable[..., Response]:
    """Wrap a route for FastAPI: bind the store, and turn results and errors into responses."""

    @functools.wraps(route)
    def respond(**parameters: Any) -> Response:
        try:
            answer = route(served, **parameters)
        except BusyError as working:
            progress = {"working": working.what, "done": working.done, "total": working.total}
            return _json(progress, 202)
        except GradkeepError as error:
            statuses: dict[type[GradkeepError], int] = {MissingRowsError: 404, NotAStoreError: 410}
            status = statuses.get(type(error), 409)
            return _json({"problem": error_problem(error)}, status)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            return _json({"problem": problem("OSError", f"system error: {reason}")}, 409)
        except Exception as error:  # a bug; the rest of the page goes on working
            what = f"internal error of gradkeep: {type(error).__name__}"
            return _json({"problem": problem("OurFault", what)}, 503)
        return answer if isinstance(answer, Response) else _json(answer)

    signature = inspect.signature(route, eval_str=True, locals={"ServedStore": ServedStore})
    parameters = list(signature.parameters.values())[1:]
    respond.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[one.replace(kind=one.KEYWORD_ONLY) for one in parameters],
        return_annotation=Response,
    )
    return respond


def _add_static_files(app: FastAPI, token: str) -> None:
    files = static_files()
    index = files["index.html"].content.replace(TOKEN_PLACEHOLDER, token.encode())

    def front() -> Response:
        return Response(index, media_type="text/html; charset=utf-8")

    def static(path: str) -> Response:
        file = files.get(path)
        if file is None or path == "index.html":
            raise HTTPException(404)
        # File names have no version, so browsers must revalidate them.
        headers = {"cache-control": "no-cache"}
        return Response(file.content, media_type=file.media_type, headers=headers)

    app.add_api_route("/", front, include_in_schema=False, response_model=None)
    app.add_api_route("/static/{path:path}", static, include_in_schema=False, response_model=None)


def _json(answer: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(answer), status, headers, "application/json")


async def _invalid_request(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    parts = [f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors()[:5]]
    return _json({"problem": problem("Refused", "invalid request", found="; ".join(parts))}, 422)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reasons = {404: "there is nothing under this address", 405: "method not allowed"}
    what = reasons.get(error.status_code, "refused")
    return _json({"problem": problem("Refused", what)}, error.status_code, error.headers)


_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


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
        limit_concurrency=128,
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
        listening.listen(128)
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
