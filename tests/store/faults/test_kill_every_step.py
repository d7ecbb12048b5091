"""`kill -9` before, after and in the middle of every system call that changes a store."""

import signal

import faultkit as kit
import pytest

from gradkeep import store as gs

pytestmark = pytest.mark.slow

# The work, and what was done to the store before it.
SCENES = {
    "capture": [],
    "extend": [kit.capture],
    "drop": [kit.capture, kit.extend],
    "delete": [kit.capture, kit.extend, kit.drop],
    "rows": [],
    "compact": [kit.rows],
    "gc": [kit.capture, kit.extend, kit.drop, kit.rows, kit.compact],
    "repair": [kit.capture, kit.rows],
}


@pytest.mark.parametrize("when", ["before", "after", "half"])
@pytest.mark.parametrize("scene", SCENES)
def test_kill_loses_nothing_and_the_work_resumes_byte_for_byte(scene, when, ram, zygote):
    work = getattr(kit, scene)
    acks = [*kit.finish(SCENES[scene], gs.LocalDisk(ram / "before")), f"{scene} begun"]
    prepare(scene, ram / "before")
    whole = copy_of(ram / "before", ram / "whole")
    names = kit.steps_of(whole, work)
    expected = kit.tree(whole)
    seen = set()
    for step, name in enumerate(names):
        if when == "half" and name != "write":
            continue
        path, log = copy_of(ram / "before", ram / f"store-{step}"), ram / f"acks-{step}"
        code = zygote.run(kit.do_killed, str(path), str(log), scene, step, when)
        assert code == -signal.SIGKILL, zygote.errors()
        reported = [*acks, *kit.read_acks(log)]
        if scene != "repair" and ((path / "STORE.json").exists() or "store" in reported):
            kit.check_once(path, reported, seen)
        kit.finish([work], gs.LocalDisk(path), "full")
        sweep(gs.LocalDisk(path))
        kit.assert_same_tree(path, expected)


def sweep(disk):
    """Remove the temp file of the dead child, as gc and a repair do."""
    disk.delete(disk.leftovers(older_than=3600), durability="process")


def prepare(scene, path):
    """Leave in the store what the scene's work is to deal with."""
    if scene == "gc":
        # A compaction that died before it removed the rows' own files.
        kit.make(path.with_name("loose"), kit.rows)
        own = "datamodels/models/rows"
        kit.copy(path.with_name("loose") / own, path / own)
    elif scene == "repair":
        files = [*path.rglob("seg/000001.safetensors"), *path.rglob("rows/*/2.safetensors")]
        for file in [*files, *path.rglob("ckpt.json"), *path.rglob("manifest/000000.json")]:
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)


def copy_of(source, target):
    if source.exists():
        kit.copy(source, target)
    return target


def test_the_steps_are_those_of_the_protocol(ram):
    """The kills above are at the calls they claim to be at."""
    names = kit.steps_of(ram / "store", kit.capture)
    files = len(kit.tree(ram / "store", without=()))
    for call in ("create", "write", "sync", "close", "link", "unlink"):
        assert names.count(call) == files
    assert names.count("sync_folder") >= files
    one = ["create", "write", "sync", "close", "link", "unlink", "sync_folder"]
    assert names[-7:] == one
