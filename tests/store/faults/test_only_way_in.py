"""There is one way into a store: a new temp file, linked to a free name; nothing is overwritten."""

import json
import mmap
import os
import sys

import faultkit as kit
import pytest

from gradkeep import store as gs

WORK = ["capture", "extend", "drop", "rows", "compact", "gc", "read", "delete", "capture"]
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Events of the interpreter that change files in another way than opening them.
CHANGES = ("os.link", "os.rename", "os.remove", "os.truncate", "os.symlink", "os.chmod", "shutil.")


def read(disk, durability):
    """Every way to read, of which none may write."""
    store = gs.open(disk, durability=durability)
    repr(store)
    block = store.read(kit.KEY)
    for batch in block.stream():
        kit.assert_right(batch)
    kit.assert_right(block.read(block.ids))
    rows = store.rows("models")
    rows.read(rows.done())
    rows.states()
    gs.verify(disk)
    store.sql("select count(*) from samples")
    yield "read"


def spy(path, report, steps):
    """A child's job: work under an audit hook and write down every event that may change a file."""
    events = []

    def hook(event, args):
        if event == "open" and args[2] & WRITING:
            events.append((event, str(args[0]), args[2]))
        elif event.startswith(CHANGES):
            events.append((event, *[os.fspath(arg) for arg in args if isinstance(arg, str)]))
        elif event == "mmap.__new__":
            events.append((event, args[2]))

    sys.addaudithook(hook)
    for step in steps:
        work = globals().get(step) or getattr(kit, step)
        kit.finish([work], gs.LocalDisk(path), "full")
    kit.Path(report).write_text(json.dumps(list(events)))


@pytest.fixture
def events(ram, zygote):
    """The events of all work, without those outside of stores."""
    kit.make(ram / "damaged", kit.capture, kit.rows)
    (file,) = (ram / "damaged").rglob("seg/000001.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    actual = []
    for name, steps in (("store", WORK), ("damaged", ["repair"])):
        report = ram / f"{name}-report"
        assert zygote.run(spy, str(ram / name), str(report), steps) == 0, zygote.errors()
        actual += json.loads(report.read_text())
    return [event for event in actual if event[0] == "mmap.__new__" or f"{ram}/" in str(event)]


def test_files_are_opened_for_writing_only_as_new_temp_files(events):
    opened = [(name, flags) for event, name, flags in (e for e in events if e[0] == "open")]
    assert len(opened) > 40
    for name, flags in opened:
        assert os.path.basename(name).startswith(".tmp-")
        assert flags & os.O_EXCL
        assert flags & os.O_CREAT
        assert not flags & (os.O_TRUNC | os.O_RDWR | os.O_APPEND)


def test_names_come_by_link_and_go_by_unlink_alone(events, ram):
    kinds = {event[0] for event in events}
    assert kinds <= {"open", "os.link", "os.remove", "os.rename", "mmap.__new__"}
    for event, *names in events:
        if event == "os.link":
            assert os.path.basename(names[0]).startswith(".tmp-")
            assert os.path.dirname(names[0]) == os.path.dirname(names[1])
        elif event == "os.rename":
            # Only what is damaged is moved, and only aside.
            assert names[1].startswith(str(ram / "damaged/quarantine"))
    linked = {names[1] for event, *names in events if event == "os.link"}
    files = {str(file) for file in (ram / "store").rglob("*") if file.is_file()}
    assert len(files) > 10
    assert not files - linked


def test_files_are_never_mapped_for_writing(events):
    access = [args[0] for event, *args in events if event == "mmap.__new__"]
    assert access
    assert set(access) <= {mmap.ACCESS_COPY, mmap.ACCESS_READ}
