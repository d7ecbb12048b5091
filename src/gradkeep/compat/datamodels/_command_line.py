"""Settings as fastargs collects them, and what a user's script expects around it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep.errors import DatamodelsError, GradkeepError, MissingExtraError

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
    """Whether it is given without a value."""


def collect(
    flags: Sequence[Flag], arguments: Sequence[str], environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """The value of every flag; later sources win, and what is unknown is somebody else's."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-C", "--config-file", action="append", default=[])
    for flag in flags:
        if flag.switch:
            parser.add_argument(f"--{flag.name}", action="store_const", const=True)
        else:
            parser.add_argument(f"--{flag.name}")
    given = vars(parser.parse_known_args(list(arguments))[0])
    found: dict[str, Any] = {}
    for file in given.pop("config_file"):
        found.update(_dotted(_read(file)))
    found.update({name: value for name, value in given.items() if value is not None})
    found.update({flag.name: environment[flag.name] for flag in flags if flag.name in environment})
    return {flag.name: _value(flag, found.get(flag.name)) for flag in flags}


def end(command: Callable[[Sequence[str]], int | None]) -> None:
    """Run a command with this process's arguments; errors are messages, and never exit code 0."""
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
            raise  # ours to mend
        print(f"{text}{Path(sys.argv[0]).stem}: the training script raised this", file=sys.stderr)
        code = 1
    sys.exit(code or 0)


def script_traceback(error: BaseException) -> str | None:
    """Format the traceback from the script's first frame on; None if no frame is the script's."""
    told = traceback.TracebackException.from_exception(error)
    ours = str(Path(__file__).parents[2])
    for at, frame in enumerate(told.stack):
        name = frame.filename
        if not name.startswith((ours, "<frozen ")) and "/importlib/" not in name:
            told.stack = traceback.StackSummary.from_list(list(told.stack)[at:])
            return "".join(told.format())
    return None


def _value(flag: Flag, given: Any) -> Any:
    if given is None:
        if flag.required:
            raise DatamodelsError(f"--{flag.name} is needed", fix=f"--{flag.name}=VALUE")
        return False if flag.switch else flag.default
    if flag.switch:
        return str(given).lower() not in ("0", "false", "no", "")
    try:
        # YAML reads 1e-6 as text, and whole numbers may be written with underscores.
        return flag.kind(given)
    except (TypeError, ValueError) as error:
        raise DatamodelsError(
            f"--{flag.name} has a wrong value: {given!r}",
            expected=getattr(flag.kind, "__name__", str(flag.kind)),
        ) from error


def _read(file: str) -> Mapping[str, Any]:
    try:
        text = Path(file).read_text()
    except OSError as error:
        raise DatamodelsError(
            "the configuration cannot be read", path=file, found=error.strerror
        ) from error
    try:
        fields = json.loads(text)
    except ValueError:
        try:
            import yaml
        except ImportError as error:
            raise MissingExtraError(
                "configurations in YAML need PyYAML", path=file, fix="pip install pyyaml"
            ) from error
        try:
            fields = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise DatamodelsError(
                "this is neither JSON nor YAML", path=file, found=error
            ) from error
    if not isinstance(fields, dict):
        raise DatamodelsError(
            "the configuration is not a mapping", path=file, found=repr(fields)[:80]
        )
    return fields


def _dotted(fields: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found.update(_dotted(value, f"{before}{name}."))
        else:
            found[f"{before}{name}"] = value
    return found


def tolerate_other_flags() -> None:
    """If the script uses fastargs, let its configuration skip flags that are not its own."""
    try:
        config = importlib.import_module("fastargs").get_current_config()
    except ImportError:  # missing, or installed without what it needs
        return

    def collect_argparse_args(parser: argparse.ArgumentParser, disable_help: bool = False) -> Any:
        words = [word for word in sys.argv[1:] if not (disable_help and word == "--help")]
        given = vars(parser.parse_known_args(words)[0])
        for file in given.pop("config_file", []):
            config.collect_config_file(file)
        config.collect(given)
        config.collect_env_variables()
        return config

    config.collect_argparse_args = collect_argparse_args


def collect_for_script() -> None:
    """Collect again, now that the script's own sections are known."""
    try:
        config = importlib.import_module("fastargs").get_current_config()
    except ImportError:  # missing, or installed without what it needs
        return
    parser = argparse.ArgumentParser(add_help=False)
    config.augment_argparse(parser)
    config.collect_argparse_args(parser)
