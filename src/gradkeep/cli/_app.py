"""The application: it parses, calls one command, and turns errors into messages and exit codes.

| exit code | meaning |
| --- | --- |
| 0 | done |
| 1 | `verify` found damage |
| 2 | an error that says what to do, or a wrong command line |
| 130 | interrupted |
| 141 | nobody reads the output any more |
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep import __version__
from gradkeep.cli import _output
from gradkeep.cli._commands import COMMANDS, GROUPS
from gradkeep.errors import GradkeepError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def run(arguments: Sequence[str]) -> None:
    """Run one command line; ends by raising SystemExit."""
    words = [item for item in arguments if not item.startswith("-")]
    named = tuple(words[:2]) if words and words[0] in GROUPS else tuple(words[:1])
    _application(named)(args=list(arguments), prog_name="gradkeep")


def _application(named: tuple[str, ...]) -> typer.Typer:
    """All commands, of which only the named one is loaded: help needs no more than their lines."""
    app = _typer("gradkeep keeps what training leaves behind and answers questions about it.")
    app.callback()(_global_options)
    groups = {name: _typer(summary) for name, summary in GROUPS.items()}
    for command in COMMANDS:
        place = app if command.group is None else groups[command.group]
        words = (command.name,) if command.group is None else (command.group, command.name)
        if words == named:
            function = command.load()
            place.command(command.name, help=function.__doc__)(_with_exit_codes(function))
        else:
            place.command(command.name, help=command.summary)(_not_loaded)
    for name, group in groups.items():
        app.add_typer(group, name=name)
    return app


def _typer(summary: str) -> typer.Typer:
    return typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help=summary,
    )


def _not_loaded() -> None:
    """Stands for a command that this command line does not name."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"gradkeep {__version__}")
        raise typer.Exit


def _global_options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """What stands before the command."""


def _with_exit_codes(function: Callable[..., Any]) -> Callable[..., Any]:
    """The command with its errors as messages: plain ones, or JSON if `--json` was given."""

    @functools.wraps(function)
    def command(*args: Any, **options: Any) -> None:
        try:
            try:
                function(*args, **options)
            except GradkeepError as error:
                _output.show_error(error, as_json=bool(options.get("json")))
                raise typer.Exit(2) from None
            finally:
                sys.stdout.flush()
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:
            # Python flushes stdout once more at its end, which must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None

    return command
