"""`gradkeep demo`: see it work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradkeep.cli._inputs import output_folder
from gradkeep.errors import StoreError


def demo(
    out: Annotated[
        Path | None, typer.Option(show_default="gradkeep-demo, or gradkeep-demo-text")
    ] = None,
    text: bool = False,
    seeds: Annotated[int, typer.Option(min=1, max=1000)] = 5,
) -> None:
    """Train on real digits with wrong labels planted, find them, and retrain without them.

    One mistake is explained by groups of rows, scores are held against models trained on random
    halves, a network is trained in half of its memory, a writer is killed and resumed, and a bit is
    flipped and found. With --text, false sentences are planted in documents, and found by what they
    made a language model say. Every number is computed in this run.

    Options:
        out: Where the demo's store goes.
        text: A small language model and its documents instead.
        seeds: Retrainings that each accuracy is a mean of.
    """
    where = out or Path("gradkeep-demo-text" if text else "gradkeep-demo")
    output_folder(where, error=StoreError)
    if text:
        from gradkeep.cli._demo_text import run_text_demo

        run_text_demo(where)
        return
    from gradkeep.cli._demo_digits import run_digits_demo

    run_digits_demo(where, seeds=seeds)
