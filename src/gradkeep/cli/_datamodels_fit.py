"""`gradkeep datamodels fit`: from trained models to what the data did."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep.cli._datamodels import NameOption  # noqa: TC001 - typer reads it
from gradkeep.cli._datamodels_answer import plain
from gradkeep.cli._output import JsonOption, StoreArgument, print_json
from gradkeep.errors import StudyError

if TYPE_CHECKING:
    from gradkeep.store import Rows

MasksOption = Annotated[str, typer.Option("--masks", help="The array of masks.")]
OutputOption = Annotated[
    str | None, typer.Option("--output", help="The array of outputs, if there are several.")
]


def fit(
    store: StoreArgument,
    save: Annotated[str, typer.Option("--save", help="The name of the fit in the store.")],
    name: NameOption = None,
    masks: MasksOption = "masks",
    output: OutputOption = None,
    penalty: Annotated[str, typer.Option("--penalty", help="l1, elastic, ridge or means.")] = "l1",
    lambdas: Annotated[int, typer.Option("--lambdas", min=1, help="How many to try.")] = 20,
    folds: Annotated[
        int | None, typer.Option("--folds", min=2, help="Leave out all models in turn.")
    ] = None,
    memory_budget: Annotated[
        str | None, typer.Option("--memory-budget", help="Bytes to stay within, such as 4GiB.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Which models are left out.")] = 0,
    json: JsonOption = False,
) -> None:
    """Fit how each output depends on which training examples a model saw, from the models done."""
    import gradkeep.store as stores
    from gradkeep import datamodels
    from gradkeep._progress import progress

    opened = stores.open(store, create=False)
    rows = datamodels.models_of(opened, name)
    subsets, outputs = trained_data(rows, masks, output)
    with progress("fit", "penalties") as told:
        found = datamodels.fit(
            subsets,
            outputs,
            penalty=penalty,
            lambdas=lambdas,
            folds=folds,
            memory_budget=memory_budget,
            seed=seed,
            progress=told,
        )
    found.save(opened, save)
    held = found.held_out
    if json:
        fields = {
            "fit": save,
            "models": found.num_models,
            "examples": found.weights.shape[0],
            "targets": found.weights.shape[1],
            "gap": float(found.gap.max()),
            "held_out": None if held is None else plain(held),
            "unfinished": list(found.unfinished),
        }
        print_json(fields)
        return
    print(found)


def trained_data(rows: Rows, masks: str, output: str | None) -> tuple[Any, Any]:
    """The masks `[m, n]` and outputs `[m, t]` of the models that are done."""
    import numpy as np

    names = [array.name for array in rows.schema.arrays]
    others = [
        array.name
        for array in rows.schema.arrays
        if array.name not in (masks, "weights") and array.dtype.startswith("float")
    ]
    chosen = others[0] if output is None and len(others) == 1 else output
    if masks not in names or chosen not in names:
        raise StudyError(
            "which arrays hold masks and outputs?",
            path=rows.path,
            found=f"--masks {masks}, --output {chosen}",
            expected=", ".join(names),
        )
    done = rows.done()
    if len(done) == 0:
        raise StudyError("no model is done yet", path=rows.path, fix="gradkeep datamodels run")
    found = rows.read(done, [masks, chosen])
    return found[masks], np.asarray(found[chosen], np.float32).reshape(len(done), -1)
