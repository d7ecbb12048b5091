"""Evaluation: is this attribution true? Figures with intervals, on the user's own model."""

from gradkeep.evaluate._agreement import (
    SanityCheck,
    agreement,
    randomise,
    sanity_check,
    stability,
)
from gradkeep.evaluate._evaluation import Curve, Difference, Evaluation, SampleSizes, compare
from gradkeep.evaluate._groups import RowGroup, RowGroups, groups
from gradkeep.evaluate._hybrid import datamodel_scores, hybrid
from gradkeep.evaluate._judging import JudgedMethod, Judgement, judge_methods
from gradkeep.evaluate._labels import label_detection, rank_sum
from gradkeep.evaluate._lds import lds
from gradkeep.evaluate._map import OpposingClusters, RowMap, map_rows, map_targets
from gradkeep.evaluate._out_of_fold import out_of_fold, suggest_labels
from gradkeep.evaluate._recipe import Recipe
from gradkeep.evaluate._removal import RemovalCurve, leave_one_out, removal_curve
from gradkeep.evaluate._retrieval import class_retrieval, leakage
from gradkeep.evaluate._saved import evaluations
from gradkeep.evaluate._selection import ChosenRows, find_leaks, select_rows
from gradkeep.evaluate._truth import GroundTruth, MoreModels, ground_truth, load_truth
from gradkeep.evaluate._verified import CheckedRemoval, check_removal, verify_rows

__all__ = [
    "CheckedRemoval",
    "ChosenRows",
    "Curve",
    "Difference",
    "Evaluation",
    "GroundTruth",
    "JudgedMethod",
    "Judgement",
    "MoreModels",
    "OpposingClusters",
    "Recipe",
    "RemovalCurve",
    "RowGroup",
    "RowGroups",
    "RowMap",
    "SampleSizes",
    "SanityCheck",
    "agreement",
    "check_removal",
    "class_retrieval",
    "compare",
    "datamodel_scores",
    "evaluations",
    "find_leaks",
    "ground_truth",
    "groups",
    "hybrid",
    "judge_methods",
    "label_detection",
    "lds",
    "leakage",
    "leave_one_out",
    "load_truth",
    "map_rows",
    "map_targets",
    "out_of_fold",
    "randomise",
    "rank_sum",
    "removal_curve",
    "sanity_check",
    "select_rows",
    "stability",
    "suggest_labels",
    "verify_rows",
]
