"""A plan made ready to run: what to do at each saved tensor, the work at each request, and doing it.

Operators run again outside of autograd and leave no trace of it.
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
"""Whether every byte of what is made again is compared, or a few numbers of it."""


class ReplayArgument(NamedTuple):
    """A tensor among the arguments of an operator that runs again."""

    value: int
    geometry: Geometry | None
    """How to look at the value; None if the tensor that stands for it is meant."""
    anchor: int | None
    """Where that tensor begins, in bytes, if it comes from elsewhere each time: a batch of a data set."""


class ReplayInstruction(NamedTuple):
    """One operator to run again."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    makes: tuple[tuple[int, int], ...]
    """Position among the results, and value."""
    renames: tuple[tuple[int, int], ...]
    """A value that was overwritten goes on as another one."""
    frees: tuple[int, ...]
    grad_mode: bool
    random_slot: int
    """The slot with whose random state it ran; -1 for none."""
    device: str


@dataclass(frozen=True, slots=True)
class RebuildProgram:
    """The work at one request."""

    instructions: tuple[ReplayInstruction, ...]
    checks: tuple[tuple[int, Fingerprint], ...]
    """Values to compare with what they were when they were let go."""
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """What to do with one saved tensor, and what it must look like."""

    value: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    expected: GraphBelow | None
    """What must lie below it in the autograd graph, if it is dropped."""
    drop: bool
    hold: bool
    """Its value is a source, and this is the first time it is seen."""
    mark: bool
    """The values that are made again may come from it."""
    plain: bool
    """Nothing is to be done but to keep it."""
    fingerprint: Fingerprint | None
    """Of a value that is dropped here."""
    leaf: int | None
    random_state: bool
    """Take the generator's state here."""
    releases: tuple[int, ...]
    """Values that are let go after this one."""
    view: Geometry | None
    """How to show this slot, given the value as it is made again."""
    exact: Geometry
    """How to show this slot, given any tensor on its storage."""
    varies: bool
    """It may have any size."""

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor looks like the recorded one."""
        if self.varies:
            return tensor.dtype is self.dtype and tensor.dim() == len(self.size)
        return (
            tensor.shape == self.size
            and tensor.dtype is self.dtype
            and tensor.stride() == self.stride
        )

    def fits_leaf(self, tensor: Tensor) -> bool:
        """The same, and it shows the same parameter if it shows one."""
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
    """Turn a plan into programs; `check` says how much of what is made again is compared."""
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
            self.first_slots.setdefault(slot.value, number)
        self._fingerprints = {
            value: self._fingerprint(value) for value in self.dropped if self._exact(value)
        }
        self.geometry: dict[int, Geometry] = {}
        """How the tensor looks that stands for a value now."""

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
        # A value whose sources are saved only later is held until they are.
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
        """What is compared of a value that was dropped."""
        shown = [slot.geometry for slot in self.trace.slots if slot.value == value]
        if self._check == "sampled":
            return build_sample(shown[0])
        operation, geometry = self._find_first_maker(value)
        return build_content_hash(geometry, shown, whole=not is_uninitialized(operation.name))

    def _find_first_maker(self, value: int) -> tuple[TracedOperation, Geometry]:
        """The operator that made the storage of a value, and how."""
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
        # Of several results only those are taken that are used here: another one may be there already,
        # kept from before, and must neither be replaced nor freed.
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
    """An operator ready to be run; `geometry` says how the tensors of values look.

    Of its results those are taken that are `wanted`, by default all.
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
                    # Some kernels return a workspace only if gradients are wanted.
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
                # Nothing may be held by a name here while the next operator asks for memory.
                args = kwargs = out = results = None
                for value in step.frees:
                    values[value] = None
        finally:
            torch._C._set_grad_enabled(before)


def default_generator(device: str) -> torch.Generator:
    """The generator that random operators on a device draw from."""
    if device == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return torch.default_generator


def _run_with_state(run: Any, args: Any, kwargs: Any, device: str, state: Tensor) -> Any:
    """Run with an earlier random state; the present one is put back."""
    source = default_generator(device)
    now = source.get_state()
    source.set_state(state)
    try:
        return run(*args, **kwargs)
    finally:
        source.set_state(now)
