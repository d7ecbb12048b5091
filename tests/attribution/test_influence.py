"""`influence` and `arnoldi` against explicit curvature matrices in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raises import raises
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import gradkeep as gk
from gradkeep.curvature._conjugate import conjugate_gradients, lanczos
from gradkeep.errors import AttributionError, BudgetError

KINDS = ["hessian", "ggn", "fisher"]


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(5, 3), nn.LayerNorm(3), nn.Linear(3, 3)

    def forward(self, ids):
        return self.head(self.norm(self.table(ids).mean(1)))


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), (3,)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)), (1, 4, 4)),
    "words": (Words, 5),
}


class Curved:
    """A world, and the explicit curvatures of its model in float64."""

    def __init__(self, make_world, kind="mlp", *, seed=0, rows=10):
        self.world = make_world(*MODELS[kind], seed=seed, rows=rows, queries=3, length=4)
        self.model, self.store, self.data = self.world.model, self.world.store, self.world.data
        forms = gk.gradients(self.store, split="train").forms
        self.names = [p.name for form in forms.values() for p in form.parameters]
        self.sizes = [sum(p.size for p in form.parameters) for form in forms.values()]
        self.double = self.world.double()

    @property
    def batches(self):
        x, y = self.data["train"]
        return [(x[:4], y[:4]), (x[4:], y[4:])]

    def gradients(self, split):
        return self.world.gradients(split).numpy()

    def curvature(self, kind):
        if kind == "fisher":
            g = self.gradients("train")
            return g.T @ g / len(g)
        x, y = self.data["train"]
        x = x.double() if x.is_floating_point() else x
        weights = dict(self.double.named_parameters())
        shapes = [weights[n].shape for n in self.names]
        flat = torch.cat([weights[n].detach().flatten() for n in self.names])

        def answer(vector):
            parts = torch.split(vector, [s.numel() for s in shapes])
            named = {n: p.reshape(s) for n, p, s in zip(self.names, parts, shapes, strict=True)}
            return functional_call(self.double, named, (x,))

        if kind == "hessian":
            return torch.autograd.functional.hessian(
                lambda v: F.cross_entropy(answer(v), y), flat
            ).numpy()
        j = torch.autograd.functional.jacobian(answer, flat)
        p = answer(flat).softmax(1)
        middle = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        return (torch.einsum("nap,nab,nbr->pr", j, middle, j) / len(x)).detach().numpy()

    def damping(self, relative):
        return relative * np.square(self.gradients("train")).mean()

    def influence(self, kind, damping):
        matrix = self.curvature(kind)
        solved = np.linalg.solve(matrix + damping * np.eye(len(matrix)), self.gradients("train").T)
        return self.gradients("test") @ solved

    def ask(self, method, kind, **options):
        if kind != "fisher":
            options |= {"model": self.model, "data": self.batches}
        return gk.attribute(self.store, method=method, curvature=kind, **options)


def close(actual, expected, tolerance=2e-3):
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", sorted(MODELS))
def test_scores_are_those_of_the_explicit_inverse(make_world, model, kind):
    world = Curved(make_world, model)
    # Enough to lift the Hessian's negative directions.
    least = -np.linalg.eigvalsh(world.curvature(kind)).min()
    damping = max(2 * least, world.damping(1.0))
    actual = world.ask("influence", kind, absolute_damping=damping, tolerance=1e-5, per_layer=True)
    close(actual.numpy(), world.influence(kind, damping))
    solved = np.linalg.solve(
        world.curvature(kind) + damping * np.eye(sum(world.sizes)), world.gradients("test").T
    )
    at = 0
    for size, part in zip(world.sizes, actual.per_layer, strict=True):
        here = slice(at, at + size)
        expected = solved[here].T @ world.gradients("train")[:, here].T
        assert np.abs(part - expected).max() <= 2e-3 * np.abs(actual.numpy()).max()
        at += size


@settings(max_examples=6)
@given(
    seed=st.integers(0, 999), relative=st.floats(0.3, 10), kind=st.sampled_from(["ggn", "fisher"])
)
def test_damping_is_relative_to_the_mean_squared_gradient(make_world, seed, relative, kind):
    world = Curved(make_world, seed=seed)
    actual = world.ask("influence", kind, damping=relative)
    close(actual.numpy(), world.influence(kind, world.damping(relative)), tolerance=5e-3)
    assert actual.exact


@pytest.mark.parametrize("per_layer", [False, True])
def test_the_byte_budget_changes_nothing(make_world, per_layer):
    world = Curved(make_world, rows=500)  # whose kernel does not fit: queries are solved
    ask = {"damping": 1.0, "tolerance": 1e-5, "per_layer": per_layer}
    one = world.ask("influence", "fisher", **ask).numpy()
    other = world.ask("influence", "fisher", memory_budget="3MiB", **ask).numpy()
    assert np.allclose(one, other, rtol=1e-3, atol=1e-3 * np.abs(one).max())


@pytest.mark.parametrize("kind", ["ggn", "fisher", "hessian"])
def test_arnoldi_inverts_along_the_top_eigenvectors(make_world, kind):
    world = Curved(make_world)
    damping = world.damping(0.5)
    actual = world.ask("arnoldi", kind, rank=4, iterations=24, absolute_damping=damping)
    values, vectors = np.linalg.eigh(world.curvature(kind))
    values, vectors = values[::-1][:4], vectors[:, ::-1][:, :4]
    n, q = world.gradients("train") @ vectors, world.gradients("test") @ vectors
    close(actual.numpy(), (q / (values + damping)) @ n.T, tolerance=1e-2)
    assert not actual.exact
    assert actual.approximate == "the 4 directions of most curvature"


def test_arnoldi_by_another_seed_finds_the_same(make_world):
    world = Curved(make_world)
    one = world.ask("arnoldi", "fisher", rank=5, iterations=24).numpy()
    close(world.ask("arnoldi", "fisher", rank=5, iterations=24, seed=3).numpy(), one)


def test_lanczos_finds_the_largest_and_stops_in_a_closed_space():
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((30, 30)))[0]
    values = np.zeros(30)
    values[:4] = [5, 4, 2, -3]
    matrix = torch.tensor(basis * values @ basis.T)
    calls = []

    def product(vector):
        calls.append(1)
        return matrix @ vector

    actual = lanczos(product, torch.ones(30).double(), iterations=30, rank=10)
    assert torch.allclose(actual.values, torch.tensor([5.0, 4.0, 2.0]).double())
    assert len(calls) < 10
    assert torch.allclose(
        actual.vectors @ matrix, actual.values[:, None] * actual.vectors, atol=1e-6
    )


def test_conjugate_gradients_solve_each_right_hand_side():
    rng = np.random.default_rng(1)
    root = rng.standard_normal((12, 12))
    matrix = torch.tensor(root @ root.T + np.eye(12))
    expected = torch.tensor(rng.standard_normal((3, 12)))
    expected[1] = 0
    actual = conjugate_gradients(lambda v: v @ matrix, expected, tolerance=1e-10, max_steps=40)
    assert torch.allclose(actual @ matrix, expected, atol=1e-8)
    with raises(AttributionError, "attribute.not_converged", mentions="2 steps"):
        conjugate_gradients(lambda v: v @ matrix, expected, tolerance=1e-10, max_steps=2)
    with raises(AttributionError, "attribute.negative_curvature"):
        conjugate_gradients(lambda v: -v, expected, tolerance=1e-3, max_steps=2)
    with raises(AttributionError, "attribute.not_finite"):
        conjugate_gradients(lambda v: v * torch.nan, expected, tolerance=1e-3, max_steps=2)


def test_the_model_is_left_in_its_mode(make_world):
    world = Curved(make_world)
    world.model.train()
    world.ask("influence", "ggn")
    assert world.model.training
    assert all(p.grad is None for p in world.model.parameters())


@pytest.mark.parametrize("method", ["influence", "arnoldi"])
@pytest.mark.parametrize(
    ("options", "code", "match"),
    [
        ({"curvature": "newton"}, "argument.invalid", "^curvature must be"),
        ({}, "attribute.no_model", "Pass model="),
        ({"curvature": "hessian", "model": nn.Linear(2, 2)}, "attribute.no_model", "no data"),
        (
            {"curvature": "fisher", "damping": 0.0},
            "attribute.damping",
            "damping must be positive",
        ),
        ({"model": nn.Linear(2, 2), "data": []}, "attribute.other_weights", "weights [0-9a-f]{12}"),
    ],
)
def test_mistakes_are_told(make_world, method, options, code, match):
    with pytest.raises(AttributionError, match=match) as caught:
        gk.attribute(Curved(make_world).store, method=method, **options)
    assert caught.value.code == code


def test_data_must_be_there_as_often_as_it_is_needed(make_world):
    world = Curved(make_world)
    for data, code in ((iter(world.batches), "attribute.iterator"), ([], "attribute.no_data")):
        with raises(AttributionError, code):
            gk.attribute(world.store, method="influence", model=world.model, data=data)


def test_numbers_of_steps_and_directions_must_make_sense(make_world):
    world = Curved(make_world)
    for name, value in (("tolerance", 0.0), ("max_steps", 0)):
        with pytest.raises(AttributionError, match=name):
            world.ask("influence", "fisher", **{name: value})
    with pytest.raises(AttributionError, match="rank"):
        world.ask("arnoldi", "fisher", rank=8, iterations=4)
    with raises(BudgetError, "budget.vectors", fix="fewer iterations"):
        world.ask("arnoldi", "fisher", memory_budget=5000)


def test_gradients_that_are_all_zero(make_world, monkeypatch):
    world = Curved(make_world)
    kind = type(gk.gradients(world.store, split="train"))
    monkeypatch.setattr(kind, "slopes", lambda self: torch.zeros(len(self)))
    with raises(AttributionError, "attribute.zero_gradients"):
        world.ask("influence", "fisher")
