"""A form of one's own: what the protocol asks of it, and all that then works with it."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from raises import raises

from gradkeep import factors
from gradkeep.curvature._basis import VectorBasis, coordinate_squares, coordinates
from gradkeep.curvature._moments import matrix_moments
from gradkeep.curvature._project import (
    SideMaps,
    TwoSided,
    project_layers,
    project_parameters,
    two_sided_layer,
)
from gradkeep.curvature._sketches import Projection
from gradkeep.errors import QueryError
from gradkeep.factors import form_from_fields
from gradkeep.factors._form import (
    Form,
    Parameter,
    dot,
    dot_directions,
    form_to_fields,
    restored_tiles,
)
from gradkeep.factors._weights import WeightMatrix, WeightVector
from gradkeep.query._engine import same_layout


@dataclass(frozen=True, eq=False)
class SignRows:
    """Signs `[B, P]` as int8 and a length `[B]`."""

    signs: torch.Tensor
    lengths: torch.Tensor

    def __len__(self):
        return len(self.lengths)

    def take(self, start, stop):
        return SignRows(self.signs[start:stop], self.lengths[start:stop])

    def widened(self):
        return SignRows(self.signs, self.lengths.float())

    @property
    def example(self):
        return self.lengths

    @property
    def positions(self):
        return float(len(self))

    @property
    def nbytes(self):
        return self.signs.nbytes + self.lengths.nbytes


@dataclass(frozen=True)
class Signs(Form[SignRows]):
    """A gradient kept as the signs of its entries, times one length."""

    kind: ClassVar[str] = "signs"
    computes: ClassVar[tuple] = ("half", "restored")
    rows_type: ClassVar[type] = SignRows
    parameters: tuple[Parameter, ...]
    signs: str
    lengths: str

    @property
    def arrays(self):
        return (self.signs, self.lengths)

    @property
    def restored_size(self):
        return self.gradient_size

    def read(self, source):
        return SignRows(source.tensor(self.signs), source.tensor(self.lengths))

    def tensors(self, rows):
        return {self.signs: rows.signs, self.lengths: rows.lengths}

    def offsets(self, rows, array):
        return None

    def weight_blocks(self):
        rows, cols = self.parameters[0].shape
        return (WeightMatrix(1, rows, cols),)

    def restore(self, rows):
        return rows.signs.to(rows.lengths.dtype) * rows.lengths[:, None]

    def squared_norms(self, rows):
        return rows.lengths.square() * rows.signs.abs().sum(1)

    def weighted_sum(self, rows, weights):
        return weights @ self.restore(rows)

    def half(self, rows, directions, *, scratch):
        return directions @ self.restore(rows).T

    def temporaries(self, rows):
        return 0


FORM = Signs((Parameter("w", (3, 4)),), "w.signs", "w.lengths")


@pytest.fixture
def rows():
    torch.manual_seed(0)
    return SignRows(torch.randn(6, 12).sign().to(torch.int8), torch.rand(6) + 0.5)


def close(result, expected):
    assert torch.allclose(result.double(), expected.double(), rtol=1e-4, atol=1e-5)


def test_the_algebra_that_is_not_written_comes_with_the_protocol(rows):
    dense = FORM.restore(rows)
    weights, directions = torch.rand(2, 6), torch.randn(3, 12)
    for compute in FORM.computes:
        for scratch in (1, 1 << 20):
            result = dot(FORM, rows, rows.take(1, 4), compute=compute, scratch=scratch)
            close(result, dense @ dense[1:4].T)
            close(
                dot_directions(FORM, rows, directions, scratch=scratch, compute=compute),
                directions @ dense.T,
            )
    close(dot_directions(FORM, rows, directions, scratch=1 << 20), directions @ dense.T)
    close(FORM.weighted_squares(rows, weights), weights @ dense.square())
    close(torch.cat([part for _, _, part in restored_tiles(FORM, rows, 1)]), dense)
    assert same_layout(FORM, FORM)
    with raises(QueryError, "query.compute", mentions="half, restored"):
        dot(FORM, rows, rows, compute="factored", scratch=1)
    with raises(QueryError, "query.rows_type", mentions="SignRows"):
        dot(FORM, rows, dense, compute="half", scratch=1)


def test_projections_and_curvature_restore_it(rows):
    dense = FORM.restore(rows)
    by = Projection(dim=16, seed=3)
    low = project_layers([(FORM, rows)], by, rows=6, device=torch.device("cpu"))
    close(low, project_parameters({"w": dense.view(6, 3, 4)}, by))
    close(two_sided_layer(SideMaps(TwoSided(8, 8), 0), FORM, rows, 1 << 21), dense)
    (block,) = FORM.weight_blocks()
    moments = matrix_moments(block, FORM)
    moments.add(rows, None)
    matrices = dense.view(6, 3, 4).double()
    remaining, right = moments.sides()
    close(remaining[0], torch.einsum("brc,bsc->rs", matrices, matrices) / 6)
    close(
        right[0] * (matrices.square().sum() / 6),
        torch.einsum("brc,brd->cd", matrices, matrices) / 6,
    )
    basis = VectorBasis(WeightVector(12), torch.eye(12), torch.ones(12))
    result = torch.cat([part for _, _, part in coordinates(basis, FORM, rows, None)])
    close(result, dense)
    close(coordinate_squares(basis, FORM, rows, None), dense.square().sum(0))


def test_one_line_lets_schemas_name_it(monkeypatch):
    fields = form_to_fields(FORM)
    with raises(QueryError, "query.unknown_form"):
        form_from_fields(fields)
    monkeypatch.setitem(factors._KINDS, "signs", Signs)
    assert form_from_fields(fields) == FORM
