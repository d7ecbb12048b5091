"""One model in this process, into one row of a store directory."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import signal
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import xxhash

from gradkeep.datamodels._main_job import logdir_of
from gradkeep.datamodels._returned import checked
from gradkeep.errors import StudyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gradkeep.datamodels._npy_folder import NpyFolder

_STUCK = 30.0
_LONGEST = 365 * 86400.0


def train_row(
    folder: NpyFolder,
    main: Callable[..., Any],
    index: int,
    *,
    redo: bool = False,
    timeout: float = math.inf,
    command: Sequence[str] = (),
) -> bool:
    """Call `main(index=, logdir=)` and write what it returns; False if the row was done already.

    Whatever goes wrong is recorded in the model's own folder and raised; the row is then not done.
    """
    folder.check_index(index)
    logdir = logdir_of(str(folder.path), index)
    if folder.completed()[index] and not redo:
        return False
    began = time.time()
    about = {"index": index, "command": list(command), "began": began}
    try:
        with _limited(timeout, index):
            returned = _called(main, index, logdir)
        # The limit has ended: it must not cut a row in two.
        arrays = checked(folder.spec, returned, index=index)
        folder.write(index, arrays)
    except BaseException as error:
        told = "".join(traceback.format_exception(error))
        # A disk too full for the record must not hide why it failed.
        with contextlib.suppress(OSError):
            folder.note(index, {**about, "seconds": time.time() - began, "error": told})
        raise
    digest = xxhash.xxh3_128()
    for name in sorted(arrays):
        digest.update(arrays[name].tobytes())
    done = {"seconds": time.time() - began, "checksum": digest.hexdigest()}
    folder.note(index, {**about, **done})
    with open(folder.path / "cmds.txt", "a") as file:
        file.write(f"{' '.join(command)}\n")
    return True


def _called(main: Callable[..., Any], index: int, logdir: str) -> Any:
    try:
        return main(index=index, logdir=logdir)
    except SystemExit as error:
        # Scripts that refuse their flags often end Python, some with a code that means success.
        raise StudyError(
            f"model {index}: main ended Python instead of returning",
            found=f"exit code {error.code}",
            expected="a dictionary",
            fix="look at what it printed: often a flag of the script is missing",
        ) from error


@contextlib.contextmanager
def _limited(timeout: float, index: int) -> Iterator[None]:
    """Raise TimeoutError when it takes longer, also if the code never comes back to Python."""
    if not 0 < timeout < _LONGEST or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise TimeoutError(f"model {index} took longer than {timeout:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, timeout)
    # Native code that never returns cannot be interrupted, only ended.
    faulthandler.dump_traceback_later(timeout + _STUCK, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()
