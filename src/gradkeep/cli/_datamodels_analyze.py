"""`gradkeep datamodels fit` and `analyze`: fit datamodels and analyze them."""

from __future__ import annotations

import dataclasses
import os
import zipfile
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep._arguments import one_of
from gradkeep._display import pick_fields
from gradkeep.cli._datamodels import NameOption, open_models
from gradkeep.cli._inputs import input_file, input_text, load_object
from gradkeep.cli._options import (
    MAX_COUNT,
    MAX_WORKERS,
    JsonOption,
    Positive,
    StoreArgument,
    missing_option,
    parse_numbers,
    print_json,
)
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradkeep.datamodels import Datamodels, Study, VerifiedRemovals
    from gradkeep.store import Store

MasksOption = Annotated[str, typer.Option("--masks", help="Array of masks.")]
OutputOption = Annotated[
    str | None, typer.Option("--output", help="Array of outputs, if there are several.")
]
_TRAINED = ("memorization", "curve", "values")
_FITTED = (
    *("top", "support", "removal", "leakage", "duplicates", "neighbors", "components"),
    *("clusters", "groups", "compare", "verify"),
)
_ANALYSES = ", ".join((*_FITTED, *_TRAINED))


def fit(
    store: StoreArgument,
    save: str,
    name: NameOption = None,
    masks: MasksOption = "masks",
    output: OutputOption = None,
    penalty: Annotated[str | None, typer.Option(show_default=False)] = None,
    lambdas: Annotated[int, typer.Option(min=1, max=10_000)] = 20,
    folds: Annotated[int | None, typer.Option(min=2, max=MAX_COUNT)] = None,
    memory_budget: str | None = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    json: JsonOption = False,
) -> None:
    """Fit each output as a function of the training subset, from the finished models.

    Options:
        save: Name of the fit in the store.
        penalty: l1, elastic, ridge or means; default: l1, or ridge for few models.
        lambdas: Penalties to try.
        folds: Cross-validation folds.
        memory_budget: For example 4GiB.
        seed: Seed of the held-out split.
    """
    from gradkeep import datamodels
    from gradkeep._display import progress

    opened = open_models(store)
    subsets, outputs = _trained_data(opened, name, masks, output)
    with progress("fit", "penalties") as update:
        result = datamodels.fit(
            subsets,
            outputs,
            penalty=penalty,
            lambdas=lambdas,
            folds=folds,
            memory_budget=memory_budget,
            seed=seed,
            progress=update,
        )
    result.save(opened, save)
    if not json:
        print(result)
        return
    examples, targets = result.weights.shape
    sizes = {"fit": save, "models": result.num_models, "examples": examples, "targets": targets}
    fields = pick_fields(result, "held_out", "unfinished")
    print_json({**sizes, "gap": float(result.gap.max()), **fields})


def _trained_data(
    opened: Store, name: str | None, masks: str, output: str | None
) -> tuple[Any, Any]:
    """Read the masks `[m, n]` and outputs `[m, t]` of the finished models."""
    import numpy as np

    from gradkeep.datamodels._contract import models_of

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
            "cannot choose the arrays of masks and outputs",
            code="cli.ambiguous_arrays",
            path=rows.path,
            found=", ".join(names),
            fix="Name them with --masks and --output.",
        )
    done = rows.done()
    if len(done) == 0:
        raise DatamodelsError(
            "no model is finished",
            code="cli.nothing_finished",
            path=rows.path,
            fix="gradkeep datamodels run",
        )
    arrays = rows.read(done, [masks, chosen])
    return arrays[masks], np.asarray(arrays[chosen], np.float32).reshape(len(done), -1)


