"""Compile a plan into actions per saved tensor and programs per request, and replay the programs.

Operators are replayed below autograd and leave no trace in the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from gradkeep.remat._rerun import TensorRef, build_content_hash, build_sample, is_uninitialized
from gradkeep.remat._tensors import SEQUENCES, collect_tensors, map_nested
from gradkeep.remat.planned._autograd_graph import GraphExpectations, parameter_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from collections.abc import Set as AbstractSet

    from gradkeep.remat._rerun import Fingerprint
    from gradkeep.remat._tensors import Geometry
    from gradkeep.remat.planned._autograd_graph import GraphBelow
    from gradkeep.remat.planned._evaluate import PlanEvaluation, PlanningProblem, Rebuild
    from gradkeep.remat.planned._modules import Source
    from gradkeep.remat.planned._search import States
    from gradkeep.remat.planned._trace import StepTrace, TracedOperation

Check = Literal["full", "sampled"]
"""Compare every byte of recomputed values, or a few elements."""


class ReplayArgument(NamedTuple):
    """A tensor among the arguments of a replayed operator."""

    value: int
    geometry: Geometry | None
    """View of the value; None for the stored tensor itself."""
    anchor: int | None
    """Recorded start in bytes, if the tensor moves within its storage, as a batch of a data set."""


class ReplayInstruction(NamedTuple):
    """One operator to replay."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    makes: tuple[tuple[int, int], ...]
    """Position among the results, and value."""
    renames: tuple[tuple[int, int], ...]
    """Overwritten values and the values that replace them."""
    frees: tuple[int, ...]
    grad_mode: bool
    random_slot: int
    """Slot whose random state it runs with; -1 for none."""
    device: str


@dataclass(frozen=True, slots=True)
class RebuildProgram:
    """Instructions for one request."""

    instructions: tuple[ReplayInstruction, ...]
    checks: tuple[tuple[int, Fingerprint], ...]
    """Values to compare with their fingerprints."""
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Treatment of one saved tensor, and its expected properties."""

    value: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    expected: GraphBelow | None
    """Expected autograd graph below it, if it is dropped."""
    drop: bool
    hold: bool
    """Its value is a source, and this is its first slot."""
    mark: bool
    """Recomputation may start from it."""
    plain: bool
    """It is kept, and nothing else is to be done."""
    fingerprint: Fingerprint | None
    """Fingerprint to take of a value that is dropped here."""
    leaf: int | None
    random_state: bool
    """Save the generator's state here."""
    releases: tuple[int, ...]
    """Values to release after this one."""
    view: Geometry | None
    """View of this slot on the recomputed value."""
    exact: Geometry
    """View of this slot on any tensor of its storage."""
    varies: bool
    """Its size may vary."""

    def fits(self, tensor: Tensor) -> bool:
        """Return True if a tensor has the recorded shape, strides and type."""
        if self.varies:
            return tensor.dtype is self.dtype and tensor.dim() == len(self.size)
        return (
            tensor.shape == self.size
            and tensor.dtype is self.dtype
            and tensor.stride() == self.stride
        )

    def fits_leaf(self, tensor: Tensor) -> bool:
        """Return True if a tensor fits and views the same parameter, if any."""
        return self.fits(tensor) and (self.leaf is None or self.leaf == parameter_id(tensor))


@dataclass(frozen=True, eq=False)
class CompiledPlan:
    """Everything that a run needs, by slot and by request."""

    trace: StepTrace
    problem: PlanningProblem
    states: States
    evaluation: PlanEvaluation
    slots: tuple[SlotPlan, ...]
    order: tuple[int, ...]
    work: tuple[RebuildProgram | None, ...]
    releases: tuple[tuple[int, ...], ...]
    constants: tuple[tuple[int, Source], ...]
    devices: tuple[str, ...]


def compile_plan(
    problem: PlanningProblem, states: States, evaluation: PlanEvaluation, *, check: Check = "full"
) -> CompiledPlan:
    """Compile a plan; `check` determines how recomputed values are compared."""
    return _PlanCompiler(problem, states, evaluation, check=check).run()


