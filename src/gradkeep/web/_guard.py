"""Who may ask, and how much: access, limits of requests and of connections."""

from __future__ import annotations

import hmac
import ipaddress
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qs

from uvicorn.protocols.http.h11_impl import H11Protocol

from gradkeep.web._responses import ProblemView, to_json

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, MutableMapping

    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
    Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
    App = Callable[[Scope, Receive, Send], Awaitable[None]]


TOKEN_HEADER = "x-gradkeep-token"
TOKEN_COOKIE = "gradkeep_token"
_READS = ("GET", "HEAD")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
    (b"cache-control", b"no-store"),
)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How much one client may ask."""

    body_bytes: int = 64 << 10
    target_bytes: int = 8 << 10
    """Of path and query."""
    reads_per_second: float = 200.0
    writes_per_second: float = 20.0
    burst_seconds: float = 3.0


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask, and what they must carry."""

    token: str
    hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "[::1]")
    """Names that the Host header may have; an IP address is allowed by itself where `remote`."""
    port: int | None = None
    """The port that the Host header must have; any if it is None."""
    remote: bool = False
    """Every request must carry the token, not only writes."""
    limits: RequestLimits = RequestLimits()


class Guard:
    """An ASGI application around another: what is not allowed does not reach it."""

    def __init__(self, app: App, access: Access) -> None:
        self._app, self._access = app, access
        self._lock = threading.Lock()
        self._spent: OrderedDict[tuple[str, bool], tuple[float, float]] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # there are no web sockets here
        asked = _Asked(scope)
        refusal = self._refusal(asked)
        if refusal is not None:
            await _say(send, *refusal, extra=_HEADERS)
            return
        if self._access.remote and asked.token_in_query is not None:
            # The token goes from the address into a cookie, so that it is not passed on by chance.
            await _say(send, 303, "go on without the token", extra=(*_HEADERS, *self._to_cookie()))
            return
        await self._app(scope, self._bounded(receive), _with_headers(send))

    def _refusal(self, asked: _Asked) -> tuple[int, str] | None:
        access, write = self._access, asked.method not in _READS
        if len(asked.target) > access.limits.target_bytes:
            return 414, "the address is too long"
        if not self._known_host(asked.header("host")):
            return 421, "this page is not served under that name"
        if not self._in_time(asked.client, write=write):
            return 429, "too many requests; wait a moment"
        if access.remote and not self._fits(asked.carried()):
            return 401, "this page needs the token that `gradkeep serve` printed"
        if asked.is_question and asked.header("sec-fetch-site") == "cross-site":
            return 403, "questions come from this page only"
        if not write:
            return None
        origin = asked.header("origin")
        if origin is not None and origin != f"{asked.scheme}://{asked.header('host')}":
            return 403, "writes come from this page only"
        if asked.header("sec-fetch-site") not in (None, "same-origin", "none"):
            return 403, "writes come from this page only"
        if not self._fits(asked.header(TOKEN_HEADER)):
            return 403, "writes need the page's token; load the page again"
        length = asked.header("content-length") or "0"
        if not length.isdecimal() or int(length) > access.limits.body_bytes:
            return 413, f"a request holds at most {access.limits.body_bytes} bytes"
        return None

    def _known_host(self, host: str | None) -> bool:
        if not host:
            return False
        name, _, port = (
            host.rpartition(":") if host.rfind(":") > host.rfind("]") else (host, "", "")
        )
        if self._access.port is not None and port not in ("", str(self._access.port)):
            return False
        if self._access.port not in (None, 80, 443) and not port:
            return False
        if name.lower() in self._access.hosts:
            return True
        return self._access.remote and _is_address(name)

    def _fits(self, given: str | None) -> bool:
        return given is not None and hmac.compare_digest(
            given.encode(errors="replace"), self._access.token.encode()
        )

    def _in_time(self, client: str, *, write: bool) -> bool:
        """A bucket for each client that fills again with time."""
        limits = self._access.limits
        rate = limits.writes_per_second if write else limits.reads_per_second
        now = time.monotonic()
        with self._lock:
            left, last = self._spent.pop((client, write), (rate * limits.burst_seconds, now))
            left = min(rate * limits.burst_seconds, left + (now - last) * rate)
            self._spent[client, write] = (max(0.0, left - 1), now)
            while len(self._spent) > 1024:
                self._spent.popitem(last=False)
        return left >= 1

    def _bounded(self, receive: Receive) -> Receive:
        """The body, which ends where it is longer than allowed, whatever its head says."""
        left = self._access.limits.body_bytes

        async def bounded() -> MutableMapping[str, Any]:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            return {"type": "http.disconnect"} if left < 0 else message

        return bounded

    def _to_cookie(self) -> tuple[tuple[bytes, bytes], ...]:
        cookie = f"{TOKEN_COOKIE}={self._access.token}; Path=/; HttpOnly; SameSite=Strict"
        return ((b"location", b"/"), (b"set-cookie", cookie.encode()))


