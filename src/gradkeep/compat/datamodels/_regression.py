"""Regression data of completed models, fitting of datamodels, and their `.pt` file."""

from __future__ import annotations

import csv
import os
import shutil
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.format import open_memmap

from gradkeep._arguments import file_to_write
from gradkeep._environment import replaced_file
from gradkeep.datamodels import Masks, fit
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradkeep.compat.datamodels._npy_folder import NpyFolder
    from gradkeep.datamodels import Datamodels
    from gradkeep.datamodels._path import PenaltyStep


@dataclass(frozen=True, slots=True, eq=False)
class RegressionData:
    """Masks and targets of completed models.

    Attributes:
        masks: Training masks `[m, n]`.
        targets: Model outputs `[m, t]`, float32.
        rows: Numbers of the models `[m]`.
    """

    masks: Masks
    targets: AnyArray
    rows: AnyArray

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one file, masks as bits.

        Args:
            path: File to write.
        """
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
        """Read a file written by `save`.

        Args:
            path: The file.

        Returns:
            The data.

        Raises:
            DatamodelsError: If the file cannot be read or has another format.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                masks = Masks(arrays["bits"], int(arrays["num_examples"]))
                return cls(masks, arrays["targets"], arrays["rows"])
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise DatamodelsError(
                "the regression data cannot be read",
                code="compat.regression_format",
                path=path,
                found=error,
                expected="a file of write_dataset, not of FFCV",
                fix="Run write_dataset again on the store directory.",
            ) from error


