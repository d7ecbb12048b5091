"""Names that scripts import."""

from gradkeep.compat.datamodels._npy_folder import load_memmap

__all__ = ["load_memmap"]
