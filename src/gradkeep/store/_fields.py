"""The one door for documents: fields of JSON taken out by name and type.

Whoever made the file, what passes here has the type that the code behind it counts on; all else is
`Damaged`, with the field's name.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import xxhash

from gradkeep.store._document import SMALL_DOCUMENT, from_bytes, not_ours

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gradkeep.errors import Damaged
    from gradkeep.store.backends._backend import Backend

LARGEST_WHOLE = 2**63 - 1
"""What a column of whole numbers holds, here and in every database."""
_KINDS = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}


def read_document(backend: Backend, key: str, *, most: int = SMALL_DOCUMENT) -> Fields:
    """Read a document of a store, checked and of at most so many bytes; FileNotFoundError if none."""
    path = backend.describe(key)
    opened = backend.open(key)
    try:
        if opened.size > most:
            raise not_ours(path, f"{opened.size} bytes", f"at most {most} bytes")
        data = opened.read(0, opened.size)
    finally:
        opened.close()
    xxh3 = xxhash.xxh3_128_hexdigest(data)
    return Fields(from_bytes(data, path=path), path=path, digest=xxh3)


class Fields:
    """The fields of one JSON object of a document.

    >>> fields = Fields({"rows": 3, "name": None}, path="a.json")
    >>> fields.whole("rows"), fields.optional_text("name")
    (3, None)
    """

    def __init__(
        self, values: Mapping[str, Any], *, path: str, within: str = "", digest: str | None = None
    ) -> None:
        self.values, self.path = values, path
        self.digest = digest
        """The xxh3-128 of the whole document, if it was read from a store."""
        self._within = within

    def text(self, name: str) -> str:
        """A text."""
        value = self._get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a text")
        return value

    def whole(self, name: str) -> int:
        """A whole number from 0 to the largest that a database holds."""
        value = self._get(name)
        if not _is_whole(value) or value < 0:
            raise self._wrong(name, "a whole number of at least 0 and below 2**63")
        return int(value)

    def number(self, name: str) -> float:
        """A finite number."""
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise self._wrong(name, "a number")
        return float(value)

    def optional_text(self, name: str) -> str | None:
        """A text, or null, or nothing."""
        return None if self.values.get(name) is None else self.text(name)

    def optional_whole(self, name: str) -> int | None:
        """A whole number, or null, or nothing."""
        return None if self.values.get(name) is None else self.whole(name)

    def optional_integer(self, name: str) -> int | None:
        """A whole number of either sign, or null, or nothing."""
        value = self.values.get(name)
        if value is None:
            return None
        if not _is_whole(value) or value < -LARGEST_WHOLE:
            raise self._wrong(name, "a whole number between -2**63 and 2**63")
        return int(value)

    def optional_number(self, name: str) -> float | None:
        """A number, or null, or nothing."""
        return None if self.values.get(name) is None else self.number(name)

    def wholes(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        values = self._list(name)
        if not all(_is_whole(value) and value >= 0 for value in values):
            raise self._wrong(name, "a list of whole numbers")
        return tuple(values)

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self._get(name)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """An object with any fields."""
        value = self._get(name)
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return value

    def scalars(self, name: str) -> dict[str, Any]:
        """An object whose fields are texts, numbers, true, false or null."""
        value = self.mapping(name)
        if any(isinstance(item, dict | list) for item in value.values()):
            raise self._wrong(name, "an object of texts and numbers")
        return value

    def objects(self, name: str) -> list[Fields]:
        """A list of objects."""
        values = self._list(name)
        if not all(isinstance(value, dict) for value in values):
            raise self._wrong(name, "a list of objects")
        return [
            Fields(value, path=self.path, within=f"{self._within}{name}[{at}].")
            for at, value in enumerate(values)
        ]

    def only(self, known: Iterable[str]) -> None:
        """Raise `Damaged` if there are fields of other names."""
        unknown = sorted(set(self.values) - set(known))
        if unknown:
            raise not_ours(self.path, f"{self._within}{unknown[0]}"[:200], "no such field")

    def wrong(self, what: str) -> Damaged:
        """The error for fields that do not go together."""
        return not_ours(self.path, f"{self._within}{what}"[:200], "what gradkeep wrote")

    def _list(self, name: str) -> list[Any]:
        value = self._get(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list")
        return value

    def _get(self, name: str) -> Any:
        if name not in self.values:
            raise not_ours(self.path, f"no field {self._within}{name}", f"a field {name}")
        return self.values[name]

    def _wrong(self, name: str, expected: str) -> Damaged:
        value = self.values[name]
        shown = _KINDS.get(type(value)) or repr(value)[:60]
        if isinstance(value, str) and len(value) <= 60:
            shown = ascii(value)
        return not_ours(self.path, f"{self._within}{name}: {shown}", expected)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value <= LARGEST_WHOLE


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float can hold
        return False
