"""Choose the rule of each layer, and prove it against autograd.

With random weights w, autograd's gradient of sum_n w_n target_n must equal sum_n w_n gradient_n of the
captured rows. One backward pass checks all rows of all layers at once: a wrong rule, a mistaken batch
dimension or samples that influence each other do not pass. A rule that is proved on one batch holds for
batches whose layers are called in the same way; any other call pattern is proved on its first batch.
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

from gradkeep.capturing._batches import batch_size, leaves, rows_of
from gradkeep.capturing._storage import Adjustments, BatchMismatchError
from gradkeep.capturing._tracer import LayerCall, Tracer, call_pattern, fill, is_reached, use_call
from gradkeep.capturing.rules._layers import (
    SAMPLE_AXES,
    possible,
    whole_model_gradients,
)
from gradkeep.capturing.rules._rules import (
    BROADCAST,
    DENSE_RULES,
    LayerUnit,
    calls_by_module,
    calls_of,
    find_called_module,
    unit_gradients,
    watched_modules,
)
from gradkeep.capturing.rules._uses import (
    BroadcastUse,
    ProductUse,
    broadcast_uses,
    find_products,
    inner_shapes,
    product_use,
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
    """Rule by which each unit is captured in a batch; None if the loss does not depend on it."""


def backward_per_layer(
    target: Tensor, units: Sequence[LayerUnit], callback: Callable[[LayerUnit, Tensor], None]
) -> list[LayerUnit]:
    """Pass each unit's gradient `[P]` of a scalar to the callback, and return the units without one.

    A unit's callback runs when the gradients of all its weights exist; units whose weights are not all used
    come last. No other gradients are held: all of them take as much memory as the model. Only gradients of
    lazy parameters, such as 16-bit weights, are computed at once.
    """
    lazy = [unit for unit in units if has_torch_function(unit.weights)]
    gradients_by_unit: dict[LayerUnit, dict[Tensor, Tensor]] = {}
    done: set[LayerUnit] = set()
    weights = [weight for unit in lazy for weight in unit.weights]
    owners = {weight: unit for unit in units for weight in unit.weights}
    if weights:
        gradients = torch.autograd.grad(target, weights, retain_graph=True, allow_unused=True)
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                gradients_by_unit.setdefault(owners[weight], {})[weight] = gradient

    @torch.no_grad()
    def finish(unit: LayerUnit) -> None:
        own = gradients_by_unit.pop(unit)
        parts = [
            # Embeddings with sparse=True have sparse gradients.
            (own[w].to_dense() if w in own else torch.zeros_like(w)).reshape(-1)
            for w in unit.weights
        ]
        done.add(unit)
        callback(unit, parts[0] if len(parts) == 1 else torch.cat(parts))

    def hook(weight: Tensor) -> None:
        own = gradients_by_unit.setdefault(owners[weight], {})  # type: ignore[index]  # a hook gets the leaf
        assert weight.grad is not None
        own[weight], weight.grad = weight.grad, None
        if len(own) == len(owners[weight].weights):  # type: ignore[index]
            finish(owners[weight])  # type: ignore[index]

    leaves = [weight for weight, unit in owners.items() if unit not in lazy]
    with contextlib.ExitStack() as stack:
        for weight in leaves:
            stack.callback(setattr, weight, "grad", weight.grad)
            weight.grad = None
            handle = weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            stack.callback(handle.remove)
        if leaves:
            torch.autograd.backward(target, inputs=leaves)
    for unit in [unit for unit in units if unit in gradients_by_unit]:
        finish(unit)
    return [unit for unit in units if unit not in done]


Uncovered = Literal["dense", "error", "skip"]
"""Treatment of parameters without a factor rule."""
_RULE_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, UserWarning)
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-7}


@dataclass(frozen=True, slots=True, eq=False)
class ChosenRules:
    """Rules by which units are captured from now on."""

    pieces: dict[LayerUnit, LayerGradients]
    """Units with their rules, and their gradients of the batch."""
    patterns: dict[LayerUnit, tuple[Any, ...]]
    """Call pattern of each unit's modules, see `call_pattern`."""
    unused: tuple[LayerUnit, ...]
    reached: frozenset[LayerUnit]
    """Unused units whose modules the backward pass reached nevertheless."""
    skipped: tuple[LayerUnit, ...]
    tolerance: float
    """Relative error that a proof accepts, by the model's precision."""
    example: torch.Tensor
    """A tensor with the dtype and device of gradients."""
    tokens: int | None
    """T, if samples have tokens `[B, T]`."""


