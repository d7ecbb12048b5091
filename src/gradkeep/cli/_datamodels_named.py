"""What options name: labels in a file, a study in a module."""

from __future__ import annotations

import importlib
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep.errors import StudyError

if TYPE_CHECKING:
    from gradkeep.datamodels import Study


def labels_of(option: str, source: str | None) -> Any:
    """One label each `[n]`: of an .npy file, an array of an .npz file, or lines of text."""
    import numpy as np

    if source is None:
        raise StudyError(
            f"--{option} is missing", expected="FILE.npy, FILE.npz:NAME, or a file of lines"
        )
    file, name = source, ""
    if not Path(source).exists() and ".npz:" in source:
        file, _, name = source.rpartition(":")
    try:
        if not file.endswith((".npy", ".npz")):
            return np.array(Path(file).read_text().splitlines())
        with open(file, "rb") as opened:  # numpy leaves a broken archive open
            read = np.load(opened)
            if file.endswith(".npy"):
                return read
            arrays = dict(read)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise StudyError(f"--{option} cannot be read", path=file, found=error) from error
    if not name and len(arrays) == 1:
        return next(iter(arrays.values()))
    if name not in arrays:
        raise StudyError(
            "which array holds the groups?",
            path=file,
            found=name or None,
            expected=", ".join(arrays),
            fix=f"--{option} {file}:NAME",
        )
    return arrays[name]


def study_of(where: str | None) -> Study:
    """The study that `module:name` is or makes, also in modules of this folder."""
    from gradkeep.datamodels import Study

    module, _, name = (where or "").partition(":")
    if not name:
        raise StudyError(
            "which study trained these models? To train again, its data and training are needed",
            found=where,
            expected="--study module:name, a Study or a function that returns it",
        )
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise StudyError("--study cannot be imported", path=where, found=error) from error
    if callable(found):
        found = found()
    if not isinstance(found, Study):
        raise StudyError("--study names no study", path=where, found=type(found).__name__)
    return found
