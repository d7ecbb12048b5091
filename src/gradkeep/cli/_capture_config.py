"""The file that `gradkeep capture` and `gradkeep plan` read: a model, its weights, data, choices."""

from __future__ import annotations

import difflib
import importlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader

    from gradkeep.capturing import Task

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

        options = dict(self.model)
        source = options.pop("from", None)
        if source is not None:
            made = _imported(source, self.folder)(**options)
        elif "name" in options:
            made = model(options.pop("name"), **options)
        else:
            raise CaptureError("model: neither name nor from", expected="name: mlp, for example")
        network: nn.Module = made.to(self.device)
        return network

    def make_task(self) -> Task:
        """The task."""
        import gradkeep as gk

        given = {"name": self.task} if isinstance(self.task, str) else dict(self.task)
        name = str(given.pop("name", ""))
        if ":" in name:
            made = _imported(name, self.folder)(**given)
        elif name in _TASKS:
            made = getattr(gk, _TASKS[name])(**given)
        else:
            raise CaptureError(f"no task {name!r}", expected=f"{', '.join(_TASKS)} or module:Class")
        task: Task = made
        return task

    def loader(self, split: str) -> DataLoader[Any]:
        """The batches of a split, in the same order every time."""
        from torch.utils.data import DataLoader

        from gradkeep.data import dataset

        options = dict(self.data[split])
        source = options.pop("from", None)
        limit = options.pop("rows", None)
        if source is not None:
            found = _imported(source, self.folder)(**options)
        else:
            options.setdefault("split", split)
            for key in ("path", "vocabulary"):
                if isinstance(options.get(key), str):
                    options[key] = self.folder / options[key]
            found = dataset(options.pop("kind", ""), **options)
        if limit is not None:
            from torch.utils.data import Subset

            found = Subset(found, range(min(int(limit), len(found))))
        return DataLoader(found, batch_size=self.batch_size)

    def weights(self) -> dict[str, Any]:
        """Where the weights of each checkpoint are."""
        import gradkeep as gk

        found: dict[str, Any] = {}
        for name, given in self.checkpoints.items():
            entry = dict(given) if isinstance(given, Mapping) else {"path": given}
            path = self.folder / str(entry.pop("path"))
            found[str(name)] = gk.Weights(path, **entry)
        return found


def read_config(path: str) -> CaptureConfig:
    """The configuration in a YAML file; unknown keys are answered with the nearest known ones."""
    import yaml

    file = Path(path)
    try:
        content = yaml.safe_load(file.read_text())
    except FileNotFoundError:
        raise CaptureError("there is no such file", path=path) from None
    except yaml.YAMLError as error:
        raise CaptureError("this is not YAML", path=path, found=str(error)) from error
    if not isinstance(content, Mapping):
        raise CaptureError("a configuration is a mapping", path=path, found=type(content).__name__)
    content = dict(content)
    if "plan" in content and "keep" not in content:
        warnings.warn(
            f"{path}: the key plan is now keep; the old name goes away in the next version",
            DeprecationWarning,
            stacklevel=2,
        )
        content["keep"] = content.pop("plan")
    known = [part.name for part in fields(CaptureConfig) if part.name != "folder"]
    for key in content:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=2)
            raise CaptureError(
                f"no key {key!r}",
                path=path,
                expected=", ".join(known),
                fix=f"did you mean {' or '.join(near)}?" if near else None,
            )
    missing = [key for key in ("store", "model", "data") if key not in content]
    if missing:
        raise CaptureError(f"no {missing[0]!r}", path=path, expected="store, model and data")
    for key in ("model", "data"):
        if not isinstance(content[key], Mapping):
            raise CaptureError(f"{key} is not a mapping", path=path, found=repr(content[key])[:80])
    return CaptureConfig(folder=file.resolve().parent, **dict(content))


def first_batch(loader: DataLoader[Any]) -> Any:
    """The first batch of a loader."""
    for batch in loader:
        return batch
    raise CaptureError("the data set is empty")


def _imported(source: str, folder: Path) -> Any:
    """What `module:name` names, also in files beside the configuration."""
    import sys

    module, _, name = source.partition(":")
    if not name:
        raise CaptureError(f"{source!r} names no function", expected="module:function")
    sys.path.insert(0, str(folder))
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise CaptureError(f"{source!r} cannot be imported", found=str(error)) from error
    finally:
        sys.path.remove(str(folder))
