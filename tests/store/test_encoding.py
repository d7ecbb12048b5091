"""Encodings against slow, obvious oracles."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import gradkeep as gk
from gradkeep.store.blocks._columns import Column, decode, encode, from_bfloat16, to_bfloat16

floats = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=1, max_dims=3, max_side=7),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


@given(hnp.arrays(np.uint32, st.integers(0, 200)))
def test_bfloat16_is_torch_bfloat16_for_every_bit_pattern(bits):
    values = bits.view(np.float32)
    ours = from_bfloat16(to_bfloat16(values))
    theirs = torch.from_numpy(values.copy()).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(ours, theirs)


@given(floats)
def test_float16_scaled_keeps_eleven_bits_of_each_row(values):
    array = gk.store.Array("x", shape=values.shape[1:], kind="suffix", encoding="float16-scaled")
    stored = encode(array, values)
    back = decode(array, stored.values, stored.scale)
    largest = np.abs(values.reshape(len(values), -1)).max(axis=1, initial=0)
    # Half a unit of float16 relative to the value, or of the smallest float16 after scaling.
    room = np.abs(values) * 2.0**-11 + (largest * 2.0**-38).reshape(-1, *(1,) * (values.ndim - 1))
    tiny = 2.0**-149 * 2**15
    assert (np.abs(back.astype(np.float64) - values) <= room + tiny).all()


@given(floats)
def test_int8_scaled_is_within_half_a_step_of_its_row(values):
    array = gk.store.Array("x", shape=values.shape[1:], kind="suffix", encoding="int8-scaled")
    stored = encode(array, values)
    back = decode(array, stored.values, stored.scale)
    largest = np.abs(values.reshape(len(values), -1)).max(axis=1, initial=0)
    step = np.maximum(largest.astype(np.float64) / 127, np.finfo(np.float32).tiny)
    room = 0.5001 * step.reshape(-1, *(1,) * (values.ndim - 1))
    assert (np.abs(back.astype(np.float64) - values) <= room).all()


@given(hnp.arrays(np.bool_, hnp.array_shapes(min_dims=2, max_dims=3, max_side=20)))
def test_bits_are_exact_and_an_eighth(values):
    array = gk.store.Array("mask", "bool", values.shape[1:], "mask", "bits")
    stored = encode(array, values)
    np.testing.assert_array_equal(decode(array, stored.values, None), values)
    assert stored.values.nbytes == len(values) * -(-values[0].size // 8)


def test_a_zero_row_stays_zero_and_scales_stay_finite():
    rows = np.array([[0, 0], [1e-45, 0], [3e38, -3e38]], np.float32)
    for encoding in ("float16-scaled", "int8-scaled"):
        array = gk.store.Array("x", shape=(2,), kind="suffix", encoding=encoding)
        stored = encode(array, rows)
        assert np.isfinite(stored.scale).all()
        assert (stored.scale > 0).all()
        back = decode(array, stored.values, stored.scale)
        np.testing.assert_array_equal(back[0], 0)
        np.testing.assert_allclose(back[2], rows[2], rtol=1e-2)


@pytest.mark.parametrize("encoding", ["float16-scaled", "int8-scaled"])
def test_the_largest_floats_stay_finite(encoding):
    """Rounding up beyond the largest float32 would make infinities of finite values."""
    rows = np.array([[3.4028235e38, -3.4028235e38], [3.401993e38, 1.0]], np.float32)
    array = gk.store.Array("x", shape=(2,), kind="suffix", encoding=encoding)
    stored = encode(array, rows)
    for back in (
        decode(array, stored.values, stored.scale),
        Column(array, stored.values, stored.scale).tensor().numpy(),
    ):
        assert np.isfinite(back).all()
        np.testing.assert_allclose(back[:, 0], rows[:, 0], rtol=4e-3)


def test_flushed_values_are_counted():
    array = gk.store.Array("x", shape=(3,), encoding="float16", kind="data")
    stored = encode(array, np.array([[1.0, 1e-9, 0.0]], np.float32))
    assert (stored.nonzero, stored.flushed) == (2, 1)


@pytest.mark.parametrize(
    ("changes", "code", "match"),
    [
        ({"name": ""}, "store.array_name", None),
        ({"name": "ids"}, "store.array_name", None),
        ({"name": "a#b"}, "store.array_name", None),
        ({"dtype": "complex64"}, "store.array_dtype", None),
        ({"shape": (-1,)}, "store.array_shape", "negative"),
        ({"kind": "prefixes"}, "argument.invalid", "^kind must be"),
        ({"encoding": "int4"}, "argument.invalid", "^encoding must be"),
        ({"compression": "gzip"}, "argument.invalid", "zstd"),
        ({"encoding": "bits"}, "store.array_bits", None),
        ({"dtype": "int64", "encoding": "bfloat16"}, "store.array_encoding", None),
        ({"encoding": "int8-scaled", "nan": "keep"}, "store.array_nan", None),
    ],
)
def test_arrays_that_make_no_sense_are_refused(changes, code, match):
    with pytest.raises(gk.GradkeepError, match=match) as caught:
        gk.store.Array(**{"name": "x", **changes})
    assert caught.value.code == code
