"""Moments of patches, from pixels and from the patches themselves."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradkeep.curvature._moments import matrix_moments
from gradkeep.curvature._patch_moments import PatchMoments, ShiftMoments
from gradkeep.factors._convolution import Convolution

GEOMETRIES = {
    "line": {"size": (9,), "out": (9,), "kernel": (3,), "padding": (1,)},
    "same": {"size": (5, 6), "out": (5, 6), "kernel": (3, 3), "padding": (1, 1)},
    "strided": {"size": (7, 6), "out": (3, 3), "kernel": (3, 2), "stride": (2, 2)},
    "spread": {"size": (7, 7), "out": (5, 7), "kernel": (3, 3), "padding": (1, 2), "dilation": 2},
    "far": {"size": (2, 3), "out": (2, 3), "kernel": (5, 3), "padding": (2, 1)},
    "volume": {"size": (3, 4, 3), "out": (3, 4, 2), "kernel": (3, 3, 2), "padding": (1, 1, 0)},
}


def form(*, size, out, kernel, padding=None, stride=None, dilation=1, groups=1, bias=None):
    axes = len(size)
    return Convolution(
        (),
        "",
        "",
        4,
        2,
        size,
        out,
        kernel,
        stride or (1,) * axes,
        padding or (0,) * axes,
        (dilation,) * axes,
        groups,
        bias,
    )


@pytest.mark.parametrize("bias", ["narrow", None])
@pytest.mark.parametrize("name", [name for name in GEOMETRIES if name != "strided"])
def test_shifts_give_the_moments_of_patches(name, bias):
    agree(form(**GEOMETRIES[name], bias=bias))


@given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    dilation=st.integers(1, 2),
    bias=st.sampled_from(["narrow", "wide", None]),
)
def test_shifts_give_them_whatever_lies_outside(size, kernel, padding, dilation, bias):
    out = tuple(
        length + 2 * zeros - dilation * (taps - 1)
        for length, zeros, taps in zip(size, padding, kernel, strict=True)
    )
    if min(out) > 0:
        geometry = {"size": size, "out": out, "kernel": kernel, "padding": padding}
        agree(form(**geometry, dilation=dilation, bias=bias))


def agree(conv):
    rows = torch.randn(7, 4, *conv.size, dtype=torch.float64)
    by_shifts, by_patches = ShiftMoments(conv), PatchMoments(conv)
    for part in rows.split(4):
        by_shifts.add(part)
        by_patches.add(part)
    torch.testing.assert_close(by_shifts.moments(), by_patches.moments())


def test_shifts_are_taken_where_they_are_less_work():
    large = {"size": (32, 32), "out": (32, 32), "kernel": (3, 3), "padding": (1, 1)}
    wide = form(**large)
    assert isinstance(matrix_moments(wide.weight_blocks()[0], wide).patches, ShiftMoments)
    for other in (form(**GEOMETRIES["strided"]), form(**large, groups=2)):
        assert not ShiftMoments.possible(other)
        found = matrix_moments(other.weight_blocks()[0], other).patches
        assert isinstance(found, PatchMoments)


def test_float32_is_enough_for_shifts():
    conv = form(size=(32, 32), out=(32, 32), kernel=(3, 3), padding=(1, 1))
    rows = torch.randn(64, 4, 32, 32).relu() + 1
    by_shifts, truth = ShiftMoments(conv), PatchMoments(conv)
    by_shifts.add(rows)
    truth.add(rows.double())
    error = (by_shifts.moments() - truth.moments()).abs().max()
    assert error <= 5e-6 * truth.moments().max()
