"""`gradkeep datamodels analyze`: what fits and trained models tell about the data."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep.cli._datamodels import NameOption  # noqa: TC001 - typer reads it
from gradkeep.cli._datamodels_answer import plain, show
from gradkeep.cli._datamodels_fit import MasksOption, OutputOption, trained_data
from gradkeep.cli._datamodels_named import labels_of, study_of
from gradkeep.cli._output import JsonOption, StoreArgument, print_json
from gradkeep.errors import StudyError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradkeep.datamodels import Datamodels, Verified
    from gradkeep.store import Store

_TRAINED = ("memorisation", "curve", "values")
_FITTED = (
    *("top", "support", "removal", "leakage", "duplicates", "neighbours", "components"),
    *("clusters", "groups", "compare", "verify"),
)
_EVERY = ", ".join((*_FITTED, *_TRAINED))


def analyze(
    store: StoreArgument,
    what: Annotated[str, typer.Argument(metavar="WHAT", help=f"One of {_EVERY}.")],
    fit: Annotated[str | None, typer.Option("--fit", help="The name of a saved fit.")] = None,
    count: Annotated[int, typer.Option("--count", min=1, help="How many to show of each.")] = 10,
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
        int, typer.Option("--repeats", min=1, help="Of verify: trainings of each set.")
    ] = 1,
    workers: Annotated[
        int | None, typer.Option("--workers", min=0, help="Of verify: by default one per core.")
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
        raise StudyError("there is no such analysis", found=what, expected=_EVERY)
    opened = stores.open(store, create=False)
    chosen = None if targets is None else _numbers("targets", targets)
    asked: dict[str, Callable[[], Any]]
    if what in _TRAINED:
        subsets, outputs = trained_data(datamodels.models_of(opened, name), masks, output)
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
                labels_of("groups", groups),
                target_groups=target_groups and labels_of("target-groups", target_groups),
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
        print_json(plain(answer))
    else:
        show(answer)


def _verified(
    found: Datamodels,
    where: str | None,
    remove: list[str] | None,
    count: int,
    targets: Sequence[int] | None,
    output: str | None,
    **options: Any,
) -> Verified:
    """Trainings without the sets that were given, or without the top examples of each target."""
    from gradkeep import datamodels

    study = study_of(where)
    if remove:
        sets: list[Any] = [_numbers("remove", one) for one in remove]
    else:
        best = datamodels.top(found, count, targets=targets)
        sets = [ids[ids >= 0] for ids in best.positive]
    return study.verify_removals(found, sets, output=output, **options)


def _loaded(opened: Store, name: str | None, *, option: str = "--fit") -> Datamodels:
    from gradkeep import datamodels

    if name is None:
        raise StudyError(
            "which fit?",
            expected=" or ".join(key.name for key in opened.scores()) or "none is saved yet",
            fix=f"{option} NAME, as `gradkeep datamodels fit STORE --save NAME` called it",
        )
    return datamodels.load(opened, name)


def _one_set(remove: list[str] | None) -> list[int]:
    if remove is None or len(remove) != 1:
        raise StudyError("removal takes one --remove", found=remove, expected="such as 0,3,7")
    return _numbers("remove", remove[0])


def _numbers(what: str, given: str | None) -> list[int]:
    try:
        return [int(word) for word in (given or "").split(",")]
    except ValueError:
        raise StudyError(
            f"--{what} is wrong", found=repr(given), expected="whole numbers, such as 0,3,7"
        ) from None
