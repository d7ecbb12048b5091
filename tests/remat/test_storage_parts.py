"""Saved tensors that are parts of one storage, each written in place: gates of recurrent cells and the like."""

import contextlib
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradkeep as gk
from gradkeep.errors import BudgetError
from gradkeep.remat._tensors import Geometry


def train(step, parameters, budget, steps=4):
    """Return the gradients after each step, inside a budget or without one."""
    results = []
    around = None if budget is None else gk.memory_budget(budget, recordings=2, effort=0.1)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = None
        if around is None:
            step()
        else:
            with around.step():
                step()
        results.append([parameter.grad.clone() for parameter in parameters])
    return results, around


def assert_equal_bits(first, second):
    for ours, theirs in zip(itertools.chain(*first), itertools.chain(*second), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", [torch.nn.LSTMCell, torch.nn.GRUCell])
def test_cells_in_a_loop_train_in_little_memory(kind):
    torch.manual_seed(0)
    cell, x = kind(32, 64), torch.randn(16, 64, 32)

    def step():
        state = torch.zeros(64, 64)
        state = (state, state) if kind is torch.nn.LSTMCell else state
        for part in x:
            state = cell(part, state)
        (state[0] if isinstance(state, tuple) else state).square().sum().backward()

    parameters = list(cell.parameters())
    plain, _ = train(step, parameters, None)
    within, budget = train(step, parameters, 0.55)
    assert_equal_bits(plain, within)
    report = budget.report()
    assert report.planned == 2
    assert report.measured_peak <= report.budget
    if kind is torch.nn.LSTMCell:
        explanation = budget.explain()
        assert explanation.floor <= 0.5 * explanation.peak


writes = st.lists(
    st.tuples(
        st.sampled_from(["sigmoid_", "tanh_", "exp_"]),
        st.integers(0, 3),
        st.integers(1, 3),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=15)
@given(writes=writes, budget=st.sampled_from([0.5, 0.7, 0.9]))
def test_any_writes_to_parts_give_the_same_bits(writes, budget):
    """In-place operators on overlapping or disjoint parts, saved or not; torch refuses some of them."""
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(64, 64) / 8)
    x = torch.randn(32, 64)

    def step():
        y = x
        for _ in range(3):
            parts = torch.unsafe_chunk(y @ weight, 4, 1)
            for name, start, length, used in writes:
                for part in parts[start : start + length]:
                    saved = getattr(part, name)()
                    if used:
                        y = y + saved.repeat(1, 4) * 0.01
            y = torch.cat(parts, 1).tanh()
        y.sum().backward()

    try:
        plain, _ = train(step, [weight], None)
    except RuntimeError:  # a part was saved and then written again
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            train(step, [weight], budget)
        return
    with contextlib.suppress(BudgetError):  # below the floor
        within, _ = train(step, [weight], budget)
        assert_equal_bits(plain, within)


geometries = st.integers(1, 3).flatmap(
    lambda dims: st.builds(
        lambda size, stride, offset: Geometry(torch.float32, tuple(size), tuple(stride), offset),
        st.lists(st.integers(0, 4), min_size=dims, max_size=dims),
        st.lists(st.integers(0, 7), min_size=dims, max_size=dims),
        st.integers(0, 20),
    )
)


def elements(geometry):
    places = itertools.product(*map(range, geometry.size))
    return {
        geometry.offset + sum(a * b for a, b in zip(place, geometry.stride, strict=True))
        for place in places
    }


@given(first=geometries, second=geometries)
def test_overlap_is_that_of_the_elements(first, second):
    assert first.overlaps(second) == bool(elements(first) & elements(second))
