"""Requirements of every backend: bytes under names."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from raises import raises

from gradkeep.errors import ConflictError

if TYPE_CHECKING:
    from gradkeep.store import Backend


def put(backend: Backend, key: str, *parts: bytes | memoryview) -> bool:
    """Put some parts without waiting for a disk."""
    return backend.put_if_absent(key, parts, durability="process")


class BackendTests:
    """The contract of `Backend`; every test gets an empty place."""

    def test_put_creates_once_and_the_same_bytes_again_are_no_error(self, backend: Backend) -> None:
        assert put(backend, "a/b/c", b"first") is True
        assert put(backend, "a/b/c", b"first") is False
        assert backend.put_if_absent("a/b/c", [b"fi", b"rst"], durability="full") is False
        assert backend.put_if_absent("a/b/d", [b"second"], durability="full") is True
        assert backend.read("a/b/c") == b"first"

    @pytest.mark.parametrize("other", [b"", b"firs", b"first!", b"First"])
    def test_other_bytes_under_a_taken_name_are_refused(
        self, backend: Backend, other: bytes
    ) -> None:
        put(backend, "name", b"first")
        with raises(ConflictError, "store.conflict"):
            put(backend, "name", other)
        assert backend.read("name") == b"first"

    @pytest.mark.parametrize("parts", [(), (b"",), (b"", b"")])
    def test_an_empty_value_is_a_value(self, backend: Backend, parts: tuple[bytes, ...]) -> None:
        assert put(backend, "empty", *parts) is True
        assert backend.exists("empty")
        assert backend.read("empty") == b""
        opened = backend.open("empty")
        assert (opened.size, opened.read(0, 10), opened.map().nbytes) == (0, b"", 0)
        opened.close()
        assert put(backend, "empty") is False
        with pytest.raises(ConflictError):
            put(backend, "empty", b"x")

    def test_parts_of_any_kind_and_size_are_joined(self, backend: Backend) -> None:
        large = np.random.default_rng(0).integers(0, 256, 3 << 20, np.uint8)
        numbers = np.arange(6, dtype=np.int64).reshape(2, 3)
        backing = bytearray(b"backing")
        whole = b"".join([b"head", large.tobytes(), numbers.tobytes(), b"backing"])
        parts = (b"head", b"", large.data, numbers.data, memoryview(backing))
        assert put(backend, "joined", *parts) is True
        # The caller may use its memory for something else as soon as put returns.
        large[:] = 0
        backing[:] = b"changed"
        assert backend.read("joined") == whole
        assert put(backend, "joined", whole) is False
        assert backend.same_bytes("joined", [whole[:5], whole[5:]])
        assert not backend.same_bytes("joined", [whole[:-1]])
        assert not backend.same_bytes("joined", [whole[:-1], b"\0"])

    def test_names_of_all_shapes_work(self, backend: Backend) -> None:
        keys = ["x", "a/b/c/d/e/f", "A.b_c+d=e@f-g.safetensors", f"{'n' * 100}/{'m' * 100}"]
        for key in keys:
            put(backend, key, key.encode())
        assert [backend.read(key) for key in keys] == [key.encode() for key in keys]

    def test_a_missing_name_is_not_found(self, backend: Backend) -> None:
        put(backend, "folder/there", b"1")
        for key in ("missing", "folder/missing", "folder/ther", "folder/there.not"):
            assert not backend.exists(key)
            with pytest.raises(FileNotFoundError):
                backend.open(key)
            with pytest.raises(FileNotFoundError):
                backend.read(key)
        assert backend.exists("folder/there")

    def test_a_listing_is_sorted_and_one_level_deep(self, backend: Backend) -> None:
        for key in ("top", "f/10", "f/9", "f/g/1", "f/g/2", "f/B"):
            put(backend, key, key.encode())
        actual = [(entry.name, entry.size, entry.is_folder) for entry in backend.list("f")]
        assert actual == [
            ("10", 4, False),
            ("9", 3, False),
            ("B", 3, False),
            ("g", 0, True),
        ]
        assert [entry.name for entry in backend.list("")] == ["f", "top"]
        assert [entry.name for entry in backend.list("f/g")] == ["1", "2"]
        assert backend.list("nothing") == []
        assert backend.list("f/nothing") == []

    def test_a_name_that_begins_another_is_not_its_folder(self, backend: Backend) -> None:
        for key in ("seg/1", "seg/10", "seg/1x/y", "segment/2"):
            put(backend, key, key.encode())
        assert [entry.name for entry in backend.list("seg")] == ["1", "10", "1x"]
        assert backend.list("se") == []
        assert backend.list("seg/1") == []
        assert backend.delete(["seg/1"], durability="process") == 1
        assert backend.read("seg/10") == b"seg/10"
        assert backend.read("seg/1x/y") == b"seg/1x/y"

    def test_a_long_listing_is_complete(self, backend: Backend) -> None:
        names = [f"{number:05d}" for number in range(1100)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: put(backend, f"many/{name}", b"x"), names))
        assert [entry.name for entry in backend.list("many")] == names
        assert backend.delete([f"many/{name}" for name in names], durability="full") == len(names)
        assert [entry.name for entry in backend.list("many")] == []

    def test_delete_counts_what_was_there_and_frees_the_name(self, backend: Backend) -> None:
        put(backend, "a", b"1")
        put(backend, "f/b", b"2")
        keys = iter(["a", "missing", "f/b", "f/missing"])
        assert backend.delete(keys, durability="full") == 2
        assert backend.delete(["a"], durability="process") == 0
        assert backend.delete([], durability="full") == 0
        assert not backend.exists("a")
        assert put(backend, "a", b"other") is True
        assert backend.read("a") == b"other"

    def test_ranges_are_read_and_end_with_the_value(self, backend: Backend) -> None:
        whole = bytes(range(256)) * 600  # more than a first request brings
        put(backend, "value", whole)
        opened = backend.open("value")
        assert opened.size == len(whole)
        for offset, length in [(0, 10), (70, 1), (70_000, 80_000), (0, len(whole)), (5, 0)]:
            assert opened.read(offset, length) == whole[offset : offset + length]
        assert opened.read(len(whole) - 3, 10) == whole[-3:]
        assert opened.read(len(whole), 10) == b""
        assert opened.read(len(whole) + 7, 10) == b""
        opened.close()

    def test_reading_into_a_buffer_fills_it_or_raises(self, backend: Backend) -> None:
        whole = bytes(range(256)) * 600
        put(backend, "value", whole)
        opened = backend.open("value")
        for offset, length in [(0, 10), (100_000, 50_000), (len(whole) - 5, 5), (3, 0)]:
            buffer = bytearray(length)
            opened.read_into(memoryview(buffer), offset)
            assert buffer == whole[offset : offset + length]
        for offset in (len(whole) - 5, len(whole), len(whole) + 7):
            with pytest.raises(EOFError):
                opened.read_into(memoryview(bytearray(6)), offset)
        opened.close()

    @pytest.mark.parametrize("size", [1, 100, 200_000])
    def test_a_map_is_the_whole_value_and_outlives_its_handle(
        self, backend: Backend, size: int
    ) -> None:
        whole = np.random.default_rng(size).bytes(size)
        put(backend, "value", whole)
        opened = backend.open("value")
        mapped = opened.map(prefetch=[(0, size)])
        opened.close()
        backend.delete(["value"], durability="process")
        assert mapped == whole

    def test_replaced_bytes_have_another_identity_or_are_not_settled(
        self, backend: Backend
    ) -> None:
        def identity() -> tuple[bool, tuple[object, ...]]:
            opened = backend.open("value")
            try:
                return opened.settled, opened.identity
            finally:
                opened.close()

        put(backend, "value", b"first")
        before, one = identity()
        backend.delete(["value"], durability="process")
        put(backend, "value", b"other")
        after, other = identity()
        assert one != other or not (before and after)

    def test_a_value_moved_aside_frees_its_name_and_is_kept(self, backend: Backend) -> None:
        target = []
        for content in (b"first", b"second", b"third"):
            put(backend, "blocks/a/b", content)
            target.append(backend.move_aside("blocks/a/b"))
            assert not backend.exists("blocks/a/b")
        assert [backend.read(key) for key in target] == [b"first", b"second", b"third"]
        assert {key.partition("/")[0] for key in target} == {"quarantine"}

    def test_finished_writes_leave_nothing_over(self, backend: Backend) -> None:
        put(backend, "a", b"1")
        put(backend, "a", b"1")
        with pytest.raises(ConflictError):
            put(backend, "a", b"2")
        assert list(backend.leftovers(older_than=0.0)) == []
        assert [entry.name for entry in backend.list("")] == ["a"]

    def test_messages_name_the_place_and_the_key(self, backend: Backend) -> None:
        put(backend, "a/b", b"1")
        with pytest.raises(ConflictError) as caught:
            put(backend, "a/b", b"2")
        assert caught.value.path is not None
        assert caught.value.path.endswith("a/b")
        assert backend.describe("a/b").startswith(backend.location)
        assert backend.describe("") == backend.location

    def test_of_many_writers_one_wins(self, backend: Backend) -> None:
        workers = 8

        def compete(worker: int) -> list[bool | None]:
            results: list[bool | None] = []
            for turn in range(10):
                together.wait()
                try:
                    results.append(put(backend, f"prize/{turn}", b"%d" % worker, b"x" * 5000))
                except ConflictError:
                    results.append(None)
            return results

        together = threading.Barrier(workers)
        with ThreadPoolExecutor(workers) as pool:
            outcomes = list(pool.map(compete, range(workers)))
        for turn in range(10):
            won = [worker for worker in range(workers) if outcomes[worker][turn] is True]
            assert len(won) == 1
            assert [result[turn] for result in outcomes].count(None) == workers - 1
            assert backend.read(f"prize/{turn}") == b"%d" % won[0] + b"x" * 5000

    def test_of_many_writers_of_the_same_bytes_none_fails(self, backend: Backend) -> None:
        def write(worker: int) -> list[bool]:
            return [put(backend, f"same/{turn}", b"content") for turn in range(20)]

        with ThreadPoolExecutor(8) as pool:
            outcomes = list(pool.map(write, range(8)))
        for turn in range(20):
            assert sum(result[turn] for result in outcomes) == 1

    def test_a_put_beside_deletes_never_fails_otherwise_than_by_conflict(
        self, backend: Backend
    ) -> None:
        def churn(worker: int) -> int:
            put_count = 0
            for _ in range(60):
                try:
                    put_count += put(backend, "lease", b"%d" % (worker % 2))
                except ConflictError:
                    continue
                backend.delete(["lease"], durability="process")
            return put_count

        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(churn, range(4))) >= 1
