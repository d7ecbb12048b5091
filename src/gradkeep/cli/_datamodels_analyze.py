"""`gradkeep datamodels fit` and `analyze`: from trained models to what the data did."""

from __future__ import annotations

import dataclasses
import os
import zipfile
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep._arguments import shown, whole_numbers
from gradkeep.cli._datamodels import (
    NameOption,
    open_models,
)
from gradkeep.cli._files import MAX_COUNT, MAX_WORKERS, input_file, input_text
from gradkeep.cli._imports import import_object
from gradkeep.cli._options import JsonOption, StoreArgument, print_json
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradkeep.datamodels import Datamodels, Study, VerifiedRemovals
    from gradkeep.store import Store

MasksOption = Annotated[str, typer.Option("--masks", help="The array of masks.")]
OutputOption = Annotated[
    str | None, typer.Option("--output", help="The array of outputs, if there are several.")
]
_TRAINED = ("memorisation", "curve", "values")
_FITTED = (
    *("top", "support", "removal", "leakage", "duplicates", "neighbours", "components"),
    *("clusters", "groups", "compare", "verify"),
)
_EVERY = ", ".join((*_FITTED, *_TRAINED))


def fit(
    store: StoreArgument,
    save: Annotated[str, typer.Option("--save", help="The name of the fit in the store.")],
    name: NameOption = None,
    masks: MasksOption = "masks",
    output: OutputOption = None,
    penalty: Annotated[
        str | None,
        typer.Option(
            "--penalty",
            help="l1, elastic, ridge or means; by default l1, with few models ridge.",
            show_default=False,
        ),
    ] = None,
    lambdas: Annotated[
        int, typer.Option("--lambdas", min=1, max=10_000, help="How many to try.")
    ] = 20,
    folds: Annotated[
        int | None,
        typer.Option("--folds", min=2, max=MAX_COUNT, help="Leave out all models in turn."),
    ] = None,
    memory_budget: Annotated[
        str | None, typer.Option("--memory-budget", help="Bytes to stay within, such as 4GiB.")
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=2**63 - 1, help="Which models are left out.")
    ] = 0,
    json: JsonOption = False,
) -> None:
    """Fit how each output depends on which training examples a model saw, from the models done."""
    from gradkeep import datamodels
    from gradkeep._display import progress

    opened = open_models(store)
    subsets, outputs = _trained_data(opened, name, masks, output)
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


def _trained_data(
    opened: Store, name: str | None, masks: str, output: str | None
) -> tuple[Any, Any]:
    """The masks `[m, n]` and outputs `[m, t]` of the models that are done."""
    import numpy as np

    from gradkeep.datamodels.study._contract import models_of

    rows = models_of(opened, name)
    names = [array.name for array in rows.schema.arrays]
    others = [
        array.name
        for array in rows.schema.arrays
        if array.name not in (masks, "weights") and array.dtype.startswith("float")
    ]
    chosen = others[0] if output is None and len(others) == 1 else output
    if masks not in names or chosen not in names:
        raise DatamodelsError(
            "which arrays hold masks and outputs?",
            path=rows.path,
            found=f"--masks {masks}, --output {chosen}",
            expected=", ".join(names),
        )
    done = rows.done()
    if len(done) == 0:
        raise DatamodelsError("no model is done yet", path=rows.path, fix="gradkeep datamodels run")
    found = rows.read(done, [masks, chosen])
    return found[masks], np.asarray(found[chosen], np.float32).reshape(len(done), -1)


