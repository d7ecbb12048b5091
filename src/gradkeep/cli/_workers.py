"""Who does the work of a command: the options that say so, and what they mean."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gradkeep.errors import FarmError

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
