"""Language models: cost and size of captures, and bergson on the same model.

`./x bench lm [price] [memory] [bergson] [lds]`: all of them by default.
price: CPU time and bytes of captures of three models, exact and in 4 and 16 KiB per row, against plain
passes. `--rows N` (2000) of the compressed captures, `--rounds N` (1); `--quick` is 256 rows in
three rounds; `--models gpt llama lora` selects models.
memory: peak memory of such captures, against training with Adam.
bergson: its default projection of 16 per side, on the same model and rows, in a separate environment
that is created on first use; skipped with a message if that fails.
lds: LDS by bytes per row (`./x bench lds gpt stories260k`).
The exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import warnings

import torch

import gradkeep as gk
from bench import _lm_bergson_env, _lm_price, lds

PARTS = ("price", "memory", "bergson", "lds")


def main() -> int:
    parser = argparse.ArgumentParser(prog="./x bench lm")
    parser.add_argument("parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--models", nargs="*", choices=_lm_price.MODELS, default=_lm_price.MODELS)
    options = parser.parse_args()
    rows, rounds = (256, 3) if options.quick else (options.rows, options.rounds)
    missed = []
    if "price" in options.parts:
        missed += [_lm_price.compare_prices(name, rows, rounds) for name in options.models]
    if "memory" in options.parts:
        missed += [_lm_price.compare_memory(name) for name in options.models]
    if "bergson" in options.parts:
        missed.append(_lm_bergson_env.compare(rows, rounds))
    if "lds" in options.parts:
        missed.append(bool(lds.main(["gpt", "stories260k"])))
    return int(any(missed))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", gk.CaptureWarning)
    sys.exit(main())
