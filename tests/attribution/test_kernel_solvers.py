"""Every exact way to solve the kernel against a dense solution in float64, for every form of gradients."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep._ranks import column_correlations
from gradkeep.attribution._row_features import RowStorage
from gradkeep.curvature import _cholesky as tiled
from gradkeep.curvature import _conjugate as products
from gradkeep.curvature._cholesky import CholeskyFactor, Solution, summarize_solutions
from gradkeep.curvature._conjugate import (
    KERNEL_METHODS,
    Preconditioner,
    block_conjugate_gradients,
    nystrom_preconditioner,
)
from gradkeep.errors import AttributionError, BudgetError


class Tied(nn.Module):
    """Tokens that are read and scored by one table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.table(tokens)))[:, -1, :3]


def lookup():
    return nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(20, 3))


def sequence():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Flatten(), nn.Linear(15, 3))


def images():
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))


FORMS = {
    "outer": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), (4,), "factors"),
    "sequence": (sequence, (3, 4), "factors"),
    "convolution": (images, (2, 4, 4), "factors"),
    "dense": (images, (2, 4, 4), "dense"),
    "lookup": (lookup, 7, "factors"),
    "tied": (Tied, 7, "factors"),
}
ROWS, ASKED = 40, 7


@dataclass
class Truth:
    """A store, and what its gradients are in float64."""

    store: gk.Store
    q: torch.Tensor
    train: torch.Tensor
    test: torch.Tensor


@pytest.fixture(scope="module", params=list(FORMS))
def world(request, make_world):
    make, shape, keep = FORMS[request.param]
    world = make_world(make, shape, rows=ROWS, queries=ASKED, keep=keep)
    sides = (world.gradients(split, of="output") for split in ("train", "test"))
    return Truth(world.store, torch.sigmoid(-world.margins("train")), *sides)


def dense_scores(x, g, weight, pull, damping=1.0):
    """Compute the expected scores in float64."""
    lam = damping * (weight * x.square().sum(1)).mean()
    s = weight.sqrt()
    kernel = s.unsqueeze(1) * (x @ x.T) * s + lam * torch.eye(len(x), dtype=x.dtype)
    return (
        torch.linalg.solve(kernel, s.unsqueeze(1) * (x @ g.T)) * (pull / s).unsqueeze(1)
    ).T.numpy()


def near(actual, expected, relative=1e-3):
    return np.abs(actual - expected).max() <= relative * np.abs(expected).max()


@pytest.mark.parametrize("way", KERNEL_METHODS)
def test_all_ways_are_the_dense_solution_whatever_form_gradients_have(world, way, monkeypatch):
    monkeypatch.setattr(tiled, "BLOCK", 16)
    monkeypatch.setattr(products, "_BLOCK", 13)
    actual = gk.attribute(world.store, solver=way, tolerance=1e-5)
    q = world.q
    assert near(actual.numpy(), dense_scores(world.train, world.test, q.clamp(min=1e-12), q))
    assert actual.exact
    assert actual.approximate is None
    reported = {"cholesky": "of the kernel", "parameters": "among the parameters", "cg": "residual"}
    assert reported[way] in actual.solved


@pytest.mark.parametrize("moved", [True, False])
def test_vectors_can_be_moved_or_rows_paired(world, moved, monkeypatch):
    monkeypatch.setattr(products, "_BLOCK", 13)
    train = gk.gradients(world.store, split="train", of="output")
    names = tuple(train.forms)
    computed = products.KernelProducts(train, () if moved else names, names if moved else ())
    vectors = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1))
    expected = (world.train @ (world.train.T @ vectors.double())).numpy()
    assert near(computed.times(vectors, 1 << 27).numpy(), expected, 1e-5)


