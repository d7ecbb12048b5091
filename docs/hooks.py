"""A hook of mkdocs: the page of commands, made from the application when the site is built."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The commands of this checkout, whatever is installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import typer

from gradkeep.cli import _app

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
run again. Most take `--json`. Exit codes: 0 done, 1 `verify` found damage, 2 an error that says what to
do, 130 interrupted; some commands have further ones, which their text names.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page to those that are in the folder."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "commands.md", content=commands_page()))
    return files


def commands_page() -> str:
    """The page in Markdown."""
    alone = [command for command in _app.COMMANDS if command.group is None]
    parts = [INTRODUCTION, *(_command(command) for command in alone)]
    for group, summary in _app.GROUPS.items():
        parts.append(f"## gradkeep {group}\n\n{summary}\n")
        parts += [_command(command) for command in _app.COMMANDS if command.group == group]
    return "\n".join(parts)


def _command(command: _app.Command) -> str:
    words = [command.name] if command.group is None else [command.group, command.name]
    found: Any = typer.main.get_command(_app._application(tuple(words)))
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
