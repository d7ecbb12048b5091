"""Names that scripts import."""

from gradkeep.datamodels import COMPLETED

__all__ = ["COMPLETED"]