def analyze(
    store: StoreArgument,
    what: Annotated[str, typer.Argument(metavar="WHAT", help=f"One of {_ANALYSES}.")],
    fit: str | None = None,
    count: Positive = 10,
    targets: str | None = None,
    remove: list[str] | None = None,
    groups: str | None = None,
    target_groups: str | None = None,
    other: Annotated[str | None, typer.Option("--with")] = None,
    other_store: Annotated[Path | None, typer.Option("--with-store")] = None,
    study: str | None = None,
    repeats: Positive = 1,
    workers: Annotated[int | None, typer.Option(min=0, max=MAX_WORKERS)] = None,
    sizes: str | None = None,
    name: NameOption = None,
    masks: MasksOption = "masks",
    output: OutputOption = None,
    json: JsonOption = False,
) -> None:
    """Analyze a fit or the trained models.

    Options:
        fit: Name of a saved fit.
        count: Examples to show of each.
        targets: For top and verify: targets such as 0,3,7.
        remove: For removal and verify: examples to remove, 0,4; repeatable.
        groups: For groups: FILE.npy, FILE.npz:NAME or a text file of labels.
        target_groups: For groups: the same for targets.
        other: For compare: the other fit.
        other_store: For compare: its store, if another.
        study: For verify: module:name of a Study or its factory.
        repeats: For verify: trainings per set.
        workers: For verify; default: one per core.
        sizes: For curve: numbers of models, 100,400.
    """
    import gradkeep.store as stores
    from gradkeep import datamodels

    one_of("WHAT", what, (*_FITTED, *_TRAINED), error=DatamodelsError, code="cli.unknown_analysis")
    opened = open_models(store)
    chosen = None if targets is None else parse_numbers("targets", targets, error=DatamodelsError)
    analyses: dict[str, Callable[[], Any]]
    if what in _TRAINED:
        subsets, outputs = _trained_data(opened, name, masks, output)
        analyses = {
            "memorization": lambda: datamodels.memorization(subsets, outputs),
            "curve": lambda: datamodels.learning_curve(
                subsets, outputs, parse_numbers("sizes", sizes, error=DatamodelsError)
            ),
            "values": lambda: datamodels.values(subsets, outputs.mean(axis=1)),
        }
    else:
        datamodel = _load_fit(opened, fit)
        analyses = {
            "top": lambda: datamodels.top(datamodel, count, targets=chosen),
            "support": lambda: datamodels.data_support(datamodel),
            "removal": lambda: datamodels.counterfactual(datamodel, _one_set(remove)),
            "leakage": lambda: datamodels.leakage(datamodel),
            "duplicates": lambda: datamodels.near_duplicates(datamodel),
            "neighbors": lambda: datamodels.neighbors(datamodel, count),
            "components": lambda: datamodels.components(datamodel, count),
            "clusters": lambda: datamodels.clusters(datamodel, count),
            "groups": lambda: datamodels.by_group(
                datamodel,
                _labels_of("groups", groups),
                target_groups=target_groups and _labels_of("target-groups", target_groups),
            ),
            "compare": lambda: datamodels.compare(
                datamodel,
                _load_fit(
                    stores.open(other_store, create=False) if other_store else opened,
                    other,
                    option="--with",
                ),
                count,
            ),
            "verify": lambda: _verified(
                datamodel, study, remove, count, chosen, output, repeats=repeats, workers=workers
            ),
        }
    answer = analyses[what]()
    if json:
        print_json(answer)
    else:
        _show(answer)


def _verified(
    fitted: Datamodels,
    where: str | None,
    remove: list[str] | None,
    count: int,
    targets: Sequence[int] | None,
    output: str | None,
    **options: Any,
) -> VerifiedRemovals:
    """Train without the given sets, or without the top examples of each target, and a control."""
    from gradkeep import datamodels

    study = _load_study(where)
    if remove:
        sets: list[Any] = [parse_numbers("remove", one, error=DatamodelsError) for one in remove]
    else:
        best = datamodels.top(fitted, count, targets=targets)
        sets = [ids[ids >= 0] for ids in best.positive]
    return study.verify_removals(fitted, sets, output=output, control=True, **options)


def _load_fit(opened: Store, name: str | None, *, option: str = "--fit") -> Datamodels:
    from gradkeep import datamodels

    if name is None:
        raise DatamodelsError(
            f"{option} is needed, the name of a saved fit",
            code="cli.missing_option",
            found=", ".join(key.name for key in opened.scores()) or "no saved fit",
            fix="gradkeep datamodels fit STORE --save NAME",
        )
    return datamodels.load(opened, name)


def _one_set(remove: list[str] | None) -> list[int]:
    if remove is None or len(remove) != 1:
        raise missing_option(DatamodelsError, "one --remove", "--remove 0,3,7")
    return parse_numbers("remove", remove[0], error=DatamodelsError)


def _show(answer: Any) -> None:
    """Print an answer: most field by field, some in a format of their own."""
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
    """Read one label each `[n]` from an .npy file, an array of an .npz file, or lines of text."""
    import numpy as np

    if source is None:
        fix = f"--{option} FILE.npy, FILE.npz:NAME or a text file"
        raise missing_option(DatamodelsError, "labels", fix)
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
        raise DatamodelsError(
            f"--{option} cannot be read", code="cli.unreadable_file", path=file, found=error
        ) from error
    if not name and len(arrays) == 1:
        return next(iter(arrays.values()))
    if name not in arrays:
        raise DatamodelsError(
            "the file has several arrays" if not name else f"the file has no array {name!r}",
            code="cli.ambiguous_arrays",
            path=file,
            found=", ".join(arrays),
            fix=f"--{option} {file}:NAME",
        )
    return arrays[name]


def _load_study(where: str | None) -> Study:
    """Load the study `module:name`, or the one that this function returns."""
    from gradkeep.datamodels import Study

    if where is None:
        what = "a Study, or a function that returns one"
        raise missing_option(DatamodelsError, what, "--study module:name")
    study = load_object(where, Study, error=DatamodelsError)
    if not isinstance(study, Study):
        raise DatamodelsError(
            "--study is not a Study", code="cli.not_a_study", path=where, found=type(study).__name__
        )
    return study
