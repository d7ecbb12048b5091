"""The power fails after every system call; what was not synced is lost, in part or as a whole."""

import copy

import faultkit as kit
import pytest
from powerloss import Disk, Keep, Recorder, lay_out

from gradkeep import store as gs
from gradkeep.errors import StoreError

SCENES = {
    "capture": [],
    "extend": [kit.capture],
    "drop": [kit.capture, kit.extend],
    "delete": [kit.capture, kit.extend, kit.drop],
    "rows": [],
    "compact": [kit.rows],
    "gc": [kit.capture, kit.extend, kit.drop, kit.rows, kit.compact],
}
KEEPS = [("none", 0), ("all", 0), *(("some", seed) for seed in range(8))]


@pytest.fixture(params=SCENES)
def life(request, ram):
    """One piece of work, done to its end and written down."""
    return Life(request.param, ram)


class Life:
    def __init__(self, scene, ram):
        self.work, self.ram = getattr(kit, scene), ram
        base = ram / "first"
        base.mkdir()
        self.told = [*kit.finish(SCENES[scene], gs.LocalDisk(base / "store")), f"{scene} begun"]
        self.before = Disk(base)
        self.events = self.record(base)
        self.whole = kit.tree(base / "store")
        self._seen = set()

    def record(self, base):
        """The events of the work, done to the store in a folder."""
        recorder = Recorder(base)
        for ack in self.work(gs.LocalDisk(base / "store", syscalls=recorder), "full"):
            recorder.acknowledge(ack)
        return recorder.events

    def check(self, files, acknowledged):
        """After a power cut all that was acknowledged is there, and nothing torn can be read."""
        lasting = {path: content for path, content in files.items() if ".tmp-" not in path}
        state = hash((frozenset(lasting.items()), frozenset(acknowledged)))
        if state in self._seen:
            return None
        self._seen.add(state)
        base = self.ram / f"state-{len(self._seen)}"
        lay_out(files, base)
        if "store/STORE.json" not in files:
            # A second process that found the store may have been told of it before it was durable,
            # but of nothing in it.
            assert not set(acknowledged) - {self.told[-1], "store"}
            gs.open(base / "store")
        kit.check(base / "store", acknowledged)
        if "deleted" in acknowledged:
            # Nothing of what was deleted is left to get into a new capture of that name.
            kit.check(base / "store", kit.finish([kit.capture], gs.LocalDisk(base / "store")))
            assert gs.verify(gs.LocalDisk(base / "store")).healthy
        return base

    def finish(self, base):
        """Doing the work again ends as if nothing had happened."""
        kit.finish([self.work], gs.LocalDisk(base / "store"), "full")
        actual = kit.tree(base / "store")
        kit.assert_same({key: actual[key] for key in actual if ".tmp-" not in key}, self.whole)


def test_power_cut_after_any_call(life):
    cut_power_after_each(life, life.events)


@pytest.mark.parametrize("call", ["sync", "sync_folder"])
def test_a_store_that_does_not_sync_would_be_caught(call, ram):
    life = Life("capture", ram)
    with pytest.raises((AssertionError, StoreError)):
        cut_power_after_each(life, [event for event in life.events if event[0] != call])


def cut_power_after_each(life, events):
    disk, reported = copy.deepcopy(life.before), list(life.told)
    for step, event in enumerate(events):
        if event[0] == "ack":
            reported.append(event[1])
        else:
            disk.apply(event)
        for what, seed in KEEPS:
            files = disk.after_power_cut(Keep(what, seed=(step, seed)))
            base = life.check(files, reported)
            if base is not None and what == "none":
                life.finish(base)


def test_power_cut_after_a_kill_and_a_second_try(life):
    """The second process finds files of the first that were never synced; it must not trust them."""
    killed = copy.deepcopy(life.before)
    for step, event in enumerate(life.events):
        if event[0] == "ack":
            continue
        killed.apply(event)
        disk = copy.deepcopy(killed)
        base = life.ram / f"second-{step}"
        lay_out(disk.after_power_cut(Keep("all")), base)
        disk.follow(base)
        reported = list(life.told)
        for second in life.record(base):
            if second[0] != "ack":
                disk.apply(second)
                continue
            reported.append(second[1])
            life.check(disk.after_power_cut(Keep("none")), reported)


class DiesBeforeSync(Recorder):
    """Stops before the names of its segments are durable, as a killed process does."""

    linked = False

    def around(self, name, call, *args):
        self.linked |= name == "link" and "/seg/" in args[1]
        if self.linked and name == "sync_folder":
            raise KeyboardInterrupt
        return super().around(name, call, *args)


def test_power_cut_after_another_died_beside_the_one_that_seals(ram):
    ids, base = kit.IDS[:8], ram / "first"
    base.mkdir()
    disk, ours, theirs = Disk(base), Recorder(base), DiesBeforeSync(base)
    theirs.events = ours.events
    mine = gs.open(gs.LocalDisk(base / "store", syscalls=ours))
    last = -(-len(ids) // kit.SCHEMA.rows_per_segment) - 1
    with mine.write(kit.KEY, kit.SCHEMA, segments=range(last)) as writer:
        writer.append(ids, kit.values(ids))
        store = gs.open(gs.LocalDisk(base / "store", syscalls=theirs))
        other = store.write(kit.KEY, kit.SCHEMA, segments=range(last, last + 1))
        with pytest.raises(KeyboardInterrupt), other:
            other.append(ids, kit.values(ids))
    with mine.write(kit.KEY, kit.SCHEMA) as writer:
        writer.skip(ids)
    for event in ours.events:
        disk.apply(event)
    lay_out(disk.after_power_cut(Keep("none")), ram / "after")
    block = gs.open(ram / "after/store").read(kit.KEY)
    assert block.ids.tolist() == ids
    for batch in block.stream():
        kit.assert_right(batch)
