"""Disks that are really full or read-only, have no hard links, or take a write in pieces."""

import errno
import threading
from pathlib import Path

import faultkit as kit
import pytest
from raises import raises

from gradkeep import store as gs
from gradkeep.errors import ConflictError, ReadOnlyError, WriteFailedError
from gradkeep.store.backends._disk import Syscalls


@pytest.mark.parametrize("kind", ["size", "nr_inodes"])
def test_a_full_disk_is_told_and_the_work_resumes_when_there_is_room(kind, small_disk, ram):
    kit.make(ram / "whole", kit.capture, kit.rows)
    small, large = {"size": ("40k", "4m"), "nr_inodes": ("30", "1000")}[kind]
    path = small_disk(f"{kind}={small}") / "store"
    reported = []
    work = (ack for step in (kit.capture, kit.rows) for ack in step(gs.LocalDisk(path), "full"))
    with pytest.raises(WriteFailedError, match="No space left on device") as refused:
        reported.extend(work)
    assert "Free some space" in refused.value.fix
    assert "ids 47 0" in reported
    kit.check(path, reported)
    assert gs.verify(gs.LocalDisk(path)).healthy
    small_disk(f"remount,{kind}={large}")
    kit.finish([kit.capture, kit.rows], gs.LocalDisk(path), "full")
    kit.assert_same_tree(path, kit.tree(ram / "whole"))


def test_a_read_only_disk_can_be_read_and_refuses_writes_clearly(small_disk):
    path = small_disk("size=4m") / "store"
    reported = kit.finish([kit.capture, kit.rows], gs.LocalDisk(path))
    before = kit.tree(path)
    small_disk("remount,ro")
    kit.check(path, reported)
    assert gs.verify(gs.LocalDisk(path)).healthy
    for write in (kit.extend, kit.drop, kit.compact, kit.delete):
        with pytest.raises(ReadOnlyError, match="Read-only file system") as refused:
            list(write(gs.LocalDisk(path), "full"))
        assert "copy the store" in refused.value.fix
    with pytest.raises(ReadOnlyError):
        gs.open(path.with_name("other"))
    # Work that is complete has nothing to write.
    kit.finish([kit.capture, kit.rows], gs.LocalDisk(path), "full")
    assert kit.tree(path) == before
    small_disk("remount,rw")
    kit.finish([kit.extend], gs.LocalDisk(path))


class NoLinks(kit.Watched):
    """A filesystem without hard links, and perhaps without a rename that does not replace."""

    def __init__(self, code, *, rename=True):
        self.code, self.rename_works = code, rename
        self.renamed = 0

    def around(self, name, call, *args):
        if name == "link":
            raise OSError(self.code, "no links")
        if name == "rename_no_replace":
            self.renamed += 1
            if not self.rename_works:
                raise OSError(errno.EINVAL, "no such rename")
        return call(*args)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_without_hard_links_a_rename_that_does_not_replace_commits(code, ram):
    kit.make(ram / "whole", kit.capture, kit.rows, kit.compact)
    calls = NoLinks(code)
    work = [kit.capture, kit.rows, kit.compact]
    kit.finish(work, gs.LocalDisk(ram / "store", syscalls=calls), "full")
    assert calls.renamed > 20
    kit.assert_same_tree(ram / "store", kit.tree(ram / "whole"))


@pytest.mark.parametrize("calls", [Syscalls, lambda: NoLinks(errno.EPERM)], ids=["link", "rename"])
def test_a_name_is_taken_by_one_of_many_writers(calls, ram):
    won, lost = [], []
    start = threading.Barrier(8)

    def put(content):
        disk = gs.LocalDisk(ram / "store", syscalls=calls())
        start.wait()
        for number in range(50):
            try:
                created = disk.put_if_absent(f"a/{number}", [content], durability="process")
                won.append((number, created))
            except ConflictError:
                lost.append(number)

    writers = [threading.Thread(target=put, args=(b"%d" % writer,)) for writer in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(won) == [(number, True) for number in range(50)]
    assert len(lost) == 7 * 50
    assert not list(Path(ram).rglob(".tmp-*"))


def test_without_any_way_to_take_a_name_once_the_place_is_refused(ram):
    disk = gs.LocalDisk(ram / "store", syscalls=NoLinks(errno.EPERM, rename=False))
    with raises(WriteFailedError, "store.no_atomic_create") as refused:
        gs.open(disk)
    assert "another filesystem" in refused.value.fix
    assert kit.tree(ram / "store", without=()) == {}


class ShortWrites(kit.Watched):
    """Takes a few bytes of each write, as a full pipe or an interrupted call does."""

    def around(self, name, call, *args):
        if name == "write":
            fd, data = args
            return call(fd, data[:97])
        return call(*args)


def test_writes_that_are_taken_in_pieces_are_continued(ram):
    kit.make(ram / "whole", kit.capture, kit.rows)
    disk = gs.LocalDisk(ram / "store", syscalls=ShortWrites())
    kit.finish([kit.capture, kit.rows], disk)
    kit.assert_same_tree(ram / "store", kit.tree(ram / "whole"))
