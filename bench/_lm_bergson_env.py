"""A separate environment for bergson, whose dependencies differ from those of gradkeep."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from bench._lm_truth import CACHE

VERSION = "2.5.1"
NEEDED = ("pyyaml", "rich", "safetensors", "typer", "xxhash")
"""Dependencies of gradkeep besides numpy and torch."""


def compare(rows: int, rounds: int) -> bool:
    """Run `_lm_bergson` in the environment; return True if a bar is missed."""
    try:
        python = install_bergson()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"\nbergson: skipped, bergson {VERSION} cannot be installed here ({error})")
        return False
    root = Path(__file__).resolve().parents[1]
    places = {
        "PYTHONPATH": os.pathsep.join(map(str, (root / "src", root))),
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [str(python), "-m", "bench._lm_bergson", str(rows), str(rounds)]
    sys.stdout.flush()
    code = subprocess.call(command, env=os.environ | places)
    if code not in (0, 1):
        print(f"bergson: the comparison ended with {code}")
    return code != 0


def install_bergson() -> Path:
    """Return the interpreter of the environment, creating the environment if necessary."""
    folder = CACHE / f"bergson-{VERSION}"
    python, stamp = folder / "bin" / "python", folder / "installed"
    if not stamp.exists():
        print(f"\ninstalling bergson {VERSION} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        # Both sides are measured with the same build of torch.
        pinned = f"torch=={torch.__version__.partition('+')[0]}"
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, pinned, f"bergson=={VERSION}", *NEEDED], check=True)
        # bergson requires these but does not use them; no builds match the CPU builds of torch.
        unused = ["uninstall", "--quiet", "--yes", "torchvision", "torchaudio"]
        subprocess.run([str(python), "-m", "pip", *unused], check=True)
        stamp.touch()
    return python
