"""K-FAC and EK-FAC influence against explicit matrices in float64."""

import tempfile
from itertools import pairwise

import numpy as np
import pytest
import torch
from autograd_reference import per_sample_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from raises import raises
from torch import nn
from torch.nn import functional as F

import gradkeep as gk
from gradkeep._ranks import rank_correlation
from gradkeep.curvature import _fisher as _fit
from gradkeep.curvature import _moments
from gradkeep.curvature._fisher import Damping, fisher
from gradkeep.errors import AttributionError, BudgetError, QueryError


class Words(nn.Module):
    """Token ids [B, T] -> logits."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, ids):
        return self.head(self.norm(self.table(ids).tanh().mean(1)))


class Tied(nn.Module):
    """Token ids [B, T] -> logits over tokens, by the same weight."""

    def __init__(self, *, bias):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=bias)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.table(ids).tanh().mean(1))


class Tokens(nn.Module):
    """Vectors [B, T, 4] -> logits."""

    def __init__(self, *, wide=5):
        super().__init__()
        self.each, self.head = nn.Linear(4, wide), nn.Linear(wide, 3, bias=False)

    def forward(self, x):
        return self.head(self.each(x).tanh().sum(1))


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), (4,)),
    "tokens": (Tokens, (5, 4)),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)
        ),
        (2, 5, 5),
    ),
    "grouped": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 2, groups=2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)
        ),
        (2, 4, 4),
    ),
    "transposed": (
        lambda: nn.Sequential(
            nn.ConvTranspose2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)
        ),
        (2, 3, 3),
    ),
    "words": (Words, 7),
    "tied": (lambda: Tied(bias=False), 7),
}


@pytest.fixture(scope="session")
def opened(make_world):
    """A store, and the model and data in float64."""

    def make(name, **options):
        world = make_world(*MODELS[name], **options)
        return world.store, world.double(), {s: world.batch(s) for s in world.data}

    return make


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def dense(model, data, module):
    """The gradients [B, P] of one module's own parameters."""
    actual = per_sample_gradients(model, losses, data)
    names = [f"{module}.{n}" for n, _ in model.get_submodule(module).named_parameters()]
    return torch.cat([actual[n].flatten(1) for n in names], 1)


