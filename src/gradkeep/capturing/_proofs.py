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
from gradkeep.capturing._calls import LayerCall, call_pattern, fill
from gradkeep.capturing._keeping import Adjustments, BatchUnlikeFirst
from gradkeep.capturing._tracer import DENSE_RULES, Tracer, passed
from gradkeep.capturing.rules._any_module import whole_model_gradients
from gradkeep.capturing.rules._layers import INTERLEAVED, SAMPLE_AXES, possible
from gradkeep.capturing.rules._rules import LayerUnit, holder_that_ran, unit_gradients, watched
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from gradkeep.capturing._calls import LayerCall
    from gradkeep.capturing.rules._layers import LayerGradients, SampleAxis
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.factors._form import AnyForm

    Calls = Mapping[nn.Module, Sequence[LayerCall]]
    Pattern = tuple[Any, ...]
    Rules = dict[LayerUnit, LayerUnit | None]
    """The unit by which each is captured in a batch; None: the loss does not depend on it."""


def told_of_gradients(
    target: Tensor, units: Sequence[LayerUnit], tell: Callable[[LayerUnit, Tensor], None]
) -> list[LayerUnit]:
    """Tell of each unit's gradient `[P]` of a scalar, and give the units that have none.

    A unit is told of when the gradients of all its weights are there; those whose weights do not all
    take part come last. Nothing but what is told is held: a model's gradients take as much as it does.
    Only of what stands in for other weights, as for those of 16 bits, all gradients come at once.
    """
    standing_in = [unit for unit in units if has_torch_function(unit.weights)]
    unused = _all_at_once(target, standing_in, tell)
    leaves = [unit for unit in units if unit not in standing_in]
    unused += _one_by_one(target, leaves, tell) if leaves else []
    return [unit for unit in units if unit in unused]


def _all_at_once(
    target: Tensor, units: Sequence[LayerUnit], tell: Callable[[LayerUnit, Tensor], None]
) -> list[LayerUnit]:
    weights = [weight for unit in units for weight in unit.weights]
    if not weights:
        return []
    gradients = torch.autograd.grad(target, weights, retain_graph=True, allow_unused=True)
    there = {w: g for w, g in zip(weights, gradients, strict=True) if g is not None}
    used = [unit for unit in units if any(weight in there for weight in unit.weights)]
    with torch.no_grad():
        for unit in used:
            tell(unit, _flat(unit, there))
    return [unit for unit in units if unit not in used]


def _one_by_one(
    target: Tensor, units: Sequence[LayerUnit], tell: Callable[[LayerUnit, Tensor], None]
) -> list[LayerUnit]:
    owners = {weight: unit for unit in units for weight in unit.weights}
    there: dict[LayerUnit, dict[nn.Parameter, Tensor]] = {}

    @torch.no_grad()
    def arrived(weight: Tensor) -> None:
        unit = owners[weight]  # type: ignore[index]  # a leaf's hook is given the leaf
        own = there.setdefault(unit, {})
        assert weight.grad is not None
        own[weight], weight.grad = weight.grad, None  # type: ignore[index]
        if len(own) == len(unit.weights):
            tell(unit, _flat(unit, there.pop(unit)))
            done.add(unit)

    done: set[LayerUnit] = set()
    before = {weight: weight.grad for weight in owners}
    with contextlib.ExitStack() as stack:
        for weight in owners:
            weight.grad = None
            handle = weight.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
            stack.callback(handle.remove)
        try:
            torch.autograd.backward(target, inputs=list(owners))
        finally:
            for weight, gradient in before.items():
                weight.grad = gradient
    for unit in [unit for unit in units if unit in there]:
        tell(unit, _flat(unit, there.pop(unit)))
        done.add(unit)
    return [unit for unit in units if unit not in done]


