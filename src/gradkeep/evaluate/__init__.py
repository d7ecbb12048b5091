"""Evaluate attributions on your own model, with confidence intervals."""

from gradkeep.evaluate._agreement import (
    agreement,
    class_retrieval,
    leakage,
    sanity_check,
    stability,
)
from gradkeep.evaluate._evaluation import (
    Evaluation,
    compare,
    evaluations,
)
from gradkeep.evaluate._groups import (
    find_leaks,
    select_rows,
)
from gradkeep.evaluate._labels import label_detection, out_of_fold, rank_sum, suggest_labels
from gradkeep.evaluate._lds import (
    datamodel_scores,
    hybrid,
    judge_methods,
    lds,
)
from gradkeep.evaluate._recipe import Recipe
from gradkeep.evaluate._removal import check_removal, leave_one_out, removal_curve, verify_rows
from gradkeep.evaluate._truth import ground_truth, load_truth

__all__ = [
    "Evaluation",
    "Recipe",
    "agreement",
    "check_removal",
    "class_retrieval",
    "compare",
    "datamodel_scores",
    "evaluations",
    "find_leaks",
    "ground_truth",
    "hybrid",
    "judge_methods",
    "label_detection",
    "lds",
    "leakage",
    "leave_one_out",
    "load_truth",
    "out_of_fold",
    "rank_sum",
    "removal_curve",
    "sanity_check",
    "select_rows",
    "stability",
    "suggest_labels",
    "verify_rows",
]
