"""`gradkeep capture` and `gradkeep plan`, and the configuration file that they read."""

from __future__ import annotations

import dataclasses
import inspect
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gradkeep import _arguments
from gradkeep._arguments import PositiveInt, one_of, short_repr
from gradkeep._config_file import parse_config
from gradkeep.cli._inputs import import_object, input_text
from gradkeep.cli._options import Bytes, JsonOption, WorkerOptions, print_json
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader

    from gradkeep.capturing._report import Captured
    from gradkeep.capturing.tasks._tasks import Task


_TASKS = {
    "classification": "Classification",
    "regression": "Regression",
    "language-modeling": "LanguageModeling",
}


@dataclass(frozen=True, slots=True)
class CaptureConfig:
    """The validated configuration file; paths are relative to its folder."""

    store: str
    model: Mapping[str, Any]
    """`name` of a reference model with sizes, or `from: module:function` with arguments."""
    data: Mapping[str, Mapping[str, Any]]
    """By split: `kind`, `path` and further options of `gradkeep.data.dataset`."""
    checkpoints: Mapping[str, Any] = field(default_factory=dict)
    """Files or folders of weights by name; without any, the model as it is built."""
    task: str | Mapping[str, Any] = "classification"
    run: str = "main"
    name: str = "main"
    layers: Any = None
    encoding: str = "plain"
    keep: Any = None
    tolerance: float = 0.0
    of: Literal["loss", "output"] | None = None
    uncovered: Literal["dense", "error", "skip"] = "dense"
    mode: str = "eval"
    embeddings: str | Sequence[str] = ()
    batch_size: PositiveInt = 64
    memory_budget: Any = None
    device: str = "cpu"
    folder: Path = Path()

    def __post_init__(self) -> None:
        _arguments.check_fields(self, CaptureError)
        _arguments.text("store", self.store, error=CaptureError)

    def build_model(self) -> nn.Module:
        """Build the model on its device."""
        from gradkeep.data import model

        options = _named("model", self.model)
        source = options.pop("from", None)
        if source is not None:
            module = _call_user(source, options, where="model", folder=self.folder)
        elif "name" in options:
            module = model(options.pop("name"), **options)
        else:
            raise CaptureError(
                "model: needs `name` or `from`",
                code="cli.config_model",
                fix="name: mlp, for example",
            )
        from torch import device, nn

        if not isinstance(module, nn.Module):
            raise CaptureError(
                "model: not a torch.nn.Module", code="cli.config_model", found=type(module).__name__
            )
        try:
            target = device(self.device)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise CaptureError(
                f"device: {reason}", code="cli.config_device", expected="cpu"
            ) from error
        return module.to(target)

    def build_task(self) -> Task:
        """Build the task."""
        import gradkeep as gk

        options = {"name": self.task} if isinstance(self.task, str) else _named("task", self.task)
        name = str(options.pop("name", ""))
        if ":" in name:
            task = _call_user(name, options, where="task", folder=self.folder)
        elif name in _TASKS:
            task = _call(getattr(gk, _TASKS[name]), options, where="task")
        else:
            expected = f"{', '.join(_TASKS)} or module:Class"
            raise CaptureError(
                f"unknown task {short_repr(name)}", code="cli.config_task", expected=expected
            )
        return _arguments.instance("task", task, gk.Task, error=CaptureError, expected="a gk.Task")

    def loader(self, split: str) -> DataLoader[Any]:
        """Return the loader of a split, which never shuffles."""
        from torch.utils.data import DataLoader

        from gradkeep.data import dataset

        if split not in self.data:
            splits = ", ".join(map(str, self.data)) or "none"
            raise CaptureError(
                f"no data for {short_repr(split)}", code="cli.config_no_data", found=splits
            )
        options = _named(f"data: {split}", self.data[split])
        source = options.pop("from", None)
        limit = options.pop("rows", None)
        if source is not None:
            rows = _call_user(source, options, where=f"data: {split}", folder=self.folder)
        else:
            options.setdefault("split", split)
            for key in ("path", "vocabulary"):
                if isinstance(options.get(key), str):
                    options[key] = self.folder / options[key]
            rows = _call(dataset, {"kind": "", **options}, where=f"data: {split}")
        if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
            kind = type(rows).__name__
            raise CaptureError(
                f"data: {split}: not a dataset with a length", code="cli.config_data", found=kind
            )
        if limit is not None:
            from torch.utils.data import Subset

            count = _arguments.count(f"data: {split}: rows", limit, error=CaptureError, least=1)
            rows = Subset(rows, range(min(count, len(rows))))
        return DataLoader(rows, batch_size=self.batch_size)

    def weights(self) -> dict[str, Any]:
        """Return the weights of each checkpoint."""
        import gradkeep as gk

        weights: dict[str, Any] = {}
        for name, value in self.checkpoints.items():
            where = f"checkpoints: {name}"
            entry = _named(where, value) if isinstance(value, Mapping) else {"path": value}
            path = _arguments.file_path(f"{where}: path", entry.pop("path", ""), error=CaptureError)
            _arguments.optional(
                _arguments.count, f"{where}: step", entry.get("step"), error=CaptureError
            )
            _arguments.optional(
                _arguments.number, f"{where}: lr", entry.get("lr"), error=CaptureError
            )
            options = {"source": self.folder / path, **entry}
            weights[str(name)] = _call(gk.Weights, options, where=where)
        return weights


