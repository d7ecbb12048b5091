"""Which coordinates of which layers are worth their bytes, and the maps that make them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from gradkeep._ranks import rank_correlation
from gradkeep.capturing.rules._rules import DENSE_RULES
from gradkeep.curvature._basis import leading
from gradkeep.curvature._moments import WIDE, MatrixMoments
from gradkeep.errors import CaptureError
from gradkeep.factors._arithmetic import pairwise
from gradkeep.factors._bits import PACKED, BitRows, Bits, bit_scales, packed_bits
from gradkeep.factors._weights import BlockProjection, LayerProjection

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from gradkeep.capturing._first_batch import Keep
    from gradkeep.capturing._moments import LayerMoments, Moments
    from gradkeep.capturing._tracer import Traced, Tracer
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.factors._form import AnyForm

    BlockSize = tuple[int, int, int]
    """Groups, rows and columns of a weight."""

_LEAST_SIDE = 32
_TABLES = ("lookup", "tied")
"""Forms of which the moments of tokens are a diagonal."""
_ATTENTION = re.compile(r"att(e?n|ention)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, eq=False)
class LeadingBlock:
    """The leading eigenvectors of a block's two sides, and what their pairs stand for."""

    left: Tensor
    """`[G, R, r]`"""
    right: Tensor
    """`[G, C, c]`"""
    values: Tensor
    """Eigenvalues `[G r c]`, float64"""
    size: int
    """Of the whole block."""
    total: float
    """The sum of all of its eigenvalues."""


@dataclass(frozen=True, slots=True, eq=False)
class LeadingLayer:
    """All blocks of a layer."""

    blocks: tuple[LeadingBlock, ...]

    @property
    def mean(self) -> float:
        """The mean eigenvalue of the layer."""
        size = sum(block.size for block in self.blocks)
        return sum(block.total for block in self.blocks) / max(1, size)

    @property
    def rest(self) -> float:
        """The mean eigenvalue of the remaining directions."""
        size = sum(block.size - len(block.values) for block in self.blocks)
        total = sum(block.total - float(block.values.sum()) for block in self.blocks)
        return max(0.0, total) / max(1, size)


def worth_keeping(units: Sequence[LayerUnit], keep: Keep) -> list[LayerUnit]:
    """The layers that coordinates are chosen from, unless somebody chose layers.

    Where bytes are few, those of attention are left out if they are the smaller part of the model:
    measured on language models, up to 16 KiB a row their coordinates cost more than they tell. So
    are vectors, and layers that have to run once more for their gradients, where they are next to
    nothing.
    """
    chosen = list(units)
    few_bytes = keep.row_bytes < (64 << 10)
    attention = [u for u in units if few_bytes and _ATTENTION.search(u.name)]
    rerun = [u for u in units if u.rule in DENSE_RULES]
    vectors = [u for u in units if all(len(p.shape) < 2 for p in u.parameters)]
    for odd, most in ((attention, 0.5), (rerun, 0.1), (vectors, 0.1)):
        rest = [unit for unit in chosen if unit not in odd]
        removed = sum(unit.size for unit in chosen if unit in odd)
        if rest and removed <= most * sum(unit.size for unit in chosen):
            chosen = rest
    return chosen


def leading_layers(
    moments: LayerMoments, keep: Keep, units: Sequence[LayerUnit]
) -> dict[LayerUnit, LeadingLayer]:
    """As many eigenvectors of each side as leave room to choose `keep.most` pairs of them.

    Fewer where moving every position along them would take more than a share of the time that
    all layers, `units`, take themselves.
    """
    side = side_of(block_sizes(moments.forms.values()), keep, units)
    layers = {
        unit: LeadingLayer(tuple(_leading(one, side) for one in moments.moments[unit]))
        for unit in units
        if unit in moments.moments
    }
    if not any(layer.mean > 0 for layer in layers.values()):
        raise CaptureError(
            f"all gradients of {moments.rows} rows are zero: there is no basis to keep them in",
            fix="check the task and the labels, or capture an earlier checkpoint",
        )
    return layers


@dataclass(frozen=True, slots=True, eq=False)
class ChosenCoordinates:
    """The maps of the layers that are kept."""

    layers: Mapping[LayerUnit, LayerProjection]
    group: int = 0
    """Coordinates that share a byte; fewer than were asked for where a model has few."""


