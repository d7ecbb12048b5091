"""Layers of every form with random rows, small enough for a matrix of the whole projection."""

import torch
from hypothesis import assume
from hypothesis import strategies as st

from gradkeep.factors._convolution import Convolution, ConvolutionRows
from gradkeep.factors._dense import Dense, DenseRows
from gradkeep.factors._form import Parameter
from gradkeep.factors._lookup import Lookup, LookupRows
from gradkeep.factors._outer import Outer, OuterRows
from gradkeep.factors._tied import Tied, TiedRows

small = st.integers(1, 5)


def values(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@st.composite
def offsets(draw, count):
    same = draw(st.booleans())
    lengths = [draw(st.integers(0, 4))] * count if same else draw(_lengths(count))
    return torch.tensor([0, *lengths]).cumsum(0)


def _lengths(count):
    return st.lists(st.integers(0, 4), min_size=count, max_size=count)


@st.composite
def outer(draw, count, rows=None, width=None):
    d_out, d_in = rows or draw(small), width or draw(small)
    kind = draw(st.sampled_from(["none", "bias", "ones"]))
    transposed = rows is None and draw(st.booleans())
    parameters = [Parameter("w", (d_in, d_out) if transposed else (d_out, d_in))]
    if kind != "none":
        parameters.append(Parameter("b", (d_out,)))
    form = Outer(
        tuple(parameters), "x", "g", d_in, d_out, kind != "none", kind == "ones", transposed
    )
    where = draw(st.none() | offsets(count))
    total = count if where is None else int(where[-1])
    return form, OuterRows(values(total, d_in + form.ones), values(total, d_out), where)


@st.composite
def conv(draw, count):
    axes = range(draw(st.integers(1, 2)))
    groups, inner, outer = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    size, kernel = [draw(small) for _ in axes], [draw(st.integers(1, 3)) for _ in axes]
    stride, padding = (
        [draw(st.integers(1, 2)) for _ in axes],
        [draw(st.integers(0, 1)) for _ in axes],
    )
    room = [size[i] + 2 * padding[i] - kernel[i] for i in axes]
    assume(min(room) >= 0)
    out = [room[i] // stride[i] + 1 for i in axes]
    bias = draw(st.sampled_from(["narrow", "wide", None]))
    parameters = [Parameter("w", (groups * outer, inner, *kernel))]
    if bias:
        parameters.append(Parameter("b", (groups * (outer if bias == "narrow" else inner),)))
    geometry = [tuple(part) for part in (size, out, kernel, stride, padding, [1 for _ in axes])]
    form = Convolution(
        tuple(parameters), "x", "g", groups * inner, groups * outer, *geometry, groups, bias
    )
    wide = values(count, groups * inner, *size)
    return form, ConvolutionRows(wide, values(count, groups * outer, *out))


@st.composite
def lookup(draw, count, rows=None, width=None):
    rows, width = rows or draw(small), width or draw(small)
    form = Lookup((Parameter("w", (rows, width)),), "i", "g", rows, width)
    where = draw(offsets(count))
    total = int(where[-1])
    return form, LookupRows(torch.randint(rows, (total,)), values(total, width), where)


@st.composite
def tied(draw, count):
    rows, width = draw(small), draw(small)
    low, tokens = draw(lookup(count, rows, width))
    high, uses = draw(outer(count, rows, width))
    return Tied(high.parameters, low, high), TiedRows(tokens, uses)


@st.composite
def dense(draw, count):
    shape = tuple(draw(st.lists(small, min_size=1, max_size=3)))
    parameters = (Parameter("w", shape), Parameter("b", (draw(small),)))
    size = sum(parameter.size for parameter in parameters)
    return Dense(parameters, "w.gradient", size), DenseRows(values(count, size))


@st.composite
def layers(draw):
    """A form and some rows of it."""
    torch.manual_seed(draw(st.integers(0, 1 << 16)))
    count = draw(st.integers(0, 4))
    return draw(st.one_of(part(count) for part in (outer, conv, lookup, tied, dense)))
