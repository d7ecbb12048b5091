"""The read cache of buckets: values are right or fetched again, and its size is limited."""

import errno
import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from s3_server import ONCE, connect

import gradkeep as gk
from gradkeep.errors import GradkeepError, StoreError
from gradkeep.store.backends import _bucket
from gradkeep.store.backends._bucket import ReadCache, cache_of_environment

KEY = gk.store.CaptureKey("final", "train")
ROWS, WIDE = 40, 20_000
"""Segments of 800 kB: larger than what the opening request brings."""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADKEEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def values():
    return np.random.default_rng(0).random((ROWS, WIDE), np.float32)


def write(url, address):
    """Put the rows there, and keep nothing here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADKEEP_CACHE", "off")
        store = gk.open(connect(url, address))
    schema = gk.store.Schema((gk.store.Array("x", shape=(WIDE,)),), rows_per_segment=10)
    with store.write(KEY, schema) as writer:
        if writer.needs(ROWS):
            writer.append(range(ROWS), {"x": values()})


@pytest.fixture
def url(request):
    return f"s3://bucket/{abs(hash(request.node.nodeid)):x}"


def test_a_second_reader_fetches_no_segment_again(line, url, cache):
    write(url, line.address)
    carried = []
    line.fault = lambda method: carried.append(method) or "none"
    requested = []
    for _ in range(2):
        store = gk.open(connect(url, line.address), create=False)
        carried.clear()
        assert np.array_equal(store.read(KEY).column("x"), values())
        requested.append(len(carried))
    segments = len(list(cache.glob("*.value")))
    assert segments == 4
    assert requested[1] == requested[0] - segments


def test_large_values_come_in_pieces_at_once(s3, url, monkeypatch):

    monkeypatch.setattr(_bucket, "_PIECE_BYTES", 100_000)
    bucket = connect(url, s3)
    content = np.random.default_rng(1).bytes(1_234_567)
    bucket.put_if_absent("key", [content], durability="full")
    assert bytes(bucket.open("key").map()) == content


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "folder", "link"])
def test_a_damaged_copy_is_fetched_again(line, url, cache, damage, tmp_path):
    write(url, line.address)
    gk.open(connect(url, line.address)).read(KEY).column("x")
    for path in cache.glob("*.value"):
        content = bytearray(path.read_bytes())
        if damage == "flip":
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        elif damage == "cut":
            path.write_bytes(content[:-100])
        elif damage == "empty":
            path.write_bytes(b"")
        elif damage == "folder":
            path.unlink()
            path.mkdir()
        else:
            path.unlink()
            path.symlink_to(tmp_path / "nowhere")
    for _ in range(2):
        store = gk.open(connect(url, line.address), create=False)
        assert np.array_equal(store.read(KEY).column("x"), values())


def test_a_full_disk_goes_without(line, url, cache, monkeypatch):
    write(url, line.address)

    def full(*_):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(_bucket.os, "replace", full)
    store = gk.open(connect(url, line.address), create=False)
    for _ in range(3):
        assert np.array_equal(store.read(KEY).column("x"), values())
    assert list(cache.iterdir()) == []


def test_a_really_full_disk_goes_without(line, url, small_disk, monkeypatch):
    place = small_disk("size=1m")
    monkeypatch.setenv("GRADKEEP_CACHE", str(place / "cache"))
    write(url, line.address)
    store = gk.open(connect(url, line.address), create=False)
    assert np.array_equal(store.read(KEY).column("x"), values())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 400)), max_size=40))
def test_it_never_takes_more_than_its_limit_and_never_says_something_else(steps):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        cache = ReadCache(Path(folder), 1000)
        for number, size in steps:
            name = f"{number}-{size}"
            content = bytes([number]) * size
            assert bytes(cache.get(name, lambda content=content: content)) == content
            assert sum(file.stat().st_size for file in Path(folder).iterdir()) <= 1000


def test_many_threads_and_processes_share_it(tmp_path):
    caches = [ReadCache(tmp_path, 5000) for _ in range(4)]
    wrong = []

    def work(cache, seed):
        rng = np.random.default_rng(seed)
        for _ in range(100):
            number = int(rng.integers(20))
            if (
                bytes(cache.get(str(number), lambda n=number: bytes([n]) * 300))
                != bytes([number]) * 300
            ):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(cache, n)) for n, cache in enumerate(caches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_environment_says_where_and_how_much(tmp_path, monkeypatch):
    for off in ("off", "OFF", "0", "none"):
        monkeypatch.setenv("GRADKEEP_CACHE", off)
        assert cache_of_environment() is None
    monkeypatch.setenv("GRADKEEP_CACHE", str(tmp_path))
    monkeypatch.setenv("GRADKEEP_CACHE_SIZE", "2MiB")
    actual = cache_of_environment()
    assert (actual.folder, actual.limit) == (tmp_path, 2 << 20)
    monkeypatch.setenv("GRADKEEP_CACHE_SIZE", "much")
    with pytest.raises(GradkeepError, match="number of bytes"):
        cache_of_environment()
    monkeypatch.delenv("GRADKEEP_CACHE")
    monkeypatch.delenv("GRADKEEP_CACHE_SIZE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_of_environment().folder == tmp_path / "xdg" / "gradkeep" / "values"


@pytest.mark.parametrize("fault", ["cut body", 500, "lose reply", "lose request", "stall"])
def test_a_read_over_a_bad_line_is_right_or_an_error(line, url, cache, fault):
    write(url, line.address)
    quick = {"allow_http": True, "timeout": "1s"}
    counted = iter(range(10**9))
    line.fault = lambda method: fault if next(counted) % 5 == 4 and method == "GET" else "none"
    right = 0
    for _ in range(4):
        line.stalled.clear()
        bucket = connect(url, line.address, retry_config=ONCE)
        if fault == "stall":
            from s3_server import ANYBODY

            from gradkeep.store import Bucket

            bucket = Bucket(
                url, endpoint=line.address, client_options=quick, retry_config=ONCE, **ANYBODY
            )
        try:
            actual = gk.open(bucket, create=False).read(KEY).column("x")
        except StoreError:
            continue  # which names the bucket and what to check
        assert np.array_equal(actual, values())
        right += 1
    line.fault = lambda method: "none"
    assert np.array_equal(gk.open(connect(url, line.address)).read(KEY).column("x"), values())
    assert os.listdir(cache)


def test_a_slow_line_is_only_slow(line, url, cache):
    write(url, line.address)
    line.fault = lambda method: "slow body" if method == "GET" else "none"
    assert np.array_equal(gk.open(connect(url, line.address)).read(KEY).column("x"), values())
