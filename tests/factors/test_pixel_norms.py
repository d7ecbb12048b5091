"""Lengths of a convolution's gradients from products of its pixels, against restored gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradkeep.factors._convolution import Convolution, ConvolutionRows
from gradkeep.factors._pixel_gram import pixel_norms

few = st.integers(1, 3)


def geometry(channels, filters, size, kernel, stride, padding, dilation, groups=1, bias=None):
    out = tuple(
        (length + 2 * zeros - spread * (taps - 1) - 1) // step + 1
        for length, zeros, spread, taps, step in zip(
            size, padding, dilation, kernel, stride, strict=True
        )
    )
    return Convolution(
        (),
        *("x", "g", channels, filters, tuple(size), out, tuple(kernel)),
        *(tuple(stride), tuple(padding), tuple(dilation), groups, bias),
    )


def rows_of(form, count, dtype=torch.float64):
    torch.manual_seed(0)
    wide = torch.randn(count, form.channels, *form.size, dtype=dtype)
    return ConvolutionRows(wide, torch.randn(count, form.filters, *form.out, dtype=dtype))


@given(
    axes=st.integers(1, 3),
    groups=st.sampled_from([1, 2]),
    bias=st.sampled_from([None, "narrow"]),
    count=st.integers(1, 4),
    data=st.data(),
)
def test_pixels_give_the_lengths_of_restored_gradients(axes, groups, bias, count, data):
    drawn = [[data.draw(few) for _ in range(axes)] for _ in range(3)]
    kernel, stride, dilation = drawn
    padding = [data.draw(st.integers(0, 2)) for _ in range(axes)]
    size = [
        data.draw(st.integers((k - 1) * d + 1, 8)) for k, d in zip(kernel, dilation, strict=True)
    ]
    form = geometry(2 * groups, 4, size, kernel, stride, padding, dilation, groups, bias)
    rows = rows_of(form, count)
    result, certain = pixel_norms(form, rows)
    truth = form.restore(rows).square().sum(1)
    torch.testing.assert_close(result[certain], truth[certain], rtol=1e-9, atol=0)
    torch.testing.assert_close(form.squared_norms(rows), truth, rtol=1e-9, atol=1e-12)


SHAPES = {
    "pixels": (16, 32, (4, 4), (3, 3), (1, 1), (1, 1), (1, 1)),
    "few positions": (3, 64, (32, 32), (16, 16), (16, 16), (0, 0), (1, 1)),
    "gradients": (4, 8, (12, 12), (3, 3), (1, 1), (1, 1), (1, 1)),
}


@pytest.mark.parametrize("way", SHAPES)
@pytest.mark.parametrize("bias", [None, "narrow", "wide"])
def test_every_way_gives_the_same_lengths(way, bias):
    form = geometry(*SHAPES[way], bias=bias)
    rows = rows_of(form, 5, torch.float32)
    truth = form.restore(rows.widened()).double().square().sum(1)
    torch.testing.assert_close(form.squared_norms(rows).double(), truth, rtol=2e-6, atol=0)


def test_rows_whose_products_cancel_are_restored():
    """The same pixel everywhere, and suffixes that add up to nearly nothing."""
    form = geometry(16, 32, (4, 4), (1, 1), (1, 1), (0, 0), (1, 1))
    rows = rows_of(form, 6, torch.float32)
    rows.wide[::2] = 100 + 1e-3 * rows.wide[::2]
    rows.narrow[::2] -= rows.narrow[::2].mean((2, 3), keepdim=True)
    rows.wide[5] = 0
    truth = form.restore(ConvolutionRows(rows.wide.double(), rows.narrow.double()))
    truth = truth.square().sum(1)
    result, certain = pixel_norms(form, rows)
    assert certain.tolist() == [False, True, False, True, False, False]
    assert (result - truth)[::2].abs().max() > 0.01 * truth[::2].max()  # which is why
    restored = form.restore(rows).square().sum(1)
    torch.testing.assert_close(form.squared_norms(rows)[::2], restored[::2])
    torch.testing.assert_close(
        form.squared_norms(rows)[1::2].double(), truth[1::2], rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(bad):
    form = geometry(*SHAPES["pixels"])
    rows = rows_of(form, 3, torch.float32)
    rows.narrow[1, 0, 0, 0] = bad
    assert form.squared_norms(rows).isfinite().tolist() == [True, False, True]
