"""Run malformed command lines: each must succeed, or print an error with a documented exit code.

`./x bench fuzz_cli [LINES] [SEED]` prints the number tried, ok, refused, wrong, ugly and hung.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import command_fuzz as fuzz

PROCESSES = 25
"""Every 25th line is also run in a separate process."""


def run_process(arguments, box, patience):
    """Run a command line in a separate process, as a shell would."""
    import os

    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "gradkeep", *arguments],
        cwd=box.work,
        env={**os.environ, **box.environment()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=patience + 15)  # loading torch is slow
            code = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            code = None
    texts = (out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))
    return fuzz.Ended(code, *texts, time.monotonic() - began)


def main(count: int = 4180, seed: int = 0) -> int:
    """Print the figures; return 1 if anything was wrong, ugly or hung."""
    fuzz.preload()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        box = fuzz.Sandbox(Path(folder) / "box")
        command_lines = list(fuzz.lines(count, seed))

        def show(text: str) -> None:
            print(text, flush=True)

        in_forks = fuzz.try_lines(command_lines, box, output=show)
        print(f"in forks      {in_forks}", flush=True)
        as_processes = fuzz.try_lines(command_lines[::PROCESSES], box, run=run_process, output=show)
        print(f"as processes  {as_processes}")
    print(f"{time.monotonic() - began:.0f} s")
    return int(bool(in_forks.bad or as_processes.bad))


if __name__ == "__main__":
    sys.exit(main(*(int(word) for word in sys.argv[1:])))
