"""A user's `main(*_, index, logdir)` as a job of the farm."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep.datamodels._returned import checked
from gradkeep.errors import StudyError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradkeep.datamodels._spec import Spec

WORKERS = "workers"
"""The folder in a store's directory where each model may leave files of its own."""


@dataclass(frozen=True, slots=True)
class MainJob:
    """Calls `main` of a module for each index and checks what it returns against the spec.

    `main` gets a folder of its own for files, `folder/workers/<index>/`, and may read `arguments`
    from `sys.argv`.
    """

    module: str
    spec: Spec
    folder: str
    arguments: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    """Folders to import from: those of the process that gave the order."""

    def __call__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """The checked results of `main` for each index."""
        main = self.load()
        return [
            checked(self.spec, main(index=n, logdir=logdir_of(self.folder, n)), index=n)
            for n in numbers
        ]

    def load(self) -> Callable[..., Any]:
        """The function, imported in this process with the arguments where it looks for them."""
        if self.arguments:
            sys.argv = list(self.arguments)
        sys.path.extend(item for item in self.path if item not in sys.path)
        return load_main(self.module)


def load_main(module: str) -> Callable[..., Any]:
    """`main` of a module, by its dotted name."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # something that the module itself needs is missing: its traceback says what
        raise StudyError(
            "there is no such module",
            found=module,
            expected="a dotted name that can be imported from here, such as examples.train",
            fix="run in the folder above it, or set PYTHONPATH",
        ) from error
    main = getattr(found, "main", None)
    if not callable(main):
        raise StudyError(
            f"the module {module} has no function main",
            expected="def main(*_, index, logdir): ... returning a dictionary",
        )
    function: Callable[..., Any] = main
    return function


def logdir_of(folder: str, index: int) -> str:
    """A model's own folder, made if needed."""
    place = Path(folder) / WORKERS / str(index)
    place.mkdir(parents=True, exist_ok=True)
    return f"{place}/"
