"""Many processes on the same rows, without any lock: each row once, one winner."""

import fcntl
import os
import random
import signal
import time
from collections import Counter

import faultkit as kit
import numpy as np
import pytest

from gradkeep import store as gs
from gradkeep.errors import ConflictError
from gradkeep.store.rows import _row_files

pytestmark = pytest.mark.slow
PROCESSES, ROWS, LIARS, KILLED = 64, 4096, 2, 8
SCHEMA = gs.Schema((gs.Array("outputs", shape=(3,), kind="data"), gs.Array("seed", "int64")))


def arrays(row, *, lie=False):
    return {"outputs": np.full(3, row + 0.5 + lie, np.float32), "seed": row * 7}


def assert_right(batch):
    np.testing.assert_array_equal(batch["seed"], batch.ids * 7)
    outputs = np.repeat(batch.ids[:, None] + 0.5, 3, axis=1)
    np.testing.assert_array_equal(batch["outputs"], outputs)


def open_rows(path):
    """The rows, in a process in which no lock works, as on some network filesystems."""
    for name in ("flock", "lockf", "fcntl"):
        setattr(fcntl, name, lambda *_, **__: 0)
    os.lockf = lambda *_: None
    return gs.open(path, durability="process").rows("models")


def work(path, log, index):
    """Claim and finish rows until all are done; four processes each search in the same order."""
    rows = open_rows(path)
    seconds = 0.01 if index % 3 == 0 else 1.0  # some leases end before the work does
    while leases := claim(rows, owner=f"worker-{index // 4}", seconds=seconds):
        for lease in leases:
            kit.tell(log, f"try {lease.row}")
            created = rows.finish(lease, arrays(lease.row), differing="raise")
            kit.tell(log, f"{'won' if created else 'met'} {lease.row}")


def claim(rows, **options):
    """Some rows, after waiting for leases to end if need be; none when all are done."""
    while True:
        leases = rows.claim(count=8, **options)
        if leases or len(rows.done()) == rows.num_rows:
            return leases
        time.sleep(0.05)


def lie(path, log, seed):
    """Put other values for rows that are done: each time they must be refused."""
    rows, chance = open_rows(path), random.Random(seed)
    while len(done := rows.done()) < rows.num_rows:
        for row in chance.sample(done.tolist(), min(8, len(done))):
            try:
                rows.put(row, arrays(row, lie=True))
                kit.tell(log, f"taken {row}")
            except ConflictError:
                kit.tell(log, f"refused {row}")
        time.sleep(0.02)


def pack(path, log, rows_per_file):
    """Compact again and again while others write and read."""
    rows = open_rows(path)
    while len(rows.done()) < rows.num_rows or rows.compact(rows_per_file=rows_per_file):
        kit.tell(log, f"packed {rows.compact(rows_per_file=rows_per_file)}")


def read(path, log, seed):
    """Read rows that are done while they are packed: they never go missing."""
    rows, chance = open_rows(path), random.Random(seed)
    while len(done := rows.done()) < rows.num_rows:
        if len(done):
            batch = rows.read(chance.choices(done.tolist(), k=10))
            assert_right(batch)
            kit.tell(log, "read 10")


def sweep(path, log, _):
    """Remove old versions meanwhile."""
    rows = open_rows(path)
    while len(rows.done()) < rows.num_rows:
        gs.gc(gs.open(path, durability="process"))
        kit.tell(log, "swept 1")
        time.sleep(0.02)


class Crew:
    """Processes with a log each."""

    def __init__(self, zygote, path, logs):
        self.zygote, self.path, self.logs = zygote, path, logs
        self.members = {}

    def start(self, job, argument):
        log = self.logs / f"{job.__name__}-{argument}"
        self.members[self.zygote.start(job, str(self.path), str(log), argument)] = log

    def kill(self, pid):
        """End a process; returns the last thing it said, if it was still at work."""
        os.kill(pid, signal.SIGKILL)
        code, log = self.zygote.wait(pid), self.members.pop(pid)
        assert code in (0, -signal.SIGKILL), self.zygote.errors()
        return kit.read_acks(log)[-1:] if code else []

    def wait(self):
        for pid in self.members:
            assert self.zygote.wait(pid) == 0, self.zygote.errors()

    def told(self, word):
        lines = (line.split() for log in self.logs.iterdir() for line in kit.read_acks(log))
        return Counter(int(number) for reported, number in lines if reported == word)


