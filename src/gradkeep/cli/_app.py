"""The application: it parses and calls one command; `cli/_errors.py` has what it may end with.

`gradkeep NAME` imports only the module of NAME and calls the function of that name in it. To add a
command, add a line to `COMMANDS`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep import __version__
from gradkeep.cli import _errors
from gradkeep.cli._options import flatten_options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class Command:
    """One command of `gradkeep`."""

    name: str
    module: str
    """The module below `gradkeep.cli`."""
    summary: str
    """The line that `gradkeep --help` shows."""
    group: str | None = None
    """The word that stands before the name, as in `gradkeep remat simulate`."""

    def load(self) -> Callable[..., Any]:
        """The function behind the command."""
        module = importlib.import_module(f"gradkeep.cli.{self.module}")
        return flatten_options(getattr(module, self.name.replace("-", "_")))


COMMANDS = (
    Command("demo", "_demo", "Plant wrong labels in real digits, find them, retrain without."),
    Command(
        "info", "_maintenance", "Show what a store holds: runs, captures, layers, sizes, ratios."
    ),
    Command("verify", "_maintenance", "Check every byte of a store; name what is damaged."),
    Command(
        "sql", "_maintenance", "Ask a store in SQL: samples, captures, scores, runs, checkpoints."
    ),
    Command("plan", "_capture", "Show what a capture will take, per layer, before it runs."),
    Command("capture", "_capture", "Replay checkpoints and keep every sample's gradients."),
    Command("attribute", "_attribute", "Score training rows for queries, from what is kept."),
    Command("why", "_attribute", "Show which training rows made the model answer so."),
    Command("suspects", "_attribute", "Show the rows whose labels are most likely wrong."),
    Command("serve", "_page", "Look at a store in the browser: the local page."),
    Command("report", "_page", "Write the same page into one HTML file."),
    Command("select", "_act", "Choose the rows most worth training on for a target."),
    Command("leaks", "_act", "Find training rows that are copies of queries."),
    Command("check-removal", "_act", "Train without rows: did the prediction hold?"),
    Command("truth", "_evaluate", "Train models on subsets, to judge by.", "evaluate"),
    Command("lds", "_evaluate", "Do scores predict what retraining does?", "evaluate"),
    Command("labels", "_evaluate", "Are labels found that are known wrong?", "evaluate"),
    Command("removal", "_evaluate", "Retrain without the rows scores name.", "evaluate"),
    Command("leakage", "_evaluate", "Are planted copies the first rows named?", "evaluate"),
    Command("sanity", "_evaluate", "Do shuffled scores predict nothing?", "evaluate"),
    Command("all", "_evaluate", "All of these that can be done.", "evaluate"),
    Command("compare", "_evaluate", "Do two kept evaluations differ?", "evaluate"),
    Command("methods", "_attribute", "List the methods: what each needs and costs."),
    Command("trak", "_maintenance", "Results of the released TRAK package.", "import"),
    Command("sweep", "_metastore", "Its four methods on its data: time and bytes.", "metastore"),
    Command("gc", "_maintenance", "Free the space of old versions and unfinished writes."),
    Command("delete", "_maintenance", "Delete a capture or saved scores with all versions."),
    Command("simulate", "_remat", "Run a recorded step in a smaller memory budget.", "remat"),
    Command("pareto", "_remat_figures", "Draw what every budget costs, per heuristic.", "remat"),
    Command("figures", "_remat_figures", "All figures of the paper, of a folder of logs.", "remat"),
    Command("ablate", "_remat_figures", "The same for the parts of the heuristic.", "remat"),
    Command("accesses", "_remat_figures", "How much looking around choosing takes.", "remat"),
    Command("banish", "_remat_figures", "What happens to what nobody refers to.", "remat"),
    Command("optimal", "_remat", "The best any schedule can do, proven.", "remat"),
    Command("experiments", "_remat_figures", "Run a configuration of trials.", "remat"),
    Command("record", "_remat_script", "Record the training step of a script.", "remat"),
    Command("plan", "_remat_script", "What every budget costs a script's step.", "remat"),
    Command("init", "_datamodels", "Begin a set of models, or import one.", "datamodels"),
    Command("work", "_datamodels", "Be one worker that trains models.", "datamodels"),
    Command("run", "_datamodels", "Train all models, here or on a cluster.", "datamodels"),
    Command("status", "_datamodels", "Show what is done, runs and failed.", "datamodels"),
    Command("fit", "_datamodels_analyze", "Fit outputs to training subsets.", "datamodels"),
    Command("analyze", "_datamodels_analyze", "Ask what the data did.", "datamodels"),
    Command("export", "_datamodels", "Write the models as .npy arrays.", "datamodels"),
)

GROUPS = {
    "datamodels": "Models on many subsets: train them, fit how their outputs depend on the data.",
    "evaluate": "Is this attribution true? Figures with intervals, against retraining.",
    "import": "Results of other systems, brought into a store.",
    "metastore": "MetaStore's experiments, from its own configuration file.",
    "remat": "Training in fewer bytes: record a step, simulate smaller budgets.",
}
"""What `gradkeep --help` says of each group."""


def run(arguments: Sequence[str]) -> None:
    """Run one command line; ends by raising SystemExit."""
    words = [item for item in arguments if not item.startswith("-")]
    named = tuple(words[:2]) if words and words[0] in GROUPS else tuple(words[:1])
    as_json = "--json" in arguments
    _errors.prepare_streams()
    try:
        try:
            _application(named, as_json=as_json)(args=list(arguments), prog_name="gradkeep")
        finally:
            _errors.flush()
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(_errors.exit_code(error, _known(named), as_json=as_json))


def _known(named: tuple[str, ...]) -> tuple[str, ...]:
    """The words that are a command's name, without what only stands in its place."""
    names = {name for command in COMMANDS for name in (command.name, command.group)}
    return tuple(word for word in named if word in names)


def _application(named: tuple[str, ...], *, as_json: bool = False) -> typer.Typer:
    """All commands, of which only the named one is loaded: help needs no more than their lines."""
    app = _typer("gradkeep keeps what training leaves behind and answers questions about it.")
    app.callback()(_global_options)
    groups = {name: _typer(summary) for name, summary in GROUPS.items()}
    for command in COMMANDS:
        place = app if command.group is None else groups[command.group]
        words = (command.name,) if command.group is None else (command.group, command.name)
        if words == named:
            function = command.load()
            place.command(command.name, help=function.__doc__)(
                _with_exit_code(function, words, as_json=as_json)
            )
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


def _with_exit_code(
    function: Callable[..., Any], words: tuple[str, ...], *, as_json: bool
) -> Callable[..., Any]:
    """The command with whatever ends it as a message and a code, before typer sees it."""

    @functools.wraps(function)
    def command(*args: Any, **options: Any) -> None:
        try:
            function(*args, **options)
            _errors.flush()
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except (Exception, KeyboardInterrupt) as error:
            raise typer.Exit(_errors.exit_code(error, words, as_json=as_json)) from None

    return command
