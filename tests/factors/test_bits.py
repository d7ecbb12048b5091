"""Coordinates of few bits: what they decode to, and every product of them, against plain numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raises import raises

from gradkeep import errors
from gradkeep.factors import form_from_fields
from gradkeep.factors._bits import (
    PACKED,
    BitRows,
    Bits,
    bit_scales,
    from_levels,
    packed_bits,
    to_levels,
)
from gradkeep.factors._dense import Dense, DenseRows
from gradkeep.factors._form import Parameter, dot, dot_directions, form_to_fields
from gradkeep.factors._outer import Outer, OuterRows
from gradkeep.factors._weights import BlockProjection, LayerProjection
from gradkeep.query._engine import same_layout

WEIGHT = (Parameter("w", (3, 7)),)
widths = st.sampled_from([1, 4, 8, 16, 32])


def form_of(size, bits, group=0):
    scale = "scale" if bits in PACKED else ""
    return Bits(WEIGHT, "w.bits", scale, size, bits, basis="b", group=group)


def coded(values, bits, group=0):
    scales = bit_scales(values, bits, group)
    if scales is None:
        return BitRows(values)
    return BitRows(packed_bits(values, scales, bits, group), scales)


def largest(values, group):
    """What rows of groups decode to, one group after the other."""
    out = torch.zeros_like(values)
    for row, result in zip(values.tolist(), out, strict=True):
        starts = range(0, len(row), group)
        places = [max(range(s, s + group), key=lambda at: abs(row[at])) for s in starts]
        size = sum(abs(row[at]) for at in places) / len(places)
        for at in places:
            result[at] = size if row[at] >= 0 else -size
    return out


def plain(values, bits):
    """What rows decode to, one number after the other."""
    out = torch.empty_like(values)
    for row, result in zip(values.tolist(), out, strict=True):
        size = sum(abs(v) for v in row) / len(row)
        step = 0.3352 * (sum(v * v for v in row) / len(row)) ** 0.5
        for at, value in enumerate(row):
            if bits == 1:
                result[at] = size if value > 0 else -size
            elif bits == 4:
                level = min(7, max(-8, int((value / step) // 1))) if step else 0
                result[at] = (level + 0.5) * step
            else:
                result[at] = value
    return out


@given(widths, st.integers(0, 5), st.integers(1, 40), st.integers(0, 99))
def test_rows_decode_to_what_they_should(bits, count, size, seed):
    torch.manual_seed(seed)
    values = torch.randn(count, size) * torch.rand(count, 1).mul(20).sub(10).exp2()
    form = form_of(size, bits)
    rows = coded(values, bits)
    result, expected = form.restore(rows), plain(values, bits)
    torch.testing.assert_close(result, expected)
    if bits in PACKED:
        assert rows.codes.dtype == torch.uint8
        assert rows.codes.shape == (count, -(-size * bits // 8))
    torch.testing.assert_close(form.squared_norms(rows), expected.square().sum(1))
    cut = count // 2
    parts = torch.cat([form.restore(rows.take(0, cut)), form.restore(rows.take(cut, count))])
    assert torch.equal(parts, result)


@given(widths, widths, st.integers(0, 6), st.integers(1, 40), st.sampled_from([1, 300, 1 << 20]))
def test_products_and_sums_are_those_of_decoded_rows(bits, other, count, size, scratch):
    torch.manual_seed(size)
    form, requests = form_of(size, bits), form_of(size, other)
    assert same_layout(form, requests) == (bits == other or other not in PACKED)
    train, queries = coded(torch.randn(count, size), bits), coded(torch.randn(3, size), other)
    dense, remaining = form.restore(train), requests.restore(queries)
    close = torch.testing.assert_close
    close(
        dot_directions(form, train, remaining, scratch=scratch),
        remaining @ dense.t(),
        rtol=1e-4,
        atol=1e-5,
    )
    weights = torch.randn(2, count)
    close(form.weighted_sum(train, weights), weights @ dense, rtol=1e-4, atol=1e-5)
    close(form.weighted_squares(train, weights), weights @ dense.square(), rtol=1e-4, atol=1e-5)
    if bits == other:
        result = dot(form, queries, train, compute="dense", scratch=scratch)
        close(result, remaining @ dense.t(), rtol=1e-4, atol=1e-5)


@given(
    st.integers(1, 128),
    st.integers(1, 5),
    st.integers(0, 4),
    st.integers(1, 60),
    st.integers(0, 99),
)
def test_of_a_group_the_largest_is_kept_in_a_byte(group, groups, count, kinds, seed):
    torch.manual_seed(seed)
    size = group * groups
    values = torch.randn(count, size)
    form, rows = form_of(size, 1, group), coded(values, 1, group)
    assert rows.codes.dtype == torch.uint8
    assert rows.codes.shape == (count, groups)
    expected, close = largest(values, group), torch.testing.assert_close
    close(form.restore(rows), expected)
    close(form.squared_norms(rows), expected.square().sum(1))
    directions = torch.randn(kinds, size)
    result = dot_directions(form, rows, directions, scratch=1 << 20)
    close(result, directions @ expected.t(), rtol=1e-4, atol=1e-4)
    queries = coded(torch.randn(3, size), 32)
    assert same_layout(form, form_of(size, 32))
    assert not same_layout(form, form_of(size, 1))
    result = dot(form, queries, rows, compute="dense", scratch=1 << 20)
    close(result, queries.codes @ expected.t(), rtol=1e-4, atol=1e-4)
    weights = torch.randn(2, count)
    close(form.weighted_sum(rows, weights), weights @ expected, rtol=1e-4, atol=1e-5)
    close(form.weighted_squares(rows, weights), weights @ expected.square(), rtol=1e-4, atol=1e-5)


def test_groups_that_do_not_come_out_even_are_refused():
    for size, group in ((10, 3), (258, 129), (4, -1)):
        with raises(errors.QueryError, "query.bit_groups"):
            form_of(size, 1, group)


def test_a_row_of_zeros_stays_one():
    for bits in (1, 4, 8):
        form = form_of(6, bits)
        assert form.restore(coded(torch.zeros(2, 6), bits)).abs().max() == 0


def test_the_scale_of_one_bit_errs_least():
    values = torch.randn(4, 64)
    form, rows = form_of(64, 1), coded(values, 1)
    least = (form.restore(rows) - values).square().sum(1)
    for factor in (0.9, 1.1):
        other = BitRows(rows.codes, rows.scales * factor)
        assert ((form.restore(other) - values).square().sum(1) > least).all()


def test_it_is_written_into_a_schema_and_read_again():
    form = form_of(12, 4)
    assert form_from_fields(form_to_fields(form)) == form
    assert form.approximate is not None
    assert form.approximate == "whitened coordinates, 4 bits each"
    with pytest.raises(errors.QueryError, match="bits"):
        form_of(12, 3)


def test_coordinates_of_another_basis_do_not_meet():
    other = Bits(WEIGHT, "w.bits", "scale", 12, 1, basis="another")
    assert not same_layout(form_of(12, 1), other)


@given(st.integers(1, 3), st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_projections_choose_weigh_and_fold(folds, size, choose, seed):
    torch.manual_seed(seed)
    form = Outer((Parameter("w", (5, 4)), Parameter("b", (5,))), "x", "g", 4, 5, bias=True)
    rows = OuterRows(torch.randn(6, 4), torch.randn(6, 5), torch.tensor([0, 2, 2, 6]))
    high, wide = (3, 4) if choose else (folds, size)
    remaining, right = torch.randn(1, 5, high), torch.randn(1, 5, wide)
    chosen = torch.randperm(high * wide)[: folds * size].view(folds, size) if choose else None
    weights = torch.randn(folds, size)
    result = LayerProjection((BlockProjection(remaining, right, weights, chosen),)).applied(
        form, rows
    )
    (block,) = form.weight_blocks()
    whole = (remaining.mT @ block.matrices(form.restore(rows)) @ right).flatten(1)
    for j in range(size):
        at = [int(chosen[f, j]) if choose else f * size + j for f in range(folds)]
        expected = sum(weights[f, j] * whole[:, at[f]] for f in range(folds))
        torch.testing.assert_close(result[:, j], expected, rtol=1e-4, atol=1e-5)


def test_dense_gradients_are_projected_block_by_block():
    form = Dense((Parameter("w", (30, 20)), Parameter("b", (30,)), Parameter("s", (7,))), "d", 637)
    rows = DenseRows(torch.randn(3, 637))
    matrix, vector = form.weight_blocks()
    one = BlockProjection(torch.eye(30)[None], torch.eye(21)[None], torch.ones(1, 630))
    other = BlockProjection(torch.eye(7)[None], torch.ones(1, 1, 1), torch.ones(1, 7))
    result = LayerProjection((one, other)).applied(form, rows)
    assert torch.equal(result[:, :630], matrix.taken(rows.values).flatten(1))
    assert torch.equal(result[:, 630:], vector.taken(rows.values))
    assert LayerProjection((None, other)).applied(form, rows).shape == (3, 7)


@pytest.mark.parametrize(("bits", "group"), [(1, 0), (4, 0), (1, 7), (8, 0), (32, 0)])
def test_sketched_products_err_by_less_than_a_hundredth_of_the_lengths(bits, group):
    rng = torch.Generator().manual_seed(bits)
    form, directions = form_of(21 * 7, bits, group), torch.randn(5, 147, generator=rng)
    directions[3] = 0
    directions[4] *= 1e-6
    for count in (0, 1, 300):
        rows = coded(torch.randn(count, 147, generator=rng), bits, group)
        result = form.sketched(rows, directions, scratch=1 << 14)
        exact = form.half(rows, directions, scratch=1 << 14)
        lengths = directions.norm(dim=1).outer(form.squared_norms(rows).sqrt())
        assert result.shape == exact.shape
        assert bool(((result - exact).abs() <= 0.01 * lengths).all())


@given(
    st.sampled_from([3, 6, 16]),
    st.integers(1, 5),
    st.integers(1, 12),
    st.integers(0, 2**31),
    st.floats(-3, 3),
    st.floats(0, 1),
)
def test_factors_of_few_levels_err_by_a_step_and_keep_zeros(
    levels, rows, size, seed, shift, dropped
):
    draws = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, size, generator=draws) + shift
    values[torch.rand(rows, size, generator=draws) < dropped] = 0
    packed = to_levels(values, levels)
    decoded = from_levels(packed, levels, size)
    assert decoded.shape == values.shape
    assert bool((decoded[values == 0] == 0).all())
    assert packed.shape == (rows, 5 + -(-size // {3: 5, 6: 3, 16: 2}[levels]))
    # Each row decodes to at most that many values, evenly spaced, the nearest of them.
    span = values.amax(1).clamp(min=0) - values.amin(1).clamp(max=0)
    if levels == 16:
        assert bool(((decoded - values).abs() <= (span / 15 * 1.001 + 1e-30).unsqueeze(1)).all())
    for row, own in zip(values, decoded, strict=True):
        assert len(own.unique()) <= levels
        assert float((own - row).norm()) <= 0.8 * float(row.norm())
    assert torch.equal(from_levels(to_levels(decoded, levels), levels, size) == 0, decoded == 0)
