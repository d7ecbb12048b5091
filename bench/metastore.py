"""Stored gradients against MetaStore's formulas, on its kinds of models and layers.

`./x bench metastore`: one thread, CPU time, all in one run. MetaStore's side is implemented in
bench/_metastore_formulas.py: one query at a time and without biases, which ours includes (the front
end `gradkeep.compat.metastore` omits them as MetaStore does). Operators multiply factors that are in
memory already; rows "from disk" read, verify, plan and multiply. The last table shows how much the
intentional differences change scores. Exit code 1 if a bar is missed or an answer is wrong.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import gradkeep as gk
from bench import _metastore_formulas as formulas
from bench._metastore_models import (
    FIRST,
    LAST,
    TrainedModel,
    build_bert,
    build_resnet50,
    build_vgg16,
    picture_loss,
    text_loss,
)
from gradkeep.query import Gradients
from gradkeep.query._engine import GradientPair, ProductEngine
from gradkeep.query._gradients import FactorBatch

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, QUERIES = 200, 10
EXACT, CLOSE = 1e-5, 1e-4
"""Largest errors of answers from float32 factors, and from 16 bit or a truncated rank."""
CIFAR_STD, METASTORE_STD = (0.2470, 0.2435, 0.2616), (0.2023, 0.1994, 0.2010)
HALF = {"encoding": "float16-scaled"}
CUT = {"encoding": "float16-scaled", "tolerance": 1e-3}


@dataclass(frozen=True, slots=True, eq=False)
class InMemoryGradients(Gradients):
    """Gradients that were read before the clock starts."""

    some: FactorBatch
    slope: torch.Tensor | None

    def slopes(self) -> torch.Tensor | None:
        return self.slope

    def rows(self, positions) -> FactorBatch:
        first, last = int(positions[0]), int(positions[-1]) + 1
        if last - first == len(positions):
            return self._cut(first, last)
        return Gradients.rows(self, positions)  # the planner's samples

    def stream(self, batch_rows: int):
        for start in range(0, len(self), batch_rows):
            yield self._cut(start, min(len(self), start + batch_rows))

    def _cut(self, start: int, stop: int) -> FactorBatch:
        factors = self.some.factors
        cut = {name: factors[name].take(start, stop) for name in self.forms}
        return FactorBatch(start, stop, cut)


def load_into_memory(gradients: Gradients) -> InMemoryGradients:
    whole = gradients.rows(range(len(gradients)))
    return InMemoryGradients(
        gradients.key, gradients.block, gradients.forms, gradients.of, whole, gradients.slopes()
    )


@dataclass
class Report:
    """Prints the rows of the table, and collects missed bars."""

    missed: list[str] = field(default_factory=list)

    def title(self, what: str) -> None:
        print(f"\n{what:<46}{'ratio':>10}{'bar':>7}", flush=True)

    def row(self, what: str, ratio: float, bar: float | None, note: str) -> None:
        short = bar is not None and ratio < bar
        if short:
            self.missed.append(f"{what}: {ratio:.2f}, bar {bar:g}")
        limit = "" if bar is None else f"{bar:g}"
        print(
            f"  {what:<44}{ratio:>10.2f}{limit:>7}  {'MISSED ' if short else ''}{note}", flush=True
        )

    def check(self, what: str, products: torch.Tensor, truth: torch.Tensor, most: float) -> str:
        error = float((products.double() - truth.double()).norm() / truth.double().norm())
        if not error <= most:
            self.missed.append(f"{what}: error {error:.1e}, at most {most:g}")
        return f"error {error:.1e}"


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A model and its samples, captured by both sides."""

    store: gk.Store
    folder: Path
    trained: TrainedModel
    loss: Callable[..., torch.Tensor]

    def capture_splits(self, layers: list[str], name: str, **options: Any) -> gk.Captured:
        """Capture both splits with gradkeep; return the report of the training split."""
        self.capture("test", layers, name, **options)
        return self.capture("train", layers, name, **options)

    def capture(self, split: str, layers: list[str], name: str, **options: Any) -> gk.Captured:
        return gk.capture(
            self.store,
            self.trained.net,
            getattr(self.trained, split),
            task=gk.Classification(),
            split=split,
            name=name,
            layers=layers,
            progress=False,
            **options,
        )

    def metastore_capture(self, layers: list[str], split: str) -> None:
        (self.folder / split).mkdir(exist_ok=True)
        loss = partial(self.loss, reduction="sum")
        batches = getattr(self.trained, split)
        formulas.collect_factors(self.trained.net, layers, batches, loss, self.folder / split)

    def gradients(self, name: str, layers: list[str] | None = None) -> list[Gradients]:
        """Return the captured queries and training rows."""
        return [
            gk.gradients(self.store, split=split, name=name, layers=layers)
            for split in ("test", "train")
        ]

    def factors(self, layer: str, split: str) -> formulas.Factors:
        return formulas.load_factors(self.folder / split, layer)

    def compute_truth(
        self, layers: list[str], queries: int = QUERIES, rows: int = ROWS, *, biases: bool = True
    ) -> torch.Tensor:
        """Return products of restored gradients, with biases or, like MetaStore, without."""
        total = torch.zeros(queries, rows, dtype=torch.float64)
        for layer in layers:
            train = tuple(part[:rows].double() for part in self.factors(layer, "train"))
            test = tuple(part[:queries].double() for part in self.factors(layer, "test"))
            if biases:
                total += formulas.bias_products(train, test)
            directions = formulas.restore_gradients(test).flatten(1)
            for at in range(0, rows, 10):
                some = tuple(part[at : at + 10] for part in train)
                total[:, at : at + 10] += (
                    directions @ formulas.restore_gradients(some).flatten(1).t()
                )
        return total

    def metastore_bytes(self, layers: list[str]) -> int:
        folder = self.folder / "train"
        return sum(f.stat().st_size for name in layers for f in folder.glob(f"{name}_batch_*.pt"))


