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
    """Find the innermost layers of some types with their names, in the model's order.

    Args:
        model: The model.
        name: Prefix of the names.
        valid_layer: Types of layers to return.

    Returns:
        Pairs of name and layer.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Sequential(nn.Linear(4, 2)))
        >>> [name for name, _ in unwrap(model, "net", [nn.Linear, nn.Conv2d])]
        ['net_0', 'net_2_0']
    """
    children = list(model.named_children())
    if not children:
        return [(name, model)] if isinstance(model, tuple(valid_layer)) else []
    layers = []
    for child_name, child in children:
        layers += unwrap(child, f"{name}_{child_name}", valid_layer)
    return layers


def target_layers(experiment: MetaStoreExperiment, network: nn.Module) -> dict[str, str]:
    """Map MetaStore's name of each target layer to its path in the model.

    Raises `CaptureError` if a name matches no layer, two layers, or a type that is not in
    `valid_layer_types`. Dotted paths are accepted too.
    """
    from torch import nn

    kinds = {"linear": nn.Linear, "conv2d": nn.Conv2d}
    valid = tuple(kinds[kind] for kind in experiment.valid_layer_types)
    modules = {path: module for path, module in network.named_modules() if path}
    known: dict[str, list[str]] = {}
    for path in modules:
        known.setdefault("net_" + path.replace(".", "_"), []).append(path)
    where = f"target_model.{experiment.model_name}.target_layers"
    layers: dict[str, str] = {}
    for name in experiment.target_layers:
        paths = known.get(name, [name] if name in modules else [])
        if not paths:
            there = [layer for layer, _ in unwrap(network, "net", valid)]
            raise CaptureError(
                f"{where}: no layer {name!r}",
                code="compat.no_layer",
                path=experiment.config,
                found=", ".join([*there[:3], "...", *there[-3:]]),
                expected="'net_' and the path of a layer, such as net_conv13",
                fix="Call gradkeep.compat.metastore.unwrap(model, 'net', types) to list them.",
            )
        if len(paths) > 1:
            raise CaptureError(
                f"{where}: {name!r} matches two layers",
                code="compat.ambiguous_layer",
                path=experiment.config,
                found=", ".join(paths),
                fix="Use the path with dots.",
            )
        if not isinstance(modules[paths[0]], valid):
            raise CaptureError(
                f"{where}: {name!r} is a {type(modules[paths[0]]).__name__}",
                code="compat.layer_type",
                path=experiment.config,
                expected=f"system.valid_layer_types: {', '.join(experiment.valid_layer_types)}",
                fix="Name a layer of these types, or use gk.capture, which supports all types.",
            )
        layers[name] = paths[0]
    return layers
