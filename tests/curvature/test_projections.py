"""Every projection of every form, against its matrix; errors against theory; bad input."""

import math

import numpy as np
import pytest
import torch
from forms import layers
from hypothesis import given
from hypothesis import strategies as st
from raises import raises

import gradkeep as gk
from gradkeep.curvature import _random
from gradkeep.curvature._project import (
    SideMaps,
    TwoSided,
    add_rows,
    project,
    project_dense,
    project_parameters,
    two_sided,
    two_sided_layer,
)
from gradkeep.curvature._sketches import KINDS, Projection, ProjectionSum, TensorSketch, sketch_of
from gradkeep.errors import AttributionError, BudgetError
from gradkeep.factors._dense import Dense, DenseRows
from gradkeep.factors._form import Parameter
from gradkeep.factors._outer import Outer, OuterRows

SKETCHES = [kind for kind in KINDS if kind != "auto"]
dims = st.sampled_from([1, 2, 3, 4, 7, 8, 16, 33])


def project_rows(form, rows, projection, **options):
    rows = rows.widened()
    like = rows.example
    into = ProjectionSum(len(rows), projection.dim, dtype=like.dtype, device=like.device)
    add_rows(sketch_of(projection, 0), into, form, rows, **options)
    return into.values()


def two_sided_rows(form, rows, projection, *, scratch=1 << 21):
    return two_sided_layer(SideMaps(projection, 0), form, rows.widened(), scratch)


