"""`gradkeep evaluate ...`: how true the attributions of a store are, and how sure that is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep.cli._files import LARGEST
from gradkeep.cli._imports import ids_in, numbers_in, recipe_named
from gradkeep.cli._options import (
    CaptureOption,
    CaptureOptions,
    CheckpointOption,
    JsonOption,
    MethodOption,
    RecipeOption,
    RunOption,
    SeedsOption,
    StoreArgument,
    TrainOption,
    WorkersOption,
    chosen_runs,
    print_json,
)
from gradkeep.cli._shown_evaluations import (
    KeepOption,
    PlotsOption,
    ResultOptions,
    evaluation_fields,
    keep_evaluations,
    show_evaluations,
    tell_names,
    tell_progress,
)
from gradkeep.errors import EvaluationError, GradkeepError

if TYPE_CHECKING:
    from gradkeep.attribution._scores import Scores
    from gradkeep.evaluate import Evaluation
    from gradkeep.evaluate._judging import Judgement
    from gradkeep.store import Store

TruthOption = Annotated[
    str | None, typer.Option("--truth", metavar="NAME", help="Which; by default the only one.")
]
MethodsOption = Annotated[
    list[str] | None, typer.Option("--method", help="May be repeated; by default all.")
]
WrongOption = Annotated[
    str | None,
    typer.Option("--wrong", metavar="FILE", help="Ids of rows whose labels are known wrong."),
]
CopiesOption = Annotated[
    str | None,
    typer.Option("--copies", metavar="FILE", help="Lines of a query's id and its copy's row id."),
]


def truth(
    store: StoreArgument,
    recipe: RecipeOption = None,
    subsets: Annotated[
        int, typer.Option(min=10, max=LARGEST, help="Random subsets of the rows.")
    ] = 100,
    seeds: SeedsOption = 2,
    alpha: Annotated[float, typer.Option(min=0, max=1, help="The share of rows in each.")] = 0.5,
    name: Annotated[str, typer.Option(help="What it is called in the store.")] = "truth",
    workers: WorkersOption = None,
    json: JsonOption = False,
) -> None:
    """Train models on random subsets of the rows: the truth that scores are judged by.

    Half of the subsets are for choosing, half for reporting. Interrupted, it resumes; more subsets
    are added to those that are there.
    """
    import gradkeep as gk

    opened = gk.open(store)
    found = gk.evaluate.ground_truth(
        opened,
        recipe_named(recipe, None),
        subsets=subsets,
        seeds=seeds,
        alpha=alpha,
        name=name,
        workers=workers,
        progress=None if json else tell_progress,
    )
    ceiling = found.ceiling()
    if json:
        print_json(
            {
                "truth": found.name,
                "subsets": len(found.masks),
                "seeds": found.seeds,
                "queries": found.num_queries,
                "ceiling": ceiling,
                "seconds_per_model": found.seconds,
            }
        )
        return
    told = "unknown with one seed" if ceiling is None else f"{ceiling:.3f}"
    print(
        f"{found.name}: {len(found.masks)} subsets x {found.seeds} seeds, {found.num_queries} "
        f"queries; ceiling {told}"
    )


def lds(
    store: StoreArgument,
    method: MethodsOption = None,
    truth: TruthOption = None,
    *,
    captures: CaptureOptions,
    result: ResultOptions,
) -> None:
    """The linear datamodeling score of every method, with intervals, ceiling, price and bytes."""
    import gradkeep as gk

    opened = gk.open(store, create=False)
    judged = _judged(opened, method, truth, captures, quiet=result.json)
    found = [one.evaluation for one in judged.methods if one.evaluation is not None]
    names = keep_evaluations(opened, found, result)
    if result.json:
        print_json(
            {
                "truth": judged.truth.name,
                "methods": [
                    {
                        "method": one.name,
                        **evaluation_fields(one.evaluation),
                        "cpu_seconds": one.cpu_seconds,
                        "bytes_per_row": one.bytes_per_row,
                        "saved": name,
                    }
                    for one, name in zip(judged.methods, names, strict=True)
                    if one.evaluation is not None
                ],
                "refused": {one.name: one.refused for one in judged.refused},
            }
        )
        return
    print(judged)
    assert judged.best.evaluation is not None
    print(judged.truth.to_halve(judged.best.evaluation))
    tell_names(names)


def labels(
    store: StoreArgument,
    wrong: WrongOption = None,
    train: TrainOption = "train",
    checkpoints: CheckpointOption = None,
    run: RunOption = None,
    capture: CaptureOption = "main",
    *,
    result: ResultOptions,
) -> None:
    """How well losses, gradients and their rank sum find labels that are known to be wrong."""
    import gradkeep as gk

    opened = gk.open(store, create=False)
    found = _label_evaluations(
        opened,
        wrong,
        train=train,
        checkpoints=checkpoints,
        run=chosen_runs(opened, run, splits=(train,), capture=capture),
        name=capture,
    )
    show_evaluations(opened, found, result)


def removal(
    store: StoreArgument,
    method: MethodOption = None,
    recipe: RecipeOption = None,
    size: Annotated[
        list[int] | None,
        typer.Option(min=1, max=LARGEST, help="Rows to leave out; may be repeated."),
    ] = None,
    query: Annotated[
        list[int] | None, typer.Option(help="A query's id; may be repeated. By default ten.")
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(help="A method to draw beside it; may be repeated.")
    ] = None,
    keep_only: Annotated[
        bool, typer.Option("--keep-only", help="Train on the named rows alone.")
    ] = False,
    seeds: SeedsOption = 3,
    workers: WorkersOption = None,
    *,
    captures: CaptureOptions,
    result: ResultOptions,
) -> None:
    """Retrain without the rows that helped queries most, beside random rows and a baseline."""
    import gradkeep as gk

    opened = gk.open(store, create=False)
    how = recipe_named(recipe, opened)
    scores = captures.scores(opened, method)
    beside = [captures.scores(opened, one) for one in against or ["label-match"]]
    found = gk.evaluate.removal_curve(
        scores,
        how,
        sizes=size,
        queries=query,
        against=beside,
        train="with only" if keep_only else "without",
        seeds=seeds,
        workers=workers,
        progress=None if result.json else tell_progress,
    )
    both = [one for one in (found.change, found.flipped) if one is not None]
    show_evaluations(opened, both, result)


def leakage(
    store: StoreArgument,
    copies: CopiesOption = None,
    method: MethodsOption = None,
    k: Annotated[int, typer.Option(min=1, max=LARGEST, help="Among so many rows.")] = 1,
    *,
    captures: CaptureOptions,
    result: ResultOptions,
) -> None:
    """How often the copy of a query among the training rows is the first that scores name."""
    import gradkeep as gk

    opened = gk.open(store, create=False)
    asked: list[str | None] = list(method) if method else [None]
    found = [_leak_evaluation(captures.scores(opened, one), copies, k) for one in asked]
    show_evaluations(opened, found, result)


def sanity(
    store: StoreArgument,
    method: MethodOption = None,
    truth: TruthOption = None,
    random_run: Annotated[
        str | None,
        typer.Option("--random-run", help="The run of a model with random weights, if captured."),
    ] = None,
    json: JsonOption = False,
    *,
    captures: CaptureOptions,
) -> None:
    """Whether shuffled scores predict nothing, and what training adds to a random model's."""
    import gradkeep as gk

    opened = gk.open(store, create=False)
    scores = captures.scores(opened, method)
    twin = None
    if random_run is not None:
        twin = captures.scores(opened, scores.method, checkpoints=None, run=random_run)
    found = gk.evaluate.sanity_check(scores, gk.evaluate.load_truth(opened, truth), randomised=twin)
    if json:
        parts = {"trained": found.trained, "shuffled": found.shuffled, "random": found.randomised}
        told = {name: evaluation_fields(part) for name, part in parts.items() if part is not None}
        print_json({"passed": found.passed, **told})
    else:
        print(found)
    if not found.passed:
        raise typer.Exit(1)


