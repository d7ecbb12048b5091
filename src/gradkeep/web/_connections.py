"""Limits on connections: time for a request's head, body and answer, and how many an address has.

uvicorn itself limits neither: a client that never finishes its requests would close the page for all.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import asyncio

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
