"""The dispatch mode that shows operators to a recorder, and may come and go only where torch allows it."""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from gradkeep.errors import RematError
from gradkeep.remat.tracing._tensors import QuickDispatchMode, inside_compiled, run_operator

if TYPE_CHECKING:
    from gradkeep.remat.planned._step_recorder import StepRecorder


_ctc_loss = torch.ctc_loss


def _ctc_loss_by_numbers(log_probs: Any, targets: Any, *lengths: Any, **options: Any) -> Any:
    """`torch.ctc_loss` on the CPU as it runs unwatched, with lengths as numbers.

    While a mode watches, torch takes another operator, which saves the lengths too.
    """
    if not log_probs.is_cuda:
        with torch._C._DisableTorchDispatch():
            lengths = tuple(
                given.tolist() if isinstance(given, torch.Tensor) else given for given in lengths
            )
    return _ctc_loss(log_probs, targets, *lengths, **options)


class RecordingMode(QuickDispatchMode):  # type: ignore[no-untyped-call]
    """Shows operators to the recorder it was given last; it can come and go between two operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording: StepRecorder | None = None
        self._on = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        recording = self.recording
        if recording is None or recording.quiet:
            return run_operator(func, args, kwargs)
        start = perf_counter_ns()
        out = run_operator(func, args, kwargs)
        recording.saw(func, args, kwargs, out, start)
        return out

    def show(self, recording: StepRecorder) -> None:
        """Watch for this recording from now on."""
        self.recording = recording
        if not self._on:
            if inside_compiled():
                raise RematError(
                    "a training step begins inside of a compiled function, where torch lets no mode "
                    "come or go",
                    fix="put `with budget.step():` around each step, or let an optimizer step inside "
                    "of the block: then steps begin outside of what is compiled",
                )
            self.__enter__()  # type: ignore[no-untyped-call]
            torch.ctc_loss = _ctc_loss_by_numbers
            self._on = True

    def rest(self) -> None:
        """Watch no more; the mode itself goes as soon as no other mode lies upon it."""
        self.recording = None
        if self._on and _get_current_dispatch_mode() is self and not inside_compiled():
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            torch.ctc_loss = _ctc_loss
            self._on = False
