"""Products of rows in many small segments against products of the gradients themselves."""

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given

import gradkeep as gk
import gradkeep.store as gs
from gradkeep.factors._arithmetic import pairwise_joined
from gradkeep.factors._dense import Dense
from gradkeep.factors._form import Parameter, form_to_fields
from gradkeep.factors._outer import Outer

D_IN, D_OUT = 5, 4
WEIGHT = Parameter("w", (D_OUT, D_IN))
LAYERS = {
    "dense": Dense((WEIGHT,), "dense.gradient", D_OUT * D_IN),
    "outer": Outer((WEIGHT,), "outer.prefix", "outer.suffix", d_in=D_IN, d_out=D_OUT),
}


def write_rows(store, split, lengths, rows_per_segment, rng):
    """Write rows with this many positions; return their gradients `[N, P]` in float64."""
    gradients = rng.standard_normal((len(lengths), D_OUT * D_IN)).astype(np.float32)
    prefixes = [rng.standard_normal((t, D_IN)).astype(np.float32) for t in lengths]
    suffixes = [rng.standard_normal((t, D_OUT)).astype(np.float32) for t in lengths]
    schema = gs.Schema(
        (
            gs.Array("dense.gradient", shape=(D_OUT * D_IN,), layer="dense"),
            gs.Array("outer.prefix", shape=(D_IN,), ragged=True, layer="outer"),
            gs.Array("outer.suffix", shape=(D_OUT,), ragged=True, layer="outer"),
        ),
        num_rows=len(lengths),
        rows_per_segment=rows_per_segment,
        layers=tuple(
            gs.Layer(name, "Linear", D_OUT * D_IN, form_to_fields(form))
            for name, form in LAYERS.items()
        ),
        fingerprints={"weights": "w", "task": "t", "of": "loss"},
    )
    with store.write(gs.CaptureKey("final", split), schema) as writer:
        values = {
            "dense.gradient": gradients,
            "outer.prefix": prefixes,
            "outer.suffix": suffixes,
        }
        writer.append(np.arange(len(lengths)), values)
    outer = [g.astype(float).T @ x for g, x in zip(suffixes, prefixes, strict=True)]
    return np.hstack([gradients.astype(float), np.stack(outer).reshape(len(lengths), -1)])


counts = st.integers(1, 3)


@given(
    st.lists(counts, min_size=1, max_size=20),
    st.lists(counts, min_size=1, max_size=12),
    st.integers(1, 7),
    st.sampled_from([None, "restored", "half", "factored"]),
    st.integers(0, 99),
)
def test_products_do_not_depend_on_segments(train, queries, rows_per_segment, compute, seed):
    rng = np.random.default_rng(seed)
    store = gk.open(gs.Memory())
    theirs = write_rows(store, "train", train, rows_per_segment, rng)
    ours = write_rows(store, "test", queries, rows_per_segment, rng)
    sides = (gk.gradients(store, split=split) for split in ("test", "train"))
    query_gradients, train_gradients = sides
    spec = None if compute is None else {"outer": compute}
    products = gk.query.dot(query_gradients, train_gradients, compute=spec, per_layer=True)
    expected = ours @ theirs.T
    np.testing.assert_allclose(products.values, expected, rtol=1e-4, atol=1e-4)
    assert products.per_layer is not None
    dense = ours[:, : D_OUT * D_IN] @ theirs[:, : D_OUT * D_IN].T
    np.testing.assert_allclose(products.per_layer[0], dense, rtol=1e-4, atol=1e-4)
    top = gk.query.top(query_gradients, train_gradients, 1, compute=spec)
    assert (expected.argmax(1) == top.ids[:, 0].numpy()).mean() > 0.99


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 3000))
def test_joined_rows_give_one_product(lengths, width):
    generator = torch.Generator().manual_seed(width)
    one = torch.randn(9, width, generator=generator)
    others = [torch.randn(length, width, generator=generator) for length in lengths]
    expected = one.double() @ torch.cat(others).double().t()
    torch.testing.assert_close(pairwise_joined(one, others), expected.float(), rtol=1e-4, atol=1e-3)
