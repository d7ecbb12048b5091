"""`gradkeep attribute`, `why` and `methods`: scores from what a store holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep.cli._files import LARGEST, output_file
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
    WorkerOptions,
    WorkersOption,
    chosen_runs,
    print_json,
)
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from gradkeep.attribution._scores import Scores
    from gradkeep.attribution._suspects import Suspects
    from gradkeep.store import Store

_PREVIEW = 60
"""Characters of a text that are shown of a row."""
OptionOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option", metavar="NAME=VALUE", help="An option of the method; may be repeated."
    ),
]
LayerOption = Annotated[
    list[str] | None,
    typer.Option("--layers", "--layer", help="A layer, glob, type or '!...'; may be repeated."),
]
ComputeOption = Annotated[
    str | None,
    typer.Option("--compute", help="factored, half, restored or dense: not the planner's choice."),
]
BudgetOption = Annotated[
    str | None, typer.Option("--memory-budget", metavar="BYTES", help="For example 512MiB.")
]


def attribute(
    store: StoreArgument,
    method: MethodOption = None,
    option: OptionOption = None,
    layers: LayerOption = None,
    compute: ComputeOption = None,
    memory_budget: BudgetOption = None,
    save: Annotated[
        str | None, typer.Option("--save", metavar="NAME", help="Keep the scores in the store.")
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="Write scores and ids to an .npz.")
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, max=LARGEST, help="How many rows to show for each query.")
    ] = 3,
    show: Annotated[int, typer.Option(min=0, max=LARGEST, help="How many queries to show.")] = 10,
    json: JsonOption = False,
    *,
    captures: CaptureOptions,
    crew: WorkerOptions,
) -> None:
    """Score every training row for every query, by what was captured."""
    import numpy as np

    import gradkeep as gk

    if out is not None:
        out = out if out.endswith(".npz") else f"{out}.npz"
        output_file(out, error=AttributionError)
    opened = gk.open(store, create=False)
    scores = captures.scores(
        opened,
        method,
        layers=layers,
        compute=compute,
        memory_budget=memory_budget,
        save=save,
        progress=True,
        **crew.arguments(),
        **_options(option),
    )
    if out is not None:
        np.savez(out, scores=scores.values, query_ids=scores.query_ids, train_ids=scores.train_ids)
    shown = [int(query) for query in scores.query_ids[:show]]
    if json:
        found = [_ranked(scores, query, top) for query in shown]
        print_json({"scores": repr(scores), "shape": scores.shape, "top": found, "file": out})
        return
    print(scores)
    if scores.plan is not None:
        print("  " + str(scores.plan).replace("\n", "\n  "))
    for query in shown:
        ranked = _ranked(scores, query, top)
        helped = ", ".join(f"{i} ({v:.3g})" for i, v in ranked["helped"])
        harmed = ", ".join(f"{i} ({v:.3g})" for i, v in ranked["harmed"])
        print(f"{captures.queries} {query}: helped by {helped}; harmed by {harmed}")
    if scores.chosen is not None:
        print(f"chosen: {scores.chosen}")
    if save is not None:
        print(f"saved as {save}: gk.Scores.load(store, {save!r})")
    if out is not None:
        print(f"written to {out}")


def why(
    store: StoreArgument,
    query: Annotated[
        int,
        typer.Argument(metavar="QUERY", min=-(2**63), max=2**63 - 1, help="The id of the query."),
    ],
    method: MethodOption = None,
    option: OptionOption = None,
    layers: LayerOption = None,
    top: Annotated[
        int, typer.Option(min=1, max=LARGEST, help="How many rows to show on each side.")
    ] = 5,
    json: JsonOption = False,
    *,
    captures: CaptureOptions,
) -> None:
    """Show which training rows made the model answer a query as it did."""
    import gradkeep as gk

    opened = gk.open(store, create=False)
    scores = captures.scores(opened, method, layers=layers, ids=[query], **_options(option))
    train, capture = captures.train, captures.capture
    asked = _facts(opened, scores, captures.queries, [query], capture=capture)
    ranked = _ranked(scores, query, top)
    sides = {}
    for side, found in ranked.items():
        if side == "query":
            continue
        ids = [number for number, _ in found]
        facts = _facts(opened, scores, train, ids, capture=capture)
        sides[side] = [
            {**fact, "score": value} for fact, (_, value) in zip(facts, found, strict=True)
        ]
    if json:
        print_json({"query": asked[0], "method": scores.method, **sides})
        return
    print(f"{captures.queries} {_line(asked[0])}")
    for side, rows in sides.items():
        print(f"{side} most by ({scores.scale}):")
        for row in rows:
            print(f"  {row['score']:>12.4g}  {train} {_line(row)}")


def methods(json: JsonOption = False) -> None:
    """List the methods: what each computes, needs and costs."""
    import dataclasses

    import gradkeep as gk

    if json:
        shown = ("name", "summary", "needs", "cost", "exact", "reference")
        print_json([{part: getattr(method, part) for part in shown} for method in gk.methods()])
        return
    for method in gk.methods():
        print(f"{method.name} ({'exact' if method.exact else 'approximate'}): {method.summary}")
        print(f"  needs    {method.needs}")
        print(f"  cost     {method.cost}")
        told = [f"{part.name}={part.default!r}" for part in dataclasses.fields(method.options)]
        if told:
            print(f"  options  {', '.join(told)}")
        print(f"  from     {method.reference}")


def suspects(
    store: StoreArgument,
    train: TrainOption = "train",
    by: Annotated[str, typer.Option("--by", help="loss, self or noise.")] = "loss",
    checkpoints: CheckpointOption = None,
    run: RunOption = None,
    capture: CaptureOption = "main",
    top: Annotated[int, typer.Option(min=1, max=LARGEST, help="How many rows to show.")] = 20,
    precision: Annotated[
        float,
        typer.Option(min=0, max=1, help="The share of wrong labels in the list that is counted."),
    ] = 0.8,
    relabel: Annotated[
        str | None,
        typer.Option(
            "--relabel",
            metavar="FILE",
            help="Write what the labels should be, as models say that never saw them (--recipe).",
        ),
    ] = None,
    recipe: RecipeOption = None,
    seeds: SeedsOption = 3,
    workers: WorkersOption = None,
    json: JsonOption = False,
) -> None:
    """Show the training rows whose labels are most likely wrong, the worst first.

    With probabilities in the store (`keep: losses`) also how many labels are wrong. With --relabel,
    models are trained that leave each row out in turn; then without the suspects, and without as many
    random rows.
    """
    import gradkeep as gk

    if relabel is not None:
        from gradkeep.cli._act import suggest_relabelling

        suggest_relabelling(
            store, relabel, recipe, precision=precision, seeds=seeds, workers=workers, json=json
        )
        return
    opened = gk.open(store, create=False)
    found = gk.suspects(
        opened,
        train=train,
        by=by,  # type: ignore[arg-type]  # the library refuses others
        checkpoints=checkpoints,
        run=chosen_runs(opened, run, splits=(train,), capture=capture),
        name=capture,
    )
    rows = [
        {
            "id": int(found.ids[at]),
            by: float(found.values[at]),
            "label": None if found.labels is None else found.labels[at].item(),
            "predicted": None if found.predicted is None else found.predicted[at].item(),
        }
        for at in range(min(top, len(found)))
    ]
    noise = _noise_facts(found, precision)
    if json:
        facts = {
            "by": by,
            "measure": found.measure,
            "checkpoints": found.checkpoints,
            "suspects": rows,
        }
        print_json(facts if noise is None else {**facts, "noise": noise})
        return
    what = "documents" if found.documents else "rows"
    print(f"{len(found)} {what} of {train} by {found.measure} at {', '.join(found.checkpoints)}")
    for row in rows:
        told = "" if row["label"] is None else f"  label {row['label']}"
        told += "" if row["predicted"] is None else f", the model says {row['predicted']}"
        print(f"  {train} {row['id']:<8} {row[by]:>10.4g}{told}")
    if found.noise is not None:
        low, high = found.noise.rate_interval
        print(f"{found.noise.rate:.1%} of the labels are wrong [{low:.1%}, {high:.1%}]")
        print(found.noise.threshold(precision) or f"no list of them is {precision:.0%} right")


def _noise_facts(found: Suspects, precision: float) -> dict[str, Any] | None:
    noise = found.noise
    if noise is None:
        return None
    threshold = noise.threshold(precision)
    return {
        "rate": noise.rate,
        "rate_interval": noise.rate_interval,
        "pattern": noise.pattern,
        "threshold": None
        if threshold is None
        else {
            "wrong": threshold.wrong,
            "rows": threshold.rows,
            "precision": threshold.precision,
            "interval": threshold.interval,
            "ids": found.flagged(precision).tolist(),
        },
        "confusion": noise.confusion.round(2).tolist(),
    }


def _ranked(scores: Scores, query: int, k: int) -> dict[str, Any]:
    found: dict[str, Any] = {"query": query}
    for side, ranked in (
        ("helped", scores.top(k, query=query)),
        ("harmed", scores.bottom(k, query=query)),
    ):
        pairs = zip(ranked.ids.tolist(), ranked.values.tolist(), strict=True)
        found[side] = [(number, value) for number, value in pairs]
    return found


def _facts(
    store: Store, scores: Scores, split: str, ids: list[int], *, capture: str
) -> list[dict[str, Any]]:
    """What was kept of some rows beside their gradients."""
    from gradkeep.store import CaptureKey

    run, _, checkpoint = scores.checkpoints[-1].rpartition("/")
    block = store.read(CaptureKey(checkpoint, split, run or "main", capture))
    names = [name for name in ("label", "predicted", "loss", "output") if name in block.names]
    texts = [
        array.name
        for array in block.schema.arrays
        if array.is_text and not array.name.startswith("preview_")
    ]
    batch = block.read(ids, [*names, *texts])
    told = {name: batch[name].texts() for name in texts}
    return [
        {
            "id": number,
            **{name: batch[name][at].item() for name in names},
            **{name: told[name][at] for name in texts},
        }
        for at, number in enumerate(ids)
    ]


def _line(fact: dict[str, Any]) -> str:
    told = ", ".join(
        f"{name} {_preview(value)}" for name, value in fact.items() if name not in ("id", "score")
    )
    return f"{fact['id']}: {told}"


def _preview(value: Any) -> str:
    """A value on one short line."""
    if isinstance(value, float):
        return f"{value:.4g}"
    words = " ".join(str(value).split())
    return words if len(words) <= _PREVIEW else f"{words[:_PREVIEW].rstrip()} ..."


def _options(given: list[str] | None) -> dict[str, Any]:
    """NAME=VALUE pairs, values read as JSON where they are."""
    import json as reader

    found: dict[str, Any] = {}
    for pair in given or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE, such as damping=3")
        try:
            found[name] = reader.loads(value)
        except ValueError:
            found[name] = value
    return found
