"""A hook of mkdocs: the page of commands, made from the application when the site is built."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The commands of this checkout, whatever is installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import typer

from gradkeep.cli import _app, _errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

INTRODUCTION = """\
# Commands

What `gradkeep COMMAND --help` says, for all of them. The page is made from the application itself when
the documentation is built.

`--help`, `info`, `verify` and `sql` answer without importing torch. Commands that take time show a
progress bar on a terminal and plain lines elsewhere; they can be interrupted, and go on when they are
run again. Most take `--json`, and then tell errors as JSON too.

## Exit codes

{codes}

Arguments are checked before anything is done: numbers by their range, NaN and infinity never, files and
folders by whether they are what they must be. Where `--run` is not said, it is `main`, or the only run
of the store that has what is asked for.

## When it is our fault

An error that gradkeep did not expect is one line and exit code 70. It names a report file in
`gradkeep/reports` below `XDG_CACHE_HOME` (or `~/.cache`), or in the folder for temporary files if that
cannot be written. It holds the command's name without its arguments, the versions of gradkeep, Python and
its packages, the platform, and the traceback: files, lines, functions, and each error's own message cut to
200 letters. Values of variables, arguments, the environment and rows are not in it; the home folder is
written `~`. A message may still name a value: read the file, then attach it to an issue. The newest 20
reports are kept.

When a script, model, task or study of your own raises, its traceback is shown from your first frame on,
without the frames of gradkeep, and the exit code is 4.

"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page to those that are in the folder."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "commands.md", content=commands_page()))
    return files


def commands_page() -> str:
    """The page in Markdown."""
    alone = [command for command in _app.COMMANDS if command.group is None]
    parts = [_introduction(), *(_command(command) for command in alone)]
    for group, summary in _app.GROUPS.items():
        parts.append(f"## gradkeep {group}\n\n{summary}\n")
        parts += [_command(command) for command in _app.COMMANDS if command.group == group]
    return "\n".join(parts)


def _introduction() -> str:
    table = [line for line in (_errors.__doc__ or "").splitlines() if line.startswith("|")]
    return INTRODUCTION.format(codes="\n".join(table))


def _command(command: _app.Command) -> str:
    words = [command.name] if command.group is None else [command.group, command.name]
    found: Any = typer.main.get_command(_app.build_app(tuple(words)))
    for word in words:
        found = found.commands[word]
    title = " ".join(["gradkeep", *words])
    context = found.make_context(title, [], resilient_parsing=True)
    usage = found.get_usage(context).removeprefix("Usage: ")
    level = "##" if command.group is None else "###"
    text = inspect.cleandoc(found.help or command.summary)
    return "\n".join(
        [f"{level} {title}", "", text, "", f"    {usage}", "", *_table(found, context)]
    )


def _table(command: Any, context: Any) -> Iterator[str]:
    records = [parameter.get_help_record(context) for parameter in command.params]
    shown = [record for record in records if record is not None]
    if shown:
        yield "| argument | meaning |"
        yield "| --- | --- |"
    for name, text in shown:
        yield f"| `{_cell(name)}` | {_cell(text)} |"
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
