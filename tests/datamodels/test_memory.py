"""A budget is kept, and does not change what is fitted."""

import gc
import tracemalloc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradkeep.datamodels import fit, planted
from gradkeep.datamodels._counts import DenseGram
from gradkeep.datamodels._options import FitOptions
from gradkeep.errors import BudgetError


def fit_layout(*, itemsize, budget, folds=0, **sizes):
    dtype = "float32" if itemsize == 4 else "float64"
    options = FitOptions("l1", 0.5, 1e-4, 100, dtype, "cpu", budget, None, None)
    return options.layout(**sizes, folds=folds)


def least(**sizes):
    """The least budget, from the message that refuses a smaller one."""
    with pytest.raises(BudgetError, match="or more") as refused:
        fit_layout(**sizes, budget=1)
    return int(str(refused.value).split("(")[1].split(" bytes")[0])


@given(
    models=st.integers(1, 10**6),
    examples=st.integers(1, 10**5),
    targets=st.integers(1, 10**4),
    itemsize=st.sampled_from([4, 8]),
    folds=st.sampled_from([0, 5]),
)
def test_the_least_budget_is_named_and_enough(models, examples, targets, itemsize, folds):
    sizes = {"models": models, "examples": examples, "targets": targets}
    sizes |= {"itemsize": itemsize, "folds": folds}
    smallest = least(**sizes)
    assert fit_layout(**sizes, budget=smallest).targets >= 1
    with pytest.raises(BudgetError):
        fit_layout(**sizes, budget=smallest - 1)
    for budget in (2 * smallest, 10 * smallest, 10**15):
        fitted = fit_layout(**sizes, budget=budget)
        assert 1 <= fitted.targets <= targets
        assert fitted.rows >= 1
    assert fit_layout(**sizes, budget=10**15).in_memory


@settings(max_examples=10)
@given(
    kind=st.sampled_from(["l1", "elastic", "ridge", "means"]),
    folds=st.sampled_from([None, 3]),
    times=st.sampled_from([1.0, 1.05, 2.0]),
    seed=st.integers(0, 10**6),
)
def test_counts_in_a_file_give_the_fit_in_memory(tmp_path_factory, kind, folds, times, seed):
    data = planted(200, 60, 5, seed=seed)
    folds = None if kind == "means" else folds
    smallest = least(
        models=200, examples=60, targets=5, itemsize=8, folds=folds or 0, predictions=0
    )
    options = {"penalty": kind, "folds": folds, "dtype": "float64", "tolerance": 1e-8}
    options["lambdas"] = [0.3, 0.1]
    scratch = tmp_path_factory.mktemp("scratch")
    small = fit(
        data.masks,
        data.outputs,
        memory_budget=int(times * smallest),
        scratch=scratch,
        **options,
    )
    whole = fit(data.masks, data.outputs, **options)
    assert isinstance(small.counts.pairs, np.memmap) or times > 1
    assert np.allclose(small.lam, whole.lam, rtol=1e-6, equal_nan=True)
    assert np.allclose(small.weights, whole.weights, atol=1e-3)
    assert small.held_out.mean == pytest.approx(whole.held_out.mean, abs=1e-4)
    assert not list(scratch.iterdir())
    if times == 1.0:  # more models need larger blocks
        return
    more = planted(30, 60, 5, seed=seed + 1)
    grown = small.add(more.masks, more.outputs)
    assert np.allclose(grown.weights, whole.add(more.masks, more.outputs).weights, atol=1e-3)


def test_a_budget_below_the_least_says_what_that_is():
    data = planted(40, 50, 3)
    with pytest.raises(BudgetError, match=r"1\.00 kB(.|\n)*or more \(\d+ bytes\)(.|\n)*parts"):
        fit(data.masks, data.outputs, memory_budget="1kB")


def test_the_memory_taken_stays_below_the_budget(tmp_path):
    # numpy tells tracemalloc of its arrays; torch's are as large as the plan says and not more.
    data = planted(300, 1500, 2, tail=0.0, seed=1)
    sizes = {"models": 300, "examples": 1500, "targets": 2, "itemsize": 4}
    budget = int(1.2 * least(**sizes))
    assert not fit_layout(**sizes, budget=budget).in_memory
    assert budget < 1500 * 1500 * 6
    fit(data.masks[:50, :60], data.outputs[:50])  # imports are not the fit's
    tracemalloc.start()
    try:
        fit(data.masks, data.outputs, memory_budget=budget, scratch=tmp_path, lambdas=[0.5, 0.3])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < budget


def test_a_matrix_is_freed_with_its_last_user():
    gc.disable()  # a cycle would keep the matrix, and a budget would not hold
    try:
        gram = DenseGram(torch.eye(100))
        parts = gram.blocks()
        assert gram.blocks()[0].square is parts[0].square
        gone = weakref.ref(gram.matrix)
        del gram, parts
        assert gone() is None
    finally:
        gc.enable()
