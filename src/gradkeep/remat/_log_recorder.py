"""Record a training step on unmodified PyTorch as a log.

A dispatch mode sees every operator, forward and backward. Weak references to storages fire when the last
owner is gone, including autograd's saved tensors, so the log knows exactly when bytes are free. Views
are aliases. An in-place operator allocates nothing, so it too is recorded as one that makes an alias; the
original's own logs have MUTATE lines instead, which represent a copy.

Recording runs at every operator and must be cheap: tensors are numbers until the log is written, and a
release is just the number.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch

from gradkeep import _arguments
from gradkeep._arguments import file_to_write
from gradkeep.errors import RematError
from gradkeep.remat._tensors import (
    OperatorWatcher,
    StorageRef,
    exclude_mode_from_compiler,
    find_written_storages,
    view_key,
)
from gradkeep.remat.simulator._program import replace_file

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator
    from types import TracebackType

    from torch import Tensor

    from gradkeep.remat._tensors import OperatorCall
    from gradkeep.remat.online._runtime import OnlineRuntime


class LoggedCall(NamedTuple):
    """An operator that ran, with results or with whole storages changed in place."""

    name: str
    args: tuple[int, ...]
    results: tuple[tuple[int, int, int], ...]
    """Number, bytes and alias index of each result."""
    written: tuple[int, ...] = ()
    """Positions of the arguments that it mutates; they keep their numbers."""


class LoggedConstant(NamedTuple):
    """A storage that existed before the step."""

    number: int
    size: int


Event = LoggedCall | LoggedConstant | int | str
"""Recorded event; an integer is a release, a string an annotation."""


@dataclass(slots=True, eq=False)
class _FollowedStorage:
    """A live storage and the numbers of its tensors in the log."""

    root: int
    size: int
    ref: StorageRef
    views: dict[tuple[Any, ...], int]


@dataclass(slots=True)
class LoggedStep:
    """One run of a step."""

    events: list[Event] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    """Nanoseconds of every call."""

    def with_least_times(self, other: LoggedStep) -> LoggedStep:
        """Take the smaller of both times per operator, or the other step if its events differ."""
        if self.events != other.events:
            return other
        return LoggedStep(self.events, list(map(min, self.times, other.times)))

    def write(self, path: Path) -> None:
        """Write the log atomically."""
        lines = [_line("ANNOTATE", ANNOTATION="START"), *self._lines()]
        file_to_write(path, error=RematError)
        try:
            replace_file(path, "\n".join(lines) + "\n")
        except OSError as error:
            raise RematError(
                "the log cannot be written",
                code="remat.log_not_written",
                path=path,
                found=str(error),
            ) from error

    def _lines(self) -> Iterator[str]:
        times = iter(self.times)
        for event in self.events:
            if isinstance(event, int):
                yield _line("RELEASE", NAME=f"x{event}")
            elif isinstance(event, str):
                yield _line("ANNOTATE", ANNOTATION=event)
            elif isinstance(event, LoggedConstant):
                yield _line("CONSTANT", NAME=f"x{event.number}")
                yield _line("MEMORY", NAME=f"x{event.number}", MEMORY=str(event.size))
            else:
                yield from _call_lines(event, str(next(times)))


def _call_lines(call: LoggedCall, spent: str) -> Iterator[str]:
    args = [f"x{number}" for number in call.args]
    if call.written:
        # The only list of integers in the format, as in the original.
        written = list(call.written)
        yield _line("MUTATE", NAME=call.name, ARGS=args, MUTATE=written, TIME=spent)
        return
    names = [f"x{number}" for number, _, _ in call.results]
    yield _line("CALL", NAME=call.name, RESULT=names, ARGS=args, TIME=spent)
    for number, size, alias in call.results:
        yield _line("MEMORY", NAME=f"x{number}", MEMORY=str(size))
        yield _line("ALIAS", NAME=f"x{number}", ALIAS=str(alias))


def _line(instruction: str, **values: Any) -> str:
    return json.dumps({"INSTRUCTION": instruction, **values})


class Recorder(OperatorWatcher):
    """Context manager that records the operators inside it and writes the log when it ends.

    Entered again for the same step, it keeps the least time of every operator; `repeats` is the number of
    recorded runs. `live_peak` is the largest number of bytes alive at once. A step inside a budget is
    recorded as if there were none, if its `runtime` is passed.

    Args:
        path: Log file to write.
        in_place: How to record in-place operators: `"alias"`, or `"mutate"` (copy on write) as in the
            original.
        runtime: Online runtime that evicts storages of the recorded step.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        in_place: Literal["alias", "mutate"] = "alias",
        runtime: OnlineRuntime | None = None,
    ) -> None:
        if in_place not in ("alias", "mutate"):
            raise RematError(
                f"in_place must be 'alias' or 'mutate', got {in_place!r}", code="argument.invalid"
            )
        super().__init__()
        self.path = Path(path)
        self.in_place = in_place
        self._runtime = runtime
        self.repeats = 0
        self._best: LoggedStep | None = None
        self._begin()

    def _begin(self) -> None:
        self._step = LoggedStep()
        self._alive: dict[int, _FollowedStorage] = {}
        self._count = self._live = self.live_peak = 0
        self._backward = False

    def __enter__(self) -> Self:
        self._begin()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        # Storages that die from here on are not part of the step.
        self._alive.clear()
        if error is None:
            best = self._step if self._best is None else self._best.with_least_times(self._step)
            # A different step: earlier times do not apply.
            self.repeats = 1 if best is self._step else self.repeats + 1
            self._best = best
            best.write(self.path)

    def on_operator(self, call: OperatorCall) -> None:
        """Record an operator.

        Args:
            call: The operator, its arguments and results.

        Raises:
            RematError: If a tensor has no storage.
        """
        try:
            self._record_call(call)
        except NotImplementedError as error:
            raise RematError(
                "a tensor without a storage cannot be recorded",
                code="remat.no_storage",
                found=f"{call.func} ({error})",
                fix="Disable sparse gradients for the recorded step.",
            ) from error

    def _record_call(self, call: OperatorCall) -> None:
        if not self._backward and torch._C._current_autograd_node() is not None:
            self._backward = True
            self._step.events.append("BACKWARD")
        signature, outputs = call.signature, call.outputs
        spent = call.nanoseconds if self._runtime is None else self._runtime.last_nanoseconds()
        # This runs per argument of every operator: hence the plain loop.
        alive, names, keys = self._alive, [], []
        for tensor in call.inputs:
            storage = tensor.untyped_storage()
            key = id(storage)
            followed = alive.get(key)
            if followed is None:
                name = self._follow(storage, key)
                self._step.events.append(LoggedConstant(name, alive[key].size))
            elif followed.views:
                name = followed.views.get(view_key(tensor), followed.root)
            else:
                name = followed.root
            keys.append(key)
            names.append(name)
        if signature.writes and signature.training < 0:  # only writes declared by the schema
            written = find_written_storages(signature, call.args, call.kwargs)
            if written:
                outputs = [t for t in outputs if id(t.untyped_storage()) not in written]
                if self.in_place == "alias":
                    self._add_in_place_call(signature.name, names, keys, written, outputs, spent)
                    return
                self._add_mutation(signature.name, names, keys, written, spent)
                spent = 0  # it counts once
        if outputs:
            self._add_call(signature.name, names, keys, outputs, spent)

    def _add_call(
        self,
        name: str,
        names: list[int],
        keys: list[int],
        outputs: list[Tensor],
        spent: int,
        aliases: Iterable[tuple[int, int, int]] = (),
    ) -> None:
        alive, results, replaced = self._alive, list(aliases), []
        for tensor in outputs:
            storage = tensor.untyped_storage()
            key = id(storage)
            followed = alive.get(key)
            if followed is None:
                result = self._follow(storage, key)
                results.append((result, alive[key].size, -1))
            elif key in keys:
                self._count = result = self._count + 1
                shape = view_key(tensor)
                if shape in followed.views:
                    # The same view again: the new number replaces the old one.
                    replaced.append(followed.views[shape])
                followed.views[shape] = result
                results.append((result, followed.size, keys.index(key)))
        if results:
            self._step.events.append(LoggedCall(name, tuple(names), tuple(results)))
            self._step.times.append(spent)
            self._step.events.extend(replaced)

    def _add_in_place_call(
        self,
        name: str,
        names: list[int],
        keys: list[int],
        written: dict[int, torch.UntypedStorage],
        outputs: list[Tensor],
        spent: int,
    ) -> None:
        """Give written storages new numbers and release the old ones."""
        results, ended = [], []
        for key, storage in written.items():
            followed = self._alive[key]
            self._count = new = self._count + 1
            ended += [followed.root, *followed.views.values()]
            size = self._bytes_of(storage)
            if size == followed.size:
                results.append((new, size, keys.index(key)))
            else:
                # Resized: the new memory is allocated before the old is freed.
                results.append((new, size, -1))
                self._live += size
                self.live_peak = max(self.live_peak, self._live)
                self._live -= followed.size
                followed.size = size
            followed.root, followed.views = new, {}
        self._add_call(name, names, keys, outputs, spent, results)
        self._step.events.extend(ended)

    def _add_mutation(
        self,
        name: str,
        names: list[int],
        keys: list[int],
        written: dict[int, torch.UntypedStorage],
        spent: int,
    ) -> None:
        """Record whole storages as mutated and release their views."""
        args = list(names)
        ended: list[int] = []
        positions = [keys.index(key) for key in written]
        for key, at in zip(written, positions, strict=True):
            followed = self._alive[key]
            args[at] = followed.root
            ended += followed.views.values()
            followed.views = {}
        self._step.events.append(LoggedCall(name, tuple(args), (), tuple(sorted(positions))))
        self._step.times.append(spent)
        self._step.events.extend(ended)

    def _follow(self, storage: torch.UntypedStorage, key: int) -> int:
        self._count = number = self._count + 1
        size = self._bytes_of(storage)
        ref = StorageRef(storage, self._on_storage_freed)
        ref.key = key
        self._alive[key] = _FollowedStorage(number, size, ref, {})
        self._live += size
        if self._live > self.live_peak:
            self.live_peak = self._live
        return number

    def _bytes_of(self, storage: torch.UntypedStorage) -> int:
        return storage.nbytes() if self._runtime is None else self._runtime.bytes_of(storage)

    def _on_storage_freed(self, ref: StorageRef) -> None:
        followed = self._alive.pop(ref.key, None)
        if followed is not None:
            self._live -= followed.size
            self._step.events += [followed.root, *followed.views.values()]


@_arguments.checked(RematError)
def record(
    path: str | os.PathLike[str], *, in_place: Literal["alias", "mutate"] = "alias"
) -> Recorder:
    """Record the operators inside a `with` block as a log.

    Enter the same recorder several times for the same step to get the least time of every operator:

        recorder = record("step.log")
        for _ in range(3):
            with recorder:
                loss = model(x).sum()
                loss.backward()

    Args:
        path: Log file to write.
        in_place: How to record in-place operators: `"alias"`, or `"mutate"` (copy on write) as in the
            original.

    Returns:
        A recorder to enter.

    Raises:
        RematError: If the log cannot be written, or a tensor has no storage.
    """
    return exclude_mode_from_compiler(Recorder)(path, in_place=in_place)
