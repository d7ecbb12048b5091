"""The eviction core with real bytes: evicting empties a storage, running an operator fills it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gradkeep._budgets import format_bytes
from gradkeep.errors import BudgetError, RematError
from gradkeep.remat._eviction_core import EvictionCore, Storage
from gradkeep.remat._rerun import hash_bytes
from gradkeep.remat._tensors import StorageRef, find_tensors, map_nested, run_operator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradkeep.remat._eviction_core import TensorNode as Node
    from gradkeep.remat._tensors import Geometry
    from gradkeep.remat.simulator._heuristics import PoolSample
    from gradkeep.remat.simulator._neighborhoods import Heuristic


class OnlineArgument(NamedTuple):
    """A tensor among the arguments: its value and geometry."""

    node: Node
    geometry: Geometry


@dataclass(slots=True, eq=False)
class OnlineOperator:
    """An operator as the eviction core sees it, with everything needed to run it again."""

    name: str
    cost: int
    """Nanoseconds."""
    sizes: tuple[int, ...]
    """Bytes of each new storage; 0 for storages written in place."""
    aliases: tuple[int, ...]
    """For each result the index of the argument whose storage it writes, or -1."""
    run: Callable[..., Any] | None = None
    """None if it cannot be run again."""
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    results: tuple[tuple[int, Geometry], ...] = ()
    """Position and geometry of the result that covers each new storage."""
    grad_mode: bool = True
    exact: bool = True
    """Every byte of its results is defined."""
    random: torch.Tensor | None = None
    """State of the generator before it ran."""


def predict_result_bytes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, random: bool
) -> int:
    """Estimate the bytes of an operator's results before it runs for the first time.

    Runs the operator on meta tensors; if that is not possible, the largest argument is the estimate.
    """
    inputs = find_tensors(args) + find_tensors(tuple(kwargs.values()))
    guess = max((tensor.nbytes for tensor in inputs), default=0)
    names = {argument.name for argument in func._schema.arguments}
    if not any("Tensor" in str(result.type) for result in func._schema.returns):
        return 0
    if random or not (inputs or "device" in names) or not func._schema.name.startswith("aten::"):
        return guess
    named = {name: map_nested(value, _to_meta, torch.Tensor) for name, value in kwargs.items()}
    if "device" in names:
        named["device"] = torch.device("meta")
    try:
        out = func(*map_nested(args, _to_meta, torch.Tensor), **named)
        storages = [tensor.untyped_storage() for tensor in find_tensors(out)]
        return sum({id(storage): storage.nbytes() for storage in storages}.values())
    except Exception:
        return guess


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@dataclass(slots=True, eq=False)
class StorageBytes:
    """Location of a storage's bytes: torch's own storage while it is alive, else a storage of the core."""

    ref: StorageRef
    nbytes: int
    dead: bool = False
    """Only the core holds it."""
    evicted_hash: int | None = None
    """Hash of the evicted bytes, until they are restored and compared."""
    own_storage: torch.UntypedStorage | None = None
    """Bytes of a dead storage that was recomputed, or of a pinned one that others need."""

    def storage(self) -> torch.UntypedStorage | None:
        """Return the current storage, filled or empty."""
        return self.own_storage if self.own_storage is not None else self.ref()


class LiveCore(EvictionCore):
    """An `EvictionCore` on torch storages.

    Storages die at any moment, also in the middle of an operator; their deaths are queued and processed
    between two operators.
    """

    def __init__(
        self,
        heuristic: Heuristic,
        *,
        budget: float,
        limit: float,
        strict: bool = False,
        sample: PoolSample | None = None,
    ) -> None:
        super().__init__(heuristic, budget=budget, policy="eager", sample=sample)
        self.limit = limit
        self.strict = strict
        """Raise if no storage can be evicted."""
        # Edges are removed here once nothing needs them.
        self._followed = False
        self._requested_budget = budget
        self.settled = False
        """Everything is restored and stays in memory."""
        self._remat_compute_at_restore = 0
        self.bytes: dict[Storage, StorageBytes] = {}
        self.latest: dict[int, Node] = {}
        """Current value of each live storage, by the id of torch's storage."""
        self.died: list[Node] = []
        self.over = 0
        self.exhausted = False
        """No storage could be evicted although room was needed."""
        self.gave_up = False
        self.reason = ""
        """Why eviction stopped."""
        self.search_time = self.copy_time = 0

    def limit_to(self, budget: float) -> None:
        """Change the budget from the next operator on."""
        self.budget = self._requested_budget = budget

    def node_of(self, tensor: torch.Tensor) -> Node:
        """Return the value that a tensor views; an unseen storage becomes a constant."""
        return self.node_on(tensor.untyped_storage())

    def node_on(self, storage: torch.UntypedStorage) -> Node:
        """Return the current value of a storage."""
        node = self.latest.get(id(storage))
        return self._constant(storage) if node is None else node

    def constants(self) -> list[StorageRef]:
        """Return references to the live constants."""
        return [
            self.bytes[node.storage].ref
            for node in self.latest.values()
            if not node.parents and not self.bytes[node.storage].dead
        ]

    def _constant(self, storage: torch.UntypedStorage) -> Node:
        operator = OnlineOperator("constant", 0, (storage.nbytes(),), (-1,))
        (node,) = self._declare(operator, ())  # type: ignore[arg-type]
        self.follow(storage, node)
        self._arrive(node.storage)
        self._pin(node.storage)
        return node

    def follow(self, storage: torch.UntypedStorage, node: Node) -> None:
        """Use `storage` for the value from now on."""
        ref = StorageRef(storage, self._on_storage_freed)
        ref.key = id(storage)
        self.bytes[node.storage] = StorageBytes(ref, storage.nbytes())
        self.latest[ref.key] = node

    def _on_storage_freed(self, ref: StorageRef) -> None:
        # Immediately, because the next storage may get the same id.
        node = self.latest.pop(ref.key, None)
        if node is not None:
            self.died.append(node)

    def tidy(self) -> None:
        """Process deaths and enforce the budget between two operators."""
        self.free_dead_storages()
        if self.gave_up and not self.settled:
            self.restore_all()
        self.make_room(0)

    def free_dead_storages(self) -> None:
        """Free the bytes of storages that died; keep how to recompute them."""
        while self.died:
            storage = self.died.pop().storage
            self.bytes[storage].dead = True
            if storage.material:
                self._discard(storage)
            self._forget(storage)

    def _discard(self, storage: Storage) -> None:
        """Evict a storage that only the core holds."""
        if storage.pinned:
            storage.pinned = False
            self._unlock(storage)
        self._evict(storage)

    def _needed(self, storage: Storage) -> bool:
        """Return True if an evictable storage was computed from it."""
        # Recomputing one result of an operator recomputes all of them.
        beside = [sibling.storage for node in storage.tensors for sibling in node.siblings]
        return any(o in self.bytes and not o.pinned for o in (*storage.below, *beside))

    def _forget(self, storage: Storage) -> None:
        """Remove a storage that nothing needs, and then ancestors that only it needed."""
        waiting = [storage]
        while waiting:
            gone = waiting.pop()
            place = self.bytes.get(gone)
            if place is None or self._needed(gone):
                continue
            # Release our reference; if the storage dies now, this runs again.
            place.own_storage = None
            if not place.dead:
                continue
            if gone.material:
                self._discard(gone)
            del self.bytes[gone]
            for above in list(gone.above):
                above.below.pop(gone, None)
                waiting.append(above)
            gone.above.clear()
            waiting += [sibling.storage for node in gone.tensors for sibling in node.siblings]

    def materialize_and_lock(self, nodes: Sequence[Node]) -> None:
        """Bring values into memory and lock them."""
        clock = self.clock
        for node in nodes:
            node.storage.last_access = clock
            if not node.defined:
                self._materialize(node, recompute=True)
            self._lock(node.storage)
            self.compare(node.storage)

    def compare(self, storage: Storage) -> None:
        """Compare a restored storage with the hash of its evicted bytes."""
        place = self.bytes[storage]
        if place.evicted_hash is None or not all(node.defined for node in storage.tensors):
            return
        evicted_hash, place.evicted_hash = place.evicted_hash, None
        actual = place.ref()
        if actual is not None and hash_bytes(actual, 0, place.nbytes) != evicted_hash:
            name = storage.tensors[0].op.name
            _poison(place, always=True)
            raise RematError(
                "a recomputed tensor differs from the evicted one, because its inputs were changed in a "
                "way that torch does not report; it is now filled with NaN",
                code="remat.recomputed_differs",
                found=f"the result of {name}",
                fix="Use mode='planned', or no budget, for this model.",
            )

    def unlock_all(self, nodes: Sequence[Node]) -> None:
        """Unlock values."""
        for node in nodes:
            self._unlock(node.storage)

    def make_room(self, need: int) -> None:
        """Evict until `need` bytes fit."""
        if self.memory + need > self.budget:
            self._free(need)

    def add_operator(
        self,
        operator: OnlineOperator,
        parents: Sequence[Node],
        new_storages: Sequence[torch.UntypedStorage],
    ) -> list[Node]:
        """Add an operator that just ran for the first time, with its new storages."""
        nodes = self._declare(operator, parents)  # type: ignore[arg-type]
        fresh = iter(new_storages)
        for node, alias in zip(nodes, operator.aliases, strict=True):
            node.storage.last_access = self.clock + operator.cost
            if alias >= 0:
                node.defined = True
                key = self.bytes[node.storage].ref.key
                if key in self.latest and self.latest[key].storage is node.storage:
                    self.latest[key] = node
                continue
            self.follow(next(fresh), node)
            self._arrive(node.storage)
        for parent in parents:
            # Pinned storages are not recomputed: they stay for the recomputation of others.
            place = self.bytes[parent.storage]
            if parent.storage.pinned and place.own_storage is None and self._needed(parent.storage):
                place.own_storage = place.storage()
        self.clock += operator.cost
        self.base_compute += operator.cost
        self.ops_run += 1
        return nodes

    def _arrive(self, storage: Storage) -> None:
        storage.material = True
        for node in storage.tensors:
            node.defined = True
        self.memory += storage.size
        self.peak = max(self.peak, self.memory)
        self.pool[storage] = None
        self.heuristic.arrived(storage, recomputed=False)

    def keep(self, node: Node) -> None:
        """Pin a value for as long as it is referenced or something may need it."""
        if not node.storage.pinned:
            self.pin(node)
            if self._needed(node.storage):
                place = self.bytes[node.storage]
                place.own_storage = place.storage()
            for above in list(node.storage.above):
                self._forget(above)

    def prepare_overwrite(self, node: Node) -> None:
        """Recompute and pin everything computed from a value that is about to be overwritten."""
        for other in list(node.storage.below):
            place = self.bytes.get(other)
            if other is node.storage or place is None or other.pinned:
                continue
            if place.dead and not self._needed(other):
                continue
            self.keep(other.tensors[-1])

    def _free(self, need: int) -> None:
        began = perf_counter_ns()
        while self.memory + need > self.budget and self.pool:
            self._evict(self._choose_victim())
        over = int(min(self.memory + need - self.budget, 1 << 62))
        self.over = max(self.over, over)
        self.exhausted |= over > 0
        self.search_time += perf_counter_ns() - began
        if over > 0 and self.strict:
            raise BudgetError(
                "out of memory, and no storage can be evicted",
                code="budget.exhausted",
                found=f"{format_bytes(self.memory + need)} in use",
                expected=f"at most the budget of {format_bytes(int(self.budget))}",
                fix="Raise the budget, or make the batch smaller.",
            )

    def _evict(self, storage: Storage) -> None:
        super()._evict(storage)
        place = self.bytes[storage]
        place.own_storage = None
        if place.dead:
            return
        actual = place.ref()
        if actual is None:
            return
        if place.evicted_hash is None and getattr(storage.tensors[0].op, "exact", True):
            place.evicted_hash = hash_bytes(actual, 0, place.nbytes)
        actual.resize_(0)

    def _run(self, tensor: Node, need: int, *, recompute: bool) -> None:
        operator: Any = tensor.op
        began = perf_counter_ns()
        out = self._rerun_operator(operator)
        taken = perf_counter_ns() - began
        by_index = {node.index: node for node in (tensor, *tensor.siblings)}
        results = find_tensors(out)
        # New storages come before storages written in place.
        for index, (position, geometry) in enumerate(operator.results):
            storage = by_index[index].storage
            if storage in self.bytes and not storage.material:
                self._fill(storage, results[position], geometry)
        super()._run(tensor, need, recompute=recompute)
        # The core added the expected cost; report the measured one.
        self.remat_compute += taken - operator.cost
        spent = self.remat_compute - self._remat_compute_at_restore
        # At least 50 ms of recomputation, to be robust against noise.
        if spent > self.limit * max(self.base_compute, 50_000_000):
            # Immediately, because recomputing one value can take very long; `tidy` does the rest.
            self.gave_up, self.budget = True, math.inf
            self.reason = "recomputation took too long"

    def _run_siblings(self, tensor: Node) -> list[Storage]:
        # Forgotten results are discarded, like results that are in memory.
        forgotten = [sibling for sibling in tensor.siblings if sibling.storage not in self.bytes]
        for sibling in forgotten:
            sibling.defined = True
        arrived = super()._run_siblings(tensor)
        for sibling in forgotten:
            sibling.defined = False
        return arrived

    def _rerun_operator(self, operator: OnlineOperator) -> Any:
        if operator.run is None:
            raise RematError(
                f"the result of {operator.name} was evicted but cannot be recomputed",
                code="remat.not_recomputable",
            )
        args = map_nested(operator.args, self._view_argument, OnlineArgument)
        kwargs = {
            name: map_nested(value, self._view_argument, OnlineArgument)
            for name, value in operator.kwargs
        }
        before = torch.is_grad_enabled()
        now = torch.get_rng_state() if operator.random is not None else None
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            try:
                torch._C._set_grad_enabled(operator.grad_mode)
                if operator.random is not None:
                    torch.set_rng_state(operator.random)
                return run_operator(operator.run, args, kwargs)
            finally:
                torch._C._set_grad_enabled(before)
                if now is not None:
                    torch.set_rng_state(now)

    def _view_argument(self, argument: OnlineArgument) -> torch.Tensor:
        storage = self.bytes[argument.node.storage].storage()
        assert storage is not None
        return argument.geometry.on(storage)

    def _fill(self, storage: Storage, result: torch.Tensor, geometry: Any) -> None:
        began = perf_counter_ns()
        place = self.bytes[storage]
        source = result.untyped_storage()
        actual = place.ref()
        if place.dead or actual is None:
            place.own_storage = source
        else:
            actual.resize_(place.nbytes)
            if source.nbytes() == place.nbytes and result.storage_offset() == geometry.offset:
                actual.copy_(source)
            else:
                geometry.on(actual).copy_(result)
        self.copy_time += perf_counter_ns() - began

    def restore_all(self) -> None:
        """Recompute every live storage and stop evicting."""
        self.free_dead_storages()
        self.budget, self._remat_compute_at_restore, self.settled = (
            self._requested_budget,
            self.remat_compute,
            True,
        )
        self.strict = False
        failed: BaseException | None = None
        # Oldest first: then the inputs of later ones are in memory or dead. Dead inputs are
        # recomputed and evicted within the budget.
        nodes = sorted(self.latest.values(), key=lambda node: node.storage.number)
        for node in nodes:
            if node.defined:
                self._pin(node.storage)
        for node in nodes:
            if node.defined:
                continue
            try:
                self.pin(node)
                self.compare(node.storage)
            except Exception as error:
                failed = failed or error
                _poison(self.bytes[node.storage])
        self.budget = math.inf
        for node in nodes:
            try:
                self.compare(node.storage)
            except RematError as error:
                failed = failed or error
        for storage in [one for one in self.pool if self.bytes[one].dead]:
            self._evict(storage)
        if failed is not None:
            raise RematError(
                "a tensor could not be recomputed; it is now filled with NaN",
                code="remat.restore_failed",
                found=str(failed),
                fix="Use mode='planned', or no budget, for this model.",
            ) from failed


def _poison(place: StorageBytes, *, always: bool = False) -> None:
    """Fill a storage with 255 (NaN): reading an empty one would crash the process."""
    actual = place.ref()
    if actual is not None and (always or actual.nbytes() < place.nbytes):
        actual.resize_(place.nbytes)
        torch.empty(0, dtype=torch.uint8, device=actual.device).set_(actual).fill_(255)
