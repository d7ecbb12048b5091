"""Helpers of the fault tests: rows with known values, resumable work, checks, a fork server.

A piece of work is a generator: it does one thing after the other to a store and yields a word each
time the store has acknowledged something. It can be begun again at any moment, on whatever a kill
left behind, and must then come to the same end.
"""

import contextlib
import faulthandler
import functools
import gc as garbage
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

import numpy as np

from gradkeep import store as gs
from gradkeep.store.backends._disk import Syscalls
from gradkeep.store.blocks import _manifest
from gradkeep.store.catalog import _sql

ARRAYS = (
    gs.Array("loss"),
    gs.Array("label", "int64"),
    gs.Array("fc.prefix", shape=(5,), kind="prefix", layer="fc", encoding="float16"),
    gs.Array("fc.suffix", shape=(3,), kind="suffix", layer="fc", encoding="bfloat16"),
    gs.Array("fc.scaled", shape=(2, 2), kind="gradient", layer="fc", encoding="float16-scaled"),
    gs.Array("tokens", shape=(2,), kind="data", ragged=True),
    gs.Array("mask", "bool", shape=(11,), kind="mask", encoding="bits"),
)
ROWS_PER_SEGMENT = 4
IDS = [47, 3, 12, 0, 31, 8, 22, 5, 40, 1, 19]  # three segments, the last one short
MORE_IDS = [60, 61, 52, 70, 2]  # the next version: one full segment and a short one
DROPPED = [12, 0, 40]  # in two of the segments
POSSIBLE_VERSIONS = (
    IDS,
    IDS + MORE_IDS,
    [i for i in IDS if i not in DROPPED],
    [i for i in IDS + MORE_IDS if i not in DROPPED],
)
SCHEMA = gs.Schema(
    ARRAYS, rows_per_segment=ROWS_PER_SEGMENT, fingerprints={"weights": "1a", "seed": 7}
)
KEY = gs.CaptureKey("final", "train")
RUN = gs.Run("main", config={"lr": 0.1}, data="d1")
CHECKPOINT = gs.Checkpoint("main", "final", weights="1a", step=60, lr=0.1)
NUM_ROWS = 5
FAILING_ROW = 3
PLAIN_ROWS = (0, 2)


def values(ids):
    """Return the right value of every array for these ids, exact in each encoding."""
    ids = np.asarray(ids, np.int64)
    column = ids[:, None]
    return {
        "loss": (ids * 0.25 + 1).astype(np.float32),
        "label": ids % 7,
        "fc.prefix": ((column * 3 + np.arange(5)) % 17 - 8).astype(np.float32),
        "fc.suffix": ((column * 5 + np.arange(3)) % 23 / 8).astype(np.float32),
        "fc.scaled": ((column * 7 + np.arange(4)) % 13 + 1).astype(np.float32).reshape(-1, 2, 2),
        "tokens": [np.full((i % 3, 2), i + 0.5, np.float32) for i in ids.tolist()],
        "mask": (column * 11 + np.arange(11)) % 3 == 0,
    }


def assert_right(batch):
    """Every value of the batch is the one right value for its id."""
    expected = values(batch.ids)
    for name in batch:
        got = batch[name]
        if isinstance(got, gs.Ragged):
            assert len(got) == len(batch.ids)
            for row, right in enumerate(expected[name]):
                np.testing.assert_array_equal(got[row], right, err_msg=name)
        else:
            np.testing.assert_array_equal(got, expected[name], err_msg=name)


# Work -------------------------------------------------------------------------------------------


def capture(disk, durability, name="final"):
    """Make the store, record run and checkpoint, append three segments, seal."""
    key = gs.CaptureKey(name, "train")
    store = gs.open(disk, durability=durability)
    yield "store"
    store.add_run(RUN)
    yield "run"
    store.add_checkpoint(CHECKPOINT)
    yield "checkpoint"
    with store.write(key, SCHEMA) as writer:
        yield from _append(writer, IDS)
    yield "version 0"