def _flat(unit: LayerUnit, own: dict[nn.Parameter, Tensor]) -> Tensor:
    parts = [
        own[weight].to_dense().reshape(-1)  # of embeddings with sparse=True
        if weight in own
        else torch.zeros_like(weight).reshape(-1)
        for weight in unit.weights
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


Uncovered = Literal["dense", "error", "skip"]
"""What to do with parameters that no factor rule covers."""
_OTHER_WAYS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, UserWarning)
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-7}
_LOW = 1e-2


@dataclass(frozen=True, slots=True, eq=False)
class ChosenRules:
    """How every unit is captured from now on."""

    units: tuple[LayerUnit, ...]
    pieces: dict[LayerUnit, LayerGradients]
    """The gradients of the batch."""
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
    rows = batch_size(batch)
    modules = [*watched(units), *tracer.model.modules()]
    with _seeing_precision() as precision:
        measured, target, calls = tracer.forward(modules, batch)
    tolerance = precision.tolerance(target.dtype)
    weights = torch.rand(rows, generator=torch.Generator().manual_seed(0)).add_(0.5).to(target)
    fill(calls, target, retain=True)
    by_module: dict[nn.Module, list[LayerCall]] = {}
    for call in calls:
        by_module.setdefault(call.module, []).append(call)
    truths: dict[LayerUnit, torch.Tensor] = {}
    found: dict[LayerUnit, tuple[LayerUnit, LayerGradients]] = {}

    def arrived(unit: LayerUnit, truth: torch.Tensor) -> None:
        if unit.name not in single and not is_shared(unit, by_module, rows):
            ways = ways_to_capture(tracer.model, unit, by_module, rows=rows)
            cheap = itertools.takewhile(lambda way: way.rule not in DENSE_RULES, ways)
            settled = _first_that_fits(cheap, by_module, truth, weights, rows, tolerance)
            if settled is not None:
                found[unit] = settled
                return
        truths[unit] = truth  # of what runs the layer once more, when the pass is over

    unused = told_of_gradients((target * weights).sum(), units, arrived)
    left: list[LayerUnit] = []
    for unit, truth in truths.items():
        if unit.name in single:
            left.append(unit)
            continue
        if is_shared(unit, by_module, rows):
            shared = _spread(tracer, unit, truth, weights, batch, target, tolerance)
            if shared is not None:
                found[unit] = shared
                continue
        with torch.no_grad():
            ways = ways_to_capture(tracer.model, unit, by_module, rows=rows)
            settled = _first_that_fits(ways, by_module, truth, weights, rows, tolerance)
        if settled is None:
            left.append(unit)
        else:
            found[unit] = settled
    used = [unit for unit in units if unit in found or unit in truths]
    dense = [unit for unit in used if unit in left or found[unit][0].rule in DENSE_RULES]
    if dense and uncovered != "dense":
        if uncovered == "error":
            raise _uncovered(dense)
        for unit in dense:
            found.pop(unit, None)
        left = []
    if left:
        found |= _by_the_last_resort(tracer, left, truths, weights, batch, tolerance)
    return ChosenRules(
        units=tuple(found[unit][0] for unit in used if unit in found),
        pieces={found[unit][0]: found[unit][1] for unit in used if unit in found},
        patterns={rule: _pattern(rule, by_module, rows) for rule, _ in found.values()},
        unused=tuple(unused),
        aside=frozenset(unit for unit in unused if passed(unit, by_module)),
        skipped=tuple(dense) if uncovered == "skip" else (),
        tolerance=tolerance,
        example=target.detach(),
        tokens=None if measured.tokens is None else measured.tokens.shape[1],
    )


@dataclass(slots=True)
class _Precision:
    """The dtypes of what autograd saves: a model may compute parts of itself with fewer bits."""

    dtypes: set[torch.dtype]

    def tolerance(self, own: torch.dtype) -> float:
        """The relative error of the least precise dtype."""
        known = {dtype for dtype in self.dtypes if dtype.is_floating_point} | {own}
        return max(_TOLERANCE.get(dtype, _LOW) for dtype in known)


