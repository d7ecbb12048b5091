"""`gradkeep remat record`: a script's training step as a log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradkeep.cli._output import (
    JsonOption,
    print_json,
)


def record(
    script: Annotated[
        Path,
        typer.Argument(metavar="SCRIPT", help="A Python file with a function step() to record."),
    ],
    log: Annotated[Path, typer.Option("--log", help="Where the log goes.")] = Path("step.log"),
    function: Annotated[
        str, typer.Option("--function", help="The function that does one training step.")
    ] = "step",
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Times to run it; the least times are kept.")
    ] = 3,
    json: JsonOption = False,
) -> None:
    """Run the function `step()` of a script and record what it does.

    It is run once before, so that first-time work is not counted.
    """
    from gradkeep._budgets import format_bytes
    from gradkeep.remat import read_log, unlimited_peak
    from gradkeep.remat._script import step_of

    step = step_of(script, function)
    step()
    from gradkeep.remat import record as recorder_for  # loads torch

    recorder = recorder_for(log)
    for _ in range(repeats):
        with recorder:
            step()
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
                "constant_bytes": program.constant_bytes,
                "repeats": recorder.repeats,
            }
        )
        return
    print(
        f"recorded {len(program.ops)} operators, {program.compute / 1e6:.1f} ms, "
        f"peak {format_bytes(peak)} ({format_bytes(program.constant_bytes)} inputs and parameters)"
    )
    print(f"wrote {log}; next: gradkeep remat simulate {log} --ratio 0.5")
