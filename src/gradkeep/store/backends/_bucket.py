"""Store in a bucket of an object store: S3, Google Cloud Storage, Azure.

The commit is one PUT that the server accepts only if the name is free (`If-None-Match: *`, or the
equivalent of its service): one winner per name, without a lock, and readers never see partial values.
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
from gradkeep._environment import cache_folder, import_extra
from gradkeep.errors import ReadOnlyError, StoreError, WriteFailedError
from gradkeep.store.backends._backend import BUCKETS, Backend, Durability, Entry, Readable, flat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


FOLDER, SIZE = "GRADKEEP_CACHE", "GRADKEEP_CACHE_SIZE"
"""Environment variables: folder of the cache (or `off`), and its largest size."""
_DEFAULT_BYTES = 10 << 30
_DIGEST = 16
"""Bytes of the checksum at the end of each cached file."""
_SUFFIX = ".value"


class ReadCache:
    """Folder of cached values by name with at most `limit` bytes; evicts the least recently used.

    >>> import tempfile
    >>> cache = ReadCache(Path(tempfile.mkdtemp()), 1000)
    >>> bytes(cache.get("one", lambda: b"remote")), bytes(cache.get("one", lambda: b"not called"))
    (b'remote', b'remote')
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._checked: set[tuple[str, int, int]] = set()
        self._failures = 0
        self._lock = threading.Lock()

    def get(self, name: str, fetch: Callable[[], bytes | bytearray | memoryview]) -> memoryview:
        """Return a cached value if its checksum matches, else fetch and cache it."""
        cached = self.find(name)
        if cached is not None:
            return cached
        value = memoryview(fetch())
        # After three failed writes this process stops writing to the cache.
        if len(value) + _DIGEST <= self.limit and self._failures < 3:
            try:
                self._put(name, value)
            except OSError:  # a full disk or a read-only folder: do not cache
                self._failures += 1
                self._make_room(self.limit // 2)
        return value

    def find(self, name: str) -> memoryview | None:
        """Return a cached value, mapped, or None if it is missing or damaged."""
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
                os.utime(path)  # most recently used
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
        """Evict the least recently used values until the cache is 10% below `limit`."""
        with self._lock, contextlib.suppress(OSError):
            files = []
            for entry in os.scandir(self.folder):
                with contextlib.suppress(OSError):
                    facts = entry.stat(follow_symlinks=False)
                    files.append((facts.st_mtime_ns, facts.st_size, entry.path))
            total = sum(size for _, size, _ in files)
            if total <= limit:
                return
            for _, size, path in sorted(files):
                if total <= 0.9 * limit:
                    break
                self._drop(Path(path))
                total -= size

    def _drop(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()


def cache_of_environment() -> ReadCache | None:
    """Return the cache set by the environment; by default 10 GiB below the user's cache folder."""
    setting = os.environ.get(FOLDER, "")
    if setting.lower() in ("off", "0", "no", "none"):
        return None
    folder = Path(setting).expanduser() if setting else cache_folder() / "values"
    size = os.environ.get(SIZE)
    limit = _DEFAULT_BYTES if not size else parse_bytes(size)
    return ReadCache(folder, limit)


_LARGEST = 5_000 << 20
"""Largest value that one conditional PUT accepts everywhere: Azure's limit; S3's is 5 GiB."""
_TIMEOUT = "10min"
_CLIENT_OPTIONS = ("allow_http", "allow_invalid_certificates", "proxy_url", "timeout")
_OPENING_BYTES = 1 << 16
_PIECE_BYTES = 8 << 20
_ATTEMPTS = 64
"""Attempts of a put whose name is deleted each time before it can be compared."""


class Bucket(Backend):
    """Bucket, or a folder in one, by its URL.

    Credentials come from the environment, as for the provider's own tools. Large values are cached on
    this machine with a checksum, in at most 10 GiB: GRADKEEP_CACHE sets the folder or is `off`,
    GRADKEEP_CACHE_SIZE sets the limit. For experiments, `memory://` is a new and empty place each time, and
    `file://` a folder without fsync whose links are followed. (`gk.open("file:///folder")` opens a normal
    folder, not a bucket.)

    Args:
        url: For example `s3://bucket/folder`, `gs://bucket/folder` or `az://container/folder`.
        options: Passed to `obstore.store.from_url`.

    Raises:
        StoreError: The URL or the options are wrong.
        MissingExtraError: obstore is not installed.

    Example:
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
        # The e_tag is a counter for memory:// and made of times for file://: neither proves that a
        # value is unchanged.
        self._trusted = urlsplit(url).scheme not in ("memory", "file")
        self._exclusive = not self._trusted
        """True once the service has refused a second PUT of the same name."""
        self._cache = cache_of_environment() if self._trusted else None

    def put_if_absent(
        self, key: str, parts: Sequence[bytes | memoryview], *, durability: Durability
    ) -> bool:
        views = [flat(part) for part in parts]
        size = sum(map(len, views))
        if size > _LARGEST:
            raise WriteFailedError(
                "the value is too large for one conditional PUT",
                code="store.value_too_large",
                path=self.describe(key),
                found=f"{size} bytes",
                expected=f"at most {_LARGEST}",
                fix="Use a smaller rows_per_segment, or a store in a folder.",
            )
        errors = self._obs.exceptions
        for _ in range(_ATTEMPTS):
            try:
                # A list is sent without a copy; an empty list is not accepted.
                self._obs.put(self._store, key, views or b"", mode="create", use_multipart=False)
            except errors.AlreadyExistsError:
                same = self._compare(key, parts)
                if same is None:
                    continue  # deleted meanwhile: the name is free
                if not same:
                    raise self.conflict(key) from None
                return False
            except (errors.BaseError, OSError) as error:
                return self._after_failed_put(key, parts, error)
            if not self._exclusive:
                self._prove_exclusive(key, views)
            return True
        raise WriteFailedError(
            "the name is taken, but its value cannot be found",
            code="store.name_without_value",
            path=self.describe(key),
            fix="If other processes write here now, run again; otherwise inspect the bucket.",
        )

    def _prove_exclusive(self, key: str, views: Sequence[memoryview]) -> None:
        """Repeat the first PUT: a service that accepts it ignores the condition.

        The bytes are the same, so nothing is lost; but such a service would let writers overwrite each other.
        """
        errors = self._obs.exceptions
        for _ in range(2):  # it may have been deleted before the first attempt
            try:
                self._obs.put(
                    self._store, key, list(views) or b"", mode="create", use_multipart=False
                )
            except errors.AlreadyExistsError:
                self._exclusive = True
                return
            except (errors.BaseError, OSError):
                return  # inconclusive: try again with the next value
        raise self._not_exclusive(key, "a second PUT under the same name succeeded")

    def _not_exclusive(self, key: str, reason: str) -> WriteFailedError:
        return WriteFailedError(
            "the service has no conditional writes, so writers would overwrite each other",
            code="store.no_conditional_writes",
            path=self.describe(key),
            found=reason,
            fix="Use a service that has them (S3, Google Cloud, Azure, newer MinIO, Ceph, R2), or a folder.",
        )

    def _after_failed_put(
        self, key: str, parts: Sequence[bytes | memoryview], error: Exception
    ) -> bool:
        """Return the result of a failed PUT: perhaps only its reply was lost."""
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
        """Return True if the value equals the joined `parts`, None if it does not exist."""
        try:
            return self.same_bytes(key, parts)
        except FileNotFoundError:
            return None

    def open(self, key: str) -> Readable:
        with self._reading(key):
            return _Object(self._obs, self._store, key, self, trusted=self._trusted)

    def list(self, prefix: str) -> list[Entry]:
        with self._reading(prefix):
            listing = self._obs.list_with_delimiter(self._store, prefix or None)
        folders = [Entry(_name(path), 0, is_folder=True) for path in listing["common_prefixes"]]
        values = [
            Entry(_name(item["path"]), item["size"], False, item["last_modified"].timestamp())
            for item in listing["objects"]
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
        # Checked first: S3 does not report if there was anything to delete.
        there = self._present(keys)
        try:
            self._obs.delete(self._store, there)
        except FileNotFoundError:
            # Another process deleted one of them; the rest may still exist.
            return sum(self.delete([key], durability=durability) for key in self._present(there))
        except (self._obs.exceptions.BaseError, OSError) as error:
            raise self._failure(error, there[0]) from error
        return len(there)

    def _present(self, keys: Iterable[str]) -> Sequence[str]:
        """Return the keys that exist; many keys of one folder are looked up in its listing."""
        folders: dict[str, dict[str, None]] = {}
        for key in keys:
            folders.setdefault(key.rpartition("/")[0], {})[key] = None
        present = []
        for folder, members in folders.items():
            if len(members) < 8:
                present += [key for key in members if self.exists(key)]
            else:
                names = {entry.name for entry in self.list(folder) if not entry.is_folder}
                present += [key for key in members if _name(key) in names]
        return present

    def move_aside(self, key: str) -> str:
        target = self.free_aside(key)
        try:
            self._obs.copy(self._store, key, target)
            self._obs.delete(self._store, key)
        except (self._obs.exceptions.BaseError, OSError) as error:
            raise self._failure(error, key) from error
        return target

    def leftovers(self, *, older_than: float) -> Sequence[str]:
        return ()  # a PUT that did not finish leaves nothing

    @contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        try:
            yield
        except self._obs.exceptions.BaseError as error:
            raise StoreError(
                "the bucket cannot be read",
                code="store.unreadable_bucket",
                path=self.describe(key),
                found=_first_line(error),
                fix=_access(self.location),
            ) from error

    def _is_refusal(self, error: Exception) -> bool:
        errors = self._obs.exceptions
        denied = (errors.PermissionDeniedError, errors.UnauthenticatedError, PermissionError)
        # System errors of a file:// URL are passed on as text.
        is_os_error = any(text in str(error) for text in ("os error 13", "os error 30"))
        return isinstance(error, denied) or is_os_error

    def _failure(self, error: Exception, key: str) -> WriteFailedError:
        if isinstance(error, self._obs.exceptions.NotSupportedError) or "NotImplemented" in str(
            error
        ):
            return self._not_exclusive(key, _first_line(error))
        kind, code, message = WriteFailedError, None, "the write failed, and the value is not there"
        fix = f"{_access(self.location)} Then run again: the work resumes."
        if self._is_refusal(error):
            kind, message = ReadOnlyError, "the store is not writable"
            fix = "Check the credentials and their permissions, or copy the store elsewhere."
        elif isinstance(error, FileNotFoundError):
            code, message = (
                "store.no_such_bucket",
                "there is no such bucket, or the value is missing",
            )
            fix = "Create the bucket first, or check its name and region."
        return kind(message, code=code, path=self.describe(key), found=_first_line(error), fix=fix)


class _Object(Readable):
    """One value; the request that opens it also reads its first bytes."""

    def __init__(self, obs: Any, store: Any, key: str, bucket: Bucket, *, trusted: bool) -> None:
        self._obs, self._store, self._key, self._bucket = obs, store, key, bucket
        self._opening = b""
        try:
            answer = obs.get(store, key, options={"range": (0, _OPENING_BYTES)})
            meta = answer.meta
            self._opening = bytes(answer.bytes())
        except obs.exceptions.BaseError:
            # Requesting a range of an empty value is an error that differs between services.
            meta = obs.head(store, key)
            if meta["size"] > 0:
                raise
        self.size = meta["size"]
        self.identity = (meta["e_tag"], meta["version"], meta["last_modified"], self.size)
        self.settled = trusted and meta["e_tag"] is not None
        # Without an e_tag a changed value cannot be detected.
        self._cache = bucket._cache if self.settled else None

    def read(self, offset: int, length: int) -> bytes:
        stop = min(offset + length, self.size)
        if stop <= len(self._opening):
            return self._opening[offset:stop]
        if offset >= stop:
            return b""
        cached = None if self._cache is None else self._cache.find(self._cached_name())
        if cached is not None:
            return bytes(cached[offset:stop])
        with self._bucket._reading(self._key):
            return bytes(self._obs.get_range(self._store, self._key, start=offset, end=stop))

    def read_into(self, buffer: memoryview, offset: int) -> None:
        piece = self.read(offset, len(buffer))
        if len(piece) != len(buffer):
            raise EOFError(offset)
        buffer[:] = piece

    def map(self, prefetch: Sequence[tuple[int, int]] = ()) -> memoryview:
        if self.size <= len(self._opening):
            return memoryview(self._opening)
        if self._cache is None:
            return memoryview(self._whole())
        cached = self._cache.get(self._cached_name(), self._whole)
        return cached if len(cached) == self.size else memoryview(self._whole())

    def _cached_name(self) -> str:
        facts = "\0".join(map(str, (self._bucket.location, self._key, *self.identity)))
        return xxhash.xxh3_128_hexdigest(facts.encode())

    def _whole(self) -> bytearray:
        """Read all bytes with several parallel requests."""
        whole = bytearray(self.size)
        view = memoryview(whole)
        view[: len(self._opening)] = self._opening
        starts = range(len(self._opening), self.size, _PIECE_BYTES)

        def fetch(start: int) -> None:
            stop = min(start + _PIECE_BYTES, self.size)
            piece = self._obs.get_range(self._store, self._key, start=start, end=stop)
            if len(piece) != stop - start:
                raise EOFError(start + len(piece))
            view[start:stop] = piece

        with self._bucket._reading(self._key):
            if len(starts) == 1:
                fetch(starts[0])
            else:
                from concurrent.futures import ThreadPoolExecutor

                # One connection rarely uses the whole bandwidth.
                with ThreadPoolExecutor(8) as pool:
                    list(pool.map(fetch, starts))
        return whole

    def close(self) -> None:
        """Do nothing: there is no handle to close."""


def _connect(obs: Any, url: str, options: dict[str, Any]) -> Any:
    scheme = urlsplit(url).scheme
    if scheme not in (*BUCKETS, "file"):
        raise StoreError(
            "the URL has an unknown scheme",
            code="store.invalid_url",
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
            "the bucket cannot be opened",
            code="store.unopenable_bucket",
            path=url,
            found=_first_line(error),
            fix="Check the URL, the options and the credentials in the environment.",
        ) from error


def _client_options(scheme: str) -> dict[str, str]:
    """Read connection options from the environment; passing options hides it from obstore."""
    service = {"s3": "AWS", "s3a": "AWS", "gs": "GOOGLE"}.get(scheme, "AZURE")
    named = {name: os.environ.get(f"{service}_{name.upper()}") for name in _CLIENT_OPTIONS}
    # The default of 30 seconds is too short for a segment on a slow connection.
    return {"timeout": _TIMEOUT} | {name: value for name, value in named.items() if value}


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _access(location: str) -> str:
    return f"Check the network, and the credentials and their permissions for {location}."
