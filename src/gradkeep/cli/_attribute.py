"""`gradkeep attribute`, `why`, `suspects` and `methods`: scores from captures."""

from __future__ import annotations

import dataclasses
import json as json_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep._display import pick_fields
from gradkeep.cli._inputs import output_file
from gradkeep.cli._options import (
    Bytes,
    CaptureOption,
    CaptureOptions,
    CheckpointOption,
    JsonOption,
    MethodOption,
    Positive,
    RecipeOption,
    RunOption,
    SeedsOption,
    Share,
    StoreArgument,
    TrainOption,
    Whole,
    WorkerOptions,
    WorkersOption,
    choose_runs,
    parse_pairs,
    print_folded,
    print_json,
)
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from gradkeep.attribution._scores import Scores
    from gradkeep.attribution._suspects import Suspects
    from gradkeep.store import Store

MethodOptionsOption = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="Option of the method; repeatable."),
]
LayersOption = Annotated[
    list[str] | None,
    typer.Option("--layers", "--layer", help="A layer, glob, type or '!...'; repeatable."),
]


def attribute(
    store: StoreArgument,
    method: MethodOption = None,
    option: MethodOptionsOption = None,
    layers: LayersOption = None,
    compute: str | None = None,
    memory_budget: Bytes | None = None,
    save: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    out: Annotated[str | None, typer.Option(metavar="FILE")] = None,
    top: Positive = 3,
    show: Whole = 10,
    json: JsonOption = False,
    *,
    captures: CaptureOptions,
    worker_options: WorkerOptions,
) -> None:
    """Score every training row for every query.

    Options:
        compute: factored, half, restored or dense; default: the cheapest.
        memory_budget: For example 512MiB.
        save: Save the scores in the store.
        out: Write scores and ids to an .npz.
        top: Rows to show per query.
        show: Queries to show.
    """
    import numpy as np

    import gradkeep as gk

    if out is not None:
        out = out if out.endswith(".npz") else f"{out}.npz"
        output_file(out, error=AttributionError)
    scores = captures.scores(
        gk.open(store, create=False),
        method,
        layers=layers,
        compute=compute,
        memory_budget=memory_budget,
        save=save,
        progress=True,
        **worker_options.arguments(),
        **_parse_options(option),
    )
    if out is not None:
        np.savez(out, scores=scores.values, query_ids=scores.query_ids, train_ids=scores.train_ids)
    ranked = [_rank_rows(scores, int(query), top) for query in scores.query_ids[:show]]
    if json:
        print_json({"scores": repr(scores), "shape": scores.shape, "top": ranked, "file": out})
        return
    print_folded(str(scores), indent=2)
    if scores.plan is not None:
        print_folded("  " + str(scores.plan).replace("\n", "\n  "), indent=4)
    for rows in ranked:
        print(f"{captures.queries} {rows['query']}")
        for side in ("helped", "hurt"):
            listed = ", ".join(f"{i} ({v:.3g})" for i, v in rows[side]) or "no row"
            print_folded(f"  {side:<6} {listed}", indent=9)
    if scores.chosen is not None:
        print_folded(f"chosen: {scores.chosen}")
    if save is not None:
        print(f"saved as {save}: gk.Scores.load(store, {save!r})")
    if out is not None:
        print(f"wrote {out}")


def why(
    store: StoreArgument,
    query: Annotated[int, typer.Argument(metavar="QUERY", min=-(2**63), max=2**63 - 1)],
    method: MethodOption = None,
    option: MethodOptionsOption = None,
    layers: LayersOption = None,
    top: Positive = 5,
    json: JsonOption = False,
    *,
    captures: CaptureOptions,
) -> None:
    """Show which training rows caused the prediction for a query.

    Options:
        query: Id of the query.
        top: Rows to show per side.
    """
    import gradkeep as gk

    opened = gk.open(store, create=False)
    options = _parse_options(option)
    scores = captures.scores(opened, method, layers=layers, ids=[query], **options)
    facts = _read_facts(opened, scores, captures.queries, [query], capture=captures.capture)[0]
    sides = {}
    ranked = _rank_rows(scores, query, top)
    for side in ("helped", "hurt"):
        ids = [number for number, _ in ranked[side]]
        rows = _read_facts(opened, scores, captures.train, ids, capture=captures.capture)
        sides[side] = [
            {**row, "score": score} for row, (_, score) in zip(rows, ranked[side], strict=True)
        ]
    if json:
        print_json({"query": facts, "method": scores.method, **sides})
        return
    print_folded(f"{captures.queries} {_format_row(facts)}", indent=2)
    print_folded(f"scores: {scores.scale}", indent=2)
    for side, rows in sides.items():
        print(f"{side} most:" if rows else f"{side}: no row")
        for row in rows:
            line = f"  {row['score']:>12.4g}  {captures.train} {_format_row(row)}"
            print_folded(line, indent=16)


def methods(json: JsonOption = False) -> None:
    """List the methods: what each computes, needs and costs."""
    import gradkeep as gk

    if json:
        names = ("name", "summary", "needs", "cost", "exact", "reference")
        print_json([pick_fields(method, *names) for method in gk.methods()])
        return
    for method in gk.methods():
        kind = "exact" if method.exact else "approximate"
        print_folded(f"{method.name} ({kind}): {method.summary}", indent=2)
        print_folded(f"  needs    {method.needs}", indent=11)
        print_folded(f"  cost     {method.cost}", indent=11)
        options = [f"{one.name}={one.default!r}" for one in dataclasses.fields(method.options)]
        if options:
            print_folded(f"  options  {', '.join(options)}", indent=11)
        print_folded(f"  from     {method.reference}", indent=11)


