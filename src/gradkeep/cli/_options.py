"""Options that several commands share, and JSON output."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import json
import math
import re
import shutil
import sys
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from gradkeep._arguments import short_repr
from gradkeep._display import to_json_types
from gradkeep.errors import AttributionError, FarmError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradkeep.attribution._scores import Scores
    from gradkeep.errors import GradkeepError
    from gradkeep.store import Store

MAX_COUNT = 2**31 - 1
MAX_WORKERS = 1024
"""More processes than this on one machine are a typing error."""

Positive = Annotated[int, typer.Option(min=1, max=MAX_COUNT)]
Whole = Annotated[int, typer.Option(min=0, max=MAX_COUNT)]
Seconds = Annotated[float, typer.Option(min=0, max=10 * 365 * 86400.0)]
Share = Annotated[float, typer.Option(min=0, max=1)]
Bytes = Annotated[str, typer.Option(metavar="BYTES")]

StoreArgument = Annotated[str, typer.Argument(metavar="STORE", help="Folder or URL of the store.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
QueriesOption = Annotated[str, typer.Option(help="Split of the queries.")]
TrainOption = Annotated[str, typer.Option(help="Split of the training rows.")]
CheckpointOption = Annotated[list[str] | None, typer.Option("--checkpoints", help="Repeatable.")]
RunOption = Annotated[list[str] | None, typer.Option("--run", help="Repeatable.")]
CaptureOption = Annotated[str, typer.Option("--name", help="Name of the capture.")]
MethodOption = Annotated[
    str | None,
    typer.Option("--method", help="See `gradkeep methods`; by default the best for the task."),
]
RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe", metavar="MODULE:NAME", help="A gk.evaluate.Recipe: module:name or file.py:name."
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(min=0, max=MAX_WORKERS, help="Training processes; 0 trains in this one."),
]
SeedsOption = Annotated[int, typer.Option(min=1, max=MAX_COUNT, help="Models per set of rows.")]
EngineOption = Annotated[str, typer.Option("--engine", help="local, ray or slurm.")]
AddressOption = Annotated[str | None, typer.Option("--address", help="Ray cluster, or auto.")]
ClusterOption = Annotated[
    str | None, typer.Option("--cluster", help="submitit's executor: slurm or local.")
]
ParameterOption = Annotated[
    list[str] | None,
    typer.Option("--parameter", help="submitit parameter, slurm_partition=gpu; repeatable."),
]


def print_json(fields: Any) -> None:
    """Print one JSON document; NaN and infinity become null."""
    print(json.dumps(to_json_types(fields), indent=2, ensure_ascii=False, allow_nan=False))


def print_folded(text: str, *, indent: int = 0) -> None:
    """Print text folded to the terminal's width, 80 columns elsewhere; later lines are indented."""
    width = shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else 80
    for line in text.splitlines():
        rest = " " * indent
        print(
            textwrap.fill(
                line,
                max(40, width),
                subsequent_indent=rest,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )


def print_progress(progress: Any) -> None:
    """Progress callback of trainings; prints only on a terminal."""
    if sys.stderr.isatty():
        print(f"\r  {progress}", end="", file=sys.stderr, flush=True)


def missing_option(error: type[GradkeepError], what: str, fix: str) -> GradkeepError:
    """Build the error about an option that a command needs."""
    return error(f"this command needs {what}", code="cli.missing_option", fix=fix)


def parse_numbers(
    flag: str, text: str | None, *, error: type[GradkeepError], least: int = 0
) -> list[int]:
    """Parse comma-separated whole numbers."""
    words = split_words(text or "")
    if not words or not all(
        re.fullmatch(r"-?\d{1,10}", word) and least <= int(word) <= MAX_COUNT for word in words
    ):
        raise error(
            f"--{flag} cannot be {short_repr(text)}",
            code="cli.not_numbers",
            expected=f"comma-separated whole numbers from {least}",
            fix=f"for example --{flag} 3,70",
        )
    return [int(word) for word in words]


def parse_pairs(pairs: Sequence[str], *, example: str) -> dict[str, str]:
    """Split arguments of the form NAME=VALUE."""
    split = [pair.partition("=") for pair in pairs]
    invalid = [pair for pair, (_, equals, _) in zip(pairs, split, strict=True) if not equals]
    if invalid:
        raise typer.BadParameter(f"{invalid[0]!r} is not NAME=VALUE, such as {example}")
    return {name.strip(): value for name, _, value in split}


def split_words(text: str) -> tuple[str, ...]:
    """Split a comma-separated list."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Where the work of a command runs."""

    workers: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Processes; default: only this one.")
    ] = None
    engine: EngineOption = "local"
    address: AddressOption = None
    cluster: ClusterOption = None
    parameter: ParameterOption = None

    def arguments(self) -> dict[str, Any]:
        """Return `workers=` or `engine=` for functions that distribute their work."""
        from gradkeep import farm

        if self.engine == "local":
            if self.address or self.cluster or self.parameter:
                raise FarmError(
                    "--address, --cluster and --parameter need another engine than local",
                    code="cli.option_of_engine",
                    fix="--engine ray or slurm",
                )
            return {"workers": self.workers}
        parameters = parse_pairs(self.parameter or [], example="slurm_partition=gpu")
        options = {
            "address": self.address,
            "workers": self.workers,
            "cluster": self.cluster,
            "parameters": {k: int(v) if v.isdigit() else v for k, v in parameters.items()},
        }
        chosen = {name: value for name, value in options.items() if value}
        return {"engine": farm.engine(self.engine, **chosen)}


