"""A store of a hundred thousand segments: cost of opening, listing, querying and verifying it.

`./x bench segments [--segments N]`: each command in a separate process, wall seconds and peak memory.
Each segment holds one small row, so that the cost depends on the number of segments, not on bytes.
Building the store takes minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SECONDS, MEMORY = 20.0, 500 << 20
QUESTION = "select split, count(*), avg(loss) from samples group by split"
_MEASURED = """
import json, sys, time
from pathlib import Path
from gradkeep.cli import main
start = time.perf_counter()
sys.argv = ["gradkeep", *sys.argv[1:]]
code = 0
try:
    main()
except SystemExit as end:
    code = end.code or 0
lines = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
print(json.dumps([time.perf_counter() - start, 1024 * peak, code]))
"""


def build_store(folder: Path, segments: int) -> None:
    import gradkeep as gk
    import gradkeep.store as gs

    store = gk.open(folder, durability="process")
    schema = gs.Schema(
        (
            gs.Array("loss"),
            gs.Array("label", "int64"),
            gs.Array("code", "uint8", (64,), kind="data"),
        ),
        num_rows=segments,
        rows_per_segment=1,
    )
    rng = np.random.default_rng(0)
    with store.write(gs.CaptureKey("final", "train"), schema) as writer:
        for start in range(0, segments, 4096):
            count = min(4096, segments - start)
            values = {
                "loss": rng.random(count, np.float32),
                "label": rng.integers(0, 10, count),
                "code": rng.integers(0, 256, (count, 64), np.uint8),
            }
            writer.append(np.arange(start, start + count), values)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--segments", type=int, default=100_000)
    parser.add_argument("--sample", type=int, default=1000)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gradkeep-segments-"))
    missed = False
    try:
        started = time.perf_counter()
        build_store(folder / "store", options.segments)
        print(f"{options.segments:,} segments written in {time.perf_counter() - started:.0f} s")
        store = str(folder / "store")
        for name, arguments in (
            ("info", ["info", store]),
            ("sql, the first time", ["sql", store, QUESTION]),
            ("sql, the second time", ["sql", store, QUESTION]),
            (
                f"verify --sample {options.sample}",
                ["verify", store, "--sample", str(options.sample)],
            ),
        ):
            done = subprocess.run(
                [sys.executable, "-c", _MEASURED, *arguments], capture_output=True, text=True
            )
            if done.returncode:
                print(f"{name}: failed\n{done.stderr[-400:]}")
                missed = True
                continue
            wall, peak, code = json.loads(done.stdout.splitlines()[-1])
            met = wall <= SECONDS and peak <= MEMORY and code == 0
            missed |= not met
            verdict = "" if met else f" MISSED (code {code})"
            print(
                f"{name}: {wall:.1f} s, {peak >> 20} MiB (at most {SECONDS:.0f} s, {MEMORY >> 20} MiB){verdict}"
            )
    finally:
        shutil.rmtree(folder)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
