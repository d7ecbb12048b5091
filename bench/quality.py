"""How true attributions are: every method's score with its interval and price, on a board of settings.

`./x bench quality [SETTING ...] [--full]`: trains models on random halves, captures, asks every method,
and writes what it prints into `docs/benchmarks.md`; settings that are not named keep their section there. Each
is sized for one core and some minutes; `--full` takes more subsets, seeds and models. Exits 1 where a bar
is missed. Data from GRADKEEP_DATA.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence

import torch

import gradkeep as gk
from bench import _quality_board as board
from bench import _quality_labels as labels
from bench import _quality_resnet as resnet
from bench import _quality_settings as settings
from bench import _quality_text as text

SETTINGS: dict[str, Callable[[bool], board.Section]] = {
    "digits": settings.digits,
    "mnist-mlp": settings.mnist_mlp,
    "mnist-logistic": settings.mnist_logistic,
    "digits-flipped": settings.digits_flipped,
    "cifar2": resnet.cifar2,
    "agnews": text.agnews,
    "gpt": text.gpt,
    "stories260k": text.stories,
    "labels-digits": labels.digits,
    "labels-mnist": labels.mnist,
    "labels-cifar": labels.cifar,
}


def main(arguments: Sequence[str]) -> int:
    full = "--full" in arguments
    named = [one for one in arguments if one != "--full"]
    unknown = [one for one in named if one not in SETTINGS]
    if unknown:
        sys.exit(f"no setting {', '.join(unknown)}; there are {', '.join(SETTINGS)}")
    missed = False
    for name in named or SETTINGS:
        began = time.process_time()
        try:
            with tempfile.TemporaryDirectory(prefix="gradkeep-quality-") as place:
                tempfile.tempdir = place  # deletes the stores of a setting with it
                section = SETTINGS[name](full)
        except FileNotFoundError as error:
            print(f"{name}: skipped, no data ({error.filename or error}); set GRADKEEP_DATA")
            continue
        finally:
            tempfile.tempdir = None
        took = time.process_time() - began
        section = board.add_total_seconds(section, took)
        print(section, flush=True)
        board.write_page([section], list(SETTINGS))
        missed |= section.missed
    return int(missed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", gk.CaptureWarning)
    sys.exit(main(sys.argv[1:]))