def all(
    store: StoreArgument,
    truth: TruthOption = None,
    wrong: WrongOption = None,
    copies: CopiesOption = None,
    recipe: RecipeOption = None,
    workers: WorkersOption = None,
    save: KeepOption = True,
    plots: PlotsOption = None,
    *,
    captures: CaptureOptions,
) -> None:
    """Everything that can be said with what there is; what is missing is named with its reason."""
    import gradkeep as gk

    opened = gk.open(store, create=False)
    result = ResultOptions(save, plots)

    def part(title: str, work: Any) -> None:
        print(f"== {title}")
        try:
            work()
        except GradkeepError as error:
            print(f"not done: {error}")

    def score() -> None:
        judged = _judged(opened, None, truth, captures, quiet=False)
        found = [one.evaluation for one in judged.methods if one.evaluation is not None]
        print(judged)
        assert judged.best.evaluation is not None
        print(judged.truth.to_halve(judged.best.evaluation))
        tell_names(keep_evaluations(opened, found, result))

    def sane() -> None:
        known = gk.evaluate.load_truth(opened, truth)
        print(gk.evaluate.sanity_check(captures.scores(opened), known))

    def label() -> None:
        where = captures.arguments(opened)
        del where["queries"]
        show_evaluations(opened, _label_evaluations(opened, wrong, **where), result)

    def leak() -> None:
        found = _leak_evaluation(captures.scores(opened), copies, 1)
        show_evaluations(opened, [found], result)

    def remove() -> None:
        how = recipe_named(recipe, opened)
        found = gk.evaluate.removal_curve(
            captures.scores(opened),
            how,
            against=[captures.scores(opened, "label-match")],
            workers=workers,
            progress=tell_progress,
        )
        both = [one for one in (found.change, found.flipped) if one is not None]
        show_evaluations(opened, both, result)

    for title, work in (
        ("lds", score),
        ("sanity", sane),
        ("labels", label),
        ("leakage", leak),
        ("removal", remove),
    ):
        part(title, work)


