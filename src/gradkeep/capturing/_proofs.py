"""Choosing the rule of each layer, and proving it against autograd.

With random weights w, autograd's gradient of sum_n w_n target_n must equal sum_n w_n gradient_n of the
captured rows. One backward pass checks all rows of all layers at once: a wrong rule, a mistaken batch
dimension or samples that influence each other do not pass. A rule that is proved on one batch holds for
batches whose layers are called in the same way; any other pattern is proved on the batch that shows it first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.overrides import has_torch_function

from gradkeep.capturing._batches import batch_size, rows_of
from gradkeep.capturing._keeping import Adjustments, BatchMismatchError
from gradkeep.capturing._tracer import LayerCall, Tracer, call_pattern, fill, passed
from gradkeep.capturing.rules._any_module import whole_model_gradients
from gradkeep.capturing.rules._layers import INTERLEAVED, SAMPLE_AXES, possible
from gradkeep.capturing.rules._rules import (
    DENSE_RULES,
    LayerUnit,
    calls_by_module,
    calls_of,
    holder_that_ran,
    unit_gradients,
    watched,
)
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from gradkeep.capturing.rules._layers import LayerGradients, SampleAxis
    from gradkeep.factors._form import AnyForm

    Calls = Mapping[nn.Module, Sequence[LayerCall]]
    Pattern = tuple[Any, ...]
    Rules = dict[LayerUnit, LayerUnit | None]
    """The unit by which each is captured in a batch; None: the loss does not depend on it."""


def backward_per_layer(
    target: Tensor, units: Sequence[LayerUnit], callback: Callable[[LayerUnit, Tensor], None]
) -> list[LayerUnit]:
    """Give each unit's gradient `[P]` of a scalar to the callback; returns the units that have none.

    A unit's turn comes when the gradients of all its weights are there; units whose weights do not all
    take part come last. Nothing else is held: a model's gradients take as much as it does. Only the
    gradients of stand-ins, as for 16-bit weights, come all at once.
    """
    standing_in = [unit for unit in units if has_torch_function(unit.weights)]
    there: dict[LayerUnit, dict[Tensor, Tensor]] = {}
    done: set[LayerUnit] = set()
    weights = [weight for unit in standing_in for weight in unit.weights]
    owners = {weight: unit for unit in units for weight in unit.weights}
    if weights:
        gradients = torch.autograd.grad(target, weights, retain_graph=True, allow_unused=True)
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                there.setdefault(owners[weight], {})[weight] = gradient

    @torch.no_grad()
    def finish(unit: LayerUnit) -> None:
        own = there.pop(unit)
        parts = [
            # To dense: of embeddings with sparse=True.
            (own[w].to_dense() if w in own else torch.zeros_like(w)).reshape(-1)
            for w in unit.weights
        ]
        done.add(unit)
        callback(unit, parts[0] if len(parts) == 1 else torch.cat(parts))

    def arrived(weight: Tensor) -> None:
        own = there.setdefault(owners[weight], {})  # type: ignore[index]  # a hook gets the leaf
        assert weight.grad is not None
        own[weight], weight.grad = weight.grad, None
        if len(own) == len(owners[weight].weights):  # type: ignore[index]
            finish(owners[weight])  # type: ignore[index]

    leaves = [weight for weight, unit in owners.items() if unit not in standing_in]
    with contextlib.ExitStack() as stack:
        for weight in leaves:
            stack.callback(setattr, weight, "grad", weight.grad)
            weight.grad = None
            handle = weight.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
            stack.callback(handle.remove)
        if leaves:
            torch.autograd.backward(target, inputs=leaves)
    for unit in [unit for unit in units if unit in there]:
        finish(unit)
    return [unit for unit in units if unit not in done]


Uncovered = Literal["dense", "error", "skip"]
"""What to do with parameters that no factor rule covers."""
_OTHER_WAYS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, UserWarning)
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-7}


@dataclass(frozen=True, slots=True, eq=False)
class ChosenRules:
    """How every unit is captured from now on."""

    pieces: dict[LayerUnit, LayerGradients]
    """The units as they are captured, and their gradients of the batch."""
    patterns: dict[LayerUnit, tuple[Any, ...]]
    """How each unit's modules were called, see `call_pattern`."""
    unused: tuple[LayerUnit, ...]
    aside: frozenset[LayerUnit]
    """Those of the unused whose modules the backward pass came by all the same."""
    skipped: tuple[LayerUnit, ...]
    tolerance: float
    """The relative error that a proof accepts, by the precision that the model computes in."""
    example: torch.Tensor
    """A tensor of the dtype and device of gradients."""
    tokens: int | None
    """T, where samples have tokens `[B, T]`."""


