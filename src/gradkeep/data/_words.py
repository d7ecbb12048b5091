"""A vocabulary of words, the same for the same texts on every machine."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from gradkeep.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PAD, UNK, CLS, SEP = range(4)
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
_WORD = re.compile(r"\w+(?:'\w+)*|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Words and their numbers; the first four are `[PAD]`, `[UNK]`, `[CLS]` and `[SEP]`.

    >>> words = Vocabulary.build(["The cat sat.", "the dog sat"])
    >>> words.words[4:]
    ('sat', 'the', '.', 'cat', 'dog')
    >>> ids, mask = words.encode(["The bird sat"], length=6)
    >>> ids.tolist(), mask.tolist()
    ([[2, 5, 1, 4, 3, 0]], [[1, 1, 1, 1, 1, 0]])
    """

    words: tuple[str, ...]
    _numbers: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numbers = {word: number for number, word in enumerate(self.words)}
        if self.words[:4] != _SPECIAL or len(numbers) != len(self.words):
            raise DataError(
                "a vocabulary holds every word once",
                found=self.words[:6],
                expected=f"first {' '.join(_SPECIAL)}",
            )
        object.__setattr__(self, "_numbers", numbers)

    @classmethod
    def build(cls, texts: Iterable[str], *, size: int = 10_000, least: int = 1) -> Self:
        """The most frequent words, at most `size` with the special ones, seen `least` times."""
        counts = Counter(word for text in texts for word in split_words(text))
        # Ties by the alphabet: the order of the texts must not matter.
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        kept = [word for word, count in ranked if count >= least]
        return cls((*_SPECIAL, *kept[: max(0, size - len(_SPECIAL))]))

    def __len__(self) -> int:
        return len(self.words)

    def encode(
        self, texts: Sequence[str], *, length: int
    ) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int64]]]:
        """Ids and attention mask, both `[N, length]`; long texts are cut, short ones padded."""
        if length < 2:
            raise DataError("a text needs room for [CLS] and [SEP]", found=length, expected=">= 2")
        ids = np.full((len(texts), length), PAD, np.int64)
        mask = np.zeros((len(texts), length), np.int64)
        for row, text in enumerate(texts):
            words = split_words(text)[: length - 2]
            found = [CLS, *(self._numbers.get(word, UNK) for word in words), SEP]
            ids[row, : len(found)] = found
            mask[row, : len(found)] = 1
        return ids, mask

    def decode(self, ids: Iterable[int]) -> str:
        """The words of one row, without padding."""
        return " ".join(self.words[number] for number in map(int, ids) if number != PAD)


def split_words(text: str) -> list[str]:
    """Words in lower case, and each other sign by itself.

    >>> split_words("It's 5 o'clock!")
    ["it's", '5', "o'clock", '!']
    """
    return _WORD.findall(text.lower())
