"""Long sides of few positions: decomposed by the positions, against the whole decomposition."""

import tempfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gradkeep as gk
from gradkeep.attribution.scorers import _kfac
from gradkeep.curvature import _moments
from gradkeep.curvature._basis import RowSpace
from gradkeep.curvature._fisher import Damping, FisherFit, fisher


class Tokens(nn.Module):
    """Vectors [B, T, d] -> logits, by a layer that sees T positions or one."""

    def __init__(self, wide, out, *, bias):
        super().__init__()
        self.each, self.head = nn.Linear(wide, out, bias=bias), nn.Linear(out, 3)

    def forward(self, x):
        return self.head(self.each(x).tanh().sum(1) if x.dim() == 3 else self.each(x).tanh())


def captured(wide, out, *, rows=5, tokens=None, bias=True, seed=0):
    torch.manual_seed(seed)
    store, model = gk.open(tempfile.mkdtemp()), Tokens(wide, out, bias=bias)
    for split, count in (("train", rows), ("test", 3)):
        x = torch.randn(count, *(() if tokens is None else (tokens,)), wide)
        batch = [(x, torch.arange(count) % 3)]
        task = gk.Classification()
        gk.capture(store, model, batch, task=task, split=split, keep="factors", progress=False)
    return store


def without_row_space(monkeypatch):
    class Whole(FisherFit):
        def __init__(self, *values, row_space=False, **options):
            super().__init__(*values, **options)

    monkeypatch.setattr(_kfac, "FisherFit", Whole)


def close(actual, expected, tolerance=5e-4):
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


def in_double(store, method, damping):
    """Scores [Q, N] of the first layer by whole decompositions in float64."""

    def matrices(split):
        gradients = gk.gradients(store, split=split)
        rows, slopes = gradients.rows(range(len(gradients))).factors["each"], gradients.slopes()
        bounds = torch.arange(len(rows) + 1) if rows.offsets is None else rows.offsets
        x, g = gradients.forms["each"].with_ones(rows.x).double(), rows.g.double()
        if slopes is not None:
            g = g * torch.repeat_interleave(slopes, bounds.diff())[:, None]
        places = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        return x, g, torch.stack([g[low:high].t() @ x[low:high] for low, high in places])

    (x, g, train), (_, _, queries) = matrices("train"), matrices("test")
    output_basis, input_basis = (
        torch.linalg.eigh(g.t() @ g / len(train)),
        torch.linalg.eigh(x.t() @ x / len(x)),
    )
    n, q = (output_basis[1].t() @ one @ input_basis[1] for one in (train, queries))
    values = torch.outer(output_basis[0], input_basis[0]).clamp(min=0)
    values = n.square().mean(0) if method == "ekfac" else values
    return torch.einsum("qrc,nrc,rc->qn", q, n, 1 / (values + damping * values.mean())).numpy()


@settings(max_examples=20, deadline=None)
@given(
    wide=st.integers(1, 40),
    out=st.integers(1, 40),
    rows=st.integers(2, 9),
    tokens=st.sampled_from([None, 1, 3]),
    bias=st.booleans(),
    method=st.sampled_from(["kfac", "ekfac"]),
    damping=st.sampled_from([0.03, 0.3, 10.0]),
    seed=st.integers(0, 1000),
)
def test_scores_are_those_of_the_whole_decomposition(
    wide, out, rows, tokens, bias, method, damping, seed
):
    store = captured(wide, out, rows=rows, tokens=tokens, bias=bias, seed=seed)
    scores = gk.attribute(store, method=method, damping=damping, layers="each")
    close(scores.numpy(), in_double(store, method, damping))


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("tokens", [None, 2])
def test_other_gradients_are_damped_where_no_row_was(tokens, corrected):
    store = captured(30, 20, rows=4, tokens=tokens)
    train = gk.gradients(store, split="train")
    layer = fisher(train, corrected=corrected)["each"]
    (basis,) = layer.bases
    assert not basis.whole
    assert basis.values.shape[1] <= 4 * (tokens or 1)
    whole = FisherFit(train, corrected=corrected).layer("each")
    assert whole.bases[0].whole
    assert layer.mean == pytest.approx(whole.mean, rel=1e-5)
    dense = torch.randn(6, layer.size, generator=torch.Generator().manual_seed(1))
    damping = Damping(0.1)
    actual, expected = (one.solved(dense, damping).numpy() for one in (layer, whole))
    close(actual, expected)


def test_a_side_too_long_for_moments_has_eigenvectors_nevertheless(monkeypatch):
    store = captured(30, 5, rows=6)
    ask = {"method": "ekfac", "per_layer": True}
    exact = gk.attribute(store, **ask)
    monkeypatch.setattr("gradkeep.curvature._moments.WIDE", 16)
    for one, other in zip(gk.attribute(store, **ask).per_layer, exact.per_layer, strict=True):
        close(one, other)
    without_row_space(monkeypatch)
    own = gk.attribute(store, **ask)
    assert (
        np.abs(own.per_layer[0] - exact.per_layer[0]).max() > 0.01 * np.abs(own.per_layer[0]).max()
    )


def test_drawn_labels_take_the_whole_space(monkeypatch):
    store = captured(30, 20, rows=4, tokens=2)
    computed = []
    original = _kfac.FisherFit

    def noted(*values, **options):
        computed.append(options["row_space"])
        return original(*values, **options)

    monkeypatch.setattr(_kfac, "FisherFit", noted)
    gk.attribute(store, method="ekfac")
    torch.manual_seed(0)
    model = Tokens(30, 20, bias=True)
    batch = [(torch.randn(4, 2, 30), torch.arange(4) % 3)]
    task = gk.Classification(labels="sampled")
    gk.capture(
        *(store, model, batch),
        task=task,
        split="train",
        name="sampled",
        keep="factors",
        progress=False,
    )
    gk.attribute(store, method="ekfac", fisher="sampled")
    assert computed == [True, False]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.lists(st.integers(0, 5), max_size=6), st.integers(0, 12))
def test_rows_are_held_or_handed_back_but_never_lost(width, parts, most):
    space, draws = RowSpace(width, most), torch.Generator().manual_seed(0)
    given_, back = [], []
    for count in parts:
        given_.append(torch.randn(count, width, generator=draws))
        back += space.add(given_[-1])
    rows = torch.cat([torch.zeros(0, width), *given_])
    assert space.open == (len(rows) <= min(width - 1, most) and min(width - 1, most) > 0)
    stored = space.rows() if space.open else torch.cat([torch.zeros(0, width), *back])
    assert torch.equal(stored.float(), rows)
    if space.open:
        values, vectors = space.eigen(7)
        moment = (vectors[0].double() * values[0]) @ vectors[0].double().t()
        torch.testing.assert_close(
            moment, rows.double().t() @ rows.double() / 7, atol=1e-5, rtol=1e-5
        )


def test_moments_of_held_rows_are_those_of_all():
    store = captured(30, 20, rows=4, tokens=2)
    train = gk.gradients(store, split="train")
    form, rows = train.forms["each"], train.rows(range(4)).factors["each"]
    (piece,) = form.weight_blocks()
    held, plain = (
        _moments.matrix_moments(piece, form, row_space=row_space) for row_space in (1 << 20, 0)
    )
    for one in (held, plain):
        one.add(rows.take(0, 2), None)
        one.add(rows.take(2, 4), None)
    for one, other in zip(held.sides(), plain.sides(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
