"""The eviction core: tracks memory, evicts storages to make room and recomputes them on demand.

The simulator and the online runtime share it. A driver reports what the program does (`compute`, `get`,
`release`, `pin`); the core keeps memory within the budget by evicting storages that a heuristic
chooses, and brings them back by running their operators again. In a simulation running means
advancing a clock; `LiveCore` of the online runtime also runs operators and empties torch's storages.

The order of the pool decides ties, so it is part of the algorithm: locking a storage removes it from
the pool, the last unlock appends it, a storage that just came into memory is appended, siblings first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gradkeep.errors import RematError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.remat.simulator._heuristics import PoolSample
    from gradkeep.remat.simulator._neighborhoods import Heuristic
    from gradkeep.remat.simulator._program import Op
    from gradkeep.remat.simulator._simulate import Timeline

Policy = Literal["ignore", "eager", "banish"]
"""Deallocation policy for storages without outside references.

`ignore`: do nothing. `eager`: evict it at once; it can still be recomputed. `banish`: once nothing
evicted depends on it, free it permanently and pin its dependents.
"""


class OutOfMemoryError(Exception):
    """No storage can be evicted."""


class ThrashingError(Exception):
    """Recomputation exceeds its limit."""


@dataclass(slots=True, eq=False)
class Storage:
    """Bytes that are evicted as one unit: a tensor and its aliases."""

    number: int
    size: int
    compute: int = 0
    """Cost of the distinct operators behind all its tensors."""
    material: bool = False
    locks: int = 0
    references: int = 0
    pinned: bool = False
    last_access: float = -math.inf
    tensors: list[TensorNode] = field(default_factory=list)
    above: dict[Storage, int] = field(default_factory=dict)
    """Storages it was computed from, with the number of edges."""
    below: dict[Storage, int] = field(default_factory=dict)
    """Storages computed from it, with the number of edges."""
    edges_above: int = 0
    """Arguments of all its tensors, including other tensors of the same storage."""
    edges_below: int = 0
    """Results that read its tensors, including other tensors of the same storage."""
    evicted_dependents: set[TensorNode] = field(default_factory=set)
    """Evicted tensors computed from it; only tracked under the policy `banish`."""
    group: object = None
    """Bookkeeping of the heuristic."""
    cached: float | None = None
    """Cached numerator of the heuristic's score."""
    extra_accesses: int = 0
    """Accesses besides the edges when the cached numerator is used."""

    def __repr__(self) -> str:
        return f"Storage({self.number}, {self.size} bytes)"


@dataclass(slots=True, eq=False)
class TensorNode:
    """One result of an operator: a view of its storage."""

    op: Op
    index: int
    storage: Storage
    parents: list[TensorNode]
    is_alias: bool
    siblings: list[TensorNode] = field(default_factory=list)
    children: list[TensorNode] = field(default_factory=list)
    defined: bool = False