def choose_runs(
    store: Store, runs: Sequence[str] | None, *, splits: Sequence[str], capture: str
) -> list[str]:
    """Return the runs of `--run`; else `main`, or the only run that has captures of these splits."""
    if runs:
        return list(runs)
    captured: dict[str, set[str]] = {}
    for key in store.captures():
        if key.capture == capture:
            captured.setdefault(key.run, set()).add(key.split)
    if "main" in captured or not captured:
        return ["main"]
    candidates = sorted(run for run, available in captured.items() if available >= set(splits))
    if len(candidates) == 1:
        return candidates
    needed = " and ".join(sorted({*splits}))
    raise AttributionError(
        "several runs have these captures" if candidates else f"no run has captures of {needed}",
        code="cli.ambiguous_run",
        path=store.location,
        found="; ".join(f"{run}: {', '.join(sorted(have))}" for run, have in captured.items()),
        fix=f"Choose one, such as --run {candidates[0]}." if candidates else "name existing splits",
    )


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """The captures that scores are computed from."""

    queries: QueriesOption = "test"
    train: TrainOption = "train"
    checkpoints: CheckpointOption = None
    run: RunOption = None
    capture: CaptureOption = "main"

    def arguments(self, store: Store) -> dict[str, Any]:
        """Return the keyword arguments of `gk.attribute`."""
        splits = (self.queries, self.train)
        return {
            "queries": self.queries,
            "train": self.train,
            "checkpoints": self.checkpoints,
            "run": choose_runs(store, self.run, splits=splits, capture=self.capture),
            "name": self.capture,
        }

    def scores(self, store: Store, method: str | None = None, **options: Any) -> Scores:
        """Compute scores by a method, or by the default one."""
        import gradkeep as gk

        return gk.attribute(store, method=method, **{**self.arguments(store), **options})


def typer_command(command: Callable[..., Any]) -> Callable[..., Any]:
    """Present a command to typer: fields of dataclass parameters as options, help from `Options:`."""
    signature = inspect.signature(command, eval_str=True)
    text, helps = _split_docstring(command)
    groups: dict[str, Any] = {}
    parameters = []
    for name, parameter in signature.parameters.items():
        if not dataclasses.is_dataclass(parameter.annotation):
            hint = _typer_hint(name, parameter.annotation, helps.get(name))
            kind = parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(kind=kind, annotation=hint))
            continue
        groups[name] = group = parameter.annotation
        hints = get_type_hints(group, include_extras=True)
        _, helps_of_group = _split_docstring(group)
        for field in dataclasses.fields(group):
            hint = _typer_hint(field.name, hints[field.name], helps_of_group.get(field.name))
            default = parameter.empty if field.default is dataclasses.MISSING else field.default
            kind = parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(field.name, kind, default=default, annotation=hint))

    @functools.wraps(command)
    def call(**options: Any) -> Any:
        for name, group in groups.items():
            names = [field.name for field in dataclasses.fields(group)]
            options[name] = group(**{field: options.pop(field) for field in names})
        return command(**options)

    call.__doc__ = text
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _split_docstring(command: Any) -> tuple[str, dict[str, str]]:
    """Return the docstring without its section `Options:`, and the text of each argument."""
    text, _, arguments = inspect.cleandoc(command.__doc__ or "").partition("\n\nOptions:\n")
    pairs = (line.partition(": ") for line in arguments.splitlines())
    return text, {name.strip(): meaning for name, _, meaning in pairs}


def _typer_hint(name: str, hint: Any, text: str | None) -> Any:
    """Add the help text to the option or argument; make plain flags and refuse NaN in numbers."""
    union = get_args(hint)
    if type(None) in union and get_origin(union[0]) is Annotated:  # Positive | None
        base, option = get_args(union[0])
        hint = Annotated[base | None, option]
    base, option = get_args(hint) if get_origin(hint) is Annotated else (hint, typer.Option())
    option = copy.copy(option)
    option.help = option.help or text
    if base is bool and option.default is ... and not option.param_decls:
        option.param_decls = (f"--{name.replace('_', '-')}",)
    if float in (base, *get_args(base)):
        option.callback = _finite
    return Annotated[base, option]


def _finite(value: float | None) -> float | None:
    """Refuse NaN and infinity, which pass typer's range checks."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value
