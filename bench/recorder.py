"""Cost of recording per operator, over a dispatch mode that does nothing.

Small operators, forward and backward, so that arithmetic does not hide the cost. One process, one
thread, CPU time; the two modes alternate, medians of rounds. `./x bench recorder [--quick]`
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradkeep.compat.dtr.zoo import build
from gradkeep.remat import read_log, record

BAR = 15.0  # us per operator
MODELS = {
    "lstm": {"batch_size": 1},
    "treelstm": {"batch_size": 1},
    "transformer_encoder": {"batch_size": 1, "length": 4},
    "unrolled_gan": {"batch_size": 1},
    "resnet20": {"batch_size": 1, "height": 8, "width": 8},
}


class Empty(TorchDispatchMode):
    """Calls the operator only, without torch's guard against compiling, like the recorder."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Count(TorchDispatchMode):
    """Counts operators."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def cpu_seconds(mode, step) -> float:
    with mode:
        start = time.process_time()
        step()
        return time.process_time() - start


def measure(
    name: str, sizes: dict[str, int], rounds: int, folder: Path
) -> tuple[float, float, float, int]:
    work = build(name, **sizes)
    work.step()
    with Count() as count:
        work.step()
    empty, recorder = Empty(), record(folder / f"{name}.log")
    cpu_seconds(empty, work.step), cpu_seconds(recorder, work.step)
    extra, times = [], []
    for _ in range(rounds):
        plain = cpu_seconds(empty, work.step)
        recorded = cpu_seconds(recorder, work.step)
        extra.append((recorded - plain) / count.calls * 1e6)
        times.append(recorded / plain)
    assert read_log(recorder.path).ops
    return statistics.median(extra), min(extra), statistics.median(times), count.calls


def main() -> None:
    torch.set_num_threads(1)
    quick = "--quick" in sys.argv[1:]
    rounds = 7 if quick else 41
    print(f"{'model':<22}{'operators':>10}{'us/op over empty':>18}{'least':>8}{'ratio':>8}")
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name, sizes in MODELS.items():
            median, least, times, calls = measure(name, sizes, rounds, Path(folder))
            worst = max(worst, median)
            print(f"{name:<22}{calls:>10}{median:>18.1f}{least:>8.1f}{times:>8.2f}", flush=True)
    verdict = "met" if worst <= BAR else "MISSED"
    print(f"largest median {worst:.1f} us per operator, bar {BAR:g}: {verdict}")


if __name__ == "__main__":
    main()