def positions(model, data, module):
    """Prefixes [S, C] with ones for a bias, and suffixes [S, R], one entry per group."""
    layer, seen = model.get_submodule(module), {}

    def keep(module, args, output):
        seen["x"], seen["y"] = args[0], output
        output.retain_grad()

    handle = layer.register_forward_hook(keep)
    losses(model, data).sum().backward()
    handle.remove()
    x, g = seen["x"].detach(), seen["y"].grad
    if isinstance(layer, nn.Embedding):  # one position for each distinct token of a row
        pairs = [(i, t) for i, row in enumerate(x) for t in row.unique()]
        onehot = torch.stack([F.one_hot(t, layer.num_embeddings).double() for _, t in pairs])
        return [(torch.stack([g[i][x[i] == t].sum(0) for i, t in pairs]), onehot)]
    if isinstance(layer, nn.Linear):
        x, g = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        ones = [torch.ones(len(x), 1).double()] if layer.bias is not None else []
        return [(torch.cat([x, *ones], 1), g)]
    wide, narrow = x, g
    if isinstance(layer, nn.ConvTranspose2d):
        wide, narrow = g, x
    actual = []
    for w, n in zip(wide.chunk(layer.groups, 1), narrow.chunk(layer.groups, 1), strict=True):
        patches = F.unfold(w, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        patches = patches.transpose(1, 2).reshape(-1, patches.shape[1])
        if layer.bias is not None and isinstance(layer, nn.Conv2d):
            patches = torch.cat([patches, torch.ones(len(patches), 1).double()], 1)
        actual.append((patches, n.flatten(2).transpose(1, 2).reshape(-1, n.shape[1])))
    return actual


def matrices(model, data, module):
    """Gradients as [B, groups, R, C], the bias as a column, and what is left over [B, p]."""
    layer, g = model.get_submodule(module), dense(model, data, module)
    groups = getattr(layer, "groups", 1)
    rows = layer.weight.shape[0]
    size = layer.weight.numel()
    weight = g[:, :size].reshape(len(g), groups, rows // groups, -1)
    rest = g[:, size:]
    if rest.shape[1] == rows and not isinstance(layer, nn.ConvTranspose2d):
        return torch.cat([weight, rest.reshape(len(g), groups, -1, 1)], 3), rest[:, :0]
    return weight, rest


def inverse_products(fisher, factors, right, damping):
    """left (F + damping)^-1 right^T"""
    return factors @ np.linalg.solve(fisher + damping * np.eye(len(fisher)), right.T)


def by_factors(model, data, module, *, corrected, relative):
    """Scores [Q, N] of one layer from its explicit K-FAC or EK-FAC matrices."""
    layer = model.get_submodule(module)
    count = len(data["train"][0])
    sides = positions(model, data["train"], module)
    (train, rest), (requested, rest_q) = (
        matrices(model, data[s], module) for s in ("train", "test")
    )
    blocks, values = [], []
    for group, (x, g) in enumerate(sides):
        prefix, suffix = (x.T @ x / len(x)).numpy(), (g.T @ g / count).numpy()
        if isinstance(layer, nn.Embedding):  # x is the summed suffix, g the one-hot tokens
            prefix, suffix = (x.T @ x / count).numpy(), (g.T @ g / len(g)).numpy()
        right, remaining = np.linalg.eigh(prefix), np.linalg.eigh(suffix)
        if isinstance(layer, nn.Embedding):
            remaining = (np.diag(suffix), np.eye(len(suffix)))
        basis = np.kron(remaining[1], right[1])
        n, q = train[:, group].flatten(1).numpy(), requested[:, group].flatten(1).numpy()
        actual = ((n @ basis) ** 2).mean(0) if corrected else np.kron(remaining[0], right[0])
        blocks.append((basis, q, n))
        values.append(actual)
    if rest.shape[1]:
        moment = (rest.T @ rest / count).numpy()
        spectrum, basis = np.linalg.eigh(moment)
        blocks.append((basis, rest_q.numpy(), rest.numpy()))
        values.append(spectrum)
    damping = relative * np.concatenate(values).mean()
    return sum(
        inverse_products((b * v) @ b.T, q, n, damping)
        for (b, q, n), v in zip(blocks, values, strict=True)
    )


def whole(model, data, module, *, relative):
    """Scores [Q, N] of one layer by its whole empirical Fisher matrix."""
    n, q = (dense(model, data[s], module).numpy() for s in ("train", "test"))
    moment = n.T @ n / len(n)
    return inverse_products(moment, q, n, relative * np.trace(moment) / len(moment))


def close(actual, expected, tolerance=3e-4):
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
@pytest.mark.parametrize("name", ["mlp", "tokens", "conv", "grouped", "transposed"])
def test_factors_give_the_scores_of_their_kronecker_products(opened, name, method):
    store, model, data = opened(name, keep="factors")
    actual = gk.attribute(store, method=method, damping=0.1, per_layer=True)
    expected = [
        by_factors(model, data, layer, corrected=method == "ekfac", relative=0.1)
        for layer in actual.layers
    ]
    for one, other in zip(actual.per_layer, expected, strict=True):
        close(one, other)
    close(actual.numpy(), sum(expected))
    assert not actual.exact
    assert "Kronecker" in actual.approximate


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_embeddings_have_a_diagonal_side_and_norms_their_whole_matrix(opened, method):
    store, model, data = opened("words", keep="factors")
    actual = gk.attribute(store, method=method, damping=0.2, per_layer=True)
    parts = dict(zip(actual.layers, actual.per_layer, strict=True))
    corrected = method == "ekfac"
    for layer in ("table", "head"):
        close(parts[layer], by_factors(model, data, layer, corrected=corrected, relative=0.2))
    close(parts["norm"], whole(model, data, "norm", relative=0.2))


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
@pytest.mark.parametrize("name", ["mlp", "tokens", "conv", "grouped", "transposed"])
def test_dense_layers_with_moments_of_all_rows_give_the_same(opened, name, method):
    store, model, data = opened(name, keep="dense")
    actual = gk.attribute(store, method=method, damping=0.1, per_layer=True)
    for layer, part in zip(actual.layers, actual.per_layer, strict=True):
        corrected = method == "ekfac"
        close(part, by_factors(model, data, layer, corrected=corrected, relative=0.1))
    assert "dense" not in actual.approximate


def without_moments(store):
    """A store whose captures are as those of before moments were kept."""
    for key in store.captures():
        if store.has(key.moments):
            store.delete(key.moments)
    return store


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_small_layers_kept_dense_without_moments_have_their_whole_matrix(opened, method):
    store, model, data = opened("conv", keep="dense")
    actual = gk.attribute(without_moments(store), method=method, per_layer=True, damping=0.5)
    assert "without moments (0, 3)" in actual.approximate
    for layer, part in zip(actual.layers, actual.per_layer, strict=True):
        close(part, whole(model, data, layer, relative=0.5))


def test_moments_of_the_first_rows_give_nearly_the_ranks_of_all(make_world):
    scores = {}
    for keep in ("dense", "factors"):
        world = make_world(images, (3, 16, 16), rows=300, queries=8, keep=keep)
        scores[keep] = gk.attribute(world.store, method="ekfac", damping=0.1)
    ours, formula = (scores[keep].numpy() for keep in ("dense", "factors"))
    assert "are those of the first 128 rows" in scores["dense"].approximate
    assert "rows" not in scores["factors"].approximate
    ranks = [rank_correlation(one, other) for one, other in zip(ours, formula, strict=True)]
    assert np.mean(ranks) >= 0.99
    rows = gk.attribute(without_moments(world.store), method="ekfac", damping=0.1).numpy()
    np.testing.assert_array_equal(rows, formula)  # factors have no moments beside them


def images():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3),
    )  # fmt: skip


