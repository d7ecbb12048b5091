"""The experiment behind a Pareto picture: one model, every way to train it in fewer bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradkeep.remat._experiment_config import Experiment, parse_experiment
from gradkeep.remat._experiment_placements import PLACEMENTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LIVE_RATIOS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)


def pareto_experiment(
    models: Sequence[str],
    *,
    sizes: Mapping[str, float | str],
    heuristics: Sequence[str],
    ratios: Sequence[float],
    live_heuristics: Sequence[str] = ("dtr-eq",),
    live_ratios: Sequence[float] = LIVE_RATIOS,
    placements: Sequence[str] = PLACEMENTS,
    limit: float = 2.0,
    repeats: int = 5,
) -> Experiment:
    """Simulations and optima at `ratios`; at `live_ratios` steps online and by plan; checkpoints.

    >>> found = pareto_experiment(["lstm"], sizes={}, heuristics=["lru"], ratios=[0.5])
    >>> list(dict.fromkeys(trial.type for trial in found.trials))
    ['baseline', 'simrd', 'optimal', 'dtr', 'planned', 'checkpoint']
    """
    commands: list[dict[str, Any]] = [
        {"type": "baseline"},
        {"type": "simrd", "ratio": list(ratios), "heuristic": list(heuristics), "limit": limit},
        {"type": "optimal", "ratio": list(ratios)},
        {"type": "dtr", "ratio": list(live_ratios), "heuristic": list(live_heuristics)},
        {"type": "planned", "ratio": list(live_ratios)},
        {"type": "checkpoint", "placement": list(placements)},
    ]
    return parse_experiment(
        {
            "models": {model: [dict(command) for command in commands] for model in models},
            "default": {"extra_params": dict(sizes)},
            "n_reps": repeats,
        }
    )
