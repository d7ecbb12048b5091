"""Options that several commands share, and answers to stdout."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep.cli._files import LARGEST, MOST_WORKERS
from gradkeep.errors import AttributionError, FarmError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.store import Store


StoreArgument = Annotated[
    str, typer.Argument(metavar="STORE", help="The store: its folder or URL.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
QueriesOption = Annotated[str, typer.Option(help="The split that the queries are from.")]
TrainOption = Annotated[str, typer.Option(help="The split that is scored.")]
CheckpointOption = Annotated[
    list[str] | None, typer.Option("--checkpoints", help="May be repeated.")
]
RunOption = Annotated[list[str] | None, typer.Option("--run", help="May be repeated.")]
CaptureOption = Annotated[str, typer.Option("--capture", help="The capture's name.")]
MethodOption = Annotated[
    str | None,
    typer.Option(
        "--method", help="`gradkeep methods` lists them; by default the one that won for the task."
    ),
]
RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="MODULE:NAME",
        help="A gk.evaluate.Recipe, as module:name or file.py:name.",
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(min=0, max=MOST_WORKERS, help="Processes that train; 0 trains in this one."),
]
SeedsOption = Annotated[int, typer.Option(min=1, max=LARGEST, help="Models for each set of rows.")]


def print_json(fields: Any) -> None:
    """Print one JSON document; what JSON has no number for becomes null."""
    print(json.dumps(_plain(fields), indent=2, ensure_ascii=False, allow_nan=False))


def _plain(value: Any) -> Any:
    """The value in the types of JSON."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


CrewOption = Annotated[
    int | None,
    typer.Option("--workers", min=1, max=100_000, help="How many; without it, this process alone."),
]
EngineOption = Annotated[str, typer.Option("--engine", help="local, ray or slurm.")]
AddressOption = Annotated[
    str | None, typer.Option("--address", help="Of the Ray cluster, or auto.")
]
ClusterOption = Annotated[
    str | None, typer.Option("--cluster", help="What submitit is to use: slurm or local.")
]
ParameterOption = Annotated[
    list[str] | None,
    typer.Option("--parameter", help="For submitit, such as slurm_partition=gpu; repeatable."),
]


def workers_asked(
    workers: int | None,
    engine: str,
    address: str | None,
    cluster: str | None,
    parameters: list[str] | None,
) -> dict[str, Any]:
    """The arguments `workers` or `engine` of a function that shares its work out."""
    from gradkeep import farm

    if engine != "local":
        options: dict[str, Any] = {"address": address, "workers": workers, "cluster": cluster}
        options["parameters"] = _parameters(parameters or [])
        given = {key: value for key, value in options.items() if value}
        return {"engine": farm.engine(engine, **given)}
    if address or cluster or parameters:
        raise FarmError(
            "--address, --cluster and --parameter are for other engines",
            fix="--engine ray or slurm",
        )
    return {"workers": workers}


def _parameters(given: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in given:
        key, equals, value = item.partition("=")
        if not equals:
            raise FarmError("a parameter is KEY=VALUE", found=item)
        found[key] = int(value) if value.isdigit() else value
    return found


_USUAL = "main"


def chosen_runs(
    store: Store, given: Sequence[str] | None, *, splits: Sequence[str], capture: str
) -> list[str]:
    """The runs that were named; else `main`, or the only run that has captures of these splits."""
    if given:
        return list(given)
    kept: dict[str, set[str]] = {}
    for key in store.captures():
        if key.capture == capture:
            kept.setdefault(key.run, set()).add(key.split)
    fitting = sorted(run for run, found in kept.items() if found >= set(splits))
    if _USUAL in kept or not kept:
        return [_USUAL]
    if len(fitting) == 1:
        return fitting
    raise AttributionError(
        "which run?" if fitting else f"no run has captures of {' and '.join(sorted({*splits}))}",
        path=store.location,
        found="; ".join(f"{run}: {', '.join(sorted(found))}" for run, found in kept.items()),
        fix=f"--run {fitting[0]}, for example" if fitting else "name splits that there are",
    )