def by_gradients(model, data, module, *, corrected, relative):
    """Scores [Q, N] of one layer by the moments of its gradient matrices."""
    n, q = (matrices(model, data[s], module)[0][:, 0].numpy() for s in ("train", "test"))
    high, wide = np.einsum("nrc,nsc->rs", n, n), np.einsum("nrc,nrd->cd", n, n)
    remaining, right = np.linalg.eigh(high / len(n)), np.linalg.eigh(wide / np.trace(wide))
    turned = [remaining[1].T @ x @ right[1] for x in (q, n)]
    values = (turned[1] ** 2).mean(0) if corrected else np.outer(remaining[0], right[0])
    weights = 1 / (values + relative * values.mean())
    return np.einsum("qrc,nrc,rc->qn", *turned, weights)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("stored", [{"keep": "dense"}, {"keep": "low rank", "tolerance": 1e-6}])
def test_layers_without_positions_have_the_moments_of_their_gradients(opened, stored, corrected):
    MODELS["wide"] = (lambda: Tokens(wide=120), (5, 4))
    store, model, data = opened("wide", rows=20, **stored)
    method = "ekfac" if corrected else "kfac"
    actual = gk.attribute(without_moments(store), method=method, layers="each", damping=0.1)
    close(actual.numpy(), by_gradients(model, data, "each", corrected=corrected, relative=0.1))


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_a_weight_that_is_used_twice_has_the_moments_of_its_gradients(opened, method):
    store, model, data = opened("tied", keep="factors")
    actual = gk.attribute(store, method=method, damping=0.1)
    assert len(actual.layers) == 1
    corrected = method == "ekfac"
    close(actual.numpy(), by_gradients(model, data, "table", corrected=corrected, relative=0.1))


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
@pytest.mark.parametrize("name", ["mlp", "tokens", "conv"])
def test_long_sides_keep_their_own_coordinates(opened, name, method, monkeypatch):
    monkeypatch.setattr(_moments, "WIDE", 4)
    store, model, data = opened(name, keep="factors")
    actual = gk.attribute(store, method=method, damping=0.1, per_layer=True)
    for layer, part in zip(actual.layers, actual.per_layer, strict=True):
        ((x, g),) = positions(model, data["train"], layer)
        n, q = (matrices(model, data[s], layer)[0][:, 0].numpy() for s in ("train", "test"))
        sides = []
        for moment in ((g.T @ g / 14).numpy(), (x.T @ x / len(x)).numpy()):
            own = np.diag(moment), np.eye(len(moment))
            # Fewer positions than numbers in each are decomposed by the positions.
            long = len(moment) > 4 and len(x) >= len(moment)
            sides.append(own if long else np.linalg.eigh(moment))
        turned = [sides[0][1].T @ y @ sides[1][1] for y in (q, n)]
        values = np.outer(sides[0][0], sides[1][0])
        if method == "ekfac":
            values = (turned[1] ** 2).mean(0)
        weights = 1 / (values + 0.1 * values.mean())
        close(part, np.einsum("qrc,nrc,rc->qn", *turned, weights))


