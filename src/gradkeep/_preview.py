"""Previews of rows: images, texts and tables from the user's own data."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradkeep import _arguments
from gradkeep.errors import CaptureError

_FILES = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"}
COPIED_IMAGE, COPIED_TEXT, COPIED_TABLE = "preview_image", "preview_text", "preview_table"
"""Columns in which a capture stores previews, if requested."""

RowSource = Callable[[int], Any] | Sequence[Any] | Any
"""Function of a row's id, or a container of rows by id: a list, array, tensor or table."""


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A row as it is shown.

    Attributes:
        image: A `data:` URL.
        text: The text.
        table: Names and values.
        tokens: Words as the model reads them.
        problem: What the user's function raised, if it did.
    """

    image: str | None = None
    text: str | None = None
    table: tuple[tuple[str, str], ...] = ()
    tokens: tuple[str, ...] = ()
    problem: str | None = None

    @property
    def empty(self) -> bool:
        """True if there is nothing to show."""
        return self == ShownRow()


@dataclass(frozen=True, slots=True, eq=False)
class Preview:
    """Defines how rows are shown: functions of a row's id, or lists, arrays or tables of rows.

    With `gk.capture` previews are copied into the store. With `gradkeep serve --data` nothing is copied, and rows are
    read when they are viewed.

    Attributes:
        image: Pixels `[H, W]`, `[H, W, C]` or `[C, H, W]` (an array, a tensor, a PIL image, or the bytes of a
            PNG or JPEG file).
        text: A text.
        table: A mapping of names to values, or a data frame.
        tokens: The words of a text as the model reads them.
        classes: Names of labels.

    Raises:
        CaptureError: An argument is neither a function nor a container of rows.

    Example:
        >>> preview = Preview(text=["a cat", "a dog"], classes=["cat", "dog"])
        >>> preview.show(1).text
        'a dog'
        >>> preview.show(7).problem
        'IndexError: list index out of range'
    """

    image: RowSource | None = None
    text: RowSource | None = None
    table: RowSource | None = None
    tokens: RowSource | None = None
    classes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name in ("image", "text", "table", "tokens"):
            value = getattr(self, name)
            if value is not None and not callable(value) and not hasattr(value, "__getitem__"):
                raise _arguments.argument_error(
                    name,
                    value,
                    error=CaptureError,
                    expected="a function of a row's id, or a list, array or table of rows",
                )
        if self.classes is not None:
            named = _arguments.texts("classes", self.classes, error=CaptureError)
            object.__setattr__(self, "classes", tuple(named))

    def show(self, row: int) -> ShownRow:
        """Return a row as it is shown; exceptions of the user's functions become its `problem`.

        Args:
            row: Id of the row.

        Returns:
            The preview of the row.
        """
        _arguments.count("row", row, error=CaptureError, least=-_arguments.LARGEST)
        try:
            return ShownRow(
                image=None if self.image is None else image_url(_lookup(self.image, row)),
                text=None if self.text is None else _as_text(_lookup(self.text, row)),
                table=() if self.table is None else _as_table(_lookup(self.table, row)),
                tokens=() if self.tokens is None else _as_tokens(_lookup(self.tokens, row)),
            )
        except Exception as error:  # user code may raise anything
            message = " ".join(str(error).split())[:300]
            return ShownRow(
                problem=f"{type(error).__name__}: {message}" if message else str(type(error))
            )

    def name_of(self, label: int | None) -> str | None:
        """Return the name of a label, if it has one.

        Args:
            label: The label, or None.

        Returns:
            The name, or None.
        """
        if label is None or self.classes is None or not 0 <= label < len(self.classes):
            return None
        return self.classes[label]

    def copied(self, ids: Sequence[int]) -> dict[str, list[str]]:
        """Return the columns in which a capture stores previews of these rows.

        Args:
            ids: Ids of the rows.

        Returns:
            Texts by column.

        Raises:
            CaptureError: A function of the preview raised.
        """
        shown = [self.show(row) for row in ids]
        problems = [one.problem for one in shown if one.problem is not None]
        if problems:
            raise CaptureError(
                "a function of the preview raised",
                code="capture.preview_raised",
                found=problems[0],
                fix="Correct the function, or use it with gradkeep serve --data, which "
                "shows the error.",
            )
        columns: dict[str, list[str]] = {}
        if self.image is not None:
            columns[COPIED_IMAGE] = [one.image or "" for one in shown]
        if self.text is not None:
            columns[COPIED_TEXT] = [one.text or "" for one in shown]
        if self.table is not None:
            columns[COPIED_TABLE] = [json.dumps(one.table) for one in shown]
        return columns


def row_from_texts(stored: Mapping[str, str]) -> ShownRow | None:
    """Build a preview from stored texts by name: one as it is, several as a table.

    >>> row_from_texts({"source": "web", "text": "a longer text"})
    ShownRow(image=None, text='a longer text', table=(('source', 'web'),), tokens=(), problem=None)
    """
    if not stored:
        return None
    copied = (COPIED_IMAGE, COPIED_TABLE, COPIED_TEXT)
    own = {name: text for name, text in stored.items() if name not in copied and text}
    table = tuple((str(a), str(b)) for a, b in json.loads(stored.get(COPIED_TABLE) or "[]"))
    text = stored.get(COPIED_TEXT) or None
    if text is None and own:
        longest = max(own, key=lambda name: len(own[name]))
        text = own.pop(longest)
    table += tuple((name, value[:2000]) for name, value in own.items())
    image = stored.get(COPIED_IMAGE) or None
    if image is not None and not image.startswith("data:image/"):
        image = None
    return ShownRow(image, None if text is None else text[:2000], table)


def image_url(pixels: Any) -> str:
    """Encode an image as a `data:` URL, as PNG.

    >>> image_url(np.eye(2))[:30]
    'data:image/png;base64,iVBORw0K'
    """
    if isinstance(pixels, bytes):
        for begin, kind in _FILES.items():
            if pixels.startswith(begin) and len(pixels) <= 2**20:
                return f"data:{kind};base64,{base64.b64encode(pixels).decode()}"
        raise ValueError("image bytes must be a PNG, JPEG or GIF file of at most 1 MiB")
    values = np.asarray(pixels.detach().cpu() if hasattr(pixels, "detach") else pixels)
    if values.ndim == 3 and values.shape[0] in (1, 3, 4) and values.shape[2] not in (1, 3, 4):
        values = np.moveaxis(values, 0, 2)
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    if not 2 <= values.ndim <= 3 or not values.size or (values.ndim == 3 and values.shape[2] > 4):
        raise ValueError(f"an image must be [H, W], [H, W, C] or [C, H, W], got {values.shape}")
    step = -(-max(values.shape[:2]) // 128)  # at most 128 pixels per side
    values = values[::step, ::step]
    if values.dtype != np.uint8:
        values = np.nan_to_num(values.astype(np.float64))
        low, high = float(values.min()), float(values.max())
        if low < 0 or high > 1:
            values = (values - low) / max(high - low, 1e-30)
        values = np.round(255 * values).astype(np.uint8)
    return f"data:image/png;base64,{base64.b64encode(_png(values)).decode()}"


def _png(values: np.ndarray[Any, Any]) -> bytes:
    """Encode a PNG file, using only zlib."""
    kinds = {1: 0, 2: 4, 3: 2, 4: 6}
    height, width = values.shape[:2]
    channels = 1 if values.ndim == 2 else values.shape[2]
    lines = np.ascontiguousarray(values).reshape(height, width * channels)
    raw = np.concatenate([np.zeros((height, 1), np.uint8), lines], axis=1).tobytes()

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 8, kinds[channels], 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(raw, 9))
        + chunk(b"IEND", b"")
    )


def _lookup(source: Any, row: int) -> Any:
    if callable(source):
        return source(row)
    if hasattr(source, "iloc"):  # a data frame: rows by position
        return source.iloc[row]
    return source[row]


def _as_text(value: Any) -> str:
    return str(value)[:4000]


def _as_table(value: Any) -> tuple[tuple[str, str], ...]:
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if not isinstance(value, Mapping):
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value).reshape(-1)
        value = {str(place): one.item() for place, one in enumerate(array[:40])}
    cells = list(value.items())[:40]
    return tuple((str(name)[:200], _cell(cell)) for name, cell in cells)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:500]


def _as_tokens(value: Any) -> tuple[str, ...]:
    return tuple(str(token)[:200] for token in list(value)[:4096])
