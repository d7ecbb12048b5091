"""Every form and every way of computing on it, against autograd and restored gradients in float64."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from raises import raises

from gradkeep import errors
from gradkeep.factors._convolution import Convolution, ConvolutionRows
from gradkeep.factors._dense import Dense, DenseRows
from gradkeep.factors._form import Parameter, dot, dot_directions
from gradkeep.factors._lookup import Lookup, LookupRows
from gradkeep.factors._outer import Outer, OuterRows
from gradkeep.factors._tied import Tied, TiedRows

CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
small = st.integers(1, 4)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@st.composite
def offsets(draw, count):
    if draw(st.booleans()):
        lengths = [draw(st.integers(0, 3))] * count
    else:
        lengths = [draw(st.integers(0, 4)) for _ in range(count)]
    return torch.tensor([0, *lengths]).cumsum(0)


@st.composite
def outer_rows(draw, form, count):
    where = draw(st.none() | offsets(count))
    total = count if where is None else int(where[-1])
    return OuterRows(random(total, form.d_in + form.ones), random(total, form.d_out), where)


@st.composite
def lookup_rows(draw, form, count):
    where = draw(offsets(count))
    total = int(where[-1])
    return LookupRows(torch.randint(form.rows, (total,)), random(total, form.width), where)


@st.composite
def outers(draw):
    d_in, d_out, kind = draw(small), draw(small), draw(st.sampled_from(["none", "bias", "ones"]))
    transposed = draw(st.booleans())
    parameters = [Parameter("w", (d_in, d_out) if transposed else (d_out, d_in))]
    if kind != "none":
        parameters.append(Parameter("b", (d_out,)))
    return Outer(
        tuple(parameters), "x", "g", d_in, d_out, kind != "none", kind == "ones", transposed
    )


@st.composite
def convs(draw):
    axes = range(draw(st.integers(1, 3)))
    groups = draw(st.integers(1, 3))
    inner, outer = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    size = [draw(st.integers(1, 5)) for _ in axes]
    kernel = [draw(st.integers(1, 3)) for _ in axes]
    stride = [draw(st.integers(1, 3)) for _ in axes]
    dilation = [draw(st.integers(1, 2)) for _ in axes]
    padding = [draw(st.integers(0, 2)) for _ in axes]
    behind = [draw(st.integers(0, 2)) for _ in axes]
    room = [size[i] + padding[i] + behind[i] - dilation[i] * (kernel[i] - 1) - 1 for i in axes]
    assume(min(room) >= 0)
    out = [room[i] // stride[i] + 1 for i in axes]
    bias = draw(st.sampled_from(["narrow", "wide", None]))
    parameters = [Parameter("w", (groups * outer, inner, *kernel))]
    if bias:
        parameters.append(Parameter("b", (groups * (outer if bias == "narrow" else inner),)))
    geometry = [tuple(part) for part in (size, out, kernel, stride, padding, dilation)]
    channels, filters = groups * inner, groups * outer
    return Convolution(tuple(parameters), "x", "g", channels, filters, *geometry, groups, bias)


@st.composite
def lookups(draw):
    rows, width = draw(st.integers(1, 6)), draw(small)
    return Lookup((Parameter("w", (rows, width)),), "ids", "g", rows, width)


@st.composite
def tieds(draw):
    lookup, bias = draw(lookups()), draw(st.booleans())
    parameters = lookup.parameters + ((Parameter("b", (lookup.rows,)),) if bias else ())
    outer = Outer(parameters, "x", "h", lookup.width, lookup.rows, bias)
    return Tied(parameters, lookup, outer)


forms = st.one_of(
    outers(), convs(), lookups(), tieds(), st.just(Dense((Parameter("w", (2, 3)),), "d", 6))
)


@st.composite
def rows_of(draw, form):
    """Float64 rows; sizes are drawn, numbers come from a drawn seed."""
    count = draw(st.integers(0, 5))
    torch.manual_seed(draw(st.integers(0, 99)))
    match form:
        case Outer():
            return draw(outer_rows(form, count))
        case Convolution():
            wide = random(count, form.channels, *form.size)
            return ConvolutionRows(wide, random(count, form.filters, *form.out))
        case Lookup():
            return draw(lookup_rows(form, count))
        case Dense():
            return DenseRows(random(count, form.size))
        case Tied():
            lookup = draw(lookup_rows(form.lookup, count))
            return TiedRows(lookup, draw(outer_rows(form.outer, count)))


def single(rows):
    """The same rows in float32."""
    if isinstance(rows, TiedRows):
        return TiedRows(single(rows.lookup), single(rows.outer))
    names = [name for name in rows.__slots__ if getattr(rows, name) is not None]
    return replace(
        rows, **{n: getattr(rows, n).float() for n in names if n not in ("ids", "offsets")}
    )


def autograd(form, rows):
    """Gradients of one row, by running the layer forward and backward."""
    leaves = [
        torch.zeros(p.shape, dtype=torch.float64, requires_grad=True) for p in form.parameters
    ]
    match form:
        case Outer():
            x, share = rows.x[:, : form.d_in], rows.x[:, form.d_in :] if form.ones else 1
            out = x @ (leaves[0] if form.transposed else leaves[0].t())
            loss = (out * rows.g).sum()
            if form.bias:
                loss = loss + (leaves[1] * share * rows.g).sum()
        case Convolution():
            around = [n for p in reversed(form.padding) for n in (p, 9)]
            wide = F.pad(rows.wide, around)
            out = CONVOLVE[len(form.size)](
                wide, leaves[0], stride=form.stride, dilation=form.dilation, groups=form.groups
            )
            for axis, length in enumerate(form.out):
                out = out.narrow(2 + axis, 0, length)
            loss = (out * rows.narrow).sum()
            if form.bias:
                summed = getattr(rows, form.bias).flatten(2).sum((0, 2))
                loss = loss + (leaves[1] * summed).sum()
        case Lookup():
            loss = (F.embedding(rows.ids, leaves[0]) * rows.g).sum()
        case Tied():
            out = F.linear(rows.outer.x, *leaves)
            loss = (F.embedding(rows.lookup.ids, leaves[0]) * rows.lookup.g).sum()
            loss = loss + (out * rows.outer.g).sum()
    grads = torch.autograd.grad(loss, leaves)
    return torch.cat([grad.flatten() for grad in grads])


def close(result, expected, tolerance=1e-12):
    assert result.shape == expected.shape
    scale = expected.abs().max().item() if expected.numel() else 0
    assert (result.double() - expected).abs().le(tolerance * (1 + scale)).all()


@given(st.data(), forms.filter(lambda form: not isinstance(form, Dense)))
def test_restored_gradients_are_those_of_autograd(data, form):
    rows = data.draw(rows_of(form))
    result = form.restore(rows)
    assert result.shape == (len(rows), sum(p.size for p in form.parameters))
    for i in range(len(rows)):
        close(result[i], autograd(form, rows.take(i, i + 1)))


@given(st.data(), forms, st.sampled_from([1, 300, 1 << 20]))
def test_every_way_gives_the_products_of_restored_gradients(data, form, scratch):
    queries, train = data.draw(rows_of(form)), data.draw(rows_of(form))
    remaining, right = form.restore(queries), form.restore(train)
    for compute in form.computes:
        close(dot(form, queries, train, compute=compute, scratch=scratch), remaining @ right.t())
        result = dot(form, single(queries), single(train), compute=compute, scratch=scratch)
        assert result.dtype == torch.float32
        scale = remaining.norm(dim=1)[:, None] * right.norm(dim=1)
        error = (result.double() - remaining @ right.t()).abs()
        # Sums of products may cancel; what rounding can reach is bounded by their absolute sum.
        assert (error <= 1e-5 * scale + 2e-5).all()


@given(st.data(), forms, st.integers(1, 3), st.sampled_from([1, 300, 1 << 20]))
def test_norms_sums_and_directions_agree_with_restored_gradients(data, form, kinds, scratch):
    rows = data.draw(rows_of(form))
    dense = form.restore(rows)
    weights = random(kinds, len(rows)) * (torch.rand(kinds, len(rows)) < 0.7)
    directions = random(kinds, dense.shape[1])
    close(form.squared_norms(rows), (dense * dense).sum(1))
    close(form.weighted_sum(rows, weights), weights @ dense)
    close(form.weighted_squares(rows, weights), weights @ dense.square())
    for compute in (None, "half", "restored"):
        result = dot_directions(form, rows, directions, scratch=scratch, compute=compute)
        close(result, directions @ dense.t())
    assert form.squared_norms(single(rows)).dtype == torch.float32
    assert form.weighted_sum(single(rows), weights.float()).dtype == torch.float32


@given(st.data(), forms, small, small)
def test_coordinates_between_two_sides_are_those_of_restored_gradients(data, form, high, wide):
    rows = data.draw(rows_of(form))
    dense = form.restore(rows)
    for block in form.weight_blocks():
        remaining, right = (
            random(block.groups, block.rows, high),
            random(block.groups, block.cols, wide),
        )
        result = form.between(rows, block, remaining, right)
        close(result, remaining.mT @ block.matrices(dense) @ right)
        alone = form.between(single(rows), block, remaining.float(), right.float())
        assert alone.dtype == torch.float32
        close(alone, result, 1e-4)


@given(st.data(), forms)
def test_slices_are_the_rows(data, form):
    rows = data.draw(rows_of(form))
    cut = data.draw(st.integers(0, len(rows)))
    parts = [rows.take(0, cut), rows.take(cut, len(rows))]
    assert sum(len(part) for part in parts) == len(rows)
    close(torch.cat([form.restore(p) for p in parts]), form.restore(rows))
    assert sum(part.nbytes for part in parts) >= rows.nbytes


def test_a_not_a_number_stays_in_its_row():
    form = Outer((Parameter("w", (3, 2)),), "x", "g", 2, 3)
    where = torch.tensor([0, 2, 2, 5])
    rows = OuterRows(random(5, 2), random(5, 3), where)
    rows.g[0, 0] = torch.nan
    result = dot(form, rows, rows, compute="factored", scratch=1 << 20)
    assert result.isnan().tolist() == [[True, False, True], [False] * 3, [True, False, False]]


def test_frequent_and_rare_ids_meet():
    torch.manual_seed(0)
    form = Lookup((Parameter("w", (50, 64)),), "ids", "g", 50, 64)
    ids = [torch.where(torch.rand(600) < 0.5, 3, torch.randint(50, (600,))) for _ in range(2)]
    remaining, right = (LookupRows(i, random(600, 64), torch.arange(0, 601, 10)) for i in ids)
    result = dot(form, remaining, right, compute="factored", scratch=1 << 16)
    close(result, form.restore(remaining) @ form.restore(right).t())


def test_an_unknown_way_and_rows_of_another_form_are_refused():
    form = Dense((Parameter("w", (2, 3)),), "d", 6)
    rows = DenseRows(random(1, 6))
    with raises(errors.QueryError, "query.compute", mentions="dense"):
        dot(form, rows, rows, compute="gram", scratch=1)
    with raises(errors.QueryError, "query.rows_type", mentions="DenseRows"):
        form.restore(ConvolutionRows(random(1, 1, 1), random(1, 1, 1)))


def test_products_of_long_rows_keep_the_digits_of_float32():
    torch.manual_seed(0)
    size = 1 << 21
    form = Dense((Parameter("w", (size,)),), "d", size)
    rows = DenseRows(random(3, size))
    result = dot(form, single(rows), single(rows), compute="dense", scratch=1 << 20)
    expected = rows.values @ rows.values.t()
    off = ~torch.eye(3, dtype=torch.bool)  # nearly orthogonal: all digits are rounding's to lose
    assert (result.double() - expected)[off].abs().max() < 2e-9 * expected.max()
