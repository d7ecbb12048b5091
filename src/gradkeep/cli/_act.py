"""`gradkeep select`, `leaks` and `check-removal`: from an answer to rows to act on, and back to the truth."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep.cli._files import output_file
from gradkeep.cli._imports import ids_in, recipe_named
from gradkeep.cli._options import (
    CaptureOption,
    CaptureOptions,
    CheckpointOption,
    JsonOption,
    MethodOption,
    RecipeOption,
    RunOption,
    SeedsOption,
    StoreArgument,
    TrainOption,
    WorkersOption,
    print_json,
)
from gradkeep.cli._shown_evaluations import evaluation_fields, tell_progress
from gradkeep.errors import EvaluationError

if TYPE_CHECKING:
    from gradkeep.evaluate import Evaluation
    from gradkeep.evaluate._groups import ChosenRows
    from gradkeep.store import Store

OutOption = Annotated[
    str | None, typer.Option("--out", metavar="FILE", help="Write ids and reasons to a CSV file.")
]
_SHOWN = 10


def select(
    store: StoreArgument,
    target: Annotated[
        str, typer.Option("--target", help="The split that the rows are to serve.")
    ] = "test",
    keep: Annotated[
        str, typer.Option("--keep", metavar="SHARE", help="How many rows: 10% or 500.")
    ] = "10%",
    method: MethodOption = None,
    train: TrainOption = "train",
    checkpoints: CheckpointOption = None,
    run: RunOption = None,
    capture: CaptureOption = "main",
    out: OutOption = None,
    recipe: RecipeOption = None,
    seeds: SeedsOption = 3,
    workers: WorkersOption = None,
    json: JsonOption = False,
) -> None:
    """Choose the rows most worth training on for a target split, kind by kind.

    With a recipe, a model is trained on them alone, and on as many random rows.
    """
    import gradkeep as gk

    wanted = _share(keep)
    if out is not None:
        output_file(out, error=EvaluationError)
    opened = gk.open(store, create=False)
    captures = CaptureOptions(target, train, checkpoints, run, capture)
    scores = captures.scores(opened, method)
    found = gk.evaluate.select_rows(scores, wanted)
    verified = None
    if recipe is not None:
        verified = gk.evaluate.verify_rows(
            found.ids,
            recipe_named(recipe, None),
            scores=scores,
            train="with only",
            seeds=seeds,
            workers=workers,
            progress=None if json else tell_progress,
        )
    _show(found, out, verified, json=json)


def leaks(
    store: StoreArgument,
    above: Annotated[
        float, typer.Option(min=-1, max=1, help="The least cosine of two gradients.")
    ] = 0.95,
    out: OutOption = None,
    recipe: RecipeOption = None,
    seeds: SeedsOption = 3,
    workers: WorkersOption = None,
    json: JsonOption = False,
    *,
    captures: CaptureOptions,
) -> None:
    """Find training rows that are as good as copies of a query, by the cosines of their gradients.

    With a recipe, the model is trained without them, and without as many random rows: negative
    figures say that queries are answered worse without their copies.
    """
    import gradkeep as gk

    if out is not None:
        output_file(out, error=EvaluationError)
    opened = gk.open(store, create=False)
    places = captures.checkpoints or [_earliest(opened, captures)]
    scores = captures.scores(opened, "cos", checkpoints=places)
    found = gk.evaluate.find_leaks(scores, above=above)
    verified = None
    if recipe is not None and len(found):
        verified = gk.evaluate.verify_rows(
            found.ids,
            recipe_named(recipe, None),
            scores=scores,
            seeds=seeds,
            workers=workers,
            progress=None if json else tell_progress,
        )
    _show(found, out, verified, json=json)


def check_removal(
    store: StoreArgument,
    rows: Annotated[
        str, typer.Argument(metavar="ROWS", help="A file of ids, or ids with commas between.")
    ],
    method: MethodOption = None,
    recipe: RecipeOption = None,
    seeds: SeedsOption = 5,
    workers: WorkersOption = None,
    json: JsonOption = False,
    *,
    captures: CaptureOptions,
) -> None:
    """Train without some rows, and say whether the queries changed as the scores had said."""
    import gradkeep as gk

    opened = gk.open(store, create=False)
    how = recipe_named(recipe, opened)
    ids = [int(part) for part in rows.split(",")] if _LISTED.fullmatch(rows) else ids_in(rows)
    scores = captures.scores(opened, method)
    found = gk.evaluate.check_removal(
        scores,
        ids,
        how,
        seeds=seeds,
        workers=workers,
        progress=None if json else tell_progress,
    )
    if json:
        parts = {"agreement": found.agreement, "change": found.change}
        told = {name: evaluation_fields(part) for name, part in parts.items()}
        print_json({"rows": found.rows.tolist(), "held": found.held, **told})
        return
    print(found)


def suggest_relabelling(
    store: str,
    out: str,
    recipe: str | None,
    *,
    precision: float,
    seeds: int,
    workers: int | None,
    json: bool,
) -> None:
    """Write suggested labels, and train without the suspects, beside random rows."""
    import gradkeep as gk

    output_file(out, error=EvaluationError)
    opened = gk.open(store, create=False)
    how = recipe_named(recipe, opened)
    report = None if json else tell_progress
    found = gk.evaluate.suggest_labels(
        how, store=opened, precision=precision, seeds=seeds, workers=workers, progress=report
    )
    verified = None
    if len(found):
        verified = gk.evaluate.verify_rows(
            found.ids, how, store=opened, seeds=seeds, workers=workers, progress=report
        )
    _show(found, out, verified, json=json)


_LISTED = re.compile(r"\d{1,18}(,\d{1,18})*")
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)\s*%")


def _share(text: str) -> int | float:
    """A number of rows, or a share of them: `500`, `10%`, `0.1`."""
    percent = _SHARE.fullmatch(text)
    if percent:
        return float(percent[1]) / 100
    if re.fullmatch(r"\d{1,18}", text):
        return int(text)
    if re.fullmatch(r"0?\.\d{1,18}|1\.0*", text):
        return float(text)
    raise EvaluationError("keep is a share or a number of rows", found=text, expected="10% or 500")


def _earliest(store: Store, captures: CaptureOptions) -> str:
    """The first checkpoint of both splits: before rows are learnt by heart, gradients tell most."""
    queries, train = captures.queries, captures.train
    runs = captures.arguments(store)["run"]
    kept = {k for k in store.captures() if (k.run, k.capture) == (runs[0], captures.capture)}
    both = {one.checkpoint for one in kept if one.split == train}
    both &= {one.checkpoint for one in kept if one.split == queries}
    steps = [one for one in store.info().runs if one.name == runs[0]]
    order = [one.name for one in steps[0].checkpoints] if steps else sorted(both)
    found = [name for name in order if name in both]
    if not found:
        raise EvaluationError(
            f"no checkpoint has captures of {queries} and {train}", path=store.location
        )
    return found[0]


def _show(found: ChosenRows, out: str | None, verified: Evaluation | None, *, json: bool) -> None:
    if out is not None:
        found.write(out)
    if json:
        rows: list[dict[str, Any]] = [
            {"id": number, "value": value, "reason": reason}
            for number, value, reason in zip(
                found.ids.tolist(), found.values.tolist(), found.reasons, strict=True
            )
        ]
        told = None if verified is None else evaluation_fields(verified)
        print_json({"rows": rows, "verified": told, "file": out})
        return
    print(f"{len(found)} rows")
    for number, value, reason in zip(
        found.ids[:_SHOWN].tolist(), found.values[:_SHOWN].tolist(), found.reasons, strict=False
    ):
        print(f"  {number:<8} {value:>10.4g}  {reason}")
    if len(found) > _SHOWN:
        print(f"  and {len(found) - _SHOWN} more" + ("" if out else "; --out FILE has them all"))
    if verified is not None:
        print(verified)
    if out is not None:
        print(f"written to {out}")
