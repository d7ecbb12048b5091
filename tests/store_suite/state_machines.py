"""Random sequences of everything one can do with a block or rows, against plain lists and dictionaries."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import gradkeep.store as gs
from gradkeep.errors import (
    ConflictError,
    InvalidRowsError,
    LeaseLostError,
    MissingRowsError,
    NotSealedError,
    StoreError,
)
from store_suite.examples import ExampleRow, batch_of, check, ids_of, schema
from store_suite.whole_store_tests import KEY, append, holds

if TYPE_CHECKING:
    from gradkeep.store import Backend, Block, Lease, Rows, Writer

_PER_SEGMENT = 4
_IDS = st.integers(0, 60)
_NO_SUCH_ID = 1000


class BlockStateMachine(RuleBasedStateMachine):
    """Versions are lists of rows; rows that are written but not sealed are one list more."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.store = gs.open(backend, durability="process")
        self.salt = 0
        self.forget()

    def forget(self) -> None:
        """The model of a block that does not exist."""
        self.begun = False
        self.versions: dict[int, list[ExampleRow]] = {}
        self.first_run: list[ExampleRow] | None = []
        """Rows that a run without `extend` must append; None once the block was extended."""
        self.given: list[ExampleRow] = []
        """Rows after the newest version, given to the writer or left by one that was closed."""
        self.acknowledged = 0
        self.writer: Writer | None = None
        self.taken: set[int] = set()
        """The ids that the writer refuses."""

    @property
    def newest(self) -> list[ExampleRow]:
        """The rows of the newest version."""
        return self.versions[max(self.versions)] if self.versions else []

    @initialize(sealed=st.lists(_IDS, max_size=9, unique=True), more=st.integers(0, 9))
    def begin_with_some_rows(self, sealed: list[int], more: int) -> None:
        # Else most examples end before there is much that could go wrong.
        self.open_a_writer(step=1, skip=False)
        self.append_rows(sealed)
        self.seal()
        self.open_a_writer(step=1, skip=False)
        self.append_rows([100 + number for number in range(more)])

    @precondition(lambda self: self.writer is None)
    @rule(step=st.integers(1, 9), skip=st.booleans())
    def open_a_writer(self, step: int, skip: bool) -> None:
        self.writer = self.store.write(KEY, schema(_PER_SEGMENT), extend=bool(self.versions))
        self.begun = True
        self.taken = {*ids_of(self.newest), *ids_of(self.given)}
        # What an earlier writer committed is given again, as a resumed run would.
        assert self.writer.needs(len(self.given)) is False
        assert self.writer.needs(len(self.given) + 1)
        if skip:
            self.writer.skip(ids_of(self.given))
        else:
            append(self.writer, self.given, step=step)

    @precondition(lambda self: self.writer is not None)
    @rule(ids=st.lists(_IDS, max_size=11, unique=True))
    def append_rows(self, ids: list[int]) -> None:
        assert self.writer is not None
        self.salt += 1
        rows = [ExampleRow(number, self.salt) for number in ids if number not in self.taken]
        self.writer.append(ids_of(rows), batch_of(rows))
        self.given += rows
        self.taken |= set(ids_of(rows))

    @precondition(lambda self: self.writer is not None and self.taken)
    @rule(data=st.data())
    def append_a_row_that_is_there(self, data: st.DataObject) -> None:
        assert self.writer is not None
        row = ExampleRow(data.draw(st.sampled_from(sorted(self.taken))))
        with pytest.raises(InvalidRowsError):
            self.writer.append([row.id], batch_of([row]))

    @precondition(lambda self: self.writer is not None)
    @rule()
    def flush(self) -> None:
        assert self.writer is not None
        self.writer.flush()
        self.acknowledged = self._full()

    @precondition(lambda self: self.writer is not None)
    @rule(by_error=st.booleans())
    def stop_without_sealing(self, by_error: bool) -> None:
        assert self.writer is not None
        if by_error:
            with contextlib.suppress(KeyboardInterrupt), self.writer:
                raise KeyboardInterrupt
        elif self._full() < len(self.given):
            with pytest.raises(MissingRowsError):
                self.writer.close()
        else:
            self.writer.close()
        del self.given[self._full() :]
        self.acknowledged = len(self.given)
        self.writer = None

    @precondition(lambda self: self.writer is not None)
    @rule()
    def seal(self) -> None:
        assert self.writer is not None
        manifest = self.writer.seal()
        expected = max(self.versions, default=-1)
        if self.given or not self.versions:
            expected += 1
            if not self.versions:
                self.first_run = list(self.given)
            elif self.given:
                self.first_run = None
            self.versions[expected] = self.newest + self.given
        assert manifest.version == expected
        self.given, self.acknowledged, self.writer = [], 0, None

    @precondition(
        lambda self: (
            self.writer is None and self.versions and self.first_run is not None and not self.given
        )
    )
    @rule(step=st.integers(1, 9))
    def run_the_whole_work_again(self, step: int) -> None:
        assert self.first_run is not None
        writer = self.store.write(KEY, schema(_PER_SEGMENT))
        assert not writer.needs(len(self.first_run))
        append(writer, self.first_run, step=step)
        assert writer.seal().version == max(self.versions)

    @precondition(lambda self: self.newest)
    @rule(data=st.data())
    def drop_rows(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(ids_of(self.newest)), min_size=1))
        manifest = self.store.drop_rows(KEY, ids)
        assert manifest.version == max(self.versions) + 1
        self.versions[manifest.version] = [row for row in self.newest if row.id not in ids]

    @precondition(lambda self: self.versions)
    @rule(data=st.data())
    def drop_rows_that_are_not_there(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from([*ids_of(self.newest), _NO_SUCH_ID])))
        with pytest.raises(MissingRowsError):
            self.store.drop_rows(KEY, [*ids, _NO_SUCH_ID])

    @precondition(lambda self: self.versions)
    @rule(data=st.data())
    def read_a_version(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.versions)))
        holds(self.store.read(KEY, version=version), self.versions[version])

    @precondition(lambda self: self.versions)
    @rule(ids=st.lists(_IDS, max_size=8))
    def read_some_ids(self, ids: list[int]) -> None:
        block, there = self.store.read(KEY), {row.id: row for row in self.newest}
        missing = [number for number in ids if number not in there]
        if missing:
            with pytest.raises(MissingRowsError):
                block.read(ids)
        else:
            check(block.read(ids), [there[number] for number in ids])
        filled = block.read(ids, ["scaled"], fill=math.nan)
        shown = np.isnan(filled["scaled"]).all(axis=1)
        assert [number for number, gone in zip(ids, shown, strict=True) if gone] == missing

    @rule(version=st.sampled_from([-1, 50]))
    def read_a_version_that_is_not_there(self, version: int) -> None:
        with pytest.raises(StoreError):
            self.store.read(KEY, version=version)

    @rule(keep=st.integers(1, 3))
    def collect_garbage(self, keep: int) -> None:
        gs.gc(self.store, keep_versions=keep)
        for version in sorted(self.versions)[:-keep]:
            del self.versions[version]

    @precondition(lambda self: self.writer is None and self.begun)
    @rule()
    def delete_the_block(self) -> None:
        self.store.delete(KEY)
        self.forget()

    @rule()
    def verify(self) -> None:
        verdict = gs.verify(self.store.backend)
        assert (verdict.damage, verdict.unknown) == ((), ())

    @rule()
    def reopen(self) -> None:
        self.store = gs.open(self.store.backend, create=False, durability="process")

    @invariant()
    def everything_sealed_is_there_and_nothing_else(self) -> None:
        assert self.store.blocks() == ([KEY] if self.begun else [])
        if self.versions:
            block = self.store.read(KEY)
            assert block.versions() == sorted(self.versions)
            holds(block, self.newest)
        elif self.begun:
            with pytest.raises(NotSealedError):
                self.store.read(KEY)

    @invariant()
    def everything_acknowledged_is_seen_live_and_nothing_else(self) -> None:
        if not self.begun:
            return
        live: Block = self.store.read(KEY, live=True)
        fresh = len(live) - len(self.newest)
        # A full segment may still be on its way; half a one is never seen.
        assert self.acknowledged <= fresh <= self._full()
        assert fresh % _PER_SEGMENT == 0
        holds(live, self.newest + self.given[:fresh])

    def teardown(self) -> None:
        if self.writer is not None:
            self.stop_without_sealing(by_error=True)

    def _full(self) -> int:
        return len(self.given) // _PER_SEGMENT * _PER_SEGMENT


