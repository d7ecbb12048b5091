"""Rematerialization written down as plainly as possible: slow, recursive, easy to check.

The pool is a list, a neighbourhood is searched anew for every score, classes are relabelled one by
one. The fast core must give the same outcomes; benchmarks measure how much faster it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gradkeep.remat import Program
from gradkeep.remat.simulator._program import Op, ProgramStep, StepKind

if TYPE_CHECKING:
    import random

    from gradkeep.remat._eviction_core import Policy


@dataclass(eq=False)
class _Storage:
    size: int
    tensors: list[_Tensor] = field(default_factory=list)
    material: bool = False
    locks: int = 0
    references: int = 0
    pinned: bool = False
    last_access: float = -math.inf

    @property
    def cost(self) -> int:
        return sum({id(tensor.op): tensor.op.cost for tensor in self.tensors}.values())


@dataclass(eq=False)
class _Tensor:
    op: Op
    index: int
    storage: _Storage
    parents: list[_Tensor]
    siblings: list[_Tensor] = field(default_factory=list)
    children: list[_Tensor] = field(default_factory=list)
    defined: bool = False


class _OutOfMemory(Exception):
    pass


class _Thrashing(Exception):
    pass


@dataclass(frozen=True)
class PlainOutcome:
    """The part of an outcome that must agree."""

    status: str
    compute: int
    peak: int
    evictions: int
    ops_run: int


class PlainCore:
    """The eviction core without any cleverness; policies `ignore` and `eager`."""

    def __init__(self, name: str, budget: float, policy: Policy, remat_limit: float) -> None:
        self.name, self.budget, self.policy, self.remat_limit = name, budget, policy, remat_limit
        self.clock, self.memory, self.peak = 1, 0, 0
        self.evictions = self.ops_run = self.remat = 0
        self.pool: list[_Storage] = []
        self.label: dict[_Storage, int] = {}
        self.class_cost: dict[int, int] = {}

    def compute(self, op: Op, args: list[_Tensor]) -> list[_Tensor]:
        values = []
        for index, alias in enumerate(op.aliases):
            storage = args[alias].storage if alias >= 0 else _Storage(op.sizes[index])
            tensor = _Tensor(op, index, storage, list(args))
            storage.tensors.append(tensor)
            storage.references += 1
            values.append(tensor)
        for tensor in values:
            tensor.siblings = [other for other in values if other is not tensor]
        for parent in args:
            parent.children.extend(values)
        self.materialize(values[0], recompute=False)
        for tensor in values:
            tensor.storage.last_access = self.clock
        return values

    def materialize(self, tensor: _Tensor, *, recompute: bool) -> None:
        for parent in tensor.parents:
            parent.storage.last_access = self.clock
        there = [parent for parent in tensor.parents if parent.defined]
        missing = [parent for parent in tensor.parents if not parent.defined]
        for parent in there:
            self.lock(parent.storage)
        for parent in missing:
            if not parent.defined:
                self.materialize(parent, recompute=True)
            self.lock(parent.storage)
        need = sum(tensor.op.sizes)
        while self.memory + need > self.budget:
            if not self.pool:
                raise _OutOfMemory
            self.evict(self.choose())
        self.run(tensor, need, recompute=recompute)
        for parent in tensor.parents:
            parent.storage.locks -= 1
            if parent.storage.locks == 0:
                self.pool.append(parent.storage)
        if self.remat > self.remat_limit:
            raise _Thrashing

    def run(self, tensor: _Tensor, need: int, *, recompute: bool) -> None:
        self.clock += tensor.op.cost
        self.memory += need
        self.peak = max(self.peak, self.memory)
        self.ops_run += 1
        if recompute:
            self.remat += tensor.op.cost
        results = [*tensor.siblings, tensor]
        arriving = [result.storage for result in results if not result.storage.material]
        for result in results:
            if result.defined:
                self.memory -= result.op.sizes[result.index]
            result.defined = True
            result.storage.material = True
        for storage in arriving:
            if storage not in self.pool:
                self.pool.append(storage)
            if storage in self.label:
                self.class_cost[self.label.pop(storage)] -= storage.cost

    def evict(self, storage: _Storage) -> None:
        storage.material = False
        self.memory -= storage.size
        self.evictions += 1
        if storage in self.pool:
            self.pool.remove(storage)
        for tensor in storage.tensors:
            tensor.defined = False
        mine = len(self.class_cost)
        self.label[storage], self.class_cost[mine] = mine, storage.cost
        for other in {self.label[x] for x in self.beside(storage) if x in self.label} - {mine}:
            self.class_cost[mine] += self.class_cost[other]
            for member, number in self.label.items():
                if number == other:
                    self.label[member] = mine

    def lock(self, storage: _Storage) -> None:
        if storage.locks == 0:
            self.pool.remove(storage)
        storage.locks += 1

    def beside(self, storage: _Storage) -> set[_Storage]:
        reached = set()
        for tensor in storage.tensors:
            reached |= {other.storage for other in (*tensor.parents, *tensor.children)}
        return reached - {storage}

    def reachable(self, storage: _Storage, *, upwards: bool) -> set[_Storage]:
        reached: set[_Storage] = set()
        stack = [storage]
        while stack:
            for tensor in stack.pop().tensors:
                for other in tensor.parents if upwards else tensor.children:
                    if not other.storage.material and other.storage not in reached:
                        reached.add(other.storage)
                        stack.append(other.storage)
        return reached - {storage}

    def choose(self) -> _Storage:
        best, chosen = math.inf, self.pool[0]
        for storage in self.pool:
            cost = self.score(storage)
            if cost <= best:
                best, chosen = cost, storage
            if cost == 0:
                break
        return chosen

    def score(self, storage: _Storage) -> float:
        stale = self.clock - storage.last_access
        top: float = storage.cost
        under: float = storage.size
        if self.name == "lru":
            top, under = storage.last_access, 1
        elif self.name == "largest":
            top = 1
        elif self.name == "dtr-eq":
            near = {self.label[x] for x in self.beside(storage) if x in self.label}
            top += sum(self.class_cost[number] for number in near)
        if self.name in ("dtr", "msps"):
            top += sum(other.cost for other in self.reachable(storage, upwards=True))
        if self.name == "dtr":
            top += sum(other.cost for other in self.reachable(storage, upwards=False))
        if self.name.startswith("dtr"):
            under *= stale
        return top / under if under > 0 else math.inf


def plain_simulate(
    program: Program, *, heuristic: str, budget: float, policy: Policy, limit: float
) -> PlainOutcome:
    """Run a program on the plain core."""
    core = PlainCore(heuristic, budget, policy, program.compute * (limit - 1))
    tensors: dict[int, _Tensor] = {}
    status = "ok"
    try:
        for step in program.steps:
            if step.kind is StepKind.RUN:
                op = program.ops[step.index]
                results = core.compute(op, [tensors[number] for number in op.args])
                tensors.update(zip(op.results, results, strict=True))
                continue
            tensor = tensors[step.index]
            storage = tensor.storage
            if step.kind is StepKind.GET:
                storage.references += 1
            elif step.kind is StepKind.PIN:
                if not tensor.defined:
                    core.materialize(tensor, recompute=True)
                if not storage.pinned:
                    core.lock(storage)
                    storage.pinned = True
            else:
                storage.references -= 1
                idle = storage.references == 0 and storage.material and not storage.pinned
                if idle and policy == "eager":
                    core.evict(storage)
    except _OutOfMemory:
        status = "oom"
    except _Thrashing:
        status = "thrash"
    return PlainOutcome(status, core.clock, core.peak, core.evictions, core.ops_run)


def training_program(rng: random.Random, layers: int) -> Program:
    """A random program with the shape of a training step: layers with skips, then gradients."""
    ops: list[Op] = []
    steps: list[ProgramStep] = []

    def run(args: list[int], *, backward: bool = False) -> int:
        number = len(ops)
        steps.append(ProgramStep(StepKind.RUN, number))
        size, cost = rng.choice((1, 2, 4, 8)), rng.randint(1, 20)
        ops.append(Op("op", cost, tuple(args), (number,), (size,), (-1,), backward))
        return number

    forward = [run([])]
    for _ in range(layers - 1):
        skip = [forward[-2]] if len(forward) > 1 and rng.random() < 0.3 else []
        forward.append(run([forward[-1], *skip]))
    gradient = run([forward[-1]], backward=True)
    for activation in reversed(forward[:-1]):
        after = run([gradient, activation], backward=True)
        steps.extend(ProgramStep(StepKind.RELEASE, old) for old in (gradient, activation))
        gradient = after
    steps.append(ProgramStep(StepKind.PIN, gradient))
    return Program(tuple(ops), tuple(steps), tuple(f"t{at}" for at in range(len(ops))))
