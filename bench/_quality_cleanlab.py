"""cleanlab in a separate environment: rank rows by their out-of-fold probabilities."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from bench._lm_truth import CACHE

VERSION = "2.9.0"
SCRIPT = """
import sys
import numpy as np
from cleanlab.filter import find_label_issues
from cleanlab.rank import get_label_quality_scores

arrays = np.load(sys.argv[1])
p, labels = arrays["probabilities"], arrays["labels"]
listed = find_label_issues(labels, p, return_indices_ranked_by="self_confidence", n_jobs=1)
np.savez(sys.argv[2], listed=listed, quality=get_label_quality_scores(labels, p, method="self_confidence"))
"""


def rank_rows(
    probabilities: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the suspicion of every row `[N]`, and the rows of `find_label_issues`, worst first."""
    try:
        python = _install()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"cleanlab: skipped, cleanlab {VERSION} cannot be installed here ({error})")
        return None
    with tempfile.TemporaryDirectory(prefix="gradkeep-") as place:
        inputs, results = Path(place) / "inputs.npz", Path(place) / "results.npz"
        np.savez(inputs, probabilities=probabilities, labels=labels)
        subprocess.run([str(python), "-c", SCRIPT, str(inputs), str(results)], check=True)
        with np.load(results) as archive:
            return 1 - archive["quality"], archive["listed"]


def _install() -> Path:
    """Return the interpreter of the environment, creating the environment if necessary."""
    folder = CACHE / f"cleanlab-{VERSION}"
    python, stamp = folder / "bin" / "python", folder / "installed"
    if not stamp.exists():
        print(f"installing cleanlab {VERSION} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, f"cleanlab=={VERSION}"], check=True)
        stamp.touch()
    return python
