"""Access control: tokens, origins, rate limits, and limits of connections."""

from __future__ import annotations

import hmac
import ipaddress
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from gradkeep.web._http import problem, to_json

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, MutableMapping

    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
    Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
    App = Callable[[Scope, Receive, Send], Awaitable[None]]


TOKEN_HEADER = "x-gradkeep-token"
TOKEN_COOKIE = "gradkeep_token"
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
    """Limits of one client's requests."""

    body_bytes: int = 64 << 10
    target_bytes: int = 8 << 10
    """Bytes of path and query string."""
    reads_per_second: float = 200.0
    writes_per_second: float = 20.0
    burst_seconds: float = 3.0


@dataclass(frozen=True, slots=True)
class Access:
    """Who may connect, and the token they must send."""

    token: str
    hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "[::1]")
    """Names that the Host header may have; with `remote` also any IP address."""
    port: int | None = None
    """The port that the Host header must have; None allows any."""
    remote: bool = False
    """Require the token for every request, not only for writes."""
    limits: RequestLimits = RequestLimits()


class Guard:
    """ASGI middleware that refuses requests before they reach the application."""

    def __init__(self, app: App, access: Access) -> None:
        self._app, self._access = app, access
        self._lock = threading.Lock()
        self._buckets: OrderedDict[tuple[str, bool], tuple[float, float]] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # web sockets are not served
        request = Request(scope)
        app = self._app
        refusal = self._refusal(request)
        if refusal is not None:
            app = _refused(*refusal)
        elif self._access.remote and "token" in request.query_params:
            # Move the token from the address into a cookie, so that the address can be shared.
            redirect = RedirectResponse("/", 303)
            redirect.set_cookie(TOKEN_COOKIE, self._access.token, httponly=True, samesite="strict")
            app = redirect
        await app(scope, self._limit_body(receive), _with_headers(send))

    def _refusal(self, request: Request) -> tuple[int, str] | None:
        access, is_write = self._access, request.method not in ("GET", "HEAD")
        headers, scope = request.headers, request.scope
        target = scope.get("raw_path", b"") + scope.get("query_string", b"")
        client = "" if request.client is None else request.client.host
        site = headers.get("sec-fetch-site")
        if len(target) > access.limits.target_bytes:
            return 414, "the address is too long"
        if not self._is_known_host(headers.get("host")):
            return 421, "unknown host name"
        if not self._within_rate(client, is_write=is_write):
            return 429, "too many requests; wait a moment"
        if access.remote and not self._is_token(_token(request)):
            return 401, "this page needs the token that `gradkeep serve` printed"
        if target.startswith(b"/api/") and site == "cross-site":
            return 403, "requests from other sites are not allowed"
        if not is_write:
            return None
        same_origin = f"{scope.get('scheme', 'http')}://{headers.get('host')}"
        if headers.get("origin") not in (None, same_origin):
            return 403, "writes from other sites are not allowed"
        if site not in (None, "same-origin", "none"):
            return 403, "writes from other sites are not allowed"
        if not self._is_token(headers.get(TOKEN_HEADER)):
            return 403, "writes need the page's token; reload the page"
        length = headers.get("content-length") or "0"
        if not length.isdecimal() or int(length) > access.limits.body_bytes:
            return 413, f"a request body has at most {access.limits.body_bytes} bytes"
        return None

    def _is_known_host(self, host: str | None) -> bool:
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

    def _is_token(self, token: str | None) -> bool:
        return token is not None and hmac.compare_digest(
            token.encode(errors="replace"), self._access.token.encode()
        )

    def _within_rate(self, client: str, *, is_write: bool) -> bool:
        """Take one token from the client's token bucket, if there is one."""
        limits = self._access.limits
        rate = limits.writes_per_second if is_write else limits.reads_per_second
        now = time.monotonic()
        with self._lock:
            tokens, last = self._buckets.pop((client, is_write), (rate * limits.burst_seconds, now))
            tokens = min(rate * limits.burst_seconds, tokens + (now - last) * rate)
            self._buckets[client, is_write] = (max(0.0, tokens - 1), now)
            while len(self._buckets) > 1024:
                self._buckets.popitem(last=False)
        return tokens >= 1

    def _limit_body(self, receive: Receive) -> Receive:
        """Disconnect when the body is longer than allowed, whatever its content-length says."""
        remaining = self._access.limits.body_bytes

        async def limited() -> MutableMapping[str, Any]:
            nonlocal remaining
            message = await receive()
            remaining -= len(message.get("body", b""))
            return {"type": "http.disconnect"} if remaining < 0 else message

        return limited


