"""The screen Suspects: a queue of labels to review, decisions, and retraining without them."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from fastapi import Response
from pydantic import BaseModel, ConfigDict, Field

from gradkeep._display import pick_fields
from gradkeep.errors import EvaluationError, StoreError
from gradkeep.store import Decision, current_decisions
from gradkeep.web._http import MAX_ROW, NAME_PATTERN, Count, Name, Start, to_json
from gradkeep.web._served import row_views
from gradkeep.web._store_screen import evaluation_view

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradkeep.attribution._suspects import Suspects
    from gradkeep.evaluate import Recipe
    from gradkeep.web._served import RowTable, ServedStore

Measure = Literal["loss", "self", "noise"]
QueueFilter = Literal["all", "open", "decided"]


class CaptureBody(BaseModel):
    """The body of a request about one capture."""

    model_config = ConfigDict(extra="forbid", strict=True)
    run: str = Field("main", pattern=NAME_PATTERN)
    split: str = Field("train", pattern=NAME_PATTERN)
    name: str = Field("main", pattern=NAME_PATTERN)


class DecisionBody(CaptureBody):
    """The body of a request that records a decision."""

    row: int = Field(ge=-MAX_ROW, le=MAX_ROW)
    action: Literal["accept", "relabel", "undo"]
    label: int | None = Field(None, ge=-MAX_ROW, le=MAX_ROW)


def list_suspects(
    served: ServedStore,
    run: Name = "main",
    split: Name = "train",
    name: Name = "main",
    by: Measure = "loss",
    show: QueueFilter = "all",
    start: Start = 0,
    count: Count = 40,
) -> dict[str, Any]:
    """Return some rows of `gk.suspects`, the most suspicious first, with their decisions."""
    table = served.table(run, split, name)
    suspects = _rank(served, run=run, split=split, name=name, by=by)
    decisions = served.standing_decisions(table)
    positions = np.arange(len(suspects))
    if show != "all":
        is_decided = np.isin(suspects.ids, np.fromiter(decisions, np.int64, len(decisions)))
        positions = positions[is_decided if show == "decided" else ~is_decided]
    page = positions[start : start + count]
    views = row_views(served, table, suspects.ids[page].tolist())
    suggestions = served.tasks.peek(_suggestion_key(split))
    state = "working" if served.tasks.is_running(_suggestion_key(split)) else "none"
    state = state if suggestions is None else "there"
    labels = [] if suspects.labels is None else np.unique(suspects.labels).tolist()
    actions = [decision.action for decision in decisions.values()]
    return {
        "split": split,
        **pick_fields(suspects, "by", "measure", "documents", "checkpoints"),
        "total": len(suspects),
        "matching": len(positions),
        "accepted": actions.count("accept"),
        "relabelled": actions.count("relabel"),
        "noise": _noise_view(suspects),
        "labels": [label for label in labels if isinstance(label, int)][:1000],
        "classes": served.class_names(split),
        "recipe": served.recipe is not None,
        "suggestions": state,
        "rows": [
            {
                "rank": at + 1,
                "row": view,
                "value": float(suspects.values[at]),
                "wrong": None if suspects.noise is None else float(suspects.noise.wrong[at]),
                "suggestion": _suggestion(served, table, view["id"], suggestions),
                "decision": decisions.get(view["id"]),
            }
            for view, at in zip(views, page.tolist(), strict=True)
        ],
    }


def record_decision(served: ServedStore, body: DecisionBody) -> Decision:
    """Record a decision about a row; an undo takes back the last standing one."""
    table = served.table(body.run, body.split, body.name)
    at = int(table.positions([body.row])[0])
    if at < 0:
        raise StoreError(f"{body.split!r} has no row {body.row}", code="web.unknown_row")
    before = table.columns["label"][at].item() if "label" in table.columns else None
    before = before if isinstance(before, int) else None
    if body.label is not None:
        _validate_label(served, table, body.label, action=body.action)
    undone = None
    if body.action == "undo":
        last = current_decisions(served.decisions(body.split)).get(body.row)
        if last is None:
            raise StoreError(
                f"there is no decision about row {body.row} of {body.split!r}",
                code="web.no_decision",
            )
        undone = last.number
    return served.store.decide(
        Decision(body.split, body.row, body.action, body.label, before=before, of=undone)
    )


def list_decisions(served: ServedStore, split: Name = "train") -> list[Decision]:
    """Return the log of decisions about a split."""
    return served.decisions(split)


def export_decisions(
    served: ServedStore, split: Name = "train", form: Literal["csv", "json"] = "csv"
) -> Response:
    """Return the standing decisions as a file, one line for each row."""
    decisions = sorted(
        current_decisions(served.decisions(split)).values(), key=lambda one: one.number
    )
    lines = [
        {
            "id": one.row,
            "action": one.action,
            "label_before": one.before,
            "label": one.label,
            "decision": one.number,
            "time": datetime.fromtimestamp(one.time, UTC).isoformat(timespec="seconds"),
        }
        for one in decisions
    ]
    headers = {"content-disposition": f'attachment; filename="decisions-{split}.{form}"'}
    if form == "json":
        content = to_json({"split": split, "decisions": lines})
        return Response(content, media_type="application/json", headers=headers)
    out = io.StringIO()
    names = ("id", "action", "label_before", "label", "decision", "time")
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return Response(out.getvalue(), media_type="text/csv; charset=utf-8", headers=headers)


def show_suggestions(served: ServedStore, split: Name = "train") -> dict[str, bool]:
    """Return whether suggested labels are ready; raises `BusyError` while they are not."""
    _train_out_of_fold(served, split, start=False)
    return {"there": True}


def start_suggestions(served: ServedStore, body: CaptureBody) -> dict[str, bool]:
    """Start training the models that suggest labels."""
    _train_out_of_fold(served, body.split, start=True)
    return {"there": True}


def show_retraining(
    served: ServedStore, run: Name = "main", split: Name = "train", name: Name = "main"
) -> dict[str, Any]:
    """Return what training without the relabeled rows did to the queries."""
    return _retrain(served, run=run, split=split, name=name, start=False)


def start_retraining(served: ServedStore, body: CaptureBody) -> dict[str, Any]:
    """Start training without the relabeled rows, and without as many random ones."""
    return _retrain(served, run=body.run, split=body.split, name=body.name, start=True)


def _rank(served: ServedStore, *, run: str, split: str, name: str, by: Measure) -> Suspects:
    def compute(_: Any) -> Suspects:
        from gradkeep.attribution._suspects import suspects

        checkpoints = served.checkpoints(run, name, split)
        return suspects(
            served.store, train=split, by=by, run=run, name=name, checkpoints=checkpoints
        )

    return served.tasks.get(
        ("suspects", run, split, name, by, served.sealed(run, name)),
        f"ranking the rows of {split} by {by}",
        compute,
        size=lambda suspects: 40 * len(suspects),
    )


def _noise_view(suspects: Suspects) -> dict[str, Any] | None:
    if suspects.noise is None:
        return None
    precision = 0.8  # share of wrong labels in the list that the page suggests to review
    threshold = suspects.noise.threshold(precision)
    low, high = suspects.noise.rate_interval
    return {
        "rate": suspects.noise.rate,
        "low": low,
        "high": high,
        "listed": 0 if threshold is None else threshold.rows,
        "precision": precision,
    }


def _validate_label(served: ServedStore, table: RowTable, label: int, *, action: str) -> None:
    """Refuse a label that is not a class: neither named by the preview nor in the data."""
    if action != "relabel":
        raise StoreError(
            "only a relabel has a label",
            code="web.label_without_relabel",
            found=f"{action} with label {label}",
        )
    columns = [table.columns[name] for name in ("label", "predicted") if name in table.columns]
    columns = [column for column in columns if column.dtype.kind in "iu" and len(column)]
    classes = served.class_names(table.key.split) or []
    lowest = min([0, *(int(column.min()) for column in columns)])
    highest = max([len(classes) - 1, *(int(column.max()) for column in columns)])
    if not lowest <= label <= highest:
        raise StoreError(
            f"there is no class {label}",
            code="web.unknown_class",
            expected=f"{lowest} to {highest}" if highest >= 0 else "no label: there are no classes",
            fix="Name further classes in gk.Preview(classes=...).",
        )


def _train_out_of_fold(served: ServedStore, split: str, *, start: bool) -> Any:
    """Return class probabilities `[N, C]` from models that were trained without each row."""
    recipe = _require_recipe(served)

    def compute(report: Callable[[int, int], None]) -> Any:
        from gradkeep.evaluate import out_of_fold

        return out_of_fold(
            recipe,
            store=served.store,
            seeds=1,
            workers=0,
            progress=lambda progress: report(progress.done, progress.total),
        )

    return served.tasks.get(
        _suggestion_key(split),
        "training models that leave each row out in turn",
        compute,
        size=lambda probabilities: int(probabilities.nbytes),
        lane="long",
        start=start,
    )


def _retrain(
    served: ServedStore, *, run: str, split: str, name: str, start: bool
) -> dict[str, Any]:
    recipe = _require_recipe(served)
    table = served.table(run, split, name)
    decisions = served.standing_decisions(table)
    wrong = sorted(row for row, one in decisions.items() if one.action == "relabel")
    if not wrong:
        raise EvaluationError(
            "no label is marked as wrong",
            code="web.nothing_wrong",
            fix="press r on rows with wrong labels",
        )
    positions = table.positions(wrong)
    if recipe.num_rows != len(table.ids):
        raise EvaluationError(
            "the recipe has another number of rows than the capture",
            code="web.recipe_rows",
            found=f"{recipe.num_rows} rows",
            expected=len(table.ids),
        )

    def compute(report: Callable[[int, int], None]) -> dict[str, Any]:
        from gradkeep.evaluate import verify_rows

        gain = verify_rows(
            positions[positions >= 0],
            recipe,
            store=served.store,
            seeds=3,
            workers=0,
            progress=lambda progress: report(progress.done, progress.total),
        )
        return {"rows": len(wrong), "gain": evaluation_view("retrained", gain)}

    key = ("retrain", split, tuple(wrong))
    what = f"training without {len(wrong)} rows"
    return served.tasks.get(key, what, compute, lane="long", start=start)


def _require_recipe(served: ServedStore) -> Recipe:
    if served.recipe is None:
        raise EvaluationError(
            "training needs a recipe",
            code="web.no_recipe",
            fix=f"gradkeep serve {served.location} --recipe train.py:recipe",
        )
    return served.recipe


def _suggestion_key(split: str) -> tuple[str, str]:
    return ("suggest", split)


def _suggestion(
    served: ServedStore, table: RowTable, row: int, probabilities: Any
) -> dict[str, Any] | None:
    at = int(table.positions([row])[0])
    if probabilities is None or not 0 <= at < len(probabilities):
        return None
    label = int(probabilities[at].argmax())
    name = served.label_name(table.key.split, label)
    return {"label": label, "name": name, "probability": float(probabilities[at, label])}
