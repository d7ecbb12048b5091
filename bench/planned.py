"""Training inside a budget compared with plain training and with the best placement of checkpoints.

`./x bench planned [MODEL ...] [--quick]`: one process, one thread. Every planned step is paired with
an adjacent plain step, in alternating order; ratios are medians of CPU times. Peaks are live bytes of
tensors. Prints the missed bars at the end; the exit code is 0 only if there are none.
`./x bench remat` runs this benchmark too.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import sys
import time
from dataclasses import dataclass

import torch

import gradkeep as gk
from bench._planned_models import SUBJECTS, build_subject
from gradkeep.errors import BudgetError
from gradkeep.remat._tensors import exclude_mode_from_compiler
from gradkeep.remat.planned._session import RecordingMode
from gradkeep.remat.planned._step_recorder import StepRecorder

RATIOS = (0.8, 0.6, 0.5, 0.4)
BARS = {0.8: 1.10, 0.6: 1.20, 0.5: 1.25, 0.4: 1.35}
OWN_BARS = {("unet", 0.6): 1.25, ("vgg", 0.5): 1.35}
NO_DROP = 1.05
PER_SAVED = 8e-6
"""Seconds per saved tensor that is not dropped."""
CHAIN = 1500
STEPS = 3


@dataclass(frozen=True, slots=True)
class Placement:
    """A placement of checkpoints: its peak, and its time over plain."""

    name: str
    peak: int
    ratio: float


def cpu_seconds(run) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def measure_paired_ratio(plain, other, rounds: int) -> float:
    """Return the median of other / plain, each pair run back to back."""
    return statistics.median(second / first for first, second in time_pairs(plain, other, rounds))


def time_pairs(plain, other, rounds: int) -> list[tuple[float, float]]:
    plain(), other()
    timings = []
    for turn in range(rounds):
        # The second of a pair runs with the caches of the first, so the order alternates.
        if turn % 2:
            first = cpu_seconds(plain)
            timings.append((first, cpu_seconds(other)))
        else:
            second = cpu_seconds(other)
            timings.append((cpu_seconds(plain), second))
    return timings


def measure_seconds_per_saved(rounds: int) -> float:
    """Return the cost of hooks per saved tensor in a step that drops nothing, with tiny
    operators."""
    start = torch.nn.Parameter(torch.randn(8, 8))

    def step():
        start.grad = None
        x = start
        for _ in range(CHAIN):
            x = x.sin()
        x.sum().backward()

    budget = gk.memory_budget(1.0)

    def within():
        with budget.step():
            step()

    for _ in range(4):
        within()
    return statistics.median(b - a for a, b in time_pairs(step, within, rounds)) / CHAIN


def measure_live_peak(step) -> int:
    """Return the peak live bytes of a step, counted by a dispatch mode."""
    recording, watch = StepRecorder(cloning=False), exclude_mode_from_compiler(RecordingMode)()
    watch.start(recording)
    try:
        step()
    finally:
        watch.stop()
        trace = recording.finish()
    return trace.peak


def make_step(work):
    def step():
        for parameter in work.model.parameters():
            parameter.grad = None
        loss = work.loss()
        loss.backward()
        return loss.detach()

    return step


def train_steps(work, state, around) -> list[torch.Tensor]:
    """Return losses, gradients, parameters, buffers and random state after a few steps of Adam."""
    work.model.load_state_dict(state)
    optimizer = torch.optim.Adam(work.model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    step = make_step(work)
    tensors = []
    for _ in range(STEPS):
        tensors.append(around(step).clone())
        tensors += [p.grad.clone() for p in work.model.parameters() if p.grad is not None]
        optimizer.step()
    tensors += [value.clone() for value in work.model.state_dict().values()]
    return [*tensors, torch.get_rng_state()]


def measure_placements(work, step, rounds: int) -> list[Placement]:
    placements = []
    for name, place in work.placements:

        def with_checkpoints(place=place):
            undo = place()
            try:
                step()
            finally:
                undo()

        try:
            peak = measure_live_peak(with_checkpoints)
        except RuntimeError:
            continue  # a segment that begins with an in-place operator
        placements.append(
            Placement(name, peak, measure_paired_ratio(step, with_checkpoints, rounds))
        )
    return placements


def measure(name: str, *, rounds: int) -> tuple[list[float], list[str]]:
    """Print the rows of one model; return its ratios to checkpointing, and the missed bars."""
    work = build_subject(name)
    step = make_step(work)
    step()
    state = copy.deepcopy(work.model.state_dict())
    base = gk.memory_budget(1.0, recordings=5)
    for _ in range(5):
        with base.step():
            step()

    def within(budget):
        def run(one=step):
            with budget.step():
                return one()

        return run

    baseline = base.explain()
    plain = train_steps(work, state, lambda one: one())
    is_repeatable = all(map(torch.equal, plain, train_steps(work, state, lambda one: one())))
    within(base)()
    overhead = measure_paired_ratio(step, within(base), rounds)
    missed = [] if overhead <= NO_DROP else [f"{name}, no drop: x{overhead:.3f}, bar {NO_DROP}"]
    slots = len(base._planner.last.compiled.slots)
    print(
        f"{name}: peak {baseline.peak / 1e6:.1f} MB, floor {baseline.floor / baseline.peak:.3f}, "
        f"{baseline.candidates} candidates of {slots} saved tensors; no drop x{overhead:.3f}"
        f"{'' if overhead <= NO_DROP else f' (bar {NO_DROP} MISSED)'}"
        f"{'' if is_repeatable else '; plain training itself is not repeatable'}",
        flush=True,
    )
    rows = []
    for ratio in RATIOS:
        try:
            started = time.process_time()
            budget = base.replan(ratio)
        except BudgetError:
            print(f"  {ratio}: below the floor")
            continue
        planning = time.process_time() - started
        run = within(budget)
        same = all(map(torch.equal, plain, train_steps(work, state, run)))
        time_ratio = measure_paired_ratio(step, run, rounds)
        done, plan = budget.report(), budget._planner.last
        peak = done.measured_peak
        bar = OWN_BARS.get((name, ratio), BARS[ratio])
        predicted = 1 + plan.compiled.evaluation.seconds / plan.compiled.trace.seconds
        within_budget = peak <= done.budget and abs(peak / done.predicted_peak - 1) <= 0.01
        missed += [f"{name} {ratio}: not bitwise equal"] * (not same)
        missed += [f"{name} {ratio}: peak above the budget, or not as predicted"] * (
            not within_budget
        )
        missed += [f"{name} {ratio}: x{time_ratio:.3f}, bar {bar}"] * (time_ratio > bar)
        rows.append((ratio, peak, time_ratio))
        full = measure_paired_ratio(within(replan_sampled(base, ratio)), run, rounds)
        print(
            f"  {ratio}: {'bitwise' if same else 'NOT EQUAL'}, peak {peak / baseline.peak:.4f} of plain "
            f"(predicted {done.predicted_peak / baseline.peak:.4f}), time x{time_ratio:.3f} "
            f"(predicted x{predicted:.3f}, bar {bar}{'' if time_ratio <= bar else ' MISSED'}), "
            f"comparing every byte x{full:.3f} of comparing samples, "
            f"planned in {planning:.1f} s",
            flush=True,
        )
    work.model.load_state_dict(state)
    placed = measure_placements(work, step, max(3, rounds // 2))
    ratios = []
    for ratio, peak, time_ratio in rows:
        fitting = [place for place in placed if place.peak <= peak + 0.01 * baseline.peak]
        if not fitting:
            print(f"  {ratio}: no placement of checkpoints has so small a peak")
            continue
        best = min(fitting, key=lambda place: place.ratio)
        ratios.append(time_ratio / best.ratio)
        print(
            f"  {ratio}: {ratios[-1]:.3f} of the time of checkpoints ({best.name}, "
            f"peak {best.peak / baseline.peak:.3f}, x{best.ratio:.3f})"
        )
        if ratios[-1] > 1:
            missed.append(f"{name} {ratio}: {ratios[-1]:.3f} of the time of checkpoints, bar 1.00")
    return ratios, missed


def replan_sampled(base, ratio: float):
    """Return the same budget with sampled instead of full comparison of recomputed tensors."""
    settings = dataclasses.replace(base._planner.settings, budget=ratio, check="sampled")
    return gk.remat.MemoryBudget(settings, planner=base._planner.replan(settings))


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    quick = "--quick" in arguments
    names = [name for name in arguments if not name.startswith("-")] or SUBJECTS
    ratios, missed = [], []
    hooks = measure_seconds_per_saved(9)
    print(
        f"hooks: {hooks * 1e6:.1f} us per saved tensor that is not dropped (bar {PER_SAVED * 1e6:.0f})"
    )
    if hooks > PER_SAVED:
        missed.append(f"hooks: {hooks * 1e6:.1f} us per saved tensor, bar {PER_SAVED * 1e6:.0f}")
    for name in names:
        model_ratios, wrong = measure(name, rounds=3 if quick else 7)
        ratios += model_ratios
        missed += wrong
    if ratios:
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        over = sum(ratio > 1 for ratio in ratios)
        print(
            f"against the best checkpoints with no larger peak: geometric mean {mean:.3f} "
            f"(target 0.92), {over} of {len(ratios)} above 1.00"
        )
    print(f"{len(missed)} bars missed", *missed, sep="\n  ")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
