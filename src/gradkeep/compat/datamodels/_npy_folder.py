"""Folders of .npy arrays as the datamodels repository writes them, and exchange with a store."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import re
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from gradkeep.datamodels.fitting._result import open_store
from gradkeep.datamodels.study._contract import MODELS, initialize, logdir_of, models_of
from gradkeep.datamodels.study._spec import COMPLETED, Field, Spec, check_returned
from gradkeep.errors import DatamodelsError, WriteFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from gradkeep.store import Store


AnyArray = np.ndarray[Any, np.dtype[Any]]
_FLAGS = Field(COMPLETED, (), np.dtype("bool"))
_LONGEST = 365 * 86400.0


@dataclass(frozen=True, slots=True)
class NpyFolder:
    """An opened directory; `spec` is what the headers of its arrays say."""

    path: Path
    spec: Spec

    @classmethod
    def create(cls, path: str | os.PathLike[str], spec: Spec) -> NpyFolder:
        """Empty arrays for every field; a folder that already has any is refused."""
        folder = Path(path)
        if not folder.is_dir():
            raise DatamodelsError(
                "there is no such folder", path=path, fix="mkdir it, or check the name"
            )
        present = sorted(file.name for file in folder.glob("*.npy"))
        if present:
            done = (
                int(cls.open(folder).completed().sum())
                if (folder / _file(COMPLETED)).exists()
                else 0
            )
            raise DatamodelsError(
                "this folder already has arrays; making them anew would wipe them out",
                path=path,
                found=f"{', '.join(present[:4])}, {done} models done",
                expected="an empty folder",
                fix="use another folder, or delete the arrays yourself",
            )
        for field in (*spec.fields, _FLAGS):  # the flags last: without them it is no store
            file = folder / _file(field.name)
            shape = (spec.num_models, *field.shape)
            np.lib.format.open_memmap(file, mode="w+", dtype=field.dtype, shape=shape)
        return cls(folder, spec)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> NpyFolder:
        """The directory, with its spec read from the arrays' headers."""
        folder = Path(path)
        if not (folder / _file(COMPLETED)).exists():
            raise DatamodelsError(
                "this is no store directory",
                path=path,
                found="no such folder" if not folder.is_dir() else f"no {_file(COMPLETED)}",
                fix="make one with initialize_store",
            )
        arrays = mapped({file.stem: file for file in sorted(folder.glob("*.npy"))}, COMPLETED)
        flags = arrays.pop(COMPLETED)
        return cls(folder, spec_of(arrays, len(flags)))

    def array(self, name: str) -> AnyArray:
        """One array `[num_models, *shape]`, mapped for reading."""
        found: AnyArray = np.load(self.path / _file(name), mmap_mode="r")
        return found

    def completed(self) -> AnyArray:
        """Which models are done, `[num_models]` bool."""
        return np.array(self.array(COMPLETED))

    def check_index(self, index: int) -> None:
        """Refuse an index that is no row: before anything is trained."""
        if not 0 <= index < self.spec.num_models:
            raise DatamodelsError(
                f"there is no such model: index {index}; expected 0 to {self.spec.num_models - 1}",
                path=self.path,
            )

    def write(self, index: int, returned: Mapping[str, Any]) -> None:
        """Check and write one model's row, then set its flag; killed anywhere, the flag is down."""
        self.check_index(index)
        arrays = check_returned(self.spec, returned, index=index)
        try:
            if self.completed()[index]:
                self._write(_FLAGS, index, np.array(False))
            for field in self.spec.fields:
                self._write(field, index, arrays[field.name])
            self._write(_FLAGS, index, np.array(True))
        except OSError as error:
            raise WriteFailedError(
                f"model {index} could not be written; it is not marked as done: {error.strerror}",
                path=self.path,
                fix="make room and run this index again",
            ) from error

    def _write(self, field: Field, index: int, value: AnyArray) -> None:
        # Not through a memory map: on a full disk that kills the process instead of raising.
        with open(self.path / _file(field.name), "r+b") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0
            shape, by_column, dtype = (
                read(file) if version == (1, 0) else np.lib.format.read_array_header_2_0(file)
            )
            if by_column and len(shape) > 1:
                raise DatamodelsError(
                    "this array is stored column by column; a row cannot be written into it",
                    path=file.name,
                )
            data = np.ascontiguousarray(value.astype(dtype)).tobytes()
            file.seek(index * len(data), os.SEEK_CUR)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def note(self, index: int, fields: Mapping[str, Any]) -> Path:
        """Leave a record in the model's own folder: how it was made, or why it failed."""
        folder = self.path / "workers" / str(index)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"attempt-{time.time_ns()}.json"
        file.write_text(json.dumps(dict(fields), indent=2) + "\n")
        return file