@settings(max_examples=8)
@given(
    seed=st.integers(0, 10**6),
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=2),
    bias=st.booleans(),
    damping=st.sampled_from([0.01, 0.3, 10.0]),
    corrected=st.booleans(),
)
def test_random_networks(opened, seed, widths, bias, damping, corrected):
    sizes = [3, *widths, 3]
    layers = []
    for wide, out in pairwise(sizes):
        layers += [nn.Linear(wide, out, bias=bias), nn.Tanh()]
    MODELS["random"] = (lambda: nn.Sequential(*layers[:-1]), (3,))
    store, model, data = opened("random", seed=seed, keep="factors")
    method = "ekfac" if corrected else "kfac"
    actual = gk.attribute(store, method=method, damping=damping)
    expected = sum(
        by_factors(model, data, layer, corrected=corrected, relative=damping)
        for layer in actual.layers
    )
    close(actual.numpy(), expected, tolerance=1e-3)


@pytest.mark.parametrize("name", ["mlp", "conv", "words"])
def test_the_byte_budget_changes_nothing(opened, name):
    store, *_ = opened(name, rows=40)
    free = gk.attribute(store, method="ekfac").numpy()
    tight = gk.attribute(store, method="ekfac", memory_budget="5MiB").numpy()
    assert np.allclose(free, tight, rtol=1e-4, atol=1e-5 * np.abs(free).max())
    with pytest.raises(BudgetError):
        gk.attribute(store, method="ekfac", memory_budget="1MiB")


@pytest.mark.parametrize("name", ["mlp", "tokens", "conv", "grouped", "transposed"])
def test_rows_that_find_no_room_are_turned_again(opened, name, monkeypatch):
    store, _, _ = opened(name, keep="factors")
    expected = gk.attribute(store, method="ekfac", per_layer=True)
    monkeypatch.setattr(_fit, "room_for_rows", lambda budget: 0)
    actual = gk.attribute(store, method="ekfac", per_layer=True)
    for one, other in zip(actual.per_layer, expected.per_layer, strict=True):
        close(one, other, 1e-5)


@pytest.mark.parametrize("name", ["mlp", "tokens", "conv", "transposed"])
def test_rows_that_do_not_stay_give_way_to_those_of_the_next_layer(opened, name, monkeypatch):
    store, _, _ = opened(name, keep="factors")
    expected = gk.attribute(store, method="ekfac", per_layer=True)
    monkeypatch.setattr(_fit, "_RETAINED_SHARE", 1 << 60)
    once = gk.attribute(store, method="ekfac", per_layer=True)
    monkeypatch.setattr("gradkeep.attribution._attribute._TILE", 1)  # a query a time
    second_scores = gk.attribute(store, method="ekfac", per_layer=True)
    for actual in (once, second_scores):
        for one, other in zip(actual.per_layer, expected.per_layer, strict=True):
            close(one, other, 1e-5)


