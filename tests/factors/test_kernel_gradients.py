"""Kernels' gradients of all rows in one call are those that autograd finds row by row."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradkeep.factors._convolution import Convolution, ConvolutionRows, rows_can_be_groups
from gradkeep.factors._form import Parameter

few = st.integers(1, 2)


def case(channels, filters, kernel, stride, padding, dilation, size, rows, bias):
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, filters, kernel, stride, padding, dilation, bias=bias)
    x = torch.randn(rows, channels, *size)
    g = torch.randn_like(conv(x))
    named = tuple(Parameter(name, tuple(p.shape)) for name, p in conv.named_parameters())
    form = Convolution(
        named,
        *("x", "g", channels, filters, size, tuple(g.shape[2:])),
        *(conv.kernel_size, conv.stride, conv.padding, conv.dilation),
        bias="narrow" if bias else None,
    )
    return conv, form, ConvolutionRows(x, g)


def one_by_one(conv, rows):
    result = []
    for x, g in zip(rows.wide, rows.narrow, strict=True):
        gradients = torch.autograd.grad((conv(x[None]) * g).sum(), list(conv.parameters()))
        result.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(result)


@given(
    channels=st.sampled_from([8, 16, 24]),
    filters=st.sampled_from([8, 16]),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(few, few),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(few, few),
    size=st.tuples(st.integers(6, 13), st.integers(6, 13)),
    rows=st.integers(1, 5),
    bias=st.booleans(),
)
def test_rows_as_groups_give_what_autograd_gives_row_by_row(**drawn):
    conv, form, rows = case(**drawn)
    grouped = rows_can_be_groups(form, rows)
    assert grouped == (form.positions >= 2 * math.prod(form.kernel))
    truth = one_by_one(conv, rows)
    result = form.restore(rows)
    assert (result - truth).norm() <= 1e-5 * truth.norm()


@pytest.mark.parametrize("kernel", [(5, 3), (1, 1)])
def test_many_rows_are_written_some_at_a_time(kernel):
    conv, form, rows = case(16, 32, kernel, 1, 1, 1, (9, 8), 200, True)
    assert rows_can_be_groups(form, rows)
    truth = one_by_one(conv, rows)
    assert (form.restore(rows) - truth).norm() <= 1e-5 * truth.norm()


def test_what_has_few_channels_or_a_large_kernel_or_64_bits_is_made_of_patches():
    for channels, filters in ((3, 16), (16, 12), (128, 128)):
        _, form, rows = case(channels, filters, 3, 1, 1, 1, (8, 8), 2, False)
        assert not rows_can_be_groups(form, rows)
    _, form, rows = case(16, 16, 3, 1, 1, 1, (8, 8), 2, False)
    assert rows_can_be_groups(form, rows)
    wide = ConvolutionRows(rows.wide.double(), rows.narrow.double())
    assert not rows_can_be_groups(form, wide)
