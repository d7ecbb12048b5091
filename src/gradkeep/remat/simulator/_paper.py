"""The simulated figures of the paper on DTR: their curves, and the simulations that they share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradkeep.remat.simulator._picture import PictureStyle
from gradkeep.remat.simulator._sweep import MAIN_HEURISTICS, RATIOS, sweep_cases

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradkeep.remat.simulator._core import Policy
    from gradkeep.remat.simulator._log_list import TitledLog
    from gradkeep.remat.simulator._sweep import SweepCase, SweepRow

COUNTED = ("dtr", "dtr-eq", "dtr-local")
"""Whose accesses the paper shows."""
_SAME = {
    "ab-exact-size-stale": "dtr",
    "ab-eq-size-stale": "dtr-eq",
    "ab-local-size-stale": "dtr-local",
    "ab-none-size": "largest",
    "ab-none": "random",
}
"""Heuristics of the ablation that another figure has too: simulated once."""
_PARTS = {
    "exact": "the exact neighbourhood",
    "eq": "equivalence classes",
    "local": "its own cost",
    "none": "no cost",
}


@dataclass(frozen=True, slots=True)
class _Curve:
    heuristic: str
    policy: Policy = "eager"
    releases: bool = True
    shown: str = ""
    """Its name in the picture, where that is another."""


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """One figure: a panel per log, and in each these curves."""

    name: str
    look: PictureStyle
    curves: tuple[_Curve, ...]

    def cases(
        self, logs: Sequence[TitledLog], *, ratios: Sequence[float] = RATIOS, limit: float = 2.0
    ) -> list[SweepCase]:
        """What has to be simulated for it; accesses are counted where the paper shows them."""
        paths = [log.path for log in logs]
        return [
            case
            for curve in self.curves
            for case in sweep_cases(
                paths,
                heuristics=(curve.heuristic,),
                ratios=ratios,
                policies=(curve.policy,),
                limit=limit,
                releases=curve.releases,
                counted=curve.heuristic in COUNTED and curve.releases,
            )
        ]

    def rows(self, done: Mapping[SweepCase, SweepRow], logs: Sequence[TitledLog]) -> list[SweepRow]:
        """Its part of a finished sweep, under the names that it shows."""
        mine = []
        for curve in self.curves:
            which = (curve.heuristic, curve.policy, curve.releases)
            shown = curve.shown or curve.heuristic
            for log in logs:
                mine += [
                    dataclasses.replace(row, heuristic=shown)
                    for case, row in done.items()
                    if (case.heuristic, case.policy, case.releases) == which
                    and case.log == str(log.path)
                ]
        return mine


def paper_figures(logs: Sequence[TitledLog]) -> tuple[PaperFigure, ...]:
    """Budgets against time, what to do with dead storages, the ablation in four parts, accesses.

    >>> [figure.name for figure in paper_figures([])][:3]
    ['pareto', 'banishing', 'ablation-exact']
    """
    titles = tuple((str(log.path), log.title) for log in logs)
    ablation = tuple(
        PaperFigure(
            f"ablation-{part}",
            PictureStyle(f"What size and staleness are worth with {words}", titles=titles),
            tuple(
                _Curve(_SAME.get(name, name), shown=name)
                for rest in ("-size-stale", "-size", "-stale", "")
                for name in (f"ab-{part}{rest}",)
            ),
        )
        for part, words in _PARTS.items()
    )
    return (
        PaperFigure(
            "pareto",
            PictureStyle("What a smaller memory budget costs", titles=titles),
            tuple(_Curve(name) for name in MAIN_HEURISTICS),
        ),
        PaperFigure("banishing", dead_style(titles), DEAD_CURVES),
        *ablation,
        PaperFigure(
            "accesses",
            PictureStyle(
                "How much looking around choosing takes",
                "accesses",
                "storages looked at, as the original counts",
                logarithmic=True,
                titles=titles,
            ),
            tuple(_Curve(name) for name in COUNTED),
        ),
    )


DEAD_CURVES = (
    _Curve("dtr-union", "banish"),
    _Curve("dtr"),
    _Curve("dtr", releases=False),
)
"""For ever, at once, never: banishing has no neighbourhoods that are kept, hence another heuristic."""


def dead_style(titles: tuple[tuple[str, str], ...] = ()) -> PictureStyle:
    """The look of the figure on storages that nobody refers to."""
    return PictureStyle(
        "What happens to storages that nobody refers to", by_policy=True, titles=titles
    )