@contextlib.contextmanager
def _seeing_precision() -> Iterator[_Precision]:
    seen = _Precision(set())

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.dtypes.add(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield seen


def _pattern(
    rule: LayerUnit, calls: dict[nn.Module, list[LayerCall]], rows: int
) -> tuple[Any, ...]:
    own = [call for module in dict.fromkeys(rule.modules) for call in calls.get(module, ())]
    return call_pattern(own, rows, spread=rule.axis == "shared")


def is_shared(unit: LayerUnit, calls: dict[nn.Module, list[LayerCall]], rows: int) -> bool:
    """Whether an embedding is read once for all samples, as positions `[T]` or `[1, T]` are."""
    if unit.rule != "embedding" or rows < 2:
        return False
    own = [call for module in unit.modules for call in calls.get(module, ())]
    return bool(own) and all(call.input.shape[:1] != (rows,) for call in own)


def _spread(
    tracer: Tracer,
    unit: LayerUnit,
    truth: torch.Tensor,
    weights: torch.Tensor,
    batch: Any,
    target: torch.Tensor,
    tolerance: float,
) -> tuple[LayerUnit, LayerGradients] | None:
    """The unit with its output spread to all samples, if the model then says and learns the same."""
    rows = batch_size(batch)
    candidate = dataclasses.replace(unit, axis="shared")
    alone = dataclasses.replace(tracer, units=[candidate])
    try:
        _, again, calls = alone.forward(list(unit.modules), batch)
        if not torch.equal(again, target):
            return None
        fill(calls, again)
        with torch.no_grad():
            piece = unit_gradients(candidate, calls, rows=rows)
            total = _weighted_sum(piece, weights)
    except _OTHER_WAYS:
        return None
    return (candidate, piece) if fits(total, truth, tolerance) else None


def _first_that_fits(
    ways: Iterable[LayerUnit],
    calls: dict[nn.Module, list[LayerCall]],
    truth: torch.Tensor,
    weights: torch.Tensor,
    rows: int,
    tolerance: float,
) -> tuple[LayerUnit, LayerGradients] | None:
    for candidate in ways:
        own = [call for module in dict.fromkeys(candidate.modules) for call in calls[module]]
        try:
            piece = unit_gradients(candidate, own, rows=rows)
            total = _weighted_sum(piece, weights)
        except _OTHER_WAYS:
            # A layer that is called in another way than its rule or its first sample expects:
            # the next way is tried, and the last one works for every model.
            continue
        if fits(total, truth, tolerance):
            return candidate, piece
    return None


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


def _by_the_last_resort(
    tracer: Tracer,
    units: Sequence[LayerUnit],
    truths: dict[LayerUnit, torch.Tensor],
    weights: torch.Tensor,
    batch: Any,
    tolerance: float,
) -> dict[LayerUnit, tuple[LayerUnit, LayerGradients]]:
    rows = batch_size(batch)
    whole = {dataclasses.replace(unit, rule="whole"): unit for unit in units}
    pieces = whole_model_gradients(list(whole), tracer.target, tracer.model, batch, rows=rows)
    found = {}
    for unit, piece in pieces.items():
        total = _weighted_sum(piece, weights)
        if not fits(total, truths[whole[unit]], tolerance):
            raise CaptureError(
                f"layer {unit.name}: the gradients of single samples do not add up to the batch's",
                found="samples that influence each other, or randomness in the model",
                expected="a loss per sample that depends on that sample alone",
                fix="capture in eval mode (mode='eval'), without statistics over the batch",
            )
        found[whole[unit]] = (unit, piece)
    return found


def _weighted_sum(piece: LayerGradients, weights: torch.Tensor) -> torch.Tensor:
    return piece.form.weighted_sum(piece.rows, weights.unsqueeze(0).to(piece.rows.example))[0]


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


def _uncovered(units: Sequence[LayerUnit]) -> CaptureError:
    names = ", ".join(f"{unit.name} ({unit.type})" for unit in units)
    return CaptureError(
        "some parameters are covered by no factor rule",
        found=names,
        expected="layers with a rule: linear, convolution, embedding, normalisation",
        fix="pass uncovered='dense' to keep their whole gradients, or 'skip' to leave them out",
    )


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
    _rules: dict[LayerUnit, dict[Pattern, LayerUnit | None]] = field(default_factory=dict)
    _modules: dict[nn.Module, None] = field(default_factory=dict)

    @property
    def modules(self) -> Collection[nn.Module]:
        """Modules whose calls are needed for some pattern."""
        return self._modules

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
            pattern = call_pattern(_own(unit, calls), rows)
            if pattern not in known:
                return None
            found[unit] = known[pattern]
        return found

    def add_first(self, chosen: ChosenRules) -> None:
        """The rules that the first batch proved."""
        self.tolerance = chosen.tolerance
        for unit in chosen.units:
            self._rules[unit] = {chosen.patterns[unit]: unit}
            self._modules.update(dict.fromkeys(watched([unit])))

    def add_late(self, unit: LayerUnit) -> None:
        """A unit that no batch has used so far."""
        self._rules[unit] = {(): None}
        self._modules.update(dict.fromkeys(watched([unit])))

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
            found = {unit.name: unit for unit in chosen.units}
            self.tolerance = max(self.tolerance, chosen.tolerance)
            if all(unit.name in found for unit in ran):
                break
        rules: Rules = {unit: found.get(unit.name) for unit in several}
        for rule in rules.values():
            if rule is not None:
                self._modules.update(dict.fromkeys(watched([rule])))
        return rules | {unit: unit for unit in units if unit.rule == "whole"}

    def add(self, rules: Rules, calls: Calls, rows: int) -> None:
        """Take rules for the patterns of a batch; two for one pattern are a contradiction."""
        contradicted = []
        for unit, rule in rules.items():
            if unit.rule == "whole":
                continue
            known = self._rules[unit]
            pattern = call_pattern(_own(unit, calls), rows)
            before = known.get(pattern)
            if before is not None and rule is not None and not _is_same_rule(before, rule):
                contradicted.append(unit.name)
            elif before is None:
                known[pattern] = rule
        if contradicted:
            raise rows_moved(contradicted)

    def unused_before(
        self, units: Sequence[LayerUnit], candidates: Sequence[LayerUnit]
    ) -> BatchUnlikeFirst:
        """The error about layers that run for the first time, of all that no batch has used."""
        error = BatchUnlikeFirst.needing(
            Adjustments(late=frozenset(unit.name for unit in units)),
            f"layer {units[0].name} is used by this batch, but not by the first one",
            fix="leave the layer out, or begin with a batch that uses it",
        )
        error.candidates = frozenset(unit.name for unit in candidates)
        return error


def _own(unit: LayerUnit, calls: Calls) -> list[LayerCall]:
    return [call for module in dict.fromkeys(unit.modules) for call in calls.get(module, ())]


def _is_same_rule(one: LayerUnit, other: LayerUnit) -> bool:
    rules = {one.rule, other.rule}
    return one.axis == other.axis and (len(rules) == 1 or rules == {"module", "one by one"})


def rows_moved(names: Sequence[str], row: int | None = None) -> BatchUnlikeFirst:
    """The error about layers whose rows are not where the first batch had them."""
    where = "a later batch" if row is None else f"sample {row}"
    return BatchUnlikeFirst.needing(
        Adjustments(single=frozenset(names)),
        f"layer {names[0]}: the gradient of {where} is not autograd's",
        found=f"rows of a later batch that lie elsewhere than those of the first one, in "
        f"{len(names)} layers: {', '.join(names[:4])}",
        expected="a model that keeps a sample at its place in the batch",
        fix="keep the order of samples inside of the model; or capture with batches of one row",
    )
