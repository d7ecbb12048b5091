"""The answer to a query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradkeep.store._display import html_table, text_table

_SHOWN_ROWS = 20
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Result:
    """The rows of an answer: `.rows()`, `.arrow()`, `.to_pandas()`; shows itself as a table."""

    _table: Any

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self._table.column_names)

    def rows(self) -> list[tuple[Any, ...]]:
        """All rows as tuples of Python values; NULL is None."""
        columns = [column.to_pylist() for column in self._table.columns]
        return list(zip(*columns, strict=True))

    def arrow(self) -> Any:
        """The answer as a `pyarrow.Table`, without a copy."""
        return self._table

    def to_pandas(self) -> Any:
        """The answer as a `pandas.DataFrame`."""
        return self._table.to_pandas()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def text(self, *, limit: int | None = None, width: int | None = None) -> str:
        """A plain table of the first `limit` rows (or all), no cell wider than `width`."""
        cells, right = self._cells(limit, width)
        shown = text_table(self.columns, cells, right=right)
        left = len(self) - len(cells)
        return shown if left <= 0 else f"{shown}\n... {left} more rows"

    def __repr__(self) -> str:
        return self.text(limit=_SHOWN_ROWS, width=_SHOWN_CHARACTERS)

    def _repr_html_(self) -> str:
        cells, right = self._cells(_SHOWN_ROWS, _SHOWN_CHARACTERS)
        left = len(self) - len(cells)
        more = f"<p>{left} more rows</p>" if left > 0 else ""
        return html_table(self.columns, cells, right=right) + more

    def _cells(self, limit: int | None, width: int | None) -> tuple[list[list[str]], set[int]]:
        import pyarrow.types as kinds

        shown = Result(self._table if limit is None else self._table.slice(0, limit)).rows()
        types = enumerate(self._table.schema.types)
        numbers = (kinds.is_integer, kinds.is_floating, kinds.is_decimal)
        right = {at for at, kind in types if any(is_kind(kind) for is_kind in numbers)}
        return [[_cell(value, width) for value in row] for row in shown], right


def _cell(value: object, width: int | None) -> str:
    if value is None:
        return "NULL"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if width is None:
        return text  # as it is: a plan of EXPLAIN is drawn with line breaks
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= width else f"{text[: width - 1]}…"
