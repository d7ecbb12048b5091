"""Evaluation: is this attribution true? Figures with intervals, on the user's own model."""

from gradkeep.evaluate._agreement import (
    SanityCheck,
    agreement,
    randomise,
    sanity_check,
    stability,
)
from gradkeep.evaluate._evaluation import Curve, Difference, Evaluation, SampleSizes, compare
from gradkeep.evaluate._hybrid import datamodel_scores, hybrid
from gradkeep.evaluate._judging import JudgedMethod, Judgement, judge_methods
from gradkeep.evaluate._labels import label_detection, rank_sum
from gradkeep.evaluate._lds import lds
from gradkeep.evaluate._recipe import Recipe
from gradkeep.evaluate._removal import RemovalCurve, leave_one_out, removal_curve
from gradkeep.evaluate._retrieval import class_retrieval, leakage
from gradkeep.evaluate._saved import evaluations
from gradkeep.evaluate._truth import GroundTruth, MoreModels, ground_truth, load_truth

__all__ = [
    "Curve",
    "Difference",
    "Evaluation",
    "GroundTruth",
    "JudgedMethod",
    "Judgement",
    "MoreModels",
    "Recipe",
    "RemovalCurve",
    "SampleSizes",
    "SanityCheck",
    "agreement",
    "class_retrieval",
    "compare",
    "datamodel_scores",
    "evaluations",
    "ground_truth",
    "hybrid",
    "judge_methods",
    "label_detection",
    "lds",
    "leakage",
    "leave_one_out",
    "load_truth",
    "randomise",
    "rank_sum",
    "removal_curve",
    "sanity_check",
    "stability",
]
