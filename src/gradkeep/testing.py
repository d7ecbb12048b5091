"""Tests that every store backend must pass; third-party backends run them as they are.

    class TestMyBackend(StoreTests):
        @pytest.fixture
        def backend(self, tmp_path):
            return MyBackend(tmp_path)

`gradkeep.store.register_backend` then makes the backend known by a URL.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

import gradkeep.store as gs
from gradkeep.errors import ConflictError, MissingExtraError

try:
    import pytest
except ImportError as error:
    raise MissingExtraError("gradkeep.testing needs pytest", fix="pip install pytest") from error

__all__ = ["StoreTests"]


def _put(backend: gs.Backend, key: str, *parts: bytes | memoryview) -> bool | None:
    """Put a value without waiting for a disk; None if other bytes are there."""
    try:
        return backend.put_if_absent(key, parts, durability="process")
    except ConflictError:
        return None


class StoreTests:
    """The contract of `gradkeep.store.Backend`, and a whole store on it.

    Subclass it as `TestMyBackend` and override the fixture `backend`.
    """

    @pytest.fixture
    def backend(self) -> gs.Backend:
        """A backend that is empty at the start of every test."""
        raise NotImplementedError("override this fixture: it returns an empty backend")

    def test_a_name_is_taken_once(self, backend: gs.Backend) -> None:
        assert _put(backend, "a/b", b"fi", b"", memoryview(b"rst")) is True
        assert backend.put_if_absent("a/b", [b"first"], durability="full") is False
        assert _put(backend, "a/b", b"other") is None
        assert _put(backend, "a/empty") is True
        assert (backend.read("a/b"), backend.read("a/empty")) == (b"first", b"")

    def test_of_many_writers_one_wins(self, backend: gs.Backend) -> None:
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda one: _put(backend, "a", b"%d" % one), range(8)))
        assert sorted(results, key=bool) == [None] * 7 + [True]
        assert backend.read("a") == b"%d" % results.index(True)

    def test_a_listing_is_sorted_and_one_level_deep(self, backend: gs.Backend) -> None:
        for key in ("f/10", "f/9", "f/g/1", "f/g/2", "fg"):
            _put(backend, key, key.encode())
        entries = [(entry.name, entry.size, entry.is_folder) for entry in backend.list("f")]
        assert entries == [("10", 4, False), ("9", 3, False), ("g", 0, True)]
        assert [entry.name for entry in backend.list("")] == ["f", "fg"]
        assert backend.list("f/nothing") == []

    def test_a_missing_name_is_not_found(self, backend: gs.Backend) -> None:
        _put(backend, "a/b", b"1")
        assert (backend.exists("a/b"), backend.exists("a/c")) == (True, False)
        with pytest.raises(FileNotFoundError):
            backend.open("a/c")

    def test_ranges_are_read_and_maps_outlive_their_handle(self, backend: gs.Backend) -> None:
        value = np.random.default_rng(0).bytes(200_000)
        _put(backend, "value", value)
        opened = backend.open("value")
        buffer = bytearray(50_000)
        opened.read_into(memoryview(buffer), 100_000)
        mapped = opened.map([(0, len(value))])
        assert (opened.size, opened.read(199_000, 5000)) == (len(value), value[199_000:])
        with pytest.raises(EOFError):
            opened.read_into(memoryview(bytearray(6)), len(value) - 5)
        opened.close()
        assert (bytes(buffer), bytes(mapped)) == (value[100_000:150_000], value)

    def test_deleted_and_moved_names_are_free(self, backend: gs.Backend) -> None:
        for key in ("a", "f/b", "f/c"):
            _put(backend, key, key.encode())
        assert backend.delete(["a", "missing", "f/b"], durability="full") == 2
        moved = backend.move_aside("f/c")
        assert (moved.partition("/")[0], backend.read(moved)) == ("quarantine", b"f/c")
        assert [_put(backend, key, b"new") for key in ("a", "f/b", "f/c")] == [True] * 3
        assert list(backend.leftovers(older_than=0.0)) == []

    def test_a_whole_store_works(self, backend: gs.Backend) -> None:
        store, key = gs.open(backend), gs.CaptureKey(checkpoint="final", split="train")
        schema = gs.Schema((gs.Array("loss"),), rows_per_segment=2)
        with store.write(key, schema) as writer:
            writer.append([3, 1, 2], {"loss": [0.5, 2.0, 4.0]})
        store.drop_rows(key, [1])
        gs.gc(store)
        assert store.read(key).read([2, 3])["loss"].tolist() == [4.0, 0.5]
        rows = store.rows("rows", schema, num_rows=2)
        for lease in rows.claim(count=2):
            rows.finish(lease, {"loss": float(lease.row)})
        rows.compact(partial=True)
        assert store.rows("rows").read([1, 0])["loss"].tolist() == [1.0, 0.0]
        assert gs.verify(backend).healthy
