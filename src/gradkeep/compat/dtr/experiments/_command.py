"""Validate one command of a configuration and expand it into trials.

The original's names of models and sizes are accepted as well as the zoo's.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from gradkeep._arguments import one_of
from gradkeep._budgets import parse_bytes
from gradkeep.compat.dtr.experiments._trial import (
    PLACEMENTS,
    TYPES,
    Trial,
    TrialWork,
    Type,
    is_placement,
)
from gradkeep.compat.dtr.zoo import default_sizes, published_sizes, validate_sizes
from gradkeep.errors import BudgetError, GradkeepError, RematError
from gradkeep.remat.simulator._heuristics import heuristic

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MODELS = {"unroll_gan": "unrolled_gan"}
# In the original, `batch_size` is the number of steps of an LSTM and the depth of a tree, and
# `input_size` the number of rows; only commands with `input_size` are read that way.
_ROWS = {"lstm": "length", "gru": "length", "treelstm": "depth"}
_SIZES = {
    "transformer": {
        "input_seq_length": "length",
        "target_seq_length": "target_length",
        "num_feature": "dim",
    },
    "unrolled_gan": {"d_hid": "d_hidden", "g_hid": "g_hidden", "g_inp": "noise_dim"},
}


def zoo_name(model: str) -> str:
    """Return the zoo's name of a model.

    >>> zoo_name("tv_densenet121"), zoo_name("unroll_gan"), zoo_name("lstm")
    ('densenet121', 'unrolled_gan', 'lstm')
    """
    torchvision = re.fullmatch(r"tv_((?:res|dense)net\d+)", model)
    return torchvision[1] if torchvision else _MODELS.get(model, model)


def zoo_sizes(name: str, sizes: Mapping[str, float]) -> dict[str, float]:
    """Translate sizes to the zoo's names.

    >>> zoo_sizes("lstm", {"batch_size": 256, "input_size": 512})
    {'length': 256, 'batch_size': 512}
    """
    words = dict(_SIZES.get(name, {}))
    if name in _ROWS and "input_size" in sizes:
        words |= {"batch_size": _ROWS[name], "input_size": "batch_size"}
    return {words.get(key, key): value for key, value in sizes.items()}


_OF_LOGS = ("use_log", "get_log")
_IN_BUDGET = ("simrd", "optimal", "dtr", "planned")
# These may also be in extra_params, as in the original.
_RUNNING = {
    *("retry_on_error", "max_retries", "use_sampling", "ignore_small_tensors"),
    *("no_sampling_below_budget", "no_sampling_below_ratio"),
}
_NO_EFFECT = {"attempt_timeout", "input_params", "sync_gpu"}
# Defaults of the original.
_ORIGINAL = {"use_sampling": True, "ignore_small_tensors": True}

_Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e18)]
_Count = Annotated[int, msgspec.Meta(ge=1)]
_CountOrZero = Annotated[int, msgspec.Meta(ge=0)]
_Threshold = Annotated[float, msgspec.Meta(ge=0)] | None


class _Command(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a command, after lists are expanded."""

    type: Type
    kind: Literal["fixed", "ratio", "param_sweep", "use_log", "get_log"] | None = None
    memory_budget: float | str | None = None
    ratio: _Positive | None = None
    batch_size: Any = None
    heuristic: str = "dtr-eq"
    policy: Literal["eager", "banish", "ignore"] = "eager"
    limit: Annotated[float, msgspec.Meta(ge=1, lt=1e18)] = 10.0
    placement: str = ""
    time_limit: _Positive = 20.0
    timeout: _Positive = 600.0
    retry_on_error: bool = False
    max_retries: _CountOrZero = 10
    use_sampling: bool = False
    ignore_small_tensors: bool = False
    no_sampling_below_budget: _Threshold = None
    no_sampling_below_ratio: _Threshold = None
    n_reps: _Count = 5
    dry_run: _CountOrZero = 1
    n_inputs: _Count = 1
    seed: _CountOrZero = 0
    threads: _Count = 1
    save_logs: bool = False
    file_path: str | None = None
    extra_params: dict[str, Any] = {}
    config: Any = None
    use_profiling: Any = None  # ignored: profiles are always recorded


_KNOWN = set(_Command.__struct_fields__)
_CHOICES = {
    "type": ", ".join(TYPES),
    "kind": "fixed, ratio, param_sweep, use_log, get_log",
    "policy": "eager, banish, ignore",
}


