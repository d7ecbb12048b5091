"""Record a training step on unmodified PyTorch as a log.

A dispatch mode sees every operator, forward and backward. Storages are followed by weak references,
which fire when the last owner lets go, autograd's saved tensors included: so the log knows exactly
when bytes are free. Views are aliases. An in-place operator takes no new bytes, so it too is
recorded as one that makes an alias; the original's own logs have MUTATE lines instead, which stand
for a copy.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradkeep.errors import RematError
from gradkeep.remat._followed import Followed, Watch
from gradkeep.remat._operators import SEQUENCES, Signature, collect, geometry, signature_of, written
from gradkeep.remat._recorded import BACKWARD, Call, Constant, Mutation, Notes

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable
    from types import TracebackType


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what runs inside `with`; the log is written when it ends.

    Entered again for the same step, it keeps for every operator the least time that was seen;
    `repeats` says of how many runs. `live_peak` is the largest number of bytes alive at once.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps every call and loads its compiler at the first: seconds, for nothing.
        return False

    def __init__(
        self, path: str | os.PathLike[str], *, in_place: Literal["alias", "mutate"] = "alias"
    ) -> None:
        if in_place not in ("alias", "mutate"):
            raise RematError(
                "unknown way to record in-place operators",
                found=repr(in_place),
                expected="'alias' or 'mutate'",
            )
        super().__init__()  # type: ignore[no-untyped-call]
        self.path = Path(path)
        self.in_place = in_place
        self.live_peak = 0
        self.repeats = 0
        self._signatures: dict[Any, Signature] = {}
        self._best: Notes | None = None
        self._begin()

    def _begin(self) -> None:
        self._notes = Notes()
        self._alive: dict[int, Followed] = {}
        self._count = 0
        self._live = 0
        self._backward = False
        self.live_peak = 0

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
        # Whoever dies from here on does so outside the step: the watches go first.
        self._alive.clear()
        if error is None:
            best = self._notes if self._best is None else self._best.least(self._notes)
            # Another step than before: earlier times mean nothing here.
            self.repeats = 1 if best is self._notes else self.repeats + 1
            self._best = best
            best.write(self.path)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        start = perf_counter_ns()
        out = func(*args, **kwargs) if kwargs else func(*args)
        spent = perf_counter_ns() - start
        if isinstance(out, Tensor):
            made = [out]
        elif type(out) in SEQUENCES:
            made = [item for item in out if isinstance(item, Tensor)]
        elif out is None:
            made = []
        else:
            return out
        if made and made[0].is_cuda:
            torch.cuda.synchronize(made[0].device)
            spent = perf_counter_ns() - start
        try:
            self._saw(func, args, kwargs, made, spent)
        except NotImplementedError as error:
            raise RematError(
                "a tensor without a storage cannot be recorded",
                found=f"{func} ({error})",
                expected="strided tensors",
                fix="switch sparse gradients off for the recorded step",
            ) from error
        return out

    def _saw(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        made: list[Tensor],
        spent: int,
    ) -> None:
        signature = self._signatures.get(func)
        if signature is None:
            signature = self._signatures[func] = signature_of(func)
        if not self._backward and torch._C._current_autograd_node() is not None:
            self._backward = True
            self._notes.events.append(BACKWARD)
        given: list[Tensor] = []
        collect(args, given)
        if kwargs:
            collect(kwargs.values(), given)
        # Everything below is per argument of every operator: hence the plain loop.
        alive, names, keys = self._alive, [], []
        for tensor in given:
            storage = tensor.untyped_storage()
            key = id(storage)
            followed = alive.get(key)
            if followed is None:
                name = self._follow(storage, key)
                self._notes.events.append(Constant(name, alive[key].size))
            elif followed.views:
                name = followed.views.get(geometry(tensor), followed.root)
            else:
                name = followed.root
            keys.append(key)
            names.append(name)
        if signature.writes:
            changed = written(signature, args, kwargs or {})
            if changed:
                made = [t for t in made if id(t.untyped_storage()) not in changed]
                if self.in_place == "alias":
                    self._changed(signature.name, names, keys, changed, made, spent)
                    return
                self._mutated(signature.name, names, keys, changed, spent)
                spent = 0  # it is told once
        if made:
            self._called(signature.name, names, keys, made, spent)

    def _called(
        self,
        name: str,
        names: list[int],
        keys: list[int],
        made: list[Tensor],
        spent: int,
        aliases: Iterable[tuple[int, int, int]] = (),
    ) -> None:
        alive, results, replaced = self._alive, list(aliases), []
        for tensor in made:
            storage = tensor.untyped_storage()
            key = id(storage)
            followed = alive.get(key)
            if followed is None:
                result = self._follow(storage, key)
                results.append((result, alive[key].size, -1))
            elif key in keys:
                self._count = result = self._count + 1
                shape = geometry(tensor)
                if followed.views is None:
                    followed.views = {}
                elif shape in followed.views:
                    # The same view once more: the newer name stands for both.
                    replaced.append(followed.views[shape])
                followed.views[shape] = result
                results.append((result, followed.size, keys.index(key)))
        if results:
            self._notes.events.append(Call(name, tuple(names), tuple(results)))
            self._notes.times.append(spent)
            self._notes.events.extend(replaced)

    def _changed(
        self,
        name: str,
        names: list[int],
        keys: list[int],
        changed: dict[int, torch.UntypedStorage],
        made: list[Tensor],
        spent: int,
    ) -> None:
        """The storage stays and goes on under a new number; the old ones end here."""
        results, ended = [], []
        for key, storage in changed.items():
            followed = self._alive[key]
            self._count = new = self._count + 1
            ended += [followed.root, *(followed.views or {}).values()]
            size = storage.nbytes()
            if size == followed.size:
                results.append((new, size, keys.index(key)))
            else:
                # It was resized: other memory, which was taken before the old was given back.
                results.append((new, size, -1))
                self._live += size
                self.live_peak = max(self.live_peak, self._live)
                self._live -= followed.size
                followed.size = size
            followed.root, followed.views = new, None
        self._called(name, names, keys, made, spent, results)
        self._notes.events.extend(ended)

    def _mutated(
        self,
        name: str,
        names: list[int],
        keys: list[int],
        changed: dict[int, torch.UntypedStorage],
        spent: int,
    ) -> None:
        """The whole storage changes: its other names mean what it was before, and end here."""
        args = list(names)
        positions = [keys.index(key) for key in changed]
        for key, at in zip(changed, positions, strict=True):
            args[at] = self._alive[key].root
        self._notes.events.append(Mutation(name, tuple(args), tuple(sorted(positions))))
        self._notes.times.append(spent)
        for key in changed:
            followed = self._alive[key]
            self._notes.events.extend((followed.views or {}).values())
            followed.views = None

    def _follow(self, storage: torch.UntypedStorage, key: int) -> int:
        self._count = number = self._count + 1
        size = storage.nbytes()
        watch = Watch(storage, self._gone)
        watch.key = key
        self._alive[key] = Followed(number, size, watch)
        self._live += size
        if self._live > self.live_peak:
            self.live_peak = self._live
        return number

    def _gone(self, watch: Watch) -> None:
        followed = self._alive.pop(watch.key, None)
        if followed is not None:
            self._live -= followed.size
            self._notes.events.append(followed.root)
            if followed.views:
                self._notes.events.extend(followed.views.values())


class _BesideCompiler(Recorder):  # type: ignore[no-untyped-call]
    """For a process that has compiled functions: torch must not try to compile the recorder too."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


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
    kind = _BesideCompiler if "torch._dynamo" in sys.modules else Recorder
    return kind(path, in_place=in_place)
