"""TRAK under its own names: replace `from trak import TRAKer` by `from gradkeep.compat.trak import TRAKer`.

The implementation is gradkeep's: factors and sketches instead of dense matrices, a store instead of
memory maps.
"""

from gradkeep.compat.trak._imported import ImportedScores, import_save_dir
from gradkeep.compat.trak.traker import TRAKer
from gradkeep.compat.trak.utils import test_install

__version__ = "0.3.2"
"""Release whose names and signatures these are."""
VERSION = __version__

__all__ = ["VERSION", "ImportedScores", "TRAKer", "__version__", "import_save_dir", "test_install"]