def matrix(parameter, projection, model=0):
    """The projection of one parameter as a matrix `[P, k]`, entry by entry from its definition."""
    size, k = parameter.size, projection.dim
    words = (projection.seed, model, parameter.name)
    result = torch.zeros(size, k, dtype=torch.float64)
    match projection.kind:
        case "tensor-sketch":
            rows = parameter.shape[0] if len(parameter.shape) > 1 else 1
            cols = size // rows
            shift = _random.places(rows, k, "rows", *words)
            remaining = _random.signs(rows, "rows", *words)
            right = _random.signs(cols, "columns", *words)
            folds = _random.places(-(-cols // k), k, "columns", *words)
            for r in range(rows):
                for c in range(cols):
                    place = c if cols <= k else c % k + int(folds[c // k])
                    result[r * cols + c, (int(shift[r]) + place) % k] = remaining[r] * right[c]
        case "fold":
            fold(result, words)
        case "sjlt":
            bounds = [k * part // 4 for part in range(5)]
            for part in range(4):
                fold(result[:, bounds[part] : bounds[part + 1]], ("part", part, *words))
            result /= 2
        case "rademacher" | "normal":
            draw = _random.signs if projection.kind == "rademacher" else _random.normals
            result = draw(size * k, 0, 0, *words).view(size, k).double() / math.sqrt(k)
    return result


def fold(into, words):
    size, k = into.shape
    signs = _random.signs(size, *words)
    shifts = _random.places(-(-size // k), k, "shift", *words)
    for i in range(size):
        into[i, (i % k + int(shifts[i // k])) % k] = signs[i]


def by_matrix(form, rows, projection):
    dense = form.restore(rows).double()
    at, result = 0, torch.zeros(len(rows), projection.dim, dtype=torch.float64)
    for parameter in form.parameters:
        result += dense[:, at : at + parameter.size] @ matrix(parameter, projection)
        at += parameter.size
    return result


@given(layers(), dims, st.sampled_from(SKETCHES), st.integers(-3, 1 << 40))
def test_equals_the_product_with_its_matrix(layer, dim, kind, seed):
    form, rows = layer
    projection = Projection(kind, max(dim, 4), seed)
    result = project_rows(form, rows, projection)
    assert torch.allclose(result, by_matrix(form, rows, projection), atol=1e-10)


@given(layers(), dims, st.sampled_from(["matrix", "spectrum"]), st.integers(1, 5000))
def test_every_way_gives_the_same_numbers(layer, dim, way, scratch):
    form, rows = layer
    projection = Projection("tensor-sketch", dim)
    result = project_rows(form, rows, projection, method=way, scratch=scratch)
    assert torch.allclose(result, by_matrix(form, rows, projection), atol=1e-10)


@given(layers(), dims, st.sampled_from(SKETCHES), st.data())
def test_independent_of_the_batch_and_of_storage(layer, dim, kind, data):
    form, rows = layer
    projection = Projection(kind, max(dim, 4))
    whole = project_rows(form, rows, projection)
    cut = data.draw(st.integers(0, len(rows)))
    parts = [rows.take(0, cut), rows.take(cut, len(rows))]
    split = torch.cat([project_rows(form, part, projection) for part in parts])
    assert torch.allclose(split, whole, atol=1e-10)
    stored = form.restore(rows)
    dense = Dense(form.parameters, "w.gradient", stored.shape[1])
    assert torch.allclose(project_rows(dense, DenseRows(stored), projection), whole, atol=1e-10)


@given(layers(), st.integers(1, 4), st.integers(1, 4))
def test_two_sided_equals_its_matrices_however_a_layer_is_kept(layer, high, wide):
    form, rows = layer
    projection = TwoSided(high, wide)
    result = two_sided_rows(form, rows, projection, scratch=500)
    assert result.shape == (len(rows), projection.width(form.parameters))
    stored = form.restore(rows)
    dense = Dense(form.parameters, "w.gradient", stored.shape[1])
    assert torch.allclose(two_sided_rows(dense, DenseRows(stored), projection), result, atol=1e-6)


def test_two_sided_of_a_linear_layer_is_what_its_definition_says():
    form = Outer((Parameter("w", (9, 7)), Parameter("b", (9,))), "x", "g", 7, 9, bias=True)
    torch.manual_seed(0)
    rows = OuterRows(torch.randn(5, 7).double(), torch.randn(5, 9).double())
    words = ("two-sided", 3, 0, "w")
    remaining = _random.normals(9 * 4, *words, "rows").view(9, 4).double() / 2
    right = _random.normals(8 * 6, *words, "columns").view(8, 6).double() / math.sqrt(6)
    x = torch.cat([rows.x, torch.ones(5, 1)], 1)
    expected = torch.einsum("br,rk,bc,cj->bkj", rows.g, remaining, x, right).flatten(1)
    result = two_sided_rows(form, rows, TwoSided(4, 6, seed=3))
    assert torch.allclose(result, expected, atol=1e-6)


def test_two_sided_products_are_right_on_average():
    form = Outer((Parameter("w", (9, 12)), Parameter("b", (9,))), "x", "g", 12, 9, bias=True)
    torch.manual_seed(0)
    rows = OuterRows(torch.randn(2, 12).double(), torch.randn(2, 9).double())
    dense = form.restore(rows)
    draws = 400
    result = []
    for seed in range(draws):
        low = two_sided_rows(form, rows, TwoSided(5, 6, seed))
        result.append(float(low[0] @ low[1] - dense[0] @ dense[1]))
    spread = np.std(result) / math.sqrt(draws)
    assert abs(np.mean(result)) < 4 * spread
    assert spread < 0.1 * float(dense[0].norm() * dense[1].norm())


def network(kind):
    torch.manual_seed(1)
    if kind == "mlp":
        return torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.ReLU(), torch.nn.Linear(24, 4))
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 4),
    ).eval()


@pytest.fixture(params=["mlp", "cnn"])
def captured(request, tmp_path):
    """A capture, and the gradients of the margin by autograd `[N, P]` per parameter."""
    net = network(request.param)
    x, y = torch.randn(30, 16), torch.randint(4, (30,))
    if request.param == "cnn":
        x = x.view(30, 1, 4, 4)
    store = gk.open(tmp_path, durability="process")
    loader = [(x[:8], y[:8]), (x[8:], y[8:])]
    gk.capture(store, net, loader, task=gk.Classification(), split="train", progress=False)

    def margin(weights, x, y):
        answer = torch.func.functional_call(net, weights, (x.unsqueeze(0),))
        own = torch.arange(4) == y
        return (answer[0] * own).sum() - torch.where(own, -torch.inf, answer[0]).logsumexp(0)

    weights = {name: value.detach() for name, value in net.named_parameters()}
    each = torch.func.vmap(torch.func.grad(margin), (None, 0, 0))
    return store, each(weights, x, y)


@pytest.mark.parametrize("kind", KINDS)
def test_a_capture_gives_what_autograd_gives_by_name(captured, kind):
    store, grads = captured
    projection = Projection(kind, 64, seed=5)
    rows = gk.gradients(store, split="train", of="output")
    result = project(rows, projection, model="a")
    assert result.dtype == torch.float32
    expected = project_parameters(grads, projection, model="a")
    assert torch.allclose(result, expected, atol=1e-4 * float(expected.abs().max()))
    assert not torch.allclose(result, project(rows, projection, model="b"), atol=1e-2)
    budget = 5_000_000
    assert torch.allclose(project(rows, projection, model="a", memory_budget=budget), result)


def test_gradients_of_the_loss_are_scaled_by_the_slopes(captured):
    store, _ = captured
    projection = Projection(dim=64)
    loss = gk.gradients(store, split="train")
    output = project(gk.gradients(store, split="train", of="output"), projection)
    slopes = loss.slopes()
    assert torch.allclose(project(loss, projection), output * slopes[:, None], atol=1e-5)
    both = two_sided(loss, TwoSided(3, 5))
    plain = two_sided(gk.gradients(store, split="train", of="output"), TwoSided(3, 5))
    assert torch.allclose(both, plain * slopes[:, None], atol=1e-5)
    assert both.shape[1] == sum(TwoSided(3, 5).width(f.parameters) for f in loss.forms.values())


def test_chosen_layers_only(captured):
    store, grads = captured
    name = list(gk.gradients(store, split="train").forms)[-1]
    rows = gk.gradients(store, split="train", of="output", layers=name)
    result = project(rows, Projection(dim=32))
    chosen = {key: value for key, value in grads.items() if key.startswith(f"{name}.")}
    assert torch.allclose(result, project_parameters(chosen, Projection(dim=32)), atol=1e-4)


def errors(kind, k, x, y, draws):
    """(estimate - true) / (|x| |y|) of one pair over independent projections."""
    form = Dense((Parameter("w", (40, 25)),), "w", 1000)
    result = []
    for seed in range(draws):
        both = project_rows(form, DenseRows(torch.stack([x, y])), Projection(kind, k, seed))
        result.append(float(both[0] @ both[1] - x @ y))
    return np.array(result) / float(x.norm() * y.norm())


@pytest.mark.parametrize("kind", SKETCHES)
def test_errors_are_what_theory_says(kind):
    k, draws = 64, 300
    torch.manual_seed(3)
    u, v = torch.randn(2, 40).double(), torch.randn(2, 25).double()
    # Products of factors, which a TensorSketch could get wrong, and a pair that is not at random.
    x = (u[0][:, None] * v[0]).flatten()
    y = (u[1][:, None] * v[1]).flatten() + 0.3 * x
    result = errors(kind, k, x, y, draws)
    expected = Projection(kind, k).expected_error
    assert expected == 1 / 8
    assert abs(result.mean()) < 4 * result.std() / math.sqrt(draws)
    # The variance is (1 + cos^2) / k, less what cannot collide; 300 draws know it to 8 percent.
    assert 0.7 * expected < result.std() < 1.3 * expected


def test_a_smaller_dimension_errs_more():
    torch.manual_seed(3)
    x, y = torch.randn(2, 1000).double()
    wide, narrow = (errors("tensor-sketch", k, x, y, 100).std() for k in (256, 16))
    assert 2.5 < narrow / wide < 6


def test_projections_of_seeds_models_and_names_are_independent():
    x = torch.randn(1, 5000)
    base = project_dense(x, Projection(dim=512))
    for other in (
        project_dense(x, Projection(dim=512, seed=1)),
        project_dense(x, Projection(dim=512), model=1),
        project_dense(x, Projection(dim=512), model="0"),
    ):
        cosine = float(torch.cosine_similarity(base, other))
        assert abs(cosine) < 5 / math.sqrt(512)
    second = project_dense(x, Projection(dim=512, seed=np.int64(0)))
    assert torch.equal(base, second)


def test_the_first_numbers_are_pinned():
    """What is stored today must be understood tomorrow, on any machine."""
    assert _random.raw(2, 0, "a").tolist() == [5788559034506737022, 1251616126301369296]
    result = project_dense(torch.arange(8.0)[None], Projection("fold", 4))
    assert result.tolist() == [[-4.0, 4.0, 4.0, 4.0]]
    named = {"w": torch.arange(6.0).view(1, 2, 3)}
    assert project_parameters(named, Projection(dim=4)).tolist() == [[5.0, 0.0, -4.0, -2.0]]


def test_random_words_do_not_run_into_each_other():
    assert _random.raw(1, "a", "b") != _random.raw(1, "ab")
    assert _random.raw(1, 1, 2) != _random.raw(1, "1", 2)
    drawn = _random.places(20_000, 7, "x")
    counts = torch.bincount(drawn, minlength=7).double()
    assert float(((counts - 20_000 / 7) ** 2 / (20_000 / 7)).sum()) < 25  # chi^2, 6 degrees
    normal = _random.normals(20_001, "x")
    assert abs(float(normal.mean())) < 0.03
    assert abs(float(normal.std()) - 1) < 0.02
    assert torch.equal(_random.normals(7, "x"), normal[:7])
    assert torch.equal(_random.signs(70, "x"), _random.signs(200, "x")[:70])


def test_costs_choose_transforms_for_large_weights():
    assert TensorSketch(10, 64, 2048, "a").choose_method(1) == "matrix"
    assert TensorSketch(1000, 1000, 2048, "a").choose_method(1) == "spectrum"
    assert TensorSketch(32, 72, 2048, "a").choose_method(64) == "matrix"
    assert TensorSketch(512, 4608, 2048, "a").choose_method(16, patches=True) == "spectrum"
    assert TensorSketch(128, 1152, 2048, "a").choose_method(256, patches=True) == "matrix"


@pytest.mark.parametrize(
    ("kind", "dim", "seed", "code", "mentions"),
    [
        ("tensorsketch", 8, 0, "argument.invalid", "tensor-sketch"),
        ("fold", 0, 0, "attribute.projection_dim", "dim=0"),
        ("fold", -3, 0, "attribute.projection_dim", "dim=-3"),
        ("sjlt", 3, 0, "attribute.projection_dim", "at least 4"),
        ("fold", 2.5, 0, "argument.invalid", "2.5"),
        ("fold", 8, "zero", "argument.invalid", "'zero'"),
    ],
)
def test_what_is_no_projection_is_refused(kind, dim, seed, code, mentions):
    with raises(AttributionError, code, mentions=mentions):
        Projection(kind, dim, seed)


def test_no_two_sided_projection_without_dimensions():
    with raises(AttributionError, "attribute.projection_dim", mentions="rows=0"):
        TwoSided(0, 4)


def test_not_a_number_is_named():
    with raises(AttributionError, "attribute.not_finite", mentions="rows 1"):
        project_dense(torch.tensor([[1.0], [math.nan]]), Projection(dim=4))
    with raises(AttributionError, "attribute.not_finite"):
        project_parameters({"w": torch.tensor([[math.inf]])}, Projection(dim=4))


def test_wrong_shapes_are_refused():
    with raises(AttributionError, "attribute.gradient_shape", mentions="[B, P]"):
        project_dense(torch.zeros(3), Projection(dim=4))
    with raises(AttributionError, "attribute.gradient_counts", mentions="3, and 2 for b"):
        project_parameters({"a": torch.zeros(3, 1), "b": torch.zeros(2, 1)}, Projection())
    with raises(AttributionError, "attribute.no_gradients"):
        project_parameters({}, Projection())


def test_more_numbers_than_memory_are_refused_before_anything_is_made(captured):
    store, _ = captured
    rows = gk.gradients(store, split="train")
    with raises(AttributionError, "attribute.out_of_memory", mentions="30 x 1099511627776"):
        project(rows, Projection(dim=1 << 40))
    with pytest.raises(BudgetError, match="too small"):
        project(rows, Projection(dim=1 << 20), memory_budget="4MB")


def test_half_precision_is_widened():
    form = Dense((Parameter("w", (3, 2)),), "w", 6)
    rows = DenseRows(torch.randn(2, 6).half())
    result = project_rows(form, rows, Projection(dim=8))
    assert result.dtype == torch.float32
    assert torch.equal(
        result, project_rows(form, DenseRows(rows.values.float()), Projection(dim=8))
    )