def cpu_seconds(function: Callable[[], Any], times: int = 1) -> float:
    started = time.process_time()
    for _ in range(times):
        function()
    return (time.process_time() - started) / times


def time_in_turns(ours: Callable[[], Any], theirs: Callable[[], Any]) -> tuple[float, float]:
    """Return the least CPU time of each; they alternate, and fast ones run several times per
    turn."""
    ours()
    repeats = max(1, min(50, round(0.02 / max(cpu_seconds(ours), 1e-5))))
    slow = [cpu_seconds(theirs)]
    turns = 2 if slow[0] > 2 else 7
    fast = [cpu_seconds(ours, repeats)]
    for _ in range(turns - 1):
        slow.append(cpu_seconds(theirs))
        fast.append(cpu_seconds(ours, repeats))
    return min(fast), min(slow)


def compare_operator(
    report: Report,
    case: Case,
    what: str,
    layers: list[str],
    queries: int,
    bar: float | None,
    *,
    name: str = "exact",
    method: str = "ted",
    slow_rows: int = ROWS,
    most: float = EXACT,
) -> None:
    """Compare products of some layers with all training rows, from factors in memory.

    MetaStore's formula runs on `slow_rows` only where all rows would take minutes: its time is
    linear.
    """
    test_rows, rows = (load_into_memory(gradients) for gradients in case.gradients(name, layers))
    engine = ProductEngine([GradientPair(test_rows, rows)], answer=0, positions=range(queries))

    def ours() -> torch.Tensor:
        return torch.cat([tile.values[0] for tile in engine.tiles()], 1)

    seeds = []
    for layer in layers:
        train, test = case.factors(layer, "train"), case.factors(layer, "test")
        seeds.append(([part[:slow_rows] for part in train], [part[:queries] for part in test]))
    formula = getattr(formulas, method)
    operands = (
        [[formulas.restore_gradients(side) for side in one] for one in seeds]
        if method == "naive"
        else seeds
    )

    def theirs() -> torch.Tensor:
        return sum(formula(*one) for one in operands)

    truth = case.compute_truth(layers, queries, slow_rows)
    error = report.check(what, ours()[:, :slow_rows], truth, most)
    biases = sum(formulas.bias_products(*one) for one in seeds)
    report.check(f"{what}, MetaStore's formula", theirs() + biases, truth, EXACT)
    quick, slow = time_in_turns(ours, theirs)
    slow *= ROWS / slow_rows
    methods = ", ".join(dict.fromkeys(step.compute for step in engine.plan.steps))
    each = f"{slow / queries * 1e3:.2f} and {quick / queries * 1e3:.3f} ms per query; {methods}; {error}"
    report.row(what, slow / quick, bar, each)


def compare_from_disk(
    report: Report,
    case: Case,
    what: str,
    layers: list[str],
    bar: float,
    *,
    name: str,
    most: float,
) -> None:
    """Compare ten queries from disk; MetaStore reads the training rows for each of them."""
    tests = {layer: case.factors(layer, "test") for layer in layers}

    def ours() -> torch.Tensor:
        return gk.query.dot(*case.gradients(name, layers)).values

    def theirs() -> None:
        for query in range(QUERIES):
            for layer in layers:
                test = tuple(part[query : query + 1] for part in tests[layer])
                formulas.ted(case.factors(layer, "train"), test)

    error = report.check(what, ours(), case.compute_truth(layers), most)
    quick, slow = time_in_turns(ours, theirs)
    each = f"{slow / QUERIES * 1e3:.1f} and {quick / QUERIES * 1e3:.2f} ms per query; {error}"
    report.row(what, slow / quick, bar, each)


