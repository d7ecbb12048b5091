"""The screen of suspect labels: a queue, decisions about it, and what training without them does."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradkeep.errors import EvaluationError, StoreError
from gradkeep.store import Decision, standing
from gradkeep.web._clusters_screen import EvaluationView, evaluation_view
from gradkeep.web._responses import to_json
from gradkeep.web._served import RowView, row_views

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradkeep.attribution._suspects import Suspects
    from gradkeep.evaluate import Recipe
    from gradkeep.web._served import RowTable, ServedStore

Measure = Literal["loss", "self", "noise"]
QueueFilter = Literal["all", "open", "decided"]
_PRECISION = 0.8


@dataclass(frozen=True, slots=True)
class SuggestedLabel:
    """What models say of a row that they were not trained on."""

    label: int
    name: str | None
    probability: float


@dataclass(frozen=True, slots=True)
class SuspectRow:
    """A row of the queue."""

    rank: int
    row: RowView
    value: float
    wrong: float | None
    """The probability that its label is wrong, where that can be said."""
    suggestion: SuggestedLabel | None
    decision: Decision | None


@dataclass(frozen=True, slots=True)
class NoiseView:
    """How many labels are wrong, as far as it can be said."""

    rate: float
    low: float
    high: float
    listed: int
    """Rows of the longest list of which `precision` are expected to be wrong."""
    precision: float


@dataclass(frozen=True, slots=True)
class SuspectsView:
    """Some rows of the queue, and how far a person is."""

    split: str
    by: str
    measure: str
    """What the values are, in words."""
    documents: bool
    """Whether rows are documents of a language model, which have no labels."""
    checkpoints: tuple[str, ...]
    total: int
    matching: int
    accepted: int
    relabelled: int
    noise: NoiseView | None
    labels: list[int]
    """Classes to choose from."""
    classes: list[str] | None
    recipe: bool
    """Whether models can be trained here."""
    suggestions: Literal["none", "working", "there"]
    rows: list[SuspectRow]


def list_suspects(
    served: ServedStore,
    *,
    run: str,
    split: str,
    name: str,
    by: Measure,
    show: QueueFilter,
    start: int,
    count: int,
) -> SuspectsView:
    """Some rows of the queue, the worst first; what `gk.suspects` finds."""
    table = served.table(run, split, name)
    found = _ranked(served, run=run, split=split, name=name, by=by)
    said = served.standing_decisions(table)
    places = np.arange(len(found))
    if show != "all" and said:
        decided = np.isin(found.ids, np.fromiter(said, np.int64, len(said)))
        places = places[decided if show == "decided" else ~decided]
    elif show == "decided":
        places = places[:0]
    chosen = places[start : start + count]
    views = row_views(served, table, found.ids[chosen].tolist())
    told = _suggestions_there(served, split)
    preview = served.preview(split)
    labels = [] if found.labels is None else np.unique(found.labels).tolist()
    return SuspectsView(
        split=split,
        by=found.by,
        measure=found.measure,
        documents=found.documents,
        checkpoints=found.checkpoints,
        total=len(found),
        matching=len(places),
        accepted=sum(one.action == "accept" for one in said.values()),
        relabelled=sum(one.action == "relabel" for one in said.values()),
        noise=_noise(found),
        labels=[label for label in labels if isinstance(label, int)][:1000],
        classes=None if preview is None or preview.classes is None else list(preview.classes),
        recipe=served.recipe is not None,
        suggestions="there"
        if told is not None
        else "working"
        if served.desk.is_under_way(_suggest_key(split))
        else "none",
        rows=[
            SuspectRow(
                int(at) + 1,
                view,
                float(found.values[at]),
                None if found.noise is None else float(found.noise.wrong[at]),
                _suggested(told, table.positions(np.array([view.id]))[0], preview),
                said.get(view.id),
            )
            for view, at in zip(views, chosen.tolist(), strict=True)
        ],
    )


def _ranked(served: ServedStore, *, run: str, split: str, name: str, by: Measure) -> Suspects:
    def make(_: Any) -> Suspects:
        from gradkeep.attribution._suspects import suspects

        return suspects(
            served.store,
            train=split,
            by=by,
            run=run,
            name=name,
            checkpoints=served.checkpoints(run, name, split),
        )

    age = served.sealed(run, name)
    return served.desk.ask(
        ("suspects", run, split, name, by, age),
        f"ranking the rows of {split} by {by}",
        make,
        size=lambda found: 40 * len(found),
    )


def _noise(found: Suspects) -> NoiseView | None:
    if found.noise is None:
        return None
    threshold = found.noise.threshold(_PRECISION)
    low, high = found.noise.rate_interval
    listed = 0 if threshold is None else threshold.rows
    return NoiseView(found.noise.rate, low, high, listed, _PRECISION)


def decide(
    served: ServedStore,
    *,
    run: str,
    split: str,
    name: str,
    row: int,
    action: Literal["accept", "relabel", "undo"],
    label: int | None,
) -> Decision:
    """Record what a person says of a row; an undo takes back the last standing decision."""
    table = served.table(run, split, name)
    at = int(table.positions(np.array([row]))[0])
    if at < 0:
        raise StoreError(f"{split!r} has no row {row}")
    before = table.columns["label"][at].item() if "label" in table.columns else None
    before = before if isinstance(before, int) else None
    if label is not None:
        _check_label(served, table, label, action=action)
    of = None
    if action == "undo":
        last = standing(served.decisions(split)).get(row)
        if last is None:
            raise StoreError(f"nothing was decided about row {row} of {split!r}")
        of = last.number
    return served.store.decide(Decision(split, row, action, label, before=before, of=of))


def _check_label(served: ServedStore, table: RowTable, label: int, *, action: str) -> None:
    """Refuse a label that is none of the classes: those with names, or those that occur."""
    if action != "relabel":
        raise StoreError("only a relabel names a label", found=f"{action} with label {label}")
    preview = served.preview(table.key.split)
    columns = [table.columns[name] for name in ("label", "predicted") if name in table.columns]
    whole = [one for one in columns if one.dtype.kind in "iu" and len(one)]
    last = max((int(one.max()) for one in whole), default=-1)
    if preview is not None and preview.classes is not None:
        last = max(last, len(preview.classes) - 1)
    least = min(0, min((int(one.min()) for one in whole), default=0))
    if not least <= label <= last:
        raise StoreError(
            f"there is no class {label}",
            expected="no label: these rows have no classes" if last < 0 else f"{least} to {last}",
            fix="name classes that no row has in gk.Preview(classes=...)",
        )


def exported(served: ServedStore, split: str, *, form: Literal["csv", "json"]) -> bytes:
    """The standing decisions as a file: a line for each row."""
    said = sorted(standing(served.decisions(split)).values(), key=lambda one: one.number)
    lines = [
        {
            "id": one.row,
            "action": one.action,
            "label_before": one.before,
            "label": one.label,
            "decision": one.number,
            "time": datetime.fromtimestamp(one.time, UTC).isoformat(timespec="seconds"),
        }
        for one in said
    ]
    if form == "json":
        return to_json({"split": split, "decisions": lines})
    out = io.StringIO()
    names = ("id", "action", "label_before", "label", "decision", "time")
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue().encode()


def suggest(served: ServedStore, *, split: str, begin: bool) -> Any:
    """Train models that leave each row out in turn, and keep what they say of it; `[N, C]`."""
    recipe = _recipe(served)

    def make(report: Callable[[int, int], None]) -> Any:
        from gradkeep.evaluate import out_of_fold

        return out_of_fold(
            recipe, store=served.store, seeds=1, workers=0, progress=_told_to(report)
        )

    return served.desk.ask(
        _suggest_key(split),
        "training models that leave each row out in turn",
        make,
        size=lambda told: int(told.nbytes),
        lane="long",
        begin=begin,
    )


@dataclass(frozen=True, slots=True)
class RetrainedView:
    """What training without the rows that were said to be wrong did to the queries."""

    rows: int
    gain: EvaluationView


def retrain(served: ServedStore, *, run: str, split: str, name: str, begin: bool) -> RetrainedView:
    """Train without the rows whose labels were said to be wrong, and without as many at random."""
    recipe = _recipe(served)
    table = served.table(run, split, name)
    said = served.standing_decisions(table)
    wrong = sorted(row for row, one in said.items() if one.action == "relabel")
    if not wrong:
        raise EvaluationError(
            "no label was said to be wrong yet", fix="press r on rows whose labels are wrong"
        )
    places = table.positions(np.array(wrong))
    if recipe.num_rows != len(table.ids):
        raise EvaluationError(
            "the recipe is of other rows than the capture",
            found=f"{recipe.num_rows} rows",
            expected=len(table.ids),
        )

    def make(report: Callable[[int, int], None]) -> RetrainedView:
        from gradkeep.evaluate import verify_rows

        found = verify_rows(
            places[places >= 0],
            recipe,
            store=served.store,
            seeds=3,
            workers=0,
            progress=_told_to(report),
        )
        return RetrainedView(len(wrong), evaluation_view("retrained", found))

    return served.desk.ask(
        ("retrain", split, tuple(wrong)),
        f"training without {len(wrong)} rows",
        make,
        lane="long",
        begin=begin,
    )


def _recipe(served: ServedStore) -> Recipe:
    if served.recipe is None:
        raise EvaluationError(
            "how models are trained is not known here",
            fix=f"gradkeep serve {served.location} --recipe train.py:recipe",
        )
    return served.recipe


def _suggest_key(split: str) -> tuple[str, str]:
    return ("suggest", split)


def _suggestions_there(served: ServedStore, split: str) -> Any:
    return served.desk.peek(_suggest_key(split))


def _suggested(told: Any, place: int, preview: Any) -> SuggestedLabel | None:
    if told is None or not 0 <= place < len(told):
        return None
    label = int(told[place].argmax())
    name = None if preview is None else preview.name_of(label)
    return SuggestedLabel(label, name, float(told[place, label]))


def _told_to(report: Callable[[int, int], None]) -> Callable[[Any], None]:
    return lambda progress: report(progress.done, progress.total)
