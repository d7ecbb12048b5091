"""Training inside a budget in real memory: resident memory, tensor bytes and CPU time.

`./x bench budgets [MODEL ...] [--budgets 0.7 0.5] [--quick] [--jemalloc]`: plain training, training inside a budget,
and every placement of `torch.utils.checkpoint`, each in a process of its own on one thread. After the
warm-up (which includes recording and planning) freed memory is returned to the system, the kernel's
high-water mark is reset, and the rise of resident memory over five steps is read from it. Times are medians
of the CPU times of these steps. "checkpoint" is the fastest placement whose resident memory is at
most ours. With `--jemalloc` every process uses that allocator with the settings of docs/memory.md; plain
training with the C library's allocator is printed too. Prints the missed bars at the end; the exit code is 0
only if there are none.
"""

from __future__ import annotations

import argparse
import ctypes.util
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import torch

from bench._planned_models import Subject, build_language_model, build_subject, build_zoo_subject
from gradkeep.remat.planned._resident import return_freed_memory

MODELS = ("resnet20", "transformer", "unet", "densenet", "lstm")
BARS = {0.7: 1.15, 0.5: 1.30}
"""Largest time over plain training by budget."""
EXCESS = 0.05
"""Largest excess of resident memory over the budget, as a fraction of plain training's."""
LSTM_TIME = 1.6
JEMALLOC_SETTINGS = "dirty_decay_ms:-1,muzzy_decay_ms:-1,oversize_threshold:0,thp:always"
"""Reuse freed blocks of all sizes, and map huge pages."""
WARM_UP, STEPS = 6, 5


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run: bytes of resident memory over its start, seconds of a step, and a digest of the results."""

    resident: int
    seconds: float
    digest: str
    tensors: int | None = None
    """Peak of live tensor bytes, as counted by the budget."""
    budget: int | None = None
    error: str | None = None


def build(name: str) -> Subject:
    """Build a model whose step takes 200 MB or more."""
    torch.manual_seed(0)
    if name == "resnet20":
        return build_zoo_subject("resnet20", 0, batch_size=192)
    if name == "transformer":
        return build_language_model(
            name, dropout=0.1, fused=False, dim=192, depth=8, length=64, batch=64
        )
    if name == "unet":
        return build_zoo_subject("unet", 0, batch_size=64, channels=8)
    if name == "densenet":
        return build_zoo_subject("densenet100", 0, batch_size=32)
    if name == "lstm":
        return build_zoo_subject("lstm", 0, batch_size=256, length=64, in_dim=128, mem_dim=256)
    return build_subject(name)


def read_status(field: str) -> int:
    """Return a field of the kernel's status of this process in bytes."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def reset_high_water_mark() -> int:
    """Return freed memory to the system, reset the high-water mark, and return the resident bytes."""
    gc.collect()
    return_freed_memory()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return read_status("VmRSS")


def run_steps(subject: Subject, around) -> Measurement:
    """Train in this process and measure it."""
    optimizer = torch.optim.SGD(subject.model.parameters(), lr=0.01, momentum=0.9)
    hashed = hashlib.sha256()

    def step() -> None:
        with around():
            optimizer.zero_grad()
            loss = subject.loss()
            loss.backward()
        hashed.update(loss.detach().numpy().tobytes())
        optimizer.step()

    torch.manual_seed(0)
    for _ in range(WARM_UP):
        step()
    start = reset_high_water_mark()
    timings = []
    for _ in range(STEPS):
        began = time.process_time()
        step()
        timings.append(time.process_time() - began)
    resident = read_status("VmHWM") - start
    for tensor in subject.model.state_dict().values():
        hashed.update(tensor.numpy().tobytes())
    return Measurement(resident, statistics.median(timings), hashed.hexdigest())


def run(name: str, mode: str, option: str) -> Measurement:
    """Run one measurement in this process."""
    import contextlib
    import dataclasses

    import gradkeep as gk
    from gradkeep.errors import BudgetError

    subject = build(name)
    if mode == "plain":
        return run_steps(subject, contextlib.nullcontext)
    if mode == "checkpoint":
        dict(subject.placements)[option]()
        return run_steps(subject, contextlib.nullcontext)
    budget = gk.memory_budget(float(option))
    try:
        measured = run_steps(subject, budget.step)
    except BudgetError as error:
        return Measurement(0, 0.0, "", error=str(error).replace("\n", " "))
    report = budget.report()
    return dataclasses.replace(measured, tensors=report.measured_peak, budget=report.budget)


