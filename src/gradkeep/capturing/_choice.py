"""Choose coordinates and layers that are worth their bytes, and build the maps to them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from gradkeep._ranks import rank_correlation
from gradkeep.capturing._batches import batch_size, rows_of
from gradkeep.capturing._readiness import device_of
from gradkeep.capturing._tracer import Reducer, empty_gradients
from gradkeep.capturing.rules._rules import BROADCAST, DENSE_RULES
from gradkeep.curvature._basis import leading
from gradkeep.curvature._moments import WIDE, MatrixMoments, VectorMoments, matrix_moments
from gradkeep.errors import CaptureError
from gradkeep.factors._arithmetic import CACHED, pairwise
from gradkeep.factors._bits import PACKED, BitRows, Bits, bit_scales, packed_bits
from gradkeep.factors._convolution import Convolution
from gradkeep.factors._form import dot
from gradkeep.factors._outer import Outer, OuterRows
from gradkeep.factors._weights import BlockProjection, LayerProjection, WeightMatrix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from gradkeep.capturing._first_batch import Keep
    from gradkeep.capturing._tracer import Traced, Tracer
    from gradkeep.capturing.rules._layers import LayerGradients
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.capturing.tasks._tasks import Measured
    from gradkeep.factors._form import AnyForm, GradientRows
    from gradkeep.factors._weights import WeightBlock

    Moments = MatrixMoments | VectorMoments
    BlockSize = tuple[int, int, int]
    """Groups, rows and columns of a weight."""

_LEAST_SIDE = 32
_TABLES = ("lookup", "tied")
"""Forms whose moments over tokens are diagonal."""
_ATTENTION = re.compile(r"att(e?n|ention)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, eq=False)
class LeadingBlock:
    """Leading eigenvectors of both sides of a block, and the eigenvalues of their pairs."""

    row_vectors: Tensor
    """`[G, R, r]`"""
    col_vectors: Tensor
    """`[G, C, c]`"""
    values: Tensor
    """Eigenvalues `[G r c]`, float64"""
    size: int
    """Number of values of the whole block."""
    total: float
    """Sum of all eigenvalues of the block."""


@dataclass(frozen=True, slots=True, eq=False)
class LeadingLayer:
    """Leading eigenvectors of all blocks of a layer."""

    blocks: tuple[LeadingBlock, ...]

    @property
    def mean(self) -> float:
        """Mean eigenvalue of the layer."""
        size = sum(block.size for block in self.blocks)
        return sum(block.total for block in self.blocks) / max(1, size)

    @property
    def rest(self) -> float:
        """Mean eigenvalue of the remaining directions."""
        size = sum(block.size - len(block.values) for block in self.blocks)
        total = sum(block.total - float(block.values.sum()) for block in self.blocks)
        return max(0.0, total) / max(1, size)


@dataclass(slots=True, eq=False)
class LayerMoments:
    """Moments of the weights of some units, and the forms of their gradients."""

    forms: dict[LayerUnit, AnyForm] = field(default_factory=dict)
    moments: dict[LayerUnit, list[Moments]] = field(default_factory=dict)
    rows: int = 0


def measure_moments(tracer: Tracer, sample: Iterable[Any], device: torch.device) -> LayerMoments:
    """Sum the moments of all units' loss gradients over some batches, in one forward and backward pass.

    For a weight, left = sum g g^T / rows and right = sum x x^T / positions, so that products of their
    eigenvalues have the scale of the Fisher matrix.
    """
    total = LayerMoments()

    def add(unit: LayerUnit, piece: LayerGradients, measured: Measured) -> LayerGradients:
        form, rows = piece.form, piece.rows.widened()
        if unit not in total.moments:
            total.forms[unit] = form
            with rows.example.device:
                total.moments[unit] = [
                    matrix_moments(block, form, lean=True)
                    if isinstance(block, WeightMatrix)
                    else VectorMoments(block, form)
                    for block in form.weight_blocks()
                ]
        slopes = tracer.loss_slopes(measured)
        for one in total.moments[unit]:
            one.add(rows, slopes)
        return empty_gradients(piece)

    reducer = Reducer(tracer.units, add)
    for batch in sample:
        total.rows += batch_size(batch)
        losses = tracer.run(batch, device=device, reducer=reducer).measured.losses
        if not bool(losses.isfinite().all()):
            raise CaptureError(
                "the loss of a row for the basis is not finite",
                code="capture.infinite_basis_loss",
                fix="Check the data, or capture an earlier checkpoint: training diverged.",
            )
    if not total.rows:
        raise CaptureError(
            "there are no rows for a basis", code="capture.empty_basis", fix="Check the loader."
        )
    return total


def default_layers(units: Sequence[LayerUnit], keep: Keep) -> list[LayerUnit]:
    """Return the layers that coordinates are chosen from if the user did not choose layers.

    Below 64 KiB per row, attention layers are left out if they are the smaller part of the model:
    measured on language models, up to 16 KiB per row their coordinates are worth less than those of
    other layers. Vectors, and parameters outside of layers with a rule, are left out where they are at
    most a tenth of the model.
    """
    chosen = list(units)
    few_bytes = keep.row_bytes < (64 << 10)
    attention = [u for u in units if few_bytes and _ATTENTION.search(u.name)]
    rerun = [u for u in units if u.rule in (*DENSE_RULES, BROADCAST)]
    vectors = [u for u in units if all(len(p.shape) < 2 for p in u.parameters)]
    for odd, most in ((attention, 0.5), (rerun, 0.1), (vectors, 0.1)):
        rest = [unit for unit in chosen if unit not in odd]
        removed = sum(unit.size for unit in chosen if unit in odd)
        if rest and removed <= most * sum(unit.size for unit in chosen):
            chosen = rest
    return chosen


def find_leading_layers(
    moments: LayerMoments, keep: Keep, units: Sequence[LayerUnit]
) -> dict[LayerUnit, LeadingLayer]:
    """Compute enough leading eigenvectors of each side to choose `keep.most` pairs of them.

    Fewer where projecting every position on them would take more than a share of the time that all
    layers, `units`, take themselves.
    """
    side = choose_side(block_sizes(moments.forms.values()), keep, units)
    layers = {
        unit: LeadingLayer(
            tuple(_leading(one, affordable_side(moments.forms[unit], side)) for one in own)
        )
        for unit, own in ((unit, moments.moments.get(unit)) for unit in units)
        if own is not None
    }
    if not any(layer.mean > 0 for layer in layers.values()):
        raise CaptureError(
            f"all gradients of {moments.rows} rows are zero, so there is no basis",
            code="capture.zero_basis",
            fix="Check the task and the labels, or capture an earlier checkpoint.",
        )
    return layers


@dataclass(frozen=True, slots=True, eq=False)
class ChosenCoordinates:
    """Projections of the chosen layers."""

    layers: Mapping[LayerUnit, LayerProjection]
    group: int = 0
    """Coordinates that share a byte; fewer than requested in small models."""


def choose_coordinates(layers: Mapping[LayerUnit, LeadingLayer], keep: Keep) -> ChosenCoordinates:
    """Choose the coordinates with the largest eigenvalues relative to their layer's mean.

    Layers that would not fill a byte are left out.
    """
    parts = []
    for unit, layer in layers.items():
        for at, block in enumerate(layer.blocks if layer.mean > 0 else ()):
            shares = block.values / layer.mean
            # Eigenvalues far below the damping hold noise.
            parts.append((unit, at, torch.where(shares > 0.001 * keep.damping, shares, 0)))
    usable = sum(int((share > 0).sum()) for _, _, share in parts)
    _, group, fold = count_coordinates(usable, keep)
    needed, step = (keep.coordinate_bytes * group, group) if group else (keep.sums * fold, 8 * fold)
    counts = _counts([share for _, _, share in parts], needed, step)
    projections: dict[LayerUnit, list[BlockProjection | None]] = {}
    for (unit, at, share), count in zip(parts, counts, strict=True):
        blocks = projections.setdefault(unit, [None] * len(layers[unit].blocks))
        if not count:
            continue
        own = layers[unit].blocks[at]
        draws = _draws(keep.seed, unit.name, at)
        best = share.sort(descending=True, stable=True).indices[:count]
        indices = best[torch.randperm(count, generator=draws)]
        scale = (own.values[indices] + keep.damping * layers[unit].mean).rsqrt()
        if not group:
            scale *= torch.randint(2, (count,), generator=draws).mul(2).sub(1)
        shape = (1 if group else fold, -1)
        weights = scale.float().view(shape)
        blocks[at] = BlockProjection(own.row_vectors, own.col_vectors, weights, indices.view(shape))
    chosen_layers = {
        unit: LayerProjection(tuple(blocks))
        for unit, blocks in projections.items()
        if any(block is not None for block in blocks)
    }
    return ChosenCoordinates(chosen_layers, group)


def count_coordinates(available: int, keep: Keep) -> tuple[int, int, int]:
    """Return the number of coordinates, how many share a byte, and how many are summed into one.

    `available` is the number of usable pairs of eigenvectors.
    """
    if not keep.whitened:
        return min(keep.sums, available), 0, 1
    group = min(keep.group or 0, available // keep.coordinate_bytes)
    # Smaller groups hold less than a bit per coordinate.
    if group >= 12:
        return keep.coordinate_bytes * group, group, 1
    fold = max(1, min(keep.fold, available // keep.sums))
    return min(keep.sums, available // fold), 0, fold


def random_coordinates(forms: Mapping[LayerUnit, AnyForm], keep: Keep) -> ChosenCoordinates:
    """Build projections that do not depend on the data: normal matrices or sparse signs for both sides.

    `[R, C]` becomes `[s, s]`, with s as large as the bytes allow for all layers.
    """
    sizes = block_sizes(forms.values())
    side, signs = choose_side(sizes, keep, list(forms)), keep.coordinates != "random"
    if count_pairs(sizes, side) > keep.sums:
        raise CaptureError(
            f"{keep.sums} coordinates are too few for {len(sizes)} weights",
            code="capture.too_few_coordinates",
            fix="Keep more bytes, or choose fewer layers with layers=.",
        )
    layers = {}
    for unit, form in forms.items():
        blocks = []
        for at, block in enumerate(form.weight_blocks()):
            draws = _draws(keep.seed, unit.name, at)
            tops, sides = (
                _random_side((block.groups, size, min(side, size)), draws, signs=signs)
                for size in (block.rows, block.cols)
            )
            ones = torch.ones(1, tops.shape[2] * sides.shape[2] * block.groups)
            blocks.append(BlockProjection(tops, sides, ones))
        layers[unit] = LayerProjection(tuple(blocks))
    return ChosenCoordinates(layers)


def _random_side(shape: tuple[int, int, int], draws: torch.Generator, *, signs: bool) -> Tensor:
    """Draw normal numbers, or map every entry to one random place with a random sign."""
    groups, size, to = shape
    if to == size:
        return torch.eye(size).expand(groups, size, size).contiguous()
    if not signs:
        return torch.randn(shape, generator=draws) / math.sqrt(to)
    places = torch.randint(to, (groups, size, 1), generator=draws)
    drawn = torch.randint(2, (groups, size, 1), generator=draws).mul(2).sub(1).float()
    return torch.zeros(shape).scatter_(2, places, drawn)


def block_sizes(forms: Iterable[AnyForm]) -> list[BlockSize]:
    """Return groups, rows and columns of all weights."""
    blocks = (block for form in forms for block in form.weight_blocks())
    return [(block.groups, block.rows, block.cols) for block in blocks]


def choose_side(blocks: Sequence[BlockSize], keep: Keep, units: Sequence[LayerUnit]) -> int:
    """Choose how many vectors of each side of a weight its coordinates are built from.

    For eigenvectors: a multiple of 32 with enough pairs to choose from, or all there are. Above 400,000
    pairs their cost is limited to a share of that of the model's `units`. For random vectors: as many as
    the bytes allow.
    """
    most = max((max(rows, cols) for _, rows, cols in blocks), default=1)
    if not keep.whitened:
        side = 1
        while side < most and count_pairs(blocks, side + 1) <= keep.sums:
            side += 1
        return side
    # 1.5 times as many pairs as are chosen: the chosen pairs fill a corner, not a square.
    # Projecting positions on eigenvectors may take 30% of a forward and backward pass.
    needed, max_operations = math.ceil(1.5 * keep.most), 3 * 0.3 * sum(unit.size for unit in units)
    side = _LEAST_SIDE
    while side < most and count_pairs(blocks, side) < needed:
        is_expensive = count_operations(blocks, side + _LEAST_SIDE) > max_operations
        # This many pairs are worth their cost in a model of any size.
        if is_expensive and count_pairs(blocks, side) >= 400_000:
            break
        side += _LEAST_SIDE
    return side


def affordable_side(form: AnyForm, side: int) -> int:
    """Limit the vectors of a side of a convolution: R C c products take no longer than its 3 T R C."""
    if not isinstance(form, Convolution):
        return side
    return min(side, max(_LEAST_SIDE, 3 * form.positions))


def count_operations(blocks: Sequence[BlockSize], side: int) -> float:
    """Count multiplications per position of all layers: both projections, and their products."""
    total = 0.0
    for groups, rows, cols in blocks:
        high, wide = min(side, rows), min(side, cols)
        # Values of a diagonal side, such as a vocabulary, are only selected.
        moved = 0 if rows > WIDE else high * rows
        total += groups * (moved + wide * cols + high * wide)
    return total


def moment_bytes(forms: Iterable[AnyForm]) -> float:
    """Return the bytes of both sides' second moments while a basis is computed."""
    return sum(
        4.0 * groups * (moment_values(form, rows) + float(cols) ** 2)
        for form in forms
        for groups, rows, cols in block_sizes([form])
        if cols > 1
    )


