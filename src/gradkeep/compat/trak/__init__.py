"""TRAK under its own names: `from gradkeep.compat.trak import TRAKer` in place of `from trak import TRAKer`.

What is computed and kept is done by gradkeep: factors and sketches in place of dense matrices, a
store in place of memory maps.
"""

from gradkeep.compat.trak._imported import ImportedScores, import_save_dir
from gradkeep.compat.trak.traker import TRAKer
from gradkeep.compat.trak.utils import test_install

__version__ = "0.3.2"
"""The release whose names and signatures these are."""
VERSION = __version__

__all__ = ["VERSION", "ImportedScores", "TRAKer", "__version__", "import_save_dir", "test_install"]