class _PlanCompiler:
    def __init__(
        self, problem: PlanningProblem, states: States, evaluation: PlanEvaluation, *, check: Check
    ) -> None:
        self.problem, self.states, self.evaluation = problem, states, evaluation
        self.trace = problem.trace
        self._check = check
        self.dropped = {
            c.value: c for c, state in zip(problem.candidates, states, strict=True) if state
        }
        self.first_slots: dict[int, int] = {}
        for number, slot in enumerate(self.trace.slots):
            if slot.is_final:
                self.first_slots.setdefault(slot.value, number)
        self._fingerprints = {
            value: self._fingerprint(value) for value in self.dropped if self._exact(value)
        }
        self.geometry: dict[int, Geometry] = {}
        """Geometry of the tensor that currently holds each value."""

    def run(self) -> CompiledPlan:
        trace, evaluation = self.trace, self.evaluation
        sources = set(evaluation.last_use)
        constants = sorted(
            value for value in sources if value in trace.sources and value not in self.first_slots
        )
        for value in sources:
            if value in self.first_slots and value not in self.dropped:
                self.geometry[value] = trace.slots[self.first_slots[value]].geometry
        work: list[RebuildProgram | None] = [None] * len(trace.order)
        releases: list[list[int]] = [[] for _ in trace.order]
        passing = set()
        for rebuild in evaluation.rebuilds:
            work[rebuild.at] = self._work(rebuild)
            if rebuild.value not in rebuild.retained:
                passing.add(rebuild.at)
        for value, at in evaluation.last_use.items():
            if value not in self.dropped:
                releases[at].append(value)
        for value, candidate in self.dropped.items():
            for at in candidate.requests:
                if at in passing or at == candidate.requests[-1]:
                    releases[at].append(value)
        return CompiledPlan(
            trace=trace,
            problem=self.problem,
            states=self.states,
            evaluation=evaluation,
            slots=self._slots(sources),
            order=trace.order,
            work=tuple(work),
            releases=tuple(map(tuple, releases)),
            constants=tuple((value, trace.sources[value]) for value in constants),
            devices=tuple(sorted({o.device for o in trace.operations if o.random})),
        )

    def _slots(self, sources: set[int]) -> tuple[SlotPlan, ...]:
        trace = self.trace
        states_at = {
            self.problem.random_state[number]
            for rebuild in self.evaluation.rebuilds
            for number in rebuild.operations
            if number in self.problem.random_state
        }
        # A value is held until all its sources are saved.
        pack_events = [slot.event for slot in trace.slots]
        late: dict[int, list[int]] = {}
        holding: set[int] = set()
        for value, candidate in self.dropped.items():
            known = self.problem.known[value]
            if known > candidate.first_pack:
                late.setdefault(pack_events.index(known), []).append(value)
                holding.add(value)
        plans = []
        expectations = GraphExpectations(slot.seen for slot in trace.slots)
        for number, slot in enumerate(trace.slots):
            first = self.first_slots[slot.value] == number
            drop = slot.value in self.dropped
            base = self._find_first_maker(slot.value)[1] if drop else slot.geometry
            mark = not drop and slot.value in sources
            if mark:
                expectations.mark(slot.seen)
            random_state = number in states_at
            plans.append(
                SlotPlan(
                    value=slot.value,
                    size=slot.geometry.size,
                    stride=slot.geometry.stride,
                    dtype=slot.geometry.dtype,
                    expected=expectations.below(slot.seen) if drop else None,
                    mark=mark,
                    plain=not (drop or mark or random_state or number in late),
                    drop=drop,
                    hold=first and (slot.value in holding if drop else slot.value in sources),
                    fingerprint=self._fingerprints.get(slot.value) if first else None,
                    leaf=slot.leaf,
                    random_state=random_state,
                    releases=tuple(late.get(number, ())),
                    view=None if base == slot.geometry else slot.geometry,
                    exact=slot.geometry,
                    varies=slot.varies,
                )
            )
        return tuple(plans)

    def _fingerprint(self, value: int) -> Fingerprint:
        """Return the fingerprint to compare of a dropped value."""
        shown = [slot.geometry for slot in self.trace.slots if slot.value == value]
        if self._check == "sampled":
            return build_sample(shown[0])
        operation, geometry = self._find_first_maker(value)
        return build_content_hash(geometry, shown, whole=not is_uninitialized(operation.name))

    def _find_first_maker(self, value: int) -> tuple[TracedOperation, Geometry]:
        """Return the operator that allocated the storage of a value, and the geometry of its result."""
        while True:
            maker = self.trace.values[value].maker
            assert maker is not None
            operation = self.trace.operations[maker]
            result = next(result for result in operation.makes if result.value == value)
            if result.position >= 0:
                return operation, result.geometry
            storage = self.trace.values[value].storage
            value = next(
                old for old in operation.overwrites if self.trace.values[old].storage == storage
            )

    def _exact(self, value: int) -> bool:
        maker = self.trace.values[value].maker
        assert maker is not None
        makes = self.trace.operations[maker].makes
        return all(result.exact for result in makes if result.value == value)

    def _work(self, rebuild: Rebuild) -> RebuildProgram:
        trace = self.trace
        stay = {*rebuild.retained, rebuild.value}
        # Store only results that are used here: another one may have been retained before, and must
        # neither be replaced nor freed.
        read = {value for n in rebuild.operations for value in trace.operations[n].reads}
        needed = stay | (read - rebuild.sources)
        last: dict[int, int] = {}
        made_here: list[int] = []
        for number in rebuild.operations:
            operation = trace.operations[number]
            makes = [m.value for m in operation.makes if m.position < 0 or m.value in needed]
            for value in (*operation.reads, *makes):
                last[value] = number
            made_here += makes
        frees: dict[int, list[int]] = {}
        for value in made_here:
            if value not in stay:
                frees.setdefault(last[value], []).append(value)
        instructions = []
        for number in rebuild.operations:
            operation = trace.operations[number]
            for result in operation.makes:
                if result.position < 0 or result.value in needed:
                    self.geometry[result.value] = self._find_first_maker(result.value)[1]
            instructions.append(
                build_instruction(
                    trace,
                    number,
                    self.geometry,
                    needed=needed,
                    frees=tuple(frees.get(number, ())),
                    random_slot=self.problem.random_state.get(number, -1),
                )
            )
        checks = tuple(
            (value, self._fingerprints[value]) for value in sorted(stay & self._fingerprints.keys())
        )
        return RebuildProgram(tuple(instructions), checks, tuple(sorted(rebuild.sources)))


