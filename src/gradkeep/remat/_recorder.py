"""Record a training step on unmodified PyTorch as a log.

A dispatch mode sees every operator, forward and backward. Storages are followed by weak references,
which fire when the last owner lets go, autograd's saved tensors included: so the log knows exactly
when bytes are free. Views are aliases. An in-place operator takes no new bytes, so it too is
recorded as one that makes an alias; the original's own logs have MUTATE lines instead, which stand
for a copy.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradkeep._errors import RematError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType


@dataclass(slots=True, eq=False)
class _Followed:
    """A storage that is alive, and the names that its tensors have in the log."""

    root: str
    size: int
    watch: object
    views: dict[tuple[Any, ...], str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Signature:
    """What the log needs to know of an operator."""

    name: str
    writes: tuple[int, ...]
    """Positions of arguments that it changes in place."""
    writes_named: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Event:
    """One line to be, or several."""

    kind: str
    name: str
    args: tuple[str, ...] = ()
    results: tuple[tuple[str, int, int], ...] = ()
    """Name, bytes and alias index of each result."""
    changed: tuple[int, ...] = ()


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what runs inside `with`; the log is written when it ends.

    Entered again for the same step, it keeps for every operator the least time that was seen.
    `live_peak` is the largest number of bytes that were alive at once.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, in_place: Literal["alias", "mutate"] = "alias"
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.path = Path(path)
        self.in_place = in_place
        self.live_peak = 0
        self._signatures: dict[Any, _Signature] = {}
        self._best: list[int] | None = None
        self._shape: list[_Event] = []
        self.repeats = 0
        self._begin()

    def _begin(self) -> None:
        self._events: list[_Event] = []
        self._times: list[int] = []
        self._alive: dict[int, _Followed] = {}
        self._count = 0
        self._live = 0
        self._backward = False
        self._recording = False

    def __enter__(self) -> Self:
        self._begin()
        self.live_peak = 0
        self._recording = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._recording = False
        self._alive.clear()
        if error is None:
            self._keep_least_times()
            self._write()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        start = time.perf_counter_ns()
        out = func(*args, **kwargs)
        spent = time.perf_counter_ns() - start
        if isinstance(out, torch.Tensor):
            if out.is_cuda:
                torch.cuda.synchronize(out.device)
                spent = time.perf_counter_ns() - start
            self._saw(func, args, kwargs, (out,), spent)
        elif isinstance(out, tuple | list):
            made = tuple(item for item in out if isinstance(item, torch.Tensor))
            if made and made[0].is_cuda:
                torch.cuda.synchronize(made[0].device)
                spent = time.perf_counter_ns() - start
            self._saw(func, args, kwargs, made, spent)
        elif out is None:
            self._saw(func, args, kwargs, (), spent)
        return out

    def _saw(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: tuple[torch.Tensor, ...],
        spent: int,
    ) -> None:
        signature = self._signatures.get(func)
        if signature is None:
            signature = self._signatures[func] = _signature(func)
        if not self._backward and torch._C._current_autograd_node() is not None:
            self._backward = True
            self._note(_Event("ANNOTATE", "BACKWARD"))
        given = list(_tensors(args))
        if kwargs:
            given.extend(_tensors(tuple(kwargs.values())))
        storages = [tensor.untyped_storage()._cdata for tensor in given]
        names = [self._name(tensor, key) for tensor, key in zip(given, storages, strict=True)]
        if signature.writes or signature.writes_named:
            changed = {
                tensor.untyped_storage()._cdata for tensor in _written(signature, args, kwargs)
            }
            made = tuple(t for t in made if t.untyped_storage()._cdata not in changed)
            if changed and self.in_place == "mutate":
                self._mutated(signature.name, names, storages, changed, spent)
            elif changed:
                self._changed(signature.name, names, storages, changed, made, spent)
                return
        if made:
            self._called(signature.name, names, storages, made, spent)

    def _called(
        self,
        name: str,
        names: list[str],
        storages: list[int],
        made: tuple[torch.Tensor, ...],
        spent: int,
        aliases: tuple[tuple[str, int, int], ...] = (),
    ) -> None:
        results, replaced = list(aliases), []
        for tensor in made:
            storage = tensor.untyped_storage()
            key = storage._cdata
            followed = self._alive.get(key)
            if followed is None:
                result = self._follow(storage, key)
                results.append((result, storage.nbytes(), -1))
            elif key in storages:
                result, shape = self._fresh(), _geometry(tensor)
                if shape in followed.views:
                    # The same view once more: the newer name stands for both.
                    replaced.append(followed.views[shape])
                followed.views[shape] = result
                results.append((result, followed.size, storages.index(key)))
        if results:
            self._note(_Event("CALL", name, tuple(names), tuple(results)), spent)
        for old in replaced:
            self._note(_Event("RELEASE", old))
        if self._live > self.live_peak:
            self.live_peak = self._live

    def _changed(
        self,
        name: str,
        names: list[str],
        storages: list[int],
        changed: set[int],
        made: tuple[torch.Tensor, ...],
        spent: int,
    ) -> None:
        """The storage stays and goes on under a new name; the old ones end here."""
        renamed = {key: self._fresh() for key in changed}
        aliases = tuple(
            (new, self._alive[key].size, storages.index(key)) for key, new in renamed.items()
        )
        self._called(name, names, storages, made, spent, aliases)
        for key, new in renamed.items():
            followed = self._alive[key]
            for old in (followed.root, *followed.views.values()):
                self._note(_Event("RELEASE", old))
            followed.views.clear()
            followed.root = new

    def _mutated(
        self, name: str, names: list[str], storages: list[int], changed: set[int], spent: int
    ) -> None:
        """The whole storage changes: its other names mean what it was before, and end here."""
        names = list(names)
        positions = []
        for key in changed:
            followed = self._alive[key]
            at = storages.index(key)
            positions.append(at)
            names[at] = followed.root
        self._note(_Event("MUTATE", name, tuple(names), changed=tuple(sorted(positions))), spent)
        for key in changed:
            followed = self._alive[key]
            for view in followed.views.values():
                self._note(_Event("RELEASE", view))
            followed.views.clear()

    def _name(self, tensor: torch.Tensor, key: int) -> str:
        followed = self._alive.get(key)
        if followed is None:
            storage = tensor.untyped_storage()
            name = self._follow(storage, key)
            self._note(_Event("CONSTANT", name, results=((name, storage.nbytes(), -1),)))
            return name
        if followed.views:
            return followed.views.get(_geometry(tensor), followed.root)
        return followed.root

    def _follow(self, storage: torch.UntypedStorage, key: int) -> str:
        name, size, mine = self._fresh(), storage.nbytes(), weakref.ref(self)

        def gone(_: object) -> None:
            recorder = mine()
            if recorder is not None and recorder._recording:
                recorder._died(key)

        self._alive[key] = _Followed(name, size, weakref.ref(storage, gone))
        self._live += size
        if self._live > self.live_peak:
            self.live_peak = self._live
        return name

    def _died(self, key: int) -> None:
        followed = self._alive.pop(key, None)
        if followed is not None:
            self._live -= followed.size
            self._note(_Event("RELEASE", followed.root))
            for view in followed.views.values():
                self._note(_Event("RELEASE", view))

    def _fresh(self) -> str:
        self._count += 1
        return f"x{self._count}"

    def _note(self, event: _Event, spent: int = 0) -> None:
        self._events.append(event)
        self._times.append(spent)

    def _keep_least_times(self) -> None:
        self.repeats += 1
        if self._best is None or self._shape != self._events:
            # The first time, or the step did something else: earlier times mean nothing here.
            self._shape, self._best = self._events, self._times
            return
        self._best = [min(pair) for pair in zip(self._best, self._times, strict=True)]

    def _write(self) -> None:
        lines = [_line("ANNOTATE", ANNOTATION="START")]
        for event, spent in zip(self._shape, self._best or [], strict=True):
            lines.extend(_lines(event, spent))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            temporary.write_text("\n".join(lines) + "\n")
            temporary.replace(self.path)
        except OSError as error:
            raise RematError(
                "the log cannot be written", path=self.path, found=str(error)
            ) from error


def record(
    path: str | os.PathLike[str], *, in_place: Literal["alias", "mutate"] = "alias"
) -> Recorder:
    """Record what runs inside `with record("step.log"):` as a log.

    Enter the same recorder several times for the same step to get the least time of every operator:

        recorder = record("step.log")
        for _ in range(3):
            with recorder:
                loss = model(x).sum()
                loss.backward()
    """
    return Recorder(path, in_place=in_place)


def _signature(func: Any) -> _Signature:
    arguments = func._schema.arguments
    written = [
        argument.alias_info is not None and argument.alias_info.is_write for argument in arguments
    ]
    positions = tuple(at for at, writes in enumerate(written) if writes)
    return _Signature(
        func._schema.name.partition("::")[2],
        positions,
        tuple(arguments[at].name for at in positions),
    )


def _written(
    signature: _Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[torch.Tensor]:
    for position, name in zip(signature.writes, signature.writes_named, strict=True):
        if position < len(args):
            yield from _tensors((args[position],))
        elif name in kwargs:
            yield from _tensors((kwargs[name],))


def _tensors(values: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            for item in value:
                if isinstance(item, torch.Tensor):
                    yield item


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)


def _lines(event: _Event, spent: int) -> Iterator[str]:
    match event.kind:
        case "ANNOTATE":
            yield _line("ANNOTATE", ANNOTATION=event.name)
        case "RELEASE":
            yield _line("RELEASE", NAME=event.name)
        case "CONSTANT":
            yield _line("CONSTANT", NAME=event.name)
            yield _line("MEMORY", NAME=event.name, MEMORY=str(event.results[0][1]))
        case "MUTATE":
            # The one list of numbers in the format.
            changed, args = list(event.changed), list(event.args)
            yield _line("MUTATE", NAME=event.name, ARGS=args, MUTATE=changed, TIME=str(spent))
        case _:
            names = [name for name, _, _ in event.results]
            args = list(event.args)
            yield _line("CALL", NAME=event.name, RESULT=names, ARGS=args, TIME=str(spent))
            for name, size, alias in event.results:
                yield _line("MEMORY", NAME=name, MEMORY=str(size))
                yield _line("ALIAS", NAME=name, ALIAS=str(alias))


def _line(instruction: str, **values: Any) -> str:
    return json.dumps({"INSTRUCTION": instruction, **values})
