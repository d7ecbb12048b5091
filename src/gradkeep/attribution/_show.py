"""`gk.show`: the rows that helped and harmed most, in a notebook or a terminal."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import PositiveInt, checked
from gradkeep._display import text_table
from gradkeep._preview import Preview, ShownRow, row_from_texts
from gradkeep.errors import AttributionError, GradkeepError
from gradkeep.store import CaptureKey

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradkeep.attribution._scores import RankedRows, Scores

_LONGEST = 160
"""Most characters of a text that are shown."""
_CARD = "display:inline-block;vertical-align:top;width:9em;margin:0 .6em .6em 0;font-size:85%"
_PICTURE = "width:100%;image-rendering:pixelated;border-radius:3px"


@dataclass(frozen=True, slots=True)
class ShownInfluence:
    """A training row next to a query: id, score, label and preview."""

    id: int
    value: float
    label: str | None = None
    looks: ShownRow | None = None


@dataclass(frozen=True, slots=True)
class ShownQuery:
    """A query with the rows that helped and harmed it most."""

    id: int
    label: str | None
    looks: ShownRow | None
    helped: tuple[ShownInfluence, ...]
    harmed: tuple[ShownInfluence, ...]


@dataclass(frozen=True, slots=True)
class ShownScores:
    """Result of `gk.show`: renders in a notebook, prints in a terminal; `.html` is a self-contained fragment."""

    title: str
    queries_split: str
    train_split: str
    queries: tuple[ShownQuery, ...]

    @property
    def html(self) -> str:
        """Self-contained HTML fragment: no scripts, everything escaped."""
        parts = [f"<p><strong>{html.escape(self.title)}</strong></p>"]
        for query in self.queries:
            parts.append(f"<p>{html.escape(_named(self.queries_split, query.id, query.label))}</p>")
            parts.append(_look(query.looks))
            for caption, rows in (("helped most", query.helped), ("harmed most", query.harmed)):
                cards = "".join(_card(self.train_split, row) for row in rows)
                parts.append(f"<p><em>{caption}</em></p><div>{cards or 'none'}</div>")
        return "".join(parts)

    def _repr_html_(self) -> str:
        return self.html

    def __str__(self) -> str:
        lines = [self.title]
        for query in self.queries:
            lines.append(_named(self.queries_split, query.id, query.label))
            cells = [
                [effect, str(row.id), row.label or "", f"{row.value:+.4g}", _words(row.looks)]
                for effect, rows in (("helped", query.helped), ("harmed", query.harmed))
                for row in rows
            ]
            lines.append(
                text_table(["", self.train_split, "label", "score", ""], cells, right={1, 3})
            )
        return "\n".join(lines)

    __repr__ = __str__


@checked(AttributionError)
def show(
    scores: Scores, *, query: Any = None, k: PositiveInt = 5, preview: Preview | None = None
) -> ShownScores:
    """Show the `k` rows that helped and harmed a query most.

    In a notebook the result renders with the images or texts of `preview`, or with the texts that were
    captured; in a terminal it prints as a table. Cost: sorting the scores, and reading the shown rows.

    Args:
        scores: The scores.
        query: Id of a query, or several; the first three by default.
        k: Number of rows of each kind.
        preview: Images, texts or tables of the rows.

    Returns:
        An object that renders itself.

    Raises:
        AttributionError: A query was not scored.

    Example:
        >>> from gradkeep.attribution._scores import Scores
        >>> scores = Scores(np.array([[1.0, -2.0, 3.0]], np.float32), np.array([7]), np.arange(3))
        >>> print(show(scores, query=7, k=1, preview=Preview(text=["a cat", "a dog", "a fox"])))
        given: 1 of test x 3 of train, positive helps
        test 7
                train  label  score
        helped      2            +3  a fox
        harmed      1            -2  a dog
    """
    if query is None:
        query_ids = scores.query_ids[:3]
    else:
        listed = [query] if isinstance(query, int | np.integer) else query
        query_ids = _arguments.whole_numbers("query", listed, error=AttributionError)
    looks = _Previews(scores, preview)
    shown = []
    for number in query_ids.tolist():
        best, worst = scores.top(k, query=number), scores.bottom(k, query=number)
        shown.append(
            ShownQuery(
                number,
                _label(scores.query_labels, scores.query_ids, number, preview),
                looks.of(scores.queries, number),
                tuple(_influences(scores, best, 1, looks, preview)),
                tuple(_influences(scores, worst, -1, looks, preview)),
            )
        )
    true = "" if scores.exact else f", approximate ({scores.approximate or scores.method})"
    title = (
        f"{scores.method}: {scores.shape[0]} of {scores.queries} x {scores.shape[1]} of "
        f"{scores.train}{true}, positive helps"
    )
    return ShownScores(title, scores.queries, scores.train, tuple(shown))


def _influences(
    scores: Scores, ranked: RankedRows, sign: int, looks: _Previews, preview: Preview | None
) -> Iterator[ShownInfluence]:
    """Iterate over the rows whose scores have this sign."""
    for row, value in zip(ranked.ids.tolist(), ranked.values.tolist(), strict=True):
        if sign * value > 0:
            label = _label(scores.train_labels, scores.train_ids, row, preview)
            yield ShownInfluence(row, value, label, looks.of(scores.train, row))


class _Previews:
    """Previews of rows, from a `Preview` or from captured texts."""

    def __init__(self, scores: Scores, preview: Preview | None) -> None:
        self._scores, self._preview = scores, preview
        self._blocks: dict[str, tuple[Any, list[str]] | None] = {}

    def of(self, split: str, row: int) -> ShownRow | None:
        if self._preview is not None:
            return self._preview.show(row)
        if split not in self._blocks:
            self._blocks[split] = self._block(split)
        captured = self._blocks[split]
        if captured is None:
            return None
        block, names = captured
        try:
            batch = block.read([row], names)
        except GradkeepError:
            return None  # the row was deleted since
        return row_from_texts({name: batch[name].texts()[0] for name in names})

    def _block(self, split: str) -> tuple[Any, list[str]] | None:
        """Return the newest capture of a split, and the names of its texts."""
        if self._scores.store is None or not self._scores.checkpoints:
            return None
        run, _, checkpoint = self._scores.checkpoints[-1].rpartition("/")
        key = CaptureKey(checkpoint, split, run or "main")
        try:
            block = self._scores.store.read(key)
        except GradkeepError:
            return None
        names = [array.name for array in block.schema.arrays if array.is_text]
        return (block, names) if names else None


def _label(labels: Any, ids: Any, row: int, preview: Preview | None) -> str | None:
    if labels is None:
        return None
    value = np.asarray(labels)[np.flatnonzero(ids == row)[0]].item()
    named = preview.name_of(value) if preview is not None and isinstance(value, int) else None
    return str(value) if named is None else named


def _named(split: str, number: int, label: str | None) -> str:
    return f"{split} {number}" if label is None else f"{split} {number}, label {label}"


def _words(looks: ShownRow | None) -> str:
    if looks is None:
        return ""
    words = looks.problem or looks.text or ", ".join(f"{a} {b}" for a, b in looks.table)
    words = " ".join(words.split())
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}…"


def _look(looks: ShownRow | None) -> str:
    if looks is None:
        return ""
    image = (
        "" if looks.image is None else f'<img src="{html.escape(looks.image)}" style="{_PICTURE}">'
    )
    return f'<div style="width:9em">{image}</div><div>{html.escape(_words(looks))}</div>'


def _card(split: str, row: ShownInfluence) -> str:
    side = "▲" if row.value > 0 else "▼"
    score = f"{side} {row.value:+.4g}"
    return (
        f'<div style="{_CARD}">{_look(row.looks)}{html.escape(_named(split, row.id, row.label))}'
        f"<br>{score}</div>"
    )