class EvictionCore:
    """Memory under a budget; all times have the unit of the operators' costs."""

    def __init__(
        self,
        heuristic: Heuristic,
        *,
        budget: float = math.inf,
        policy: Policy = "eager",
        remat_limit: float = math.inf,
        sample: PoolSample | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.heuristic = heuristic
        self._sample = sample
        self.budget = budget
        self.policy: Policy = policy
        self.remat_limit = remat_limit
        self.clock = 1
        self.memory = 0
        self.peak = 0
        self.base_compute = 0
        self.remat_compute = 0
        self.evictions = 0
        self.rematerializations = 0
        self.ops_run = 0
        self.pool: dict[Storage, None] = {}
        self._storages = 0
        self._timeline = timeline
        self._banishing = policy == "banish"
        self._followed = not self._banishing
        """The heuristic is notified of every operator; edges are only ever added."""

    def compute(self, op: Op, args: Sequence[TensorNode]) -> list[TensorNode]:
        """Run an operator of the program for the first time; each result has one reference."""
        tensors = self._declare(op, args)
        if self._followed:
            self.heuristic.declared(tensors)
        self._materialize(tensors[0], recompute=False)
        clock = self.clock
        for tensor in tensors:
            # A fresh result must not be the stalest storage.
            tensor.storage.last_access = clock
        return tensors

    def get(self, tensor: TensorNode) -> None:
        """Add one outside reference."""
        tensor.storage.references += 1

    def release(self, tensor: TensorNode) -> None:
        """Remove one outside reference, and apply the policy if none remains."""
        storage = tensor.storage
        storage.references -= 1
        if storage.references == 0:
            if self._banishing:
                self._try_banish(storage)
            elif self.policy == "eager" and storage.material and not storage.pinned:
                self._evict(storage)

    def pin(self, tensor: TensorNode) -> None:
        """Bring the tensor back if it was evicted, and never evict it again."""
        if not tensor.defined:
            self._materialize(tensor, recompute=True)
        self._pin(tensor.storage)

    def _pin(self, storage: Storage) -> None:
        if not storage.pinned:
            self._lock(storage)
            storage.pinned = True

    def _declare(self, op: Op, args: Sequence[TensorNode]) -> list[TensorNode]:
        tensors = []
        for index, alias in enumerate(op.aliases):
            if alias >= 0:
                storage = args[alias].storage
                # Count each operator once, however many tensors of the storage it made.
                if all(other.op is not op for other in storage.tensors):
                    storage.compute += op.cost
                    storage.cached = None
            else:
                storage = Storage(self._storages, op.sizes[index])
                storage.compute = op.cost
                self._storages += 1
            tensor = TensorNode(op, index, storage, list(args), bool(storage.tensors))
            storage.tensors.append(tensor)
            storage.references += 1
            tensors.append(tensor)
        if len(tensors) > 1:
            for index, tensor in enumerate(tensors):
                tensor.siblings = tensors[:index] + tensors[index + 1 :]
        banishing = self._banishing
        for parent in args:
            origin = parent.storage
            if banishing:
                parent.children.extend(tensors)  # only banishing walks from tensor to tensor
            origin.edges_below += len(tensors)
            for tensor in tensors:
                target = tensor.storage
                target.edges_above += 1
                if target is not origin:
                    origin.below[target] = target.above[origin] = origin.below.get(target, 0) + 1
                    if banishing:
                        origin.evicted_dependents.add(tensor)
        return tensors

    def _materialize(self, target: TensorNode, *, recompute: bool) -> None:
        """Bring a tensor into memory, after all its missing ancestors.

        An explicit stack instead of recursion: chains can exceed Python's recursion limit.
        """
        missing = self._begin(target)
        if not missing:
            self._finish(target, recompute=recompute)
            return
        stack = [(target, recompute, iter(missing))]
        waiting: list[TensorNode | None] = [None]
        while stack:
            tensor, tensor_recompute, parents = stack[-1]
            if waiting[-1] is not None:
                self._lock(waiting[-1].storage)
                waiting[-1] = None
            for parent in parents:
                if parent.defined:
                    # A sibling's run has brought it back in the meantime.
                    self._lock(parent.storage)
                    continue
                waiting[-1] = parent
                stack.append((parent, True, iter(self._begin(parent))))
                waiting.append(None)
                break
            else:
                self._finish(tensor, recompute=tensor_recompute)
                stack.pop()
                waiting.pop()

    def _begin(self, tensor: TensorNode) -> list[TensorNode]:
        """Touch the parents, lock those in memory and return the missing ones."""
        clock, missing = self.clock, []
        for parent in tensor.parents:
            storage = parent.storage
            if not self._banishing or storage.references > 0:
                storage.last_access = clock
        for parent in tensor.parents:
            if parent.defined:
                self._lock(parent.storage)
            else:
                missing.append(parent)
        return missing

    def _finish(self, tensor: TensorNode, *, recompute: bool) -> None:
        """Make room, run the operator and unlock the parents; all parents are locked in memory."""
        sizes = tensor.op.sizes
        need = sizes[0] if len(sizes) == 1 else sum(sizes)
        if self.memory + need > self.budget:
            self._free(need)
        self._run(tensor, need, recompute=recompute)
        if self._banishing:
            self._unlock_and_banish(tensor)
        else:
            for parent in tensor.parents:
                self._unlock(parent.storage)
        if self.remat_compute > self.remat_limit:
            raise ThrashingError

    def _run(self, tensor: TensorNode, need: int, *, recompute: bool) -> None:
        op = tensor.op
        self.clock += op.cost
        self.memory += need
        self.ops_run += 1
        if self.memory > self.peak:
            self.peak = self.memory
        if recompute:
            self.remat_compute += op.cost
            self.rematerializations += 1
        else:
            self.base_compute += op.cost
        arrived = [tensor.storage] if not tensor.storage.material else []
        if tensor.siblings:
            arrived = self._run_siblings(tensor) + arrived
        tensor.storage.material = True
        tensor.defined = True
        for storage in arrived:
            self.pool[storage] = None
            self.heuristic.arrived(storage, recomputed=recompute)
        if arrived and self._followed:
            self.heuristic.ran(arrived)
        if self._timeline is not None:
            self._timeline.ran(self, op, recompute=recompute)

    def _run_siblings(self, tensor: TensorNode) -> list[Storage]:
        """Bring the operator's other results into memory; results already there are discarded."""
        arrived = []
        for sibling in tensor.siblings:
            storage = sibling.storage
            if sibling.defined:
                self.memory -= sibling.op.sizes[sibling.index]
                continue
            if not storage.material:
                arrived.append(storage)
                storage.material = True
            sibling.defined = True
        return arrived

    def _free(self, need: int) -> None:
        while self.memory + need > self.budget:
            if not self.pool:
                raise OutOfMemoryError
            self._evict(self._choose_victim())

    def _choose_victim(self) -> Storage:
        """Let the heuristic choose a storage, and validate the choice."""
        pool = self.pool if self._sample is None else self._sample.of(self.pool)
        chosen = self.heuristic.choose(pool, self.clock)
        if chosen not in self.pool:
            raise RematError(
                f"the heuristic {self.heuristic.name!r} chose a storage that cannot be evicted",
                code="remat.heuristic_choice",
                found=repr(chosen),
                expected="a storage of the pool that is passed to choose()",
            )
        return chosen

    def _evict(self, storage: Storage) -> None:
        storage.material = False
        self.memory -= storage.size
        self.evictions += 1
        self.pool.pop(storage, None)
        for tensor in storage.tensors:
            tensor.defined = False
            if self._banishing:
                for parent in tensor.parents:
                    if parent.storage is not storage:
                        parent.storage.evicted_dependents.add(tensor)
        self.heuristic.evicted(storage)
        if self._timeline is not None:
            self._timeline.evicted(self, storage)

    def _lock(self, storage: Storage) -> None:
        if storage.locks == 0:
            del self.pool[storage]
        storage.locks += 1

    def _unlock(self, storage: Storage) -> None:
        storage.locks -= 1
        if storage.locks == 0:
            self.pool[storage] = None

    def _unlock_and_banish(self, tensor: TensorNode) -> None:
        # Banishing removes parents from this list during iteration, so the element after a removed
        # one is skipped. The original does the same, and its results depend on it.
        for parent in tensor.parents:
            self._unlock(parent.storage)
            for result in (*tensor.siblings, tensor):
                if result.storage is not parent.storage and result.defined:
                    parent.storage.evicted_dependents.discard(result)
            self._try_banish(parent.storage)

    def _try_banish(self, storage: Storage) -> None:
        if storage.references > 0 or storage.evicted_dependents:
            return
        if storage.material:
            storage.locks = 0
            self._evict(storage)
        for tensor in storage.tensors:
            for parent in tensor.parents:
                if parent.storage is not storage:
                    parent.storage.evicted_dependents.discard(tensor)
                    parent.children.remove(tensor)
                    parent.storage.edges_below -= 1
                    _remove_edge(parent.storage, storage)
            for child in tensor.children:
                if child.storage is not storage:
                    child.parents.remove(tensor)
                    child.storage.edges_above -= 1
                    _remove_edge(storage, child.storage)
                    self._pin(child.storage)


def _remove_edge(above: Storage, below: Storage) -> None:
    """Remove one edge between two storages."""
    if above.below.get(below, 0) > 1:
        above.below[below] -= 1
        below.above[above] -= 1
    else:
        above.below.pop(below, None)
        below.above.pop(above, None)