def extend(disk, durability, name="final"):
    """Add rows to the sealed capture as version 1."""
    key = gs.CaptureKey(name, "train")
    store = gs.open(disk, durability=durability)
    if MORE_IDS[0] not in store.read(key).ids:
        with store.write(key, SCHEMA, extend=True) as writer:
            yield from _append(writer, MORE_IDS)
        yield "version 1"
    _derive(store, key)


def drop(disk, durability, name="final"):
    """Publish a version of the capture without some rows."""
    key = gs.CaptureKey(name, "train")
    store = gs.open(disk, durability=durability)
    if DROPPED[0] in store.read(key).ids:
        store.drop_rows(key, DROPPED)
        yield "dropped"
    _derive(store, key)


def delete(disk, durability, name="final"):
    """Delete the capture."""
    key = gs.CaptureKey(name, "train")
    store = gs.open(disk, durability=durability)
    if key in store.captures():
        store.delete(key)
        yield "deleted"


def rows(disk, durability, name="models"):
    """Put some rows, then claim the rest one by one; one of them fails."""
    store = gs.open(disk, durability=durability)
    yield "store"
    actual = store.rows(name, SCHEMA, num_rows=NUM_ROWS)
    yield f"size {NUM_ROWS}"
    for row in PLAIN_ROWS:
        actual.put(row, one_row(row))
        yield f"row {row}"
    # Leases of no length: what a dead worker held is free at once.
    while leases := actual.claim(owner="worker", seconds=0, max_attempts=1):
        lease = actual.renew(leases[0], seconds=0)
        if lease.row == FAILING_ROW:
            actual.fail(lease, "ValueError: no")
            yield f"failed {lease.row}"
        else:
            actual.finish(lease, one_row(lease.row))
            yield f"row {lease.row}"


def compact(disk, durability, name="models"):
    """Pack the rows that are done, two to a file."""
    store = gs.open(disk, durability=durability)
    store.rows(name).compact(rows_per_file=2, partial=True)
    yield "compacted"


def gc(disk, durability):
    """Remove what the newest versions do not need."""
    gs.gc(gs.open(disk, durability=durability))
    yield "swept"


def repair(disk, durability):
    """Move what is damaged aside and do the work again."""
    gs.verify(disk, repair=True)
    yield "repaired"
    yield from capture(disk, durability)
    yield from rows(disk, durability)


def one_row(row):
    """The arrays of a single row, as `Rows.put` takes them."""
    return {
        name: gs.Ragged.of(value) if name == "tokens" else value[0]
        for name, value in values([row]).items()
    }


def _append(writer, ids):
    for at in range(0, len(ids), ROWS_PER_SEGMENT):
        part = ids[at : at + ROWS_PER_SEGMENT]
        if writer.needs(len(part)):
            # The first in one piece, which is written at once; the rest in two, which are gathered
            # and written in the background.
            for piece in [part] if at == 0 else [part[:3], part[3:]]:
                writer.append(piece, values(piece))
        else:
            writer.skip(part)
        if len(part) == ROWS_PER_SEGMENT:
            writer.flush()
            yield f"ids {part[0]} {part[-1]}"


def _derive(store, key):
    # A version that was published but not derived from when its writer died gets its Parquet file
    # when it is first queried.
    block = store.read(key)
    _sql.ensure_samples(store.backend, block, key.labels, durability=store.durability)
    # So does its second record, by whoever writes next.
    _manifest.ensure_recorded(
        store.backend, key.folder, block.manifest, durability=store.durability
    )


def finish(work, disk, durability="process"):
    """Do the work to its end; returns what was acknowledged."""
    return [ack for step in work for ack in step(disk, durability)]


def make(path, *work):
    """A store in which this work was done."""
    finish(work, gs.LocalDisk(path))


# Checks -----------------------------------------------------------------------------------------