_NAME = "masks"
_ATTEMPTS = 2
_LONG, _OVER = 600.0, -1.0  # seconds of a lease that lasts, and of one that has ended


class RowsStateMachine(RuleBasedStateMachine):
    """Done rows are a dictionary; so are the leases that stand and the attempts that failed."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.store = gs.open(backend, durability="process")
        self.total = 5
        self.rows: Rows = self.store.rows(_NAME, schema(), num_rows=self.total)
        # Opened once and used to the end: what others do must reach it.
        self.other: Rows = self.store.rows(_NAME)
        self.done: dict[int, ExampleRow] = {}
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
        row = ExampleRow(lease.row, salt)
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
            with pytest.raises(LeaseLostError):
                self.rows.renew(lease, seconds=_LONG)

    @rule(number=st.integers(0, 12), salt=st.integers(0, 1))
    def put(self, number: int, salt: int) -> None:
        row = ExampleRow(number, salt)
        if number >= self.total:
            with pytest.raises(InvalidRowsError):
                self.rows.put(number, row.values())
        elif number not in self.done:
            assert self.rows.put(number, row.values()) is True
            self.done[number] = row
        elif self.done[number] == row:
            assert self.rows.put(number, row.values()) is False
        else:
            with pytest.raises(ConflictError):
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
        with pytest.raises(InvalidRowsError):
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
            with pytest.raises(MissingRowsError):
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
