"""Wrapped layers with MetaStore's names, and its blocks."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep._arguments import shown
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from gradkeep.compat.metastore._config import MetaStoreExperiment


def unwrap(
    model: nn.Module, name: str, valid_layer: Sequence[type[nn.Module]]
) -> list[tuple[str, nn.Module]]:
    """The innermost layers of these types with their names, in the model's order.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Sequential(nn.Linear(4, 2)))
    >>> [name for name, _ in unwrap(model, "net", [nn.Linear, nn.Conv2d])]
    ['net_0', 'net_2_0']
    """
    children = list(model.named_children())
    if not children:
        return [(name, model)] if isinstance(model, tuple(valid_layer)) else []
    found = []
    for child_name, child in children:
        found += unwrap(child, f"{name}_{child_name}", valid_layer)
    return found


def target_layers(experiment: MetaStoreExperiment, network: nn.Module) -> dict[str, str]:
    """MetaStore's name of each target layer to its path in the model.

    Such names can mean two layers; that is an error, as is one that means none or another type than
    `valid_layer_types` allow. Dotted paths are taken too.
    """
    from torch import nn

    kinds = {"linear": nn.Linear, "conv2d": nn.Conv2d}
    valid = tuple(kinds[kind] for kind in experiment.valid_layer_types)
    modules = {path: module for path, module in network.named_modules() if path}
    known: dict[str, list[str]] = {}
    for path in modules:
        known.setdefault("net_" + path.replace(".", "_"), []).append(path)
    where = f"target_model.{experiment.model_name}.target_layers"
    found: dict[str, str] = {}
    for name in experiment.target_layers:
        paths = known.get(name, [name] if name in modules else [])
        if not paths:
            there = [layer for layer, _ in unwrap(network, "net", valid)]
            raise CaptureError(
                f"{where}: no layer {name!r}",
                path=experiment.config,
                expected="'net_' and the path of a layer, such as net_conv13",
                found=", ".join([*there[:3], "...", *there[-3:]]),
                fix="gradkeep.compat.metastore.unwrap(model, 'net', types) lists them",
            )
        if len(paths) > 1:
            raise CaptureError(
                f"{where}: {name!r} means two layers",
                path=experiment.config,
                found=", ".join(paths),
                fix="write the path with dots",
            )
        if not isinstance(modules[paths[0]], valid):
            raise CaptureError(
                f"{where}: {name!r} is a {type(modules[paths[0]]).__name__}",
                path=experiment.config,
                expected=f"system.valid_layer_types: {', '.join(experiment.valid_layer_types)}",
                fix="name a layer of these types, or use gk.capture, which keeps all kinds",
            )
        found[name] = paths[0]
    return found


_MODEL = (
    *("model_name", "target_epoch", "trainer_path_path", "trainer_file_path", "checkpoint_path"),
    *("optimizer", "loss_func", "lr", "momentum", "weight_decay", "target_layers"),
    *("sizes", "vocab_file"),
)
_DATA = (
    *("data_name", "data_dir", "train_file", "dev_file", "test_file", "unlabeled_file"),
    *("data_loader", "num_analyzed_samples", "batch_size"),
)
KEYS: dict[str, tuple[str, ...]] = {
    "system": (
        *("out_dir_base", "out_result_dir", "out_meta_result_dir", "artifacts_store_base"),
        *("valid_methods", "valid_layer_types", "method", "operator_type", "device"),
        *("collect_artifacts", "quant", "float_precision", "io", "random_seed", "num_query"),
    ),
    "system.quant": ("use_quant", "quant_float_precision"),
    "system.io": (
        *("max_store_batch_size", "store_batch_size", "loader_max_batch_size"),
        *("gpu_memory_threshold", "gpu_memory_cache_threshold"),
    ),
    "target_model": _MODEL,
    "data": _DATA,
}
"""The keys of each block; `sizes` and `vocab_file` are ours, the others MetaStore's."""


@dataclass(frozen=True, slots=True)
class ConfigBlock:
    """One block of the file: its values are asked for by name, and refused by name."""

    path: str
    where: str
    """How the block is called in messages, such as `data.cifar10`."""
    values: Mapping[str, Any]

    @classmethod
    def checked(cls, path: str, where: str, values: object, kind: str) -> ConfigBlock:
        """The block, if it is a mapping with no other keys than its kind has."""
        if values is None:
            values = {}
        if not isinstance(values, Mapping):
            raise CaptureError(
                f"{where} is not a mapping", path=path, found=shown(values), fix="give it keys"
            )
        for key in values:
            if key not in KEYS[kind]:
                near = difflib.get_close_matches(str(key)[:80], KEYS[kind], n=1)
                raise CaptureError(
                    f"no key {shown(key)} in {where}",
                    path=path,
                    expected=", ".join(KEYS[kind]),
                    fix=f"did you mean {near[0]}?" if near else "take it out",
                )
        return cls(path, where, values)

    def inner(self, name: str) -> ConfigBlock:
        """A block inside of this one; an empty one where it is left out."""
        where = f"{self.where}.{name}"
        return ConfigBlock.checked(self.path, where, self.values.get(name), where)

    def refused(self, key: str, *, expected: object, fix: str) -> CaptureError:
        """The error for a value that cannot be what it is."""
        return CaptureError(
            f"{self.where}.{key} cannot be {shown(self.values.get(key))}",
            path=self.path,
            expected=expected,
            fix=fix,
        )

    def text(self, key: str, default: str) -> str:
        """Some text."""
        value = self.values.get(key, default)
        if not isinstance(value, str) or not value or "\0" in value:
            raise self.refused(key, expected="some text", fix=f"write {key}: {default!r}")
        return value

    def word(self, key: str, default: str, words: tuple[str, ...], *, fix: str) -> str:
        """One of the words that mean something."""
        value = self.text(key, default)
        if value not in words:
            raise self.refused(key, expected=" or ".join(words), fix=fix)
        return value

    def count(self, key: str, default: int, *, least: int = 1) -> int:
        """A whole number."""
        value = self.values.get(key, default)
        if type(value) is not int or not least <= value < 2**31:
            raise self.refused(
                key, expected=f"a whole number from {least}", fix=f"write {key}: {default}"
            )
        return value

    def share(self, key: str, default: float) -> float:
        """A number above 0, up to 1."""
        value = self.values.get(key, default)
        if type(value) not in (int, float) or not 0 < value <= 1:
            raise self.refused(key, expected="a share above 0, up to 1", fix=f"{key}: {default}")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key, default)
        if type(value) is not bool:
            raise self.refused(key, expected="true or false", fix=f"write {key}: {default}".lower())
        return value

    def texts(self, key: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        """A list of texts that is not empty."""
        value = self.values.get(key, default)
        if not isinstance(value, list | tuple) or not value:
            raise CaptureError(
                f"{self.where}: no {key}", path=self.path, found=shown(value), fix=f"list the {key}"
            )
        if not all(isinstance(item, str) and item for item in value):
            raise self.refused(key, expected="a list of names", fix="write each as text")
        return tuple(value)


def read_yaml(path: str) -> Mapping[str, Any]:
    """The mapping in a YAML file, or an error that names the file."""
    import yaml

    if not Path(path).is_file():
        raise CaptureError("there is no such configuration", path=path, fix="pass --config FILE")
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        found = " ".join(str(error).split())[:300]
        raise CaptureError(
            "this is not YAML", path=path, found=found, fix="correct the file"
        ) from None
    if not isinstance(content, Mapping):
        raise CaptureError(
            "a configuration is a mapping", path=path, expected="system, target_model, data"
        )
    return content