class _Asked:
    """What a request says about itself."""

    def __init__(self, scope: Scope) -> None:
        self.method = str(scope["method"])
        self.scheme = str(scope.get("scheme", "http"))
        self.target = bytes(scope.get("raw_path") or b"") + bytes(scope.get("query_string") or b"")
        self.client = str((scope.get("client") or ("", 0))[0])
        self._headers = {bytes(k).lower(): bytes(v) for k, v in scope["headers"]}
        self._query = bytes(scope.get("query_string") or b"").decode("latin-1")

    def header(self, name: str) -> str | None:
        found = self._headers.get(name.encode())
        return None if found is None else found.decode("latin-1")

    @property
    def is_question(self) -> bool:
        return self.target.startswith(b"/api/")

    @property
    def token_in_query(self) -> str | None:
        return parse_qs(self._query).get("token", [None])[0]

    def carried(self) -> str | None:
        """The token that the request carries, wherever it is."""
        bearer = self.header("authorization") or ""
        if bearer.lower().startswith("bearer "):
            return bearer[7:].strip()
        if self.header(TOKEN_HEADER) is not None:
            return self.header(TOKEN_HEADER)
        if self.token_in_query is not None:
            return self.token_in_query
        try:
            cookie = SimpleCookie(self.header("cookie") or "").get(TOKEN_COOKIE)
        except CookieError:
            return None
        return None if cookie is None else cookie.value


def _is_address(name: str) -> bool:
    """Whether this is an IP address: no name that somebody could point here."""
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _with_headers(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            told = {bytes(name).lower() for name, _ in message.get("headers", [])}
            more = [(name, value) for name, value in _HEADERS if name not in told]
            message = {**message, "headers": [*message.get("headers", []), *more]}
        await send(message)

    return sending


async def _say(
    send: Send, status: int, what: str, *, extra: tuple[tuple[bytes, bytes], ...]
) -> None:
    body = to_json({"problem": ProblemView("Refused", what)})
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*head, *extra]})
    await send({"type": "http.response.body", "body": body})


Phase = Literal["head", "body", "answer"]


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds on what a client may hold open; times are in seconds."""

    head_seconds: float = 10.0
    """From the connection, or the answer before, to the end of a request's head."""
    body_seconds: float = 10.0
    answer_seconds: float = 120.0
    """For making the answer and for the client to take it; work that is longer is answered with 202."""
    per_address: int = 32
    """A browser opens six. IPv6 addresses count by their network of 64 bits."""
    total: int = 120


@dataclass(slots=True, eq=False)
class ConnectionTable:
    """The open connections of a server, oldest first."""

    limits: ConnectionLimits = ConnectionLimits()
    _open: dict[BoundedProtocol, str] = field(default_factory=dict)

    def admit(self, connection: BoundedProtocol, address: str) -> bool:
        """Enter a new connection, in place of the oldest that waits where there are too many.

        False if all that could make room are being answered.
        """
        same = [one for one, other in self._open.items() if other == address]
        for full, candidates in (
            (len(same) >= self.limits.per_address, same),
            (len(self._open) >= self.limits.total, list(self._open)),
        ):
            if not full:
                continue
            waiting = [one for one in candidates if one in self._open and one.phase != "answer"]
            if not waiting:
                return False
            waiting[0].end()
        self._open[connection] = address
        return True

    def remove(self, connection: BoundedProtocol) -> None:
        """Forget a connection that has ended."""
        self._open.pop(connection, None)


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 with a time limit for each phase of a request."""

    def __init__(self, *args: Any, table: ConnectionTable, **options: Any) -> None:
        super().__init__(*args, **options)
        self.phase: Phase = "head"
        self._table = table
        self._timed: tuple[Phase, int] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection if there is room for it."""
        super().connection_made(transport)
        if self._table.admit(self, network_of(self.client[0] if self.client else "")):
            self._follow()
        else:
            self.end()

    def data_received(self, data: bytes) -> None:
        """Take bytes; they do not extend the time of the phase that they belong to."""
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._forget()
        super().connection_lost(exc)

    def end(self) -> None:
        """Close the connection at once, whatever it was doing."""
        self._forget()
        self.connections.discard(self)
        self.transport.abort()

    def _forget(self) -> None:
        self._table.remove(self)
        if self._timer is not None:
            self._timer.cancel()

    def _follow(self) -> None:
        """Start the timer of a phase where a phase begins."""
        if self.transport.is_closing():
            return
        limits, cycle = self._table.limits, self.cycle
        seconds: float
        if cycle is None or cycle.response_complete:
            self.phase, seconds = "head", limits.head_seconds
        elif cycle.more_body:
            self.phase, seconds = "body", limits.body_seconds
        else:
            self.phase, seconds = "answer", limits.answer_seconds
        if self._timed != (self.phase, id(cycle)):
            self._timed = (self.phase, id(cycle))
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_later(seconds, self.end)


def network_of(address: str) -> str:
    """Return what counts as one client: an IPv4 address, or the 64-bit network of an IPv6 address.

    >>> network_of("10.0.0.7"), network_of("2001:db8::1"), network_of("::ffff:10.0.0.7")
    ('10.0.0.7', '2001:db8::/64', '10.0.0.7')
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, 64), strict=False))
