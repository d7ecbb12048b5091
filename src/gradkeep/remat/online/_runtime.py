"""Online eviction: a dispatch mode that brings every operator's arguments into memory.

Only plain floating-point or complex tensors are evicted. Integers and booleans (lengths,
indices, offsets, batch sizes), tensors of a few bytes, tensor subclasses and the parts of sparse and
nested tensors stay: host code of operators reads them without passing the dispatcher. Accesses to a
tensor's bytes without an operator, such as `.numpy()`, bring the bytes back first (`_guards.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import warnings
from dataclasses import dataclass
from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from gradkeep._budgets import format_bytes
from gradkeep.errors import BudgetWarning
from gradkeep.remat._rerun import (
    FirstResultRerun,
    OperatorRerun,
    build_rerun,
    count_compared_results,
    has_workspace,
    is_uninitialized,
)
from gradkeep.remat._tensors import (
    Geometry,
    OperatorWatcher,
    find_storages,
    find_tensors,
    find_written_tensors,
    has_storage,
    map_nested,
    run_operator,
)
from gradkeep.remat.online._guards import install_guards, remove_guards
from gradkeep.remat.online._live_core import (
    LiveCore,
    OnlineArgument,
    OnlineOperator,
    predict_result_bytes,
)
from gradkeep.remat.simulator._heuristics import heuristic as heuristic_named

if TYPE_CHECKING:
    from types import TracebackType

    from gradkeep.remat._eviction_core import Storage
    from gradkeep.remat._eviction_core import TensorNode as Node
    from gradkeep.remat.simulator._heuristics import PoolSample

_METADATA_VIEWS = frozenset(f"aten::{name}" for name in ("view", "detach", "alias", "_unsafe_view"))
"""Views that read neither bytes nor bounds of their argument's storage."""
_EVICTABLE_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))

_LOGGER = logging.getLogger("gradkeep.remat")


class Pace:
    """Time of the first operators, with and without the work of the runtime."""

    def __init__(self) -> None:
        self._seen = self._whole = self._alone = 0

    def add_sample(self, whole: int, alone: int) -> bool:
        """Add one operator, in nanoseconds of its thread; return True when there are enough."""
        if alone <= 0:
            return False  # a view: nothing ran
        self._seen += 1
        # The first sixteen fill caches. Sums, not medians: many small operators do not matter
        # next to a few large ones.
        if self._seen > 16:
            self._whole += whole
            self._alone += alone
        return self._seen >= 48

    def warning(self) -> str | None:
        """Return a warning if this step should be planned instead."""
        whole, alone = self._whole / 32, self._alone / 32
        # Slowdown before anything is evicted; at 0.8 of the peak it is three to ten times larger.
        if whole < 3.0 * alone:
            return None
        message = (
            f"operators of this step take about {alone / 1e3:.0f} us each, and the online runtime adds "
            f"{(whole - alone) / 1e3:.0f} us: expect {whole / alone:.0f} times the plain time while "
            "nothing is evicted, and several times that in a tight budget; mode='planned' of "
            "gradkeep.memory_budget plans beforehand and adds microseconds per saved tensor"
        )
        _LOGGER.warning(message)
        return message


