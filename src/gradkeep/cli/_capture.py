"""`gradkeep capture` and `gradkeep plan`, and the configuration file that they read."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep import _arguments
from gradkeep._arguments import one_of, shown
from gradkeep.cli._files import input_text
from gradkeep.cli._imports import import_object
from gradkeep.cli._options import (
    JsonOption,
    WorkerOptions,
    print_json,
)
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader

    from gradkeep.capturing._report import Captured
    from gradkeep.capturing.tasks._tasks import Task


_TASKS = {
    "classification": "Classification",
    "regression": "Regression",
    "language-modelling": "LanguageModelling",
}


@dataclass(frozen=True, slots=True)
class CaptureConfig:
    """The contents of the file, checked; paths are relative to it."""

    folder: Path
    store: str
    model: Mapping[str, Any]
    """`name` of a reference model with its sizes, or `from: module:function` with arguments."""
    data: Mapping[str, Mapping[str, Any]]
    """For each split its `kind`, `path` and further options of `gradkeep.data.dataset`."""
    checkpoints: Mapping[str, Any] = field(default_factory=dict)
    """A file or folder of weights under each name; without any, the model as it is made."""
    task: str | Mapping[str, Any] = "classification"
    run: str = "main"
    name: str = "main"
    layers: Any = None
    encoding: str = "plain"
    keep: Any = None
    tolerance: float = 0.0
    of: str | None = None
    uncovered: str = "dense"
    mode: str = "eval"
    embeddings: tuple[str, ...] = ()
    batch_size: int = 64
    memory_budget: str | int | None = None
    device: str = "cpu"

    def make_model(self) -> nn.Module:
        """The model, on its device."""
        from gradkeep.data import model

        options = _named("model", self.model)
        source = options.pop("from", None)
        if source is not None:
            made = _made("model", source, options, self.folder)
        elif "name" in options:
            made = model(options.pop("name"), **options)
        else:
            raise CaptureError("model: neither name nor from", expected="name: mlp, for example")
        from torch import device, nn

        if not isinstance(made, nn.Module):
            raise CaptureError("model: this is no torch.nn.Module", found=type(made).__name__)
        try:
            place = device(self.device)
        except RuntimeError as error:
            told = str(error).splitlines()[0]
            raise CaptureError("device: there is none such", found=told, expected="cpu") from error
        return made.to(place)

    def make_task(self) -> Task:
        """The task."""
        import gradkeep as gk

        given = {"name": self.task} if isinstance(self.task, str) else _named("task", self.task)
        name = str(given.pop("name", ""))
        if ":" in name:
            made = _made("task", name, given, self.folder)
        elif name in _TASKS:
            made = _called("task", getattr(gk, _TASKS[name]), given)
        else:
            expected = f"{', '.join(_TASKS)} or module:Class"
            raise CaptureError(f"no task {shown(name)}", expected=expected)
        return _arguments.instance("task", made, gk.Task, error=CaptureError, expected="a gk.Task")

    def loader(self, split: str) -> DataLoader[Any]:
        """The batches of a split, in the same order every time."""
        from torch.utils.data import DataLoader

        from gradkeep.data import dataset

        if split not in self.data:
            raise CaptureError(
                f"no data for {shown(split)}", found=", ".join(map(str, self.data)) or "none"
            )
        options = _named(f"data: {split}", self.data[split])
        source = options.pop("from", None)
        limit = options.pop("rows", None)
        if source is not None:
            found = _made(f"data: {split}", source, options, self.folder)
        else:
            options.setdefault("split", split)
            for key in ("path", "vocabulary"):
                if isinstance(options.get(key), str):
                    options[key] = self.folder / options[key]
            found = _called(f"data: {split}", dataset, {"kind": "", **options})
        if not hasattr(found, "__len__") or not hasattr(found, "__getitem__"):
            raise CaptureError(
                f"data: {split}: this is no dataset with a length", found=type(found).__name__
            )
        if limit is not None:
            from torch.utils.data import Subset

            rows = _arguments.count(f"data: {split}: rows", limit, error=CaptureError, least=1)
            found = Subset(found, range(min(rows, len(found))))
        return DataLoader(found, batch_size=self.batch_size)

    def weights(self) -> dict[str, Any]:
        """Where the weights of each checkpoint are."""
        import gradkeep as gk

        found: dict[str, Any] = {}
        for name, given in self.checkpoints.items():
            where = f"checkpoints: {name}"
            entry = _named(where, given) if isinstance(given, Mapping) else {"path": given}
            path = _arguments.file_path(f"{where}: path", entry.pop("path", ""), error=CaptureError)
            for key, check in _WEIGHTS_CHECKS.items():
                if entry.get(key) is not None:
                    entry[key] = check(f"{where}: {key}", entry[key], error=CaptureError)
            options = {"source": self.folder / path, **entry}
            found[str(name)] = _called(where, gk.Weights, options)
        return found


def read_config(path: str) -> CaptureConfig:
    """The configuration in a YAML file; unknown keys are answered with the nearest known ones."""
    import yaml

    file = Path(path)
    text = input_text(path, error=CaptureError)
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a day of month 13
        raise CaptureError("this is not YAML", path=path, found=str(error)) from error
    except RecursionError:
        raise CaptureError("this is not YAML", path=path, found="endless nesting") from None
    if not isinstance(content, Mapping):
        raise CaptureError("a configuration is a mapping", path=path, found=type(content).__name__)
    content = dict(content)
    known = [part.name for part in fields(CaptureConfig) if part.name != "folder"]
    for key in content:
        if key not in known:
            near = difflib.get_close_matches(str(key)[:80], known, n=2)
            raise CaptureError(
                f"no key {shown(key)}",
                path=path,
                expected=", ".join(known),
                fix=f"did you mean {' or '.join(near)}?" if near else None,
            )
    missing = [key for key in ("store", "model", "data") if key not in content]
    if missing:
        raise CaptureError(f"no {missing[0]!r}", path=path, expected="store, model and data")
    for key in ("model", "data", "checkpoints"):
        if not isinstance(content.get(key, {}), Mapping):
            raise CaptureError(f"{key} is not a mapping", path=path, found=shown(content[key]))
    for key, check in _CHECKS.items():
        if key in content:
            content[key] = check(key, content[key])
    return CaptureConfig(folder=file.resolve().parent, **content)


def _text(name: str, value: object) -> str:
    return _arguments.text(name, value, error=CaptureError)


_CHECKS: dict[str, Callable[[str, object], Any]] = {
    **dict.fromkeys(("store", "run", "name", "encoding", "mode", "device"), _text),
    "uncovered": lambda name, value: _arguments.one_of(
        name, value, ("dense", "error", "skip"), error=CaptureError
    ),
    "of": lambda name, value: _arguments.one_of(
        name, value, ("loss", "output", None), error=CaptureError
    ),
    "task": lambda name, value: value if isinstance(value, Mapping) else _text(name, value),
    "embeddings": lambda name, value: _arguments.texts(name, value, error=CaptureError),
    "batch_size": lambda name, value: _arguments.count(
        name, value, error=CaptureError, least=1, most=2**31 - 1
    ),
    "tolerance": lambda name, value: _arguments.number(name, value, error=CaptureError, least=0),
}
"""What each value of the file must be; the rest is checked by what it is given to."""


def first_batch(loader: DataLoader[Any]) -> Any:
    """The first batch of a loader."""
    for batch in loader:
        return batch
    raise CaptureError("the data set is empty")


_WEIGHTS_CHECKS: dict[str, Callable[..., Any]] = {
    "step": _arguments.count,
    "lr": _arguments.number,
}


def _named(where: str, value: object) -> dict[str, Any]:
    """A mapping whose keys are texts, as arguments are named."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise CaptureError(f"{where} is not a mapping of names", found=shown(value))
    return dict(value)


