"""mkdocs hooks: generate the page of commands and render the notebooks of the gallery."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Use the code of this checkout.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import typer

from gradkeep.cli import _app, _errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

INTRODUCTION = """\
# Commands

The help of every command, generated from the application.

`--help`, `info`, `verify` and `sql` do not import torch. Long commands show a progress bar on a terminal and
plain lines elsewhere; you can interrupt them and run them again to continue. Most accept `--json`, which also
prints errors as JSON.

## Exit codes

{codes}

Arguments are validated before any work starts. Without `--run`, the run is `main`, or the only run of the store
that has the requested data.

## Internal errors

An unexpected error prints one line and exits with code 70. The line names a report file in `gradkeep/reports` below
`XDG_CACHE_HOME` (or `~/.cache`), or in the temporary folder if that is not writable. It contains the command's name
without its arguments, the versions of gradkeep, Python and packages, the platform, and the traceback: files, lines,
functions, and error messages cut to 200 characters. It contains no variables, arguments, environment or rows; the home
folder is written `~`. A message can still contain a value: read the file before you attach it to an issue. The newest
20 reports are kept.

If your own script, model, task or study raises an error, the traceback starts at your first frame, and the exit code
is 4.

"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "commands.md", content=commands_page()))
    for notebook in sorted((Path(config.docs_dir) / "gallery").glob("*.ipynb")):
        for name, content in render_notebook(notebook):
            files.append(File.generated(config, f"gallery/{name}", content=content))
    return files


def render_notebook(path: Path) -> Iterator[tuple[str, str | bytes]]:
    """Yield the Markdown page of an executed notebook and the pictures in its outputs."""
    import nbconvert

    resources = {"unique_key": path.stem, "output_files_dir": "."}
    text, resources = nbconvert.MarkdownExporter().from_filename(str(path), resources)
    link = f"[Download the notebook]({path.name})\n"
    yield f"{path.stem}.md", text + "\n" + link
    yield from resources["outputs"].items()


def commands_page() -> str:
    """Return the page of commands as Markdown."""
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
    parsed: Any = typer.main.get_command(_app.build_app(tuple(words)))
    for word in words:
        parsed = parsed.commands[word]
    title = " ".join(["gradkeep", *words])
    context = parsed.make_context(title, [], resilient_parsing=True)
    usage = parsed.get_usage(context).removeprefix("Usage: ")
    level = "##" if command.group is None else "###"
    text = inspect.cleandoc(parsed.help or command.summary)
    return "\n".join(
        [f"{level} {title}", "", text, "", f"    {usage}", "", *_table(parsed, context)]
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
