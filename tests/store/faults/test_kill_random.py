"""`kill -9` from outside, at random moments, of a process that works on and on."""

import itertools
import os
import random
import signal
import time

import faultkit as kit
import pytest

from gradkeep import store as gs

pytestmark = pytest.mark.slow
KILLS = 100  # for each seed


def stages(number):
    """Work of one round, which has its own capture and row set."""
    yield from ("capture", "extend", "drop", "rows", "compact")
    if number % 3 == 1:
        yield "delete"
    if number % 4 == 3:
        yield "gc"


def arguments(stage, number):
    return {} if stage == "gc" else {"name": f"round{number}"}


def work_on(path, log, rounds=None):
    """Do round after round, beginning after the last stage that was told to be over."""
    over = {line.split(": ")[0] for line in kit.read_acks(log) if line.endswith(": over")}
    for number in itertools.count() if rounds is None else range(rounds):
        for stage in stages(number):
            if f"{number} {stage}" in over:
                continue
            work = getattr(kit, stage)(gs.LocalDisk(path), "full", **arguments(stage, number))
            for ack in itertools.chain(["begun"], work, ["over"]):
                kit.tell(log, f"{number} {stage}: {ack}")


def job(path, log):
    work_on(path, kit.Path(log))


def check_rounds(path, log, numbers):
    lines = [line.split(": ") for line in kit.read_acks(log)]
    for number in numbers:
        mine = [(place.split()[1], ack) for place, ack in lines if place.split()[0] == str(number)]
        reported = [f"{stage} begun" if ack == "begun" else ack for stage, ack in mine]
        reported += ["store", "gc begun"]
        kit.check(
            path, reported, key=gs.CaptureKey(f"round{number}", "train"), models=f"round{number}"
        )


def rounds_begun(log):
    return 1 + max((int(line.split()[0]) for line in kit.read_acks(log)), default=-1)


def wait_for_more(log, size):
    """Wait for progress, not for time: the machine may be busy with something else."""
    patience = time.monotonic() + 60
    while not log.exists() or log.stat().st_size < size:
        if time.monotonic() > patience:
            return False
        time.sleep(0.001)
    return True


@pytest.mark.parametrize("seed", [1, 2])
def test_kills_at_random_moments_lose_nothing(seed, ram, zygote):
    chance = random.Random(seed)
    path, log = ram / "store", ram / "acks"
    for _ in range(KILLS):
        pid = zygote.start(job, str(path), str(log))
        written = log.stat().st_size if log.exists() else 0
        if not wait_for_more(log, written + chance.randrange(200)):
            os.kill(pid, signal.SIGUSR1)
            time.sleep(1)
            pytest.fail(f"the child is stuck: {zygote.errors()}")
        time.sleep(chance.uniform(0, 0.005))
        os.kill(pid, signal.SIGKILL)
        assert zygote.wait(pid) == -signal.SIGKILL, zygote.errors()
        latest = rounds_begun(log)
        if (path / "STORE.json").exists():
            check_rounds(path, log, range(max(0, latest - 2), latest))
    rounds = rounds_begun(log)
    assert rounds > 5, "the child was killed before it could do anything"
    work_on(path, log, rounds)
    check_rounds(path, log, range(rounds))
    assert gs.verify(gs.LocalDisk(path), repair=True).healthy
    work_on(ram / "whole", ram / "whole-acks", rounds)
    kit.assert_same_tree(path, kit.tree(ram / "whole"))
