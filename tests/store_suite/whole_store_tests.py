"""Requirements of a store on every backend: write, resume, version, share, notice damage."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from raises import raises

import gradkeep.store as gs
from gradkeep.errors import (
    ConflictError,
    DamagedError,
    InvalidRowsError,
    LeaseLostError,
    MissingRowsError,
    NotAStoreError,
    NotSealedError,
    SchemaMismatchError,
    StoreError,
)
from store_suite.examples import ExampleRow, batch_of, check, check_column, ids_of, schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gradkeep.store import Backend, Rows, Store
    from gradkeep.store.blocks._manifest import Manifest

KEY = gs.CaptureKey(checkpoint="final", split="train")
SHUFFLED = [ExampleRow(number) for number in (7, 3, 11, 0, 5, 2, 40, 1, 8, 70_000)]


def write(
    store: Store, rows: Sequence[ExampleRow], *, extend: bool = False, step: int = 3
) -> Manifest:
    """Write and seal rows, a few at a time."""
    writer = store.write(KEY, schema(), extend=extend)
    append(writer, rows, step=step)
    return writer.seal()


def append(writer: gs.Writer, rows: Sequence[ExampleRow], *, step: int = 3) -> None:
    """Append rows a few at a time."""
    for at in range(0, len(rows), step):
        part = rows[at : at + step]
        writer.append(ids_of(part), batch_of(part))


def holds(block: gs.Block, rows: Sequence[ExampleRow]) -> None:
    """Assert that a block holds exactly these rows, whichever way it is read."""
    assert len(block) == len(rows)
    assert block.ids.tolist() == ids_of(rows)
    at = 0
    for batch in block.stream():
        assert batch.first_row == at
        check(batch, rows[at : at + len(batch.ids)])
        at += len(batch.ids)
    assert at == len(rows)
    backwards = rows[::-1]
    check(block.read(ids_of(backwards)), backwards)


class WholeStoreTests:
    """The contract of a store on a backend; every test gets an empty place."""

    @pytest.fixture
    def store(self, backend: Backend) -> Store:
        return gs.open(backend, durability="process")

    def test_a_store_is_made_once_and_then_opened(self, backend: Backend) -> None:
        with pytest.raises(NotAStoreError):
            gs.open(backend, create=False)
        computed = gs.open(backend)
        assert gs.open(backend, create=False).uuid == computed.uuid
        assert computed.blocks() == []

    def test_another_folder_is_not_taken_for_a_store(self, backend: Backend) -> None:
        backend.put_if_absent("holiday.jpg", [b"..."], durability="process")
        with pytest.raises(NotAStoreError, match=r"holiday\.jpg"):
            gs.open(backend)

    def test_rows_come_back_as_exactly_as_their_encoding_promises(self, store: Store) -> None:
        manifest = write(store, SHUFFLED)
        assert [entry.rows for entry in manifest.segments] == [4, 4, 2]
        block = store.read(KEY)
        holds(block, SHUFFLED)
        check(block.read([5, 5, 70_000]), [ExampleRow(5), ExampleRow(5), ExampleRow(70_000)])
        check(block.read_rows([9, 0]), [SHUFFLED[9], SHUFFLED[0]])
        for array in block.schema.arrays:
            check_column(array, block.column(array.name), SHUFFLED)

    def test_batches_of_a_stream_are_as_long_as_was_asked(self, store: Store) -> None:
        write(store, SHUFFLED)
        batches = list(store.read(KEY).stream(["loss", "tokens"], batch_rows=3))
        assert [len(batch.ids) for batch in batches] == [3, 1, 3, 1, 2]
        assert [batch.first_row for batch in batches] == [0, 3, 4, 7, 8]
        assert list(batches[0]) == ["loss", "tokens"]

    def test_missing_rows_raise_and_only_nan_fills(self, store: Store) -> None:
        write(store, SHUFFLED)
        block = store.read(KEY)
        for missing in ([4], [7, 4], [10**9]):
            with pytest.raises(MissingRowsError):
                block.read(missing)
        actual = block.read([4, 7], ["loss", "suffix"], fill=math.nan)
        assert np.isnan(actual["loss"][0])
        assert np.isnan(actual["suffix"][0]).all()
        assert actual["loss"][1] == ExampleRow(7).values()["loss"]
        for fill, name in ((0.0, "loss"), (math.nan, "label"), (math.nan, "tokens")):
            with pytest.raises(InvalidRowsError):
                block.read([4], [name], fill=fill)

    @pytest.mark.parametrize("kept", range(len(SHUFFLED)))
    def test_an_interrupted_write_resumes_after_its_full_segments(
        self, store: Store, kept: int
    ) -> None:
        writer = store.write(KEY, schema())
        append(writer, SHUFFLED[:kept])
        if kept % 4:
            with pytest.raises(MissingRowsError):
                writer.close()
        else:
            writer.close()
        with pytest.raises(NotSealedError):
            store.read(KEY)
        full = kept // 4 * 4
        holds(store.read(KEY, live=True), SHUFFLED[:full])

        repeated = store.write(KEY, schema())
        assert repeated.needs(1) is (full == 0)
        assert repeated.needs(full + 1)
        append(repeated, SHUFFLED)
        repeated.seal()
        holds(store.read(KEY), SHUFFLED)

    def test_a_resumed_write_in_another_order_is_refused(self, store: Store) -> None:
        writer = store.write(KEY, schema())
        append(writer, SHUFFLED[:4])
        writer.close()
        repeated = store.write(KEY, schema())
        with raises(InvalidRowsError, "store.other_order"):
            append(repeated, SHUFFLED[::-1])

    def test_sealing_again_changes_nothing(self, store: Store) -> None:
        first = write(store, SHUFFLED)
        assert write(store, SHUFFLED, step=5) == first
        assert store.read(KEY).versions() == [0]
        rerun = store.write(KEY, schema())
        assert not rerun.needs(len(SHUFFLED))
        rerun.skip(ids_of(SHUFFLED))
        assert rerun.seal() == first

    def test_a_block_that_lacks_rows_is_not_sealed(self, store: Store) -> None:
        writer = store.write(KEY, schema(num_rows=6))
        append(writer, SHUFFLED[:5])
        with pytest.raises(MissingRowsError, match="1 rows are missing"):
            writer.seal()
        with pytest.raises(NotSealedError):
            store.read(KEY)

    def test_an_id_is_taken_once(self, store: Store) -> None:
        writer = store.write(KEY, schema())
        append(writer, SHUFFLED[:5])
        for ids in ([SHUFFLED[2].id], [99, 99], [-1]):
            with pytest.raises(InvalidRowsError):
                writer.append(ids, batch_of([ExampleRow(number) for number in range(len(ids))]))
        append(writer, SHUFFLED[5:])
        writer.seal()
        holds(store.read(KEY), SHUFFLED)

    def test_an_extended_block_keeps_its_older_version(self, store: Store) -> None:
        write(store, SHUFFLED)
        more = [ExampleRow(number) for number in range(100, 107)]
        assert write(store, more, extend=True).version == 1
        holds(store.read(KEY), SHUFFLED + more)
        holds(store.read(KEY, version=0), SHUFFLED)
        with pytest.raises(MissingRowsError, match="version 2"):
            store.read(KEY, version=2)

    def test_an_interrupted_extension_resumes(self, store: Store) -> None:
        write(store, SHUFFLED)
        more = [ExampleRow(number) for number in range(100, 109)]
        writer = store.write(KEY, schema(), extend=True)
        append(writer, more[:8])
        writer.close()
        holds(store.read(KEY), SHUFFLED)
        holds(store.read(KEY, live=True), SHUFFLED + more[:8])
        write(store, more, extend=True)
        holds(store.read(KEY), SHUFFLED + more)

    def test_a_repeated_run_does_not_seal_an_unfinished_extension(self, store: Store) -> None:
        write(store, SHUFFLED)
        more = [ExampleRow(number) for number in range(100, 106)]
        writer = store.write(KEY, schema(), extend=True)
        append(writer, more[:4])
        writer.close()
        assert write(store, SHUFFLED).version == 0
        assert write(store, more, extend=True).version == 1
        holds(store.read(KEY), SHUFFLED + more)

    def test_a_lost_segment_is_made_again_from_the_same_rows_only(self, store: Store) -> None:
        manifest = write(store, SHUFFLED)
        key = f"{KEY.folder}/{manifest.segments[1].file}"
        store.backend.delete([key], durability="process")
        swapped = [*SHUFFLED[:4], SHUFFLED[5], SHUFFLED[4], *SHUFFLED[6:]]
        other = [*SHUFFLED[:4], ExampleRow(SHUFFLED[4].id, salt=1), *SHUFFLED[5:]]
        for wrong in (swapped, other):
            with raises(InvalidRowsError, "store.other_rows"):
                write(store, wrong)
            assert not store.backend.exists(key)
        assert write(store, SHUFFLED) == manifest
        holds(store.read(KEY), SHUFFLED)

    def test_dropped_rows_are_gone_from_the_new_version_only(self, store: Store) -> None:
        write(store, SHUFFLED)
        assert store.drop_rows(KEY, [3, 8, 70_000]).version == 1
        remaining = [row for row in SHUFFLED if row.id not in (3, 8, 70_000)]
        holds(store.read(KEY), remaining)
        holds(store.read(KEY, version=0), SHUFFLED)
        with pytest.raises(MissingRowsError):
            store.drop_rows(KEY, [3])
        store.drop_rows(KEY, ids_of(remaining))
        holds(store.read(KEY), [])
        write(store, [ExampleRow(3, salt=1)], extend=True)
        holds(store.read(KEY), [ExampleRow(3, salt=1)])

    def test_gc_keeps_the_versions_that_were_asked_for(self, store: Store) -> None:
        write(store, SHUFFLED)
        store.drop_rows(KEY, [7])
        store.drop_rows(KEY, [3])
        dry = gs.gc(store, keep_versions=2, dry_run=True)
        assert store.read(KEY).versions() == [0, 1, 2]
        assert gs.gc(store, keep_versions=2) == dry
        assert store.read(KEY).versions() == [1, 2]
        holds(store.read(KEY, version=1), SHUFFLED[1:])
        gs.gc(store)
        holds(store.read(KEY), SHUFFLED[2:])
        with pytest.raises(MissingRowsError, match="version 1"):
            store.read(KEY, version=1)
        assert gs.gc(store).files == ()
        assert gs.verify(store.backend).healthy

    def test_gc_leaves_work_that_is_under_way(self, store: Store) -> None:
        write(store, SHUFFLED)
        more = [ExampleRow(number) for number in range(100, 108)]
        writer = store.write(KEY, schema(), extend=True)
        append(writer, more)
        writer.flush()
        gs.gc(store)
        holds(store.read(KEY, live=True), SHUFFLED + more)
        writer.seal()
        holds(store.read(KEY), SHUFFLED + more)

    def test_a_deleted_block_is_gone_and_can_be_written_anew(self, store: Store) -> None:
        write(store, SHUFFLED)
        store.delete(KEY)
        assert store.blocks() == []
        with raises(StoreError, "store.no_such_block"):
            store.read(KEY)
        write(store, SHUFFLED[:3])
        holds(store.read(KEY), SHUFFLED[:3])

    def test_another_schema_is_refused_with_a_diff(self, store: Store) -> None:
        weights = {"weights": "1a", "seed": 0}
        store.write(KEY, schema(fingerprints=weights)).seal()
        for changed in ({"weights": "2b", "seed": 0}, {"weights": "1a"}, {**weights, "more": 1}):
            with pytest.raises(SchemaMismatchError, match="fingerprint"):
                store.write(KEY, schema(fingerprints=changed))
        with pytest.raises(SchemaMismatchError, match="rows_per_segment"):
            store.write(KEY, schema(8, fingerprints=weights))
        assert store.write(KEY, schema(fingerprints=weights)).seal().version == 0

    def test_writers_that_share_the_work_make_one_block(self, store: Store) -> None:
        whole = schema(num_rows=len(SHUFFLED))
        for number in range(-(-len(SHUFFLED) // whole.rows_per_segment)):
            with store.write(KEY, whole, segments=range(number, number + 1)) as writer:
                append(writer, SHUFFLED)
        with store.write(KEY, whole) as writer:
            append(writer, SHUFFLED)
        holds(store.read(KEY), SHUFFLED)

    def test_records_and_keys_are_listed(self, store: Store) -> None:
        run = store.add_run(gs.Run("main", {"lr": 0.1}, code="abc"))
        later = store.add_checkpoint(gs.Checkpoint("main", "z", "99", step=2))
        first = store.add_checkpoint(gs.Checkpoint("main", "final", "17", step=1))
        scores = gs.ScoresKey("kernel")
        store.write(KEY, schema()).seal()
        store.write(scores, schema()).seal()
        store.rows("masks", schema(), num_rows=1)
        assert store.runs() == [run]
        assert store.checkpoints() == [first, later]
        assert store.blocks() == [KEY, scores]
        assert store.row_sets() == ["masks"]
        with pytest.raises(SchemaMismatchError, match="code"):
            store.add_run(gs.Run("main", {"lr": 0.1}, code="other"))

    def test_a_changed_byte_is_noticed_named_and_repaired(self, store: Store) -> None:
        manifest = write(store, SHUFFLED)
        key = f"{KEY.folder}/{manifest.segments[1].file}"
        good = store.backend.read(key)
        flipped = bytearray(good)
        flipped[-3] ^= 1
        store.backend.delete([key], durability="process")
        store.backend.put_if_absent(key, [bytes(flipped)], durability="process")

        with pytest.raises(DamagedError) as caught:
            holds(store.read(KEY), SHUFFLED)
        assert caught.value.tensor is not None
        verdict = gs.verify(store.backend, repair=True)
        assert {(item.path, item.tensor) for item in verdict.damage} == {(key, caught.value.tensor)}
        with pytest.raises(MissingRowsError):
            store.read(KEY).read(ids_of(SHUFFLED))
        write(store, SHUFFLED)
        assert store.backend.read(key) == good
        holds(store.read(KEY), SHUFFLED)
        assert gs.verify(store.backend).healthy

    def test_a_store_of_everything_verifies(self, store: Store) -> None:
        write(store, SHUFFLED)
        store.drop_rows(KEY, [7])
        rows = self._rows(store)
        self._finish(rows, rows.claim(count=3))
        rows.compact(rows_per_file=2)
        seen: list[tuple[int, int]] = []
        verdict = gs.verify(store.backend, progress=lambda done, of: seen.append((done, of)))
        assert verdict.healthy
        assert (verdict.unknown, verdict.orphans, verdict.repaired) == ((), (), ())
        assert seen[-1] == (verdict.files, verdict.files)

    def _rows(self, store: Store, num_rows: int = 6) -> Rows:
        return store.rows("masks", schema(), num_rows=num_rows)

    def _finish(self, rows: Rows, leases: Iterable[gs.Lease]) -> list[ExampleRow]:
        done = [ExampleRow(lease.row) for lease in leases]
        for lease, row in zip(leases, done, strict=True):
            assert rows.finish(lease, row.values())
        return sorted(done)

    def test_a_row_is_put_once(self, store: Store) -> None:
        rows = self._rows(store)
        assert rows.put(2, ExampleRow(2).values()) is True
        assert rows.put(2, ExampleRow(2).values()) is False
        with pytest.raises(ConflictError):
            rows.put(2, ExampleRow(2, salt=1).values())
        assert rows.put(2, ExampleRow(2, salt=1).values(), differing="keep") is False
        other_mask = {**ExampleRow(2).values(), "mask": ~ExampleRow(2).values()["mask"]}
        with pytest.raises(ConflictError):
            rows.put(2, other_mask, differing="keep")
        check(rows.read([2]), [ExampleRow(2)])
        for outside in (6, -1):
            with pytest.raises(InvalidRowsError):
                rows.put(outside, ExampleRow(0).values())

    def test_rows_that_are_not_done_raise_and_only_nan_fills(self, store: Store) -> None:
        rows = self._rows(store)
        rows.put(2, ExampleRow(2).values())
        with pytest.raises(MissingRowsError):
            rows.read([2, 3])
        actual = rows.read([3, 2], ["loss"], fill=math.nan)
        assert np.isnan(actual["loss"][0])
        assert actual["loss"][1] == ExampleRow(2).values()["loss"]
        with pytest.raises(InvalidRowsError):
            rows.read([3], ["loss"], fill=0.0)

    def test_a_claimed_row_is_not_claimed_again_until_its_lease_ends(self, store: Store) -> None:
        rows = self._rows(store)
        mine = rows.claim(owner="a", count=4)
        others = store.rows("masks").claim(owner="b", count=6)
        assert len(mine) == 4
        assert {lease.row for lease in mine + others} == set(range(6))
        assert rows.claim(owner="c") == []
        rows.release(mine[0])
        ended = rows.claim(owner="c", seconds=-1)
        assert [lease.row for lease in ended] == [mine[0].row]
        taken_over = store.rows("masks").claim(owner="d")
        assert [lease.row for lease in taken_over] == [mine[0].row]
        with pytest.raises(LeaseLostError):
            rows.renew(ended[0])
        assert rows.renew(taken_over[0]).row == mine[0].row

    def test_a_late_worker_leaves_the_leases_of_others_alone(self, store: Store) -> None:
        rows = self._rows(store, num_rows=1)
        (late,) = rows.claim(owner="late", seconds=-1)
        (between,) = rows.claim(owner="between")
        rows.release(between)
        (now,) = rows.claim(owner="now")
        with pytest.raises(LeaseLostError):
            rows.renew(late)
        rows.release(late)
        rows.fail(late, "too late")
        assert rows.claim(owner="next") == []
        assert [(state.state, state.owner) for state in rows.states()] == [("leased", "now")]
        renewed = rows.renew(rows.renew(now))
        with pytest.raises(LeaseLostError):
            rows.renew(now)
        assert rows.finish(renewed, ExampleRow(0).values())

    def test_failed_rows_are_tried_again_and_then_left(self, store: Store) -> None:
        rows = self._rows(store, num_rows=1)
        for attempt in range(3):
            (lease,) = rows.claim()
            rows.fail(lease, ValueError(f"attempt {attempt}"))
        assert rows.claim() == []
        (state,) = rows.states()
        assert (state.state, state.attempts) == ("failed", 3)
        assert "ValueError: attempt" in str(state.error)
        assert rows.retry() == 3
        assert [lease.row for lease in rows.claim()] == [0]

    def test_the_state_of_every_row_is_known(self, store: Store) -> None:
        rows = self._rows(store, num_rows=4)
        leases = sorted(rows.claim(owner="me", count=3), key=lambda lease: lease.row)
        rows.finish(leases[0], ExampleRow(leases[0].row).values())
        rows.fail(leases[1], "no luck")
        states = {state.row: state for state in store.rows("masks").states()}
        assert states[leases[0].row].state == "done"
        assert states[leases[1].row].state == "pending"
        assert (states[leases[1].row].attempts, states[leases[1].row].error) == (1, "no luck")
        assert (states[leases[2].row].state, states[leases[2].row].owner) == ("leased", "me")

    def test_compaction_moves_rows_and_changes_no_value(self, store: Store) -> None:
        rows = self._rows(store, num_rows=9)
        done = self._finish(rows, rows.claim(count=7))
        reader = store.rows("masks")
        assert rows.compact(rows_per_file=3) == 6
        for each in (rows, reader, store.rows("masks")):
            assert each.done().tolist() == ids_of(done)
            check(each.read(ids_of(done)), done)
        assert rows.compact(rows_per_file=3) == 0
        assert rows.compact(rows_per_file=3, partial=True) == 1
        check(reader.read(ids_of(done)), done)
        assert len(rows.packed_rows) == 7
        for row in done:
            assert reader.put(row.id, row.values()) is False
        with pytest.raises(ConflictError):
            reader.put(done[0].id, ExampleRow(done[0].id, salt=1).values())
        assert {lease.row for lease in rows.claim(count=9)} == set(range(9)) - set(ids_of(done))

    def test_rows_grow_and_never_shrink(self, store: Store) -> None:
        rows = self._rows(store, num_rows=2)
        self._finish(rows, rows.claim(count=2))
        rows.grow(5)
        assert store.rows("masks").num_rows == 5
        assert {lease.row for lease in rows.claim(count=5)} == {2, 3, 4}
        with pytest.raises(InvalidRowsError):
            rows.grow(4)

    def test_a_set_of_rows_with_another_schema_is_refused(self, store: Store) -> None:
        self._rows(store)
        changed: dict[str, Any] = {"fingerprints": {"data": "other"}}
        with pytest.raises(SchemaMismatchError, match="data"):
            store.rows("masks", schema(**changed))
