"""Masks and targets of completed models in one file, datamodels fitted from it, and their `.pt` file."""

from __future__ import annotations

import csv
import os
import secrets
import shutil
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.format import open_memmap

from gradkeep._arguments import file_to_write
from gradkeep.datamodels import Masks, fit
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradkeep.compat.datamodels._npy_folder import NpyFolder
    from gradkeep.datamodels import Datamodels
    from gradkeep.datamodels.fitting._path import PenaltyStep


@dataclass(frozen=True, slots=True, eq=False)
class RegressionData:
    """What a regression reads: `masks [m, n]`, `targets [m, t]` float32, and the rows `[m]`."""

    masks: Masks
    targets: AnyArray
    rows: AnyArray

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one file, masks as bits."""
        with open(file_to_write(path, error=DatamodelsError), "wb") as file:
            np.savez(
                file,
                bits=self.masks.bits,
                num_examples=np.int64(self.masks.num_examples),
                targets=self.targets,
                rows=self.rows,
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RegressionData:
        """Read what `save` wrote."""
        try:
            with np.load(path, allow_pickle=False) as found:
                masks = Masks(found["bits"], int(found["num_examples"]))
                return cls(masks, found["targets"], found["rows"])
        except OSError as error:
            raise DatamodelsError(
                "the data for the regression cannot be read", path=path, found=error.strerror
            ) from error
        except (ValueError, KeyError, zipfile.BadZipFile) as error:
            raise DatamodelsError(
                "this file was not written for the regression here",
                path=path,
                expected="a file made by write_dataset; those of FFCV are not needed",
                fix="run write_dataset again on the store directory",
            ) from error


def collect_completed(
    folder: NpyFolder,
    *,
    masks: str = "masks",
    outputs: str,
    column: int | None = None,
    flags: str | None = "_completed",
) -> RegressionData:
    """The completed rows of a store directory; `flags=None` takes all rows.

    `column` takes one target; outputs of several dimensions count as so many targets.
    """
    for name in (masks, outputs):
        if name not in [field.name for field in folder.spec.fields]:
            raise DatamodelsError(
                f"there is no such array in the store directory: {name}",
                path=folder.path,
                expected=", ".join(field.name for field in folder.spec.fields),
            )
    rows = np.arange(folder.spec.num_models)
    if flags is not None:
        rows = np.flatnonzero(folder.array(flags))
    if len(rows) == 0:
        raise DatamodelsError("no model is completed yet", path=folder.path, fix="run the workers")
    chosen = np.asarray(folder.array(outputs)[rows], np.float32)
    targets = chosen.reshape(len(rows), -1)
    if column is not None:
        targets = targets[:, [column]]
    return RegressionData(Masks.of(folder.array(masks)[rows]), targets, rows)


def compute_datamodels(
    data: RegressionData,
    *,
    num_train: int,
    num_val: int,
    lambdas: int = 20,
    least: float = 1e-2,
    columns: slice = slice(None),
    out: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Datamodels:
    """Fit sparse (L1) datamodels to the first `num_train + num_val` models.

    The last `num_val` of them choose the penalty of each target.

    `lambdas` penalties go from the least without weights down to nearly `least` times it. With
    `out`, a new folder, writes `datamodels.pt`: `weight [n, t]` and `bias [t]` in mask units (so
    that `mask @ weight + bias` is the prediction), `lam`, and each column's `mean` and `std`; and
    logs of what each penalty came to, in `regularization_path` and `final_lambda` (`read_log`).
    """
    total = num_train + num_val
    if min(num_train, num_val, lambdas) < 1 or total > len(data.targets):
        raise DatamodelsError(
            f"there are not enough models: {len(data.targets)} completed models",
            expected=f"num_train {num_train} and num_val {num_val}, both at least 1",
            fix="train more, or ask for fewer",
        )
    place = None if out is None else Path(out)
    if place is not None and lambdas >= ROWS:
        raise DatamodelsError("too many penalties", found=lambdas, expected=f"fewer than {ROWS}")
    if place is not None and place.exists() and not _cut_off(place):
        raise DatamodelsError(
            "the folder for the results exists already", path=place, fix="give a new name"
        )
    masks = data.masks[:total]
    targets = data.targets[:total, columns]
    if not targets.shape[1]:
        raise DatamodelsError(
            "there is no such target",
            found=f"data.target_start_ind {columns.start}, target_end_ind {columns.stop}",
            expected=f"targets from 0 to {data.targets.shape[1] - 1}",
        )
    logs = None
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
        logs = RegressionLogs.create(place, targets.shape[1])
    found = fit(
        masks,
        targets,
        penalty="l1",  # as the original, however few models there are
        lambdas=[least ** (step / lambdas) for step in range(lambdas)],
        held_out=np.arange(num_train, total),
        progress=progress,
        each_penalty=logs,
    )
    if place is not None:
        mean = masks.numpy().mean(axis=0)
        std = np.sqrt(mean * (1 - mean))
        save_weights(
            place / "datamodels.pt", found.weights, found.bias, found.lam, mean=mean, std=std
        )
    return found


def _cut_off(place: Path) -> bool:
    """Whether a folder has logs and no results: the fit was ended before it was done."""
    there = {*os.listdir(place)} if place.is_dir() else set()
    return bool(there) and there <= {*FOLDERS}


def load_weights(path: str | os.PathLike[str]) -> dict[str, AnyArray]:
    """`weight [n, t]`, `bias [t]`, `lam [t]` of a datamodels .pt file, read without running it."""
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise DatamodelsError(
            "the weights cannot be read", path=path, found=error.strerror
        ) from error
    except Exception as error:
        raise DatamodelsError(
            "this is no file of tensors", path=path, found=f"{type(error).__name__}: {error}"
        ) from error
    missing = [key for key in ("weight", "bias", "lam") if key not in found]
    if missing:
        raise DatamodelsError(
            "this file holds no datamodels", path=path, found=f"no {', '.join(missing)}"
        )
    return {key: np.asarray(value) for key, value in found.items() if hasattr(value, "shape")}


def save_weights(
    path: str | os.PathLike[str], weight: AnyArray, bias: AnyArray, lam: AnyArray, **more: AnyArray
) -> None:
    """Write a datamodels .pt file: weight `[n, t]`, bias `[t]`, lam `[t]`, and more by name."""
    import torch

    named = {"weight": weight, "bias": bias, "lam": lam, **more}
    # Copies: tensors of arrays that must not be written to would make torch warn.
    tensors = {key: torch.from_numpy(np.array(value)) for key, value in named.items()}
    temp = f"{os.fspath(file_to_write(path, error=DatamodelsError))}.{secrets.token_hex(4)}"
    try:
        torch.save(tensors, temp)
        os.replace(temp, path)
    finally:
        Path(temp).unlink(missing_ok=True)


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
            f"this is no folder of regression logs: {type(error).__name__}: {error}",
            path=place,
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
