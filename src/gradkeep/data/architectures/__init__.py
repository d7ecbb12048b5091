"""Published architectures: layers that can be named, hooked and compared, and workloads to train."""

from gradkeep.data.architectures._catalog import (
    CLASSES,
    Workload,
    build,
    checked_sizes,
    default_sizes,
    model,
    model_class,
    models,
    published_sizes,
    zoo,
)

__all__ = [
    "CLASSES",
    "Workload",
    "build",
    "checked_sizes",
    "default_sizes",
    "model",
    "model_class",
    "models",
    "published_sizes",
    "zoo",
]
