"""A store of models by spec: begun, grown, worked on and looked at."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gradkeep.store as stores
from gradkeep import farm
from gradkeep.datamodels._main_job import MainJob, load_main
from gradkeep.datamodels._spec import Spec
from gradkeep.errors import SchemaMismatch, StudyError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradkeep.store import RowState, Store

MODELS = "models"
"""The set of rows of models that are trained by a user's `main`."""


@dataclass(frozen=True, slots=True)
class Status:
    """How far a set of models is."""

    progress: farm.Progress
    states: tuple[RowState, ...]
    spec: Spec

    @property
    def troubled(self) -> list[RowState]:
        """The models with failed attempts that are not done, worst first."""
        found = [state for state in self.states if state.attempts and state.state != "done"]
        return sorted(found, key=lambda state: (-state.attempts, state.row))


def initialize(store: Store, spec: Spec, *, name: str = MODELS) -> None:
    """Make room in a store for the models of a spec; what is there already is never touched."""
    if name in store.row_sets():
        _refuse(store, spec, name)
    store.rows(name, spec.to_schema(), num_rows=spec.num_models)


def _refuse(store: Store, spec: Spec, name: str) -> None:
    rows = store.rows(name)
    differences = rows.schema.diff(spec.to_schema())
    if spec.num_models != rows.num_rows:
        differences.append(f"num_models: stored {rows.num_rows}, asked for {spec.num_models}")
    if differences:
        raise SchemaMismatch(
            "these models were begun with another spec; nothing was changed",
            path=rows.path,
            found="".join(f"\n    {line}" for line in differences),
            fix="use another name or store; more models of the same kind: --grow",
        )
    done = len(rows.done())
    if done:
        raise StudyError(
            "these models were begun before; nothing was changed",
            path=rows.path,
            found=f"{done} of {rows.num_rows} models are done",
            fix="go on with work or run, or use another name",
        )


def work(
    store: Store,
    main: str,
    *,
    name: str | None = None,
    arguments: Sequence[str] = (),
    folder: str | None = None,
    workers: int | None = None,
    engine: farm.Engine | None = None,
    progress: Callable[[farm.Progress], None] | None = None,
    **limits: Any,
) -> farm.Outcome:
    """Call `main(*_, index, logdir)` of a module for every model that is not done.

    `arguments` is what `main` finds in `sys.argv`; `folder` is where the models' own folders are,
    by default `STORE.files` beside the store.
    """
    rows = models_of(store, name)
    load_main(main)  # a name that cannot be imported is told now, not by every worker
    local = store.backend.local_path("")
    place = folder or ("gradkeep.files" if local is None else f"{local.rstrip('/')}.files")
    job = MainJob(
        main,
        Spec.of_schema(rows.schema, rows.num_rows),
        os.path.abspath(place),
        tuple(arguments),
        (os.getcwd(), *(item for item in sys.path if item)),
    )
    name = rows.folder.rpartition("/")[2]
    return farm.run(store, name, job, workers=workers, engine=engine, progress=progress, **limits)


def status(store: Store, *, name: str | None = None, max_attempts: int = 3) -> Status:
    """What is done, runs and failed, with the time left at the pace of the last hour."""
    rows = models_of(store, name)
    states = rows.states(max_attempts=max_attempts)
    rate = farm.recent_rate(store, rows)
    running = any(state.state == "leased" for state in states)
    found = farm.progress_of(states, rate=rate if running else None)
    return Status(found, tuple(states), Spec.of_schema(rows.schema, rows.num_rows))


def models_of(store: Store, name: str | None = None) -> stores.Rows:
    """The set of models of this name, which need not be said if there is only one."""
    known = store.row_sets()
    if name is None and len(known) == 1:
        return store.rows(known[0])
    if name is None or name not in known:
        raise StudyError(
            "there are no such models in this store",
            path=store.location,
            found="no name" if name is None else name,
            expected=" or ".join(known) or "none were begun yet",
            fix="gradkeep datamodels init STORE --spec FILE begins some",
        )
    return store.rows(name)
