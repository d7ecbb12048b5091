"""Names that scripts import."""

from gradkeep.datamodels.study import COMPLETED

__all__ = ["COMPLETED"]
