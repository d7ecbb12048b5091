"""A store in a bucket of an object store: S3, Google Cloud Storage, Azure.

The commit is one PUT that the server accepts only if the name is free (`If-None-Match: *`, or what
its service calls it): one winner per name, without a lock, and no reader ever sees half a value.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import xxhash

from gradkeep._budgets import parse_bytes
from gradkeep._surroundings import cache_folder, import_extra
from gradkeep.errors import ReadOnlyError, StoreError, WriteFailedError
from gradkeep.store.backends._backend import Backend, Durability, Entry, Readable, flat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


FOLDER, SIZE = "GRADKEEP_CACHE", "GRADKEEP_CACHE_SIZE"
"""The environment says where the cache is (or `off`) and how large it may get."""
_DEFAULT_BYTES = 10 << 30
_DIGEST = 16
"""Bytes of the checksum at the end of each file."""
_SUFFIX = ".value"


class ReadCache:
    """A folder of values by name, at most `limit` bytes; the least lately used go first.

    >>> import tempfile
    >>> cache = ReadCache(Path(tempfile.mkdtemp()), 1000)
    >>> bytes(cache.get("one", lambda: b"far away")), bytes(cache.get("one", lambda: b"not asked"))
    (b'far away', b'far away')
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._checked: set[tuple[str, int, int]] = set()
        self._failures = 0
        self._lock = threading.Lock()

    def get(self, name: str, fetch: Callable[[], bytes | bytearray | memoryview]) -> memoryview:
        """The value of that name: from the folder if its bytes are whole, else what `fetch` brings."""
        kept = self.find(name)
        if kept is not None:
            return kept
        value = memoryview(fetch())
        # So many writes that fail end the writing, in this process.
        if len(value) + _DIGEST <= self.limit and self._failures < 3:
            try:
                self._put(name, value)
            except OSError:  # a full disk, a folder that may not be written: go without
                self._failures += 1
                self._make_room(self.limit // 2)
        return value

    def find(self, name: str) -> memoryview | None:
        """The value of that name, mapped, if it is there and whole."""
        path = self.folder / f"{name}{_SUFFIX}"
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size <= _DIGEST:
                    raise ValueError("cut off")
                mapped = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
                facts = os.fstat(file.fileno())
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            self._drop(path)
            return None
        value = mapped[: size - _DIGEST]
        seen = (name, facts.st_ino, facts.st_mtime_ns)
        if seen not in self._checked:
            if xxhash.xxh3_128_digest(value) != mapped[size - _DIGEST :]:
                self._drop(path)
                return None
            with contextlib.suppress(OSError):
                os.utime(path)  # used now: the last to go
                used = path.stat()
                seen = (name, used.st_ino, used.st_mtime_ns)
            self._checked.add(seen)
        return value

    def _put(self, name: str, value: memoryview) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            try:
                file.write(value)
                file.write(xxhash.xxh3_128_digest(value))
                file.close()
                os.replace(file.name, self.folder / f"{name}{_SUFFIX}")
            except BaseException:
                self._drop(Path(file.name))
                raise
        self._make_room(self.limit)

    def _make_room(self, limit: int) -> None:
        """Remove the least lately used until less than `limit` bytes are there."""
        with self._lock, contextlib.suppress(OSError):
            found = []
            for entry in os.scandir(self.folder):
                with contextlib.suppress(OSError):
                    facts = entry.stat(follow_symlinks=False)
                    found.append((facts.st_mtime_ns, facts.st_size, entry.path))
            total = sum(size for _, size, _ in found)
            if total <= limit:
                return
            for _, size, path in sorted(found):
                # The share of its limit that is left after room was made.
                if total <= 0.9 * limit:
                    break
                self._drop(Path(path))
                total -= size

    def _drop(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()


def cache_of_environment() -> ReadCache | None:
    """The cache that the environment names; by default 10 GiB below the user's cache folder."""
    said = os.environ.get(FOLDER, "")
    if said.lower() in ("off", "0", "no", "none"):
        return None
    folder = Path(said).expanduser() if said else cache_folder() / "values"
    size = os.environ.get(SIZE)
    limit = _DEFAULT_BYTES if not size else parse_bytes(size)
    return ReadCache(folder, limit)


SCHEMES = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "memory", "file")
_LARGEST = 5_000 << 20
"""The largest value that one conditional PUT takes everywhere: Azure ends here, S3 at 5 GiB."""
_TIMEOUT = "10min"
_CLIENT_OPTIONS = ("allow_http", "allow_invalid_certificates", "proxy_url", "timeout")
_OPENING_BYTES = 1 << 16
_PIECE_BYTES = 8 << 20
_ATTEMPTS = 64
"""Tries of a put whose name is deleted each time before it can be compared."""


class Bucket(Backend):
    """A bucket, or a folder in one, by its URL; `options` are those of `obstore.store.from_url`.

    Credentials come from the environment, as the provider's own tools take them. Large values that were
    read whole are kept on this machine, checked, in at most 10 GiB: GRADKEEP_CACHE names the folder or is
    `off`, GRADKEEP_CACHE_SIZE the limit. `memory://` is a new and empty place each time, `file://` a folder without fsync, whose links are followed: both
    are for trying things out. `gk.open("file:///folder")` is a folder as any other and no bucket.

    >>> bucket = Bucket("memory://")
    >>> bucket.put_if_absent("greeting", [b"hello"], durability="full")
    True
    >>> bucket.read("greeting")
    b'hello'
    """

    remote = True

    def __init__(self, url: str, **options: Any) -> None:
        self.location = url.rstrip("/")
        self._obs = import_extra("obstore", extra="s3", what="a bucket")
        import_extra("obstore.store", extra="s3", what="a bucket")
        self._store = _connect(self._obs, url, options)
        # In memory an e_tag is a counter, of a file it is made of times: neither is proof that a
        # value is still the same.
        self._trusted = urlsplit(url).scheme not in ("memory", "file")
        self._exclusive = not self._trusted
        """Whether it is known that a second PUT of the same name is refused."""
        self._cache = cache_of_environment() if self._trusted else None

    def put_if_absent(
        self, key: str, parts: Sequence[bytes | memoryview], *, durability: Durability
    ) -> bool:
        views = [flat(part) for part in parts]
        size = sum(map(len, views))
        if size > _LARGEST:
            raise WriteFailedError(
                f"one conditional PUT takes at most {_LARGEST} bytes, not {size}",
                path=self.describe(key),
                fix="choose fewer rows_per_segment, or put the store in a folder",
            )
        errors = self._obs.exceptions
        for _ in range(_ATTEMPTS):
            try:
                # A list is sent as it lies in memory; an empty one would be no value at all.
                self._obs.put(self._store, key, views or b"", mode="create", use_multipart=False)
            except errors.AlreadyExistsError:
                same = self._compare(key, parts)
                if same is None:
                    continue  # deleted since: the name is free again
                if not same:
                    raise self.conflict(key) from None
                return False
            except (errors.BaseError, OSError) as error:
                return self._after_failed_put(key, parts, error)
            if not self._exclusive:
                self._prove_exclusive(key, views)
            return True
        raise WriteFailedError(
            "the name is taken, but there is nothing under it",
            path=self.describe(key),
            fix="if others write here right now, run again; else look at the bucket's own tools",
        )

    def _prove_exclusive(self, key: str, views: Sequence[memoryview]) -> None:
        """Put the first value once more: a service that takes it does not heed the condition.

        The bytes are the same, so nothing is lost by it; but of two writers none would ever know.
        """
        errors = self._obs.exceptions
        for _ in range(2):  # the first time, somebody may just have deleted it
            try:
                self._obs.put(
                    self._store, key, list(views) or b"", mode="create", use_multipart=False
                )
            except errors.AlreadyExistsError:
                self._exclusive = True
                return
            except (errors.BaseError, OSError):
                return  # it says nothing about the service: the next value is tried, too
        raise self._not_exclusive(key, "a second PUT under the same name was taken, too")

    def _not_exclusive(self, key: str, found: str) -> WriteFailedError:
        return WriteFailedError(
            "this service has no conditional writes: of two writers, one would undo the other's work",
            path=self.describe(key),
            found=found,
            fix="use a service that has them (S3, Google Cloud, Azure, newer MinIO, Ceph, R2), or a folder",
        )

    def _after_failed_put(
        self, key: str, parts: Sequence[bytes | memoryview], error: Exception
    ) -> bool:
        """What a failed PUT means: the reply may be what was lost, not the value."""
        refused = self._is_refusal(error)
        try:
            same = self._compare(key, parts)
        except StoreError:
            same = None
        if same:
            return not refused
        if refused or same is None:
            raise self._failure(error, key) from error
        raise self.conflict(key) from error

    def _compare(self, key: str, parts: Sequence[bytes | memoryview]) -> bool | None:
        """Whether the value under `key` is the joined `parts`; None if there is none."""
        try:
            return self.same_bytes(key, parts)
        except FileNotFoundError:
            return None

    def open(self, key: str) -> Readable:
        with self._reading(key):
            return _Object(self._obs, self._store, key, self, trusted=self._trusted)

    def list(self, prefix: str) -> list[Entry]:
        with self._reading(prefix):
            found = self._obs.list_with_delimiter(self._store, prefix or None)
        folders = [Entry(_name(path), 0, is_folder=True) for path in found["common_prefixes"]]
        values = [
            Entry(_name(item["path"]), item["size"], False, item["last_modified"].timestamp())
            for item in found["objects"]
        ]
        return sorted([*folders, *values], key=lambda entry: entry.name)

    def exists(self, key: str) -> bool:
        try:
            with self._reading(key):
                self._obs.head(self._store, key)
        except FileNotFoundError:
            return False
        return True

    def delete(self, keys: Iterable[str], *, durability: Durability) -> int:
        # Asked first, as S3 does not tell whether there was anything to delete.
        there = self._present(keys)
        try:
            self._obs.delete(self._store, there)
        except FileNotFoundError:
            # Somebody else was faster with one of them, and the rest may still be there.
            return sum(self.delete([key], durability=durability) for key in self._present(there))
        except (self._obs.exceptions.BaseError, OSError) as error:
            raise self._failure(error, there[0]) from error
        return len(there)

    def _present(self, keys: Iterable[str]) -> Sequence[str]:
        """Those of the keys that are there; of many in one folder, told by its listing."""
        folders: dict[str, dict[str, None]] = {}
        for key in keys:
            folders.setdefault(key.rpartition("/")[0], {})[key] = None
        found = []
        for folder, members in folders.items():
            if len(members) < 8:
                found += [key for key in members if self.exists(key)]
            else:
                names = {entry.name for entry in self.list(folder) if not entry.is_folder}
                found += [key for key in members if _name(key) in names]
        return found

    def move_aside(self, key: str) -> str:
        aside = self.free_aside(key)
        try:
            self._obs.copy(self._store, key, aside)
            self._obs.delete(self._store, key)
        except (self._obs.exceptions.BaseError, OSError) as error:
            raise self._failure(error, key) from error
        return aside

    def leftovers(self, *, older_than: float) -> Sequence[str]:
        return ()  # a PUT that did not finish leaves nothing

    @contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        try:
            yield
        except self._obs.exceptions.BaseError as error:
            raise StoreError(
                "the bucket cannot be read",
                path=self.describe(key),
                found=_first_line(error),
                fix=_access(self.location),
            ) from error

    def _is_refusal(self, error: Exception) -> bool:
        errors = self._obs.exceptions
        denied = (errors.PermissionDeniedError, errors.UnauthenticatedError, PermissionError)
        # A disk's own words, which a file:// URL passes on as they are.
        told = any(text in str(error) for text in ("os error 13", "os error 30"))
        return isinstance(error, denied) or told

    def _failure(self, error: Exception, key: str) -> WriteFailedError:
        if isinstance(error, self._obs.exceptions.NotSupportedError) or "NotImplemented" in str(
            error
        ):
            return self._not_exclusive(key, _first_line(error))
        kind, what = WriteFailedError, "the write failed, and what was written is not there"
        fix = f"{_access(self.location)}; then run again: the work resumes"
        if self._is_refusal(error):
            kind, what = ReadOnlyError, "this place does not take writes"
            fix = "check the credentials and what they permit, or copy the store elsewhere"
        elif isinstance(error, FileNotFoundError):
            what = "there is no such bucket, or the value is gone"
            fix = "make the bucket first, or check its name and region"
        return kind(what, path=self.describe(key), found=_first_line(error), fix=fix)


class _Object(Readable):
    """One value; the request that opens it brings its first bytes along."""

    def __init__(self, obs: Any, store: Any, key: str, bucket: Bucket, *, trusted: bool) -> None:
        self._obs, self._store, self._key, self._bucket = obs, store, key, bucket
        self._opening = b""
        try:
            answer = obs.get(store, key, options={"range": (0, _OPENING_BYTES)})
            meta = answer.meta
            self._opening = bytes(answer.bytes())
        except obs.exceptions.BaseError:
            # A range of an empty value is an error, in every service's own words.
            meta = obs.head(store, key)
            if meta["size"] > 0:
                raise
        self.size = meta["size"]
        self.identity = (meta["e_tag"], meta["version"], meta["last_modified"], self.size)
        self.settled = trusted and meta["e_tag"] is not None
        # Without an e-tag nothing says that a value is still the same.
        self._cache = bucket._cache if self.settled else None

    def read(self, offset: int, length: int) -> bytes:
        stop = min(offset + length, self.size)
        if stop <= len(self._opening):
            return self._opening[offset:stop]
        if offset >= stop:
            return b""
        kept = None if self._cache is None else self._cache.find(self._cached_name())
        if kept is not None:
            return bytes(kept[offset:stop])
        with self._bucket._reading(self._key):
            return bytes(self._obs.get_range(self._store, self._key, start=offset, end=stop))

    def read_into(self, buffer: memoryview, offset: int) -> None:
        piece = self.read(offset, len(buffer))
        if len(piece) != len(buffer):
            raise EOFError(offset)
        buffer[:] = piece

    def map(self, soon: Sequence[tuple[int, int]] = ()) -> memoryview:
        if self.size <= len(self._opening):
            return memoryview(self._opening)
        if self._cache is None:
            return memoryview(self._whole())
        kept = self._cache.get(self._cached_name(), self._whole)
        return kept if len(kept) == self.size else memoryview(self._whole())

    def _cached_name(self) -> str:
        facts = "\0".join(map(str, (self._bucket.location, self._key, *self.identity)))
        return xxhash.xxh3_128_hexdigest(facts.encode())

    def _whole(self) -> bytearray:
        """All bytes, by several requests at a time."""
        whole = bytearray(self.size)
        view = memoryview(whole)
        view[: len(self._opening)] = self._opening
        starts = range(len(self._opening), self.size, _PIECE_BYTES)

        def bring(start: int) -> None:
            stop = min(start + _PIECE_BYTES, self.size)
            piece = self._obs.get_range(self._store, self._key, start=start, end=stop)
            if len(piece) != stop - start:
                raise EOFError(start + len(piece))
            view[start:stop] = piece

        with self._bucket._reading(self._key):
            if len(starts) == 1:
                bring(starts[0])
            else:
                from concurrent.futures import ThreadPoolExecutor

                # Large values come in so many pieces at a time: one connection seldom fills a
                # line.
                with ThreadPoolExecutor(8) as pool:
                    list(pool.map(bring, starts))
        return whole

    def close(self) -> None:
        """Nothing to let go of."""


def _connect(obs: Any, url: str, options: dict[str, Any]) -> Any:
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        raise StoreError(
            "this is not the URL of a place for a store",
            path=url,
            expected="s3://bucket/folder, gs://bucket/folder, az://container/folder, "
            "memory:// or file:///folder",
        )
    try:
        if scheme == "memory":
            return obs.store.MemoryStore()
        if scheme == "file":
            return obs.store.from_url(url, mkdir=True, **options)
        client = {**_client_options(scheme), **options.pop("client_options", {})}
        return obs.store.from_url(url, client_options=client, **options)
    except (obs.exceptions.BaseError, OSError) as error:
        raise StoreError(
            "this bucket cannot be opened",
            path=url,
            found=_first_line(error),
            fix="check the URL, the options and the credentials in the environment",
        ) from error


def _client_options(scheme: str) -> dict[str, str]:
    """What the environment says of the connection: options that are given hide it from obstore."""
    service = {"s3": "AWS", "s3a": "AWS", "gs": "GOOGLE"}.get(scheme, "AZURE")
    named = {name: os.environ.get(f"{service}_{name.upper()}") for name in _CLIENT_OPTIONS}
    # The usual 30 seconds are not enough for a segment over a slow line.
    return {"timeout": _TIMEOUT} | {name: value for name, value in named.items() if value}


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _access(location: str) -> str:
    return f"check the network, the credentials and what they permit for {location}"
