"""`gradkeep capture` and `gradkeep plan`: from a configuration file."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep._arguments import one_of
from gradkeep.cli._output import JsonOption, print_json
from gradkeep.cli._workers import (
    AddressOption,
    ClusterOption,
    CrewOption,
    EngineOption,
    ParameterOption,
    workers_asked,
)

if TYPE_CHECKING:
    from gradkeep.capturing._report import Captured

ConfigArgument = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A YAML file: store, model, checkpoints, data, ...")
]


_LOADING_SEEN = 0.3
"""Seconds of loading rows that tell what one takes."""
_PASSED = (
    *("run", "name", "layers", "encoding", "keep", "tolerance", "of", "uncovered", "mode"),
    *("embeddings", "memory_budget"),
)
"""Choices of the file that are passed on as they are."""


def capture(
    config: ConfigArgument,
    split: Annotated[
        list[str] | None, typer.Option("--split", help="Only this split; may be repeated.")
    ] = None,
    workers: CrewOption = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    cluster: ClusterOption = None,
    parameter: ParameterOption = None,
    json: JsonOption = False,
) -> None:
    """Replay checkpoints over data and keep every sample's gradients; interrupted, it resumes.

    With --workers, processes share it out, here or on a cluster; the bytes are the same.
    """
    import gradkeep as gk
    from gradkeep.cli._capture_config import read_config

    given = read_config(config)
    place = workers_asked(workers, engine, address, cluster, parameter)
    for name in split or []:
        given.loader(name)  # all of them before the first is captured
    model, task = given.make_model(), given.make_task()
    store = gk.open(given.folder / given.store)
    done: list[Captured] = []
    for name in split or list(given.data):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gk.CaptureWarning)  # the notes are printed below
            options: dict[str, Any] = {
                "checkpoints": given.weights() or "final",
                "task": task,
                "split": name,
                **{part: getattr(given, part) for part in _PASSED},
                **place,
            }
            found = gk.capture(store, model, given.loader(name), **options)
        found = found if isinstance(found, list) else [found]
        done += found
        if not json:
            print(*found, sep="\n")
    if json:
        print_json([dataclasses.asdict(one) for one in done])
    else:
        print(f"next: gradkeep attribute {store.location}")


def plan(
    config: ConfigArgument,
    train: Annotated[str, typer.Option(help="The split that is asked about.")] = "train",
    queries: Annotated[str, typer.Option(help="The split that the queries are from.")] = "test",
    memory_budget: Annotated[
        str | None, typer.Option(metavar="BYTES", help="For example 512MiB.")
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Of a row, instead of the file's choice: 16KiB."),
    ] = None,
    rows: Annotated[
        str | None, typer.Option(help="For so many rows, instead of those there are: 1e9.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Captured by so many workers.")
    ] = None,
    place: Annotated[
        str, typer.Option("--store", help="Where the store of that capture would be: local or s3.")
    ] = "local",
    disk_budget: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Instead of what is free on this disk.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show what capturing and asking will take, per layer, before anything runs.

    With --workers, --store s3 or many more --rows than there are, also what that takes elsewhere, played
    through with costs that are measured here.
    """
    import gradkeep as gk
    from gradkeep.cli._capture_config import first_batch, read_config
    from gradkeep.errors import CaptureError

    one_of("--store", place, words=("local", "s3"), error=CaptureError)
    given = read_config(config)
    for split in (train, queries):
        if split not in given.data:
            raise CaptureError(f"no data for {split!r}", path=config, found=", ".join(given.data))
    loader = given.loader(train)
    there = len(loader.dataset)  # type: ignore[arg-type]
    wanted = there if rows is None else _whole(rows)
    planned = gk.plan(
        given.make_model(),
        first_batch(loader),
        task=given.make_task(),
        rows=wanted,
        queries=len(given.loader(queries).dataset),  # type: ignore[arg-type]
        layers=given.layers,
        encoding=given.encoding,  # type: ignore[arg-type]
        keep=given.keep if keep is None else keep,
        tolerance=given.tolerance,
        disk_budget=disk_budget,
        memory_budget=memory_budget if memory_budget is not None else given.memory_budget,
        mode=given.mode,  # type: ignore[arg-type]
    )
    far = None
    if workers is not None or place != "local" or wanted > 10 * there:
        took = _load_seconds(loader)
        far = planned.at_scale(
            rows=wanted,
            workers=workers or 1,
            place=place,  # type: ignore[arg-type]
            load_seconds=took,
        )
    if json:
        scaled = {} if far is None else {"scale": dataclasses.asdict(far)}
        print_json(dataclasses.asdict(planned) | scaled)
    else:
        print(planned)
        if far is not None:
            print(far)


def _whole(text: str) -> int:
    """A whole number, also as people write large ones.

    >>> _whole("1e9"), _whole("2_000")
    (1000000000, 2000)
    """
    from gradkeep.errors import CaptureError

    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found) or found != int(found) or not 1 <= found < 2**53:
        raise CaptureError(
            "this is no number of rows", found=text[:80], expected="a whole number such as 1e9"
        )
    return int(found)


def _load_seconds(loader: Any) -> float:
    """What loading one row takes, seen on the first ones."""
    began, rows = time.process_time(), 0
    for batch in loader:
        first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        rows += len(first)
        if time.process_time() - began > _LOADING_SEEN:
            break
    return (time.process_time() - began) / max(1, rows)