def check(path, acks, *, key=KEY, models="models"):
    """All that was acknowledged is there, and all that can be read is right.

    `acks` may also say what was begun: what that work removes may then be gone.
    """
    acks = set(acks)
    store = gs.open(gs.LocalDisk(path), create=False)
    runs, checkpoints = store.runs(), store.checkpoints()
    assert runs == [RUN] or (runs == [] and "run" not in acks)
    assert checkpoints == [CHECKPOINT] or (checkpoints == [] and "checkpoint" not in acks)
    _check_capture(store, acks, key)
    _check_rows(store, acks, models)


def check_once(path, acks, seen):
    """The same, but not again for what was seen before; unfinished writes make no difference."""
    actual = {key: content for key, content in tree(path).items() if ".tmp-" not in key}
    state = hash((frozenset(actual.items()), frozenset(acks)))
    if state not in seen:
        seen.add(state)
        check(path, acks)


def _check_capture(store, acks, key):
    stored = {ack for ack in acks if ack.startswith(("ids ", "version ", "dropped"))}
    if {"delete begun", "deleted"} & acks:
        stored = set()
    if "gc begun" in acks:
        stored -= {f"version {number}" for number in range(2)}
    if "deleted" in acks:
        assert key not in store.captures()
    if key not in store.captures():
        assert not stored
        return
    live = store.read(key, live=True)
    for batch in live.stream():
        assert_right(batch)
    if len(live):
        assert_right(live.read(live.ids[::-1]))
    versions = {number: store.read(key, version=number) for number in live.versions()}
    for number, block in versions.items():
        for batch in block.stream():
            assert_right(batch)
        assert block.ids.tolist() in POSSIBLE_VERSIONS, number
    for word, *numbers in map(str.split, stored):
        if word == "ids" and not {"drop begun", "dropped"} & acks:
            assert {int(number) for number in numbers} <= set(live.ids.tolist())
        if word == "version":
            assert int(numbers[0]) in versions
        if word == "dropped":
            assert not set(DROPPED) & set(store.read(key).ids.tolist())


def _check_rows(store, acks, name):
    claimed = [ack.split() for ack in acks if ack.startswith(("row ", "failed ", "size "))]
    if name not in store.row_sets():
        assert not claimed
        return
    actual = store.rows(name)
    done = actual.done()
    batch = actual.read(done)
    np.testing.assert_array_equal(batch.ids, done)
    assert_right(batch)
    states = actual.states(max_attempts=1)
    for word, number in claimed:
        if word == "row":
            assert int(number) in done
            assert states[int(number)].state == "done"
        elif word == "failed":
            assert states[int(number)].state == "failed"
            assert states[int(number)].error == "ValueError: no"
        else:
            assert actual.num_rows == int(number)


_TOKEN = re.compile(r"(/failed/\d+/\d+)-[0-9a-f]{16}\.json$")


def tree(path, *, without=("STORE.json",)):
    """Every file's bytes, by name; leases, quarantine and random names left out."""
    actual = {}
    for folder, _, names in os.walk(path):
        for name in names:
            file = os.path.join(folder, name)
            key = os.path.relpath(file, path)
            if key in without or "/claims/" in key or key.startswith("quarantine/"):
                continue
            with open(file, "rb") as opened:
                actual[_TOKEN.sub(r"\1-token.json", key)] = opened.read()
    return actual


def assert_same_tree(path, expected):
    """The store holds exactly the wanted files, byte for byte."""
    actual = tree(path)
    assert_same(actual, expected)


def assert_same(actual, expected):
    """Two trees are the same, byte for byte."""
    assert sorted(actual) == sorted(expected)
    differing = [key for key in actual if actual[key] != expected[key]]
    assert not differing


def copy(source, target):
    """A second store with the same files, which never change and so need not be copied."""
    shutil.copytree(source, target, copy_function=os.link, dirs_exist_ok=True)


# Faults -----------------------------------------------------------------------------------------

CALLS = tuple(name for name in vars(Syscalls) if not name.startswith("_"))


