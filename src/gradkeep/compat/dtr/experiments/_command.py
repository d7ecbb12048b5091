"""One command of a configuration, validated and unfolded into trials.

The original's names of models and sizes are understood as well as the zoo's.
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

from gradkeep._budgets import parse_bytes
from gradkeep.compat.dtr.experiments._trial import (
    PLACEMENTS,
    TYPES,
    Trial,
    TrialWork,
    Type,
    known_placement,
)
from gradkeep.compat.dtr.zoo import checked_sizes, default_sizes, published_sizes
from gradkeep.errors import BudgetError, GradkeepError, RematError
from gradkeep.remat.simulator._heuristics import heuristic

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MODELS = {"unroll_gan": "unrolled_gan"}
# There, `batch_size` was the number of steps of an LSTM and the depth of a tree, and `input_size`
# the number of rows: only a command with `input_size` speaks that way.
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
    """The zoo's name of a model.

    >>> zoo_name("tv_densenet121"), zoo_name("unroll_gan"), zoo_name("lstm")
    ('densenet121', 'unrolled_gan', 'lstm')
    """
    torchvision = re.fullmatch(r"tv_((?:res|dense)net\d+)", model)
    return torchvision[1] if torchvision else _MODELS.get(model, model)


def zoo_sizes(name: str, sizes: Mapping[str, float]) -> dict[str, float]:
    """The sizes in the zoo's words.

    >>> zoo_sizes("lstm", {"batch_size": 256, "input_size": 512})
    {'length': 256, 'batch_size': 512}
    """
    words = dict(_SIZES.get(name, {}))
    if name in _ROWS and "input_size" in sizes:
        words |= {"batch_size": _ROWS[name], "input_size": "batch_size"}
    return {words.get(key, key): value for key, value in sizes.items()}


_OF_LOGS = ("use_log", "get_log")
_IN_BUDGET = ("simrd", "optimal", "dtr", "planned")
# These may also stand among extra_params, where the original has them.
_RUNNING = {
    *("retry_on_error", "max_retries", "use_sampling", "ignore_small_tensors"),
    *("no_sampling_below_budget", "no_sampling_below_ratio"),
}
_NO_EFFECT = {"attempt_timeout", "input_params", "sync_gpu"}
# What the original does unless it is told otherwise.
_ORIGINAL = {"use_sampling": True, "ignore_small_tensors": True}

_Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e18)]
_Count = Annotated[int, msgspec.Meta(ge=1)]
_CountOrZero = Annotated[int, msgspec.Meta(ge=0)]
_Threshold = Annotated[float, msgspec.Meta(ge=0)] | None


class _Command(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a command, after lists are unfolded."""

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
    use_profiling: Any = None  # what it would add is always there


_KNOWN = set(_Command.__struct_fields__)
_CHOICES = {
    "type": ", ".join(TYPES),
    "kind": "fixed, ratio, param_sweep, use_log, get_log",
    "policy": "eager, banish, ignore",
}


