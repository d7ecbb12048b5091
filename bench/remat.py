"""Rematerialization: the simulator, then training inside a budget; one run, CPU time.

The simulator is compared with a plain transcription of the same algorithm; training with plain
training, checkpoints and torch's compiler. `./x bench remat [LOG]`; the default log is the
DenseNet-121 log of the DTR authors at half of its peak, from GRADKEEP_DATA, or else a small log of our
own. `./x bench remat simulator`, `./x bench planned [MODEL ...]` and `./x bench compiled [MODEL ...]` run
the parts alone.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

from bench import compiled, planned
from gradkeep.remat import read_log, simulate, unlimited_peak
from tests.remat.plain_remat import plain_simulate

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("GRADKEEP_DATA", ROOT.parent / "shared" / "data"))
BARS = {"dtr-eq": 50_000, "dtr": 5_000, "msps": 5_000}
OTHERS = ("dtr-local", "lru", "largest")
ROUNDS = 7


def find_default_log() -> Path:
    logs = sorted((DATA / "dtr_logs").glob("tv_densenet121*.log"))
    return logs[0] if logs else ROOT / "tests" / "remat" / "data" / "cnn-alias.log"


def main(arguments: list[str]) -> int:
    only = arguments[:1] == ["simulator"]
    missed = run_simulator(arguments[1:] if only else arguments)
    return missed if only else max(missed, planned.main([]), compiled.main([]))


def run_simulator(arguments: list[str]) -> int:
    log = Path(arguments[0]) if arguments else find_default_log()
    program = read_log(log)
    budget = int(unlimited_peak(program) * 0.5)
    print(f"{log.name}: {len(program.ops)} operators, half of the peak")
    print(
        f"{'heuristic':<12}{'operators/s':>12}{'bar':>9}   {'plain, operators/s':>18}  {'ratio':>7}"
    )
    missed = False
    for name in (*BARS, *OTHERS):
        ours, plain, outcome = [], [], None
        for turn in range(ROUNDS):
            start = time.process_time()
            outcome = simulate(program, heuristic=name, budget=budget, limit=2.0)
            ours.append(len(program.ops) / (time.process_time() - start))
            if turn < 1:
                start = time.process_time()
                slow = plain_simulate(
                    program, heuristic=name, budget=budget, policy="eager", limit=2.0
                )
                plain.append(len(program.ops) / (time.process_time() - start))
                assert (slow.status, slow.compute) == (outcome.status, outcome.compute)
        speed, base = statistics.median(ours), statistics.median(plain)
        bar = BARS.get(name)
        missed |= bar is not None and speed < bar
        limit = "" if bar is None else f"{bar:,}"
        print(f"{name:<12}{speed:>12,.0f}{limit:>9}   {base:>18,.0f}  {speed / base:>6.0f}x")
    return int(missed)


if __name__ == "__main__":
    sys.setrecursionlimit(100_000)
    sys.exit(main(sys.argv[1:]))