class OnlineRuntime(OperatorWatcher):
    """Keep the live bytes of everything inside `with` within a budget, deciding online.

    For models whose steps differ each time. Each operator takes tens of microseconds longer, so it
    pays off if operators take half a millisecond or more. Leaving it restores everything that is
    still referenced, without the budget, also after an exception. Entered again for the
    next step, it reuses the known sizes of its operators.

    >>> model, x = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(6)]), torch.ones(4, 8)
    >>> with OnlineRuntime(1200) as online:
    ...     model(x).sum().backward()
    >>> online.report().evictions > 0
    True
    """

    def __init__(
        self,
        budget: float = math.inf,
        *,
        heuristic: str = "dtr-eq",
        limit: float = 4.0,
        sample: PoolSample | None = None,
        strict: bool = False,
    ) -> None:
        super().__init__()
        self.budget = budget
        self.heuristic, self.limit = heuristic, limit
        self._sample = sample
        self.strict = strict
        """Raise if no storage can be evicted, and warn when eviction stops."""
        self.live = self._new_core()
        # Threads started inside also run inside: one operator at a time.
        self._lock = threading.RLock()
        self._on = False
        self._sizes: dict[Any, int] = {}
        """Bytes of an operator's results by its arguments, known once it has run."""
        self.slow: str | None = None
        """Warning that operators are so small that a plan would be better."""
        self._hooks: list[Any] = []
        self._parameters: set[int] = set()
        self._operators = self._pinned = 0
        self._last_nanoseconds = 0
        # Thread time excludes waiting for a core or another thread.
        self._operator_time = self._prediction_time = 0
        self._pace: Pace | None = Pace()

    def _new_core(self) -> LiveCore:
        return LiveCore(
            heuristic_named(self.heuristic),
            budget=self.budget,
            limit=self.limit,
            strict=self.strict,
            sample=self._sample,
        )

    def __enter__(self) -> Self:
        # Parameters count from the beginning, not from their first use.
        constants = [storage for ref in self.live.constants() if (storage := ref()) is not None]
        self.live = self._new_core()
        while constants:
            self.live.node_on(constants.pop(0))
        self._parameters.clear()
        self._operators = self._pinned = 0
        self._on = True
        install_guards(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        try:
            with self._lock:
                self.live.restore_all()
        finally:
            self._on = False
            remove_guards(self)

    def limit_to(self, budget: float) -> None:
        """Change the budget."""
        self.budget = budget
        self.live.limit_to(budget)

    def report(self) -> OnlineReport:
        """Report on everything since it was last entered."""
        live = self.live
        return OnlineReport(
            budget=self.budget,
            peak=live.peak,
            over=0 if math.isinf(self.budget) else max(0, live.over, int(live.peak - self.budget)),
            operators=self._operators,
            evictions=live.evictions,
            rematerializations=live.rematerializations,
            pinned=self._pinned,
            base_seconds=live.base_compute / 1e9,
            remat_seconds=live.remat_compute / 1e9,
            search_seconds=live.search_time / 1e9,
            copy_seconds=live.copy_time / 1e9,
            gave_up=live.gave_up,
            reason=live.reason,
            exhausted=live.exhausted,
        )

    def live_bytes(self) -> int:
        """Count the bytes in memory now, without tensors that died since the last operator."""
        with self._lock, _disable_current_modes():
            self.live.free_dead_storages()
            return self.live.memory

    def reset_peak(self) -> None:
        """Measure the peak from now on."""
        self.live.peak = self.live_bytes()
        self.live.over = 0

    def pin(self, tensor: Tensor) -> None:
        """Never evict a tensor."""
        # Hide recomputation from a recorder on top of this mode.
        with self._lock, _disable_current_modes():
            for storage in find_storages(tensor):
                self.live.keep(self.live.node_on(storage))

    def has_seen(self, leaves: set[int]) -> bool:
        """Return True if an operator has read one of these leaves, by id."""
        return not self._parameters.isdisjoint(leaves)

    def stop_evicting(self, reason: str) -> None:
        """Restore everything, and evict nothing until it is entered again."""
        with self._lock, _disable_current_modes():
            if not self.live.gave_up:
                self.live.gave_up, self.live.reason = True, reason
                self.live.restore_all()
                self._warn_if_strict()

    def _warn_if_strict(self) -> None:
        if self.strict:
            warnings.warn(
                f"memory budget: eviction stopped, so the budget of "
                f"{format_bytes(int(self.budget))} no longer holds: {self.live.reason}; raise the budget",
                BudgetWarning,
                stacklevel=3,
            )

    def bytes_of(self, storage: torch.UntypedStorage) -> int:
        """Return the bytes of a storage, in memory or evicted."""
        node = self.live.latest.get(id(storage))
        return storage.nbytes() if node is None else self.live.bytes[node.storage].nbytes

    def last_nanoseconds(self) -> int:
        """Return the time of the last operator without the runtime's own work."""
        return self._last_nanoseconds

    def bring_back(self, tensor: Tensor) -> None:
        """Bring a tensor's bytes into memory."""
        node = self.live.latest.get(id(tensor.untyped_storage()))
        if node is None or (node.defined and self.live.bytes[node.storage].evicted_hash is None):
            return
        with self._lock, _disable_current_modes():
            self.live.materialize_and_lock([node])
            self.live.keep(node)
            self.live.unlock_all([node])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with self._lock:
            if not self._on:
                return run_operator(func, args, kwargs)
            if self._pace is None:
                return self._dispatch(func, args, kwargs)
            began = thread_time_ns()
            out = self._dispatch(func, args, kwargs)
            if self._pace.add_sample(
                thread_time_ns() - began - self._prediction_time, self._operator_time
            ):
                self.slow = self._pace.warning()
                self._pace = None
            return out

    def _tidy(self) -> None:
        settled = self.live.settled
        self.live.tidy()
        if self.live.settled and not settled:
            self._warn_if_strict()

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        live = self.live
        self._tidy()
        self._operators += 1
        self._last_nanoseconds = self._operator_time = self._prediction_time = 0
        signature = self.signature(func)
        name = func._schema.name
        inputs = find_tensors(args) + find_tensors(tuple(kwargs.values()))
        self._watch_gradients(inputs)
        written = find_written_tensors(signature, args, kwargs)
        if not all(map(has_storage, inputs)):
            return self._run_unstrided(func, args, kwargs, inputs, written)
        if name in _METADATA_VIEWS and not signature.writes:
            for tensor in inputs:
                live.node_of(tensor)
            out = run_operator(func, args, kwargs)
            self._keep_metadata([*inputs, *find_tensors(out)])
            return out
        nodes = [live.node_of(tensor) for tensor in inputs]
        for tensor in written:
            live.prepare_overwrite(live.node_of(tensor))
        live.materialize_and_lock(nodes)
        try:
            self._keep_metadata(inputs)
            return self._run(func, args, kwargs, inputs, nodes, written)
        finally:
            live.unlock_all(nodes)
            self._tidy()

    def _keep_metadata(self, tensors: list[Tensor]) -> None:
        """Pin tensors that host code may read without an operator."""
        for tensor in tensors:
            if not _is_evictable(tensor) and has_storage(tensor):
                node = self.live.node_of(tensor)
                if has_workspace(node.op.name):
                    continue
                self._pinned += not node.storage.pinned
                self.live.keep(node)

    def _run(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[Tensor],
        nodes: list[Node],
        written: list[Tensor],
    ) -> Any:
        live = self.live
        # Before it runs, because `set_` changes the storage of a tensor.
        changed = list(dict.fromkeys(live.node_of(tensor).storage for tensor in written))
        random = torch.Tag.nondeterministic_seeded in func.tags
        key = (func, tuple((tensor.shape, tensor.dtype) for tensor in inputs))
        need = self._sizes.get(key)
        if need is None:
            largest = max((tensor.nbytes for tensor in inputs), default=0)
            # Predict only if memory is tight: few results exceed 8 times the largest argument.
            tight = not written and live.memory + 8 * largest > self.budget
            began = thread_time_ns()
            need = (
                predict_result_bytes(func, args, kwargs, random=random)
                if tight or not inputs
                else 0
            )
            self._prediction_time = thread_time_ns() - began
        live.make_room(need)
        state = torch.get_rng_state() if random else None
        grad_mode = torch.is_grad_enabled()
        began, own = perf_counter_ns(), thread_time_ns()
        out = run_operator(func, args, kwargs)
        self._operator_time = thread_time_ns() - own
        self._last_nanoseconds = cost = perf_counter_ns() - began
        results = find_tensors(out)
        if not all(map(has_storage, results)):
            # The parts of a sparse or nested tensor are invisible to the dispatcher.
            for node in nodes:
                live.keep(node)
            self._keep_parts(results)
            return out
        fresh = self._find_new_results(results)
        self._sizes[key] = sum(result.untyped_storage().nbytes() for _, result in fresh)
        if fresh or changed:
            recipe = self._build_rerun(
                func, args, kwargs, inputs, nodes, results, written=bool(changed)
            )
            first_run = OnlineOperator(
                func._schema.name, cost, (), (), grad_mode=grad_mode, random=state
            )
            first_run.exact = not is_uninitialized(first_run.name) and count_compared_results(
                func, len(results)
            ) == len(results)
            if recipe.first_result is not None and recipe.first_result.run is not None:
                self._declare_split_operator(first_run, recipe.first_result, fresh, nodes, changed)
            else:
                self._declare_operator(first_run, recipe, fresh, nodes, changed)
        return out

    def _find_new_results(self, results: list[Tensor]) -> list[tuple[int, Tensor]]:
        """Return the results with new storages; of several that share one, the largest."""
        largest: dict[int, tuple[int, Tensor]] = {}
        for position, result in enumerate(results):
            number = id(result.untyped_storage())
            if number in self.live.latest or not result.untyped_storage().nbytes():
                continue
            if number not in largest or result.numel() > largest[number][1].numel():
                largest[number] = (position, result)
        return list(largest.values())

    def _declare_operator(
        self,
        first_run: OnlineOperator,
        recipe: OperatorRerun,
        fresh: list[tuple[int, Tensor]],
        nodes: list[Node],
        changed: list[Storage],
    ) -> list[Node]:
        """Add an operator and its new storages to the core; pin results that cannot be recomputed."""
        storages = [result.untyped_storage() for _, result in fresh]
        by_storage = [node.storage for node in nodes]
        operator = dataclasses.replace(
            first_run,
            sizes=(*(storage.nbytes() for storage in storages), *(0 for _ in changed)),
            aliases=(*(-1 for _ in storages), *(by_storage.index(one) for one in changed)),
            results=tuple((at, Geometry.of(result)) for at, result in fresh),
        )
        if recipe.run is not None and all(_covers_storage(result) for _, result in fresh):
            operator.run, operator.args, operator.kwargs = recipe.run, recipe.args, recipe.kwargs
        new_nodes = self.live.add_operator(operator, nodes, storages)
        workspace = has_workspace(first_run.name)
        evicted = [workspace or _is_evictable(result) for _, result in fresh]
        for node, may_go in zip(new_nodes, [*evicted, *(True for _ in changed)], strict=True):
            if operator.run is None or not may_go:
                self._pinned += not node.storage.pinned
                self.live.keep(node)
        return new_nodes

    def _declare_split_operator(
        self,
        first_run: OnlineOperator,
        first_result: FirstResultRerun,
        fresh: list[tuple[int, Tensor]],
        nodes: list[Node],
        changed: list[Storage],
    ) -> None:
        """Add batch normalization: pin its statistics, and recompute its result from them."""
        rest = [(at, result) for at, result in fresh if at > 0]
        # New results come first, then the running statistics that it changed.
        statistics = self._declare_operator(
            first_run, OperatorRerun(None, (), ()), rest, nodes, changed
        )
        shown = tuple(
            OnlineArgument(node, Geometry.of(result))
            for node, (_, result) in zip(statistics[: len(rest)], rest, strict=True)
        )
        rerun = OperatorRerun(first_result.run, (*first_result.args, *shown), ())
        free = dataclasses.replace(first_run, cost=0, random=None)
        self._declare_operator(
            free, rerun, [one for one in fresh if one[0] == 0], [*nodes, *statistics], []
        )

    def _build_rerun(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[Tensor],
        nodes: list[Node],
        results: list[Tensor],
        *,
        written: bool,
    ) -> OperatorRerun:
        by_id = {id(tensor): node for tensor, node in zip(inputs, nodes, strict=True)}

        def shown(tensor: Tensor) -> OnlineArgument:
            return OnlineArgument(by_id[id(tensor)], Geometry.of(tensor))

        arguments = map_nested(args, shown, Tensor)
        named = tuple((name, map_nested(value, shown, Tensor)) for name, value in kwargs.items())
        return build_rerun(func, arguments, named, results, in_place=written)

    def _watch_gradients(self, inputs: list[Tensor]) -> None:
        """Pin gradients as soon as they exist: evicting them would not pay off."""
        for tensor in inputs:
            if tensor.requires_grad and tensor.is_leaf and id(tensor) not in self._parameters:
                self._parameters.add(id(tensor))
                hook = tensor.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def _accumulated(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.pin(parameter.grad)

    def _run_unstrided(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[Tensor],
        written: list[Tensor],
    ) -> Any:
        """Run an operator on sparse, nested or wrapper tensors, and pin their storages."""
        live = self.live
        for tensor in written:
            live.prepare_overwrite(live.node_of(tensor))
        self._keep_parts(inputs)
        out = run_operator(func, args, kwargs)
        self._keep_parts(find_tensors(out))
        self._tidy()
        return out

    def _keep_parts(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            for storage in find_storages(tensor):
                node = self.live.node_on(storage)
                self.live.materialize_and_lock([node])
                self.live.keep(node)
                self.live.unlock_all([node])


def _is_evictable(tensor: Tensor) -> bool:
    """Return True if only operators read this tensor: plain floating point of more than 8 bytes."""
    dtype = tensor.dtype
    return (
        (dtype.is_floating_point or dtype.is_complex)
        and type(tensor) in _EVICTABLE_TYPES
        and tensor.nbytes > 8  # host code likes to read a single number
    )


def _covers_storage(result: Tensor) -> bool:
    """Return True if a result covers every byte of its storage."""
    return result.numel() * result.element_size() == result.untyped_storage().nbytes()


@dataclass(frozen=True, slots=True)
class OnlineReport:
    """Bytes, counts and seconds of one step."""

    budget: float
    """Bytes."""
    peak: int
    """Largest number of bytes alive at once."""
    over: int
    """Bytes of the peak above the budget, because no storage could be evicted."""
    operators: int
    evictions: int
    rematerializations: int
    pinned: int
    """Storages that cannot be recomputed or must stay in memory."""
    base_seconds: float
    """Time of running every operator once."""
    remat_seconds: float
    """Time of recomputation."""
    search_seconds: float
    """Time of choosing storages to evict."""
    copy_seconds: float
    """Time of copying recomputed values into their storages."""
    gave_up: bool
    """Eviction stopped at some operator, for the `reason`."""
    reason: str = ""
    exhausted: bool = False
    """No storage could be evicted although room was needed: out of memory in the simulator."""

    def __str__(self) -> str:
        limit = (
            "no budget" if math.isinf(self.budget) else f"budget {format_bytes(int(self.budget))}"
        )
        lines = (
            f"peak {format_bytes(self.peak)}, {limit}, {self.evictions} evictions, "
            f"{self.rematerializations} operators run again, recomputation "
            f"{self.remat_seconds / max(self.base_seconds, 1e-9):.1%} of the time of the rest"
        )
        if self.gave_up:
            return f"{lines}; eviction stopped: {self.reason}"
        if self.over:
            return f"{lines}; {format_bytes(self.over)} over, because no storage could be evicted"
        return lines