def choose_rules(
    tracer: Tracer,
    units: Sequence[LayerUnit],
    batch: Any,
    *,
    uncovered: Uncovered,
    single: Collection[str] = (),
    copies: Mapping[str, tuple[tuple[int, ...], ...]] | None = None,
) -> ChosenRules:
    """Choose a rule for each unit that gives autograd's gradients on this batch.

    Units named in `single` are captured by passes over single samples; `copies` are the shapes that samples'
    copies of parameters had in earlier batches. Cost: one forward and two backward
    passes, and one pass per sample for units that only the last resort covers. Only one layer's gradient
    by autograd is held at a time, plus those of units without a factor rule.
    """
    modules = [*watched_modules(units), *tracer.model.modules()]
    dtypes: set[torch.dtype] = set()  # of saved tensors: parts of a model may use fewer bits

    def pack(tensor: Tensor) -> Tensor:
        dtypes.add(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        measured, target, calls = tracer.forward(modules, batch)
    products = product_uses(units, calls)
    calls += map(use_call, find_products(target, products.values()))
    floating = {dtype for dtype in dtypes if dtype.is_floating_point} | {target.dtype}
    fill(calls, target, retain=True)
    tolerance = max(_TOLERANCE.get(dtype, 1e-2) for dtype in floating)
    by_module = calls_by_module(calls)
    search = _RuleSearch(
        tracer, batch, target, by_module, products, tolerance, single, copies or {}
    )
    unused = backward_per_layer((target * search.weights).sum(), units, search.add_gradient)
    rules, last_resort = search.rules, search.try_dense()
    used = [unit for unit in units if unit in rules or unit in search.expected]
    general = {unit for unit, (rule, _) in rules.items() if rule.rule in (*DENSE_RULES, BROADCAST)}
    dense = [unit for unit in used if unit in last_resort or unit in general]
    if dense and uncovered == "error":
        raise CaptureError(
            "some parameters have no factor rule",
            code="capture.uncovered",
            found=", ".join(f"{unit.name} ({unit.type})" for unit in dense),
            fix="Pass uncovered='dense' to store their whole gradients, or 'skip' to leave them out.",
        )
    if dense and uncovered == "skip":
        for unit in dense:
            rules.pop(unit, None)
    elif last_resort:
        search.try_whole_model(last_resort)
    return ChosenRules(
        pieces={rules[unit][0]: rules[unit][1] for unit in used if unit in rules},
        patterns={
            rule: call_pattern(
                calls_of(rule, search.calls), search.rows, spread=rule.axis == "shared"
            )
            for rule, _ in rules.values()
        },
        unused=tuple(unused),
        reached=frozenset(unit for unit in unused if is_reached(unit, search.calls)),
        skipped=tuple(dense) if uncovered == "skip" else (),
        tolerance=search.tolerance,
        example=target.detach(),
        tokens=None if measured.tokens is None else measured.tokens.shape[1],
    )


@dataclass(slots=True, eq=False)
class _RuleSearch:
    """Try candidate rules of each unit against autograd's gradient, on one batch."""

    tracer: Tracer
    batch: Any
    target: Tensor
    calls: dict[nn.Module, list[LayerCall]]
    products: Mapping[LayerUnit, ProductUse]
    """Uses of weights in matrix products, without a call of their module."""
    tolerance: float
    single: Collection[str]
    copies: Mapping[str, tuple[tuple[int, ...], ...]]
    rules: dict[LayerUnit, tuple[LayerUnit, LayerGradients]] = field(default_factory=dict)
    expected: dict[LayerUnit, Tensor] = field(default_factory=dict)
    """Autograd's gradients of the units without a factor rule."""

    @property
    def rows(self) -> int:
        """Number of samples."""
        return len(self.target)

    @property
    def weights(self) -> Tensor:
        """Random weights `[B]` of the samples."""
        return random_weights(self.target, seed=0)

    def add_gradient(self, unit: LayerUnit, gradient: Tensor) -> None:
        """Try the factor rules on a unit with its gradient by autograd; others wait for the end."""
        if unit.name not in self.single and not is_shared(unit, self.calls, self.rows):
            candidates = self._candidates(unit)
            cheap = itertools.takewhile(lambda rule: rule.rule not in DENSE_RULES, candidates)
            if self._try(unit, cheap, gradient):
                return
        self.expected[unit] = gradient

    def try_dense(self) -> list[LayerUnit]:
        """Try the rules that run a layer again; return the units that none of them fits."""
        rest = []
        self._try_broadcast([unit for unit in self.expected if unit.name not in self.single])
        for unit, gradient in self.expected.items():
            if unit in self.rules:
                continue
            if unit.name not in self.single:
                if is_shared(unit, self.calls, self.rows) and self._try_spread(unit, gradient):
                    continue
                with torch.no_grad():
                    if self._try(unit, self._candidates(unit), gradient):
                        continue
            rest.append(unit)
        return rest

    def _candidates(self, unit: LayerUnit) -> Iterator[LayerUnit]:
        use = self.products.get(unit)
        return candidate_rules(self.tracer.model, unit, self.calls, rows=self.rows, product=use)

    def _try_broadcast(self, units: Sequence[LayerUnit]) -> None:
        """Replace parameters by a copy per sample, if that changes neither the target nor the gradient.

        Shapes of the copies are found on few samples, one parameter of each kind of module after the other,
        and proved on the whole batch, all together. A single sample leaves them open.
        """
        tensors = [leaf for leaf in leaves(self.batch) if isinstance(leaf, torch.Tensor)]
        sizes = {size for tensor in tensors for size in tensor.shape[1:]}
        # A number that the copies' dimension cannot be mistaken for.
        count = next((n for n in range(2, self.rows) if n not in sizes), self.rows)
        few, expected = rows_of(self.batch, 0, count), self.target[:count]
        known: dict[tuple[Any, ...], tuple[int, ...] | None] = {}

        def inner_shape(unit: LayerUnit, at: int) -> tuple[int, ...] | None:
            shape = unit.weights[at].shape
            kind = type(unit.modules[0]), unit.parameters[at].name.rsplit(".", 1)[-1], shape
            if kind not in known:
                known[kind] = None
                for option in inner_shapes(shape):
                    is_used = self._runs(unit, at, option, few, expected)
                    if is_used is not None:
                        known[kind] = option
                    if is_used:
                        break
            return known[kind]

        rules: dict[LayerUnit, LayerUnit] = {}
        for unit in units:
            if unit.name in self.copies:
                uses = broadcast_uses(unit, self.copies[unit.name])
                rules[unit] = dataclasses.replace(unit, rule=BROADCAST, modules=uses)
            elif unit.rule == "module" and self.rows > 1:
                shapes = [inner_shape(unit, at) for at in range(len(unit.weights))]
                inner = [shape for shape in shapes if shape is not None]
                if len(inner) == len(shapes):
                    uses = broadcast_uses(unit, inner)
                    rules[unit] = dataclasses.replace(unit, rule=BROADCAST, modules=uses)
        if not rules:
            return
        with contextlib.suppress(Exception):  # as below
            uses_of_all = [use for rule in rules.values() for use in rule.modules]
            _, target, calls = self.tracer.forward(uses_of_all, self.batch)
            fill(calls, target)
            by_module = calls_by_module(calls)
            with torch.no_grad():
                for unit, rule in rules.items():
                    own = calls_of(rule, by_module)
                    if self._try(unit, [rule], self.expected[unit], own):
                        self.calls |= {use: by_module[use] for use in rule.modules}

    def _runs(
        self, unit: LayerUnit, at: int, inner: tuple[int, ...], few: Any, expected: Tensor
    ) -> bool | None:
        """Return whether the target depends on copies of a parameter in this shape; None if it changes."""
        part = dataclasses.replace(unit, weights=unit.weights[at : at + 1])
        with contextlib.suppress(Exception):  # the model may check its shapes, and raise anything
            _, target, calls = self.tracer.forward(broadcast_uses(part, [inner]), few)
            fill(calls, target)
            if torch.allclose(target, expected, rtol=1e-2, atol=1e-5):
                return calls[0].suffixes[0] is not None
        return None

    def _try(
        self,
        unit: LayerUnit,
        candidates: Iterable[LayerUnit],
        gradient: Tensor,
        calls: Sequence[LayerCall] | None = None,
    ) -> bool:
        for rule in candidates:
            # The layer may not be called as this rule expects; the last rule works for every model.
            with contextlib.suppress(*_RULE_ERRORS):
                own = calls_of(rule, self.calls) if calls is None else calls
                piece = unit_gradients(rule, own, rows=self.rows)
                if self._fits(piece, gradient):
                    self.rules[unit] = rule, piece
                    return True
        return False

    def _try_spread(self, unit: LayerUnit, gradient: Tensor) -> bool:
        """Expand the unit's output to all samples, if that changes neither the target nor the gradient."""
        rule = dataclasses.replace(unit, axis="shared")
        alone = dataclasses.replace(self.tracer, units=[rule])
        with contextlib.suppress(*_RULE_ERRORS):
            _, target, calls = alone.forward(list(unit.modules), self.batch)
            fill(calls, target)
            if torch.equal(target, self.target):
                with torch.no_grad():
                    return self._try(unit, [rule], gradient, calls)
        return False

    def try_whole_model(self, units: Sequence[LayerUnit]) -> None:
        """Run the model once per sample, as a last resort."""
        whole = {dataclasses.replace(unit, rule="whole"): unit for unit in units}
        measure, rows = self.tracer.measure, self.rows
        pieces = whole_model_gradients(list(whole), measure, self.batch, rows=rows)
        for rule, piece in pieces.items():
            if not self._fits(piece, self.expected[whole[rule]]):
                raise CaptureError(
                    f"layer {rule.name}: single samples' gradients do not add up to the batch's",
                    code="capture.gradients_do_not_add_up",
                    found="samples that influence each other, or randomness in the model",
                    fix="Capture in eval mode (mode='eval'), without batch statistics.",
                )
            self.rules[whole[rule]] = rule, piece

    def _fits(self, piece: LayerGradients, gradient: Tensor) -> bool:
        weights = self.weights.unsqueeze(0).to(piece.rows.example)
        return fits(piece.form.weighted_sum(piece.rows, weights)[0], gradient, self.tolerance)


def random_weights(target: Tensor, *, seed: int) -> Tensor:
    """Draw weights `[B]` from 0.5 to 1.5, the same for the same number of samples."""
    draws = torch.rand(len(target), generator=torch.Generator().manual_seed(seed))
    return draws.add_(0.5).to(target)


def is_shared(unit: LayerUnit, calls: dict[nn.Module, list[LayerCall]], rows: int) -> bool:
    """Return True if an embedding is read once for all samples, as positions `[T]` or `[1, T]`."""
    if unit.rule != "embedding" or rows < 2:
        return False
    own = [call for module in unit.modules for call in calls.get(module, ())]
    return bool(own) and all(call.input.shape[:1] != (rows,) for call in own)


def product_uses(
    units: Iterable[LayerUnit], calls: Iterable[LayerCall]
) -> dict[LayerUnit, ProductUse]:
    """Return the matrices of modules without a rule, or that were not called, such as those of attention."""
    called = {call.module for call in calls}
    uses = {
        unit: product_use(unit)
        for unit in units
        if unit.rule in DENSE_RULES or unit.modules[0] not in called
    }
    return {unit: use for unit, use in uses.items() if use is not None}


def candidate_rules(
    model: nn.Module,
    unit: LayerUnit,
    calls: dict[nn.Module, list[LayerCall]],
    *,
    rows: int,
    product: ProductUse | None = None,
) -> Iterator[LayerUnit]:
    """Yield rules that may capture a unit, the cheapest first; `product` is its use in matrix products."""
    if product is not None and calls.get(product):
        shapes = [shape for call in calls[product] for shape in (call.input_shape, call.shapes[0])]
        for axis in ("first", "flat", "interleaved"):
            if all(possible(shape, rows, axis) for shape in shapes):
                yield dataclasses.replace(unit, rule="linear", modules=(product,), axis=axis)
    if unit.rule not in DENSE_RULES and all(calls.get(module) for module in unit.modules):
        own = [call for module in unit.modules for call in calls[module]]
        shapes = [shape for call in own for shape in (call.input.shape, call.shapes[0])]
        for axis in (*SAMPLE_AXES, "interleaved"):  # only a proof can distinguish it from flat
            if all(possible(shape, rows, axis) for shape in shapes):
                yield dataclasses.replace(unit, axis=axis)
    module = find_called_module(model, unit, calls)
    if module is None or len(unit.modules) > 1:
        return
    first = getattr(module, "batch_first", True)
    axes: tuple[SampleAxis, ...] = SAMPLE_AXES if first else ("second", "first", "flat")
    # One by one for the whole model is the last resort.
    for rule in ("module",) if module is model else ("module", "one by one"):
        for axis in axes:
            yield dataclasses.replace(unit, rule=rule, modules=(module,), axis=axis)


def fits(total: torch.Tensor, gradient: torch.Tensor, tolerance: float) -> bool:
    """Return True if a captured sum equals autograd's gradient up to rounding."""
    if total.shape != gradient.shape:
        return False
    scale = float(gradient.norm())
    error = float((total.to(gradient.dtype) - gradient).norm())
    # Not "error > bound": NaN must not pass, unless autograd's gradient has it too.
    if error <= tolerance * scale:
        return True
    return bool(
        torch.equal(total.isfinite(), gradient.isfinite()) and not gradient.isfinite().all()
    )


@dataclass(slots=True, eq=False)
class RuleProofs:
    """Proved rules by unit and call pattern; proves further ones."""

    originals: Mapping[str, LayerUnit]
    """Units as the model has them, by name."""
    forms: dict[LayerUnit, AnyForm]
    """Form of each unit's gradients, kept in later batches if possible."""
    uncovered: Uncovered
    rows: int
    """Largest number of rows on which a new pattern is proved."""
    tolerance: float = 0.0
    """Relative error that the proofs so far accepted."""
    proofs: int = 0
    """Number of patterns proved after the first batch."""
    modules: dict[nn.Module, None] = field(default_factory=dict)
    """Modules whose calls are needed for some pattern."""
    _rules: dict[LayerUnit, dict[Pattern, LayerUnit | None]] = field(default_factory=dict)

    def spread(self, units: Iterable[LayerUnit]) -> set[nn.Module]:
        """Return the modules of which all samples share a call, in some pattern."""
        rules = [rule for unit in units for rule in self._rules.get(unit, {}).values()]
        return {m for rule in rules if rule and rule.axis == "shared" for m in rule.modules}

    def rules(self, units: Sequence[LayerUnit], calls: Calls, rows: int) -> Rules | None:
        """Return the proved rule of each unit for these calls; None if some pattern is new."""
        rules: Rules = {}
        for unit in units:
            if unit.rule == "whole":
                rules[unit] = unit  # runs one sample at a time
                continue
            known = self._rules[unit]
            pattern = call_pattern(calls_of(unit, calls), rows)
            if pattern not in known:
                return None
            rules[unit] = known[pattern]
        return rules

    def add_first(self, chosen: ChosenRules) -> None:
        """Add the rules that the first batch proved."""
        self.tolerance = chosen.tolerance
        for unit in chosen.pieces:
            self._rules[unit] = {chosen.patterns[unit]: unit}
        self.modules |= dict.fromkeys(watched_modules(list(chosen.pieces)))

    def add_late(self, unit: LayerUnit) -> None:
        """Add a unit that no batch has used yet."""
        self._rules[unit] = {(): None}
        self.modules |= dict.fromkeys(watched_modules([unit]))

    def prove(
        self, tracer: Tracer, units: Sequence[LayerUnit], batch: Any, ran: Collection[LayerUnit]
    ) -> Rules:
        """Find rules that give autograd's gradients on some rows of this batch.

        On all of its rows if the first ones do not use every layer that ran.
        """
        self.proofs += 1
        rows = batch_size(batch)
        several = [unit for unit in units if unit.rule != "whole"]
        plain = Tracer(tracer.model, tracer.task, tracer.of)
        originals = [self.originals[unit.name] for unit in several]
        uncovered: Uncovered = "dense" if self.uncovered == "dense" else "error"
        proved: dict[str, LayerUnit] = {}
        for count in dict.fromkeys((min(rows, self.rows), rows)):
            some = rows_of(batch, 0, count)
            chosen = choose_rules(
                plain, originals, some, uncovered=uncovered, copies=self._copies(several)
            )
            proved = {unit.name: unit for unit in chosen.pieces}
            self.tolerance = max(self.tolerance, chosen.tolerance)
            if all(unit.name in proved for unit in ran):
                break
        rules: Rules = {unit: proved.get(unit.name) for unit in several}
        self.modules |= dict.fromkeys(watched_modules([rule for rule in rules.values() if rule]))
        return rules | {unit: unit for unit in units if unit.rule == "whole"}

    def _copies(self, units: Iterable[LayerUnit]) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Return the shapes of samples' copies of parameters, by unit."""
        known = [rule for unit in units for rule in self._rules[unit].values() if rule is not None]
        return {
            rule.name: tuple(use.inner for use in rule.modules if isinstance(use, BroadcastUse))
            for rule in known
            if rule.rule == BROADCAST
        }

    def add(self, rules: Rules, calls: Calls, rows: int) -> None:
        """Add rules for the call patterns of a batch; raise if a pattern has two rules."""
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
            raise moved_rows_error(contradicted)


def moved_rows_error(names: Sequence[str], row: int | None = None) -> BatchMismatchError:
    """Build the error about layers whose rows lie elsewhere than in the first batch."""
    where = "a later batch" if row is None else f"sample {row}"
    return BatchMismatchError(
        f"layer {names[0]}: the captured gradient of {where} differs from autograd's",
        Adjustments(single=frozenset(names)),
        code="capture.rows_moved",
        found=f"rows that lie elsewhere than in the first batch: {', '.join(names[:4])}",
        fix="Keep the order of samples inside of the model, or capture with batches of one row.",
    )