def load_memmap(logdir: str | os.PathLike[str], key: str, mode: Any) -> AnyArray:
    """The array of a key in a store directory, mapped with numpy's `mode`."""
    found: AnyArray = np.load(Path(logdir) / _file(key), mmap_mode=mode)
    return found


def mapped(files: Mapping[str, Path], first: str) -> dict[str, AnyArray]:
    """Arrays mapped for reading, which must have a row for each of the first one's."""
    arrays = {name: np.load(file, mmap_mode="r") for name, file in files.items()}
    for name, array in arrays.items():
        if len(array) != len(arrays[first]):
            raise DatamodelsError(
                f"the arrays do not have the same number of models: {len(array)}",
                path=files[name],
                expected=len(arrays[first]),
            )
    return arrays


def spec_of(arrays: Mapping[str, AnyArray], num_models: int) -> Spec:
    """The spec of arrays `[num_models, ...]`."""
    fields = (Field(name, array.shape[1:], array.dtype) for name, array in arrays.items())
    return Spec(num_models, tuple(fields))


def _file(name: str) -> str:
    return f"{name}.npy"


def train_row(
    folder: NpyFolder,
    main: Callable[..., Any],
    index: int,
    *,
    redo: bool = False,
    timeout: float = math.inf,
    command: Sequence[str] = (),
) -> bool:
    """Call `main(index=, logdir=)` and write what it returns; False if the row was done already.

    Whatever goes wrong is recorded in the model's own folder and raised; the row is then not done.
    """
    folder.check_index(index)
    logdir = logdir_of(str(folder.path), index)
    if folder.completed()[index] and not redo:
        return False
    began = time.time()
    about = {"index": index, "command": list(command), "began": began}
    try:
        with _limited(timeout, index):
            returned = _called(main, index, logdir)
        # The limit has ended: it must not cut a row in two.
        arrays = check_returned(folder.spec, returned, index=index)
        folder.write(index, arrays)
    except BaseException as error:
        told = "".join(traceback.format_exception(error))
        # A disk too full for the record must not hide why it failed.
        with contextlib.suppress(OSError):
            folder.note(index, {**about, "seconds": time.time() - began, "error": told})
        raise
    digest = xxhash.xxh3_128()
    for name in sorted(arrays):
        digest.update(arrays[name].tobytes())
    done = {"seconds": time.time() - began, "checksum": digest.hexdigest()}
    folder.note(index, {**about, **done})
    with open(folder.path / "cmds.txt", "a") as file:
        file.write(f"{' '.join(command)}\n")
    return True


def _called(main: Callable[..., Any], index: int, logdir: str) -> Any:
    try:
        return main(index=index, logdir=logdir)
    except SystemExit as error:
        # Scripts that refuse their flags often end Python, some with a code that means success.
        raise DatamodelsError(
            f"model {index}: main ended Python instead of returning: exit code {error.code}",
            expected="a dictionary",
            fix="look at what it printed: often a flag of the script is missing",
        ) from error


@contextlib.contextmanager
def _limited(timeout: float, index: int) -> Iterator[None]:
    """Raise TimeoutError when it takes longer, also if the code never comes back to Python."""
    if not 0 < timeout < _LONGEST or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise TimeoutError(f"model {index} took longer than {timeout:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, timeout)
    # Native code that never returns cannot be interrupted, only ended.
    faulthandler.dump_traceback_later(timeout + 30.0, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


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
