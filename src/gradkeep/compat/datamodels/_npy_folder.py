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

from gradkeep.datamodels._contract import MODELS, initialize, logdir_of, models_of
from gradkeep.datamodels._result import open_store
from gradkeep.datamodels._spec import COMPLETED, Field, Spec, check_returned
from gradkeep.errors import DatamodelsError, WriteFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from gradkeep.store import Store


AnyArray = np.ndarray[Any, np.dtype[Any]]
_FLAGS = Field(COMPLETED, (), np.dtype("bool"))
_MAX_TIMEOUT = 365 * 86400.0


@dataclass(frozen=True, slots=True)
class NpyFolder:
    """A directory of .npy arrays with one row per model.

    Attributes:
        path: The directory.
        spec: Names, shapes and types of its arrays.
    """

    path: Path
    spec: Spec

    @classmethod
    def create(cls, path: str | os.PathLike[str], spec: Spec) -> NpyFolder:
        """Create empty arrays for every field of a spec.

        Args:
            path: Existing folder without arrays.
            spec: Fields and number of models.

        Returns:
            The opened folder.

        Raises:
            DatamodelsError: If the folder does not exist or already has arrays.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise DatamodelsError(
                "the folder does not exist",
                code="compat.no_folder",
                path=path,
                fix="Create it, or check the name.",
            )
        present = sorted(file.name for file in folder.glob("*.npy"))
        if present:
            done = (
                int(cls.open(folder).completed().sum())
                if (folder / _file(COMPLETED)).exists()
                else 0
            )
            raise DatamodelsError(
                "the folder already has arrays, which would be overwritten",
                code="compat.folder_not_empty",
                path=path,
                found=f"{', '.join(present[:4])}, {done} models done",
                expected="an empty folder",
                fix="Use another folder, or delete the arrays.",
            )
        for field in (*spec.fields, _FLAGS):  # the flags last: they mark a complete directory
            file = folder / _file(field.name)
            shape = (spec.num_models, *field.shape)
            np.lib.format.open_memmap(file, mode="w+", dtype=field.dtype, shape=shape)
        return cls(folder, spec)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> NpyFolder:
        """Open a directory and read its spec from the arrays' headers.

        Args:
            path: The directory.

        Returns:
            The opened folder.

        Raises:
            DatamodelsError: If it is not a store directory, or its arrays differ in length.
        """
        folder = Path(path)
        if not (folder / _file(COMPLETED)).exists():
            raise DatamodelsError(
                "the folder is not a store directory",
                code="compat.not_a_store_directory",
                path=path,
                found="no such folder" if not folder.is_dir() else f"no {_file(COMPLETED)}",
                fix="Create one with initialize_store.",
            )
        arrays = open_arrays({file.stem: file for file in sorted(folder.glob("*.npy"))}, COMPLETED)
        flags = arrays.pop(COMPLETED)
        return cls(folder, spec_of(arrays, len(flags)))

    def array(self, name: str) -> AnyArray:
        """Map an array for reading.

        Args:
            name: Name of the field.

        Returns:
            The array `[num_models, *shape]`.
        """
        array: AnyArray = np.load(self.path / _file(name), mmap_mode="r")
        return array

    def completed(self) -> AnyArray:
        """Read which models are completed.

        Returns:
            Flags `[num_models]`, bool.
        """
        return np.array(self.array(COMPLETED))

    def check_index(self, index: int) -> None:
        """Raise if an index is not a row, before anything is trained.

        Args:
            index: Number of a model.

        Raises:
            DatamodelsError: If it is out of range.
        """
        if not 0 <= index < self.spec.num_models:
            raise DatamodelsError(
                "the model does not exist",
                code="compat.no_such_model",
                path=self.path,
                found=f"index {index}",
                expected=f"0 to {self.spec.num_models - 1}",
            )

    def write(self, index: int, returned: Mapping[str, Any]) -> None:
        """Validate and write one model's row, then set its flag; after a kill the flag is not set.

        Args:
            index: Number of the model.
            returned: Values by field.

        Raises:
            DatamodelsError: If the index or a value does not match the spec.
            WriteFailedError: If the disk refuses the write; the row is then not completed.
        """
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
                f"model {index} could not be written and is not marked as completed",
                code="compat.model_not_written",
                path=self.path,
                found=error.strerror,
                fix="Free disk space and run this index again.",
            ) from error

    def _write(self, field: Field, index: int, value: AnyArray) -> None:
        # A memory map would kill the process on a full disk instead of raising.
        with open(self.path / _file(field.name), "r+b") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0
            shape, by_column, dtype = (
                read(file) if version == (1, 0) else np.lib.format.read_array_header_2_0(file)
            )
            if by_column and len(shape) > 1:
                raise DatamodelsError(
                    "the array is in Fortran order, so rows cannot be written",
                    code="compat.fortran_order",
                    path=file.name,
                )
            data = np.ascontiguousarray(value.astype(dtype)).tobytes()
            file.seek(index * len(data), os.SEEK_CUR)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def note(self, index: int, fields: Mapping[str, Any]) -> Path:
        """Write a record of an attempt to the model's own folder.

        Args:
            index: Number of the model.
            fields: Contents of the record, in JSON types.

        Returns:
            Path of the record.
        """
        folder = self.path / "workers" / str(index)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"attempt-{time.time_ns()}.json"
        file.write_text(json.dumps(dict(fields), indent=2) + "\n")
        return file


def load_memmap(logdir: str | os.PathLike[str], key: str, mode: Any) -> AnyArray:
    """Map the array of a key in a store directory.

    Args:
        logdir: The store directory.
        key: Name of the array.
        mode: Mode of numpy's memory map.

    Returns:
        The array `[num_models, *shape]`.
    """
    array: AnyArray = np.load(Path(logdir) / _file(key), mmap_mode=mode)
    return array


def open_arrays(files: Mapping[str, Path], first: str) -> dict[str, AnyArray]:
    """Map arrays for reading; raise if their lengths differ from the first one's."""
    arrays = {name: np.load(file, mmap_mode="r") for name, file in files.items()}
    for name, array in arrays.items():
        if len(array) != len(arrays[first]):
            raise DatamodelsError(
                "the arrays do not have the same number of models",
                code="compat.array_lengths",
                path=files[name],
                found=len(array),
                expected=len(arrays[first]),
            )
    return arrays


