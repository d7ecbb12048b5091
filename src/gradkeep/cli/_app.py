"""The application: parse the command line and run one command.

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
from gradkeep.cli._errors import exit_code, prepare_streams
from gradkeep.cli._options import typer_command

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class Command:
    """One command of `gradkeep`: the function `name` of a module below `gradkeep.cli`."""

    name: str
    module: str
    summary: str
    """The line of `gradkeep --help`."""
    group: str | None = None
    """The word before the name, as in `gradkeep remat simulate`."""

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the command line that name the command."""
        return (self.name,) if self.group is None else (self.group, self.name)

    def load(self) -> Callable[..., Any]:
        """Import the function behind the command."""
        module = importlib.import_module(f"gradkeep.cli.{self.module}")
        return typer_command(getattr(module, self.name.replace("-", "_")))


COMMANDS = (
    Command(
        "demo", "_serve", "Plant wrong labels in real digits, find them, retrain without them."
    ),
    Command("info", "_maintenance", "Show the contents of a store: runs, captures, layers, sizes."),
    Command("verify", "_maintenance", "Verify the checksums of every file of a store."),
    Command("sql", "_maintenance", "Query a store in SQL: samples, captures, scores, runs."),
    Command("plan", "_capture", "Estimate the cost of a capture, per layer, before it runs."),
    Command("capture", "_capture", "Replay checkpoints and store per-sample gradients."),
    Command("attribute", "_attribute", "Score training rows for queries."),
    Command("why", "_attribute", "Show which training rows caused a prediction."),
    Command("suspects", "_attribute", "Rank training rows by suspicion of a wrong label."),
    Command("serve", "_serve", "Open the web UI of a store."),
    Command("report", "_serve", "Write the web UI with its answers into one HTML file."),
    Command("select", "_row_selection", "Select the training rows that help a target most."),
    Command("leaks", "_row_selection", "Find training rows that are copies of queries."),
    Command("check-removal", "_row_selection", "Retrain without rows and check the prediction."),
    Command("truth", "_evaluate", "Train models on random subsets as ground truth.", "evaluate"),
    Command("lds", "_evaluate", "Compute the linear datamodeling score of methods.", "evaluate"),
    Command("labels", "_evaluate", "Measure the detection of known wrong labels.", "evaluate"),
    Command("removal", "_evaluate", "Retrain without the top-scored rows.", "evaluate"),
    Command("leakage", "_evaluate", "Measure how often planted copies rank first.", "evaluate"),
    Command("sanity", "_evaluate", "Check that shuffled scores predict nothing.", "evaluate"),
    Command("all", "_evaluate", "Run every evaluation that is possible.", "evaluate"),
    Command("compare", "_evaluate", "Compare two saved evaluations.", "evaluate"),
    Command("methods", "_attribute", "List the methods with their needs and costs."),
    Command("trak", "_maintenance", "Import results of the released TRAK package.", "import"),
    Command("sweep", "_metastore", "Compare its four methods in time and bytes.", "metastore"),
    Command("gc", "_maintenance", "Remove old versions and unfinished writes."),
    Command("delete", "_maintenance", "Delete a capture or saved scores with all versions."),
    Command("simulate", "_remat", "Simulate a recorded step in a smaller budget.", "remat"),
    Command("pareto", "_remat_figures", "Plot slowdown against budget by heuristic.", "remat"),
    Command("figures", "_remat_figures", "Plot all figures of the DTR paper.", "remat"),
    Command("ablate", "_remat_figures", "Compare the parts of the heuristic.", "remat"),
    Command("accesses", "_remat_figures", "Count the heuristic's metadata accesses.", "remat"),
    Command("banish", "_remat_figures", "Compare deallocation policies.", "remat"),
    Command("optimal", "_remat", "Compute the optimal schedule with a bound.", "remat"),
    Command("experiments", "_remat_figures", "Run the trials of a configuration.", "remat"),
    Command("record", "_remat", "Record the training step of a script.", "remat"),
    Command("plan", "_remat", "Show slowdown against budget for a script.", "remat"),
    Command("init", "_datamodels", "Create or import a set of models.", "datamodels"),
    Command("work", "_datamodels", "Run one worker that trains models.", "datamodels"),
    Command("run", "_datamodels", "Train all models, here or on a cluster.", "datamodels"),
    Command("status", "_datamodels", "Show finished, running and failed models.", "datamodels"),
    Command("fit", "_datamodels_analyze", "Fit outputs to training subsets.", "datamodels"),
    Command("analyze", "_datamodels_analyze", "Analyze a fit or the models.", "datamodels"),
    Command("export", "_datamodels", "Export the models as .npy arrays.", "datamodels"),
)

GROUPS = {
    "datamodels": "Train models on many subsets; fit how outputs depend on the data.",
    "evaluate": "Evaluate attributions against retraining, with intervals.",
    "import": "Import results of other systems into a store.",
    "metastore": "Run MetaStore's experiments from its configuration file.",
    "remat": "Train in less memory: record a step, simulate smaller budgets.",
}
"""Summaries of the groups for `gradkeep --help`."""


def run(arguments: Sequence[str]) -> None:
    """Run one command line; always ends by raising SystemExit."""
    words = [argument for argument in arguments if not argument.startswith("-")]
    named = tuple(words[:2]) if words and words[0] in GROUPS else tuple(words[:1])
    as_json = "--json" in arguments
    prepare_streams()
    try:
        try:
            build_app(named, as_json=as_json)(args=list(arguments), prog_name="gradkeep")
        finally:
            sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(exit_code(error, known_words(named), as_json=as_json))


def known_words(words: tuple[str, ...]) -> tuple[str, ...]:
    """Drop words that are not names of commands: reports must not contain arguments."""
    names = {name for command in COMMANDS for name in command.words}
    return tuple(word for word in words if word in names)


def build_app(named: tuple[str, ...], *, as_json: bool = False) -> typer.Typer:
    """Build the application; only the named command is imported, help needs the summaries alone."""
    app = _typer("Training-data attribution and memory-bounded training for PyTorch.")
    app.callback()(_global_options)
    groups = {name: _typer(summary) for name, summary in GROUPS.items()}
    for command in COMMANDS:
        parent = app if command.group is None else groups[command.group]
        if command.words == named:
            function = command.load()
            handled = _handle_errors(function, named, as_json=as_json)
            parent.command(command.name, help=function.__doc__)(handled)
        else:
            parent.command(command.name, help=command.summary)(_not_loaded)
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
    """Placeholder for a command that is not on the command line."""


def _print_version(requested: bool) -> None:
    if requested:
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
    """Options before the command."""


def _handle_errors(
    function: Callable[..., Any], words: tuple[str, ...], *, as_json: bool
) -> Callable[..., Any]:
    """Turn exceptions of a command into a message and an exit code before typer sees them."""

    @functools.wraps(function)
    def command(*args: Any, **options: Any) -> None:
        try:
            function(*args, **options)
            sys.stdout.flush()
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except (Exception, KeyboardInterrupt) as error:
            raise typer.Exit(exit_code(error, words, as_json=as_json)) from None

    return command
