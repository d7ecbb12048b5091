"""Save, plot and print evaluations."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep.cli._files import output_folder
from gradkeep.cli._options import JsonOption, print_json
from gradkeep.errors import EvaluationError

if TYPE_CHECKING:
    from gradkeep.evaluate import Evaluation
    from gradkeep.store import Store

PlotsOption = Annotated[
    str | None, typer.Option("--plots", metavar="DIR", help="Write plots to this folder.")
]
SaveOption = Annotated[bool, typer.Option("--save/--no-save", help="Save results in the store.")]


@dataclass(frozen=True, slots=True)
class ResultOptions:
    """Output of evaluations."""

    save: SaveOption = True
    plots: PlotsOption = None
    json: JsonOption = False


def save_evaluations(
    store: Store, evaluations: list[Evaluation], result: ResultOptions
) -> list[str | None]:
    """Save and plot evaluations; return their names in the store."""
    import xxhash

    folder = None
    if result.plots is not None:
        folder = output_folder(result.plots, error=EvaluationError)
    names: list[str | None] = []
    for one in evaluations:
        digest = xxhash.xxh3_64_hexdigest(f"{one.universe} {one.subject} {one.value}".encode())[:8]
        words = re.sub(r"[^A-Za-z0-9]+", "-", f"{one.metric} {one.subject.split(' at ')[0]}")
        name = f"{words.strip('-')[:80]}-{digest}"
        if result.save:
            one.save(name, store=store)
        names.append(name if result.save else None)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            one.plot().savefig(folder / f"{name}.png")
    return names


def show_evaluations(store: Store, evaluations: list[Evaluation], result: ResultOptions) -> None:
    """Save, plot and print evaluations."""
    names = save_evaluations(store, evaluations, result)
    if result.json:
        pairs = zip(evaluations, names, strict=True)
        print_json([{**evaluation_fields(one), "saved": name} for one, name in pairs])
        return
    for one in evaluations:
        print(one)
        if one.curve is not None:
            print("  " + str(one.curve).replace("\n", "\n  "))
    print_saved_names(names)


def print_saved_names(names: list[str | None]) -> None:
    """Print the names of saved evaluations."""
    saved = [name for name in names if name is not None]
    if saved:
        print(f"saved as {', '.join(saved)}")


def evaluation_fields(evaluation: Evaluation) -> dict[str, Any]:
    """Return an evaluation as JSON fields."""
    curve = evaluation.curve
    lines = {} if curve is None else dict(zip(curve.names, curve.values.tolist(), strict=True))
    return {
        "metric": evaluation.metric,
        "subject": evaluation.subject,
        "value": evaluation.value,
        "interval": evaluation.interval,
        "level": evaluation.level,
        "ceiling": evaluation.ceiling,
        "share_of_ceiling": evaluation.share,
        "queries": evaluation.sizes.queries,
        "subsets": evaluation.sizes.subsets,
        "seeds": evaluation.sizes.seeds,
        "rows": evaluation.sizes.rows,
        "truth": evaluation.truth,
        "provenance": evaluation.provenance,
        "curve": None if curve is None else {curve.along: curve.at.tolist(), **lines},
    }
