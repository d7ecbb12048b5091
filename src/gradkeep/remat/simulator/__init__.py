"""Rematerialization of a recorded step, simulated: the eviction core, heuristics, schedules, sweeps.

Nothing here needs torch. The online runtime drives the same core with real bytes.
"""

from gradkeep.remat.simulator._baselines import chen, keep_all, keeping, revolve
from gradkeep.remat.simulator._core import EvictionCore, Policy, Storage, TensorNode
from gradkeep.remat.simulator._cost_ratio import Heuristic
from gradkeep.remat.simulator._heuristics import (
    SampledHeuristic,
    heuristic,
    heuristics,
    own_heuristics,
    register,
)
from gradkeep.remat.simulator._log import read_log
from gradkeep.remat.simulator._log_list import LogList, TitledLog, find_logs
from gradkeep.remat.simulator._optimal import Optimum, OptimumPoint, optimal, optimum_point
from gradkeep.remat.simulator._paper import DEAD_CURVES, PaperFigure, dead_style, paper_figures
from gradkeep.remat.simulator._picture import MARKERS, PictureStyle, draw_sweep, sweep_sentences
from gradkeep.remat.simulator._program import Op, Program, ProgramStep, StepKind, chain
from gradkeep.remat.simulator._schedule import (
    Action,
    Graph,
    Schedule,
    checked,
    collapse_aliases,
    eliminate_constants,
    merge_tuples,
    simplify,
)
from gradkeep.remat.simulator._simulate import (
    MemoryEvent,
    SimulationResult,
    Timeline,
    simulate,
    unlimited_peak,
)
from gradkeep.remat.simulator._sweep import (
    MAIN_HEURISTICS,
    RowSource,
    SweepCase,
    SweepRow,
    optimum_cases,
    sweep,
    sweep_cases,
    write_table,
)

__all__ = [
    "DEAD_CURVES",
    "MAIN_HEURISTICS",
    "MARKERS",
    "Action",
    "EvictionCore",
    "Graph",
    "Heuristic",
    "LogList",
    "MemoryEvent",
    "Op",
    "Optimum",
    "OptimumPoint",
    "PaperFigure",
    "PictureStyle",
    "Policy",
    "Program",
    "ProgramStep",
    "RowSource",
    "SampledHeuristic",
    "Schedule",
    "SimulationResult",
    "StepKind",
    "Storage",
    "SweepCase",
    "SweepRow",
    "TensorNode",
    "Timeline",
    "TitledLog",
    "chain",
    "checked",
    "chen",
    "collapse_aliases",
    "dead_style",
    "draw_sweep",
    "eliminate_constants",
    "find_logs",
    "heuristic",
    "heuristics",
    "keep_all",
    "keeping",
    "merge_tuples",
    "optimal",
    "optimum_cases",
    "optimum_point",
    "own_heuristics",
    "paper_figures",
    "read_log",
    "register",
    "revolve",
    "simplify",
    "simulate",
    "sweep",
    "sweep_cases",
    "sweep_sentences",
    "unlimited_peak",
    "write_table",
]