def read_config(path: str) -> CaptureConfig:
    """Read and validate a YAML file; errors about unknown keys suggest known ones."""
    content = parse_config(input_text(path, error=CaptureError), path=path, error=CaptureError)
    known = [part.name for part in fields(CaptureConfig) if part.name != "folder"]
    for key in content:
        one_of("a key", key, known, error=CaptureError, code="cli.config_unknown_key", path=path)
    missing = [key for key in ("store", "model", "data") if key not in content]
    if missing:
        raise CaptureError(
            f"the key {missing[0]!r} is missing", code="cli.config_missing_key", path=path
        )
    return CaptureConfig(**content, folder=Path(path).resolve().parent)


def first_batch(loader: DataLoader[Any]) -> Any:
    """Return the first batch of a loader."""
    for batch in loader:
        return batch
    raise CaptureError("the data set is empty", code="cli.empty_data")


def _named(where: str, value: object) -> dict[str, Any]:
    """Validate a mapping of names, which become keyword arguments."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise CaptureError(
            f"{where} must be a mapping of names",
            code="cli.config_not_a_mapping",
            found=short_repr(value),
        )
    return dict(value)


def _call_user(source: object, options: Mapping[str, Any], *, where: str, folder: Path) -> Any:
    """Import the function `module:name` and call it."""
    name = _arguments.text(f"{where}: from", source, error=CaptureError)
    return _call(import_object(name, str(folder), error=CaptureError), options, where=where)


def _call(function: Any, options: Mapping[str, Any], *, where: str) -> Any:
    """Call a function; arguments that it does not take are an error of the configuration."""
    if not callable(function):
        raise CaptureError(
            f"{where}: not a function",
            code="cli.config_not_a_function",
            found=type(function).__name__,
        )
    try:
        inspect.signature(function).bind(**options)
    except ValueError:
        pass  # a C function without a signature
    except TypeError as error:
        raise CaptureError(
            f"{where}: {error}", code="cli.config_import", found=", ".join(options) or "no options"
        ) from error
    return function(**options)


ConfigArgument = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A YAML file: store, model, checkpoints, data, ...")
]


_PASSED = (
    *("run", "name", "layers", "encoding", "keep", "tolerance", "of", "uncovered", "mode"),
    *("embeddings", "memory_budget"),
)
"""Keys that become arguments of `gk.capture` unchanged."""


def capture(
    config: ConfigArgument,
    split: list[str] | None = None,
    json: JsonOption = False,
    *,
    worker_options: WorkerOptions,
) -> None:
    """Replay checkpoints over data and store per-sample gradients; an interrupted run resumes.

    With --workers, several processes capture, here or on a cluster; the bytes are the same.

    Options:
        split: Only this split; repeatable.
    """
    import gradkeep as gk

    settings = read_config(config)
    arguments = worker_options.arguments()
    for name in split or []:
        settings.loader(name)  # fail before the first split is captured
    model, task = settings.build_model(), settings.build_task()
    store = gk.open(settings.folder / settings.store)
    captures: list[Captured] = []
    for name in split or list(settings.data):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gk.CaptureWarning)  # the notes are printed below
            options: dict[str, Any] = {
                "checkpoints": settings.weights() or "final",
                "task": task,
                "split": name,
                **{key: getattr(settings, key) for key in _PASSED},
                **arguments,
            }
            captured = gk.capture(store, model, settings.loader(name), **options)
        captured = captured if isinstance(captured, list) else [captured]
        captures += captured
        if not json:
            print(*captured, sep="\n")
    if json:
        print_json([dataclasses.replace(report, store=None) for report in captures])
    else:
        print(f"next: gradkeep attribute {store.location}")


def plan(
    config: ConfigArgument,
    train: str = "train",
    queries: str = "test",
    memory_budget: Bytes | None = None,
    keep: Bytes | None = None,
    rows: str | None = None,
    workers: Annotated[int | None, typer.Option(min=1, max=1_000_000)] = None,
    place: Annotated[str, typer.Option("--store")] = "local",
    disk_budget: Bytes | None = None,
    json: JsonOption = False,
) -> None:
    """Estimate the cost of capturing and querying, per layer, before anything runs.

    With --workers, --store s3 or many more --rows, also estimates the cost at that scale.

    Options:
        train: Split of the training rows.
        queries: Split of the queries.
        memory_budget: For example 512MiB.
        keep: Bytes per row, such as 16KiB; default: as in CONFIG.
        rows: Plan for this many rows, such as 1e9.
        workers: Plan for this many workers.
        place: Plan for a store on local or s3.
        disk_budget: Default: the free space of this disk.
    """
    import gradkeep as gk

    one_of("--store", place, words=("local", "s3"), error=CaptureError)
    settings = read_config(config)
    loader = settings.loader(train)
    available = len(loader.dataset)  # type: ignore[arg-type]
    num_rows = available if rows is None else _parse_rows(rows)
    planned = gk.plan(
        settings.build_model(),
        first_batch(loader),
        task=settings.build_task(),
        rows=num_rows,
        queries=len(settings.loader(queries).dataset),  # type: ignore[arg-type]
        layers=settings.layers,
        encoding=settings.encoding,  # type: ignore[arg-type]
        keep=settings.keep if keep is None else keep,
        tolerance=settings.tolerance,
        disk_budget=disk_budget,
        memory_budget=memory_budget if memory_budget is not None else settings.memory_budget,
        mode=settings.mode,  # type: ignore[arg-type]
    )
    scaled = None
    if workers is not None or place != "local" or num_rows > 10 * available:
        scaled = planned.at_scale(
            rows=num_rows,
            workers=workers or 1,
            place=place,  # type: ignore[arg-type]
            load_seconds=_time_loading(loader),
        )
    if json:
        print_json(dataclasses.asdict(planned) | ({} if scaled is None else {"scale": scaled}))
    else:
        print(planned)
        if scaled is not None:
            print(scaled)


def _parse_rows(text: str) -> int:
    """Parse a number of rows.

    >>> _parse_rows("1e9"), _parse_rows("2_000")
    (1000000000, 2000)
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1 <= number < 2**53 or not number.is_integer():
        raise CaptureError(
            "--rows must be a whole number such as 1e9", code="cli.rows", found=text[:80]
        )
    return int(number)


def _time_loading(loader: Any) -> float:
    """Measure the seconds of loading one row, on the first batches."""
    began, rows = time.process_time(), 0
    for batch in loader:
        first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        rows += len(first)
        if time.process_time() - began > 0.3:  # enough for an estimate
            break
    return (time.process_time() - began) / max(1, rows)
