"""One command of a configuration, checked field by field and unfolded into trials.

The original's names of models and sizes are understood as well as the zoo's.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep._budgets import parse_bytes
from gradkeep.compat.dtr.experiments._trial import (
    PLACEMENTS,
    TYPES,
    Trial,
    TrialWork,
    known_placement,
)
from gradkeep.data.architectures._catalog import checked_sizes, default_sizes, published_sizes
from gradkeep.errors import BudgetError, RematError
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
_KINDS = ("fixed", "ratio", "param_sweep", *_OF_LOGS)
_IN_BUDGET = ("simrd", "optimal", "dtr", "planned")
_BY_HEURISTIC = ("simrd", "dtr")
# These may also stand among extra_params, where the original has them.
_RUNNING = {
    *("retry_on_error", "max_retries", "use_sampling", "ignore_small_tensors"),
    *("no_sampling_below_budget", "no_sampling_below_ratio"),
}
_KNOWN = {
    *("type", "kind", "memory_budget", "ratio", "batch_size", "heuristic", "policy", "limit"),
    *("timeout", "extra_params", "n_reps", "dry_run", "n_inputs", "seed", "threads", *_RUNNING),
    *("placement", "time_limit", "save_logs", "file_path", "config"),
    "use_profiling",  # what it would add is always told
}
_NO_EFFECT = {"attempt_timeout", "input_params", "sync_gpu"}
# What the original does unless it is told otherwise.
_ORIGINAL = {"use_sampling": True, "ignore_small_tensors": True}


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
    fields = {**defaults.fields, **command}
    fields.setdefault("extra_params", {})
    if "type" not in fields:
        raise RematError(f"{where}: no field type", expected=", ".join(TYPES))
    if fields["type"] == "checkpoint":
        fields.setdefault("placement", list(PLACEMENTS))
    extra = fields.pop("extra_params") or {}
    if not isinstance(extra, dict):
        raise RematError(f"{where}: extra_params is not a mapping", found=repr(extra)[:60])
    trials = []
    # Before the defaults, after what the command itself says.
    lifted = {key: extra[key] for key in _RUNNING if key in extra and key not in command}
    for chosen in _unfolded(where, fields):
        chosen |= lifted
        reader = _CommandReader(where, model, {**chosen, "extra_params": extra}, defaults)
        trials += reader.trials()
        notes += reader.notes
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


@dataclass(slots=True)
class _CommandReader:
    where: str
    model: str
    fields: dict[str, Any]
    defaults: CommandDefaults
    notes: list[str] = field(default_factory=list)

    def trials(self) -> list[Trial]:
        """One trial per input."""
        kind_of = self._choice("type", TYPES, None)
        ratio = self._number("ratio", None, least=0.0, open_end=True)
        kind = self._choice("kind", _KINDS, "fixed" if ratio is None else "ratio")
        budget = self._budget()
        file, mark = self._log_file(kind_of, kind)
        save = kind == "get_log" or (kind_of == "dtr" and self._flag("save_logs"))
        if kind in _OF_LOGS:
            kind = "fixed" if ratio is None else "ratio"
            budget = math.inf if budget is None and file is not None else budget
        asked: dict[str, Any] = {}
        if kind_of in _IN_BUDGET:
            by_ratio = kind == "ratio"
            if (ratio if by_ratio else budget) is None:
                wanted = "ratio" if by_ratio else "memory_budget"
                raise self._wrong(wanted, f"missing; kind {kind} needs it", None, None)
            asked["budget"] = math.inf if by_ratio or budget is None else budget
            asked["ratio"] = ratio if by_ratio else None
            asked["time_limit"] = self._number("time_limit", 20.0, least=0.0, open_end=True)
        if kind_of in _BY_HEURISTIC:
            asked |= self._choosing(kind_of, asked["budget"], asked["ratio"])
        if kind_of == "checkpoint":
            asked["placement"] = self._placement()
        tries = self._number("max_retries", 10, least=0) if self._flag("retry_on_error") else 0
        work = TrialWork(
            *self._sizes(),
            repeats=self._whole("n_reps", 5),
            warmup=self._whole("dry_run", 1, 0),
            threads=self._whole("threads", 1),
        )
        trial = Trial(
            self.model,
            kind_of,
            kind,
            work,
            timeout=self._number("timeout", 600.0, least=0.0, open_end=True) or 600.0,
            retries=int(tries or 0),
            log=file,
            log_mark=mark,
            **asked,
        )
        seed, inputs = self._whole("seed", 0, 0), self._whole("n_inputs", 1)
        if file is not None:
            return [trial]
        works = [dataclasses.replace(work, seed=seed + number) for number in range(inputs)]
        # As there: the log of the last input is saved.
        return [
            dataclasses.replace(trial, work=work, save_log=save and work is works[-1])
            for work in works
        ]

    def _log_file(self, kind_of: str, kind: str) -> tuple[str | None, str]:
        """The log that a command brings along, and a hash of it."""
        if kind not in _OF_LOGS:
            return None, ""
        if kind_of != "simrd":
            others = ", ".join(name for name in _KINDS if name not in _OF_LOGS)
            fix = "logs are simulated by type simrd, and written by type dtr with save_logs: true"
            raise self._wrong("kind", "is for simulations", kind, others, fix)
        if kind == "get_log":
            return None, ""
        given = self.fields.get("file_path")
        if not isinstance(given, str):
            raise self._wrong("file_path", "missing; kind use_log needs it", given, "a log's path")
        path = Path(given).expanduser()
        try:
            content = path.read_bytes()
        except OSError as error:
            fix = "kind get_log records one"
            raise self._wrong("file_path", "cannot be read", given, "a log", fix) from error
        if self.fields.get("config") is not None:
            self.notes.append(f"{self.where}: config has no effect here, nor had it there")
        return str(path), hashlib.sha256(content).hexdigest()[:12]

    def _choosing(self, kind_of: str, budget: float, ratio: float | None) -> dict[str, Any]:
        """How it is chosen what to evict."""
        policy = self._choice("policy", ("eager", "banish", "ignore"), "eager")
        if kind_of == "dtr" and policy != "eager":
            fix = "other policies can be simulated: type simrd"
            raise self._wrong("policy", "is not for live models", policy, "eager", fix)
        name = str(self.fields.get("heuristic", "dtr-eq"))
        try:
            heuristic(name)
        except RematError as error:
            raise self._wrong("heuristic", error.what, error.found, error.expected) from error
        # At or below some budget the whole pool is looked at.
        key = "no_sampling_below_budget" if ratio is None else "no_sampling_below_ratio"
        below = self._number(key, None, least=0.0)
        tight = below is not None and (budget if ratio is None else ratio) <= below
        return {
            "heuristic": name,
            "policy": policy,
            "limit": self._number("limit", 10.0, least=1.0),
            "sample": self._flag("use_sampling") and not tight,
            "skip_small": self._flag("ignore_small_tensors"),
        }

    def _placement(self) -> str:
        name = self.fields["placement"]
        if not isinstance(name, str) or not known_placement(name):
            raise self._wrong("placement", "unknown", name, f"K segments, {', '.join(PLACEMENTS)}")
        return name

    def _sizes(self) -> tuple[str, tuple[tuple[str, float], ...]]:
        name = zoo_name(self.model)
        try:
            base = (published_sizes if self.defaults.published else default_sizes)(name)
        except RematError as error:
            raise told_of(error, f"{self.model}: ") from error
        given = {
            key: value
            for key, value in self.fields["extra_params"].items()
            if key not in _RUNNING and key not in _NO_EFFECT
        }
        for key, value in given.items():
            if isinstance(value, list):
                fix = "lists in extra_params are not unfolded: write one command per value"
                raise self._wrong(f"extra_params.{key}", "is a list", value, "a number", fix)
        if "batch_size" in self.fields:
            given["batch_size"] = self.fields["batch_size"]
        numbers = {key: _as_number(value) for key, value in given.items()}
        sizes = zoo_sizes(name, numbers)
        self.notes += [
            f"{self.where}: {name} has no size {key!r}, ignored; it has {', '.join(base)}"
            for key in sizes
            if key not in base
        ]
        known = {key: value for key, value in sizes.items() if key in base}
        try:
            full = {**base, **checked_sizes(name, known)}
        except RematError as error:
            raise told_of(error, f"{self.where}: ") from error
        return name, tuple(sorted(full.items()))

    def _budget(self) -> float | None:
        value = self.fields.get("memory_budget")
        if value is None:
            return None
        number = _as_number(value)
        if isinstance(number, str):
            try:
                return float(parse_bytes(number))
            except BudgetError as error:
                raise self._wrong("memory_budget", error.what, value, error.expected) from error
        if isinstance(number, bool) or not isinstance(number, int | float) or math.isnan(number):
            raise self._wrong("memory_budget", "is not a number", value, "bytes, such as 2GiB")
        if number == -1:
            return math.inf  # the original's word for no budget
        if number <= 0:
            raise self._wrong("memory_budget", "is not above 0", value, "bytes, or -1 for no limit")
        return float(number)

    def _choice(self, key: str, choices: tuple[str, ...], default: str | None) -> Any:
        value = self.fields.get(key, default)
        if value not in choices:
            raise self._wrong(key, "unknown", value, ", ".join(choices))
        return value

    def _whole(self, key: str, default: int, least: int = 1) -> int:
        number = self._number(key, default, least=least)
        if number is None or number != int(number):
            raise self._wrong(key, "is not a whole number", self.fields.get(key), "a whole number")
        return int(number)

    def _number(
        self, key: str, default: float | None, *, least: float, open_end: bool = False
    ) -> float | None:
        value = self.fields.get(key, self.fields["extra_params"].get(key, default))
        if value is None:
            return None
        number = _as_number(value)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise self._wrong(key, "is not a number", value, "a number")
        if not (number > least if open_end else number >= least) or math.isinf(number):
            word = "above" if open_end else "at least"
            raise self._wrong(key, "is out of range", value, f"a number {word} {least:g}")
        return number

    def _flag(self, key: str) -> bool:
        value = self.fields.get(key, self.fields["extra_params"].get(key, False))
        if not isinstance(value, bool):
            raise self._wrong(key, "is not true or false", value, "true or false")
        return value

    def _wrong(
        self, key: str, what: str, found: object, expected: object, fix: str | None = None
    ) -> RematError:
        shown = None if found is None else repr(found)
        return RematError(f"{self.where}: {key} {what}", found=shown, expected=expected, fix=fix)


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


def told_of(error: RematError, where: str = "", path: Path | None = None) -> RematError:
    """The same error, with the place in the configuration that it is about."""
    what = f"{where}{error.what}"
    return RematError(what, path=path, found=error.found, expected=error.expected, fix=error.fix)
