"""`gradkeep remat record` and `plan`: record a script's training step, and plan budgets for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep.cli._files import output_file
from gradkeep.cli._imports import run_script, script_exit_error
from gradkeep.cli._options import JsonOption, print_json
from gradkeep.errors import RematError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable


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
        print_json(
            {
                "log": str(log),
                "operators": len(program.ops),
                "compute": program.compute,
                "peak": peak,
                "live_peak": recorder.live_peak,
                "repeats": recorder.repeats,
                "constant_bytes": program.constant_bytes,
            }
        )
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