@dataclass(frozen=True, slots=True)
class CommandDefaults:
    """Defaults of all commands."""

    fields: dict[str, Any] = field(default_factory=dict)
    published: bool = False
    """Use the published sizes where a command names none."""

    @classmethod
    def of(cls, config: dict[str, Any], *, original: bool) -> CommandDefaults:
        """Read the defaults of a configuration."""
        scale = config.get("sizes", "published" if original else "small")
        one_of(
            "sizes", scale, ("small", "published"), error=RematError, code="compat.unknown_sizes"
        )
        original_default = (config.get("dtr_settings") or {}).get("default") if original else None
        default = config.get("default", original_default) or {}
        if not isinstance(default, dict):
            raise RematError(
                "default: not a mapping",
                code="compat.default_not_a_mapping",
                found=repr(default)[:60],
                expected="fields of a command",
            )
        shared: dict[str, Any] = {
            key: config[key]
            for key in ("n_reps", "dry_run", "n_inputs", "seed", "threads", "save_logs")
            if key in config
        }
        if config.get("set_seed") is False:
            shared.pop("seed", None)
        habits = _ORIGINAL if original else {}
        return cls({**habits, **shared, **default}, published=scale == "published")


def trials_of(
    model: str, position: int, command: Any, defaults: CommandDefaults
) -> tuple[list[Trial], list[str]]:
    """Return the trials of a command, and notes about ignored fields."""
    where = f"{model}, command {position}"
    if not isinstance(command, dict):
        raise RematError(
            f"{where}: not a mapping",
            code="compat.command_not_a_mapping",
            found=repr(command)[:60],
            expected="{type: dtr, ratio: 0.5}",
        )
    notes = ignored_keys(command, _KNOWN, _NO_EFFECT, f"{where}: ")
    fields = {"extra_params": {}, **defaults.fields, **command}
    if fields.get("type") == "checkpoint":
        fields.setdefault("placement", list(PLACEMENTS))
    extra = fields["extra_params"] = fields["extra_params"] or {}
    # These override the defaults but not the command itself.
    lifted = {}
    if isinstance(extra, dict):
        lifted = {key: extra[key] for key in _RUNNING if key in extra and key not in command}
    trials = []
    for chosen in _unfold_lists(where, fields):
        new_trials, new_notes = _trials(
            where, model, _validate_command(where, {**chosen, **lifted}), defaults
        )
        trials += new_trials
        notes += new_notes
    return trials, notes


