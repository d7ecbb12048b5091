"""`gradkeep datamodels fit` and `analyze`: from trained models to what the data did."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep._errors import StudyError
from gradkeep.cli._datamodels import NameOption  # noqa: TC001 - typer reads it
from gradkeep.cli._options import JsonOption, StoreArgument  # noqa: TC001 - typer reads them
from gradkeep.cli._output import print_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradkeep.datamodels import Datamodels
    from gradkeep.store import Rows, Store

MasksOption = Annotated[str, typer.Option("--masks", help="The array of masks.")]
OutputOption = Annotated[
    str | None, typer.Option("--output", help="The array of outputs, if there are several.")
]
_TRAINED = ("memorisation", "curve", "values")
_FITTED = (
    *("top", "support", "removal", "leakage", "duplicates", "neighbours", "components"),
    *("clusters",),
)


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
    subsets, outputs = _data(rows, masks, output)
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
            "held_out": None if held is None else _plain(held),
            "unfinished": list(found.unfinished),
        }
        print_json(fields)
        return
    print(found)


def analyze(
    store: StoreArgument,
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help=f"One of {', '.join((*_FITTED, *_TRAINED))}.")
    ],
    fit: Annotated[str | None, typer.Option("--fit", help="The name of a saved fit.")] = None,
    count: Annotated[int, typer.Option("--count", min=1, help="How many to show of each.")] = 10,
    targets: Annotated[
        str | None, typer.Option("--targets", help="Of top: which, such as 0,3,7.")
    ] = None,
    remove: Annotated[
        str | None, typer.Option("--remove", help="Of removal: examples to leave out, by number.")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option("--sizes", help="Of curve: numbers of models, such as 100,400.")
    ] = None,
    name: NameOption = None,
    masks: MasksOption = "masks",
    output: OutputOption = None,
    json: JsonOption = False,
) -> None:
    """Ask a fit, or the trained models themselves, what the data did."""
    import gradkeep.store as stores
    from gradkeep import datamodels

    opened = stores.open(store, create=False)
    if what in _FITTED:
        answer = _of_fit(what, _loaded(opened, fit), count, targets, remove)
    elif what in _TRAINED:
        subsets, outputs = _data(datamodels.models_of(opened, name), masks, output)
        asked: dict[str, Callable[[], Any]] = {
            "memorisation": lambda: datamodels.memorisation(subsets, outputs),
            "curve": lambda: datamodels.learning_curve(subsets, outputs, _numbers("sizes", sizes)),
            "values": lambda: datamodels.values(subsets, outputs.mean(axis=1)),
        }
        answer = asked[what]()
    else:
        raise StudyError(
            "there is no such analysis", found=what, expected=", ".join((*_FITTED, *_TRAINED))
        )
    if json:
        print_json(_plain(answer))
    elif what == "top":
        for place, target in enumerate(answer.targets):
            best = ", ".join(_weighed(answer.positive, answer.positive_weights, place))
            worst = ", ".join(_weighed(answer.negative, answer.negative_weights, place))
            print(
                f"target {target}\n    helped by {best or 'none'}\n    hurt by   {worst or 'none'}"
            )
    else:
        _show(answer)


def _of_fit(
    what: str, found: Datamodels, count: int, targets: str | None, remove: str | None
) -> Any:
    from gradkeep import datamodels

    chosen = None if targets is None else _numbers("targets", targets)
    asked: dict[str, Callable[[], Any]] = {
        "top": lambda: datamodels.top(found, count, targets=chosen),
        "support": lambda: datamodels.data_support(found),
        "removal": lambda: datamodels.counterfactual(found, _numbers("remove", remove)),
        "leakage": lambda: datamodels.leakage(found),
        "duplicates": lambda: datamodels.near_duplicates(found),
        "neighbours": lambda: datamodels.neighbours(found, count),
        "components": lambda: datamodels.components(found, count),
        "clusters": lambda: datamodels.clusters(found, count),
    }
    return asked[what]()


def _loaded(opened: Store, name: str | None) -> Datamodels:
    from gradkeep import datamodels

    if name is None:
        raise StudyError(
            "which fit?",
            expected=" or ".join(key.name for key in opened.scores()) or "none is saved yet",
            fix="--fit NAME, as `gradkeep datamodels fit STORE --save NAME` called it",
        )
    return datamodels.load(opened, name)


def _data(rows: Rows, masks: str, output: str | None) -> tuple[Any, Any]:
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


def _numbers(what: str, given: str | None) -> list[int]:
    try:
        return [int(word) for word in (given or "").split(",")]
    except ValueError:
        raise StudyError(
            f"--{what} is wrong", found=repr(given), expected="whole numbers, such as 0,3,7"
        ) from None


def _weighed(ids: Any, weights: Any, place: int) -> list[str]:
    pairs = zip(ids[place], weights[place], strict=True)
    return [f"{example} ({weight:+.3g})" for example, weight in pairs if example >= 0]


def _plain(value: Any) -> Any:
    """The values of a record of arrays, as lists and numbers."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _show(answer: Any) -> None:
    import numpy as np

    for field in dataclasses.fields(answer):
        value = getattr(answer, field.name)
        if isinstance(value, np.ndarray):
            text = np.array2string(value, precision=3, threshold=200, edgeitems=5)
            shape = " x ".join(map(str, value.shape))
            print(f"{field.name} [{shape}]\n    " + text.replace("\n", "\n    "))
        else:
            print(f"{field.name}  {value}")