@pytest.mark.parametrize("name", ["mlp", "conv", "words"])
def test_queries_may_be_kept_in_another_way(opened, name):
    store, model, data = opened(name, keep="factors")
    x, y = data["test"]
    gk.capture(
        store,
        model.float(),
        [(x.float() if x.is_floating_point() else x, y)],
        task=gk.Classification(),
        split="dense",
        keep="dense",
        progress=False,
    )
    one = gk.attribute(store, method="ekfac").numpy()
    other = gk.attribute(store, method="ekfac", queries="dense").numpy()
    assert np.allclose(one, other, rtol=1e-3, atol=1e-4 * np.abs(one).max())


@pytest.mark.parametrize("encoding", ["bfloat16", "float16-scaled", "int8-scaled"])
def test_factors_with_fewer_bits_give_nearly_the_same(opened, encoding):
    plain = gk.attribute(opened("conv", keep="factors")[0], method="ekfac").numpy()
    store, *_ = opened("conv", keep="factors", encoding=encoding)
    actual = gk.attribute(store, method="ekfac").numpy()
    assert np.corrcoef(actual.ravel(), plain.ravel())[0, 1] > 0.99


def test_a_model_in_double_precision():
    torch.manual_seed(0)
    store, model = gk.open(tempfile.mkdtemp()), Tokens().double()
    for split, rows in (("train", 9), ("test", 4)):
        batch = (torch.randn(rows, 5, 4).double(), torch.arange(rows) % 3)
        gk.capture(
            store,
            model,
            [batch],
            task=gk.Classification(),
            split=split,
            keep="factors",
            progress=False,
        )
    for method in ("kfac", "ekfac", "logra", "datainf"):
        assert gk.attribute(store, method=method).shape == (4, 9)
    reported = {"curvature": "fisher", "damping": 1.0}
    kernel = gk.attribute(store, method="influence", **reported).numpy()
    solved = gk.attribute(store, method="influence", per_layer=True, **reported).numpy()
    assert np.allclose(kernel, solved, rtol=1e-2, atol=1e-3 * np.abs(kernel).max())


def test_absolute_damping_is_added_as_it_is(opened):
    store, *_ = opened("mlp", keep="factors")
    actual = fisher(gk.gradients(store, split="train"), corrected=True)
    mean = actual["0"].mean
    one = gk.attribute(store, method="ekfac", layers="0", damping=0.7)
    other = gk.attribute(store, method="ekfac", layers="0", absolute_damping=0.7 * mean)
    assert np.allclose(one.numpy(), other.numpy(), rtol=1e-4)


def test_strong_damping_leaves_plain_products(opened):
    store, *_ = opened("conv", keep="factors")
    dot = gk.attribute(store, method="dot").numpy()
    damped = gk.attribute(store, method="kfac", absolute_damping=1e6).numpy()
    assert np.allclose(1e6 * damped, dot, rtol=1e-3, atol=1e-4 * np.abs(dot).max())


def test_sampled_labels_make_the_fisher_matrix(opened):
    store, model, data = opened("mlp", keep="factors")
    with pytest.raises(AttributionError) as error:
        gk.attribute(store, method="ekfac", fisher="sampled")
    call = (
        "gk.capture(store, model, loader, task=gk.Classification(labels='sampled'), "
        "split='train', checkpoint='final', name='sampled')"
    )
    assert call in str(error.value)
    task = gk.Classification(labels="sampled", seed=3)
    batch = (data["train"][0].float(), data["train"][1])
    gk.capture(
        store,
        model.float(),
        [batch],
        task=task,
        split="train",
        name="sampled",
        keep="factors",
        progress=False,
    )
    drawn = torch.from_numpy(
        np.array(
            store.read(gk.store.CaptureKey("final", "train", "main", "sampled")).column("label")
        )
    )
    actual = gk.attribute(store, method="kfac", fisher="sampled", layers="0").numpy()
    passed = gk.attribute(store, method="kfac", layers="0").numpy()
    assert not np.allclose(actual, passed, rtol=1e-2)
    x, g = positions(model.double(), (data["train"][0], drawn), "0")[0]
    values, basis = np.linalg.eigh(np.kron((g.T @ g / 14).numpy(), (x.T @ x / 14).numpy()))
    n, q = (matrices(model, data[s], "0")[0].flatten(1).numpy() for s in ("train", "test"))
    close(actual, (q @ basis / (values + 0.3 * values.mean())) @ (n @ basis).T)


