"""Moments of patches, from pixels and from the patches themselves."""

import pytest
import torch

from gradkeep.factors import Convolution
from gradkeep.factors.kronecker._patch_moments import PatchMoments, PixelMoments

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
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_pixels_give_the_moments_of_patches(name, groups, bias):
    conv = form(**GEOMETRIES[name], groups=groups, bias=bias)
    rows = torch.randn(7, 4, *conv.size, dtype=torch.float64)
    by_pixels, by_patches = PixelMoments(conv), PatchMoments(conv)
    for part in rows.split(4):
        by_pixels.add(part)
        by_patches.add(part)
    torch.testing.assert_close(by_pixels.moments(), by_patches.moments())
