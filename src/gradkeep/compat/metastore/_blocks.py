"""Layers by MetaStore's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
                f"{where}: no layer {name!r}: {', '.join([*there[:3], '...', *there[-3:]])}",
                path=experiment.config,
                expected="'net_' and the path of a layer, such as net_conv13",
                fix="gradkeep.compat.metastore.unwrap(model, 'net', types) lists them",
            )
        if len(paths) > 1:
            raise CaptureError(
                f"{where}: {name!r} means two layers: {', '.join(paths)}",
                path=experiment.config,
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
