"""MetaStore's three data sets, preprocessed as its program does."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from gradkeep._arguments import one_of
from gradkeep.compat.metastore._wordpiece import WordPiece
from gradkeep.data import dataset, load_cifar10
from gradkeep.data._examples import Scaling
from gradkeep.data._texts import Texts
from gradkeep.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gradkeep.compat.metastore._config import WorkingFolder

CIFAR_SCALING = Scaling((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
"""The deviations are means over single images; over all pixels they are 0.247, 0.243, 0.262."""
NEWS = ("World", "Sports", "Business", "Sci/Tech")
_BATCHES = ("data_batch_1", "test_batch", "data_batch_1.bin", "test_batch.bin")
_INSIDE = ("", "cifar-10-batches-py", "cifar-10-batches-bin")
_SIDE = 64


@dataclass(frozen=True, slots=True)
class DataSource:
    """Name and location of a data set, from a block of the configuration or a trainer's flags."""

    name: str
    files: Mapping[str, str]
    folder: WorkingFolder
    vocabulary: Path
    origin: str
    """File or command that defines it, for messages."""

    def load(self) -> tuple[Any, Any]:
        """Load the training and the test set."""
        loaders = {
            "cifar10": self._pictures,
            "agnews": self._news,
            "imagenet": self._large_pictures,
        }
        where, name = f"data.{self.name}.data_name", self.name.lower()
        one_of(where, name, loaders, error=DataError, code="data.unknown", path=self.origin)
        return loaders[name]()

    def _pictures(self) -> tuple[Any, Any]:
        """Load CIFAR-10 from `data_dir` or, as MetaStore's program does, from `data`."""
        configured = [self.files["data_dir"]] if "data_dir" in self.files else []
        places = [place for path in (*configured, "data") for place in self.folder.candidates(path)]
        place = next((place for place in places if _has_cifar(place)), None)
        if place is None:
            raise DataError(
                "data.cifar10.data_dir: CIFAR-10 is missing",
                code="data.missing",
                path=self.origin,
                found=f"nothing in {', '.join(map(str, places))}",
                expected="cifar-10-batches-py, cifar-10-batches-bin or an .npz file",
                fix=f"Unpack cifar-10-python.tar.gz in {self.folder.current / 'data'}.",
            )
        train, test = (
            dataclasses.replace(load_cifar10(place, split=split), scaling=CIFAR_SCALING)
            for split in ("train", "test")
        )
        return train, test

    def _large_pictures(self) -> tuple[Any, Any]:
        """Load images of 64 x 64, not normalized and without augmentation."""
        place = self._find("data_dir", "./data/imagenet64")
        options = {"resize": _SIDE, "crop": _SIDE, "normalise": False}
        train, test = (
            dataset("imagefolder", place, split=split, **options) for split in ("train", "val")
        )
        return train, test

    def _news(self) -> tuple[Any, Any]:
        train = self._find("train_file", "./data/AGNews/train_data.json")
        test = self._find("test_file", "./data/AGNews/test_data.json")
        if train.suffix in (".csv", ".tsv"):
            return dataset("agnews", train), dataset("agnews", test, split="test", vocabulary=train)
        pieces = WordPiece.read(self.vocabulary)
        return _records(train, pieces), _records(test, pieces)

    def _find(self, key: str, default: str) -> Path:
        place = self.folder.find(self.files.get(key, default))
        if not place.exists():
            tried = ", ".join(map(str, self.folder.candidates(self.files.get(key, default))))
            raise DataError(
                f"data.{self.name}.{key}: the data is missing",
                code="data.missing",
                path=self.origin,
                found=f"nothing at {tried}",
                fix=f"Put the data there, or change {key}.",
            )
        return place


def _has_cifar(place: Path) -> bool:
    return place.is_file() or any(
        (place / inside / name).is_file() for inside in _INSIDE for name in _BATCHES
    )


class _Record(msgspec.Struct):
    text: str
    label: Annotated[int, msgspec.Meta(ge=0, lt=len(NEWS))]


def _records(path: Path, pieces: WordPiece) -> Texts:
    """Read a JSON list of `{"text": ..., "label": 0 to 3}`; other keys are ignored."""
    import torch

    filled = Annotated[list[_Record], msgspec.Meta(min_length=1)]
    try:
        records = msgspec.json.decode(path.read_bytes(), type=filled)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            "the texts cannot be read",
            code="data.records",
            path=path,
            found=" ".join(str(error).split())[:200],
            expected='a JSON list of {"text": ..., "label": ...}',
            fix="Write it with DataFrame.to_json(path, orient='records').",
        ) from None
    ids, mask = pieces.encode([record.text for record in records], length=32)
    labels = torch.tensor([record.label for record in records])
    return Texts(torch.from_numpy(ids), torch.from_numpy(mask), labels, NEWS, pieces)
