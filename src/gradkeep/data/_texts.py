"""Texts as numbers: AG News by words, any text by characters."""

from __future__ import annotations

import csv
import html
import io
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import checked
from gradkeep.data._examples import Examples, check_labels, check_name, known_name, whole_labels
from gradkeep.errors import DataError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    import torch

    from gradkeep.data._examples import Positions

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
                f"a vocabulary holds every word once: {self.words[:6]}",
                expected=f"first {' '.join(_SPECIAL)}",
            )
        object.__setattr__(self, "_numbers", numbers)

    @classmethod
    def build(cls, texts: Iterable[str], *, size: int = 10_000, least: int = 1) -> Self:
        """The most frequent words, at most `size` with the special ones, seen `least` times."""
        _arguments.count("size", size, error=DataError)
        _arguments.count("least", least, error=DataError)
        given = texts if isinstance(texts, list | tuple) else _listed(texts)
        for text in given:
            _arguments.instance("texts", text, str, error=DataError)
        counts = Counter(word for text in given for word in split_words(text))
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
        most = len(self.words) - 1
        numbers = _arguments.whole_numbers("ids", _listed(ids), error=DataError, most=most)
        return " ".join(self.words[number] for number in numbers if number != PAD)


def _listed(values: Iterable[Any]) -> Any:
    """The values in memory; arrays and tensors as they are."""
    if getattr(values, "shape", None) == ():
        raise _arguments.argument_error("it", values, error=DataError, expected="several, not one")
    return values if hasattr(values, "shape") else list(values)


def split_words(text: str) -> list[str]:
    """Words in lower case, and each other sign by itself.

    >>> split_words("It's 5 o'clock!")
    ["it's", '5', "o'clock", '!']
    """
    return _WORD.findall(text.lower())


_CLASSES = ("World", "Sports", "Business", "Sci/Tech")
_SUFFIXES = (".csv", ".tsv")
# The ampersands of entities were lost when the set was made.
_ENTITY = re.compile(r"&?(#\d+|quot|amp|lt|gt|nbsp);")


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """Texts as numbers of words, in a fixed order: `texts[i]` is a dictionary of tensors."""

    input_ids: torch.Tensor
    """`[N, T]`, int64"""
    attention_mask: torch.Tensor
    """`[N, T]`, int64: 1 where there is a word, 0 where there is padding"""
    labels: torch.Tensor
    """`[N]`, int64"""
    classes: tuple[str, ...]
    vocabulary: Vocabulary

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, positions: Positions) -> dict[str, torch.Tensor]:
        return {
            "input_ids": self.input_ids[positions],
            "attention_mask": self.attention_mask[positions],
            "labels": self.labels[positions],
        }


@checked(DataError)
def load_agnews(
    path: str | os.PathLike[str],
    *,
    split: str = "train",
    length: int = 64,
    vocabulary: Vocabulary | str | os.PathLike[str] | None = None,
    words: int = 10_000,
    least: int = 1,
) -> Texts:
    """News and their kinds, each text cut or padded to `length` words with [CLS] and [SEP].

    `path` is a file, or a folder with `train.csv`, `test.csv` or the same as .tsv. The vocabulary
    holds at most `words` words of the training texts that occur `least` times; for any other
    split than "train" give it, or the training file, unless that lies in the folder.
    """
    import torch

    file = _file(Path(path), split)
    classes = _class_names(file.parent)
    texts, values = _read(file, classes)
    labels = whole_labels(np.array(values, np.int64), path=file)
    check_labels(labels, rows=len(texts), classes=classes, path=file)
    if not isinstance(vocabulary, Vocabulary):
        if vocabulary is not None:
            source = Path(vocabulary)
        elif split == "train":
            source = file
        elif Path(path).is_dir():
            source = _file(Path(path), "train")
        else:
            raise DataError(
                f"the vocabulary comes from the training texts, and this file is {split!r}",
                path=path,
                fix="give vocabulary=train.vocabulary, or the path of the training file",
            )
        learned = texts if source == file else _read(source, classes)[0]
        vocabulary = Vocabulary.build(learned, size=words, least=least)
    ids, mask = vocabulary.encode(texts, length=length)
    return Texts(torch.from_numpy(ids), torch.from_numpy(mask), labels, classes, vocabulary)