def choose_coordinates(layers: Mapping[LayerUnit, LeadingLayer], keep: Keep) -> ChosenCoordinates:
    """The maps to the coordinates with the largest eigenvalues, relative to their layer's mean.

    Layers that would not fill a byte are left out.
    """
    parts = []
    for unit, layer in layers.items():
        for at, block in enumerate(layer.blocks if layer.mean > 0 else ()):
            shares = block.values / layer.mean
            # So far below the damping, bits would be noise.
            parts.append((unit, at, torch.where(shares > 0.001 * keep.damping, shares, 0)))
    there = sum(int((share > 0).sum()) for _, _, share in parts)
    _, group, fold = sizes_kept(there, keep)
    wanted, step = (keep.room * group, group) if group else (keep.sums * fold, 8 * fold)
    counts = _counts([share for _, _, share in parts], wanted, step)
    made: dict[LayerUnit, list[BlockProjection | None]] = {}
    for (unit, at, share), count in zip(parts, counts, strict=True):
        blocks = made.setdefault(unit, [None] * len(layers[unit].blocks))
        if not count:
            continue
        own = layers[unit].blocks[at]
        draws = _draws(keep.seed, unit.name, at)
        best = share.sort(descending=True, stable=True).indices[:count]
        chosen = best[torch.randperm(count, generator=draws)]
        scale = (own.values[chosen] + keep.damping * layers[unit].mean).rsqrt()
        if not group:
            scale *= torch.randint(2, (count,), generator=draws).mul(2).sub(1)
        shape = (1 if group else fold, -1)
        weights = scale.float().view(shape)
        blocks[at] = BlockProjection(own.left, own.right, weights, chosen.view(shape))
    kept = {
        unit: LayerProjection(tuple(blocks))
        for unit, blocks in made.items()
        if any(block is not None for block in blocks)
    }
    return ChosenCoordinates(kept, group)


