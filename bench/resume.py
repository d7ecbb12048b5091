"""Cost of reruns, resumes and captures of losses.

`./x bench resume [--quick]`: a rerun of a finished capture against a plain pass over its loader and
against the capture itself; the cost of recomputing stored rows on resume; and a capture of losses
alone against a plain forward pass. MLP, CNN on 3 x 32 x 32, transformer; one thread, CPU time,
medians of alternating rounds.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path

import torch

import gradkeep as gk
from bench._passes import Workload, build_workloads, cpu_seconds, measure_ratio

BAR = 1.1  # losses / forward


def capture_workload(work: Workload, folder: str | Path, keep: str | None = None) -> gk.Captured:
    options = {"task": work.task, "split": "train", "keep": keep, "progress": False}
    return gk.capture(folder, work.net, work.loader, **options)


def measure_proof(work: Workload, folder: str) -> float:
    """Return the CPU seconds for recomputing eight rows and comparing them."""
    from gradkeep.capturing._resume import RecomputeCheck

    spent = 0.0
    plain = RecomputeCheck.check_batch

    def timed(self: RecomputeCheck, ids: object, batch: object) -> None:
        nonlocal spent
        spent += cpu_seconds(lambda: plain(self, ids, batch))

    RecomputeCheck.check_batch = timed
    try:
        capture_workload(work, folder)
    finally:
        RecomputeCheck.check_batch = plain
    return spent


def main() -> int:
    torch.set_num_threads(1)
    quick = "--quick" in sys.argv[1:]
    rounds = 3 if quick else 7
    print(
        "model                 rows  read s  capture s  rerun s  rerun/read  rerun/capture  proof s"
    )
    some = build_workloads(0.25 if quick else 1.0)
    for work in some:
        with tempfile.TemporaryDirectory() as folder:
            once = functools.partial(capture_workload, work, folder)
            capturing = cpu_seconds(once)
            read, rerun, times = measure_ratio(work.read_loader, once, rounds)
            proof_seconds = measure_proof(work, folder)
        rows = len(work.loader.dataset)
        print(
            f"{work.name:<20}{rows:>6}{read:>8.3f}{capturing:>11.2f}{rerun:>9.3f}{times:>12.1f}"
            f"{rerun / capturing:>15.2f}{proof_seconds:>9.3f}",
            flush=True,
        )
    print("\nmodel                 rows  forward s  losses s  ratio  bytes/row")
    worst = 0.0
    for work in some:
        taken = []

        def losses(work: Workload = work, taken: list[int] = taken) -> None:
            with tempfile.TemporaryDirectory() as folder:
                taken.append(capture_workload(work, folder, "losses").bytes)

        forward, capturing, times = measure_ratio(work.forward, losses, rounds)
        worst = max(worst, times)
        rows = len(work.loader.dataset)
        print(
            f"{work.name:<20}{rows:>6}{forward:>11.2f}{capturing:>10.2f}{times:>7.2f}"
            f"{taken[-1] / rows:>11.0f}",
            flush=True,
        )
    print(f"losses / forward: at most {worst:.2f} (bar {BAR})")
    return int(worst > BAR)


if __name__ == "__main__":
    sys.exit(main())
