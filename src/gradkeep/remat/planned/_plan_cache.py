"""Plans that were made: which of them fits a step that begins, and plans on disk.

On disk a plan is tied to a step by what the step does, not by where it ran: a loaded plan is used as
soon as the step has been recorded twice and proves to be the same.
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
    from gradkeep.remat.planned._step_recorder import StepRecorder
    from gradkeep.remat.planned._trace import StepTrace


@dataclass(frozen=True, slots=True, eq=False)
class StepSignature:
    """What can be known of a step when its first tensor is saved; steps of one kind share a plan."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    flags: tuple[ModuleFlag, ...]
    """Every module that runs, and whether it is training."""
    parameters: tuple[weakref.ref[Any], ...]
    gradients: bool
    """Whether there were gradients already, which take bytes."""
    inputs: tuple[tuple[int, ...], ...]
    """Shapes of what was handed over."""
    batch: tuple[tuple[int, ...], ...]
    """Shapes of what the first module was called with."""

    def matches_first_tensor(
        self, tensor: Tensor, inputs: tuple[Tensor, ...], batch: Shapes = ()
    ) -> bool:
        """Whether a step whose first saved tensor this is may be of this kind."""
        return (
            tensor.shape == self.size
            and tensor.dtype is self.dtype
            and tensor.stride() == self.stride
            and self.may_match(inputs, batch)
        )

    def may_match(self, inputs: tuple[Tensor, ...], batch: Shapes | None) -> bool:
        """Whether a step of which nothing is saved yet may be of this kind; None: no module ran yet."""
        return (
            batch in (None, self.batch)
            and self.inputs == tuple(tuple(tensor.shape) for tensor in inputs)
            and all(flag.is_current() for flag in self.flags)
            and self.gradients == has_gradients(self.parameters)
        )

    def matches(self, other: StepSignature) -> bool:
        """Whether it is the same kind."""
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
    """The recordings of one kind of step, until there are enough for a plan."""

    kind: StepSignature
    plain: list[StepTrace] = field(default_factory=list)
    cloned: list[StepTrace] = field(default_factory=list)
    changing: tuple[weakref.ref[Tensor], ...] = ()
    """Buffers that the step changes."""
    parameters: tuple[weakref.ref[Any], ...] = ()
    """All parameters of the modules that ran."""

    @property
    def count(self) -> int:
        """How many recordings there are."""
        return len(self.plain) + len(self.cloned)

    def add(self, recording: StepRecorder, trace: StepTrace) -> None:
        """One more."""
        (self.cloned if recording.cloning else self.plain).append(trace)

    def difference(self) -> str | None:
        """What differs first between the two latest recordings."""
        latest = (self.plain or self.cloned[:-1])[-1:] + self.cloned[-1:]
        return find_difference(*latest) if len(latest) == 2 else None

    def trace(self) -> StepTrace | None:
        """What the latest recordings agree on, with the least costs of all."""
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
"""After so many steps of a plan the next one is measured too."""


@dataclass(slots=True, eq=False)
class StepPlan:
    """A plan in use."""

    kind: StepSignature
    compiled: CompiledPlan
    budget: int
    reserve: int
    """Bytes of the copies that undoing a step needs, if it drops something."""
    changing: tuple[weakref.ref[Tensor], ...]
    parameters: tuple[weakref.ref[Any], ...]
    """All parameters that the step may give gradients to."""
    seconds: float
    """What planning took."""
    runs: int = 0
    misses: int = 0
    """Steps that began like this one and then did something else."""
    doubtful: bool = False
    """Steps were undone or left it: whether it still holds, the next recordings tell."""
    measured_peak: int | None = None
    """The most that was measured so far."""

    @property
    def needs_measuring(self) -> bool:
        """Whether the next step is to be measured: the first, and ever more seldom others, as what
        optimizers hold grows."""
        if self.compiled.trace.unwatched:
            return False  # measuring is watching
        return self.measured_peak is None or self.runs in _MEASURED_RUNS

    @property
    def drops(self) -> bool:
        """Whether anything is dropped at all."""
        return any(self.compiled.states)

    @property
    def predicted_peak(self) -> int:
        """Bytes of the step inside the budget."""
        return self.compiled.evaluation.peak + (self.reserve if self.drops else 0)

    @property
    def peak(self) -> int:
        """Bytes of the step without a budget."""
        return self.compiled.problem.peak


class SavedPlan(msgspec.Struct, frozen=True):
    """The decisions for one step."""

    digest: str
    budget: int
    peak: int
    states: tuple[int, ...]


class _PlanFile(msgspec.Struct):
    format: Literal[1]
    plans: list[SavedPlan]


def compute_digest(trace: StepTrace) -> str:
    """The same for steps that save and compute the same things in the same order.

    Counted is what happens until the last saved tensor is asked for: the optimizer does something
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
    """Write plans; a reader sees all of them or nothing."""
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
    if not target.name or (target.exists() and not target.is_file()):
        # Replacing would take the place of a device or a pipe.
        raise RematError(
            "the output path is not a regular file", code="argument.not_a_file", path=target
        )
    text = msgspec.json.format(msgspec.json.encode(_PlanFile(1, saved)), indent=1).decode()
    try:
        replace_file(target, text + "\n")
    except OSError as error:
        raise RematError(
            "the plans cannot be written", path=target.name[:80], found=error.strerror
        ) from error


def read_plans(path: str | os.PathLike[str]) -> list[SavedPlan]:
    """Read plans; a file that holds none is refused by name."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=_PlanFile).plans
    except OSError as error:
        raise RematError("the plans cannot be read", path=path, found=error.strerror) from error
    except (ValueError, RecursionError) as error:
        raise RematError("these are not saved plans", path=path, found=str(error)[:100]) from error


class OptimizerStates:
    """The states of all optimizers that stepped since this was made."""

    def __init__(self) -> None:
        self._sizes: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """Optimizers, with the number of parameters that had a state when they were last looked at."""
        self._bytes = 0
        _listening.add(self)
        _watch_optimizers()

    @property
    def nbytes(self) -> int:
        """Bytes of all states, as of when one last got an entry for another parameter."""
        return self._bytes

    def storages(self) -> dict[int, torch.UntypedStorage]:
        """The storages of all states, by id."""
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
    """Once and for good: hooks that come and go disturb optimizers that step in other threads."""

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        for states in list(_listening):
            states._update(optimizer)

    register_optimizer_step_post_hook(stepped)
