"""AG News: four kinds of news, as the official CSV or as lines of text, tab, label."""

from __future__ import annotations

import csv
import html
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gradkeep.data._examples import check_labels, whole_labels
from gradkeep.data._words import Vocabulary
from gradkeep.errors import DataError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import torch

    from gradkeep.data._examples import Positions

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
                f"row {number} is no text with its class",
                path=path,
                found=f"class {label!r}, text {text[:40]!r}",
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
