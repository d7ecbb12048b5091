"""Call public functions with one bad argument at a time: each must return, or raise a GradkeepError.

`./x bench fuzz_api [CALLS]` prints the number tried, ok, refused, wrong, ugly and hung; all calls by
default.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import api_fuzz as fuzz
import api_fuzz_calls


def main(count: int | None = None) -> int:
    """Print the figures; return 1 if anything was wrong, ugly or hung."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.chdir(fuzz.deep_folder(Path(folder)))
        known = api_fuzz_calls.calls(api_fuzz_calls.World(Path(folder)))
        for call in known:
            if call.name not in fuzz.REFUSED_AS_THEY_ARE:
                call.function(**call.good())
        outcomes = fuzz.try_all(
            fuzz.tries(known, count, seed=0), output=lambda text: print(text, flush=True)
        )
    print(f"{len(known)} functions  {outcomes}  in {time.monotonic() - began:.0f} s")
    return int(bool(outcomes.bad))


if __name__ == "__main__":
    sys.exit(main(*(int(word) for word in sys.argv[1:])))
