"""Moments of a convolution's patches against patches that are laid out one by one."""

import pytest
import torch

from gradkeep.curvature._moments import matrix_moments
from gradkeep.factors._convolution import Convolution, ConvolutionRows

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
@pytest.mark.parametrize("name", list(GEOMETRIES))
def test_moments_are_those_of_patches(name, groups, bias):
    conv = form(**GEOMETRIES[name], groups=groups, bias=bias)
    rows = ConvolutionRows(
        torch.randn(7, 4, *conv.size, dtype=torch.float64),
        torch.randn(7, 2, *conv.out, dtype=torch.float64),
    )
    moments = matrix_moments(conv.weight_blocks()[0], conv)
    for start in (0, 4):
        moments.add(rows.take(start, min(start + 4, 7)), None)
    patches = conv.columns(rows.wide).movedim(0, 1)  # [groups, B, columns, T]
    patches = patches.transpose(2, 3).flatten(1, 2)
    if bias == "narrow":
        patches = torch.cat([patches, torch.ones(*patches.shape[:2], 1)], 2)
    expected = patches.mT @ patches / (7 * conv.positions)
    torch.testing.assert_close(moments.sides()[1], expected)
