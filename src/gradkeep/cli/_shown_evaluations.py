"""Evaluations as commands show, draw and keep them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep.cli._files import output_folder
from gradkeep.cli._options import JsonOption, print_json
from gradkeep.errors import EvaluationError

if TYPE_CHECKING:
    from gradkeep.evaluate import Evaluation
    from gradkeep.store import Store


PlotsOption = Annotated[
    str | None, typer.Option("--plots", metavar="DIR", help="Draw what was found into DIR.")
]
KeepOption = Annotated[
    bool, typer.Option("--save/--no-save", help="Keep what is found in the store.")
]


@dataclass(frozen=True, slots=True)
class ResultOptions:
    """What becomes of evaluations: saved, drawn, printed as JSON."""

    save: KeepOption = True
    plots: PlotsOption = None
    json: JsonOption = False


def keep_evaluations(
    store: Store, found: list[Evaluation], result: ResultOptions
) -> list[str | None]:
    """Save and draw evaluations; their names in the store."""
    import xxhash

    plots = result.plots
    folder = None if plots is None else output_folder(plots, error=EvaluationError)
    names: list[str | None] = []
    for one in found:
        mark = xxhash.xxh3_64_hexdigest(f"{one.universe} {one.subject} {one.value}".encode())[:8]
        words = re.sub(r"[^A-Za-z0-9]+", "-", f"{one.metric} {one.subject.split(' at ')[0]}")
        name = f"{words.strip('-')[:80]}-{mark}"
        if result.save:
            one.save(name, store=store)
        names.append(name if result.save else None)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            one.plot().savefig(Path(folder) / f"{name}.png")
    return names


def show_evaluations(store: Store, found: list[Evaluation], result: ResultOptions) -> None:
    """Save, draw and print evaluations."""
    names = keep_evaluations(store, found, result)
    if result.json:
        print_json(
            [
                {**evaluation_fields(one), "saved": name}
                for one, name in zip(found, names, strict=True)
            ]
        )
        return
    for one in found:
        print(one)
        if one.curve is not None:
            print("  " + str(one.curve).replace("\n", "\n  "))
    tell_names(names)


def tell_names(names: list[str | None]) -> None:
    """Say under which names evaluations were kept."""
    kept = [name for name in names if name is not None]
    if kept:
        print(f"kept as {', '.join(kept)}")


def evaluation_fields(found: Evaluation) -> dict[str, Any]:
    """An evaluation as JSON fields."""
    curve = found.curve
    return {
        "metric": found.metric,
        "subject": found.subject,
        "value": found.value,
        "interval": found.interval,
        "level": found.level,
        "ceiling": found.ceiling,
        "share_of_ceiling": found.share,
        "queries": found.sizes.queries,
        "subsets": found.sizes.subsets,
        "seeds": found.sizes.seeds,
        "rows": found.sizes.rows,
        "truth": found.truth,
        "provenance": found.provenance,
        "curve": None
        if curve is None
        else {
            curve.along: curve.at.tolist(),
            **{
                name: values.tolist()
                for name, values in zip(curve.names, curve.values, strict=True)
            },
        },
    }


def tell_progress(progress: Any) -> None:
    """Tell on a terminal how far trainings are."""
    import sys

    if sys.stderr.isatty():
        print(f"\r  {progress}", end="", file=sys.stderr, flush=True)
