"""Configurations of experiments: per model a list of commands, as JSON or YAML.

    models:
      resnet32:
        - {type: baseline, batch_size: 8}
        - {type: dtr, kind: ratio, ratio: [0.8, 0.5], heuristic: [dtr-eq, msps]}

A list unfolds into one trial per value, several lists into all combinations. The original's own
files are read too: `models` is a list there, and the commands are under `dtr_settings`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep._config_file import read_config
from gradkeep.compat.dtr.experiments._command import (
    CommandDefaults,
    add_location,
    ignored_keys,
    trials_of,
)
from gradkeep.compat.dtr.experiments._trial import PLACEMENTS
from gradkeep.errors import RematError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from gradkeep.compat.dtr.experiments._trial import Trial

_KNOWN = {
    *("models", "dtr_settings", "default", "sizes", "active", "report_errors"),
    *("seed", "set_seed", "n_reps", "n_inputs", "dry_run", "threads"),
    *("save_logs", "log_dest", "simrd_config"),
}
# Settings of the original about machines and services that are not used here.
_NO_EFFECT = {"sync_gpu", "dtr_torch_cmd", "notify", "ignore_kind"}


@dataclass(frozen=True, slots=True)
class DtrExperiment:
    """A parsed configuration."""

    trials: tuple[Trial, ...]
    notes: tuple[str, ...]
    """Ignored settings, with reasons."""
    report_errors: bool = True
    """Continue after a failed trial."""
    log_dest: Path | None = None
    """Folder for the logs of `save_logs`; without one they stay with the results."""
    simrd_config: str | None = None
    """Name of a manifest in that folder, which `gradkeep remat figures` reads."""


def read_experiment(path: str | os.PathLike[str]) -> DtrExperiment:
    """Read and validate a configuration; errors name the location."""
    file = Path(path)
    try:
        return parse_experiment(read_config(file, error=RematError))
    except RematError as error:
        if error.path is not None:
            raise
        raise add_location(error, path=file) from error


def parse_experiment(config: dict[str, Any]) -> DtrExperiment:
    """Validate a configuration that is already in memory.

    >>> experiment = parse_experiment({"models": {"lstm": [{"type": "dtr", "ratio": [0.5, 0.3]}]}})
    >>> [trial.ratio for trial in experiment.trials]
    [0.5, 0.3]
    """
    notes = ignored_keys(config, _KNOWN, _NO_EFFECT)
    chosen, original = _chosen(config)
    defaults = CommandDefaults.of(config, original=original)
    if config.get("active") is False:
        notes.append("active is false: nothing is run")
        return DtrExperiment((), tuple(notes))
    trials: list[Trial] = []
    for model, commands in chosen.items():
        if not isinstance(commands, list) or not commands:
            raise RematError(
                f"{model}: the value is not a list of commands",
                code="compat.no_commands",
                found=repr(commands)[:60],
                expected="a list such as [{type: baseline}, {type: dtr, ratio: 0.5}]",
            )
        for position, command in enumerate(commands, 1):
            new_trials, new_notes = trials_of(model, position, command, defaults)
            trials += new_trials
            notes += new_notes
    return DtrExperiment(
        tuple({(trial.model, trial.key): trial for trial in trials}.values()),
        tuple(dict.fromkeys(notes)),
        report_errors=config.get("report_errors") is not False,
        log_dest=_parse_folder(config.get("log_dest")),
        simrd_config=_file_name(config.get("simrd_config")),
    )


def _parse_folder(value: object) -> Path | None:
    if value is None or (isinstance(value, str) and value.strip() in ("", "/dev/null")):
        return None
    if not isinstance(value, str):
        raise RematError(
            f"log_dest must be the path of a folder, got {value!r}", code="compat.log_dest"
        )
    return Path(value).expanduser()


def _file_name(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value or Path(value).name != value:
        raise RematError(
            f"simrd_config must be the name of a file in log_dest, got {value!r}",
            code="compat.simrd_config",
        )
    return value


def _chosen(config: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the commands per model, and True for the original's layout."""
    models, settings = config.get("models"), config.get("dtr_settings")
    if isinstance(models, dict) and models:
        return models, False
    if not isinstance(models, list) or not models:
        raise RematError(
            "models: no models are named",
            code="compat.no_models",
            found=repr(models),
            expected="a mapping from names to commands, or a list of names with dtr_settings",
        )
    there = settings if isinstance(settings, dict) else {}
    missing = [repr(name) for name in models if name not in there]
    if missing:
        raise RematError(
            f"dtr_settings: no commands for {', '.join(missing)}",
            code="compat.no_settings",
            found=", ".join(there) or repr(settings)[:60],
            expected="the same names in models and dtr_settings",
        )
    return {name: there[name] for name in models}, True


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
) -> DtrExperiment:
    """Build simulations and optima at `ratios`, live steps online and by plan at `live_ratios`, and checkpoints.

    >>> experiment = pareto_experiment(["lstm"], sizes={}, heuristics=["lru"], ratios=[0.5])
    >>> list(dict.fromkeys(trial.type for trial in experiment.trials))
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