@pytest.fixture
def crew(ram, zygote):
    (ram / "logs").mkdir()
    return Crew(zygote, ram / "store", ram / "logs")


def make_rows(path, num_rows):
    return gs.open(path, durability="process").rows("models", SCHEMA, num_rows=num_rows)


def test_every_row_has_one_winner(crew):
    rows = make_rows(crew.path, ROWS)
    for index in range(PROCESSES - LIARS):
        crew.start(work, index)
    for seed in range(LIARS):
        crew.start(lie, seed)
    chance = random.Random(5)
    workers = [pid for pid, log in crew.members.items() if log.name.startswith("work")]
    last_words = []
    for pid in chance.sample(workers, KILLED):
        time.sleep(chance.uniform(0, 0.3))
        last_words += crew.kill(pid)
    assert last_words
    crew.wait()
    won = crew.told("won")
    assert set(won.values()) == {1}
    # A winner may have been killed before it could say so.
    untold = set(range(ROWS)) - set(won)
    assert {f"try {row}" for row in untold} <= set(last_words)
    assert sum(crew.told("try").values()) > ROWS, "no two processes ever met"
    assert crew.told("refused")
    assert not crew.told("taken")
    assert rows.done().tolist() == list(range(ROWS))
    assert_right(rows.read(range(ROWS)))
    assert gs.verify(gs.LocalDisk(crew.path)).healthy


def test_rows_are_packed_while_others_write_read_and_sweep(crew):
    count = 640
    rows = make_rows(crew.path, count)
    for index in range(12):
        crew.start(work, index)
    for rows_per_file in (5, 16, 31):
        crew.start(pack, rows_per_file)
    for seed in range(3):
        crew.start(read, seed)
    crew.start(lie, 0)
    crew.start(sweep, 0)
    crew.wait()
    # A row that is packed before its winner looks again counts as there already: at most one.
    assert set(crew.told("won").values()) == {1}
    assert not crew.told("taken")
    assert crew.told("read")
    rows.compact(partial=True)
    packed = gs.Block(rows._backend, rows.folder)
    assert sorted(packed.ids.tolist()) == list(range(count))
    assert not list(crew.path.rglob("rows/*/*.safetensors"))
    assert_right(rows.read(range(count)))
    assert gs.verify(gs.LocalDisk(crew.path)).healthy


class DieAtRemoval(kit.Watched):
    """Stops when the rows' own files are to be removed, as a killed process does."""

    def around(self, name, call, *args):
        if name == "unlink" and "/rows/" in args[0]:
            raise KeyboardInterrupt
        return call(*args)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_version_published_while_another_chooses_its_rows_packs_none_twice(
    moment, ram, monkeypatch
):
    rows = make_rows(ram, 4)
    for row in range(4):
        rows.put(row, arrays(row))
    other = gs.open(gs.LocalDisk(ram, syscalls=DieAtRemoval())).rows("models")
    latest = _row_files.latest_manifest

    def meanwhile(*args):
        monkeypatch.setattr(_row_files, "latest_manifest", latest)
        actual = latest(*args) if moment == "after" else None
        with pytest.raises(KeyboardInterrupt):
            other.compact(rows_per_file=4)
        return actual if moment == "after" else latest(*args)

    monkeypatch.setattr(_row_files, "latest_manifest", meanwhile)
    rows.compact(rows_per_file=4)
    assert gs.Block(rows._backend, rows.folder).ids.tolist() == [0, 1, 2, 3]
    assert not list(ram.rglob("rows/*/*.safetensors"))
