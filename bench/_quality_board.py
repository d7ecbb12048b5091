"""Format and write docs/benchmarks.md: one section for each setting, as printed by a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradkeep.attribution._scores import Scores
from gradkeep.evaluate import Evaluation, compare, judge_methods, lds
from gradkeep.evaluate._intervals import format_interval
from gradkeep.evaluate._lds import Judgement
from gradkeep.evaluate._truth import GroundTruth
from gradkeep.store import Store

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

How well each method predicts retraining, and how well each measure finds wrong labels. `./x bench quality [SETTING ...]` wrote
every figure below, one section per setting. Measured on 2 cores of a small machine.

- **LDS** (linear datamodeling score) is the mean over queries of the rank correlation between summed scores of random halves of the training rows and the
  outputs of models trained on these halves. Brackets are 95 % intervals over queries and subsets.
- Half of the subsets may be used for selection; figures are from the other half.
- **Ceiling** is the score of a perfect prediction, estimated from the agreement between seeds.
- **CPU s** covers capturing and scoring on one thread, without training.
- **Bytes/row** covers all checkpoints of a training row.
- **Best minus this** is a paired difference. If its interval contains zero, the two do not differ significantly.
- **(peer)** marks methods of other libraries, computed here by gradkeep.
- Settings `labels-...` plant wrong labels. They report the area under the ROC curve of each measure, and the gain of
  training without the most suspicious rows over training without random rows.

Other benchmarks: `./x bench` lists them; each guide cites the ones behind its figures.
"""


@dataclass(frozen=True, eq=False)
class Entry:
    """Scores to evaluate, and their cost."""

    name: str
    scores: Scores
    seconds: float
    bytes_per_row: float | None
    peer: bool = False
    """True if other libraries have this method."""


@dataclass(frozen=True)
class Bar:
    """Minimum LDS of an entry."""

    entry: str
    least: float

    def describe(self, value: float) -> str:
        verdict = "reached" if value >= self.least else "**missed**"
        return f"Target: {self.entry} at least {self.least:.2f}; {verdict}: {value:.3f}."


@dataclass(frozen=True)
class Section:
    """Result of one setting."""

    name: str
    title: str
    lines: tuple[str, ...]
    missed: bool = False

    def __str__(self) -> str:
        return "\n".join([f"## {self.name}: {self.title}", "", *self.lines]).rstrip() + "\n"


def format_evaluation(evaluation: Evaluation) -> str:
    return f"{evaluation.value:.3f} {format_interval(evaluation.interval)}"


def judge_entries(store: Store, truth: GroundTruth, entries: Sequence[Entry]) -> Judgement:
    """Evaluate the LDS of all entries on the reporting half."""
    scores = {one.name: one.scores for one in entries}
    return judge_methods(store, truth, methods=(), extra_scores=scores, hybrid_of_best=False)


def format_table(judgement: Judgement, entries: Sequence[Entry]) -> list[str]:
    """Return a table with a line for each method, the best first."""
    prices = {one.name: one for one in entries}
    lines = [
        "| method | LDS | of ceiling | best minus this | CPU s | bytes/row |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for one in judgement.methods:
        figure, price = one.evaluation, prices[one.name]
        assert figure is not None
        ahead = "-"
        if one is not judgement.best:
            difference = judgement.against_best(one.name)
            ahead = f"{difference.value:+.3f} [{difference.interval[0]:+.3f}, {difference.interval[1]:+.3f}]"
        share = "-" if figure.share is None else f"{figure.share:.0%}"
        row_bytes = "-" if price.bytes_per_row is None else f"{price.bytes_per_row:,.0f}"
        mark = "" if not price.peer else " (peer)"
        cells = (
            one.name + mark,
            format_evaluation(figure),
            share,
            ahead,
            f"{price.seconds:.1f}",
            row_bytes,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def select_own_method(judgement: Judgement, entries: Sequence[Entry]) -> str:
    """Return our best method that used no outcomes, by the selection half."""
    fits = {
        one.name: lds(one.scores, judgement.truth, part="choosing").value
        for one in entries
        if not one.peer and not one.scores.chosen_on
    }
    return max(fits, key=lambda name: fits[name])


def compare_with_peers(judgement: Judgement, entries: Sequence[Entry]) -> str:
    """Compare our selected method with the best peer.

    The best peer is selected on the reporting half, which favors the peers.
    """
    named = {one.name for one in entries if one.peer}
    figures = {one.name: one.evaluation for one in judgement.methods}
    ours = select_own_method(judgement, entries)
    peers = next(one.name for one in judgement.methods if one.name in named)
    first, second = figures[ours], figures[peers]
    assert first is not None
    assert second is not None
    difference = compare(first, second)
    low, high = difference.interval
    verdict = "ahead" if low > 0 else "behind" if high < 0 else "no significant difference"
    share = "" if first.share is None else f", {first.share:.0%} of the ceiling"
    return (
        f"Our best without outcomes, selected on the selection half: *{ours}* ({first.value:.3f}{share}); the "
        f"best that peers have, *{peers}* ({second.value:.3f}): {difference.value:+.3f} [{low:+.3f}, {high:+.3f}], "
        f"{verdict}."
    )


def check_bars(judgement: Judgement, targets: Sequence[Bar]) -> tuple[list[str], bool]:
    """Return a line for each bar, and True if one is missed."""
    figures = {one.name: one.evaluation for one in judgement.methods}
    lines, missed = [], False
    for bar in targets:
        figure = figures[bar.entry]
        assert figure is not None
        lines += ["", bar.describe(figure.value)]
        missed |= figure.value < bar.least
    return lines, missed


def write_page(sections: Sequence[Section], order: Sequence[str], path: Path = PAGE) -> None:
    """Write these sections into the page; sections of other settings are not changed."""
    sections_by_name: dict[str, str] = {}
    if path.exists():
        for part in path.read_text(encoding="utf-8").split("\n## ")[1:]:
            sections_by_name[part.split(":", 1)[0]] = f"## {part.rstrip()}\n"
    sections_by_name |= {one.name: str(one) for one in sections}
    parts = [sections_by_name[name] for name in order if name in sections_by_name]
    missing = [name for name in order if name not in sections_by_name]
    head = HEAD + (f"\nNot run yet: {', '.join(missing)}.\n" if missing else "")
    path.write_text("\n".join([head, *parts]), encoding="utf-8")


def add_total_seconds(section: Section, seconds: float) -> Section:
    """Append the total cost of the setting."""
    total = f"Total, with training: {seconds:.0f} CPU seconds."
    return dataclasses.replace(section, lines=(*section.lines, "", total))
