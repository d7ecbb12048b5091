"""`gradkeep datamodels init`, `status`, `export`, `work` and `run`: train sets of models."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep._display import pick_fields
from gradkeep.cli._inputs import importing_from, input_file, input_folder, output_folder
from gradkeep.cli._options import (
    AddressOption,
    ClusterOption,
    EngineOption,
    JsonOption,
    ParameterOption,
    Positive,
    Seconds,
    Share,
    StoreArgument,
    Whole,
    WorkerOptions,
    missing_option,
    print_json,
)
from gradkeep.errors import DatamodelsError, NotAStoreError

if TYPE_CHECKING:
    from gradkeep.farm._run import Failure, Outcome
    from gradkeep.store import RowState, Store

NameOption = Annotated[
    str | None, typer.Option("--name", help="Set of models, if the store has several.")
]


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How the models of a set are trained.

    Options:
        main: Module with main(*_, index, logdir).
        arguments: sys.argv of main.
        timeout: Time limit per model in seconds.
        attempts: Attempts per model.
        lease: Lease timeout in seconds.
        retry_failed: Retry models that failed before.
    """

    main: str
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]")] = None
    name: NameOption = None
    timeout: Seconds | None = None
    attempts: Positive = 3
    lease: Seconds = 60.0
    retry_failed: bool = False
    json: JsonOption = False


def init(
    store: StoreArgument,
    spec: Path | None = None,
    source: Annotated[Path | None, typer.Option("--from")] = None,
    alpha: Share | None = None,
    grow: Positive | None = None,
    name: NameOption = None,
    json: JsonOption = False,
) -> None:
    """Create a set of models from a spec or from existing arrays, or extend one.

    Finished models are never changed: an existing set is not created again.

    Options:
        spec: JSON file: num_models and schema.
        source: Import a folder of .npy arrays, or the published data.
        alpha: Subset share, if the data has several.
        grow: Extend the set to this many models.
    """
    import gradkeep.store as stores
    from gradkeep.compat import datamodels as layouts
    from gradkeep.datamodels import _contract as study
    from gradkeep.datamodels._spec import COMPLETED, Spec

    if sum(item is not None for item in (spec, source, grow)) != 1:
        raise missing_option(DatamodelsError, "one of --spec, --from, --grow", "--spec spec.json")
    if spec is not None:
        input_file(spec, error=DatamodelsError)
    if source is not None:
        input_folder(source, error=DatamodelsError)
    imported = 0
    chosen = study.MODELS if name is None else name
    if grow is not None:
        opened = open_models(store)
        rows = study.models_of(opened, name)
        rows.grow(grow)
    else:
        read = None if spec is None else Spec.read(spec)
        opened = stores.open(store)
        if read is not None:
            study.initialize(opened, read, name=chosen)
        elif source is not None and (source / f"{COMPLETED}.npy").exists():
            imported = layouts.import_folder(opened, source, name=chosen)
        elif source is not None:
            imported = layouts.import_published(opened, source, alpha=alpha, name=chosen)
        rows = opened.rows(chosen)
    if json:
        print_json({"store": store, "num_models": rows.num_rows, "imported": imported})
        return
    done = f", {imported} of them imported" if imported else ""
    print(f"{store}: {rows.num_rows} models{done}")


def status(
    store: StoreArgument,
    name: NameOption = None,
    attempts: Positive = 3,
    errors: Whole = 5,
    json: JsonOption = False,
) -> None:
    """Show finished, running and failed models, the reasons of failures, and the remaining time.

    Options:
        attempts: Attempts per model.
        errors: Failures to show.
    """
    from gradkeep.datamodels import _contract as study

    status = study.status(open_models(store), name=name, max_attempts=attempts)
    if json:
        counts = ("total", "done", "failed", "leased", "pending", "rate", "eta")
        fields = pick_fields(status.progress, *counts)
        failures = [_failure(state, state=state.state) for state in status.troubled]
        print_json({**fields, "spec": status.spec.to_fields(), "failures": failures})
        return
    for field in status.spec.fields:
        print(f"{field.name}  {field.dtype.name} {list(field.shape)}")
    print(status.progress)
    for state in status.troubled[:errors]:
        last = (state.error or "").strip().splitlines() or [""]
        print(f"model {state.row}  {state.state} after {state.attempts} failed attempts")
        print("".join(f"    {line}\n" for line in last[-6:]), end="")
    if len(status.troubled) > errors:
        print(f"... and {len(status.troubled) - errors} more; --errors shows them")


