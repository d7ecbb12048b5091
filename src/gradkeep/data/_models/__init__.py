"""Reference models: published architectures whose layers can be named, hooked and compared."""

from gradkeep.data._models._catalog import CLASSES, model, model_class, models

__all__ = ["CLASSES", "model", "model_class", "models"]