def _made(where: str, source: object, options: Mapping[str, Any], folder: Path) -> Any:
    """What the function `module:name` returns for these options."""
    return _called(
        where,
        import_object(_text(f"{where}: from", source), str(folder), error=CaptureError),
        options,
    )


def _called(where: str, function: Any, options: Mapping[str, Any]) -> Any:
    """What the function returns; arguments that it does not take are seen before it is called."""
    if not callable(function):
        raise CaptureError(f"{where}: this cannot be called", found=type(function).__name__)
    try:
        inspect.signature(function).bind(**options)
    except ValueError:
        pass  # a function of C that does not say what it takes
    except TypeError as error:
        raise CaptureError(f"{where}: {error}", found=", ".join(options) or "no options") from error
    return function(**options)


ConfigArgument = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A YAML file: store, model, checkpoints, data, ...")
]


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
    json: JsonOption = False,
    *,
    crew: WorkerOptions,
) -> None:
    """Replay checkpoints over data and keep every sample's gradients; interrupted, it resumes.

    With --workers, processes share it out, here or on a cluster; the bytes are the same.
    """
    import gradkeep as gk

    given = read_config(config)
    place = crew.arguments()
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
    from gradkeep.cli._capture import first_batch, read_config
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
        # Seconds of loading rows that tell what one takes.
        if time.process_time() - began > 0.3:
            break
    return (time.process_time() - began) / max(1, rows)