def _token(request: Request) -> str | None:
    """Return the token from the header, query string or cookie."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return bearer.strip()
    header, query = request.headers.get(TOKEN_HEADER), request.query_params.get("token")
    return header or query or request.cookies.get(TOKEN_COOKIE)


def _is_address(name: str) -> bool:
    """Return True for an IP address; a name could be pointed here by anybody."""
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _with_headers(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            names = {bytes(name).lower() for name, _ in message.get("headers", [])}
            more = [(name, value) for name, value in _HEADERS if name not in names]
            message = {**message, "headers": [*message.get("headers", []), *more]}
        await send(message)

    return sending


def _refused(status: int, what: str) -> Response:
    body = to_json({"problem": problem("Refused", what)})
    return Response(body, status, media_type="application/json")


Phase = Literal["head", "body", "answer"]


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of open connections; times are in seconds."""

    head_seconds: float = 10.0
    """From the connection, or the previous response, to the end of a request's head."""
    body_seconds: float = 10.0
    answer_seconds: float = 120.0
    """For computing and sending the response; longer work is answered with 202."""
    per_address: int = 32
    """A browser opens six. IPv6 addresses count by their /64 network."""
    total: int = 120


@dataclass(slots=True, eq=False)
class ConnectionTable:
    """The open connections of a server, oldest first."""

    limits: ConnectionLimits = ConnectionLimits()
    _open: dict[BoundedProtocol, str] = field(default_factory=dict)

    def admit(self, connection: BoundedProtocol, address: str) -> bool:
        """Add a connection, closing the oldest idle one if there are too many.

        Returns False if none of them is idle.
        """
        same = [one for one, other in self._open.items() if other == address]
        for full, candidates in (
            (len(same) >= self.limits.per_address, same),
            (len(self._open) >= self.limits.total, list(self._open)),
        ):
            if not full:
                continue
            idle = [one for one in candidates if one in self._open and one.phase != "answer"]
            if not idle:
                return False
            idle[0].end()
        self._open[connection] = address
        return True

    def remove(self, connection: BoundedProtocol) -> None:
        """Remove a closed connection."""
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
        """Accept a connection if the table admits it."""
        super().connection_made(transport)
        if self._table.admit(self, network_of(self.client[0] if self.client else "")):
            self._start_phase_timer()
        else:
            self.end()

    def data_received(self, data: bytes) -> None:
        """Receive bytes; they do not extend the time limit of their phase."""
        super().data_received(data)
        self._start_phase_timer()

    def on_response_complete(self) -> None:
        """Start the time limit of the next request."""
        super().on_response_complete()
        self._start_phase_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        self._remove()
        super().connection_lost(exc)

    def end(self) -> None:
        """Close the connection at once."""
        self._remove()
        self.connections.discard(self)
        self.transport.abort()

    def _remove(self) -> None:
        self._table.remove(self)
        if self._timer is not None:
            self._timer.cancel()

    def _start_phase_timer(self) -> None:
        """Start the timer of a phase when it begins."""
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
    """Return the client an address belongs to: an IPv4 address or an IPv6 /64 network.

    >>> network_of("10.0.0.7"), network_of("2001:db8::1"), network_of("::ffff:10.0.0.7")
    ('10.0.0.7', '2001:db8::/64', '10.0.0.7')
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((ip, 64), strict=False))
