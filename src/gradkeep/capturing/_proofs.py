"""Proofs for batches unlike those before: the rule of each layer for each pattern of its calls.

A rule that autograd confirmed on one batch holds for batches whose layers are called in the same way:
one row or several, the first dimension the samples or not, one call or several. Any other pattern is
proved on some rows of the batch that shows it first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gradkeep.capturing._adjustments import Adjustments, BatchUnlikeFirst
from gradkeep.capturing._batches import batch_size, rows_of
from gradkeep.capturing._calls import call_pattern
from gradkeep.capturing._rule_choice import choose_rules
from gradkeep.capturing._tracer import Tracer
from gradkeep.capturing.rules._units import watched

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from torch import nn

    from gradkeep.capturing._calls import LayerCall
    from gradkeep.capturing._rule_choice import ChosenRules, Uncovered
    from gradkeep.capturing.rules._units import LayerUnit
    from gradkeep.factors._form import AnyForm

    Calls = Mapping[nn.Module, Sequence[LayerCall]]
    Pattern = tuple[Any, ...]
    Rules = dict[LayerUnit, LayerUnit | None]
    """The unit by which each is captured in a batch; None: the loss does not depend on it."""

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
