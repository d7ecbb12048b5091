"""Calls for the fuzz of public functions: evaluations, and acts that are checked by retraining."""

import functools
import inspect
import itertools

import numpy as np
import torch

import gradkeep as gk
from gradkeep import datamodels as dm
from gradkeep import evaluate
from gradkeep.evaluate._groups import groups
from gradkeep.evaluate._truth import GroundTruth


def linear():
    return torch.nn.Linear(4, 3)


def evaluate_calls(w, call):
    """Functions with good arguments, made by `call(name, function, good)`; `w` is the world."""
    rng = np.random.default_rng(0)
    masks = rng.random((24, 6)) < 0.5
    truth = GroundTruth("toy", masks, rng.standard_normal((24, 2, 6)))
    training = dm.Training(linear, epochs=1)
    recipe = evaluate.Recipe(w.batch, w.batch, training)
    store = gk.open(w.folder / "judged", durability="process")
    numbers = itertools.count()
    bounds = {"level": 0.9}
    retrained = {"recipe": recipe, "store": store, "seeds": 2, **bounds}
    result = evaluate.lds(w.scores, truth)
    cosines = gk.attribute(w.store, method="cos")

    def here(function):
        """The function with trainings in this process."""

        @functools.wraps(function)
        def run(**values):
            return function(**values, workers=0)

        run.__signature__ = inspect.signature(function)
        return run

    def trained(**values):
        return evaluate.ground_truth(store, name=f"truth{next(numbers)}", workers=0, **values)

    signature = inspect.signature(evaluate.ground_truth)
    taken = [one for one in signature.parameters.values() if one.name not in ("store", "name")]
    trained.__signature__ = signature.replace(parameters=taken)
    table = {
        "evaluate.ground_truth": (
            trained,
            {
                "recipe": recipe,
                "subsets": 10,
                "seeds": 1,
                "alpha": 0.5,
                "seed": 0,
                "stacked": False,
                "keep_models": False,
            },
        ),
        "evaluate.load_truth": (
            evaluate.load_truth,
            {"store": w.folder / "study", "name": "study", "output": None, "seconds": None},
        ),
        "evaluate.lds": (
            evaluate.lds,
            {"scores": w.scores, "truth": truth, "part": "reporting", **bounds},
        ),
        "evaluate.compare": (evaluate.compare, {"first": result, "second": result}),
        "evaluate.evaluations": (evaluate.evaluations, {"store": w.store}),
        "evaluate.judge_methods": (
            evaluate.judge_methods,
            {
                "store": w.store,
                "truth": truth,
                "methods": ["dot"],
                "extra_scores": None,
                "checkpoints": None,
                "run": "main",
                "name": "main",
                "queries": "test",
                "train": "train",
                "level": 0.9,
                "hybrid_of_best": False,
            },
        ),
        "evaluate.hybrid": (
            evaluate.hybrid,
            {"scores": w.scores, "truth": truth, "variances": None},
        ),
        "evaluate.datamodel_scores": (evaluate.datamodel_scores, {"truth": truth}),
        "evaluate.label_detection": (
            evaluate.label_detection,
            {
                "suspicion": np.arange(9.0),
                "wrong": [1, 2, 7],
                "ids": None,
                "subject": None,
                "resamples": 100,
                **bounds,
            },
        ),
        "evaluate.rank_sum": (evaluate.rank_sum, {"measures": [np.arange(4.0), np.arange(4.0)]}),
        "evaluate.leakage": (
            evaluate.leakage,
            {"scores": w.scores, "copies": [0, 1, 2, 3, 4, -1], "k": 1, **bounds},
        ),
        "evaluate.class_retrieval": (
            evaluate.class_retrieval,
            {"scores": w.scores, "query_classes": None, "train_classes": None, "k": 2, **bounds},
        ),
        "evaluate.agreement": (
            evaluate.agreement,
            {"first": w.scores, "second": w.scores, "k": 2, **bounds},
        ),
        "evaluate.stability": (
            evaluate.stability,
            {"scores": [w.scores, w.scores], "k": 2, **bounds},
        ),
        "evaluate.sanity_check": (
            evaluate.sanity_check,
            {"scores": w.scores, "truth": truth, "randomized": None, "level": 0.9, "seed": 0},
        ),
        "groups": (
            groups,
            {
                "scores": w.scores,
                "query": 1,
                "count": 2,
                "most": 6,
                "columns": None,
                "features": None,
                "recipe": None,
                "seeds": 1,
            },
        ),
        "evaluate.select_rows": (
            evaluate.select_rows,
            {"scores": w.scores, "keep": 2, "kinds": None},
        ),
        "evaluate.find_leaks": (evaluate.find_leaks, {"cosines": cosines, "above": 0.5}),
        "evaluate.verify_rows": (
            here(evaluate.verify_rows),
            {"rows": [1, 2], "scores": w.scores, "queries": None, "train": "without", **retrained},
        ),
        "evaluate.check_removal": (
            here(evaluate.check_removal),
            {"scores": w.scores, "rows": [1, 2], **retrained},
        ),
        "evaluate.removal_curve": (
            here(evaluate.removal_curve),
            {
                "scores": w.scores,
                "sizes": [1],
                "queries": [0, 1],
                "against": (),
                "train": "without",
                **retrained,
            },
        ),
        "evaluate.leave_one_out": (
            here(evaluate.leave_one_out),
            {"scores": w.scores, "rows": 5, **retrained},
        ),
        "evaluate.out_of_fold": (
            here(evaluate.out_of_fold),
            {"recipe": recipe, "store": store, "folds": 2, "seeds": 1},
        ),
    }
    return [call(name, function, good) for name, (function, good) in table.items()]
