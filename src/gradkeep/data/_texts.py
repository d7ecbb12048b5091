"""Texts as numbers: AG News by words, any text by characters."""

from __future__ import annotations

import csv
import html
import io
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import Limits, PositiveInt, checked
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
    """Words and their ids; the first four are `[PAD]`, `[UNK]`, `[CLS]` and `[SEP]`.

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
                "a vocabulary must hold every word once",
                code="data.vocabulary",
                found=self.words[:6],
                expected=f"first {' '.join(_SPECIAL)}",
            )
        object.__setattr__(self, "_numbers", numbers)

    @classmethod
    def build(cls, texts: Iterable[str], *, size: int = 10_000, least: int = 1) -> Self:
        """Build from the most frequent words, at most `size` with the special ones, each seen `least` times."""
        _arguments.count("size", size, error=DataError)
        _arguments.count("least", least, error=DataError)
        listed = texts if isinstance(texts, list | tuple) else _listed(texts)
        for text in listed:
            _arguments.instance("texts", text, str, error=DataError)
        counts = Counter(word for text in listed for word in split_words(text))
        # Ties in alphabetical order, so that the order of the texts does not matter.
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        frequent = [word for word, count in ranked if count >= least]
        return cls((*_SPECIAL, *frequent[: max(0, size - len(_SPECIAL))]))

    def __len__(self) -> int:
        return len(self.words)

    def encode(
        self, texts: Sequence[str], *, length: int
    ) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int64]]]:
        """Return ids and attention mask, both `[N, length]`; long texts are cut, short ones padded."""
        if length < 2:
            raise DataError(
                "length is too small for [CLS] and [SEP]",
                code="data.text_length",
                found=length,
                expected="at least 2",
            )
        ids = np.full((len(texts), length), PAD, np.int64)
        mask = np.zeros((len(texts), length), np.int64)
        for row, text in enumerate(texts):
            words = split_words(text)[: length - 2]
            tokens = [CLS, *(self._numbers.get(word, UNK) for word in words), SEP]
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
        return ids, mask

    def decode(self, ids: Iterable[int]) -> str:
        """Return the words of one row, without padding."""
        most = len(self.words) - 1
        numbers = _arguments.whole_numbers("ids", _listed(ids), error=DataError, most=most)
        return " ".join(self.words[number] for number in numbers if number != PAD)


def _listed(values: Iterable[Any]) -> Any:
    """Return the values in memory; arrays and tensors unchanged."""
    if getattr(values, "shape", None) == ():
        raise _arguments.argument_error(
            "values", values, error=DataError, expected="several, not one"
        )
    return values if hasattr(values, "shape") else list(values)


def split_words(text: str) -> list[str]:
    """Split into words in lower case, and single other characters.

    >>> split_words("It's 5 o'clock!")
    ["it's", '5', "o'clock", '!']
    """
    return _WORD.findall(text.lower())


_CLASSES = ("World", "Sports", "Business", "Sci/Tech")
_SUFFIXES = (".csv", ".tsv")
# The data set lost the ampersands of its HTML entities.
_ENTITY = re.compile(r"&?(#\d+|quot|amp|lt|gt|nbsp);")


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """Texts as word ids, in a fixed order: `texts[i]` is a dictionary of tensors."""

    input_ids: torch.Tensor
    """`[N, T]`, int64"""
    attention_mask: torch.Tensor
    """`[N, T]`, int64: 1 for words, 0 for padding"""
    labels: torch.Tensor
    """`[N]`, int64"""
    classes: tuple[str, ...]
    vocabulary: Any
    """The `Vocabulary`, or another tokenizer with `encode`."""

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
    """Load news and their categories, each text cut or padded to `length` words with [CLS] and [SEP].

    `path` is a file, or a folder with `train.csv`, `test.csv` or the same as .tsv. The vocabulary holds at most `words`
    words of the training texts that occur `least` times; for splits other than "train" pass it, or the training
    file, unless that is in the folder.
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
                f"the vocabulary comes from the training texts, but this file is {split!r}",
                code="data.no_vocabulary",
                path=path,
                fix="Pass vocabulary=train.vocabulary, or the path of the training file.",
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
    names = sorted(one.name for one in path.glob("*.[ct]sv"))
    raise DataError(
        f"there are no texts of {split!r}",
        code="data.no_texts",
        path=path,
        found=", ".join(names) or ("no .csv or .tsv" if path.is_dir() else "no such path"),
        expected=" or ".join(f"{split}{suffix}" for suffix in _SUFFIXES),
        fix="Pass the path of the file itself.",
    )


def _class_names(folder: Path) -> tuple[str, ...]:
    file = folder / "classes.txt"
    named = file.read_text(encoding="utf-8").split("\n") if file.is_file() else _CLASSES
    return tuple(name.strip() for name in named if name.strip())


def _read(path: Path, classes: Sequence[str]) -> tuple[list[str], list[int]]:
    """Read cleaned texts, and the indices of their classes."""
    texts, labels = [], []
    try:
        content = path.read_text(encoding="utf-8")
        rows = _tabbed(content) if path.suffix == ".tsv" else _quoted(content)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            "the texts cannot be read", code="data.unreadable", path=path, found=error
        ) from error
    for number, (label, text) in enumerate(rows, 1):
        place = _place(label, classes)
        if place is None or not text.strip():
            raise DataError(
                f"row {number} is not a text with its class",
                code="data.text_row",
                path=path,
                found=f"class {label!r}, text {text[:40]!r}",
                expected=f"class 1 to {len(classes)} or one of {', '.join(classes)}",
            )
        texts.append(_clean(text))
        labels.append(place)
    if not texts:
        raise DataError(
            "the file holds no texts", code="data.empty_texts", path=path, found="no rows"
        )
    return texts, labels


def _tabbed(content: str) -> list[tuple[str, str]]:
    # Not splitlines(), which also splits at rare characters inside a text.
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
    """Replace entities by their characters, and backslashes, which mark line ends, by spaces.

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
    length: PositiveInt = 64,
    stride: PositiveInt | None = None,
    held_out: Annotated[float, Limits(0, below=1)] = 0.1,
) -> Examples:
    """Load windows `[length]` of a UTF-8 text; the labels `[length]` are shifted by one character.

    The last `held_out` share of the text is the split "test". `classes` are the characters of the whole text in order,
    so that both splits use the same ids. Windows begin every `stride` characters, by default side by side; the
    remainder at the end is not used.
    """
    import torch

    known_name(split, ("train", "test"), noun="split", path=path)
    stride = length if stride is None else stride
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            "the text cannot be read", code="data.unreadable", path=path, found=error
        ) from error
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    alphabet, numbers = np.unique(points, return_inverse=True)
    end = len(text) - round(len(text) * held_out)
    tokens = torch.from_numpy(numbers.astype(np.int64))
    tokens = tokens[:end] if split == "train" else tokens[end:]
    if len(tokens) <= length:
        raise DataError(
            f"the text of {split!r} is shorter than one window",
            code="data.text_too_short",
            path=path,
            found=f"{len(tokens)} characters",
            expected=f"more than length={length}",
        )
    # Views of one tensor, so that overlapping windows take no memory.
    x, y = tokens[:-1].unfold(0, length, stride), tokens[1:].unfold(0, length, stride)
    return Examples(x, y, tuple(map(chr, alphabet.tolist())))