@dataclass(frozen=True, slots=True)
class CommandDefaults:
    """What holds for every command unless it says otherwise."""

    fields: dict[str, Any] = field(default_factory=dict)
    published: bool = False
    """Sizes that are not named are those of the published experiments."""

    @classmethod
    def of(cls, config: dict[str, Any], *, original: bool) -> CommandDefaults:
        """The defaults of a whole configuration."""
        scale = config.get("sizes", "published" if original else "small")
        if scale not in ("small", "published"):
            raise RematError("sizes: unknown", found=repr(scale), expected="'small' or 'published'")
        given = (config.get("dtr_settings") or {}).get("default") if original else None
        default = config.get("default", given) or {}
        if not isinstance(default, dict):
            raise RematError(
                "default: not a mapping", found=repr(default)[:60], expected="fields of a command"
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
    """The trials of a command, and notes about what is ignored in it."""
    where = f"{model}, command {position}"
    if not isinstance(command, dict):
        raise RematError(
            f"{where}: not a mapping", found=repr(command)[:60], expected="{type: dtr, ratio: 0.5}"
        )
    notes = ignored_keys(command, _KNOWN, _NO_EFFECT, f"{where}: ")
    fields = {"extra_params": {}, **defaults.fields, **command}
    if fields.get("type") == "checkpoint":
        fields.setdefault("placement", list(PLACEMENTS))
    extra = fields["extra_params"] = fields["extra_params"] or {}
    # Before the defaults, after what the command itself says.
    lifted = {}
    if isinstance(extra, dict):
        lifted = {key: extra[key] for key in _RUNNING if key in extra and key not in command}
    trials = []
    for chosen in _unfolded(where, fields):
        made, said = _trials(where, model, _validated(where, {**chosen, **lifted}), defaults)
        trials += made
        notes += said
    return trials, notes


def _unfolded(where: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All combinations of the values in lists."""
    for key, value in fields.items():
        if isinstance(value, list) and not value:
            raise RematError(
                f"{where}: {key} is an empty list", expected="at least one value, or no field"
            )
    values = [value if isinstance(value, list) else [value] for value in fields.values()]
    for combination in itertools.product(*values):
        yield dict(zip(fields, combination, strict=True))


def _validated(where: str, fields: dict[str, Any]) -> _Command:
    try:
        # Not strict: YAML reads 5e-4 as text.
        return msgspec.convert(fields, _Command, strict=False)
    except msgspec.ValidationError as error:
        key = re.search(r"`\$\.(\w+)|field `(\w+)", str(error))
        name = (key[1] or key[2]) if key else ""
        raise RematError(
            f"{where}: {error}, got {repr(fields.get(name))[:60]}",
            expected=_CHOICES.get(name),
        ) from error


def _trials(
    where: str, model: str, command: _Command, defaults: CommandDefaults
) -> tuple[list[Trial], list[str]]:
    """One trial per input, and notes."""
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
            raise RematError(f"{where}: {missing} missing; kind {kind} needs it")
        options["budget"] = math.inf if by_ratio else budget
        options["ratio"] = ratio if by_ratio else None
        options["time_limit"] = command.time_limit
    if command.type in ("simrd", "dtr"):
        options |= _eviction(where, command, options["budget"], options["ratio"])
    if command.type == "checkpoint":
        if not known_placement(command.placement):
            raise RematError(
                f"{where}: placement unknown: {command.placement!r}",
                expected=f"K segments, {', '.join(PLACEMENTS)}",
            )
        options["placement"] = command.placement
    name, sizes, notes = _sizes(where, model, command, defaults)
    if file is not None and command.config is not None:
        notes.append(f"{where}: config has no effect here, nor had it there")
    # A log that is given has no inputs.
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
            # As there: the log of the last input is saved.
            save_log=save and file is None and number == inputs - 1,
            **options,
        )
        for number in range(inputs)
    ]
    return trials, notes


def _log_file(where: str, command: _Command) -> tuple[str | None, str]:
    """The log that a command brings along, and a hash of it."""
    if command.kind in _OF_LOGS and command.type != "simrd":
        raise RematError(
            f"{where}: kind is for simulations: {command.kind}",
            expected="fixed, ratio, param_sweep",
            fix="logs are simulated by type simrd, and written by type dtr with save_logs: true",
        )
    if command.kind != "use_log":
        return None, ""
    if command.file_path is None:
        raise RematError(f"{where}: file_path missing; kind use_log needs it")
    path = Path(command.file_path).expanduser()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RematError(
            f"{where}: file_path cannot be read", path=path, fix="kind get_log records one"
        ) from error
    return str(path), hashlib.sha256(content).hexdigest()[:12]


def _eviction(where: str, command: _Command, budget: float, ratio: float | None) -> dict[str, Any]:
    """How to choose what to evict."""
    if command.type == "dtr" and command.policy != "eager":
        raise RematError(
            f"{where}: policy must be eager for live models, got {command.policy}",
            fix="other policies can be simulated: type simrd",
        )
    try:
        heuristic(command.heuristic)
    except RematError as error:
        raise told_of(error, f"{where}: heuristic: ") from error
    # At or below some budget the whole pool is looked at.
    below, room = command.no_sampling_below_ratio, ratio
    if room is None:
        below, room = command.no_sampling_below_budget, budget
    tight = below is not None and room <= below
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
    """The model in the zoo, its sizes, and notes about sizes that it does not have."""
    name = zoo_name(model)
    extra = {k: v for k, v in command.extra_params.items() if k not in _RUNNING | _NO_EFFECT}
    lists = [key for key, value in extra.items() if isinstance(value, list)]
    if lists:
        raise RematError(
            f"{where}: extra_params.{lists[0]} is a list",
            fix="lists in extra_params are not unfolded: write one command per value",
        )
    if command.batch_size is not None:
        extra["batch_size"] = command.batch_size
    try:
        base = (published_sizes if defaults.published else default_sizes)(name)
        sizes = zoo_sizes(name, {key: _as_number(value) for key, value in extra.items()})
        known = {key: value for key, value in sizes.items() if key in base}
        full = {**base, **checked_sizes(name, known)}
    except RematError as error:
        raise told_of(error, f"{where}: ") from error
    notes = [
        f"{where}: {name} has no size {key!r}, ignored; it has {', '.join(base)}"
        for key in sizes
        if key not in base
    ]
    return name, tuple(sorted(full.items())), notes


def _budget(where: str, value: float | str | None) -> float | None:
    """Bytes; -1 is the original's word for no budget."""
    if value is None:
        return None
    try:
        budget = float(parse_bytes(value)) if isinstance(value, str) else value
    except BudgetError as error:
        raise told_of(error, f"{where}: memory_budget: ") from error
    if budget == -1:
        return math.inf
    if not budget > 0:
        raise RematError(f"{where}: memory_budget must be above 0, or -1 for none", found=value)
    return budget


def _as_number(value: Any) -> Any:
    """YAML reads 5e-4 as text: take text that is a number for one."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def ignored_keys(
    given: dict[str, Any], known: set[str], no_effect: set[str], where: str = ""
) -> list[str]:
    """Notes about the keys of a mapping that do nothing."""
    notes = []
    for key in given:
        if key in no_effect:
            notes.append(f"{where}{key} has no effect here")
        elif key not in known:
            near = difflib.get_close_matches(str(key), known | no_effect, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            notes.append(f"{where}{key!r} is unknown and ignored{meant}")
    return notes


def told_of(error: GradkeepError, where: str = "", path: Path | None = None) -> RematError:
    """The same error, with the place in the configuration that it is about."""
    what = f"{where}{error.message}"
    return RematError(what, path=path, found=error.found, expected=error.expected, fix=error.fix)