def analyze(
    store: StoreArgument,
    what: Annotated[str, typer.Argument(metavar="WHAT", help=f"One of {_EVERY}.")],
    fit: Annotated[str | None, typer.Option("--fit", help="The name of a saved fit.")] = None,
    count: Annotated[
        int, typer.Option("--count", min=1, max=MAX_COUNT, help="How many to show of each.")
    ] = 10,
    targets: Annotated[
        str | None, typer.Option("--targets", help="Of top and verify: which, such as 0,3,7.")
    ] = None,
    remove: Annotated[
        list[str] | None,
        typer.Option(
            "--remove",
            help="Of removal and verify: examples to leave out, such as 0,4; repeatable.",
        ),
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(
            "--groups", help="Of groups: each example's, FILE.npy, FILE.npz:NAME or lines of text."
        ),
    ] = None,
    target_groups: Annotated[
        str | None, typer.Option("--target-groups", help="Of groups: the same for targets.")
    ] = None,
    other: Annotated[
        str | None, typer.Option("--with", help="Of compare: the name of the other fit.")
    ] = None,
    other_store: Annotated[
        Path | None, typer.Option("--with-store", help="Of compare: where that is, if elsewhere.")
    ] = None,
    study: Annotated[
        str | None,
        typer.Option("--study", help="Of verify: module:name of a Study, or of what makes it."),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option("--repeats", min=1, max=MAX_COUNT, help="Of verify: trainings of each set."),
    ] = 1,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", min=0, max=MAX_WORKERS, help="Of verify: by default one per core."
        ),
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

    if what not in (*_FITTED, *_TRAINED):
        raise DatamodelsError("there is no such analysis", found=what, expected=_EVERY)
    opened = open_models(store)
    chosen = None if targets is None else _numbers("targets", targets)
    asked: dict[str, Callable[[], Any]]
    if what in _TRAINED:
        subsets, outputs = _trained_data(opened, name, masks, output)
        asked = {
            "memorisation": lambda: datamodels.memorisation(subsets, outputs),
            "curve": lambda: datamodels.learning_curve(subsets, outputs, _numbers("sizes", sizes)),
            "values": lambda: datamodels.values(subsets, outputs.mean(axis=1)),
        }
    else:
        found = _loaded(opened, fit)
        asked = {
            "top": lambda: datamodels.top(found, count, targets=chosen),
            "support": lambda: datamodels.data_support(found),
            "removal": lambda: datamodels.counterfactual(found, _one_set(remove)),
            "leakage": lambda: datamodels.leakage(found),
            "duplicates": lambda: datamodels.near_duplicates(found),
            "neighbours": lambda: datamodels.neighbours(found, count),
            "components": lambda: datamodels.components(found, count),
            "clusters": lambda: datamodels.clusters(found, count),
            "groups": lambda: datamodels.by_group(
                found,
                _labels_of("groups", groups),
                target_groups=target_groups and _labels_of("target-groups", target_groups),
            ),
            "compare": lambda: datamodels.compare(
                found,
                _loaded(
                    stores.open(other_store, create=False) if other_store else opened,
                    other,
                    option="--with",
                ),
                count,
            ),
            "verify": lambda: _verified(
                found, study, remove, count, chosen, output, repeats=repeats, workers=workers
            ),
        }
    answer = asked[what]()
    if json:
        print_json(_plain(answer))
    else:
        _show(answer)


def _verified(
    found: Datamodels,
    where: str | None,
    remove: list[str] | None,
    count: int,
    targets: Sequence[int] | None,
    output: str | None,
    **options: Any,
) -> VerifiedRemovals:
    """Trainings without the sets that were given, or the top examples of each target, and a control."""
    from gradkeep import datamodels

    study = _study_of(where)
    if remove:
        sets: list[Any] = [_numbers("remove", one) for one in remove]
    else:
        best = datamodels.top(found, count, targets=targets)
        sets = [ids[ids >= 0] for ids in best.positive]
    return study.verify_removals(found, sets, output=output, control=True, **options)


def _loaded(opened: Store, name: str | None, *, option: str = "--fit") -> Datamodels:
    from gradkeep import datamodels

    if name is None:
        raise DatamodelsError(
            "which fit?",
            expected=" or ".join(key.name for key in opened.scores()) or "none is saved yet",
            fix=f"{option} NAME, as `gradkeep datamodels fit STORE --save NAME` called it",
        )
    return datamodels.load(opened, name)


def _one_set(remove: list[str] | None) -> list[int]:
    if remove is None or len(remove) != 1:
        raise DatamodelsError("removal takes one --remove", found=remove, expected="such as 0,3,7")
    return _numbers("remove", remove[0])


