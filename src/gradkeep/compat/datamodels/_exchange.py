"""Models from and to layouts of the datamodels library: directories of .npy arrays, and the published data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gradkeep.compat.datamodels._npy_folder import NpyFolder, mapped, spec_of
from gradkeep.datamodels.fitting._result import open_store
from gradkeep.datamodels.study._contract import MODELS, initialize, models_of
from gradkeep.datamodels.study._spec import Spec
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from gradkeep.compat.datamodels._npy_folder import AnyArray
    from gradkeep.store import Store

_PART = 1024
_SHARES = re.compile(r"(train_masks|(?:train|test)_(?:margins|logits))_(\d+)pct\.npy")


def import_folder(
    store: Store | str | os.PathLike[str], path: str | os.PathLike[str], *, name: str = MODELS
) -> int:
    """Bring the completed rows of a directory of .npy arrays into a store; returns how many.

    The rest stays to be trained. Interrupted, it may be called again.
    """
    folder = NpyFolder.open(path)
    arrays = {field.name: folder.array(field.name) for field in folder.spec.fields}
    return _import(store, name, folder.spec, arrays, np.flatnonzero(folder.completed()))


def export_folder(
    store: Store | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
) -> int:
    """Write the models that are done as a directory of .npy arrays; returns how many."""
    rows = models_of(store, name)
    spec = Spec.of_schema(rows.schema, rows.num_rows)
    Path(path).mkdir(parents=True, exist_ok=True)
    NpyFolder.create(path, spec)
    done = rows.done()
    files = {
        field.name: np.load(Path(path) / f"{field.name}.npy", mmap_mode="r+")
        for field in spec.fields
    }
    for start in range(0, len(done), _PART):
        numbers = done[start : start + _PART]
        found = rows.read(numbers)
        for field, values in files.items():
            values[numbers] = found[field]
    for values in files.values():
        values.flush()
    flags = np.load(Path(path) / "_completed.npy", mmap_mode="r+")
    flags[done] = True
    flags.flush()
    return len(done)


@dataclass(frozen=True, slots=True, eq=False)
class PublishedArrays:
    """The published arrays of one share of the training set, mapped: nothing is read yet."""

    alpha: float
    arrays: Mapping[str, AnyArray]
    """`masks [M, n]` bool and what there is of `test_margins`, `train_margins`, logits, float16"""

    @property
    def num_models(self) -> int:
        """How many models there are, those for evaluation included."""
        return len(self.arrays["masks"])


def open_published(path: str | os.PathLike[str], *, alpha: float | None = None) -> PublishedArrays:
    """The arrays `data/{train_masks,test_margins,...}_<share>pct.npy` of the published layout."""
    base = Path(path)
    place = base / "data" if (base / "data").is_dir() else base
    found: dict[int, dict[str, Path]] = {}
    for file in sorted(place.glob("*pct.npy")):
        match = _SHARES.fullmatch(file.name)
        if match is not None:
            key = "masks" if match[1] == "train_masks" else match[1]
            found.setdefault(int(match[2]), {})[key] = file
    shares = sorted(share for share, files in found.items() if "masks" in files)
    wanted = shares if alpha is None else [share for share in shares if share == round(100 * alpha)]
    if len(wanted) != 1:
        raise DatamodelsError(
            "which share of the training set?" if wanted else "the published arrays are not here",
            path=place,
            found=", ".join(f"train_masks_{share}pct.npy" for share in shares) or "no masks",
            expected="one of them" if wanted else "train_masks_<share>pct.npy and its margins",
            fix="say alpha, such as 0.5",
        )
    return PublishedArrays(wanted[0] / 100, mapped(found[wanted[0]], "masks"))


def import_published(
    store: Store | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    alpha: float | None = None,
    name: str = MODELS,
    num_models: int | None = None,
) -> int:
    """Bring the published masks and outputs (or the first `num_models`) into a store."""
    published = open_published(path, alpha=alpha)
    count = published.num_models if num_models is None else min(num_models, published.num_models)
    spec = spec_of(published.arrays, count)
    return _import(store, name, spec, published.arrays, np.arange(count))


def _import(
    store: Store | str | os.PathLike[str],
    name: str,
    spec: Spec,
    arrays: Mapping[str, AnyArray],
    numbers: AnyArray,
) -> int:
    store = open_store(store)
    if name in store.row_sets():
        rows = store.rows(name, spec.to_schema(), num_rows=spec.num_models)  # refuses another spec
    else:
        initialize(store, spec, name=name)
        rows = store.rows(name)
    there = set(rows.done().tolist())
    missing = [number for number in numbers.tolist() if number not in there]
    for done, number in enumerate(missing):
        rows.put(number, {key: np.array(array[number]) for key, array in arrays.items()})
        if done % _PART == _PART - 1:
            rows.compact()
    rows.compact(partial=True)
    return len(missing)
