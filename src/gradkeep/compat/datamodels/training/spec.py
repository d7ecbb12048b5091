"""Names that scripts import."""

from gradkeep.datamodels.study._spec import COMPLETED

__all__ = ["COMPLETED"]
