"""A stranger's package: a store in one SQLite file, written from the documentation of `Backend`."""

import sqlite3
import threading
import time
from urllib.parse import urlsplit

from gradkeep.errors import ConflictError
from gradkeep.store import Backend, Entry, Readable


class SqliteFile(Backend):
    """Every value is a row of one table; `sqlite:///folder/file.db` names the file."""

    def __init__(self, url):
        self.location = url
        self._path = urlsplit(url).path
        self._local = threading.local()
        self._all("create table if not exists vals (key text primary key, value blob, at real)")

    def put_if_absent(self, key, parts, *, durability):
        value = b"".join(bytes(memoryview(part).cast("B")) for part in parts)
        statement = "insert or ignore into vals values (?, ?, ?) returning 1"
        if self._all(statement, key, value, time.time()):
            return True
        present = self._all("select value from vals where key = ?", key)
        if not present:  # deleted since
            return self.put_if_absent(key, parts, durability=durability)
        if present[0][0] != value:
            raise ConflictError("the name is taken by other bytes", path=self.describe(key))
        return False

    def open(self, key):
        actual = self._all("select value, at from vals where key = ?", key)
        if not actual:
            raise FileNotFoundError(key)
        return Value(*actual[0])

    def list(self, prefix):
        start = f"{prefix}/" if prefix else ""
        rows = self._all(
            "select substr(key, ?), length(value), at from vals where substr(key, 1, ?) = ?",
            *(len(start) + 1, len(start), start),
        )
        actual = {}
        for rest, size, at in rows:
            name, slash, _ = rest.partition("/")
            actual[name] = Entry(name, 0, True) if slash else Entry(name, size, False, at)
        return [actual[name] for name in sorted(actual)]

    def exists(self, key):
        return bool(self._all("select 1 from vals where key = ?", key))

    def delete(self, keys, *, durability):
        statement = "delete from vals where key = ? returning 1"
        return sum(len(self._all(statement, key)) for key in keys)

    def move_aside(self, key):
        target = self.free_aside(key)
        self._all("update vals set key = ? where key = ?", target, key)
        return target

    def leftovers(self, *, older_than):
        return ()

    def _all(self, statement, *values):
        if not hasattr(self._local, "connection"):
            self._local.connection = sqlite3.connect(self._path, timeout=60, isolation_level=None)
            self._local.connection.execute("pragma synchronous = off")
        return self._local.connection.execute(statement, values).fetchall()


class Value(Readable):
    """One value, in memory."""

    def __init__(self, value, at):
        self._value = value
        self.size = len(value)
        self.identity = (at, len(value))
        self.settled = False

    def read(self, offset, length):
        return self._value[offset : offset + length]

    def read_into(self, buffer, offset):
        piece = self.read(offset, len(buffer))
        if len(piece) < len(buffer):
            raise EOFError(offset)
        buffer[:] = piece

    def map(self, prefetch=()):
        return memoryview(self._value)

    def close(self):
        pass
