"""`gradkeep datamodels init`, `status` and `export`: sets of models and how far they are."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep.cli._output import JsonOption, StoreArgument, print_json
from gradkeep.errors import StudyError

if TYPE_CHECKING:
    from gradkeep.datamodels import Status

NameOption = Annotated[
    str | None, typer.Option("--name", help="Which models, if the store has several sets.")
]
AttemptsOption = Annotated[
    int, typer.Option("--attempts", min=1, help="How often a model is tried.")
]


def init(
    store: StoreArgument,
    spec: Annotated[
        Path | None, typer.Option("--spec", help="JSON: num_models, and schema by name.")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Import a folder of .npy arrays, or the published data."),
    ] = None,
    alpha: Annotated[
        float | None, typer.Option("--alpha", help="Which share, of published data with several.")
    ] = None,
    grow: Annotated[
        int | None, typer.Option("--grow", min=1, help="Make room for so many models in all.")
    ] = None,
    name: NameOption = None,
    json: JsonOption = False,
) -> None:
    """Begin a set of models: by a spec, from arrays that exist, or by adding to one.

    What is done is never touched: beginning again or with another spec is refused.
    """
    import gradkeep.store as stores
    from gradkeep import datamodels

    if sum(item is not None for item in (spec, source, grow)) != 1:
        raise StudyError("say one of --spec, --from and --grow", fix="for example --spec spec.json")
    imported = 0
    chosen = datamodels.MODELS if name is None else name
    if grow is not None:
        opened = stores.open(store, create=False)
        rows = datamodels.models_of(opened, name)
        rows.grow(grow)
    else:
        read = None if spec is None else datamodels.Spec.read(spec)
        opened = stores.open(store)
        if read is not None:
            datamodels.initialize(opened, read, name=chosen)
        elif source is not None and (source / f"{datamodels.COMPLETED}.npy").exists():
            imported = datamodels.import_folder(opened, source, name=chosen)
        elif source is not None:
            imported = datamodels.import_published(opened, source, alpha=alpha, name=chosen)
        rows = opened.rows(chosen)
    if json:
        print_json({"store": store, "num_models": rows.num_rows, "imported": imported})
        return
    done = f", {imported} of them imported" if imported else ""
    print(f"{store}: room for {rows.num_rows} models{done}")


def status(
    store: StoreArgument,
    name: NameOption = None,
    attempts: AttemptsOption = 3,
    errors: Annotated[int, typer.Option("--errors", min=0, help="How many failures to show.")] = 5,
    json: JsonOption = False,
) -> None:
    """Show how many models are done, running and failed, why, and how long the rest will take."""
    import gradkeep.store as stores
    from gradkeep import datamodels

    opened = stores.open(store, create=False)
    found = datamodels.status(opened, name=name, max_attempts=attempts)
    if json:
        print_json(_fields(found))
        return
    for field in found.spec.fields:
        print(f"{field.name}  {field.dtype.name} {list(field.shape)}")
    print(found.progress)
    for state in found.troubled[:errors]:
        last = (state.error or "").strip().splitlines() or [""]
        print(f"model {state.row}  {state.state} after {state.attempts} failed attempts")
        print("".join(f"    {line}\n" for line in last[-6:]), end="")
    if len(found.troubled) > errors:
        print(f"... and {len(found.troubled) - errors} more; --errors shows them")


def export(
    store: StoreArgument,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new or empty folder.")],
    name: NameOption = None,
    json: JsonOption = False,
) -> None:
    """Write the models that are done as .npy arrays with `_completed.npy`, as other tools read them."""
    import gradkeep.store as stores
    from gradkeep import datamodels

    done = datamodels.export_folder(stores.open(store, create=False), folder, name=name)
    if json:
        print_json({"folder": str(folder), "models": done})
    else:
        print(f"{folder}: {done} models")


def _fields(found: Status) -> dict[str, Any]:
    seen = found.progress
    return {
        "total": seen.total,
        "done": seen.done,
        "failed": seen.failed,
        "leased": seen.leased,
        "pending": seen.pending,
        "rate": seen.rate,
        "eta": seen.eta,
        "spec": found.spec.to_fields(),
        "failures": [
            {
                "model": state.row,
                "state": state.state,
                "attempts": state.attempts,
                "error": state.error,
            }
            for state in found.troubled
        ],
    }
