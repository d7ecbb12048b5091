"""The disk says no: a typed error that tells what to do, a valid store, a rerun that completes."""

import errno
import threading
import time

import faultkit as kit
import pytest

from gradkeep import store as gs
from gradkeep.errors import WriteFailedError

pytestmark = pytest.mark.slow
SCENES = {
    "capture": [],
    "extend": [kit.capture],
    "drop": [kit.capture],
    "rows": [],
    "compact": [kit.rows],
    "gc": [kit.capture, kit.extend, kit.drop],
    "delete": [kit.capture],
}
CODES = [errno.ENOSPC, errno.EDQUOT, errno.EIO]
REFUSABLE = {"create", "write", "sync", "close", "link", "unlink", "make_folder", "sync_folder"}


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("scene", SCENES)
def test_a_refused_call_surfaces_and_the_work_resumes(scene, code, ram):
    work = getattr(kit, scene)
    acks = [*kit.finish(SCENES[scene], gs.LocalDisk(ram / "before")), f"{scene} begun"]
    whole = copy_of(ram / "before", ram / "whole")
    names = kit.steps_of(whole, work)
    expected = kit.tree(whole)
    assert set(names) <= REFUSABLE
    for step in range(len(names)):
        path = copy_of(ram / "before", ram / f"store-{step}")
        calls = kit.Refuse(step, code)
        reported = list(acks)
        with pytest.raises(WriteFailedError) as refused:
            reported.extend(work(gs.LocalDisk(path, syscalls=calls), "full"))
        assert calls.fired == 1
        assert_helpful(refused.value, code)
        if (path / "STORE.json").exists():
            kit.check(path, reported)
            assert gs.verify(gs.LocalDisk(path)).healthy
        kit.finish([work], gs.LocalDisk(path), "full")
        kit.assert_same(without_temps(kit.tree(path)), expected)


def assert_helpful(error, code):
    """The error says where, what the system said and what to do, and keeps the cause."""
    assert isinstance(error, OSError)
    assert error.__cause__.errno == code
    assert error.found
    assert error.found in str(error)
    assert error.fix
    assert error.fix in str(error)
    assert error.path


def without_temps(tree):
    # A refused unlink leaves a temp file, which stays while its writer, this process, lives.
    return {key: content for key, content in tree.items() if ".tmp-" not in key}


def copy_of(source, target):
    if source.exists():
        kit.copy(source, target)
    return target


class Background(kit.Watched):
    """Refuses to write a segment, and tells when it did."""

    def __init__(self):
        self.refused = threading.Event()

    def around(self, name, call, *args):
        if name == "link" and "/seg/" in args[1]:
            self.refused.set()
            raise OSError(errno.EIO, "no")
        return call(*args)


@pytest.fixture
def refused_writer(ram):
    """A writer whose first segment was refused in the background."""
    calls = Background()
    store = gs.open(gs.LocalDisk(ram / "store", syscalls=calls), durability="process")
    writer = store.write(kit.KEY, kit.SCHEMA)
    for piece in (kit.IDS[:3], kit.IDS[3 : kit.ROWS_PER_SEGMENT]):
        writer.append(piece, kit.values(piece))
    assert calls.refused.wait(10)
    while not writer._under_way.done():
        time.sleep(0.001)
    return writer


@pytest.mark.parametrize("call", ["append", "skip", "flush", "seal"])
def test_a_refusal_in_the_background_fails_the_next_call_and_close(call, refused_writer):
    more = kit.IDS[kit.ROWS_PER_SEGMENT :]
    arguments = {"append": (more, kit.values(more)), "skip": (more,)}.get(call, ())
    with pytest.raises(WriteFailedError, match="Input/output error"):
        getattr(refused_writer, call)(*arguments)
    with pytest.raises(WriteFailedError, match="Input/output error"):
        refused_writer.close()
    store = gs.open(refused_writer._backend.root)
    assert len(store.read(kit.KEY, live=True)) == 0


def test_a_refusal_in_the_background_fails_close_alone(refused_writer):
    with pytest.raises(WriteFailedError, match="Input/output error"):
        refused_writer.close()


def test_a_refusal_in_the_background_fails_the_with_block(refused_writer):
    with pytest.raises(WriteFailedError, match="Input/output error"), refused_writer:
        pass


def test_another_error_in_the_with_block_is_the_one_that_is_shown(refused_writer):
    with pytest.raises(ZeroDivisionError), refused_writer:
        raise ZeroDivisionError
