"""The simulated figures of the paper on DTR, and the logs that they are drawn from.

Logs are files, folders of them, or manifests, with the titles that these give them.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep.errors import RematError
from gradkeep.remat.simulator._picture import PictureStyle
from gradkeep.remat.simulator._sweep import MAIN_HEURISTICS, RATIOS, sweep_cases

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from gradkeep.remat.simulator._core import Policy
    from gradkeep.remat.simulator._sweep import SweepCase, SweepRow


@dataclass(frozen=True, slots=True)
class TitledLog:
    """A log with what a picture calls it."""

    path: Path
    title: str


@dataclass(frozen=True, slots=True)
class LogList:
    """The logs, and what was passed over."""

    logs: tuple[TitledLog, ...]
    notes: tuple[str, ...] = ()


def find_logs(places: Sequence[str | os.PathLike[str]]) -> LogList:
    """The logs that files, folders and manifests name, in their order and each once.

    A folder stands for its `manifest.json`, or without one for all its `.log` files. A manifest lists
    its models under `models`, or per model as `simrd_config` of an experiment does; paths in it are
    taken from where it lies or from the folder above. What it names and is not there is passed over
    with a note, as the original does.
    """
    found: dict[Path, TitledLog] = {}
    notes: list[str] = []
    for place in map(Path, places):
        if place.is_dir():
            manifest = place / "manifest.json"
            logs = (
                _listed(manifest, notes)
                if manifest.is_file()
                else map(_titled, sorted(place.glob("*.log")))
            )
        elif place.suffix == ".json":
            logs = _listed(place, notes)
        elif place.is_file():
            logs = iter([_titled(place)])
        else:
            raise RematError(
                "there is no such log", path=place, expected="logs, a folder of them, a manifest"
            )
        before = len(found)
        for log in logs:
            found.setdefault(log.path, log)
        if len(found) == before and not any(notes):
            raise RematError("no logs in here", path=place, expected="files named .log")
    if not found:
        raise RematError("none of the logs is there", found="; ".join(notes))
    return LogList(tuple(found.values()), tuple(notes))


def _titled(path: Path) -> TitledLog:
    return TitledLog(path, path.name.split("-")[0])


def _listed(manifest: Path, notes: list[str]) -> Iterator[TitledLog]:
    try:
        content = json.loads(manifest.read_text())
    except (OSError, ValueError) as error:
        raise RematError(
            "the manifest cannot be read", path=manifest, found=str(error).splitlines()[0]
        ) from error
    for at, entry in enumerate(_entries(manifest, content), 1):
        if not isinstance(entry, dict) or not isinstance(entry.get("log"), str):
            raise RematError(
                f"model {at} of the manifest names no log",
                path=manifest,
                found=repr(entry)[:80],
                expected='{"name": ..., "log": "logs/a.log"}',
            )
        name = str(entry.get("title") or entry.get("name") or Path(entry["log"]).stem)
        if entry.get("has_start") is False:
            raise RematError(
                f"has_start of {name!r} is false: a log is read from its annotation START on",
                path=manifest,
                fix='add {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"} as its first line',
            )
        log = _placed(manifest, entry["log"])
        if log is None:
            notes.append(f"{manifest}: {name!r} is passed over, {entry['log']} is not there")
            continue
        yield TitledLog(log, name)


def _entries(manifest: Path, content: Any) -> list[Any]:
    models = content.get("models") if isinstance(content, dict) else None
    if isinstance(models, list):
        return models
    if isinstance(content, dict) and all(isinstance(part, list) for part in content.values()):
        return [entry for part in content.values() for entry in part]
    raise RematError(
        "this is no manifest of logs",
        path=manifest,
        found=type(content).__name__,
        expected='{"models": [{"name": ..., "log": ...}]}, or a list of such per model',
    )


def _placed(manifest: Path, log: str) -> Path | None:
    places = (manifest.parent / log, manifest.parent.parent / log, manifest.parent / Path(log).name)
    return next((place for place in places if place.is_file()), None)


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
        """What has to be simulated for it."""
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