def export(
    store: StoreArgument,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
    name: NameOption = None,
    json: JsonOption = False,
) -> None:
    """Export finished models as .npy arrays with `_completed.npy`.

    Options:
        folder: A new or empty folder.
    """
    from gradkeep.compat import datamodels as layouts

    output_folder(folder, error=DatamodelsError)
    done = layouts.export_folder(store, folder, name=name)
    if json:
        print_json({"folder": str(folder), "models": done})
    else:
        print(f"{folder}: {done} models")


def work(store: StoreArgument, *, training: TrainingOptions) -> None:
    """Run one worker that trains models until none is left; start any number of them.

    An interrupted worker releases its model. Exit code 3 if models failed.
    """
    _run(store, training, {"workers": 1})


def run(
    store: StoreArgument,
    workers: Annotated[int | None, typer.Option(min=0, max=100_000)] = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    cluster: ClusterOption = None,
    parameter: ParameterOption = None,
    *,
    training: TrainingOptions,
) -> None:
    """Train all unfinished models, with workers on this machine or on a cluster.

    An interrupted run resumes. Exit code 3 if models failed.

    Options:
        workers: Processes; default: one per core.
    """
    place = WorkerOptions(workers, engine, address, cluster, parameter)
    _run(store, training, place.arguments())


def _run(store: str, training: TrainingOptions, place: dict[str, Any]) -> None:
    from gradkeep._display import progress
    from gradkeep.compat.datamodels import OLD_NAME
    from gradkeep.datamodels import _contract as study

    opened = open_models(store)
    if training.retry_failed:
        study.models_of(opened, training.name).retry()
    # Modules of the current directory can be imported, as with `python -m`.
    with importing_from(""), progress("training", "models") as update:
        outcome = study.work(
            opened,
            training.main,
            name=training.name,
            arguments=[training.main, *(training.arguments or [])],
            progress=lambda state: update(state.done, state.total),
            aliases=OLD_NAME,
            timeout=training.timeout,
            max_attempts=training.attempts,
            lease_seconds=training.lease,
            **place,
        )
    _report(outcome, as_json=training.json)
    if not outcome.complete:
        raise typer.Exit(3)


def open_models(store: str) -> Store:
    """Open a store; the error about a folder of .npy arrays names the command that imports it."""
    import gradkeep.store as stores

    try:
        return stores.open(store, create=False)
    except NotAStoreError as error:
        if not (Path(store) / "_completed.npy").is_file():
            raise
        raise DatamodelsError(
            "this is a folder of .npy arrays of initialize_store, not a store",
            code="cli.not_a_store",
            path=store,
            found=error.found,
            fix=f"gradkeep datamodels init {store}-store --from {store}; or train with "
            "`python -m gradkeep.compat.datamodels.training.worker`",
        ) from None


def _report(outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        fields = pick_fields(outcome.progress, "total", "done", "failed")
        failures = [_failure(item) for item in outcome.failures]
        print_json({**fields, "seconds": outcome.seconds, "failures": failures})
        return
    print(outcome.progress)
    for item in outcome.failures[:5]:
        lines = item.error.strip().splitlines() or ["unknown reason"]
        reason = next((line for line in reversed(lines) if "Error" in line), lines[-1])
        print(f"model {item.row} failed {item.attempts} times: {reason}", file=sys.stderr)
    if outcome.failures:
        print("`gradkeep datamodels status` shows more; --retry-failed retries", file=sys.stderr)


def _failure(of: Failure | RowState, **more: Any) -> dict[str, Any]:
    return {"model": of.row, **more, "attempts": of.attempts, "error": of.error}