class Watched(Syscalls):
    """Real calls that all pass through `around`."""

    def around(self, name, call, *args):
        raise NotImplementedError


def _watch(name):
    real = getattr(Syscalls, name)

    @functools.wraps(real)
    def watched(self, *args):
        return self.around(name, functools.partial(real, self), *args)

    return watched


for _name in CALLS:
    setattr(Watched, _name, _watch(_name))


class Counted(Watched):
    """Remembers the names of the calls."""

    def __init__(self):
        self.names = []

    def around(self, name, call, *args):
        self.names.append(name)
        return call(*args)


class KillAt(Watched):
    """Ends the process before, after or in the middle of the call with this number."""

    def __init__(self, step, when):
        self.left = step
        self.when = when
        self._lock = threading.Lock()

    def around(self, name, call, *args):
        with self._lock:
            here = self.left == 0
            self.left -= 1
        if not here:
            return call(*args)
        try:
            if self.when == "after":
                call(*args)
            elif self.when == "half":
                fd, data = args
                call(fd, data[: len(data) // 2])
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")


class Refuse(Watched):
    """Fails the call with this number, or all from there on, with an error number."""

    def __init__(self, step, code, *, forever=False):
        self.left, self.code, self.forever = step, code, forever
        self.fired = 0

    def around(self, name, call, *args):
        self.left -= 1
        if self.left == -1 or (self.forever and self.left < 0):
            self.fired += 1
            raise OSError(self.code, os.strerror(self.code))
        return call(*args)


def tell(log, word):
    """Write down for the parent what the store has acknowledged."""
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{word}\n".encode())
    os.close(fd)


def read_acks(log):
    """Messages of a child process."""
    return log.read_text().splitlines() if log.exists() else []


def steps_of(path, work):
    """The names of the calls that the work makes when nothing goes wrong."""
    calls = Counted()
    finish([work], gs.LocalDisk(path, syscalls=calls), "full")
    return calls.names


def do_killed(path, acks, work, step, when):
    """A child's job: do the work and die at the step; tell of each acknowledgement."""
    disk = gs.LocalDisk(path, syscalls=KillAt(step, when))
    for ack in globals()[work](disk, "full"):
        tell(acks, ack)


# Children ---------------------------------------------------------------------------------------


class Zygote:
    """A process that has imported everything and forks children on demand."""

    def __enter__(self):
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        return self

    def __exit__(self, *_):
        with self._process, self._errors:
            self._process.stdin.close()

    def start(self, function, *args):
        """Run the function of a test module in a child; returns its process number."""
        path = Path(function.__code__.co_filename)
        return self._ask({"path": str(path), "name": function.__name__, "args": args})

    def wait(self, pid):
        """A child's exit code: minus the signal's number if one ended it."""
        return self._ask({"wait": pid})

    def run(self, function, *args):
        return self.wait(self.start(function, *args))

    def errors(self):
        """Return the output of the children so far."""
        return os.pread(self._errors.fileno(), 1 << 20, 0).decode(errors="replace")[-4000:]

    def _ask(self, question):
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def _serve():
    sys.meta_path.insert(0, _NoPandas())
    for name in ("pyarrow.parquet", "zstandard"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    garbage.freeze()
    faulthandler.register(signal.SIGUSR1)  # a child that hangs can be asked where
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        question = json.loads(line)
        if "wait" in question:
            _, status = os.waitpid(question["wait"], 0)
            reply = os.waitstatus_to_exitcode(status)
        else:
            path = Path(question["path"])
            if str(path.parent) not in sys.path:
                sys.path.insert(0, str(path.parent))
            job = getattr(importlib.import_module(path.stem), question["name"])
            reply = os.fork()
            if reply == 0:
                _live(job, question["args"])
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


class _NoPandas:
    """pyarrow looks for pandas, which would double the time of a fork."""

    def find_spec(self, name, *_):
        if name == "pandas":
            raise ImportError(name)


def _live(job, args):
    try:
        job(*args)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    _serve()
