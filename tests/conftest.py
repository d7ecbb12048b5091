"""Hypothesis profiles: `local` explores anew in every run, `ci` draws the same examples each time.

HYPOTHESIS_PROFILE chooses one by name; otherwise the variable CI does.
"""

import os

from hypothesis import settings

# No deadline: the first example pays for imports and cold caches, and machines differ.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "local")
)