def suspects(
    store: StoreArgument,
    train: TrainOption = "train",
    by: str = "loss",
    checkpoints: CheckpointOption = None,
    run: RunOption = None,
    capture: CaptureOption = "main",
    top: Positive = 20,
    precision: Share = 0.8,
    relabel: Annotated[str | None, typer.Option(metavar="FILE")] = None,
    recipe: RecipeOption = None,
    seeds: SeedsOption = 3,
    workers: WorkersOption = None,
    json: JsonOption = False,
) -> None:
    """Rank training rows by suspicion of a wrong label, the most suspicious first.

    With probabilities in the store (`keep: losses`), also estimates how many labels are wrong. With
    --relabel, models are trained that leave each row out in turn; then models without the suspects,
    and without as many random rows.

    Options:
        by: loss, self or noise.
        top: Rows to show.
        precision: Share of wrong labels in the suggested list.
        relabel: Write out-of-fold suggested labels (needs --recipe).
    """
    import gradkeep as gk

    if relabel is not None:
        from gradkeep.cli._row_selection import relabel as write_labels

        write_labels(
            store, relabel, recipe, precision=precision, seeds=seeds, workers=workers, json=json
        )
        return
    opened = gk.open(store, create=False)
    ranked = gk.suspects(
        opened,
        train=train,
        by=by,  # type: ignore[arg-type]  # validated by the library
        checkpoints=checkpoints,
        run=choose_runs(opened, run, splits=(train,), capture=capture),
        name=capture,
    )
    rows = [
        {
            "id": int(ranked.ids[at]),
            by: float(ranked.values[at]),
            "label": None if ranked.labels is None else ranked.labels[at].item(),
            "predicted": None if ranked.predicted is None else ranked.predicted[at].item(),
        }
        for at in range(min(top, len(ranked)))
    ]
    if json:
        fields = {"by": by, "measure": ranked.measure, "checkpoints": ranked.checkpoints}
        noise = {} if ranked.noise is None else {"noise": _noise_fields(ranked, precision)}
        print_json({**fields, "suspects": rows, **noise})
        return
    what = "documents" if ranked.documents else "rows"
    checkpoints_used = ", ".join(ranked.checkpoints)
    print_folded(
        f"{len(ranked)} {what} of {train} by {ranked.measure} at {checkpoints_used}", indent=2
    )
    for row in rows:
        label = "" if row["label"] is None else f"  label {row['label']}"
        predicted = "" if row["predicted"] is None else f", predicted {row['predicted']}"
        print(f"  {train} {row['id']:<8} {row[by]:>10.4g}{label}{predicted}")
    if ranked.noise is not None:
        low, high = ranked.noise.rate_interval
        print(f"{ranked.noise.rate:.1%} of the labels are wrong [{low:.1%}, {high:.1%}]")
        print(ranked.noise.threshold(precision) or f"no list of them is {precision:.0%} wrong")


def _noise_fields(suspects: Suspects, precision: float) -> dict[str, Any]:
    noise = suspects.noise
    assert noise is not None
    threshold = noise.threshold(precision)
    listed = threshold and {
        **pick_fields(threshold, "wrong", "rows", "precision", "interval"),
        "ids": suspects.flagged(precision),
    }
    return {
        **pick_fields(noise, "rate", "rate_interval", "pattern"),
        "threshold": listed,
        "confusion": noise.confusion.round(2),
    }


def _rank_rows(scores: Scores, query: int, k: int) -> dict[str, Any]:
    """Return the rows with the largest positive and the largest negative scores."""
    top, bottom = scores.top(k, query=query), scores.bottom(k, query=query)
    helped = zip(top.ids.tolist(), top.values.tolist(), strict=True)
    hurt = zip(bottom.ids.tolist(), bottom.values.tolist(), strict=True)
    return {
        "query": query,
        "helped": [(row, score) for row, score in helped if score > 0],
        "hurt": [(row, score) for row, score in hurt if score < 0],
    }


def _read_facts(
    store: Store, scores: Scores, split: str, ids: list[int], *, capture: str
) -> list[dict[str, Any]]:
    """Read the captured label, prediction, loss, output and texts of some rows."""
    from gradkeep.store import CaptureKey

    run, _, checkpoint = scores.checkpoints[-1].rpartition("/")
    block = store.read(CaptureKey(checkpoint, split, run or "main", capture))
    scalars = [name for name in ("label", "predicted", "loss", "output") if name in block.names]
    texts = [
        array.name
        for array in block.schema.arrays
        if array.is_text and not array.name.startswith("preview_")
    ]
    batch = block.read(ids, [*scalars, *texts])
    columns: dict[str, Any] = {name: batch[name].tolist() for name in scalars}
    columns |= {name: batch[name].texts() for name in texts}
    return [
        {"id": number, **{name: column[at] for name, column in columns.items()}}
        for at, number in enumerate(ids)
    ]


def _format_row(row: dict[str, Any]) -> str:
    parts = [f"{k} {_shorten(v)}" for k, v in row.items() if k not in ("id", "score")]
    return f"{row['id']}: {', '.join(parts)}"


def _shorten(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:60].rstrip()} ..."


def _parse_options(pairs: list[str] | None) -> dict[str, Any]:
    """Parse options of a method; values are JSON where possible, else text."""
    options: dict[str, Any] = {}
    for name, value in parse_pairs(pairs or [], example="damping=3").items():
        try:
            options[name] = json_module.loads(value)
        except ValueError:
            options[name] = value
    return options