def test_coordinates_are_solved_in_all_ways(make_world):
    world = make_world(
        lambda: nn.Linear(800, 3),
        (800,),
        rows=ROWS,
        queries=ASKED,
        keep=gk.Keep("256B", coordinates="random"),
    )
    one, *others = (gk.attribute(world.store, solver=way, tolerance=1e-6) for way in KERNEL_METHODS)
    for other in others:
        assert near(other.numpy(), one.numpy())
    assert not one.exact  # the coordinates are not, though the kernel of them is


@pytest.mark.parametrize("way", KERNEL_METHODS)
def test_layers_add_up_in_all_ways(world, way):
    actual = gk.attribute(world.store, per_layer=True, solver=way, tolerance=1e-5)
    assert near(actual.per_layer.sum(0), gk.attribute(world.store, solver="cholesky").numpy())


def test_gradients_of_losses_have_their_slopes(make_world):
    world = make_world(lambda: nn.Linear(4, 3), (4,), rows=30, queries=4)
    train = gk.gradients(world.store, split="train", of="loss")
    vectors = torch.randn(30, 2, generator=torch.Generator().manual_seed(1))
    x = world.gradients("train")
    expected = (x @ (x.T @ vectors.double())).numpy()
    for paired in ((), tuple(train.forms)):
        moved = tuple(name for name in train.forms if name not in paired)
        made_products = products.KernelProducts(train, paired, moved)
        assert near(made_products.times(vectors, 1 << 27).numpy(), expected, 1e-5)


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 12),
    pivots=st.integers(1, 40),
    seed=st.integers(0, 2**31),
    decades=st.floats(0, 4),
    twins=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_conjugate_gradients_reach_their_residual(rows, columns, pivots, seed, decades, twins):
    draws = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(rows, rows, generator=draws).double()).Q
    kernel = (basis * torch.logspace(0, -decades, rows).double()) @ basis.T
    damping = float(kernel.diagonal().mean())
    matrix = kernel + damping * torch.eye(rows, dtype=torch.float64)
    right = torch.randn(rows, columns, generator=draws)
    if twins:
        right[:, -1] = right[:, 0]
    chosen = torch.randperm(rows, generator=draws)[:pivots]
    build_preconditioner = nystrom_preconditioner(kernel[:, chosen].float(), chosen, damping)
    actual = block_conjugate_gradients(
        lambda v: matrix.float() @ v, right, build_preconditioner, tolerance=1e-4, max_steps=100
    )
    remaining = (matrix @ actual.values.double() - right.double()).norm(
        dim=0
    ) / right.double().norm(dim=0)
    assert float(remaining.max()) <= 1.1e-4
    assert float(remaining.max()) == pytest.approx(actual.residual, rel=0.2, abs=1e-6)


def test_right_sides_of_zero_are_solved_by_zero():
    alone = Preconditioner(torch.zeros(4, 0), torch.zeros(0), 2.0)
    actual = block_conjugate_gradients(
        lambda v: 3 * v, torch.zeros(4, 2), alone, tolerance=1e-4, max_steps=5
    )
    assert bool((actual.values == 0).all())


def test_too_few_steps_are_an_error_that_tells_the_residual():
    matrix = torch.diag(torch.logspace(0, 3, 30))
    alone = Preconditioner(torch.zeros(30, 0), torch.zeros(0), 1.0)
    with raises(AttributionError, "attribute.not_converged", mentions="3 steps"):
        block_conjugate_gradients(
            lambda v: matrix @ v, torch.ones(30, 1), alone, tolerance=1e-6, max_steps=3
        )