def _file(path: Path, split: str) -> Path:
    check_name(path, split)
    if path.is_file():
        return path
    for suffix in _SUFFIXES:
        if (path / f"{split}{suffix}").is_file():
            return path / f"{split}{suffix}"
    there = sorted(one.name for one in path.glob("*.[ct]sv"))
    raise DataError(
        f"there are no texts of {split!r}",
        path=path,
        found=", ".join(there) or ("no .csv or .tsv" if path.is_dir() else "no such place"),
        expected=" or ".join(f"{split}{suffix}" for suffix in _SUFFIXES),
        fix="name the file itself as the path",
    )


def _class_names(folder: Path) -> tuple[str, ...]:
    file = folder / "classes.txt"
    named = file.read_text(encoding="utf-8").split("\n") if file.is_file() else _CLASSES
    return tuple(name.strip() for name in named if name.strip())


def _read(path: Path, classes: Sequence[str]) -> tuple[list[str], list[int]]:
    """Texts, cleaned, and the places of their classes."""
    texts, labels = [], []
    try:
        content = path.read_text(encoding="utf-8")
        rows = _tabbed(content) if path.suffix == ".tsv" else _quoted(content)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError("the texts cannot be read", path=path, found=error) from error
    for number, (label, text) in enumerate(rows, 1):
        place = _place(label, classes)
        if place is None or not text.strip():
            raise DataError(
                f"row {number} is no text with its class: class {label!r}, text {text[:40]!r}",
                path=path,
                expected=f"class 1 to {len(classes)} or one of {', '.join(classes)}",
            )
        texts.append(_clean(text))
        labels.append(place)
    if not texts:
        raise DataError("the file holds no texts", path=path, found="no rows")
    return texts, labels


def _tabbed(content: str) -> list[tuple[str, str]]:
    # Not splitlines(), which also cuts at rare signs inside a text.
    lines = [line.rpartition("\t") for line in content.split("\n") if line.strip()]
    return [(label, text) for text, _, label in lines]


def _quoted(content: str) -> list[tuple[str, str]]:
    rows = csv.reader(io.StringIO(content), strict=True)
    return [(row[0], " ".join(row[1:])) for row in rows if row]


def _place(label: str, classes: Sequence[str]) -> int | None:
    label = label.strip()
    if label in classes:
        return classes.index(label)
    return int(label) - 1 if label.isdecimal() and 1 <= int(label) <= len(classes) else None


def _clean(text: str) -> str:
    """Entities as the signs they mean, and backslashes, which stand for ends of lines, as spaces.

    >>> _clean("It #39;s over")
    "It's over"
    """
    text = text.replace(" #39;", "'").replace("\\", " ")
    return html.unescape(_ENTITY.sub(r"&\1;", text))


@checked(DataError)
def load_characters(
    path: str | os.PathLike[str],
    *,
    split: str = "train",
    length: int = 64,
    stride: int | None = None,
    held_out: float = 0.1,
) -> Examples:
    """Windows `[length]` of a UTF-8 text; the labels `[length]` are the same, one character on.

    The last `held_out` of the text is the split "test". `classes` are the characters of the whole
    text in order, so that both splits number them alike. Windows begin every `stride` characters,
    by default side by side; what is left at the end is shorter than a window and not used.
    """
    import torch

    known_name(split, ("train", "test"), what="split", path=path)
    stride = length if stride is None else stride
    if length < 1 or stride < 1 or not 0 <= held_out < 1:
        raise DataError(
            "windows cannot be cut like this",
            found=f"length={length}, stride={stride}, held_out={held_out}",
            expected="length and stride at least 1, held_out from 0 up to 1",
        )
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError("the text cannot be read", path=path, found=error) from error
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    alphabet, numbers = np.unique(points, return_inverse=True)
    end = len(text) - round(len(text) * held_out)
    tokens = torch.from_numpy(numbers.astype(np.int64))
    tokens = tokens[:end] if split == "train" else tokens[end:]
    if len(tokens) <= length:
        raise DataError(
            f"the text of {split!r} is shorter than one window: {len(tokens)} characters",
            path=path,
            expected=f"more than length={length}",
        )
    # Views of one tensor: windows that overlap cost nothing.
    x, y = tokens[:-1].unfold(0, length, stride), tokens[1:].unfold(0, length, stride)
    return Examples(x, y, tuple(map(chr, alphabet.tolist())))
