"""`gradkeep remat record` and `plan`: a script's training step as a log, and what budgets cost it."""

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


FRACTIONS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
ScriptArgument = Annotated[
    Path, typer.Argument(metavar="SCRIPT", help="A Python file with a function step().")
]
FunctionOption = Annotated[
    str, typer.Option("--function", help="The function that does one training step.")
]


def record(
    script: ScriptArgument,
    log: Annotated[Path, typer.Option("--log", help="Where the log goes.")] = Path("step.log"),
    function: FunctionOption = "step",
    repeats: Annotated[
        int,
        typer.Option(
            "--repeats", min=1, max=10_000, help="Times to run it; the least times are kept."
        ),
    ] = 3,
    json: JsonOption = False,
) -> None:
    """Run the function `step()` of a script and record what it does.

    It is run once before, so that first-time work is not counted.
    """
    from gradkeep._budgets import format_bytes
    from gradkeep.remat import read_log, unlimited_peak

    output_file(log, error=RematError)
    step = step_of(script, function)
    run_step(step, script)
    from gradkeep.remat import record as recorder_for  # loads torch

    recorder = recorder_for(log)
    for _ in range(repeats):
        with recorder:
            run_step(step, script)
    program = read_log(log)
    peak = unlimited_peak(program)
    if json:
        told = {"log": str(log), "operators": len(program.ops), "compute": program.compute}
        told |= {"peak": peak, "live_peak": recorder.live_peak, "repeats": recorder.repeats}
        print_json({**told, "constant_bytes": program.constant_bytes})
        return
    print(
        f"recorded {len(program.ops)} operators, {program.compute / 1e6:.1f} ms, "
        f"peak {format_bytes(peak)} ({format_bytes(program.constant_bytes)} inputs and parameters)"
    )
    print(f"wrote {log}; next: gradkeep remat simulate {log} --ratio 0.5")


def plan(
    script: ScriptArgument,
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="Bytes such as 2GiB, or a fraction such as 0.5: explain it."),
    ] = None,
    function: FunctionOption = "step",
    recordings: Annotated[
        int, typer.Option("--recordings", min=2, max=1000, help="Times to run it, recorded.")
    ] = 3,
    save: Annotated[
        Path | None,
        typer.Option("--save", help="Write the plan: gk.memory_budget(...).load(FILE)."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show budget against slowdown, and the floor, for the function `step()` of a script."""
    from gradkeep._budgets import format_bytes, parse_budget
    from gradkeep._display import text_table

    if save is not None and budget is None:
        raise typer.BadParameter("--save needs --budget")
    if save is not None:
        output_file(save, error=RematError)
    if budget is not None:
        parse_budget(budget)
    step = step_of(script, function)
    run_step(step, script)
    from gradkeep.remat import memory_budget  # loads torch

    whole = memory_budget(1.0, recordings=recordings)
    for _ in range(recordings):
        with whole.step():
            run_step(step, script)
    about = whole.explain()
    points = whole.curve(FRACTIONS)
    if not json:
        # First, so that it can also be seen when the budget is below the floor.
        print(
            f"without a budget the step takes {format_bytes(about.peak)}; "
            f"the floor is {format_bytes(about.floor)} ({about.floor / max(1, about.peak):.2f})"
        )
        lines = [
            (f"{share:.1f}", *str(point).split(": ", 1))
            for share, point in zip(FRACTIONS, points, strict=True)
        ]
        print(text_table(("budget", "", "costs"), lines, right={0, 1}))
    asked = None
    if budget is not None:
        chosen = whole.anew(budget)
        asked = chosen.explain()
        if save is not None:
            chosen.save(save)
    if json:
        print_json(
            {
                "peak": about.peak,
                "floor": about.floor,
                "curve": [dataclasses.asdict(point) for point in points],
                "explanation": None if asked is None else dataclasses.asdict(asked),
                "saved": None if save is None else str(save),
            }
        )
        return
    if asked is not None:
        print(asked)
    if save is not None:
        print(f"wrote {save}: gk.memory_budget({budget!r}).load({str(save)!r})")


def step_of(script: str | os.PathLike[str], function: str = "step") -> Callable[[], Any]:
    """The function of that name in a Python file; the file is run, but not as `__main__`."""
    names, path = run_script(script, error=RematError), Path(script)
    found = names.get(function)
    if not callable(found):
        defined = sorted(
            name for name, value in names.items() if callable(value) and name[0] != "_"
        )
        raise RematError(
            f"the script has no function {function}()",
            path=path,
            found=", ".join(defined) or "no functions",
            expected="a function without arguments that does one training step",
            fix="name another one with --function",
        )
    step: Callable[[], Any] = found
    return step


def run_step(step: Callable[[], Any], script: str | os.PathLike[str]) -> None:
    """One step of the script; it may not end the whole process."""
    try:
        step()
    except SystemExit as error:
        raise script_exit_error(script, error, RematError) from error
