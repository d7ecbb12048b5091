"""`gradkeep select`, `leaks` and `check-removal`: choose rows, and verify the choice by training."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep.cli._evaluate import evaluation_fields
from gradkeep.cli._inputs import load_recipe, output_file, read_ids
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
    print_progress,
)
from gradkeep.errors import EvaluationError

if TYPE_CHECKING:
    from gradkeep.evaluate import Evaluation, Recipe
    from gradkeep.evaluate._groups import ChosenRows
    from gradkeep.store import Store

OutOption = Annotated[
    str | None, typer.Option("--out", metavar="FILE", help="Write ids and reasons to a CSV file.")
]


def select(
    store: StoreArgument,
    target: str = "test",
    keep: Annotated[str, typer.Option(metavar="SHARE")] = "10%",
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
    """Select the training rows that help a target split most.

    With --recipe, a model is trained on them alone, and on as many random rows.

    Options:
        target: Split to train for.
        keep: Rows to select: 10% or 500.
    """
    import gradkeep as gk

    size = _parse_share(keep)
    training = None if recipe is None else load_recipe(recipe, None)
    if out is not None:
        output_file(out, error=EvaluationError)
    opened = gk.open(store, create=False)
    scores = CaptureOptions(target, train, checkpoints, run, capture).scores(opened, method)
    rows = gk.evaluate.select_rows(scores, size)
    options = {"seeds": seeds, "workers": workers, "train": "with only"}
    _show_rows(
        rows, out, _verify_rows(rows, training, json=json, scores=scores, **options), json=json
    )


def leaks(
    store: StoreArgument,
    above: Annotated[float, typer.Option(min=-1, max=1)] = 0.95,
    out: OutOption = None,
    recipe: RecipeOption = None,
    seeds: SeedsOption = 3,
    workers: WorkersOption = None,
    json: JsonOption = False,
    *,
    captures: CaptureOptions,
) -> None:
    """Find training rows that are nearly copies of a query, by the cosine of their gradients.

    With --recipe, the model is trained without them, and without as many random rows; negative
    figures mean that the queries are predicted worse without their copies.

    Options:
        above: Minimum cosine of two gradients.
    """
    import gradkeep as gk

    training = None if recipe is None else load_recipe(recipe, None)
    if out is not None:
        output_file(out, error=EvaluationError)
    opened = gk.open(store, create=False)
    checkpoints = captures.checkpoints or [_first_checkpoint(opened, captures)]
    scores = captures.scores(opened, "cos", checkpoints=checkpoints)
    rows = gk.evaluate.find_leaks(scores, above=above)
    options = {"seeds": seeds, "workers": workers}
    _show_rows(
        rows, out, _verify_rows(rows, training, json=json, scores=scores, **options), json=json
    )


def check_removal(
    store: StoreArgument,
    rows: Annotated[str, typer.Argument(metavar="ROWS")],
    method: MethodOption = None,
    recipe: RecipeOption = None,
    seeds: SeedsOption = 5,
    workers: WorkersOption = None,
    json: JsonOption = False,
    *,
    captures: CaptureOptions,
) -> None:
    """Train without some rows and compare the change of the queries with the scores' prediction.

    Options:
        rows: File of ids, or ids like 3,7.
    """
    import gradkeep as gk

    opened = gk.open(store, create=False)
    training = load_recipe(recipe, opened)
    listed = re.fullmatch(r"\d{1,18}(,\d{1,18})*", rows)
    ids = [int(word) for word in rows.split(",")] if listed else read_ids(rows)
    check = gk.evaluate.check_removal(
        captures.scores(opened, method),
        ids,
        training,
        seeds=seeds,
        workers=workers,
        progress=None if json else print_progress,
    )
    if not json:
        print(check)
        return
    fields = {"rows": check.rows.tolist(), "held": check.held}
    parts = {"agreement": check.agreement, "change": check.change}
    print_json(fields | {name: evaluation_fields(part) for name, part in parts.items()})


def relabel(
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
    training = load_recipe(recipe, opened)
    options: dict[str, Any] = {"seeds": seeds, "workers": workers}
    rows = gk.evaluate.suggest_labels(
        training,
        store=opened,
        precision=precision,
        progress=None if json else print_progress,
        **options,
    )
    _show_rows(
        rows, out, _verify_rows(rows, training, json=json, store=opened, **options), json=json
    )


def _verify_rows(
    rows: ChosenRows, training: Recipe | None, *, json: bool, **options: Any
) -> Evaluation | None:
    """Train without the rows (or with them alone), if there is a recipe and a row."""
    import gradkeep as gk

    if training is None or not len(rows):
        return None
    progress = None if json else print_progress
    return gk.evaluate.verify_rows(rows.ids, training, progress=progress, **options)


def _parse_share(text: str) -> int | float:
    """Parse a number of rows or a share of them: `500`, `10%`, `0.1`."""
    if percent := re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?)\s*%", text):
        return float(percent[1]) / 100
    if re.fullmatch(r"\d{1,18}", text):
        return int(text)
    if re.fullmatch(r"0?\.\d{1,18}|1\.0*", text):
        return float(text)
    raise EvaluationError(
        "--keep must be a share or a number of rows", code="cli.keep", found=text, fix="--keep 10%"
    )


def _first_checkpoint(store: Store, captures: CaptureOptions) -> str:
    """Return the first checkpoint of both splits: gradients of rows learnt by heart are small."""
    run, splits = captures.arguments(store)["run"][0], {captures.queries, captures.train}
    captured: dict[str, set[str]] = {}
    for key in store.captures():
        if (key.run, key.capture) == (run, captures.capture):
            captured.setdefault(key.checkpoint, set()).add(key.split)
    order = [c.name for one in store.info().runs if one.name == run for c in one.checkpoints]
    complete = [name for name in order if captured.get(name, set()) >= splits]
    if not complete:
        raise EvaluationError(
            f"no checkpoint has captures of {captures.queries} and {captures.train}",
            code="cli.no_common_checkpoint",
            path=store.location,
        )
    return complete[0]


def _show_rows(
    rows: ChosenRows, out: str | None, verified: Evaluation | None, *, json: bool
) -> None:
    if out is not None:
        rows.write(out)
    lines = list(zip(rows.ids.tolist(), rows.values.tolist(), rows.reasons, strict=True))
    if json:
        fields = [dict(zip(("id", "value", "reason"), line, strict=True)) for line in lines]
        evaluation = None if verified is None else evaluation_fields(verified)
        print_json({"rows": fields, "verified": evaluation, "file": out})
        return
    print(f"{len(rows)} rows")
    for number, value, reason in lines[:10]:
        print(f"  {number:<8} {value:>10.4g}  {reason}")
    if len(lines) > 10:
        print(f"  and {len(lines) - 10} more" + ("" if out else "; --out FILE writes them all"))
    if verified is not None:
        print(verified)
    if out is not None:
        print(f"wrote {out}")