def moment_values(form: AnyForm, side: int) -> float:
    """Return the number of values of one side's moments: the diagonal for tokens and very long sides."""
    tokens = form.kind in _TABLES and side == block_sizes([form])[0][1]
    return float(side) if tokens or side > WIDE else float(side) ** 2


def count_pairs(blocks: Sequence[BlockSize], side: int) -> int:
    """Count pairs of `side` vectors per side, over all weights."""
    return sum(groups * min(side, rows) * min(side, cols) for groups, rows, cols in blocks)


def _leading(moments: Moments, side: int) -> LeadingBlock:
    piece = moments.piece
    if not isinstance(moments, MatrixMoments):
        moment = _finite(moments.mean())
        values, vectors = leading(moment.unsqueeze(0), min(side, piece.size))
        total = float(moment.sum() if moment.dim() == 1 else moment.diagonal().sum())
        ones = torch.ones(1, 1, 1)
        return LeadingBlock(vectors.cpu(), ones, values.flatten().cpu(), piece.size, total)
    row_moment, col_moment = (_finite(side) for side in moments.sides())
    high, tops = leading(row_moment, min(side, piece.rows))
    wide, sides = leading(col_moment, min(side, piece.cols))
    values = (high.unsqueeze(2) * wide.unsqueeze(1)).flatten()
    total = float((_traces(row_moment) * _traces(col_moment)).sum())
    return LeadingBlock(tops.cpu(), sides.cpu(), values.cpu(), piece.size, total)


