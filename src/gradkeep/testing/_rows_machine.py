"""Random sequences of everything workers do with rows, against a model of plain dictionaries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import gradkeep.store as gs
from gradkeep.errors import Conflict, InvalidRows, LeaseLost, MissingRows
from gradkeep.testing._examples import Row, check, ids_of, schema

if TYPE_CHECKING:
    from gradkeep.store import Backend, Lease, Rows

_NAME = "masks"
_ATTEMPTS = 2
_LONG, _OVER = 600.0, -1.0  # seconds of a lease that lasts, and of one that has ended


class RowsMachine(RuleBasedStateMachine):
    """Done rows are a dictionary; so are the leases that stand and the attempts that failed."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.store = gs.open(backend, durability="process")
        self.total = 5
        self.rows: Rows = self.store.rows(_NAME, schema(), num_rows=self.total)
        # Opened once and used to the end: what others do must reach it.
        self.other: Rows = self.store.rows(_NAME)
        self.done: dict[int, Row] = {}
        self.packed: set[int] = set()
        self.failures: dict[int, int] = {}
        self.standing: dict[int, Lease] = {}
        """By row, the lease that was taken last and not given back, ended or not."""
        self.held: list[Lease] = []
        """Leases that a worker thinks it has."""

    def free(self) -> set[int]:
        """The rows that may be claimed."""
        return {
            row
            for row in range(self.total)
            if row not in self.done
            and self.failures.get(row, 0) < _ATTEMPTS
            and (row not in self.standing or self.standing[row].expired)
        }

    @initialize(done=st.sets(st.integers(0, 4)), ended=st.integers(0, 3))
    def begin_with_some_rows(self, done: set[int], ended: int) -> None:
        # Else most examples end before there is much that could go wrong.
        for number in sorted(done):
            self.put(number, 0)
        self.claim(count=1 + ended, seconds=_OVER, owner="a")

    @rule(count=st.integers(1, 4), seconds=st.sampled_from([_LONG, _OVER]), owner=st.text())
    def claim(self, count: int, seconds: float, owner: str) -> None:
        free = self.free()
        leases = self.rows.claim(owner=owner, count=count, seconds=seconds, max_attempts=_ATTEMPTS)
        claimed = {lease.row for lease in leases}
        assert len(leases) == len(claimed) == min(count, len(free))
        assert claimed <= free
        self.standing.update({lease.row: lease for lease in leases})
        self.held += leases

    def draw_lease(self, data: st.DataObject) -> Lease:
        """A lease of some worker, which no longer has it afterwards."""
        return self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))

    def end(self, lease: Lease) -> None:
        """The lease no longer stands, if it did."""
        if self.standing.get(lease.row) == lease:
            del self.standing[lease.row]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), salt=st.integers(0, 1))
    def finish(self, data: st.DataObject, salt: int) -> None:
        lease = self.draw_lease(data)
        row = Row(lease.row, salt)
        assert self.rows.finish(lease, row.values()) is (row.id not in self.done)
        self.done.setdefault(row.id, row)
        self.end(lease)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        lease = self.draw_lease(data)
        self.rows.fail(lease, "out of luck")
        self.failures[lease.row] = self.failures.get(lease.row, 0) + 1
        self.end(lease)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = self.draw_lease(data)
        self.rows.release(lease)
        self.end(lease)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        lease = self.draw_lease(data)
        if self.standing.get(lease.row) == lease:
            renewed = self.rows.renew(lease, seconds=_LONG)
            assert (renewed.row, renewed.owner) == (lease.row, lease.owner)
            assert not renewed.expired
            self.standing[lease.row] = renewed
            self.held.append(renewed)
        else:
            with pytest.raises(LeaseLost):
                self.rows.renew(lease, seconds=_LONG)

    @rule(number=st.integers(0, 12), salt=st.integers(0, 1))
    def put(self, number: int, salt: int) -> None:
        row = Row(number, salt)
        if number >= self.total:
            with pytest.raises(InvalidRows):
                self.rows.put(number, row.values())
        elif number not in self.done:
            assert self.rows.put(number, row.values()) is True
            self.done[number] = row
        elif self.done[number] == row:
            assert self.rows.put(number, row.values()) is False
        else:
            with pytest.raises(Conflict):
                self.rows.put(number, row.values())

    @rule(rows=st.none() | st.sets(st.integers(0, 9), max_size=4))
    def retry(self, rows: set[int] | None) -> None:
        chosen = [row for row in self.failures if rows is None or row in rows]
        assert self.rows.retry(rows) == sum(self.failures.pop(row) for row in chosen)

    @rule(rows_per_file=st.integers(1, 4), partial=st.booleans())
    def compact(self, rows_per_file: int, partial: bool) -> None:
        loose = sorted(set(self.done) - self.packed)
        moved = len(loose) if partial else len(loose) // rows_per_file * rows_per_file
        assert self.rows.compact(rows_per_file=rows_per_file, partial=partial) == moved
        self.packed |= set(loose[:moved])
        assert self.rows.packed_rows == self.packed

    @rule(more=st.integers(0, 3))
    def grow(self, more: int) -> None:
        self.total += more
        self.rows.grow(self.total)

    @rule()
    def shrink(self) -> None:
        with pytest.raises(InvalidRows):
            self.rows.grow(self.total - 1)

    @rule(keep=st.integers(1, 3))
    def collect_garbage(self, keep: int) -> None:
        gs.gc(self.store, keep_versions=keep)
        for row in self.done:
            self.standing.pop(row, None)

    @rule()
    def verify(self) -> None:
        verdict = gs.verify(self.store.backend)
        assert (verdict.damage, verdict.unknown) == ((), ())

    @rule()
    def reopen(self) -> None:
        self.store = gs.open(self.store.backend, create=False, durability="process")
        self.rows = self.store.rows(_NAME)

    @invariant()
    def everything_done_is_there_and_nothing_else(self) -> None:
        done = [self.done[number] for number in sorted(self.done)]
        for handle in (self.rows, self.other):
            assert handle.num_rows == self.total
            assert handle.done().tolist() == ids_of(done)
            check(handle.read(ids_of(done)), done)
            for number in range(self.total + 1):
                assert handle.has(number) is (number in self.done)
            missing = set(range(self.total + 1)) - set(self.done)
            with pytest.raises(MissingRows):
                handle.read([*ids_of(done), min(missing)])

    @invariant()
    def every_state_is_known(self) -> None:
        for state in self.other.states(max_attempts=_ATTEMPTS):
            lease = self.standing.get(state.row)
            failed = self.failures.get(state.row, 0)
            assert state.attempts == failed
            if state.row in self.done:
                assert state.state == "done"
            elif lease is not None and not lease.expired:
                assert (state.state, state.owner) == ("leased", lease.owner)
            else:
                assert state.state == ("failed" if failed >= _ATTEMPTS else "pending")
