"""`gradkeep evaluate ...`: measure attributions against retraining and planted truth."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep._display import pick_fields
from gradkeep.cli._inputs import load_recipe, output_folder, read_ids, read_numbers
from gradkeep.cli._options import (
    MAX_COUNT,
    CaptureOption,
    CaptureOptions,
    CheckpointOption,
    JsonOption,
    MethodOption,
    Positive,
    RecipeOption,
    RunOption,
    SeedsOption,
    Share,
    StoreArgument,
    TrainOption,
    WorkersOption,
    choose_runs,
    missing_option,
    print_json,
    print_progress,
)
from gradkeep.errors import EvaluationError, GradkeepError

if TYPE_CHECKING:
    from gradkeep.attribution._scores import Scores
    from gradkeep.evaluate import Evaluation
    from gradkeep.evaluate._lds import Judgement
    from gradkeep.store import Store

TruthOption = Annotated[
    str | None, typer.Option("--truth", metavar="NAME", help="Ground truth; default: the only one.")
]
MethodsOption = Annotated[
    list[str] | None, typer.Option("--method", help="Repeatable; default: all.")
]
WrongOption = Annotated[
    str | None, typer.Option("--wrong", metavar="FILE", help="Ids of rows with a wrong label.")
]
CopiesOption = Annotated[
    str | None, typer.Option("--copies", metavar="FILE", help="Lines: query id, id of its copy.")
]


def truth(
    store: StoreArgument,
    recipe: RecipeOption = None,
    subsets: Annotated[int, typer.Option(min=10, max=MAX_COUNT)] = 100,
    seeds: SeedsOption = 2,
    alpha: Share = 0.5,
    name: str = "truth",
    workers: WorkersOption = None,
    json: JsonOption = False,
) -> None:
    """Train models on random subsets of the rows, as ground truth for scores.

    Half of the subsets serve for choosing, half for reporting. An interrupted run resumes; more
    subsets are added to existing ones.

    Options:
        subsets: Random subsets.
        alpha: Share of rows in a subset.
        name: Name of the ground truth in the store.
    """
    import gradkeep as gk

    result = gk.evaluate.ground_truth(
        gk.open(store),
        load_recipe(recipe, None),
        subsets=subsets,
        seeds=seeds,
        alpha=alpha,
        name=name,
        workers=workers,
        progress=None if json else print_progress,
    )
    ceiling = result.estimate_ceiling()
    fields = {
        "truth": result.name,
        "subsets": len(result.masks),
        "seeds": result.seeds,
        "queries": result.num_queries,
        "ceiling": None if ceiling is None else ceiling.value,
        "ceiling_interval": None if ceiling is None else ceiling.interval,
        "seconds_per_model": result.seconds,
    }
    if json:
        print_json(fields)
        return
    shown = "unknown with one seed" if ceiling is None else str(ceiling)
    print("{truth}: {subsets} subsets x {seeds} seeds, {queries} queries".format(**fields), end="")
    print(f"; ceiling {shown}")


def lds(
    store: StoreArgument,
    method: MethodsOption = None,
    truth: TruthOption = None,
    *,
    captures: CaptureOptions,
    result: ResultOptions,
) -> None:
    """Compute the linear datamodeling score of methods, with intervals, ceiling and cost."""
    import gradkeep as gk

    opened = gk.open(store, create=False)
    judgement = _judge(opened, method, truth, captures, quiet=result.json)
    names = _save_judgement(opened, judgement, result)
    if not result.json:
        return
    fields = [
        {
            **evaluation_fields(one.evaluation),
            **pick_fields(one, "cpu_seconds", "bytes_per_row"),
            "method": one.name,
            "saved": name,
        }
        for one, name in zip(judgement.methods, names, strict=True)
    ]
    refused = {one.name: one.refused for one in judgement.refused}
    print_json({"truth": judgement.truth.name, "methods": fields, "refused": refused})


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
    """Measure how well losses, gradients and their rank sum find known wrong labels."""
    import gradkeep as gk

    opened = gk.open(store, create=False)
    runs = choose_runs(opened, run, splits=(train,), capture=capture)
    options = {"train": train, "checkpoints": checkpoints, "run": runs, "name": capture}
    show_evaluations(opened, _evaluate_labels(opened, wrong, **options), result)


def removal(
    store: StoreArgument,
    method: MethodOption = None,
    recipe: RecipeOption = None,
    size: Annotated[list[int] | None, typer.Option(min=1, max=MAX_COUNT)] = None,
    query: list[int] | None = None,
    against: list[str] | None = None,
    keep_only: bool = False,
    seeds: SeedsOption = 3,
    workers: WorkersOption = None,
    *,
    captures: CaptureOptions,
    result: ResultOptions,
) -> None:
    """Retrain without the rows that helped queries most, beside random rows and a baseline.

    Options:
        size: Rows to remove; repeatable.
        query: Id of a query; repeatable. Default: ten queries.
        against: A method to compare with; repeatable.
        keep_only: Train on the chosen rows alone.
    """
    import gradkeep as gk

    opened = gk.open(store, create=False)
    _evaluate_removal(
        opened,
        recipe,
        captures,
        result,
        method=method,
        baselines=against or ["label-match"],
        sizes=size,
        queries=query,
        train="with only" if keep_only else "without",
        seeds=seeds,
        workers=workers,
    )


def leakage(
    store: StoreArgument,
    copies: CopiesOption = None,
    method: MethodsOption = None,
    k: Positive = 1,
    *,
    captures: CaptureOptions,
    result: ResultOptions,
) -> None:
    """Measure how often the copy of a query among the training rows has the highest score.

    Options:
        k: Rank that counts as found.
    """
    import gradkeep as gk

    opened = gk.open(store, create=False)
    methods: list[str | None] = list(method) if method else [None]
    evaluations = [_evaluate_leakage(captures.scores(opened, m), copies, k) for m in methods]
    show_evaluations(opened, evaluations, result)


def sanity(
    store: StoreArgument,
    method: MethodOption = None,
    truth: TruthOption = None,
    random_run: str | None = None,
    json: JsonOption = False,
    *,
    captures: CaptureOptions,
) -> None:
    """Check that shuffled scores predict nothing, and compare with a random model's scores.

    Options:
        random_run: Run of a model with random weights.
    """
    import gradkeep as gk

    opened = gk.open(store, create=False)
    scores = captures.scores(opened, method)
    random_scores = None
    if random_run is not None:
        random_scores = captures.scores(opened, scores.method, checkpoints=None, run=random_run)
    known = gk.evaluate.load_truth(opened, truth)
    check = gk.evaluate.sanity_check(scores, known, randomized=random_scores)
    if json:
        parts = {"trained": check.trained, "shuffled": check.shuffled, "random": check.randomized}
        fields = {name: evaluation_fields(part) for name, part in parts.items() if part is not None}
        print_json({"passed": check.passed, **fields})
    else:
        print(check)
    if not check.passed:
        raise typer.Exit(1)


def all(
    store: StoreArgument,
    truth: TruthOption = None,
    wrong: WrongOption = None,
    copies: CopiesOption = None,
    recipe: RecipeOption = None,
    workers: WorkersOption = None,
    save: SaveOption = True,
    plots: PlotsOption = None,
    *,
    captures: CaptureOptions,
) -> None:
    """Run every evaluation that is possible; the others are listed with what they need."""
    import gradkeep as gk

    opened = gk.open(store, create=False)
    result = ResultOptions(save, plots)

    def run_lds() -> None:
        judgement = _judge(opened, None, truth, captures, quiet=False)
        _save_judgement(opened, judgement, result)

    def run_sanity() -> None:
        known = gk.evaluate.load_truth(opened, truth)
        print(gk.evaluate.sanity_check(captures.scores(opened), known))

    def run_labels() -> None:
        options = captures.arguments(opened)
        del options["queries"]
        show_evaluations(opened, _evaluate_labels(opened, wrong, **options), result)

    def run_leakage() -> None:
        evaluation = _evaluate_leakage(captures.scores(opened), copies, 1)
        show_evaluations(opened, [evaluation], result)

    def run_removal() -> None:
        _evaluate_removal(
            opened, recipe, captures, result, baselines=["label-match"], workers=workers
        )

    evaluations = (run_lds, run_sanity, run_labels, run_leakage, run_removal)
    for evaluate in evaluations:
        print(f"== {evaluate.__name__.removeprefix('run_')}")
        try:
            evaluate()
        except GradkeepError as error:
            print(f"skipped: {error}")


def compare(
    store: StoreArgument,
    first: Annotated[str, typer.Argument(metavar="A")],
    second: Annotated[str, typer.Argument(metavar="B")],
    json: JsonOption = False,
) -> None:
    """Compare two saved evaluations by a paired bootstrap.

    Options:
        first: Name of a saved evaluation.
        second: Name of another one.
    """
    import gradkeep as gk

    opened = gk.open(store, create=False)
    pair = [gk.evaluate.Evaluation.load(opened, name) for name in (first, second)]
    comparison = gk.evaluate.compare(*pair)
    if not json:
        print(comparison)
        return
    fields = pick_fields(comparison, "metric", "interval", "differs")
    print_json({**fields, "difference": comparison.value})


def _judge(
    store: Store,
    methods: list[str] | None,
    truth: str | None,
    captures: CaptureOptions,
    *,
    quiet: bool,
) -> Judgement:
    import gradkeep as gk

    def report(method: Any) -> None:
        if not quiet and sys.stderr.isatty():
            print(f"  {method.name}: {method.cpu_seconds:.1f} s", file=sys.stderr)

    arguments = captures.arguments(store)
    return gk.evaluate.judge_methods(store, truth, methods=methods, report=report, **arguments)


def _save_judgement(store: Store, judgement: Judgement, result: ResultOptions) -> list[str | None]:
    """Save the evaluations of all methods, and print them unless JSON is wanted."""
    evaluations = [one.evaluation for one in judgement.methods]
    names = save_evaluations(store, evaluations, result)
    if not result.json:
        print(judgement)
        print(judgement.truth.to_halve(judgement.best.evaluation))
        print_saved_names(names)
    return names


def _evaluate_removal(
    store: Store,
    recipe: str | None,
    captures: CaptureOptions,
    result: ResultOptions,
    *,
    baselines: list[str],
    method: str | None = None,
    **options: Any,
) -> None:
    import gradkeep as gk

    training = load_recipe(recipe, store)
    curve = gk.evaluate.removal_curve(
        captures.scores(store, method),
        training,
        against=[captures.scores(store, one) for one in baselines],
        progress=None if result.json else print_progress,
        **options,
    )
    evaluations = [one for one in (curve.change, curve.flipped) if one is not None]
    show_evaluations(store, evaluations, result)


def _evaluate_labels(store: Store, wrong: str | None, **captures: Any) -> list[Evaluation]:
    import numpy as np

    import gradkeep as gk

    if wrong is None:
        raise missing_option(EvaluationError, "known wrong labels", "--wrong FILE with their ids")
    ids = read_ids(wrong)
    evaluations, measures = [], []
    for by in ("loss", "self", "noise"):
        try:
            suspects = gk.suspects(store, by=by, **captures)
        except GradkeepError:
            continue  # gradients or probabilities were not captured
        evaluations.append(gk.evaluate.label_detection(suspects, ids))
        order = np.argsort(suspects.ids)
        measures.append((suspects.ids[order], suspects.values[order]))
    if not evaluations:
        raise EvaluationError(
            "the capture has neither losses nor gradients to rank rows by",
            code="cli.nothing_to_rank_by",
        )
    if len(evaluations) > 1:
        rank_sum = gk.evaluate.rank_sum([values for _, values in measures])
        row_ids = measures[0][0]
        evaluations.append(
            gk.evaluate.label_detection(rank_sum, ids, ids=row_ids, subject="rank sum")
        )
    return evaluations


def _evaluate_leakage(scores: Scores, copies: str | None, k: int) -> Evaluation:
    import numpy as np

    import gradkeep as gk

    if copies is None:
        fix = "--copies FILE with lines: query id, row id"
        raise missing_option(EvaluationError, "known copies of queries", fix)
    copy_of = dict(read_numbers(copies, columns=2).tolist())
    expected = np.array([copy_of.get(int(query), -1) for query in scores.query_ids])
    return gk.evaluate.leakage(scores, expected, k=k)


PlotsOption = Annotated[
    str | None, typer.Option("--plots", metavar="DIR", help="Write plots to this folder.")
]
SaveOption = Annotated[bool, typer.Option("--save/--no-save", help="Save results in the store.")]


@dataclass(frozen=True, slots=True)
class ResultOptions:
    """Output of evaluations."""

    save: SaveOption = True
    plots: PlotsOption = None
    json: JsonOption = False


def save_evaluations(
    store: Store, evaluations: list[Evaluation], result: ResultOptions
) -> list[str | None]:
    """Save and plot evaluations; return their names in the store."""
    import xxhash

    folder = None
    if result.plots is not None:
        folder = output_folder(result.plots, error=EvaluationError)
    names: list[str | None] = []
    for one in evaluations:
        digest = xxhash.xxh3_64_hexdigest(f"{one.universe} {one.subject} {one.value}".encode())[:8]
        words = re.sub(r"[^A-Za-z0-9]+", "-", f"{one.metric} {one.subject.split(' at ')[0]}")
        name = f"{words.strip('-')[:80]}-{digest}"
        if result.save:
            one.save(name, store=store)
        names.append(name if result.save else None)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            one.plot().savefig(folder / f"{name}.png")
    return names


def show_evaluations(store: Store, evaluations: list[Evaluation], result: ResultOptions) -> None:
    """Save, plot and print evaluations."""
    names = save_evaluations(store, evaluations, result)
    if result.json:
        pairs = zip(evaluations, names, strict=True)
        print_json([{**evaluation_fields(one), "saved": name} for one, name in pairs])
        return
    for one in evaluations:
        print(one)
        if one.curve is not None:
            print("  " + str(one.curve).replace("\n", "\n  "))
    print_saved_names(names)


def print_saved_names(names: list[str | None]) -> None:
    """Print the names of saved evaluations."""
    saved = [name for name in names if name is not None]
    if saved:
        print(f"saved as {', '.join(saved)}")


def evaluation_fields(evaluation: Evaluation) -> dict[str, Any]:
    """Return an evaluation as JSON fields."""
    curve = evaluation.curve
    lines = {} if curve is None else dict(zip(curve.names, curve.values.tolist(), strict=True))
    return {
        **pick_fields(evaluation, "metric", "subject", "value", "interval", "level", "ceiling"),
        "ceiling_interval": evaluation.ceiling_interval,
        "share_of_ceiling": evaluation.share,
        **pick_fields(evaluation.sizes, "queries", "subsets", "seeds", "rows"),
        **pick_fields(evaluation, "truth", "provenance"),
        "curve": None if curve is None else {curve.along: curve.at.tolist(), **lines},
    }