def compare_collecting(report: Report, case: Case, what: str, layers: list[str]) -> None:
    """Compare one pass over the training rows, with writes."""
    names = iter(range(100))

    def ours() -> None:
        case.capture("train", layers, f"collect-{next(names)}")

    def theirs() -> None:
        case.metastore_capture(layers, "train")

    slow, quick = cpu_seconds(theirs), cpu_seconds(ours)
    slow, quick = min(slow, cpu_seconds(theirs)), min(quick, cpu_seconds(ours))
    report.row(what, slow / quick, None, f"{slow:.2f} and {quick:.2f} s of CPU time")


def compare_bytes(
    report: Report,
    case: Case,
    what: str,
    layers: list[str],
    bar: float | None,
    *,
    name: str,
    **options: Any,
) -> gk.Captured:
    """Compare bytes on disk of a capture with those of MetaStore's files, and check its error."""
    captured = case.capture_splits(layers, name, **options)
    error = report.check(
        what, gk.query.dot(*case.gradients(name)).values, case.compute_truth(layers), CLOSE
    )
    least = captured.rows * sum(
        min(layer.dense_bytes, layer.factor_bytes) for layer in captured.layers
    )
    # 2 % for ids, losses, labels and norms.
    if captured.bytes > least * 1.02:
        report.missed.append(
            f"{what}: {captured.bytes:,} bytes, min(dense, factors) is {least:,.0f}"
        )
    forms = ", ".join(dict.fromkeys(layer.storage for layer in captured.layers))
    theirs = case.metastore_bytes(layers)
    each = f"{theirs / 1e6:.2f} and {captured.bytes / 1e6:.2f} MB; {forms}; {error}"
    report.row(what, theirs / captured.bytes, bar, each)
    return captured


def measure_vgg16(report: Report, folder: Path) -> dict[str, gk.Captured]:
    """Measure VGG16; return its captures for the table of sizes."""
    case = Case(gk.open(folder / "store"), folder, build_vgg16(ROWS, QUERIES), picture_loss)
    layers, both = ["conv1", "conv4", "conv7", "conv13", "l1"], ["conv13", "l1"]
    for split in ("train", "test"):
        case.metastore_capture(layers, split)
    case.capture_splits(layers, "exact")
    report.title(f"VGG16, {ROWS} rows: MetaStore's / ours")
    compare_operator(report, case, "conv13, 1 query", ["conv13"], 1, 7)
    compare_operator(report, case, "conv13, 10 queries", ["conv13"], 10, 60)
    compare_operator(report, case, "conv7, 3 queries", ["conv7"], 3, None)
    compare_operator(report, case, "conv4, 3 queries", ["conv4"], 3, 6, slow_rows=20)
    compare_operator(report, case, "conv1, 10 queries", ["conv1"], 10, 1000, slow_rows=5)
    for method in ("half", "recon", "naive"):
        what = f"conv13, 1 query, {method}"
        compare_operator(report, case, what, ["conv13"], 1, None, method=method, slow_rows=20)
    # Like MetaStore; the default also stores gradients of the outputs.
    exact = case.capture_splits(both, "both", of="loss")
    compare_from_disk(
        report, case, "conv13 + l1 from disk, 10 queries", both, 50, name="both", most=EXACT
    )
    compare_collecting(report, case, "collect conv13 + l1", both)
    compare_bytes(report, case, "bytes of conv13, 16 bit", ["conv13"], 1.9, name="conv13", **HALF)
    compare_bytes(report, case, "bytes of conv1", ["conv1"], 30, name="conv1")
    half = compare_bytes(
        report, case, "bytes of conv13 + l1, 16 bit", both, None, name="half", **HALF
    )
    return {"VGG16 conv13, l1": exact, "VGG16 conv13, l1, 16 bit": half}


