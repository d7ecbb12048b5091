"""Plans in use, their match with a step that begins, and plans on disk.

On disk a plan is tied to a step by what the step computes, not by where it ran: a loaded plan is used once
the step has been recorded twice and proves to be the same.
"""

from __future__ import annotations

import functools
import hashlib
import json
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from gradkeep._arguments import file_to_write
from gradkeep.errors import RematError
from gradkeep.remat._tensors import has_storage
from gradkeep.remat.planned._modules import ModuleFlag
from gradkeep.remat.planned._step_recorder import has_gradients
from gradkeep.remat.planned._trace import (
    find_difference,
    merge_traces,
    with_larger_tail,
    with_least_costs,
)
from gradkeep.remat.simulator._program import replace_file

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from torch import Tensor
    from torch.optim import Optimizer

    from gradkeep.remat.planned._modules import Shapes
    from gradkeep.remat.planned._programs import CompiledPlan
    from gradkeep.remat.planned._resident import ResidentLimit
    from gradkeep.remat.planned._step_recorder import StepRecorder
    from gradkeep.remat.planned._trace import StepTrace


@dataclass(frozen=True, slots=True, eq=False)
class StepSignature:
    """Everything known of a step when its first tensor is saved; steps with equal signatures share a plan."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    flags: tuple[ModuleFlag, ...]
    """All modules that ran, with their training modes."""
    parameters: tuple[weakref.ref[Any], ...]
    gradients: bool
    """Gradients existed before the step and take memory."""
    inputs: tuple[tuple[int, ...], ...]
    """Shapes of the inputs passed by the user."""
    batch: tuple[tuple[int, ...], ...]
    """Shapes of the arguments of the first module."""

    def matches_first_tensor(
        self, tensor: Tensor, inputs: tuple[Tensor, ...], batch: Shapes = ()
    ) -> bool:
        """Return True if a step with this first saved tensor may match."""
        return (
            tensor.shape == self.size
            and tensor.dtype is self.dtype
            and tensor.stride() == self.stride
            and self.may_match(inputs, batch)
        )

    def may_match(self, inputs: tuple[Tensor, ...], batch: Shapes | None) -> bool:
        """Return True if a step without saved tensors may match; a batch of None means that no module ran yet."""
        return (
            batch in (None, self.batch)
            and self.inputs == tuple(tuple(tensor.shape) for tensor in inputs)
            and all(flag.is_current() for flag in self.flags)
            and self.gradients == has_gradients(self.parameters)
        )

    def matches(self, other: StepSignature) -> bool:
        """Return True if both signatures are the same."""
        return (
            self.size == other.size
            and self.stride == other.stride
            and self.dtype is other.dtype
            and len(self.flags) == len(other.flags)
            and all(map(ModuleFlag.matches, self.flags, other.flags))
            and self.gradients == other.gradients
            and self.inputs == other.inputs
            and self.batch == other.batch
        )


@dataclass(slots=True, eq=False)
class StepRecordings:
    """Recordings of one kind of step, until there are enough for a plan."""

    kind: StepSignature
    plain: list[StepTrace] = field(default_factory=list)
    cloned: list[StepTrace] = field(default_factory=list)
    changing: tuple[weakref.ref[Tensor], ...] = ()
    """Buffers that the step changes."""
    parameters: tuple[weakref.ref[Any], ...] = ()
    """All parameters of the modules that ran."""
    resident_rise: int = 0
    """Smallest rise of resident memory in a step without copies, in bytes, or 0 if it is unknown.

    The smallest, because recording takes memory itself and allocators keep some of it for later steps.
    """

    @classmethod
    def of(cls, plan: StepPlan) -> StepRecordings:
        """Return what is known of a planned step, to plan it again."""
        return cls(
            plan.kind,
            changing=plan.changing,
            parameters=plan.parameters,
            resident_rise=plan.resident_rise,
        )

    @property
    def count(self) -> int:
        """Number of recordings."""
        return len(self.plain) + len(self.cloned)

    def add(self, recording: StepRecorder, trace: StepTrace) -> None:
        """Add a recording."""
        (self.cloned if recording.cloning else self.plain).append(trace)
        if recording.resident is not None and not recording.cloning:
            rise = recording.resident.peak
            self.resident_rise = min(self.resident_rise or rise, rise)

    def difference(self) -> str | None:
        """Describe the first difference between the two latest recordings."""
        latest = (self.plain or self.cloned[:-1])[-1:] + self.cloned[-1:]
        return find_difference(*latest) if len(latest) == 2 else None

    def trace(self) -> StepTrace | None:
        """Merge the latest recordings that agree, with the least costs of all."""
        for plain in reversed(self.plain):
            for cloned in reversed(self.cloned):
                trace = merge_traces(plain, cloned)
                if trace is not None:
                    trace = with_least_costs(trace, *self.plain, *self.cloned)
                    for other in (*self.plain, *self.cloned):
                        trace = with_larger_tail(trace, other)
                    return trace
        return None


_MEASURED_RUNS = frozenset((8, *(32**power for power in range(1, 8))))
"""Numbers of runs of a plan after which the next one is measured."""


@dataclass(slots=True, eq=False)
class StepPlan:
    """A plan in use."""

    kind: StepSignature
    compiled: CompiledPlan
    budget: int
    reserve: int
    """Bytes of the copies needed to undo a step, if it drops something."""
    changing: tuple[weakref.ref[Tensor], ...]
    parameters: tuple[weakref.ref[Any], ...]
    """All parameters that the step may give gradients to."""
    seconds: float
    """Time that planning took."""
    resident_rise: int = 0
    """Rise of resident memory in a step without a budget, in bytes; 0 if not measured."""
    resident: ResidentLimit | None = None
    """Limit of resident memory, or None where it cannot be enforced."""
    overhead: int = 0
    """Bytes of resident memory beyond tensors that the plan leaves room for."""
    runs: int = 0
    misses: int = 0
    """Steps that matched at first and then differed."""
    doubtful: bool = False
    """Steps differed from it or were undone; the next recordings decide whether it is still valid."""
    measured_peak: int | None = None
    """Largest measured peak so far."""

    @property
    def needs_measuring(self) -> bool:
        """Return True for the first step and ever more rarely later, because optimizer states grow."""
        if self.compiled.trace.unwatched:
            return False  # measuring needs a dispatch mode
        return self.measured_peak is None or self.runs in _MEASURED_RUNS

    @property
    def drops(self) -> bool:
        """Return True if the plan drops anything."""
        return any(self.compiled.states)

    @property
    def predicted_peak(self) -> int:
        """Bytes of the step within the budget."""
        return self.compiled.evaluation.peak + (self.reserve if self.drops else 0)

    @property
    def peak(self) -> int:
        """Bytes of the step without a budget."""
        return self.compiled.problem.peak


class SavedPlan(msgspec.Struct, frozen=True):
    """Decisions for one step."""

    digest: str
    budget: int
    peak: int
    states: tuple[int, ...]


class _PlanFile(msgspec.Struct):
    format: Literal[1]
    plans: list[SavedPlan]


def compute_digest(trace: StepTrace) -> str:
    """Hash what a step saves and computes, in order.

    Only events until the last request of a saved tensor count: the optimizer does something
    else in the first step than later.
    """
    ends = trace.lengths
    content: list[Any] = [
        [operation.name, sorted(operation.reads), [list(map(str, m)) for m in operation.makes]]
        for operation in trace.operations[: ends.operations]
    ]
    content += [[slot.value, list(map(str, slot.geometry))] for slot in trace.slots[: ends.slots]]
    content += [list(trace.order), [stored.size for stored in trace.storages[: ends.storages]]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def write_plans(path: str | os.PathLike[str], plans: Iterable[StepPlan]) -> None:
    """Write plans atomically."""
    target = Path(path)
    saved = [
        SavedPlan(
            compute_digest(plan.compiled.trace),
            plan.budget,
            plan.compiled.evaluation.peak,
            tuple(map(int, plan.compiled.states)),
        )
        for plan in plans
    ]
    file_to_write(target, error=RematError)
    text = msgspec.json.format(msgspec.json.encode(_PlanFile(1, saved)), indent=1).decode()
    try:
        replace_file(target, text + "\n")
    except OSError as error:
        raise RematError(
            "the plans cannot be written",
            code="remat.plans_not_written",
            path=target.name[:80],
            found=error.strerror,
        ) from error


def read_plans(path: str | os.PathLike[str]) -> list[SavedPlan]:
    """Read plans; raise `RematError` if the file does not contain any."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=_PlanFile).plans
    except OSError as error:
        raise RematError(
            "the plans cannot be read",
            code="remat.plans_unreadable",
            path=path,
            found=error.strerror,
        ) from error
    except (ValueError, RecursionError) as error:
        raise RematError(
            "the file does not contain saved plans",
            code="remat.plans_invalid",
            path=path,
            found=str(error)[:100],
        ) from error


