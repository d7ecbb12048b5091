"""The commands by name: where each one is, and what it does in a line.

`gradkeep NAME` imports only the module of NAME and calls the function of that name in it. To add a
command, add a line here.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


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
        function: Callable[..., Any] = getattr(module, self.name.replace("-", "_"))
        return function


COMMANDS = (
    Command("demo", "_demo", "Plant wrong labels in real digits, find them, retrain without."),
    Command("info", "_info", "Show what a store holds: runs, captures, layers, sizes, ratios."),
    Command("verify", "_verify", "Check every byte of a store; name what is damaged."),
    Command("sql", "_sql", "Ask a store in SQL: samples, captures, scores, runs, checkpoints."),
    Command("plan", "_capture", "Show what a capture will take, per layer, before it runs."),
    Command("capture", "_capture", "Replay checkpoints and keep every sample's gradients."),
    Command("attribute", "_attribute", "Score training rows for queries, from what is kept."),
    Command("why", "_attribute", "Show which training rows made the model answer so."),
    Command("suspects", "_attribute", "Show the rows whose labels are most likely wrong."),
    Command("methods", "_attribute", "List the methods: what each needs and costs."),
    Command("trak", "_import", "Results of the released TRAK package.", "import"),
    Command("gc", "_gc", "Free the space of old versions and unfinished writes."),
    Command("delete", "_delete", "Delete a capture or saved scores with all versions."),
    Command("simulate", "_remat", "Run a recorded step in a smaller memory budget.", "remat"),
    Command("pareto", "_remat_figures", "Draw what every budget costs, per heuristic.", "remat"),
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
    "import": "Results of other systems, brought into a store.",
    "remat": "Training in fewer bytes: record a step, simulate smaller budgets.",
}
"""What `gradkeep --help` says of each group."""
