"""The file that `gradkeep capture` and `gradkeep plan` read: a model, its weights, data, choices."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep import _arguments
from gradkeep._arguments import shown
from gradkeep.cli._edges import input_text
from gradkeep.cli._imports import imported
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader

    from gradkeep.capturing.tasks._task import Task

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
        where, imported(_text(f"{where}: from", source), str(folder), error=CaptureError), options
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
