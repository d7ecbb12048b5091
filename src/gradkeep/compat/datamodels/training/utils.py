"""Names that scripts import."""

from gradkeep.datamodels import load_memmap

__all__ = ["load_memmap"]