def spec_of(arrays: Mapping[str, AnyArray], num_models: int) -> Spec:
    """Build the spec of arrays `[num_models, ...]`."""
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
    """Call `main(index=, logdir=)` and write its result.

    Failures are recorded in the model's own folder and raised; the row is then not completed.

    Args:
        folder: The store directory.
        main: Training function.
        index: Number of the model.
        redo: Train again if the row is completed.
        timeout: Seconds; unlimited by default.
        command: Command line to record.

    Returns:
        False if the row was already completed.

    Raises:
        DatamodelsError: If the result does not match the spec.
        TimeoutError: If the training takes longer than `timeout`.
    """
    folder.check_index(index)
    logdir = logdir_of(str(folder.path), index)
    if folder.completed()[index] and not redo:
        return False
    began = time.time()
    about = {"index": index, "command": list(command), "began": began}
    try:
        with _limit_time(timeout, index):
            returned = _call_main(main, index, logdir)
        # Outside the time limit, which must not interrupt the write.
        arrays = check_returned(folder.spec, returned, index=index)
        folder.write(index, arrays)
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        # A full disk must not hide the error.
        with contextlib.suppress(OSError):
            folder.note(index, {**about, "seconds": time.time() - began, "error": trace})
        raise
    digest = xxhash.xxh3_128()
    for name in sorted(arrays):
        digest.update(arrays[name].tobytes())
    done = {"seconds": time.time() - began, "checksum": digest.hexdigest()}
    folder.note(index, {**about, **done})
    with open(folder.path / "cmds.txt", "a") as file:
        file.write(f"{' '.join(command)}\n")
    return True


def _call_main(main: Callable[..., Any], index: int, logdir: str) -> Any:
    try:
        return main(index=index, logdir=logdir)
    except SystemExit as error:
        # Scripts often exit on wrong flags, some with exit code 0.
        raise DatamodelsError(
            f"model {index}: main exited instead of returning",
            code="compat.main_exited",
            found=f"exit code {error.code}",
            expected="a dictionary",
            fix="Check its output: often a flag of the script is missing.",
        ) from error