def measure(
    name: str, mode: str, option: str = "", *, environment: dict[str, str] | None = None
) -> Measurement:
    """Run one measurement in a new process."""
    command = [sys.executable, "-m", "bench.budgets", "--run", name, mode, option]
    variables = os.environ | (environment or {})
    result = subprocess.run(command, capture_output=True, text=True, env=variables)
    if result.returncode:
        raise RuntimeError(f"{name} {mode} {option} failed:\n{result.stderr}")
    return Measurement(**json.loads(result.stdout.splitlines()[-1]))


def format_row(label: str, measured: Measurement, plain: Measurement) -> str:
    tensors = "" if measured.tensors is None else f"{measured.tensors / 1e6:.0f} MB"
    equal = "equal" if measured.digest == plain.digest else "DIFFERS"
    return (
        f"  {label:<26}{measured.resident / 1e6:>8.0f} MB{measured.resident / plain.resident:>7.2f}"
        f"{tensors:>10}{measured.seconds:>9.3f} s{measured.seconds / plain.seconds:>7.2f}x  {equal}"
    )


def compare(name: str, fractions: list[float], *, quick: bool) -> list[str]:
    """Measure one model in all ways and return the missed bars."""
    plain = measure(name, "plain")
    print(f"{name}\n  {'':<26}{'resident':>11}{'':>7}{'tensors':>10}{'CPU':>11}")
    if "LD_PRELOAD" in os.environ:
        default = measure(name, "plain", environment={"LD_PRELOAD": ""})
        print(format_row("plain, C library", default, plain))
    print(format_row("plain", plain, plain), flush=True)
    placements = {}
    for label, _ in () if quick else build(name).placements:
        try:
            placements[label] = measure(name, "checkpoint", label)
        except RuntimeError as error:  # such as in-place operators on the input of a segment
            reason = str(error).strip().splitlines()[-1]
            print(f"  checkpoint, {label}, fails: {reason[:90]}", flush=True)
    missed = []
    for fraction in fractions:
        ours = measure(name, "budget", str(fraction))
        if ours.error is not None:
            print(f"  budget {fraction}: {ours.error}", flush=True)
            missed.append(f"{name} at {fraction}: {ours.error}")
            continue
        print(format_row(f"budget {fraction}", ours, plain), flush=True)
        share, slowdown = ours.resident / plain.resident, ours.seconds / plain.seconds
        if share > fraction + EXCESS:
            missed.append(f"{name} at {fraction}: resident memory {share:.2f}")
        if slowdown > (LSTM_TIME if name == "lstm" else BARS.get(fraction, float("inf"))):
            missed.append(f"{name} at {fraction}: time {slowdown:.2f}x")
        if ours.digest != plain.digest:
            missed.append(f"{name} at {fraction}: other results than plain training")
        smaller = {k: v for k, v in placements.items() if v.resident <= ours.resident}
        if smaller:
            label = min(smaller, key=lambda key: smaller[key].seconds)
            print(format_row(f"checkpoint, {label}", smaller[label], plain), flush=True)
            if ours.seconds > smaller[label].seconds:
                ratio = ours.seconds / smaller[label].seconds
                missed.append(f"{name} at {fraction}: {ratio:.2f}x the time of checkpoint")
        elif placements:
            print("  checkpoint: no placement takes as little memory", flush=True)
    return missed


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./x bench budgets")
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.7, 0.5, 0.4])
    parser.add_argument("--quick", action="store_true", help="leave out checkpoints")
    parser.add_argument("--jemalloc", action="store_true", help="preload jemalloc everywhere")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.run is not None:
        print(json.dumps(asdict(run(*options.run))))
        return 0
    if options.jemalloc:
        library = ctypes.util.find_library("jemalloc")
        if library is None:
            parser.error("jemalloc is not installed; on Debian: apt install libjemalloc2")
        os.environ.update(LD_PRELOAD=library, MALLOC_CONF=JEMALLOC_SETTINGS)
    missed = []
    for name in options.models:
        missed += compare(name, options.budgets, quick=options.quick)
    print(*(f"missed: {line}" for line in missed), sep="\n")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
