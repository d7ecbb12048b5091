"""Models trained by a user's `main(*_, index, logdir)`: begun by a spec, worked on, looked at."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep import _arguments, farm
from gradkeep._environment import enclosing_store
from gradkeep.datamodels._result import open_store
from gradkeep.datamodels._spec import Spec, check_returned
from gradkeep.errors import DatamodelsError, SchemaMismatchError
from gradkeep.farm._run import Progress, count_progress, recent_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradkeep.farm._run import Engine, Outcome
    from gradkeep.store import Rows, RowState, Store

MODELS = "models"
"""The set of rows of models that are trained by a user's `main`."""
_WORKERS = "workers"
"""The folder in a store's directory where each model may leave files of its own."""


@dataclass(frozen=True, slots=True)
class Status:
    """How far a set of models is."""

    progress: Progress
    states: tuple[RowState, ...]
    spec: Spec

    @property
    def troubled(self) -> list[RowState]:
        """The models with failed attempts that are not done, worst first."""
        failing = [state for state in self.states if state.attempts and state.state != "done"]
        return sorted(failing, key=lambda state: (-state.attempts, state.row))


def initialize(store: Store | str | os.PathLike[str], spec: Spec, *, name: str = MODELS) -> None:
    """Make room in a store for the models of a spec; what is there already is never touched."""
    store = open_store(store)
    if name in store.row_sets():
        _refuse(store, spec, name)
    store.rows(name, spec.to_schema(), num_rows=spec.num_models)


def _refuse(store: Store, spec: Spec, name: str) -> None:
    rows = store.rows(name)
    differences = rows.schema.diff(spec.to_schema())
    if spec.num_models != rows.num_rows:
        differences.append(f"num_models: stored {rows.num_rows}, asked for {spec.num_models}")
    if differences:
        raise SchemaMismatchError(
            "these models were begun with another spec; nothing was changed",
            path=rows.path,
            found="".join(f"\n    {line}" for line in differences),
            fix="Use another name or store; more models of the same kind: --grow.",
        )
    done = len(rows.done())
    if done:
        raise DatamodelsError(
            "the study exists with other settings; nothing was changed",
            code="datamodels.study_exists",
            path=rows.path,
            found=f"{done} of {rows.num_rows} models are done",
            fix="go on with work or run, or use another name",
        )


def work(
    store: Store | str | os.PathLike[str],
    main: str,
    *,
    name: str | None = None,
    arguments: Sequence[str] = (),
    folder: str | None = None,
    workers: int | None = None,
    engine: Engine | None = None,
    progress: Callable[[Progress], None] | None = None,
    aliases: Sequence[tuple[str, str]] = (),
    **limits: Any,
) -> Outcome:
    """Call `main(*_, index, logdir)` of a module for every model that is not done.

    `arguments` is what `main` finds in `sys.argv`; `folder` is where the models' own folders are,
    by default `STORE.files` beside the store. `aliases` are names that the module may import, and
    the modules that stand for them unless they are installed.
    """
    store = open_store(store, create=False)
    rows = models_of(store, name)
    offer_aliases(aliases)
    load_main(main)  # a name that cannot be imported is told now, not by every worker
    local = store.backend.local_path("")
    place = folder or ("gradkeep.files" if local is None else f"{local.rstrip('/')}.files")
    job = MainJob(
        main,
        Spec.of_schema(rows.schema, rows.num_rows),
        os.path.abspath(place),
        tuple(arguments),
        _import_folders(),
        tuple((alias, module) for alias, module in aliases),
    )
    name = rows.folder.rpartition("/")[2]
    return farm.run(store, name, job, workers=workers, engine=engine, progress=progress, **limits)


def status(
    store: Store | str | os.PathLike[str], *, name: str | None = None, max_attempts: int = 3
) -> Status:
    """Return finished, running and failed models, with the remaining time at the pace of the last hour."""
    store = open_store(store, create=False)
    rows = models_of(store, name)
    states = rows.states(max_attempts=max_attempts)
    rate = recent_rate(store, rows)
    running = any(state.state == "leased" for state in states)
    progress = count_progress(states, rate=rate if running else None)
    return Status(progress, tuple(states), Spec.of_schema(rows.schema, rows.num_rows))


def models_of(store: Store | str | os.PathLike[str], name: str | None = None) -> Rows:
    """The set of models of this name, which need not be said if there is only one."""
    store = open_store(store, create=False)
    known = store.row_sets()
    if name is None and len(known) == 1:
        return store.rows(known[0])
    if name is None or name not in known:
        raise DatamodelsError(
            "the store has no such study",
            code="datamodels.unknown_study",
            path=store.location,
            found="no name" if name is None else name,
            expected=" or ".join(known) or "none were begun yet",
            fix="Run `gradkeep datamodels init STORE --spec FILE` first.",
        )
    return store.rows(name)


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
    """Folders to import from: those of the process that began the run."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Names that the module may import, and the modules that stand for them."""

    def __call__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """The checked results of `main` for each index."""
        main = self.load()
        return [
            check_returned(self.spec, main(index=n, logdir=logdir_of(self.folder, n)), index=n)
            for n in numbers
        ]

    def load(self) -> Callable[..., Any]:
        """The function, imported in this process with the arguments where it looks for them."""
        if self.arguments:
            sys.argv = list(self.arguments)
        sys.path.extend(item for item in self.path if item not in sys.path)
        offer_aliases(self.aliases)
        return load_main(self.module)


def _import_folders() -> tuple[str, ...]:
    """List where this process imports from, with the current directory unless that is in a store."""
    here = os.getcwd()
    folders = tuple(item for item in sys.path if item)
    return folders if enclosing_store(here) is not None else (here, *folders)


def offer_aliases(aliases: Sequence[tuple[str, str]]) -> None:
    """Let modules be imported under other names too, unless those are installed."""
    for alias, module in aliases:
        if alias not in sys.modules and importlib.util.find_spec(alias) is None:
            sys.modules[alias] = importlib.import_module(module)


def load_main(module: str) -> Callable[..., Any]:
    """`main` of a module, by its dotted name."""
    if not isinstance(module, str) or not all(part.isidentifier() for part in module.split(".")):
        raise DatamodelsError(
            f"{_arguments.short_repr(module)} is no name of a module",
            code="datamodels.module_name",
            expected="such as examples.train",
        )
    try:
        entry = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # something that the module itself needs is missing: its traceback says what
        raise DatamodelsError(
            "module not found",
            code="datamodels.unknown_module",
            found=module,
            expected="a dotted name that can be imported from here, such as examples.train",
            fix="Run in the folder above it, or set PYTHONPATH.",
        ) from error
    main = getattr(entry, "main", None)
    if not callable(main):
        raise DatamodelsError(
            f"the module {module} has no function main",
            code="datamodels.no_main",
            expected="def main(*_, index, logdir): ... returning a dictionary",
        )
    try:
        inspect.signature(main).bind_partial(index=0, logdir="")
    except ValueError:
        pass  # made in C: nobody knows what it takes
    except TypeError as error:
        raise DatamodelsError(
            f"main of the module {module} cannot be called with index and logdir",
            code="datamodels.main_signature",
            found=str(error),
            expected="def main(*_, index, logdir): ... returning a dictionary",
            fix="Name the module with the training script.",
        ) from None
    function: Callable[..., Any] = main
    return function


def logdir_of(folder: str, index: int) -> str:
    """A model's own folder, made if needed."""
    place = Path(folder) / _WORKERS / str(index)
    place.mkdir(parents=True, exist_ok=True)
    return f"{place}/"
