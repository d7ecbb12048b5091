"""`gradkeep remat simulate` and `optimal`: the cost of a smaller memory budget."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep._display import pick_fields
from gradkeep.cli._inputs import input_file, output_file, run_script, script_exit_error
from gradkeep.cli._options import JsonOption, print_json
from gradkeep.errors import RematError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

LogArgument = Annotated[Path, typer.Argument(metavar="LOG", help="A recorded step.")]
BudgetOption = Annotated[
    str | None,
    typer.Option("--budget", help="Bytes such as 2GiB, or a fraction of the peak such as 0.5."),
]
RatioOption = Annotated[
    float | None,
    typer.Option("--ratio", min=0, max=1000, help="Budget as a fraction of the peak."),
]
LimitOption = Annotated[
    float, typer.Option("--limit", min=1, max=1e9, help="Slowdown that counts as thrashing.")
]


def simulate(
    log: LogArgument,
    heuristic: str = "dtr-eq",
    budget: BudgetOption = None,
    ratio: RatioOption = None,
    policy: str = "eager",
    limit: LimitOption = 10.0,
    skip_small: bool = False,
    sample: bool = False,
    timeline: Path | None = None,
    keep_releases: Annotated[bool, typer.Option("--releases/--no-releases")] = True,
    json: JsonOption = False,
) -> None:
    """Simulate a recorded step inside a smaller memory budget.

    Exit code 0 if it fits, 3 if it runs out of memory or thrashes.

    Options:
        heuristic: Eviction heuristic: dtr, dtr-eq, msps, ...
        policy: Deallocation policy: ignore, eager or banish.
        skip_small: Never evict storages below 1 % of the mean size.
        sample: Consider about 2 sqrt(n) storages only.
        timeline: Write every event to this CSV file.
        keep_releases: Use the deallocations of the log.
    """
    from gradkeep._budgets import format_bytes
    from gradkeep.remat import read_log, unlimited_peak
    from gradkeep.remat import simulate as run
    from gradkeep.remat.simulator._simulate import Timeline

    input_file(log, error=RematError)
    if timeline is not None:
        output_file(timeline, error=RematError)
    program = read_log(log)
    peak = unlimited_peak(program)
    allowed = resolve_budget(peak, ratio=ratio, budget=budget)
    least = program.constant_bytes
    events = None if timeline is None else Timeline()
    outcome = run(
        program if keep_releases else program.without_releases(),
        heuristic=heuristic,
        budget=allowed,
        policy=policy,  # type: ignore[arg-type]
        limit=limit,
        skip_small=skip_small,
        sample=sample,
        timeline=events,
    )
    if timeline is not None and events is not None:
        events.write(timeline)
    if json:
        fields: dict[str, Any] = dataclasses.asdict(outcome) | {"budget": int(allowed)}
        print_json({**fields, "ratio": allowed / peak, "unlimited_peak": peak, "log": str(log)})
    else:
        words = {
            "ok": f"takes {outcome.overhead:.4f}x the time",
            "oom": "runs out of memory",
            "thrash": f"thrashes: more than {limit:g}x the time",
        }
        print(
            f"{log.name}: {len(program.ops)} operators, peak {format_bytes(peak)} without a budget\n"
            f"in {format_bytes(allowed)} ({allowed / peak:.0%}) with {outcome.heuristic} it "
            f"{words[outcome.status]}\n"
            f"peak {format_bytes(outcome.peak)}, {outcome.evictions} evictions, "
            f"{outcome.rematerializations} operators recomputed"
        )
        if outcome.status == "oom":
            need = max(least, program.bottleneck_bytes)
            print(
                f"inputs and parameters take {format_bytes(least)}; no budget below "
                f"{format_bytes(need)} can work"
            )
    if outcome.status != "ok":
        raise typer.Exit(3)


def optimal(
    log: LogArgument,
    budget: BudgetOption = None,
    ratio: RatioOption = None,
    time_limit: Annotated[float, typer.Option(min=0.001, max=10 * 365 * 86400.0)] = 60.0,
    json: JsonOption = False,
) -> None:
    """Compute the cheapest schedule within a budget, with a proven bound, beside heuristics.

    For small programs: up to about 30 operators it takes seconds. Aliases are collapsed; inputs and
    parameters are always in memory.

    Options:
        time_limit: Seconds for the integer program.
    """
    from gradkeep import remat
    from gradkeep._budgets import format_bytes
    from gradkeep._display import text_table

    input_file(log, error=RematError)
    program = remat.simplify(remat.read_log(log))
    graph = remat.Graph.of(remat.read_log(log))
    keep = remat.keep_all(graph)
    allowed = int(resolve_budget(keep.peak, ratio=ratio, budget=budget))
    best = remat.optimal(graph, budget=allowed, time_limit=time_limit)
    chen = remat.chen(graph)
    heuristics = {
        name: remat.simulate(program, heuristic=name, budget=allowed)
        for name in ("dtr", "dtr-eq", "dtr-local", "msps", "lru", "largest")
    }
    schedule, base = best.schedule, graph.compute
    if json:
        print_json(
            {
                "log": str(log),
                "nodes": len(graph),
                "budget": allowed,
                "base_compute": base,
                "status": best.status,
                "compute": None if schedule is None else schedule.compute,
                "overhead": None if schedule is None else schedule.compute / base,
                "bound": best.bound,
                "gap": best.gap,
                "peak": None if schedule is None else schedule.peak,
                "keep_all": pick_fields(keep, "compute", "peak"),
                "chen": pick_fields(chen, "compute", "peak"),
                "heuristics": {
                    name: pick_fields(run, "status", "overhead", "peak")
                    for name, run in heuristics.items()
                },
            }
        )
    else:
        price, note = f"at least {best.bound / base:.3f}x", str(best.status)
        if schedule is not None:
            price = f"{schedule.compute / base:.3f}x"
            note = "proven" if best.gap == 0 else f"at most {best.gap:.1%} above the best"
        lines = [
            ("keep all", "1.000x", f"in {format_bytes(keep.peak)}"),
            ("optimum", price, note),
            ("chen sqrt(n)", f"{chen.compute / base:.3f}x", f"in {format_bytes(chen.peak)}"),
        ]
        for name, run in heuristics.items():
            time = f"{run.overhead:.3f}x" if run.status == "ok" else run.status
            lines.append((name, time, ""))
        print(f"{log.name}: {len(graph)} operators, budget {format_bytes(allowed)}")
        print(text_table(("schedule", "time", ""), lines, right={1}))
    if schedule is None:
        raise typer.Exit(3)


def resolve_budget(peak: int, *, ratio: float | None, budget: str | None) -> float:
    """Return the budget in bytes; a fraction is one of `peak`."""
    from gradkeep._budgets import parse_budget

    if (ratio is None) == (budget is None):
        raise RematError(
            "pass either --ratio or --budget",
            code="cli.exclusive_options",
            fix="--budget 0.5 or --budget 2GiB",
        )
    if ratio is not None and not ratio > 0:
        raise RematError("--ratio must be above 0", code="cli.ratio", found=ratio)
    allowed = ratio if ratio is not None else parse_budget(budget or "")
    return int(peak * allowed) if isinstance(allowed, float) else allowed


_FRACTIONS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
ScriptArgument = Annotated[
    Path, typer.Argument(metavar="SCRIPT", help="A Python file with a function step().")
]
FunctionOption = Annotated[
    str, typer.Option("--function", help="The function that does one training step.")
]


def record(
    script: ScriptArgument,
    log: Path = Path("step.log"),
    function: FunctionOption = "step",
    repeats: Annotated[int, typer.Option(min=1, max=10_000)] = 3,
    json: JsonOption = False,
) -> None:
    """Record the function `step()` of a script, after one run to warm up.

    Options:
        log: Log file to write.
        repeats: Runs; the shortest times are kept.
    """
    from gradkeep._budgets import format_bytes
    from gradkeep.remat import read_log, unlimited_peak

    output_file(log, error=RematError)
    step = load_step(script, function)
    run_step(step, script)
    from gradkeep.remat import record as recorder_for  # loads torch

    recorder = recorder_for(log)
    for _ in range(repeats):
        with recorder:
            run_step(step, script)
    program = read_log(log)
    peak = unlimited_peak(program)
    if json:
        fields = {"log": str(log), "operators": len(program.ops), "peak": peak}
        fields |= pick_fields(program, "compute", "constant_bytes")
        print_json({**fields, **pick_fields(recorder, "live_peak", "repeats")})
        return
    print(
        f"recorded {len(program.ops)} operators, {program.compute / 1e6:.1f} ms, "
        f"peak {format_bytes(peak)} ({format_bytes(program.constant_bytes)} inputs and parameters)"
    )
    print(f"wrote {log}; next: gradkeep remat simulate {log} --ratio 0.5")


def plan(
    script: ScriptArgument,
    budget: str | None = None,
    function: FunctionOption = "step",
    recordings: Annotated[int, typer.Option(min=2, max=1000)] = 3,
    save: Path | None = None,
    json: JsonOption = False,
) -> None:
    """Show slowdown against budget, and the floor, for the function `step()` of a script.

    Options:
        budget: Explain this budget: 2GiB, or 0.5.
        recordings: Recorded runs.
        save: Write the plan: gk.memory_budget(...).load(FILE).
    """
    from gradkeep._budgets import format_bytes, parse_budget
    from gradkeep._display import text_table

    if save is not None and budget is None:
        raise typer.BadParameter("--save needs --budget")
    if save is not None:
        output_file(save, error=RematError)
    if budget is not None:
        parse_budget(budget)
    step = load_step(script, function)
    run_step(step, script)
    from gradkeep.remat import memory_budget  # loads torch

    whole = memory_budget(1.0, recordings=recordings)
    for _ in range(recordings):
        with whole.step():
            run_step(step, script)
    about = whole.explain()
    points = whole.curve(_FRACTIONS)
    if not json:
        # Printed first, so that it is seen even if the budget is below the floor.
        print(
            f"without a budget the step takes {format_bytes(about.peak)}; "
            f"the floor is {format_bytes(about.floor)} ({about.floor / max(1, about.peak):.2f})"
        )
        lines = [
            (f"{share:.1f}", *str(point).split(": ", 1))
            for share, point in zip(_FRACTIONS, points, strict=True)
        ]
        print(text_table(("budget", "", "costs"), lines, right={0, 1}))
    explanation = None
    if budget is not None:
        chosen = whole.replan(budget)
        explanation = chosen.explain()
        if save is not None:
            chosen.save(save)
    if json:
        print_json(
            {
                "peak": about.peak,
                "floor": about.floor,
                "curve": [dataclasses.asdict(point) for point in points],
                "explanation": None if explanation is None else dataclasses.asdict(explanation),
                "saved": None if save is None else str(save),
            }
        )
        return
    if explanation is not None:
        print(explanation)
    if save is not None:
        print(f"wrote {save}: gk.memory_budget({budget!r}).load({str(save)!r})")


def load_step(script: str | os.PathLike[str], function: str = "step") -> Callable[[], Any]:
    """Return a function of a Python file, which is run, but not as `__main__`."""
    names, path = run_script(script, error=RematError), Path(script)
    step: Callable[[], Any] | None = names.get(function)
    if not callable(step):
        defined = sorted(
            name for name, value in names.items() if callable(value) and name[0] != "_"
        )
        raise RematError(
            f"the script has no function {function}()",
            code="cli.no_step_function",
            path=path,
            found=", ".join(defined) or "no functions",
            fix="Name a function that does one training step with --function.",
        )
    return step


def run_step(step: Callable[[], Any], script: str | os.PathLike[str]) -> None:
    """Run one step; `sys.exit` in it is an error."""
    try:
        step()
    except SystemExit as error:
        raise script_exit_error(script, error, RematError) from error
