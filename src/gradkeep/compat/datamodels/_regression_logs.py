"""Logs of a regression in the layout that the datamodels library's solver leaves behind.

`regularization_path` has one row per penalty, `final_lambda` one for the last fit: of each field
an array `FIELD_0.npy` `[10000, t]`, of which the first rows are used, as `metadata.csv` counts.
"""

from __future__ import annotations

import csv
import os
import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.format import open_memmap

from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from gradkeep.datamodels.fitting._path import PenaltyStep

AnyArray = np.ndarray[Any, np.dtype[Any]]
ROWS = 10_000
"""Of an array; its readers expect some that are not used."""
FOLDERS = ("regularization_path", "final_lambda")
MAPPING = "index_mapping"
_BEST = ("best_lambda", "best_mse")
_NUMBERS = ("train_mse", "val_mse", "deltas", "lambda", *_BEST, "weight_norm", "weight_nz")
_FLAGS = ("done_optimizing_inner", "still_optimizing_outer")


@dataclass(frozen=True, slots=True, eq=False)
class _Log:
    """The arrays of one folder; rows are written at their place, targets some at a time."""

    folder: Path
    arrays: dict[str, AnyArray]
    used: set[int] = field(default_factory=set)

    @classmethod
    def create(cls, folder: Path, targets: int) -> _Log:
        folder.mkdir()
        kinds: dict[str, Any] = dict.fromkeys(_NUMBERS, np.float32)
        kinds |= {**dict.fromkeys(_FLAGS, np.bool_), MAPPING: np.int64}
        arrays: dict[str, AnyArray] = {
            name: open_memmap(folder / f"{name}_0.npy", "w+", kind, (ROWS, targets))
            for name, kind in kinds.items()
        }
        made = cls(folder, arrays)
        made.count()
        return made

    def write(self, row: int, targets: AnyArray, values: dict[str, Any]) -> None:
        """Values of some targets; others are as in the row before, and no longer on the path."""
        if row not in self.used:
            for name, array in self.arrays.items():
                array[row] = array[row - 1] if row else np.nan if name in _NUMBERS else False
            self.arrays["still_optimizing_outer"][row] = False
            self.arrays[MAPPING][row] = np.arange(self.arrays[MAPPING].shape[1])
            self.used.add(row)
        for name, value in values.items():
            self.arrays[name][row, targets] = value
        self.count()

    def count(self) -> None:
        """Say how many rows are used; the file is replaced as a whole."""
        temp = self.folder / f".metadata.{secrets.token_hex(4)}"
        with temp.open("w", newline="") as file:
            lines = csv.writer(file, lineterminator="\n")
            lines.writerow(["field", "max_chunk", "counter"])
            lines.writerows([name, 0, len(self.used)] for name in self.arrays)
        os.replace(temp, self.folder / "metadata.csv")


@dataclass(frozen=True, slots=True, eq=False)
class RegressionLogs:
    """What is told of each penalty goes to `regularization_path`, the last fit to `final_lambda`."""

    path: _Log
    final: _Log

    @classmethod
    def create(cls, out: Path, targets: int) -> RegressionLogs:
        """Begin both folders in a folder that is there; those of a fit that was cut off go."""
        for name in FOLDERS:
            shutil.rmtree(out / name, ignore_errors=True)
        path, final = (_Log.create(out / name, targets) for name in FOLDERS)
        return cls(path, final)

    def __call__(self, step: PenaltyStep) -> None:
        """Log one step."""
        log, row = (self.final, 0) if step.index < 0 else (self.path, step.index)
        best, least = step.lam, step.held_out_error
        if row:
            told = {name: log.arrays[name][row - 1, step.targets] for name in _BEST}
            better = step.held_out_error < told["best_mse"]
            best = np.where(better, best, told["best_lambda"])
            least = np.where(better, least, told["best_mse"])
        values = {
            "train_mse": step.train_error,
            "val_mse": step.held_out_error,
            "deltas": step.gap,
            "lambda": step.lam,
            "best_lambda": best,
            "best_mse": least,
            "weight_norm": step.norm,
            "weight_nz": step.nonzero,
            "done_optimizing_inner": True,
            "still_optimizing_outer": step.index >= 0,
        }
        log.write(row, step.targets, values)


def read_log(folder: str | os.PathLike[str]) -> dict[str, AnyArray]:
    """The fields `[rows, t]` of a log folder, ours or of the other solver, targets in order.

    >>> import tempfile
    >>> logs = RegressionLogs.create(Path(tempfile.mkdtemp()), 3)
    >>> read_log(logs.path.folder)["lambda"].shape
    (0, 3)
    """
    place = Path(folder)
    try:
        with (place / "metadata.csv").open(newline="") as file:
            rows = {line["field"]: line for line in csv.DictReader(file)}
        found = {}
        for name, line in rows.items():
            last, used = int(line["max_chunk"]), int(line["counter"])
            parts = [
                np.load(place / f"{name}_{chunk}.npy", mmap_mode="r") for chunk in range(last + 1)
            ]
            found[name] = np.concatenate([*parts[:-1], parts[-1][:used]])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatamodelsError(
            "this is no folder of regression logs",
            path=place,
            found=f"{type(error).__name__}: {error}",
            expected="metadata.csv and FIELD_0.npy, as compute_datamodels writes them",
        ) from error
    order = found.pop(MAPPING, None)
    if order is None:
        return found
    # The other solver moves targets that are done to the end of its arrays.
    back = np.argsort(order, axis=1)
    return {
        name: np.take_along_axis(values, back[: len(values)], 1) for name, values in found.items()
    }
