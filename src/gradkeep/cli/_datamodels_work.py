"""`gradkeep datamodels work` and `run`: train models, with one worker or many."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep.cli._datamodels import AttemptsOption, NameOption  # noqa: TC001 - typer reads them
from gradkeep.cli._output import JsonOption, StoreArgument, print_json
from gradkeep.errors import FarmError

if TYPE_CHECKING:
    from gradkeep.farm import Outcome, Progress

MainOption = Annotated[
    str, typer.Option("--main", help="The module with main(*_, index, logdir), dotted.")
]
TimeoutOption = Annotated[
    float | None, typer.Option("--timeout", help="Seconds that one model may take.")
]
LeaseOption = Annotated[
    float, typer.Option("--lease", help="Seconds without a sign of life until others take over.")
]
RetryOption = Annotated[
    bool, typer.Option("--retry-failed", help="Try again what failed as often as it may.")
]
PassedArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="What main finds in sys.argv.")
]


def work(
    store: StoreArgument,
    main: MainOption,
    arguments: PassedArgument = None,
    name: NameOption = None,
    timeout: TimeoutOption = None,
    attempts: AttemptsOption = 3,
    lease: LeaseOption = 60.0,
    retry_failed: RetryOption = False,
    json: JsonOption = False,
) -> None:
    """Be one worker: train models until none is left. Start as many as you like, anywhere.

    Interrupt it at any moment: it finishes or gives back what it began. Exit code 3 if models failed.
    """
    limits = {"timeout": timeout, "max_attempts": attempts, "lease_seconds": lease}
    _run(store, main, arguments, name, limits, {"workers": 1}, retry=retry_failed, as_json=json)


def run(
    store: StoreArgument,
    main: MainOption,
    arguments: PassedArgument = None,
    name: NameOption = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=0, help="How many; by default one per core.")
    ] = None,
    engine: Annotated[str, typer.Option("--engine", help="local, ray or slurm.")] = "local",
    address: Annotated[
        str | None, typer.Option("--address", help="Of the Ray cluster, or auto.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="What submitit is to use: slurm or local.")
    ] = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option("--parameter", help="For submitit, such as slurm_partition=gpu; repeatable."),
    ] = None,
    timeout: TimeoutOption = None,
    attempts: AttemptsOption = 3,
    lease: LeaseOption = 60.0,
    retry_failed: RetryOption = False,
    json: JsonOption = False,
) -> None:
    """Train all models that are not done, with many workers here or on a cluster.

    Interrupt it at any moment and run it again: what is done stays done. Exit code 3 if models
    failed.
    """
    from gradkeep import farm

    place: dict[str, Any] = {"workers": workers}
    if engine != "local":
        options: dict[str, Any] = {"address": address, "workers": workers, "cluster": cluster}
        options["parameters"] = _parameters(parameter or [])
        given = {key: value for key, value in options.items() if value}
        place = {"engine": farm.engine(engine, **given)}
    elif address or cluster or parameter:
        raise FarmError(
            "--address, --cluster and --parameter are for other engines",
            fix="--engine ray or slurm",
        )
    limits = {"timeout": timeout, "max_attempts": attempts, "lease_seconds": lease}
    _run(store, main, arguments, name, limits, place, retry=retry_failed, as_json=json)


def _run(
    store: str,
    main: str,
    arguments: list[str] | None,
    name: str | None,
    limits: dict[str, Any],
    place: dict[str, Any],
    *,
    retry: bool,
    as_json: bool,
) -> None:
    import gradkeep.store as stores
    from gradkeep import datamodels
    from gradkeep._progress import progress

    sys.path.insert(0, "")  # as `python -m` does: modules of this folder
    opened = stores.open(store, create=False)
    if retry:
        datamodels.models_of(opened, name).retry()
    passed = [main, *(arguments or [])]
    with progress("training", "models") as told:

        def tell(seen: Progress) -> None:
            told(seen.done, seen.total)

        outcome = datamodels.work(
            opened, main, name=name, arguments=passed, progress=tell, **limits, **place
        )
    _report(outcome, as_json=as_json)
    if not outcome.complete:
        raise typer.Exit(3)


def _report(outcome: Outcome, *, as_json: bool) -> None:
    failures = [
        {"model": item.row, "attempts": item.attempts, "error": item.error}
        for item in outcome.failures
    ]
    if as_json:
        seen = outcome.progress
        fields = {"total": seen.total, "done": seen.done, "failed": seen.failed}
        print_json({**fields, "seconds": outcome.seconds, "failures": failures})
        return
    print(outcome.progress)
    for item in outcome.failures[:5]:
        lines = item.error.strip().splitlines()
        reason = next((line for line in reversed(lines) if "Error" in line), lines[-1])
        print(f"model {item.row} failed {item.attempts} times: {reason}", file=sys.stderr)
    if outcome.failures:
        print(
            "`gradkeep datamodels status` shows more; --retry-failed tries again", file=sys.stderr
        )


def _parameters(given: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in given:
        key, equals, value = item.partition("=")
        if not equals:
            raise FarmError("a parameter is KEY=VALUE", found=item)
        found[key] = int(value) if value.isdigit() else value
    return found
