"""The logs of an experiment where its configuration wants them, with a manifest for the simulator."""

from __future__ import annotations

import json
import math
import os
import shutil
from typing import TYPE_CHECKING

from gradkeep.errors import RematError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gradkeep.compat.dtr.experiments._trial import Trial


def save_logs(
    recorded: Sequence[tuple[Trial, Path]], folder: Path, manifest: str | None
) -> list[Path]:
    """Copy each log as `MODEL-BATCH-BUDGET-KEY.log`; saving the same again changes nothing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [_copied(trial, log, folder) for trial, log in recorded]
        if manifest is not None:
            written.append(_extended(folder / manifest, recorded, written))
    except OSError as error:
        raise RematError(
            "log_dest: the logs cannot be saved there", path=folder, found=str(error)
        ) from error
    return list(dict.fromkeys(written))


def _copied(trial: Trial, log: Path, folder: Path) -> Path:
    batch = dict(trial.work.sizes)["batch_size"]
    room = trial.ratio if trial.ratio is not None else trial.budget
    words = "inf" if math.isinf(room) else f"{room:g}"
    path = folder / f"{trial.model}-{batch}-{words}-{trial.work.key}.log"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.copyfile(log, temporary)
    temporary.replace(path)
    return path


def _extended(path: Path, recorded: Sequence[tuple[Trial, Path]], written: Sequence[Path]) -> Path:
    """Add to a manifest what it does not list yet."""
    try:
        models = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise RematError(
            "simrd_config is there and cannot be read", path=path, found=str(error)
        ) from error
    for (trial, _), log in zip(recorded, written, strict=True):
        listed = models.setdefault(trial.model, [])
        if any(entry.get("log") == str(log) for entry in listed):
            continue
        sizes = dict(trial.work.sizes)
        title = f"{trial.model} ({sizes.pop('batch_size')})"
        said = ", ".join(f"{key} {value:g}" for key, value in sizes.items())
        listed.append(
            {"name": title, "title": title, "desc": said, "log": str(log), "has_start": True}
        )
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(models, indent=1) + "\n")
    temporary.replace(path)
    return path
