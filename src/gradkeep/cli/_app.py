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
from gradkeep._errors import GradkeepError
from gradkeep.cli import _output
from gradkeep.cli._commands import COMMANDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def run(arguments: Sequence[str]) -> None:
    """Run one command line; ends by raising SystemExit."""
    named = next((item for item in arguments if not item.startswith("-")), None)
    _application(named)(args=list(arguments), prog_name="gradkeep")


def _application(named: str | None) -> typer.Typer:
    """All commands, of which only the named one is loaded: help needs no more than their lines."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="gradkeep keeps what training leaves behind and answers questions about it.",
    )
    app.callback()(_global_options)
    for command in COMMANDS:
        if command.name == named:
            function = command.load()
            app.command(command.name, help=function.__doc__)(_with_exit_codes(function))
        else:
            app.command(command.name, help=command.summary)(_not_loaded)
    return app


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
