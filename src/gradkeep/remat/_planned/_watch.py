"""The dispatch mode that shows operators to a recording; it can come and go between two operators."""

from __future__ import annotations

import sys
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

if TYPE_CHECKING:
    from gradkeep.remat._planned._record import Recording


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows what runs to the recording it was given last."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps every call and loads its compiler at the first: seconds, for nothing.
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording: Recording | None = None
        self._on = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        recording = self.recording
        if recording is None or recording.quiet:
            return func(*args, **kwargs)
        start = perf_counter_ns()
        out = func(*args, **kwargs)
        recording.saw(func, args, kwargs, out, start)
        return out

    def show(self, recording: Recording) -> None:
        """Watch for this recording from now on."""
        self.recording = recording
        if not self._on:
            self.__enter__()  # type: ignore[no-untyped-call]
            self._on = True

    def rest(self) -> None:
        """Watch no more; the mode itself goes as soon as no other mode lies upon it."""
        self.recording = None
        if self._on and _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._on = False


class _BesideCompiler(Watch):  # type: ignore[no-untyped-call]
    """For a process that has compiled functions: torch must not try to compile this mode too."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


def new_watch() -> Watch:
    """A mode for this process."""
    return _BesideCompiler() if "torch._dynamo" in sys.modules else Watch()
