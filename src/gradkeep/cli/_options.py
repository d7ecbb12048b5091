"""Options that several commands share, and answers to stdout."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from gradkeep._display import to_json_types
from gradkeep.cli._files import LARGEST, MOST_WORKERS
from gradkeep.errors import AttributionError, FarmError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradkeep.attribution._scores import Scores
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
    print(json.dumps(to_json_types(fields), indent=2, ensure_ascii=False, allow_nan=False))


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


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Who does the work of a command."""

    workers: CrewOption = None
    engine: EngineOption = "local"
    address: AddressOption = None
    cluster: ClusterOption = None
    parameter: ParameterOption = None

    def arguments(self) -> dict[str, Any]:
        """The arguments `workers` or `engine` of a function that shares its work out."""
        from gradkeep import farm

        if self.engine != "local":
            options = {
                "address": self.address,
                "workers": self.workers,
                "cluster": self.cluster,
                "parameters": _parameters(self.parameter or []),
            }
            given = {key: value for key, value in options.items() if value}
            return {"engine": farm.engine(self.engine, **given)}
        if self.address or self.cluster or self.parameter:
            raise FarmError(
                "--address, --cluster and --parameter are for other engines",
                fix="--engine ray or slurm",
            )
        return {"workers": self.workers}


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


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """The captures that a question is about."""

    queries: QueriesOption = "test"
    train: TrainOption = "train"
    checkpoints: CheckpointOption = None
    run: RunOption = None
    capture: CaptureOption = "main"

    def arguments(self, store: Store) -> dict[str, Any]:
        """The captures as `gk.attribute` takes them."""
        splits = (self.queries, self.train)
        return {
            "queries": self.queries,
            "train": self.train,
            "checkpoints": self.checkpoints,
            "run": chosen_runs(store, self.run, splits=splits, capture=self.capture),
            "name": self.capture,
        }

    def scores(self, store: Store, method: str | None = None, **options: Any) -> Scores:
        """Scores of a method, or of the default one."""
        import gradkeep as gk

        return gk.attribute(store, method=method, **{**self.arguments(store), **options})


def flatten_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Show typer the fields of a command's dataclass parameters as options of their own."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if dataclasses.is_dataclass(parameter.annotation)
    }
    parameters = []
    for name, parameter in signature.parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(groups[name], include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name,
                parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=hints[field.name],
            )
            for field in dataclasses.fields(groups[name])
        ]

    @functools.wraps(command)
    def call(**options: Any) -> Any:
        for name, kind in groups.items():
            names = [field.name for field in dataclasses.fields(kind)]
            options[name] = kind(**{one: options.pop(one) for one in names})
        return command(**options)

    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call