def _unfold_lists(where: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all combinations of the values in lists."""
    for key, value in fields.items():
        if isinstance(value, list) and not value:
            raise RematError(
                f"{where}: {key} is an empty list",
                code="compat.empty_list",
                expected="at least one value, or no field",
            )
    values = [value if isinstance(value, list) else [value] for value in fields.values()]
    for combination in itertools.product(*values):
        yield dict(zip(fields, combination, strict=True))


def _validate_command(where: str, fields: dict[str, Any]) -> _Command:
    try:
        # Not strict: YAML reads 5e-4 as text.
        return msgspec.convert(fields, _Command, strict=False)
    except msgspec.ValidationError as error:
        key = re.search(r"`\$\.(\w+)|field `(\w+)", str(error))
        name = (key[1] or key[2]) if key else ""
        raise RematError(
            f"{where}: {error}, got {repr(fields.get(name))[:60]}",
            code="compat.invalid_field",
            expected=_CHOICES.get(name),
        ) from error


def _trials(
    where: str, model: str, command: _Command, defaults: CommandDefaults
) -> tuple[list[Trial], list[str]]:
    """Return one trial per input, and notes."""
    ratio, budget = command.ratio, _budget(where, command.memory_budget)
    kind: Any = command.kind or ("fixed" if ratio is None else "ratio")
    file, mark = _log_file(where, command)
    save = kind == "get_log" or (command.type == "dtr" and command.save_logs)
    if kind in _OF_LOGS:
        kind = "fixed" if ratio is None else "ratio"
        budget = math.inf if budget is None and file is not None else budget
    options: dict[str, Any] = {}
    if command.type in _IN_BUDGET:
        by_ratio = kind == "ratio"
        if (ratio if by_ratio else budget) is None:
            missing = "ratio" if by_ratio else "memory_budget"
            raise RematError(
                f"{where}: {missing} is missing; kind {kind} needs it", code="compat.missing_field"
            )
        options["budget"] = math.inf if by_ratio else budget
        options["ratio"] = ratio if by_ratio else None
        options["time_limit"] = command.time_limit
    if command.type in ("simrd", "dtr"):
        options |= _eviction(where, command, options["budget"], options["ratio"])
    if command.type == "checkpoint":
        if not is_placement(command.placement):
            raise RematError(
                f"{where}: unknown placement",
                code="compat.unknown_placement",
                found=repr(command.placement),
                expected=f"K segments, {', '.join(PLACEMENTS)}",
            )
        options["placement"] = command.placement
    name, sizes, notes = _sizes(where, model, command, defaults)
    if file is not None and command.config is not None:
        notes.append(f"{where}: config has no effect, as in the original")
    # A log that the user provides has no inputs.
    inputs = 1 if file is not None else command.n_inputs
    trials = [
        Trial(
            model,
            command.type,
            kind,
            TrialWork(
                name,
                sizes,
                seed=0 if file is not None else command.seed + number,
                repeats=command.n_reps,
                warmup=command.dry_run,
                threads=command.threads,
            ),
            timeout=command.timeout,
            retries=command.max_retries if command.retry_on_error else 0,
            log=file,
            log_mark=mark,
            # The log of the last input is saved, as in the original.
            save_log=save and file is None and number == inputs - 1,
            **options,
        )
        for number in range(inputs)
    ]
    return trials, notes


def _log_file(where: str, command: _Command) -> tuple[str | None, str]:
    """Return the log that a command names, and a hash of it."""
    if command.kind in _OF_LOGS and command.type != "simrd":
        raise RematError(
            f"{where}: this kind is for simulations only",
            code="compat.kind_needs_simrd",
            found=command.kind,
            expected="fixed, ratio, param_sweep",
            fix="Simulate logs with type simrd, and write them with type dtr and save_logs: true.",
        )
    if command.kind != "use_log":
        return None, ""
    if command.file_path is None:
        raise RematError(
            f"{where}: file_path is missing; kind use_log needs it", code="compat.missing_field"
        )
    path = Path(command.file_path).expanduser()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RematError(
            f"{where}: file_path cannot be read",
            code="compat.log_unreadable",
            path=path,
            fix="Use kind get_log to record one.",
        ) from error
    return str(path), hashlib.sha256(content).hexdigest()[:12]


def _eviction(where: str, command: _Command, budget: float, ratio: float | None) -> dict[str, Any]:
    """Return the options of the eviction heuristic."""
    if command.type == "dtr" and command.policy != "eager":
        raise RematError(
            f"{where}: policy must be eager for live models, got {command.policy}",
            code="compat.live_policy",
            fix="Use type simrd to simulate other policies.",
        )
    try:
        heuristic(command.heuristic)
    except RematError as error:
        raise add_location(error, f"{where}: heuristic: ") from error
    # Up to this budget the whole pool is scored.
    below, limit = command.no_sampling_below_ratio, ratio
    if limit is None:
        below, limit = command.no_sampling_below_budget, budget
    tight = below is not None and limit <= below
    return {
        "heuristic": command.heuristic,
        "policy": command.policy,
        "limit": command.limit,
        "sample": command.use_sampling and not tight,
        "skip_small": command.ignore_small_tensors,
    }


def _sizes(
    where: str, model: str, command: _Command, defaults: CommandDefaults
) -> tuple[str, tuple[tuple[str, float], ...], list[str]]:
    """Return the zoo's name of the model, its sizes, and notes about unknown sizes."""
    name = zoo_name(model)
    extra = {k: v for k, v in command.extra_params.items() if k not in _RUNNING | _NO_EFFECT}
    lists = [key for key, value in extra.items() if isinstance(value, list)]
    if lists:
        raise RematError(
            f"{where}: extra_params.{lists[0]} is a list",
            code="compat.list_in_extra_params",
            fix="Write one command per value: lists in extra_params are not expanded.",
        )
    if command.batch_size is not None:
        extra["batch_size"] = command.batch_size
    try:
        base = (published_sizes if defaults.published else default_sizes)(name)
        sizes = zoo_sizes(name, {key: _as_number(value) for key, value in extra.items()})
        known = {key: value for key, value in sizes.items() if key in base}
        full = {**base, **validate_sizes(name, known)}
    except RematError as error:
        raise add_location(error, f"{where}: ") from error
    notes = [
        f"{where}: {name} has no size {key!r}, ignored; it has {', '.join(base)}"
        for key in sizes
        if key not in base
    ]
    return name, tuple(sorted(full.items())), notes


def _budget(where: str, value: float | str | None) -> float | None:
    """Parse a budget in bytes; -1 means no budget, as in the original."""
    if value is None:
        return None
    try:
        budget = float(parse_bytes(value)) if isinstance(value, str) else value
    except BudgetError as error:
        raise add_location(error, f"{where}: memory_budget: ") from error
    if budget == -1:
        return math.inf
    if not budget > 0:
        raise RematError(
            f"{where}: memory_budget must be above 0, or -1 for none",
            code="budget.not_positive",
            found=value,
        )
    return budget


def _as_number(value: Any) -> Any:
    """Convert text that is a number, because YAML reads 5e-4 as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def ignored_keys(
    fields: dict[str, Any], known: set[str], no_effect: set[str], where: str = ""
) -> list[str]:
    """Return notes about keys of a mapping without effect."""
    notes = []
    for key in fields:
        if key in no_effect:
            notes.append(f"{where}{key} has no effect")
        elif key not in known:
            near = difflib.get_close_matches(str(key), known | no_effect, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            notes.append(f"{where}{key!r} is unknown and ignored{meant}")
    return notes


def add_location(error: GradkeepError, where: str = "", path: Path | None = None) -> RematError:
    """Return the same error with its location in the configuration."""
    return RematError(
        f"{where}{error.message}",
        code=error.code,
        path=path,
        found=error.found,
        expected=error.expected,
        fix=error.fix,
    )