def test_a_fisher_capture_of_other_layers_is_refused(opened):
    store, model, data = opened("mlp")
    batch = (data["train"][0].float(), data["train"][1])
    gk.capture(
        store,
        model.float(),
        [batch],
        task=gk.Classification(labels="sampled"),
        split="train",
        name="sampled",
        layers=["0"],
        progress=False,
    )
    with pytest.raises(AttributionError, match="does not hold layer 2"):
        gk.attribute(store, method="ekfac", fisher="sampled")


@pytest.mark.parametrize("damping", [0.0, -1.0, float("nan"), float("inf")])
def test_damping_must_be_above_zero(damping):
    with pytest.raises(AttributionError, match="damping"):
        Damping(damping)
    with pytest.raises(AttributionError, match="damping"):
        Damping(absolute=damping)


@pytest.mark.parametrize("method", ["kfac", "ekfac", "logra", "datainf"])
def test_damping_can_be_chosen_by_subset_outcomes(opened, method):
    store, *_ = opened("mlp", rows=30)
    masks = np.random.default_rng(0).random((40, 30)) < 0.5
    target = gk.attribute(store, method=method, damping=3.0).numpy()
    actual = gk.attribute(store, method=method, damping="auto", subsets=(masks, masks @ target.T))
    assert np.array_equal(actual.numpy(), target)
    with pytest.raises(AttributionError, match="damping must be"):
        gk.attribute(store, method=method, damping="strong")


def test_gradients_that_are_all_zero_or_no_numbers(opened, monkeypatch):
    store, *_ = opened("mlp", keep="factors")
    rows = gk.gradients(store, split="train")
    slopes = torch.zeros(len(rows))
    monkeypatch.setattr(type(rows), "slopes", lambda self: slopes)
    with pytest.raises(AttributionError, match="are zero"):
        fisher(rows, corrected=True)
    slopes[3] = float("nan")
    with raises(AttributionError, "attribute.not_finite"):
        fisher(rows, corrected=True)


def test_a_fisher_matrix_must_be_one_of_two(opened):
    store, *_ = opened("mlp")
    with pytest.raises(AttributionError, match="fisher must be"):
        gk.attribute(store, method="kfac", fisher="true")


def test_several_checkpoints_are_averaged():
    torch.manual_seed(0)
    store, model = gk.open(tempfile.mkdtemp()), nn.Linear(3, 3)
    states = {
        n: {k: torch.randn_like(v) for k, v in model.state_dict().items()} for n in ("a", "b")
    }
    for split, rows in (("train", 9), ("test", 4)):
        gk.capture(
            store,
            model,
            [(torch.randn(rows, 3), torch.arange(rows) % 3)],
            task=gk.Classification(),
            split=split,
            checkpoints=states,
            progress=False,
        )
    both = gk.attribute(store, method="ekfac").numpy()
    each = [gk.attribute(store, method="ekfac", checkpoints=n).numpy() for n in ("a", "b")]
    assert np.allclose(both, (each[0] + each[1]) / 2, rtol=1e-5)


def test_other_layers_in_the_queries_are_refused(opened):
    store, model, data = opened("mlp")
    batch = (data["test"][0].float(), data["test"][1])
    task = gk.Classification()
    gk.capture(store, model.float(), [batch], task=task, split="part", layers=["0"], progress=False)
    with pytest.raises(QueryError, match="different layers"):
        gk.attribute(store, method="ekfac", queries="part")