def build_instruction(
    trace: StepTrace,
    number: int,
    geometry: dict[int, Geometry],
    *,
    needed: AbstractSet[int] | None = None,
    frees: tuple[int, ...] = (),
    random_slot: int = -1,
) -> ReplayInstruction:
    """Build the instruction to replay an operator.

    `geometry` holds the geometry of the tensors of values; only `needed` results are stored, by default
    all.
    """
    operation = trace.operations[number]
    assert operation.run is not None

    def argument(ref: TensorRef) -> ReplayArgument:
        whole = geometry.get(ref.value) == ref.geometry
        shown = None if whole else ref.geometry
        return ReplayArgument(ref.value, shown, trace.anchors.get(ref.value))

    makes = tuple(
        (result.position, result.value)
        for result in operation.makes
        if result.position >= 0 and (needed is None or result.value in needed)
    )
    new = {trace.values[m.value].storage: m.value for m in operation.makes if m.position < 0}
    overwritten = [(old, trace.values[old].storage) for old in operation.overwrites]
    return ReplayInstruction(
        run=operation.run,
        args=map_nested(operation.args, argument, TensorRef),
        kwargs=map_nested(operation.kwargs, argument, TensorRef),
        makes=makes,
        renames=tuple((old, new[storage]) for old, storage in overwritten if storage in new),
        frees=frees,
        grad_mode=operation.grad_mode,
        random_slot=random_slot,
        device=operation.device,
    )


def replay(
    instructions: Sequence[ReplayInstruction],
    values: list[Tensor | None],
    random_states: dict[tuple[int, str], Tensor],
) -> None:
    """Run instructions on `values`, which they read, fill and free."""

    def shown(argument: Any) -> Any:
        kind = type(argument)
        if kind in SEQUENCES:
            return [shown(item) for item in argument]
        if kind is not ReplayArgument:
            return argument
        value, geometry, anchor = argument
        base: Any = values[value]
        if geometry is None:
            return base
        if anchor is not None:
            geometry = geometry.moved(base, anchor)
        return geometry.on_storage_of(base)

    before = grad_mode = torch.is_grad_enabled()
    with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
        try:
            for step in instructions:
                if step.grad_mode is not grad_mode:
                    # Some kernels return a workspace only if gradients are enabled.
                    grad_mode = step.grad_mode
                    torch._C._set_grad_enabled(grad_mode)
                args: Any = list(map(shown, step.args))
                kwargs: Any = {name: shown(value) for name, value in step.kwargs}
                if step.random_slot < 0:
                    out: Any = step.run(*args, **kwargs)
                else:
                    state = random_states[step.random_slot, step.device]
                    out = _run_with_state(step.run, args, kwargs, step.device, state)
                results: Any = []
                collect_tensors((out,), results)
                for position, value in step.makes:
                    values[value] = results[position]
                for old, new in step.renames:
                    values[new], values[old] = values[old], None
                # Drop references before the next operator allocates memory.
                args = kwargs = out = results = None
                for value in step.frees:
                    values[value] = None
        finally:
            torch._C._set_grad_enabled(before)


def default_generator(device: str) -> torch.Generator:
    """Return the generator of random operators on a device."""
    if device == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return torch.default_generator


def _run_with_state(run: Any, args: Any, kwargs: Any, device: str, state: Tensor) -> Any:
    """Run with an earlier random state, and restore the current one."""
    source = default_generator(device)
    now = source.get_state()
    source.set_state(state)
    try:
        return run(*args, **kwargs)
    finally:
        source.set_state(now)