def collect_completed(
    folder: NpyFolder,
    *,
    masks: str = "masks",
    outputs: str,
    column: int | None = None,
    flags: str | None = "_completed",
) -> RegressionData:
    """Collect the completed rows of a store directory.

    Args:
        folder: The store directory.
        masks: Name of the array of masks.
        outputs: Name of the array of outputs; several dimensions are flattened to targets.
        column: Use only this target.
        flags: Name of the array of completed flags; None for all rows.

    Returns:
        Masks `[m, n]` and targets `[m, t]`.

    Raises:
        DatamodelsError: If an array is missing or no model is completed.
    """
    for name in (masks, outputs):
        if name not in [field.name for field in folder.spec.fields]:
            raise DatamodelsError(
                "the store directory has no such array",
                code="compat.no_such_array",
                path=folder.path,
                found=name,
                expected=", ".join(field.name for field in folder.spec.fields),
            )
    rows = np.arange(folder.spec.num_models)
    if flags is not None:
        rows = np.flatnonzero(folder.array(flags))
    if len(rows) == 0:
        raise DatamodelsError(
            "no model is completed yet",
            code="compat.no_completed_models",
            path=folder.path,
            fix="Run the workers first.",
        )
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

    Args:
        data: Masks and targets.
        num_train: Number of models to fit.
        num_val: Number of models that choose the penalty.
        lambdas: Number of penalties, from the smallest without weights down to nearly `least` times it.
        least: Ratio of the smallest penalty to the largest.
        columns: Targets to fit.
        out: New folder for `datamodels.pt`: `weight [n, t]` and `bias [t]` in mask units (so that
            `mask @ weight + bias` is the prediction), `lam`, and each column's `mean` and `std`; and for
            logs of each penalty, in `regularization_path` and `final_lambda` (see `read_log`).
        progress: Called with the number of finished penalties and the total.

    Returns:
        The fitted datamodels.

    Raises:
        DatamodelsError: If there are too few models, or `out` already exists.
    """
    total = num_train + num_val
    if min(num_train, num_val, lambdas) < 1 or total > len(data.targets):
        raise DatamodelsError(
            "there are not enough models",
            code="compat.too_few_models",
            found=f"{len(data.targets)} completed models",
            expected=f"num_train {num_train} and num_val {num_val}, both at least 1",
            fix="Train more models, or reduce num_train or num_val.",
        )
    place = None if out is None else Path(out)
    if place is not None and lambdas >= ROWS:
        raise DatamodelsError(
            "there are too many penalties",
            code="compat.too_many_penalties",
            found=lambdas,
            expected=f"fewer than {ROWS}",
        )
    if place is not None and place.exists() and not _is_interrupted(place):
        raise DatamodelsError(
            "the output folder already exists",
            code="compat.out_exists",
            path=place,
            fix="Pass a new folder.",
        )
    masks = data.masks[:total]
    targets = data.targets[:total, columns]
    if not targets.shape[1]:
        raise DatamodelsError(
            "the target does not exist",
            code="compat.no_such_target",
            found=f"data.target_start_ind {columns.start}, target_end_ind {columns.stop}",
            expected=f"targets from 0 to {data.targets.shape[1] - 1}",
        )
    logs = None
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
        logs = RegressionLogs.create(place, targets.shape[1])
    datamodels = fit(
        masks,
        targets,
        penalty="l1",  # as in the original, for any number of models
        lambdas=[least ** (step / lambdas) for step in range(lambdas)],
        held_out=np.arange(num_train, total),
        progress=progress,
        each_penalty=logs,
    )
    if place is not None:
        mean = masks.numpy().mean(axis=0)
        std = np.sqrt(mean * (1 - mean))
        save_weights(
            place / "datamodels.pt",
            datamodels.weights,
            datamodels.bias,
            datamodels.lam,
            mean=mean,
            std=std,
        )
    return datamodels


def _is_interrupted(place: Path) -> bool:
    """Return True if a folder has logs but no results."""
    there = {*os.listdir(place)} if place.is_dir() else set()
    return bool(there) and there <= {*FOLDERS}


def load_weights(path: str | os.PathLike[str]) -> dict[str, AnyArray]:
    """Read a datamodels .pt file without executing code in it.

    Args:
        path: The file.

    Returns:
        Arrays by name, among them `weight [n, t]`, `bias [t]` and `lam [t]`.

    Raises:
        DatamodelsError: If the file cannot be read or lacks one of them.
    """
    import torch

    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DatamodelsError(
            "the file cannot be read as tensors",
            code="compat.weights_format",
            path=path,
            found=f"{type(error).__name__}: {error}",
        ) from error
    missing = [key for key in ("weight", "bias", "lam") if key not in tensors]
    if missing:
        raise DatamodelsError(
            "the file does not contain datamodels",
            code="compat.weights_incomplete",
            path=path,
            found=f"no {', '.join(missing)}",
        )
    return {key: np.asarray(value) for key, value in tensors.items() if hasattr(value, "shape")}


def save_weights(
    path: str | os.PathLike[str], weight: AnyArray, bias: AnyArray, lam: AnyArray, **more: AnyArray
) -> None:
    """Write a datamodels .pt file.

    Args:
        path: File to write.
        weight: Weights `[n, t]`.
        bias: Biases `[t]`.
        lam: Penalties `[t]`.
        **more: Further arrays by name.
    """
    import torch

    named = {"weight": weight, "bias": bias, "lam": lam, **more}
    # Copy: torch warns about tensors on read-only arrays.
    tensors = {key: torch.from_numpy(np.array(value)) for key, value in named.items()}
    with replaced_file(Path(file_to_write(path, error=DatamodelsError))) as temp:
        torch.save(tensors, temp)


AnyArray = np.ndarray[Any, np.dtype[Any]]
ROWS = 10_000
"""Rows of an array; readers expect unused rows at the end."""
FOLDERS = ("regularization_path", "final_lambda")
MAPPING = "index_mapping"
_BEST = ("best_lambda", "best_mse")
_NUMBERS = ("train_mse", "val_mse", "deltas", "lambda", *_BEST, "weight_norm", "weight_nz")
_FLAGS = ("done_optimizing_inner", "still_optimizing_outer")


@dataclass(frozen=True, slots=True, eq=False)
class _Log:
    """Arrays of one log folder; rows are written in place, some targets at a time."""

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
        log = cls(folder, arrays)
        log.count()
        return log

    def write(self, row: int, targets: AnyArray, values: dict[str, Any]) -> None:
        """Write values of some targets; the others are copied from the previous row, and marked as finished."""
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
        """Write the number of used rows; the file is replaced atomically."""
        with (
            replaced_file(self.folder / "metadata.csv") as temp,
            temp.open("w", newline="") as file,
        ):
            lines = csv.writer(file, lineterminator="\n")
            lines.writerow(["field", "max_chunk", "counter"])
            lines.writerows([name, 0, len(self.used)] for name in self.arrays)


@dataclass(frozen=True, slots=True, eq=False)
class RegressionLogs:
    """Log each penalty to `regularization_path`, and the last fit to `final_lambda`."""

    path: _Log
    final: _Log

    @classmethod
    def create(cls, out: Path, targets: int) -> RegressionLogs:
        """Create both folders, and delete those of an interrupted fit."""
        for name in FOLDERS:
            shutil.rmtree(out / name, ignore_errors=True)
        path, final = (_Log.create(out / name, targets) for name in FOLDERS)
        return cls(path, final)

    def __call__(self, step: PenaltyStep) -> None:
        """Log one step."""
        log, row = (self.final, 0) if step.index < 0 else (self.path, step.index)
        best, least = step.lam, step.held_out_error
        if row:
            previous = {name: log.arrays[name][row - 1, step.targets] for name in _BEST}
            better = step.held_out_error < previous["best_mse"]
            best = np.where(better, best, previous["best_lambda"])
            least = np.where(better, least, previous["best_mse"])
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
    """Read a log folder of this or the original solver.

    Args:
        folder: `regularization_path` or `final_lambda`.

    Returns:
        Fields `[rows, t]` by name, targets in order.

    Raises:
        DatamodelsError: If it is not a log folder.

    Example:
        >>> import tempfile
        >>> logs = RegressionLogs.create(Path(tempfile.mkdtemp()), 3)
        >>> read_log(logs.path.folder)["lambda"].shape
        (0, 3)
    """
    place = Path(folder)
    try:
        with (place / "metadata.csv").open(newline="") as file:
            rows = {line["field"]: line for line in csv.DictReader(file)}
        fields = {}
        for name, line in rows.items():
            last, used = int(line["max_chunk"]), int(line["counter"])
            parts = [
                np.load(place / f"{name}_{chunk}.npy", mmap_mode="r") for chunk in range(last + 1)
            ]
            fields[name] = np.concatenate([*parts[:-1], parts[-1][:used]])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatamodelsError(
            "the folder does not contain regression logs",
            code="compat.log_unreadable",
            path=place,
            found=f"{type(error).__name__}: {error}",
            expected="metadata.csv and FIELD_0.npy, written by compute_datamodels",
        ) from error
    order = fields.pop(MAPPING, None)
    if order is None:
        return fields
    # The original solver moves finished targets to the end of its arrays.
    back = np.argsort(order, axis=1)
    return {
        name: np.take_along_axis(values, back[: len(values)], 1) for name, values in fields.items()
    }
