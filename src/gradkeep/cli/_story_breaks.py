"""The part of the demo in which things go wrong: a killed writer, a flipped bit."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradkeep as gk
from gradkeep.store import LocalDisk, verify

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCE = gk.store.CaptureKey("epoch-30", "train")
COPY = gk.store.CaptureKey("epoch-30", "train", capture="copy")
ROWS = 128
"""Rows per segment of the copy: each is durable as soon as it is full."""


def kill_and_resume(store: gk.Store, say: Callable[[str], None]) -> None:
    """Copy the last capture in another process, kill -9 it in the middle, and resume."""
    if store.has(COPY):
        store.delete(COPY)
    command = [sys.executable, "-m", "gradkeep.cli._story_breaks", store.location]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        acknowledged = 0
        for line in child.stdout:
            acknowledged = int(line)
            if acknowledged >= 4 * ROWS:
                os.kill(child.pid, signal.SIGKILL)
                break
    kept = len(store.read(COPY, live=True))
    say(
        f"killed     a writer with kill -9 after {acknowledged} acknowledged rows: "
        f"{max(0, acknowledged - kept)} lost"
    )
    _copy(store)
    whole, copy = store.read(SOURCE), store.read(COPY)
    names = copy.names
    same = all(_equal(whole, copy, name) for name in names)
    say(
        f"resumed    only what was missing was written; the copy is "
        f"{'equal to' if same else 'NOT equal to'} the original"
    )


def damage_and_repair(store: gk.Store, say: Callable[[str], None]) -> None:
    """Flip one bit on disk; verify names it, repair moves it aside, a second run recreates it."""
    backend = LocalDisk(store.location)
    victim = Path(store.location) / COPY.folder / "seg" / "000003.safetensors"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 4
    victim.write_bytes(data)
    found = verify(backend).damage[0]
    say(f"flipped    one bit; verify says: {Path(found.path).name}, tensor {found.tensor!r}")
    verify(backend, repair=True)
    _copy(store)
    state = "healthy" if verify(backend).healthy else "NOT healthy"
    say(f"repaired   the file was moved aside and written again; the store is {state}")


def _copy(store: gk.Store, *, slowly: bool = False) -> None:
    """Write the copy, or what is missing of it."""
    source = store.read(SOURCE)
    schema = dataclasses.replace(source.schema, rows_per_segment=ROWS)
    with store.write(COPY, schema) as writer:
        for batch in source.stream(batch_rows=ROWS):
            if not writer.needs(len(batch.ids)):
                writer.skip(batch.ids)
                continue
            writer.append(batch.ids, {name: batch[name] for name in source.names})
            if slowly:
                writer.flush()
                print(writer.position, flush=True)
                time.sleep(0.2)


def _equal(one: Any, other: Any, name: str) -> bool:
    import numpy as np

    return all(
        np.array_equal(a, b) for a, b in zip(one.column(name), other.column(name), strict=True)
    )


if __name__ == "__main__":
    _copy(gk.open(sys.argv[1]), slowly=True)
