"""Collect settings as fastargs does, and prepare the environment of a user's script."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep._config_file import read_config
from gradkeep.errors import DatamodelsError, GradkeepError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting, such as `worker.index`."""

    name: str
    kind: Callable[[Any], Any] = str
    default: Any = None
    required: bool = False
    switch: bool = False
    """It takes no value."""


def collect(
    flags: Sequence[Flag], arguments: Sequence[str], environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Return the value of every flag; later sources win, and unknown flags are ignored."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-C", "--config-file", action="append", default=[])
    for flag in flags:
        if flag.switch:
            parser.add_argument(f"--{flag.name}", action="store_const", const=True)
        else:
            parser.add_argument(f"--{flag.name}")
    parsed = vars(parser.parse_known_args(list(arguments))[0])
    values: dict[str, Any] = {}
    for file in parsed.pop("config_file"):
        values.update(_flatten(read_config(file, error=DatamodelsError)))
    values.update({name: value for name, value in parsed.items() if value is not None})
    values.update({flag.name: environment[flag.name] for flag in flags if flag.name in environment})
    return {flag.name: _value(flag, values.get(flag.name)) for flag in flags}


def run_command(command: Callable[[Sequence[str]], int | None]) -> None:
    """Run a command with this process's arguments; print errors and exit with a nonzero code."""
    try:
        code = command(sys.argv[1:])
    except GradkeepError as error:
        print(f"{Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
        code = 2
    except TimeoutError as error:
        print(f"{Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
        code = 75
    except Exception as error:
        text = script_traceback(error)
        if text is None:
            raise  # a bug of gradkeep
        print(f"{text}{Path(sys.argv[0]).stem}: the training script raised this", file=sys.stderr)
        code = 1
    sys.exit(code or 0)


def script_traceback(error: BaseException) -> str | None:
    """Format the traceback from the script's first frame on; None if no frame is the script's."""
    formatted = traceback.TracebackException.from_exception(error)
    ours = str(Path(__file__).parents[2])
    for at, frame in enumerate(formatted.stack):
        name = frame.filename
        if not name.startswith((ours, "<frozen ")) and "/importlib/" not in name:
            formatted.stack = traceback.StackSummary.from_list(list(formatted.stack)[at:])
            return "".join(formatted.format())
    return None


def _value(flag: Flag, value: Any) -> Any:
    if value is None:
        if flag.required:
            raise DatamodelsError(
                f"--{flag.name} is required",
                code="compat.missing_flag",
                fix=f"Pass --{flag.name}=VALUE.",
            )
        return False if flag.switch else flag.default
    if flag.switch:
        return str(value).lower() not in ("0", "false", "no", "")
    try:
        # YAML reads 1e-6 as text, and integers may contain underscores.
        return flag.kind(value)
    except (TypeError, ValueError) as error:
        raise DatamodelsError(
            f"--{flag.name} has a wrong value",
            code="compat.wrong_flag",
            found=repr(value),
            expected=getattr(flag.kind, "__name__", str(flag.kind)),
        ) from error


def _flatten(fields: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{before}{name}."))
        else:
            flat[f"{before}{name}"] = value
    return flat


def tolerate_other_flags() -> None:
    """If the script uses fastargs, let its configuration skip flags that are not its own."""
    try:
        config = importlib.import_module("fastargs").get_current_config()
    except ImportError:  # missing, or without its dependencies
        return

    def collect_argparse_args(parser: argparse.ArgumentParser, disable_help: bool = False) -> Any:
        words = [word for word in sys.argv[1:] if not (disable_help and word == "--help")]
        options = vars(parser.parse_known_args(words)[0])
        for file in options.pop("config_file", []):
            config.collect_config_file(file)
        config.collect(options)
        config.collect_env_variables()
        return config

    config.collect_argparse_args = collect_argparse_args


def collect_for_script() -> None:
    """Collect again, including the sections that the script has declared."""
    try:
        config = importlib.import_module("fastargs").get_current_config()
    except ImportError:  # missing, or installed without what it needs
        return
    parser = argparse.ArgumentParser(add_help=False)
    config.augment_argparse(parser)
    config.collect_argparse_args(parser)