def sizes_kept(there: int, keep: Keep) -> tuple[int, int, int]:
    """Of so many usable pairs: how many coordinates are kept, shared by a byte, and added up to one."""
    if not keep.whitened:
        return min(keep.sums, there), 0, 1
    group = min(keep.group or 0, there // keep.room)
    # Smaller groups tell less than a bit for each of their coordinates.
    if group >= 12:
        return keep.room * group, group, 1
    fold = max(1, min(keep.fold, there // keep.sums))
    return min(keep.sums, there // fold), 0, fold


def random_coordinates(forms: Mapping[LayerUnit, AnyForm], keep: Keep) -> ChosenCoordinates:
    """Maps that do not look at the data: normal matrices, or sparse signs, for both sides.

    `[R, C]` becomes `[s, s]`, with s as large as the bytes allow for all layers.
    """
    sizes = block_sizes(forms.values())
    side, signs = side_of(sizes, keep, list(forms)), keep.coordinates != "random"
    if pairs_of(sizes, side) > keep.sums:
        raise CaptureError(
            f"{keep.sums} coordinates are too few for one of each of {len(sizes)} weights",
            fix="keep more bytes, or choose fewer layers with layers=",
        )
    layers = {}
    for unit, form in forms.items():
        blocks = []
        for at, block in enumerate(form.weight_blocks()):
            draws = _draws(keep.seed, unit.name, at)
            left, right = (
                _random_side((block.groups, size, min(side, size)), draws, signs=signs)
                for size in (block.rows, block.cols)
            )
            ones = torch.ones(1, left.shape[2] * right.shape[2] * block.groups)
            blocks.append(BlockProjection(left, right, ones))
        layers[unit] = LayerProjection(tuple(blocks))
    return ChosenCoordinates(layers)


def _random_side(shape: tuple[int, int, int], draws: torch.Generator, *, signs: bool) -> Tensor:
    """Normal numbers; or every entry goes to one random place with a random sign."""
    groups, size, to = shape
    if to == size:
        return torch.eye(size).expand(groups, size, size).contiguous()
    if not signs:
        return torch.randn(shape, generator=draws) / math.sqrt(to)
    places = torch.randint(to, (groups, size, 1), generator=draws)
    drawn = torch.randint(2, (groups, size, 1), generator=draws).mul(2).sub(1).float()
    return torch.zeros(shape).scatter_(2, places, drawn)


def block_sizes(forms: Iterable[AnyForm]) -> list[BlockSize]:
    """Groups, rows and columns of all weights."""
    blocks = (block for form in forms for block in form.weight_blocks())
    return [(block.groups, block.rows, block.cols) for block in blocks]


def side_of(blocks: Sequence[BlockSize], keep: Keep, units: Sequence[LayerUnit]) -> int:
    """How many vectors of each side of a weight its coordinates are made of.

    Of eigenvectors a multiple of 32 so that there are pairs enough to choose from, or all there are.
    From some hundred thousand pairs on the price is looked at, beside that of the model's `units`. Of
    random vectors as many as the bytes allow.
    """
    most = max((max(rows, cols) for _, rows, cols in blocks), default=1)
    if not keep.whitened:
        side = 1
        while side < most and pairs_of(blocks, side + 1) <= keep.sums:
            side += 1
        return side
    # Coordinates of the leading eigenvectors of both sides, times those that are kept of them:
    # the kept ones fill a corner, not a square.
    # Share of a pass, forward and back, that moving positions along eigenvectors may take.
    wanted, price = math.ceil(1.5 * keep.most), 3 * 0.3 * sum(unit.size for unit in units)
    side = _LEAST_SIDE
    while side < most and pairs_of(blocks, side) < wanted:
        dear = operations_of(blocks, side + _LEAST_SIDE) > price
        # Coordinates that are worth what they take, in a model of any size.
        if dear and pairs_of(blocks, side) >= 400_000:
            break
        side += _LEAST_SIDE
    return side


def operations_of(blocks: Sequence[BlockSize], side: int) -> float:
    """Multiplications for one position of every layer: both sides moved, and the products of both."""
    total = 0.0
    for groups, rows, cols in blocks:
        high, wide = min(side, rows), min(side, cols)
        # Of a diagonal side, such as a vocabulary, values are only picked.
        moved = 0 if rows > WIDE else high * rows
        total += groups * (moved + wide * cols + high * wide)
    return total


def moment_bytes(forms: Iterable[AnyForm]) -> float:
    """Bytes of both sides' second moments of some layers, while a basis is found."""
    return sum(
        4.0 * groups * (moment_values(form, rows) + float(cols) ** 2)
        for form in forms
        for groups, rows, cols in block_sizes([form])
        if cols > 1
    )


def moment_values(form: AnyForm, side: int) -> float:
    """Values of one side's moments: of tokens, and of very long sides, the diagonal."""
    tokens = form.kind in _TABLES and side == block_sizes([form])[0][1]
    return float(side) if tokens or side > WIDE else float(side) ** 2


def pairs_of(blocks: Sequence[BlockSize], side: int) -> int:
    """Pairs of such vectors, of all weights together."""
    return sum(groups * min(side, rows) * min(side, cols) for groups, rows, cols in blocks)


def _leading(moments: Moments, side: int) -> LeadingBlock:
    piece = moments.piece
    if not isinstance(moments, MatrixMoments):
        moment = _finite(moments.mean())
        values, vectors = leading(moment.unsqueeze(0), min(side, piece.size))
        total = float(moment.sum() if moment.dim() == 1 else moment.diagonal().sum())
        ones = torch.ones(1, 1, 1)
        return LeadingBlock(vectors.cpu(), ones, values.flatten().cpu(), piece.size, total)
    left, right = (_finite(side) for side in moments.sides())
    high, tops = leading(left, min(side, piece.rows))
    wide, sides = leading(right, min(side, piece.cols))
    values = (high.unsqueeze(2) * wide.unsqueeze(1)).flatten()
    total = float((_traces(left) * _traces(right)).sum())
    return LeadingBlock(tops.cpu(), sides.cpu(), values.cpu(), piece.size, total)


def _finite(moment: Tensor) -> Tensor:
    if not bool(moment.isfinite().all()):
        raise CaptureError(
            "gradients of the rows that a basis is found with are not finite",
            fix="look for exploded losses: capture with keep='losses' first; training diverged",
        )
    return moment


def _traces(moment: Tensor) -> Tensor:
    found = moment if moment.dim() == 2 else moment.diagonal(dim1=1, dim2=2)
    return found.double().sum(1)


def _counts(shares: list[Tensor], wanted: int, step: int) -> list[int]:
    """How many of each block are among the `wanted` largest, in multiples of `step`."""
    usable = [share[share > 0] for share in shares]
    whole = torch.cat(usable)
    if len(whole) > wanted:
        bound = whole.topk(wanted).values[-1]
        counts = [int((share >= bound).sum()) for share in usable]
    else:
        counts = [len(share) for share in usable]
    counts = [count // step * step for count in counts]
    order = sorted(range(len(counts)), key=lambda at: -counts[at])
    for at in order:  # what rounding left over goes to those that have most
        room = (len(usable[at]) - counts[at]) // step * step
        counts[at] += min(room, max(0, (wanted - sum(counts)) // step * step))
    return counts


def _draws(seed: int, name: str, at: int) -> torch.Generator:
    words = f"{seed}\0{name}\0{at}".encode("utf-8", "surrogatepass")
    return torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(words) >> 1)


_MOST, _LEAST = 16, 8
_HELD = 512 << 20
"""Bytes of whole gradients that are held at a time; a model of which eight rows take more is not
compared."""


@torch.no_grad()
def measure_agreement(
    tracer: Tracer,
    sample: Iterable[Any],
    layers: Mapping[LayerUnit, LeadingLayer],
    chosen: ChosenCoordinates,
    keep: Keep,
    device: torch.device,
    *,
    budget: int | None = None,
) -> tuple[float | None, int]:
    """The mean over rows of the rank correlation of kept and full scores of all others, and how many.

    The full score of a layer is that of its leading coordinates, weighed as they are kept, and of the
    rest of the gradient with the mean eigenvalue of the rest. Queries are not rounded. Of a `budget`
    of bytes at most a half is taken.
    """
    parts: list[Traced] = []
    rows, size = 0, sum(4 * unit.size for unit in tracer.units)
    held = _HELD if budget is None else min(_HELD, budget // 2)
    if _LEAST * size > held:
        return None, 0
    for batch in sample:
        with torch.enable_grad():
            parts.append(tracer.run(batch, device=device))
        rows += len(parts[-1].measured.losses)
        if rows >= _MOST or (rows + 4) * size > held:
            break
    if rows < _LEAST:
        return None, rows
    full = torch.zeros(rows, rows, dtype=torch.float64)
    for unit in tracer.units:
        full += _full_scores(parts, unit, layers.get(unit), keep).double().cpu()
    layers_kept = []
    for unit, projection in chosen.layers.items():
        pieces = [part.pieces[unit] for part in parts]
        applied = [projection.applied(p.form, p.rows.widened()).float() for p in pieces]
        layers_kept.append(torch.cat(applied))
    kept = torch.cat(layers_kept, 1).cpu()
    scores = pairwise(kept, _rounded(kept, keep, chosen.group)).double()
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
    """The scores `[S, S]` of one layer."""
    form = parts[0].pieces[unit].form
    dense = torch.cat([form.restore(part.pieces[unit].rows.widened()) for part in parts])
    if layer is None or layer.mean <= 0:
        return pairwise(dense, dense)
    added = keep.damping * layer.mean
    out = pairwise(dense, dense) / (layer.rest + added)
    for block, piece in zip(layer.blocks, form.weight_blocks(), strict=True):
        left, right = block.left.to(dense), block.right.to(dense)
        found = (left.mT @ piece.matrices(dense) @ right).flatten(1)
        gain = 1 / (block.values + added) - 1 / (layer.rest + added)
        out += pairwise(found * gain.to(found), found)
    return out


def _rounded(values: Tensor, keep: Keep, group: int) -> Tensor:
    """What is left of coordinates `[S, K]` once they are kept."""
    if keep.bits not in PACKED:
        return values
    scales = bit_scales(values, keep.bits, group)
    assert scales is not None
    form = Bits((), "", "scale", values.shape[1], keep.bits, group=group)
    return form.restore(BitRows(packed_bits(values, scales, keep.bits, group), scales))