def _finite(moment: Tensor) -> Tensor:
    if not bool(moment.isfinite().all()):
        raise CaptureError(
            "gradients of the rows for the basis are not finite",
            code="capture.infinite_basis",
            fix="Look for exploded losses: capture with keep='losses' first.",
        )
    return moment


def _traces(moment: Tensor) -> Tensor:
    diagonal = moment if moment.dim() == 2 else moment.diagonal(dim1=1, dim2=2)
    return diagonal.double().sum(1)


def _counts(shares: list[Tensor], total: int, step: int) -> list[int]:
    """Return how many of each block are among the `total` largest, in multiples of `step`."""
    usable = [share[share > 0] for share in shares]
    whole = torch.cat(usable)
    if len(whole) > total:
        bound = whole.topk(total).values[-1]
        counts = [int((share >= bound).sum()) for share in usable]
    else:
        counts = [len(share) for share in usable]
    counts = [count // step * step for count in counts]
    order = sorted(range(len(counts)), key=lambda at: -counts[at])
    for at in order:  # the remainder goes to the largest blocks
        free_bytes = (len(usable[at]) - counts[at]) // step * step
        counts[at] += min(free_bytes, max(0, (total - sum(counts)) // step * step))
    return counts


def _draws(seed: int, name: str, at: int) -> torch.Generator:
    words = f"{seed}\0{name}\0{at}".encode("utf-8", "surrogatepass")
    return torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(words) >> 1)


_MAX_BYTES = 512 << 20
"""Limit for whole gradients in memory; models of which eight rows take more are not compared."""


@torch.no_grad()
def measure_agreement(
    tracer: Tracer,
    sample: Iterable[Any],
    layers: Mapping[LayerUnit, LeadingLayer],
    chosen: ChosenCoordinates,
    keep: Keep,
    budget: int | None,
) -> tuple[float | None, int]:
    """Return the mean rank correlation of compressed and full scores over rows, and the number of rows.

    Each row's scores of all others are compared. The full score of a layer weighs its leading coordinates
    as they are stored, and the rest of the gradient with the mean eigenvalue of the rest. Queries are not
    rounded. At most half of a `budget` in bytes is used.
    """
    parts: list[Traced] = []
    rows, size = 0, sum(4 * unit.size for unit in tracer.units)
    max_bytes = _MAX_BYTES if budget is None else min(_MAX_BYTES, budget // 2)
    if 8 * size > max_bytes:
        return None, 0
    for batch in sample:
        few = rows_of(batch, 0, min(batch_size(batch), 32 - rows))
        with torch.enable_grad():
            parts.append(tracer.run(few, device=device_of(tracer.model)))
        rows += len(parts[-1].measured.losses)
        if rows >= 16 or (rows + 4) * size > max_bytes:
            break
    if rows < 8:
        return None, rows
    full = torch.zeros(rows, rows, dtype=torch.float64)
    for unit in tracer.units:
        full += _full_scores(parts, unit, layers.get(unit), keep).double().cpu()
    parts_by_layer = []
    for unit, projection in chosen.layers.items():
        pieces = [part.pieces[unit] for part in parts]
        applied = [projection.applied(p.form, p.rows.widened()).float() for p in pieces]
        parts_by_layer.append(torch.cat(applied))
    coordinates = torch.cat(parts_by_layer, 1).cpu()
    scores = pairwise(coordinates, _rounded(coordinates, keep, chosen.group)).double()
    slopes = [tracer.loss_slopes(part.measured) for part in parts]
    if slopes[0] is not None:
        share = torch.cat([slope.double().cpu() for slope in slopes if slope is not None])
        full, scores = full * share, scores * share
    others = ~torch.eye(rows, dtype=torch.bool)
    agreements = [
        rank_correlation(full[row, others[row]].numpy(), scores[row, others[row]].numpy())
        for row in range(rows)
    ]
    return sum(agreements) / rows, rows


def _full_scores(
    parts: list[Traced], unit: LayerUnit, layer: LeadingLayer | None, keep: Keep
) -> Tensor:
    """Compute the scores `[S, S]` of one layer."""
    form, rows = parts[0].pieces[unit].form, [part.pieces[unit].rows for part in parts]
    if _has_one_position(form, rows):  # much smaller than their products
        parts_of_rows: list[Any] = [one.widened() for one in rows]
        stacked = OuterRows.stacked(parts_of_rows)

        def block_values(block: WeightBlock, tops: Tensor, sides: Tensor) -> Tensor:
            return form.between(stacked, block, tops, sides)

        products = dot(form, stacked, stacked, compute="factored", scratch=CACHED)
        return _weighed_scores(form, products, layer, keep, block_values)
    dense = torch.cat([form.restore(one.widened()) for one in rows])

    def dense_values(block: WeightBlock, tops: Tensor, sides: Tensor) -> Tensor:
        return tops.mT @ block.matrices(dense) @ sides

    return _weighed_scores(form, pairwise(dense, dense), layer, keep, dense_values)


def _has_one_position(form: AnyForm, rows: Sequence[GradientRows]) -> bool:
    return isinstance(form, Outer) and all(
        isinstance(one, OuterRows) and one.offsets is None for one in rows
    )


def _weighed_scores(
    form: AnyForm,
    products: Tensor,
    layer: LeadingLayer | None,
    keep: Keep,
    between: Callable[[WeightBlock, Tensor, Tensor], Tensor],
) -> Tensor:
    """Weigh products `[S, S]` of a layer; `between` returns a block's values between its eigenvectors."""
    if layer is None or layer.mean <= 0:
        return products
    added = keep.damping * layer.mean
    out = products / (layer.rest + added)
    for block, piece in zip(layer.blocks, form.weight_blocks(), strict=True):
        tops, sides = block.row_vectors.to(products), block.col_vectors.to(products)
        values = between(piece, tops, sides).flatten(1)
        gain = 1 / (block.values + added) - 1 / (layer.rest + added)
        out += pairwise(values * gain.to(values), values)
    return out


def _rounded(values: Tensor, keep: Keep, group: int) -> Tensor:
    """Round coordinates `[S, K]` as they are stored."""
    if keep.bits not in PACKED:
        return values
    scales = bit_scales(values, keep.bits, group)
    assert scales is not None
    form = Bits((), "", "scale", values.shape[1], keep.bits, group=group)
    return form.restore(BitRows(packed_bits(values, scales, keep.bits, group), scales))
