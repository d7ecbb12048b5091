"""Memory budgets compared with torch's compiler saving fewer activations: peaks, times and exactness.

`./x bench compiled [MODEL ...]`: each model plainly, inside our budgets, and compiled by inductor with
`activation_memory_budget`; models made of layers also with each layer compiled and checkpoints around
some. (Inside our budgets a compiled module runs uncompiled.) Peaks are bytes of torch's allocator
above the level before the step, from torch's profiler, the same for all. Times are CPU times over
those of plain steps, medians of pairs, without compiling and planning, which have their own column.
Skipped without a C++ compiler.
"""

from __future__ import annotations

import copy
import os
import shutil
import sys
import time
from collections.abc import Callable

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch._dynamo
import torch._functorch.config

import gradkeep as gk
from bench._planned_models import Layer, Subject, build_subject
from bench.planned import make_step, measure_paired_ratio
from gradkeep.errors import BudgetError

MODELS = ("resnet32", "transformer", "gpt")
RATIOS = (0.8, 0.6, 0.5)
SAVED = (1.0, 0.5, 0.2)
"""Values of the compiler's `activation_memory_budget`."""
ROUNDS = 5
Row = Callable[[str, Callable[[], torch.Tensor], float], None]
"""Measures and prints a step: label, step, seconds until it was ready."""


def measure_allocated_peak(step) -> int:
    """Return the peak bytes of torch's allocator during a step, above the level before it."""
    with torch.autograd.profiler.profile(profile_memory=True) as seen:
        step()
    events = [e for e in seen.kineto_results.events() if e.name() == "[memory]"]
    level = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        most = max(most, level)
    return most


def compute_gradients(work, step) -> list[torch.Tensor]:
    torch.manual_seed(5)
    loss = step()
    return [loss.clone(), *(p.grad.clone() for p in work.model.parameters() if p.grad is not None)]


def describe_difference(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> str:
    if all(map(torch.equal, ours, plain)):
        return "bitwise"
    # Over all values: the gradient of a bias before a normalization is only rounding errors.
    squared_error = sum(
        float((a - b).double().square().sum()) for a, b in zip(ours, plain, strict=True)
    )
    whole = sum(float(b.double().square().sum()) for b in plain)
    return f"off by {(squared_error / whole) ** 0.5:.0e}"


def measure(name: str) -> None:
    work = build_subject(name)
    step, reference = (
        make_step(work),
        make_step(build_subject(name)),
    )  # the second is the plain reference
    step(), reference()
    state = copy.deepcopy(work.model.state_dict())
    plain = compute_gradients(work, step)
    work.model.load_state_dict(state)
    base = measure_allocated_peak(step)
    print(f"{name}: plain steps take {base / 1e6:.1f} MB besides parameters", flush=True)

    def row(label: str, run, seconds: float) -> None:
        work.model.load_state_dict(state)
        numbers = describe_difference(compute_gradients(work, run), plain)
        peak = measure_allocated_peak(run) / base
        ratio = measure_paired_ratio(reference, run, ROUNDS)
        print(
            f"  {label:<24} peak {peak:.3f}, time x{ratio:.3f}, {numbers}, ready after {seconds:.1f} s",
            flush=True,
        )

    for ratio in RATIOS:
        budget = gk.memory_budget(ratio)

        def run(budget=budget):
            with budget.step():
                return step()

        began = time.process_time()
        try:
            for _ in range(5):
                run()
        except BudgetError:
            print(f"  budget {ratio}: below the floor")
            continue
        row(f"budget {ratio}", run, time.process_time() - began)
    _measure_compiled_model(work, row)
    _measure_compiled_layers(work, row)


def _measure_compiled_model(work: Subject, row: Row) -> None:
    """Measure the compiled model with several activation memory budgets."""
    step, forward = make_step(work), work.model.forward
    for share in SAVED:
        torch._dynamo.reset()
        with torch._functorch.config.patch(activation_memory_budget=share):
            work.model.forward = torch.compile(forward)
            began = time.process_time()
            try:
                step(), step()
                row(f"compiled, saving {share}", make_step(work), time.process_time() - began)
            finally:
                work.model.forward = forward


def _measure_compiled_layers(work: Subject, row: Row) -> None:
    """Measure compiled layers with checkpoints around some of them."""
    layers = [module for module in work.model.modules() if isinstance(module, Layer)]
    if not layers:
        return
    torch._dynamo.reset()
    plain = [layer.forward for layer in layers]
    for layer, forward in zip(layers, plain, strict=True):
        layer.forward = torch.compile(forward)
    step = make_step(work)
    try:
        for name, place in work.placements:
            began = time.process_time()
            remove = place()
            try:
                step(), step()
                row(f"compiled layers, {name}", step, time.process_time() - began)
            finally:
                remove()
    finally:
        for layer, forward in zip(layers, plain, strict=True):
            layer.forward = forward


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        print("skipped: torch's compiler needs a C++ compiler")
        return 0
    for name in arguments or MODELS:
        measure(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
