"""WordPiece as bert-base-uncased has it: lower case without accents, then the longest known pieces."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.errors import DataError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    Ids = np.ndarray[Any, np.dtype[np.int64]]

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_SPLIT = re.compile("|".join(map(re.escape, _SPECIAL)))
_CONTROLS = ("Cc", "Cf", "Co", "Cs")  # not Cn: what Unicode has no sign for yet is a letter
_CHINESE = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F)),
    *((0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)


@dataclass(frozen=True, slots=True)
class WordPiece:
    """The tokens of a vocabulary file and their numbers, which are the numbers of its lines.

    >>> pieces = WordPiece(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "."))
    >>> pieces.tokens("Playing chess.")
    ['play', '##ing', '[UNK]', '.']
    >>> ids, mask = pieces.encode(["Playing."], length=6)
    >>> ids.tolist(), mask.tolist()
    ([[2, 5, 6, 7, 3, 0]], [[1, 1, 1, 1, 1, 0]])
    """

    vocabulary: tuple[str, ...]
    _numbers: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numbers = {token: number for number, token in enumerate(self.vocabulary)}
        missing = [token for token in _SPECIAL[:4] if token not in numbers]
        if missing or numbers["[PAD]"] != 0:
            raise DataError(
                "this is no WordPiece vocabulary",
                found=f"without {', '.join(missing)}" if missing else "[PAD] is not the first",
                expected="one token per line, [PAD] first, with [UNK], [CLS] and [SEP]",
            )
        object.__setattr__(self, "_numbers", numbers)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> WordPiece:
        """The vocabulary in a file such as `vocab.txt` of bert-base-uncased."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                "the WordPiece vocabulary cannot be read",
                path=path,
                found=error.strerror if isinstance(error, OSError) else "no UTF-8",
                expected="one token per line, as in vocab.txt of bert-base-uncased",
                fix="put vocab.txt beside Bert's checkpoint, or name it as vocab_file of the model",
            ) from None
        try:
            # Not splitlines(), which also cuts at rare signs that are tokens.
            return cls(tuple(line.rstrip("\r") for line in text.removesuffix("\n").split("\n")))
        except DataError as error:
            raise DataError(
                error.what,
                path=path,
                found=error.found,
                expected=error.expected,
                fix="take the vocab.txt that the checkpoint was trained with",
            ) from None

    def __len__(self) -> int:
        return len(self.vocabulary)

    def encode(self, texts: Sequence[str], *, length: int) -> tuple[Ids, Ids]:
        """Ids and attention mask `[N, length]`, cut as MetaStore cuts: a long text loses its [SEP].

        It first cuts to 512 with [CLS] and [SEP], then takes the first `length`.
        """
        ids = np.zeros((len(texts), length), np.int64)
        mask = np.zeros((len(texts), length), np.int64)
        first, last = self._numbers["[CLS]"], self._numbers["[SEP]"]
        for row, text in enumerate(texts):
            # The positions that the model has.
            pieces = [self._numbers[token] for token in self.tokens(text)[: 512 - 2]]
            found = [first, *pieces, last][:length]
            ids[row, : len(found)] = found
            mask[row, : len(found)] = 1
        return ids, mask

    def tokens(self, text: str) -> list[str]:
        """The pieces of a text, without [CLS] and [SEP] around them."""
        found: list[str] = []
        at = 0
        for special in _SPLIT.finditer(text):
            if special[0] in self._numbers:
                found += self._plain(text[at : special.start()])
                found.append(special[0])
                at = special.end()
        return found + self._plain(text[at:])

    def _plain(self, text: str) -> list[str]:
        return [piece for word in words(text) for piece in self._pieces(word)]

    def _pieces(self, word: str) -> list[str]:
        """The longest known beginning, then the longest known continuation, and so on."""
        if len(word) > 100:
            return ["[UNK]"]
        found: list[str] = []
        at = 0
        while at < len(word):
            before = "##" if at else ""
            ends = range(len(word), at, -1)
            end = next((end for end in ends if before + word[at:end] in self._numbers), None)
            if end is None:
                return ["[UNK]"]
            found.append(before + word[at:end])
            at = end
        return found


def words(text: str) -> list[str]:
    """Words in lower case without accents; signs and Chinese characters by themselves.

    >>> words("Crème brûlée, 漢字!")
    ['creme', 'brulee', ',', '漢', '字', '!']
    """
    clean = unicodedata.normalize("NFD", "".join(_cleaned(text)))
    # Letter by letter: a whole word in lower case has another sigma at its end.
    plain = "".join(sign.lower() for sign in clean if unicodedata.category(sign) != "Mn")
    apart = "".join(f" {sign} " if _is_sign(sign) else sign for sign in plain)
    return apart.split()


def _cleaned(text: str) -> Iterator[str]:
    for sign in text:
        if sign in "\t\n\r" or sign.isspace():
            yield " " if sign in "\t\n\r" or unicodedata.category(sign) != "Cc" else ""
        elif sign != "\ufffd" and unicodedata.category(sign) not in _CONTROLS:
            chinese = any(low <= ord(sign) <= high for low, high in _CHINESE)
            yield f" {sign} " if chinese else sign


@lru_cache(maxsize=4096)
def _is_sign(sign: str) -> bool:
    code = ord(sign)
    if code < 128:
        return sign.isprintable() and not sign.isalnum() and sign != " "
    return unicodedata.category(sign).startswith("P")