def compare(
    store: StoreArgument,
    first: Annotated[str, typer.Argument(metavar="A", help="The name of a kept evaluation.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    json: JsonOption = False,
) -> None:
    """Whether two kept evaluations differ, by the paired bootstrap."""
    import gradkeep as gk

    opened = gk.open(store, create=False)
    both = [gk.evaluate.Evaluation.load(opened, name) for name in (first, second)]
    found = gk.evaluate.compare(*both)
    if json:
        print_json(
            {
                "metric": found.metric,
                "difference": found.value,
                "interval": found.interval,
                "differs": found.differs,
            }
        )
        return
    print(found)


def _judged(
    store: Store,
    method: list[str] | None,
    truth: str | None,
    captures: CaptureOptions,
    *,
    quiet: bool,
) -> Judgement:
    import sys

    import gradkeep as gk

    def report(one: Any) -> None:
        if not quiet and sys.stderr.isatty():
            print(f"  {one.name}: {one.cpu_seconds:.1f} s", file=sys.stderr)

    return gk.evaluate.judge_methods(
        store, truth, methods=method, report=report, **captures.arguments(store)
    )


def _label_evaluations(store: Store, wrong: str | None, **captures: Any) -> list[Evaluation]:
    import numpy as np

    import gradkeep as gk

    if wrong is None:
        raise EvaluationError(
            "which labels are wrong is not known", fix="pass --wrong FILE with the ids of such rows"
        )
    ids = ids_in(wrong)
    found, measures = [], []
    for by in ("loss", "self", "noise"):
        try:
            suspects = gk.suspects(store, by=by, **captures)
        except GradkeepError:
            continue  # gradients or probabilities were not kept
        found.append(gk.evaluate.label_detection(suspects, ids))
        order = np.argsort(suspects.ids)
        measures.append((suspects.ids[order], suspects.values[order]))
    if not found:
        raise EvaluationError("nothing was captured that suspects could be found by")
    if len(found) > 1:
        together = gk.evaluate.rank_sum([values for _, values in measures])
        found.append(
            gk.evaluate.label_detection(together, ids, ids=measures[0][0], subject="rank sum")
        )
    return found


def _leak_evaluation(scores: Scores, copies: str | None, k: int) -> Evaluation:
    import numpy as np

    import gradkeep as gk

    if copies is None:
        raise EvaluationError(
            "which rows are copies of queries is not known",
            fix="pass --copies FILE with lines of a query's id and a row's id",
        )
    pairs = dict(numbers_in(copies, each=2).tolist())
    wanted = np.array([pairs.get(int(query), -1) for query in scores.query_ids])
    return gk.evaluate.leakage(scores, wanted, k=k)
