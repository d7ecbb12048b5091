"""What single positions add to a product, and the transposed map of a projection, by brute force."""

import pytest
import torch

from gradkeep.factors._dense import Dense, DenseRows
from gradkeep.factors._form import FactoredForm, Parameter, dot_directions
from gradkeep.factors._lookup import Lookup, LookupRows
from gradkeep.factors._outer import Outer, OuterRows
from gradkeep.factors._tied import Tied, TiedRows
from gradkeep.factors._weights import BlockProjection, LayerProjection

LENGTHS = (3, 0, 5, 1)
OFFSETS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)])
TOTAL = sum(LENGTHS)


def outer(*, transposed=False, bias=True, width=4, high=5):
    shape = (width, high) if transposed else (high, width)
    parameters = (Parameter("w", shape), *((Parameter("b", (high,)),) if bias else ()))
    form = Outer(parameters, "x", "g", d_in=width, d_out=high, bias=bias, transposed=transposed)
    x, g = torch.randn(TOTAL, width), torch.randn(TOTAL, high)
    return form, OuterRows(x.double(), g.double(), OFFSETS)


def lookup(width=4, high=5):
    form = Lookup((Parameter("w", (high, width)),), "ids", "g", rows=high, width=width)
    g = torch.randn(TOTAL, width).double()
    return form, LookupRows(torch.randint(high, (TOTAL,)), g, OFFSETS)


def tied():
    high, uses = outer()
    low, tokens = lookup()
    return Tied(high.parameters, low, high), TiedRows(tokens, uses)


def make(kind):
    torch.manual_seed(0)
    makers = {
        "linear": outer,
        "turned": lambda: outer(transposed=True),
        "no bias": lambda: outer(bias=False),
        "lookup": lookup,
        "tied": tied,
    }
    return makers[kind]()


def alone(form, rows, at):
    """The gradient of one position of every use, by restoring it as a row of its own."""
    if isinstance(rows, TiedRows):
        return [alone(form.outer, rows.outer, at), alone(form.lookup, rows.lookup, at)]
    ends = torch.tensor([0, 1])
    if isinstance(rows, LookupRows):
        one = LookupRows(rows.ids[at : at + 1], rows.g[at : at + 1], ends)
    else:
        one = OuterRows(rows.x[at : at + 1], rows.g[at : at + 1], ends)
    return [form.restore(one)[0]]


@pytest.mark.parametrize("kind", ["linear", "turned", "no bias", "lookup", "tied"])
def test_a_position_adds_the_product_of_its_own_gradient(kind):
    form, rows = make(kind)
    directions = torch.randn(3, form.gradient_size).double()
    parts = form.along_positions(rows, directions)
    for at in range(TOTAL):
        own = alone(form, rows, at)
        own = [one if isinstance(one, torch.Tensor) else one[0] for one in own]
        for part, gradient in zip(parts, own, strict=True):
            expected = directions[:, : len(gradient)] @ gradient
            torch.testing.assert_close(part.values[:, at], expected)
    whole = dot_directions(form, rows, directions, scratch=1 << 20)
    for row in range(len(LENGTHS)):
        summed = sum(p.values[:, OFFSETS[row] : OFFSETS[row + 1]].sum(1) for p in parts)
        torch.testing.assert_close(summed, whole[:, row])


def test_what_has_no_positions_says_so():
    dense = Dense((Parameter("w", (3,)),), "w", 3)
    assert not isinstance(dense, FactoredForm)
    cut = Outer((Parameter("w", (2, 3)),), "x", "g", d_in=3, d_out=2, error=0.1)
    rows = OuterRows(torch.ones(2, 3), torch.ones(2, 2))
    assert cut.along_positions(rows, torch.ones(1, 6)) is None


@pytest.mark.parametrize("folds", [1, 3])
@pytest.mark.parametrize("chosen", [True, False])
def test_pulled_back_directions_have_the_products_of_coordinates(folds, chosen):
    torch.manual_seed(1)
    form, rows = make("linear")
    remaining, right = torch.randn(1, 5, 3).double(), torch.randn(1, 5, 2).double()
    size = 4 if chosen else 6 // folds
    places = torch.randint(6, (folds, size)) if chosen else None
    block = BlockProjection(remaining, right, torch.randn(folds, size).double(), places)
    own = LayerProjection((block,))
    queries = torch.randn(2, size).double()
    expected = queries @ own.applied(form, rows).t()
    result = own.pulled_back(form, queries) @ form.restore(rows).t()
    torch.testing.assert_close(result, expected)


def test_vectors_are_pulled_back_too():
    form = Dense((Parameter("w", (6,)),), "w", 6)
    rows = DenseRows(torch.randn(3, 6).double())
    block = BlockProjection(
        torch.randn(1, 6, 2).double(), torch.ones(1, 1, 1).double(), torch.randn(1, 2).double()
    )
    own = LayerProjection((block,))
    queries = torch.randn(2, 2).double()
    result = own.pulled_back(form, queries) @ rows.values.t()
    torch.testing.assert_close(result, queries @ own.applied(form, rows).t())