@given(st.integers(1, 50), st.integers(1, 9), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_a_factor_in_blocks_solves_as_a_whole_one(size, block, seed):
    draws = torch.Generator().manual_seed(seed)
    half = torch.randn(size, size + 3, generator=draws)
    matrix = half @ half.T + torch.eye(size)
    right = torch.randn(size, 3, generator=draws)
    expected = torch.linalg.solve(matrix.double(), right.double())
    lower = matrix.clone()
    lower[torch.triu(torch.ones(size, size), block).bool()] = torch.nan  # is not looked at
    for start in range(0, size, block):  # but inside of a block it is
        here = slice(start, start + block)
        lower[here, here] = matrix[here, here]
    actual = CholeskyFactor.of(lower.split(block)).solved(right.clone())
    assert torch.allclose(actual.double(), expected, rtol=1e-2, atol=1e-3)


def test_a_small_budget_is_kept_and_still_exact(make_world):
    world = make_world(lambda: nn.Linear(40, 3), (40,), rows=4000, queries=3)
    whole = gk.attribute(world.store, solver="cholesky", memory_budget="260MB")
    small = gk.attribute(world.store, memory_budget="60MB")
    assert small.exact
    assert "Cholesky's factorisation of the kernel" not in small.solved
    assert column_correlations(small.numpy().T, whole.numpy().T).min() > 0.999
    with raises(BudgetError, "budget.kernel_too_large", mentions="4000 rows") as refused:
        gk.attribute(world.store, solver="cholesky", memory_budget="60MB")
    assert "leave out solver" in refused.value.fix


def test_wrong_options_are_told(make_world):
    world = make_world(lambda: nn.Linear(4, 3), (4,), rows=10, queries=2)
    for options, words in (
        ({"solver": "lu"}, "^solver must be"),
        ({"tolerance": 0.0}, "^tolerance must be between 0 and 1"),
        ({"dim": -1}, "^dim must be"),
    ):
        with pytest.raises(AttributionError, match=words):
            gk.attribute(world.store, **options)


def test_no_projection_is_exact_and_a_projection_says_how_its_ranks_agree(make_world):
    world = make_world(lambda: nn.Linear(30, 3), (30,), rows=50, queries=5)
    exact = gk.attribute(world.store)
    assert np.array_equal(gk.attribute(world.store, dim=0).numpy(), exact.numpy())
    near_it, far = (gk.attribute(world.store, dim=dim) for dim in (4096, 8))

    def told(scores):
        return float(scores.approximate.split("agree ")[1].split()[0])

    assert "on 50 rows and 5 queries" in far.approximate
    assert not far.exact
    true = [
        column_correlations(scores.numpy().T, exact.numpy().T).mean() for scores in (near_it, far)
    ]
    # Of all rows what is told is what it is.
    assert told(near_it) == pytest.approx(true[0], abs=0.02)
    assert told(far) == pytest.approx(true[1], abs=0.02)
    assert told(far) < told(near_it)


def test_projections_on_disk_give_the_same_scores(make_world):
    world = make_world(lambda: nn.Linear(40, 3), (40,), rows=3000, queries=4)
    for method in ("trak", "kernel"):
        held = gk.attribute(world.store, method=method, dim=64)
        on_disk = gk.attribute(world.store, method=method, dim=64, memory_budget="3.5MB")
        assert near(on_disk.numpy(), held.numpy(), 1e-4)


@given(st.integers(0, 30), st.integers(1, 5), st.integers(0, 400), st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_kept_rows_are_read_as_they_were_written(count, dim, limit, step):
    values = torch.randn(count, dim)
    rows = RowStorage(count, dim, limit=limit)
    for start in range(0, count, step):
        rows.put(start, values[start : start + step])
    assert rows.held == (4 * count * dim <= limit)
    assert torch.equal(rows.part(0, count), values)
    chosen = np.arange(count)[::2]
    assert torch.equal(rows.read(chosen), values[chosen])


def test_scores_remember_how_they_were_solved(make_world):
    world = make_world(lambda: nn.Linear(4, 3), (4,), rows=20, queries=2, checkpoints=("a", "b"))
    actual = gk.attribute(world.store, solver="cg", save="kept")
    assert gk.Scores.load(world.store, "kept").solved == actual.solved
    assert actual.solved.startswith("block conjugate gradients, ")
    parts = [Solution("x", 3, 1e-5), None, Solution("x", 2, 2e-5), Solution("y")]
    assert summarize_solutions(parts) == "x, 3 steps to a relative residual of 2.0e-05; y"
