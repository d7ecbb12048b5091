"""Training in fewer bytes: evict tensors, recompute them when they are needed."""

from gradkeep.remat._core import Policy
from gradkeep.remat._graphs import chain
from gradkeep.remat._heuristics import Heuristic, heuristic, heuristics, register
from gradkeep.remat._log import read_log
from gradkeep.remat._program import Kind, Op, Program, Step
from gradkeep.remat._simulate import Outcome, simulate, unlimited_peak
from gradkeep.remat._timeline import Event, Timeline

__all__ = [
    "Event",
    "Heuristic",
    "Kind",
    "Op",
    "Outcome",
    "Policy",
    "Program",
    "Step",
    "Timeline",
    "chain",
    "heuristic",
    "heuristics",
    "read_log",
    "register",
    "simulate",
    "unlimited_peak",
]