def _numbers(what: str, given: str | None) -> list[int]:
    try:
        numbers = [int(word) for word in (given or "").split(",")]
        found: list[int] = whole_numbers(what, numbers, error=DatamodelsError).tolist()
    except ValueError:
        raise DatamodelsError(
            f"--{what} is wrong", found=shown(given), expected="whole numbers, such as 0,3,7"
        ) from None
    return found


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
    """Print an answer: records of arrays field by field, some in words of their own."""
    from gradkeep.datamodels import Groups, TopExamples, VerifiedRemovals

    if isinstance(answer, VerifiedRemovals):
        print(answer)
    elif isinstance(answer, TopExamples):
        for place, target in enumerate(answer.targets):
            best = ", ".join(_weighed(answer.positive, answer.positive_weights, place))
            worst = ", ".join(_weighed(answer.negative, answer.negative_weights, place))
            print(
                f"target {target}\n    helped by {best or 'none'}\n    hurt by   {worst or 'none'}"
            )
    elif isinstance(answer, Groups):
        for column, target in enumerate(answer.columns):
            print(f"target {target}")
            for place, name in enumerate(answer.names):
                total, share = answer.total[place, column], answer.share[place, column]
                count = answer.counts[place]
                print(f"    {name}  {total:+.3g} by {count} examples, {share:.0%} of all weight")
    else:
        _show_fields(answer)


def _weighed(ids: Any, weights: Any, place: int) -> list[str]:
    pairs = zip(ids[place], weights[place], strict=True)
    return [f"{example} ({weight:+.3g})" for example, weight in pairs if example >= 0]


def _show_fields(answer: Any, indent: str = "") -> None:
    import numpy as np

    for field in dataclasses.fields(answer):
        value = getattr(answer, field.name)
        if isinstance(value, np.ndarray):
            text = np.array2string(value, precision=3, threshold=200, edgeitems=5)
            shape = " x ".join(map(str, value.shape))
            inner = f"\n{indent}    "
            print(f"{indent}{field.name} [{shape}]{inner}" + text.replace("\n", inner))
        elif dataclasses.is_dataclass(value):
            print(f"{indent}{field.name}")
            _show_fields(value, indent + "    ")
        else:
            print(f"{indent}{field.name}  {value}")


def _labels_of(option: str, source: str | None) -> Any:
    """One label each `[n]`: of an .npy file, an array of an .npz file, or lines of text."""
    import numpy as np

    if source is None:
        raise DatamodelsError(
            f"--{option} is missing", expected="FILE.npy, FILE.npz:NAME, or a file of lines"
        )
    file, name = source, ""
    if ".npz:" in source and not os.path.exists(source):
        file, _, name = source.rpartition(":")
    if not file.endswith((".npy", ".npz")):
        return np.array(input_text(file, error=DatamodelsError).splitlines())
    input_file(file, error=DatamodelsError)
    try:
        with open(file, "rb") as opened:  # numpy leaves a broken archive open
            read = np.load(opened)
            if file.endswith(".npy"):
                return read
            arrays = dict(read)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DatamodelsError(f"--{option} cannot be read", path=file, found=error) from error
    if not name and len(arrays) == 1:
        return next(iter(arrays.values()))
    if name not in arrays:
        raise DatamodelsError(
            "which array holds the groups?",
            path=file,
            found=name or None,
            expected=", ".join(arrays),
            fix=f"--{option} {file}:NAME",
        )
    return arrays[name]


def _study_of(where: str | None) -> Study:
    """The study that `module:name` is or makes, also in modules of this folder."""
    from gradkeep.datamodels import Study

    if where is None:
        raise DatamodelsError(
            "which study trained these models? To train again, its data and training are needed",
            expected="--study module:name, a Study or a function that returns it",
        )
    found: Any = import_object(where, "", error=DatamodelsError)  # "": as `python -m` does
    if callable(found) and not isinstance(found, type):
        found = found()
    if not isinstance(found, Study):
        raise DatamodelsError("--study names no study", path=where, found=type(found).__name__)
    return found
