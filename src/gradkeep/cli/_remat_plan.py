"""`gradkeep remat plan`: what every budget would cost a script's training step, before training."""

from __future__ import annotations

import dataclasses
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import Annotated

import typer

from gradkeep.cli._output import (
    JsonOption,
    print_json,
)

FRACTIONS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


def plan(
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="A Python file with a function step().")
    ],
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="Bytes such as 2GiB, or a fraction such as 0.5: explain it."),
    ] = None,
    function: Annotated[
        str, typer.Option("--function", help="The function that does one training step.")
    ] = "step",
    recordings: Annotated[
        int, typer.Option("--recordings", min=2, help="Times to run it, recorded.")
    ] = 3,
    save: Annotated[
        Path | None,
        typer.Option("--save", help="Write the plan: gk.memory_budget(...).load(FILE)."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show budget against slowdown, and the floor, for the function `step()` of a script."""
    from gradkeep._budgets import format_bytes
    from gradkeep.remat._script import step_of

    step = step_of(script, function)
    step()
    from gradkeep.remat import memory_budget  # loads torch

    whole = memory_budget(1.0, recordings=recordings)
    for _ in range(recordings):
        with whole.step():
            step()
    about = whole.explain()
    points = whole.curve(FRACTIONS)
    if save is not None and budget is None:
        raise typer.BadParameter("--save needs --budget")
    if not json:
        # First, so that it can also be seen when the budget is below the floor.
        print(
            f"without a budget the step takes {format_bytes(about.peak)}; "
            f"the floor is {format_bytes(about.floor)} ({about.floor / max(1, about.peak):.2f})"
        )
        for fraction, point in zip(FRACTIONS, points, strict=True):
            print(f"  {fraction:.1f}  {point}")
    asked = None
    if budget is not None:
        chosen = whole.anew(_given(budget))
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


def _given(text: str) -> float | str:
    """A fraction if it looks like one, else bytes."""
    try:
        number = float(text)
    except ValueError:
        return text
    return number if number <= 1 else int(number)