@contextlib.contextmanager
def _limit_time(timeout: float, index: int) -> Iterator[None]:
    """Raise TimeoutError after `timeout` seconds; end the process if native code does not return."""
    if not 0 < timeout < _MAX_TIMEOUT or threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_timeout(*_: object) -> None:
        raise TimeoutError(f"model {index} took longer than {timeout:g} s")

    before = signal.signal(signal.SIGALRM, raise_timeout)
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
    """Import the completed rows of a directory of .npy arrays into a store.

    The other rows remain to be trained. It may be called again after an interruption.

    Args:
        store: Store to write to, or its path.
        path: Directory of .npy arrays.
        name: Name of the row set in the store.

    Returns:
        Number of imported rows.

    Raises:
        DatamodelsError: If the directory cannot be read.
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
    """Write the completed models of a store as a directory of .npy arrays.

    Args:
        store: Store to read, or its path.
        path: Directory to create.
        name: Name of the row set; the only one by default.

    Returns:
        Number of exported models.

    Raises:
        DatamodelsError: If the directory already has arrays.
    """
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
        columns = rows.read(numbers)
        for field, values in files.items():
            values[numbers] = columns[field]
    for values in files.values():
        values.flush()
    flags = np.load(Path(path) / "_completed.npy", mmap_mode="r+")
    flags[done] = True
    flags.flush()
    return len(done)


@dataclass(frozen=True, slots=True, eq=False)
class PublishedArrays:
    """Published arrays of one fraction of the training set, memory-mapped.

    Attributes:
        alpha: Fraction of the training set.
        arrays: `masks [M, n]` bool, and the available ones of `test_margins`, `train_margins` and
            logits, float16.
    """

    alpha: float
    arrays: Mapping[str, AnyArray]

    @property
    def num_models(self) -> int:
        """Number of models, including those for evaluation."""
        return len(self.arrays["masks"])


def open_published(path: str | os.PathLike[str], *, alpha: float | None = None) -> PublishedArrays:
    """Open the arrays `data/{train_masks,test_margins,...}_<share>pct.npy` of the published layout.

    Args:
        path: Folder with the arrays, or its parent.
        alpha: Fraction of the training set; needed if there are several.

    Returns:
        The arrays, memory-mapped.

    Raises:
        DatamodelsError: If there are no arrays, or `alpha` does not select one fraction.
    """
    base = Path(path)
    place = base / "data" if (base / "data").is_dir() else base
    files_by_share: dict[int, dict[str, Path]] = {}
    for file in sorted(place.glob("*pct.npy")):
        match = _SHARES.fullmatch(file.name)
        if match is not None:
            key = "masks" if match[1] == "train_masks" else match[1]
            files_by_share.setdefault(int(match[2]), {})[key] = file
    shares = sorted(share for share, files in files_by_share.items() if "masks" in files)
    chosen = shares if alpha is None else [share for share in shares if share == round(100 * alpha)]
    if len(chosen) != 1:
        raise DatamodelsError(
            "there are several fractions of the training set"
            if chosen
            else "there are no published arrays",
            code="compat.several_fractions" if chosen else "compat.no_published_arrays",
            path=place,
            found=", ".join(f"train_masks_{share}pct.npy" for share in shares) or "no masks",
            expected="one of them" if chosen else "train_masks_<share>pct.npy and its margins",
            fix="Pass alpha, such as alpha=0.5.",
        )
    return PublishedArrays(chosen[0] / 100, open_arrays(files_by_share[chosen[0]], "masks"))


def import_published(
    store: Store | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    alpha: float | None = None,
    name: str = MODELS,
    num_models: int | None = None,
) -> int:
    """Import the published masks and outputs into a store.

    Args:
        store: Store to write to, or its path.
        path: Folder with the arrays, or its parent.
        alpha: Fraction of the training set; needed if there are several.
        name: Name of the row set in the store.
        num_models: Import only the first models.

    Returns:
        Number of imported models.

    Raises:
        DatamodelsError: If the arrays cannot be opened.
    """
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