def choose_rules(
    tracer: Tracer,
    units: Sequence[LayerUnit],
    batch: Any,
    *,
    uncovered: Uncovered,
    single: Collection[str] = (),
) -> ChosenRules:
    """Choose a way for each unit that gives autograd's gradients on this batch.

    Units named in `single` are captured by passes over single samples, whatever else would fit.
    Cost: one forward and two backward passes, and for what only the last resort covers, one pass
    per sample. Of autograd's gradients one layer's is held at a time, and those that no factors give.
    """
    modules = [*watched(units), *tracer.model.modules()]
    dtypes: set[torch.dtype] = set()  # of what autograd saves: parts of a model may use fewer bits

    def pack(tensor: Tensor) -> Tensor:
        dtypes.add(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        measured, target, calls = tracer.forward(modules, batch)
    floating = {dtype for dtype in dtypes if dtype.is_floating_point} | {target.dtype}
    fill(calls, target, retain=True)
    search = _RuleSearch(
        tracer,
        batch,
        target,
        calls_by_module(calls),
        tolerance=max(_TOLERANCE.get(dtype, 1e-2) for dtype in floating),
        single=single,
    )
    unused = backward_per_layer((target * search.weights).sum(), units, search.arrived)
    found, last_resort = search.rules, search.try_dense()
    used = [unit for unit in units if unit in found or unit in search.truths]
    dense = [unit for unit in used if unit in last_resort or found[unit][0].rule in DENSE_RULES]
    if dense and uncovered == "error":
        raise CaptureError(
            "some parameters are covered by no factor rule",
            found=", ".join(f"{unit.name} ({unit.type})" for unit in dense),
            fix="pass uncovered='dense' to keep their whole gradients, or 'skip' to leave them out",
        )
    if dense and uncovered == "skip":
        for unit in dense:
            found.pop(unit, None)
    elif last_resort:
        search.try_whole_model(last_resort)
    return ChosenRules(
        pieces={found[unit][0]: found[unit][1] for unit in used if unit in found},
        patterns={
            rule: call_pattern(
                calls_of(rule, search.calls), search.rows, spread=rule.axis == "shared"
            )
            for rule, _ in found.values()
        },
        unused=tuple(unused),
        aside=frozenset(unit for unit in unused if passed(unit, search.calls)),
        skipped=tuple(dense) if uncovered == "skip" else (),
        tolerance=search.tolerance,
        example=target.detach(),
        tokens=None if measured.tokens is None else measured.tokens.shape[1],
    )


class _RuleSearch:
    """Tries the ways to capture each unit against autograd's gradient, on one batch."""

    def __init__(
        self,
        tracer: Tracer,
        batch: Any,
        target: Tensor,
        calls: dict[nn.Module, list[LayerCall]],
        *,
        tolerance: float,
        single: Collection[str],
    ) -> None:
        self.tracer, self.batch, self.target, self.calls = tracer, batch, target, calls
        self.tolerance, self.single, self.rows = tolerance, single, batch_size(batch)
        self.weights = random_weights(target, seed=0)
        self.rules: dict[LayerUnit, tuple[LayerUnit, LayerGradients]] = {}
        self.truths: dict[LayerUnit, Tensor] = {}
        """Autograd's gradients of the units that no factors give."""

    def arrived(self, unit: LayerUnit, truth: Tensor) -> None:
        """Try the factor rules on a unit whose gradient is there; others wait for the end of the pass."""
        if unit.name not in self.single and not is_shared(unit, self.calls, self.rows):
            ways = ways_to_capture(self.tracer.model, unit, self.calls, rows=self.rows)
            cheap = itertools.takewhile(lambda way: way.rule not in DENSE_RULES, ways)
            if self._try(unit, cheap, truth):
                return
        self.truths[unit] = truth

    def try_dense(self) -> list[LayerUnit]:
        """Try the ways that run a layer once more; returns the units that none of them fits."""
        rest = []
        for unit, truth in self.truths.items():
            if unit.name not in self.single:
                if is_shared(unit, self.calls, self.rows) and self._try_spread(unit, truth):
                    continue
                with torch.no_grad():
                    ways = ways_to_capture(self.tracer.model, unit, self.calls, rows=self.rows)
                    if self._try(unit, ways, truth):
                        continue
            rest.append(unit)
        return rest

    def _try(self, unit: LayerUnit, ways: Iterable[LayerUnit], truth: Tensor) -> bool:
        for way in ways:
            try:
                piece = unit_gradients(way, calls_of(way, self.calls), rows=self.rows)
                is_right = self._fits(piece, truth)
            except _OTHER_WAYS:
                # A layer that is called in another way than its rule or its first sample expects:
                # the next way is tried, and the last one works for every model.
                continue
            if is_right:
                self.rules[unit] = way, piece
                return True
        return False

    def _try_spread(self, unit: LayerUnit, truth: Tensor) -> bool:
        """Spread the unit's output to all samples, if the model then says and learns the same."""
        way = dataclasses.replace(unit, axis="shared")
        alone = dataclasses.replace(self.tracer, units=[way])
        try:
            _, again, calls = alone.forward(list(unit.modules), self.batch)
            if not torch.equal(again, self.target):
                return False
            fill(calls, again)
            with torch.no_grad():
                piece = unit_gradients(way, calls, rows=self.rows)
                is_right = self._fits(piece, truth)
        except _OTHER_WAYS:
            return False
        if is_right:
            self.rules[unit] = way, piece
        return is_right

    def try_whole_model(self, units: Sequence[LayerUnit]) -> None:
        """The last resort: one pass over the model for each sample."""
        whole = {dataclasses.replace(unit, rule="whole"): unit for unit in units}
        measure, rows = self.tracer.measure, self.rows
        pieces = whole_model_gradients(list(whole), measure, self.batch, rows=rows)
        for way, piece in pieces.items():
            if not self._fits(piece, self.truths[whole[way]]):
                raise CaptureError(
                    f"layer {way.name}: the gradients of single samples do not add up to the batch's",
                    found="samples that influence each other, or randomness in the model",
                    fix="capture in eval mode (mode='eval'), without statistics over the batch",
                )
            self.rules[whole[way]] = way, piece

    def _fits(self, piece: LayerGradients, truth: Tensor) -> bool:
        weights = self.weights.unsqueeze(0).to(piece.rows.example)
        return fits(piece.form.weighted_sum(piece.rows, weights)[0], truth, self.tolerance)


def random_weights(target: Tensor, *, seed: int) -> Tensor:
    """Weights `[B]` between 0.5 and 1.5, the same for the same number of samples."""
    draws = torch.rand(len(target), generator=torch.Generator().manual_seed(seed))
    return draws.add_(0.5).to(target)


def is_shared(unit: LayerUnit, calls: dict[nn.Module, list[LayerCall]], rows: int) -> bool:
    """Whether an embedding is read once for all samples, as positions `[T]` or `[1, T]` are."""
    if unit.rule != "embedding" or rows < 2:
        return False
    own = [call for module in unit.modules for call in calls.get(module, ())]
    return bool(own) and all(call.input.shape[:1] != (rows,) for call in own)


def ways_to_capture(
    model: nn.Module, unit: LayerUnit, calls: dict[nn.Module, list[LayerCall]], *, rows: int
) -> Iterator[LayerUnit]:
    """Ways to capture a unit, the cheapest first."""
    if unit.rule not in DENSE_RULES and all(calls.get(module) for module in unit.modules):
        for axis in (*SAMPLE_AXES, *INTERLEAVED):
            own = [call for module in unit.modules for call in calls[module]]
            shapes = [shape for call in own for shape in (call.input.shape, call.shapes[0])]
            if all(possible(shape, rows, axis) for shape in shapes):
                yield dataclasses.replace(unit, axis=axis)
    holder = holder_that_ran(model, unit, set(calls)) if unit.modules[0] not in calls else None
    module = unit.modules[0] if unit.modules[0] in calls else holder[1] if holder else None
    if module is None or len(unit.modules) > 1:
        return
    first = getattr(module, "batch_first", True)
    lays: tuple[SampleAxis, ...] = SAMPLE_AXES if first else ("second", "first", "flat")
    for axis in lays:
        yield dataclasses.replace(unit, rule="module", modules=(module,), axis=axis)
    if module is not model:
        # Of the whole model, the last resort does the same.
        for axis in lays:
            yield dataclasses.replace(unit, rule="one by one", modules=(module,), axis=axis)


def fits(found: torch.Tensor, truth: torch.Tensor, tolerance: float) -> bool:
    """Whether a captured sum is autograd's, up to rounding."""
    if found.shape != truth.shape:
        return False
    scale = float(truth.norm())
    error = float((found.to(truth.dtype) - truth).norm())
    # Not "error > bound": a NaN must not pass, unless autograd finds the same.
    if error <= tolerance * scale:
        return True
    return bool(torch.equal(found.isfinite(), truth.isfinite()) and not truth.isfinite().all())


PROOF_ROWS = 16
"""Rows of a batch on which a new pattern is proved."""


@dataclass(slots=True, eq=False)
class RuleProofs:
    """The rules that are proved, by unit and pattern, and the proof of further ones."""

    originals: Mapping[str, LayerUnit]
    """The units as the model has them, by name."""
    forms: dict[LayerUnit, AnyForm]
    """The form of each unit's gradients, which stays the same where it can."""
    uncovered: Uncovered
    rows: int
    """Rows on which a new pattern is proved, at most."""
    tolerance: float = 0.0
    """The relative error that the proofs so far accepted."""
    proofs: int = 0
    """How many patterns were proved behind the first batch."""
    modules: dict[nn.Module, None] = field(default_factory=dict)
    """Modules whose calls are needed for some pattern."""
    _rules: dict[LayerUnit, dict[Pattern, LayerUnit | None]] = field(default_factory=dict)

    def spread(self, units: Iterable[LayerUnit]) -> set[nn.Module]:
        """Modules that all samples share a call of, in some pattern."""
        found = [rule for unit in units for rule in self._rules.get(unit, {}).values()]
        return {m for rule in found if rule and rule.axis == "shared" for m in rule.modules}

    def rules(self, units: Sequence[LayerUnit], calls: Calls, rows: int) -> Rules | None:
        """The proved rule of each unit for these calls; None if some pattern is new."""
        found: Rules = {}
        for unit in units:
            if unit.rule == "whole":
                found[unit] = unit  # one sample at a time, whatever the batch is
                continue
            known = self._rules[unit]
            pattern = call_pattern(calls_of(unit, calls), rows)
            if pattern not in known:
                return None
            found[unit] = known[pattern]
        return found

    def add_first(self, chosen: ChosenRules) -> None:
        """The rules that the first batch proved."""
        self.tolerance = chosen.tolerance
        for unit in chosen.pieces:
            self._rules[unit] = {chosen.patterns[unit]: unit}
        self.modules |= dict.fromkeys(watched(list(chosen.pieces)))

    def add_late(self, unit: LayerUnit) -> None:
        """A unit that no batch has used so far."""
        self._rules[unit] = {(): None}
        self.modules |= dict.fromkeys(watched([unit]))

    def prove(
        self, tracer: Tracer, units: Sequence[LayerUnit], batch: Any, ran: Collection[LayerUnit]
    ) -> Rules:
        """Rules that give autograd's gradients on some rows of this batch.

        On all of its rows where the first ones do not use every layer that ran.
        """
        self.proofs += 1
        rows = batch_size(batch)
        several = [unit for unit in units if unit.rule != "whole"]
        plain = Tracer(tracer.model, tracer.task, tracer.of)
        originals = [self.originals[unit.name] for unit in several]
        uncovered: Uncovered = "dense" if self.uncovered == "dense" else "error"
        found: dict[str, LayerUnit] = {}
        for count in dict.fromkeys((min(rows, self.rows), rows)):
            some = rows_of(batch, 0, count)
            chosen = choose_rules(plain, originals, some, uncovered=uncovered)
            found = {unit.name: unit for unit in chosen.pieces}
            self.tolerance = max(self.tolerance, chosen.tolerance)
            if all(unit.name in found for unit in ran):
                break
        rules: Rules = {unit: found.get(unit.name) for unit in several}
        self.modules |= dict.fromkeys(watched([rule for rule in rules.values() if rule]))
        return rules | {unit: unit for unit in units if unit.rule == "whole"}

    def add(self, rules: Rules, calls: Calls, rows: int) -> None:
        """Take rules for the patterns of a batch; two for one pattern are a contradiction."""
        contradicted = []
        for unit, rule in rules.items():
            if unit.rule == "whole":
                continue
            known = self._rules[unit]
            pattern = call_pattern(calls_of(unit, calls), rows)
            before = known.get(pattern)
            if before is None:
                known[pattern] = rule
            elif rule is not None:
                names = {before.rule, rule.rule}
                is_same = len(names) == 1 or names == {"module", "one by one"}
                if before.axis != rule.axis or not is_same:
                    contradicted.append(unit.name)
        if contradicted:
            raise rows_moved(contradicted)


def rows_moved(names: Sequence[str], row: int | None = None) -> BatchMismatchError:
    """The error about layers whose rows are not where the first batch had them."""
    where = "a later batch" if row is None else f"sample {row}"
    return BatchMismatchError(
        f"layer {names[0]}: the gradient of {where} is not autograd's",
        Adjustments(single=frozenset(names)),
        found=f"rows of a later batch that lie elsewhere than those of the first one, in "
        f"{len(names)} layers: {', '.join(names[:4])}",
        fix="keep the order of samples inside of the model; or capture with batches of one row",
    )