def measure_bert(report: Report, folder: Path) -> dict[str, gk.Captured]:
    """Measure BERT; return its captures for the table of sizes."""
    case = Case(gk.open(folder / "store"), folder, build_bert(ROWS, QUERIES), text_loss)
    for split in ("train", "test"):
        case.metastore_capture(FIRST + LAST, split)
    case.capture_splits(FIRST + LAST, "exact")
    report.title(f"BERT q, k, v, {ROWS} rows: MetaStore's / ours")
    compare_operator(report, case, "first layer, 1 query", FIRST, 1, 0.9)
    compare_operator(report, case, "first layer, 10 queries", FIRST, 10, 1.4)
    compare_operator(report, case, "last layer, 1 query", LAST, 1, 0.9)
    compare_operator(report, case, "last layer, 10 queries", LAST, 10, None)
    for method in ("half", "recon", "naive"):
        what = f"first layer, 1 query, {method}"
        compare_operator(report, case, what, FIRST, 1, None, method=method, slow_rows=20)
    exact = {
        "first": case.capture_splits(FIRST, "first"),
        "last": case.capture_splits(LAST, "last"),
    }
    first = compare_bytes(
        report, case, "bytes of first layer, 16 bit", FIRST, 2.5, name="half", **HALF
    )
    last = compare_bytes(
        report, case, "bytes of last layer, cut at 1e-3, 16 bit", LAST, 7, name="cut", **CUT
    )
    close = {"name": "cut", "most": CLOSE}
    compare_operator(report, case, "last layer, cut, 1 query", LAST, 1, 0.9, **close)
    compare_operator(report, case, "last layer, cut, 10 queries", LAST, 10, 8, **close)
    compare_from_disk(report, case, "last layer, cut, from disk, 10 queries", LAST, 15, **close)
    compare_collecting(report, case, "collect first and last layer", FIRST + LAST)
    return {
        "BERT first q, k, v": exact["first"],
        "BERT first q, k, v, 16 bit": first,
        "BERT last q, k, v": exact["last"],
        "BERT last q, k, v, cut at 1e-3, 16 bit": last,
    }


def capture_resnet50(folder: Path) -> dict[str, gk.Captured]:
    """Capture ResNet-50 for the table of sizes."""
    case = Case(gk.open(folder / "store"), folder, build_resnet50(20), picture_loss)
    layers = ["model_base.layer4.2.conv2"]
    return {
        "ResNet-50 layer4.2.conv2, 64 x 64": case.capture("train", layers, "exact"),
        "ResNet-50 layer4.2.conv2, 16 bit": case.capture("train", layers, "half", **HALF),
    }


def print_sizes(captures: dict[str, gk.Captured]) -> None:
    print("\ndense bytes / all stored bytes (the paper: 4 to 678 times)")
    for what, capture in captures.items():
        ratio = capture.dense_bytes / capture.bytes
        megabytes = f"{capture.dense_bytes / 1e6:,.1f} and {capture.bytes / 1e6:.2f} MB"
        print(f"  {what:<44}{ratio:>10.1f}         {megabytes}, {capture.rows} rows")


def print_differences(folder: Path) -> None:
    """Print how far scores of weights alone are from the default scores of gradkeep."""
    print("\nchanges of MetaStore's scores (weights only, its deviations of CIFAR-10)")
    whole = build_vgg16(ROWS, QUERIES)
    ours, theirs = (torch.tensor(std)[:, None, None] for std in (CIFAR_STD, METASTORE_STD))
    other = [[(x * ours / theirs, y) for x, y in part] for part in (whole.train, whole.test)]
    as_metastore = TrainedModel(whole.net, *other)
    cases = {
        "VGG16 conv13, l1": (as_metastore, picture_loss, ["conv13", "l1"]),
        "VGG16, other deviations": (whole, picture_loss, ["conv13", "l1"]),
        "BERT last q, k, v": (build_bert(ROWS, QUERIES), text_loss, LAST),
    }
    plain: dict[int, torch.Tensor] = {}
    for number, (what, (trained, loss, layers)) in enumerate(cases.items()):
        place = folder / str(number)
        place.mkdir()
        case = Case(gk.open(place / "store"), place, trained, loss)
        for split in ("train", "test"):
            case.metastore_capture(layers, split)
        plain[number] = case.compute_truth(layers, biases=False)
        if what.endswith("deviations"):
            print_change("VGG16, gradkeep's own deviations", plain[number - 1], plain[number])
        else:
            print_change(f"{what}, with biases", plain[number], case.compute_truth(layers))


def print_change(what: str, before: torch.Tensor, after: torch.Tensor) -> None:
    """Print the relative error of all scores, and how many of each query's top ten stay."""
    error = float((after - before).norm() / before.norm())
    tops = [scores.topk(10, dim=1).indices.tolist() for scores in (before, after)]
    same = [len({*one} & {*two}) for one, two in zip(*tops, strict=True)]
    print(f"  {what:<44}{error:>10.1e}         {sum(same) / len(same):.1f} of 10 highest stay")


def main() -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)  # for dropout during training
    report = Report()
    captures: dict[str, gk.Captured] = {}
    with tempfile.TemporaryDirectory() as name:
        for part in ("pictures", "texts", "large", "differences"):
            (Path(name) / part).mkdir()
        captures |= measure_vgg16(report, Path(name) / "pictures")
        captures |= measure_bert(report, Path(name) / "texts")
        captures |= capture_resnet50(Path(name) / "large")
        print_sizes(captures)
        print_differences(Path(name) / "differences")
    print(
        "\n" + ("all bars met" if not report.missed else "MISSED\n  " + "\n  ".join(report.missed))
    )
    return int(bool(report.missed))


if __name__ == "__main__":
    sys.exit(main())
