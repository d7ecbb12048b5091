"""The plain simulator lies beside the tests, which import it by its name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
