"""Names that scripts import."""

from gradkeep.datamodels._spec import COMPLETED

__all__ = ["COMPLETED"]