class OptimizerStates:
    """Bytes of the states of all optimizers that stepped since this object was created."""

    def __init__(self) -> None:
        self._sizes: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """Number of parameters with a state per optimizer, at the last update."""
        self._bytes = 0
        _listening.add(self)
        _watch_optimizers()

    @property
    def nbytes(self) -> int:
        """Bytes of all states, updated when a state gets an entry for another parameter."""
        return self._bytes

    def storages(self) -> dict[int, torch.UntypedStorage]:
        """Return the storages of all states, by id."""
        storages = {}
        for optimizer in list(self._sizes):
            for tensor in tree_leaves(list(optimizer.state.values())):
                if isinstance(tensor, torch.Tensor) and has_storage(tensor):
                    storage = tensor.untyped_storage()
                    storages[id(storage)] = storage
        return storages

    def _update(self, optimizer: Optimizer) -> None:
        if self._sizes.get(optimizer) != len(optimizer.state):
            self._sizes[optimizer] = len(optimizer.state)
            self._bytes = sum(storage.nbytes() for storage in self.storages().values())


_listening: weakref.WeakSet[OptimizerStates] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    """Install a permanent hook: adding and removing hooks disturbs optimizers in other threads."""

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        for states in list(_listening):
            states._update(optimizer)

    register_optimizer_step_post_hook(stepped)
