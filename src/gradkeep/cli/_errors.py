"""Exit codes and error output of commands.

| exit code | meaning |
| --- | --- |
| 0 | success |
| 1 | `verify` found damage |
| 2 | an error that says what to do, or a wrong command line |
| 3 | incomplete: trainings or trials failed, or a step does not fit its budget |
| 4 | user code (a script, a model, a study) raised; its traceback is printed |
| 70 | a bug in gradkeep: one line, and a report file |
| 130 | interrupted |
| 141 | the reader of the output is gone |
| 143 | terminated |
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import os
import platform
import secrets
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep import __version__
from gradkeep._display import head_and_tail, pick_fields
from gradkeep._environment import cache_folder
from gradkeep.cli._options import print_json
from gradkeep.errors import GradkeepError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


REFUSED, INCOMPLETE, USER_CODE, BUG, INTERRUPTED, BROKEN_PIPE = 2, 3, 4, 70, 130, 141

_USER_ERRNOS = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
    *(errno.ENOENT, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.ELOOP),
    *(errno.ENAMETOOLONG, errno.EMFILE, errno.ENFILE, errno.ENXIO, errno.EBUSY, errno.ENODEV),
}
"""Errors about disks and paths, which the user can fix; others count as bugs."""

_LIBRARIES = {
    *("gradkeep", "torch", "numpy", "yaml", "rich", "typer", "click", "safetensors", "xxhash"),
    *("duckdb", "pandas", "pyarrow", "zstandard", "zarr", "fsspec", "obstore", "matplotlib"),
    *("scipy", "sklearn", "PIL", "ray", "submitit", "cloudpickle", "msgspec"),
}
"""Packages that gradkeep calls: an exception from them alone is not one of user code."""


def exit_code(error: BaseException, command: Sequence[str], *, as_json: bool) -> int:
    """Print what ended a command, as text or JSON, and return its exit code."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError) and not is_user_code(error):
        _discard_output()
        return BROKEN_PIPE
    kind = type(error).__name__
    fields: dict[str, Any]
    if isinstance(error, GradkeepError):
        _print_error(str(error), _error_fields(error), as_json=as_json)
        return REFUSED
    if is_user_code(error):
        trace = _user_traceback(error)
        if not as_json:
            print(trace, file=sys.stderr)
        fields = {"type": kind, "message": _message(error, 2000), "traceback": trace}
        _print_error("the code it was given raised this exception", fields, as_json=as_json)
        return USER_CODE
    if isinstance(error, MemoryError):
        text = "not enough memory; use --memory-budget, fewer rows or fewer workers"
        _print_error(text, {"type": kind, "message": "not enough memory"}, as_json=as_json)
        return REFUSED
    if isinstance(error, OSError) and error.errno in _USER_ERRNOS:
        reason = os.strerror(error.errno or 0)
        path = None if error.filename is None else head_and_tail(str(error.filename), 300)
        text = f"system error: {reason}" if path is None else f"{path}: system error: {reason}"
        _print_error(text, {"type": kind, "message": reason, "path": path}, as_json=as_json)
        return REFUSED
    where = f"{kind} at {_error_place(error)}"
    report = _write_report(error, command)
    request = "please report this line" if report is None else f"please read and report {report}"
    fields = {"type": kind, "message": where, "report": report}
    _print_error(
        f"this is an error of gradkeep itself ({where}); {request}", fields, as_json=as_json
    )
    return BUG


def is_user_code(error: BaseException) -> bool:
    """Return True if the exception passed through code of the user."""
    return any(_is_user_module(name) for name in _module_names(error))


def prepare_streams() -> None:
    """Let any text be printed: file names may hold what the encoding does not have."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Redirect stdout to nowhere; Python flushes it once more at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_error(text: str, fields: dict[str, Any], *, as_json: bool) -> None:
    try:
        if as_json:
            print_json({"error": fields})
            sys.stdout.flush()
        else:
            print(f"gradkeep: {head_and_tail(text)}", file=sys.stderr)
    except OSError:  # the reader is gone; the exit code remains
        _discard_output()


def _error_fields(error: GradkeepError) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        **pick_fields(error, "code", "message", "path", "fix"),
        "found": None if error.found is None else str(error.found).strip(),
        "expected": None if error.expected is None else str(error.expected),
    }


def _message(error: BaseException, limit: int) -> str:
    try:
        return head_and_tail(str(error), limit)
    except Exception:
        return "(its message cannot be shown)"


def _module_names(error: BaseException) -> list[str]:
    """Return the modules of the frames that the exception passed, outermost first."""
    frames = traceback.walk_tb(error.__traceback__)
    return [str(frame.f_globals.get("__name__", "")) for frame, _ in frames]


def _is_user_module(module: str) -> bool:
    package = module.partition(".")[0]
    return bool(package) and package not in _LIBRARIES and package not in sys.stdlib_module_names


def _user_traceback(error: BaseException) -> str:
    """Format the traceback from the first frame of user code on, without frames of gradkeep."""
    formatted = traceback.TracebackException.from_exception(error)
    _drop_own_frames(formatted, error)
    return head_and_tail("".join(formatted.format()).rstrip())


def _drop_own_frames(formatted: traceback.TracebackException, error: BaseException) -> None:
    frames: list[traceback.FrameSummary] = []
    for frame, name in zip(formatted.stack, _module_names(error), strict=False):
        if (frames or _is_user_module(name)) and name.partition(".")[0] != "gradkeep":
            frames.append(frame)
    formatted.stack = traceback.StackSummary.from_list(frames)
    chained = (formatted.__cause__, error.__cause__), (formatted.__context__, error.__context__)
    for earlier, earlier_error in chained:
        if earlier is not None and earlier_error is not None:
            _drop_own_frames(earlier, earlier_error)


def _error_place(error: BaseException) -> str:
    """Return the innermost place in gradkeep that the exception passed, as file:line."""
    package = str(Path(__file__).parent.parent)
    place = "an unknown place"
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename.startswith(package):
            place = f"{os.path.relpath(frame.f_code.co_filename, package)}:{line}"
    return place


def _write_report(error: BaseException, command: Sequence[str]) -> str | None:
    """Write a bug report without data of the user, and return its path, or None.

    It names the command, not its arguments; of the exceptions it has the frames and one line each.
    """
    text = _report_text(error, command)
    for folder in _report_folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"report-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}.txt"
            path.write_text(text, errors="backslashreplace")
            for old in sorted(folder.glob("report-*.txt"))[:-20]:  # keep the last 20
                old.unlink(missing_ok=True)
        except OSError:  # a full disk, no permission
            continue
        return str(path)
    return None


def _report_folders() -> Iterator[Path]:
    with contextlib.suppress(RuntimeError):  # no home folder
        yield cache_folder() / "reports"
    yield Path(tempfile.gettempdir()) / "gradkeep-reports"


def _report_text(error: BaseException, command: Sequence[str]) -> str:
    packages = ("torch", "numpy", "typer", "rich", "safetensors", "duckdb", "pyarrow", "pandas")
    lines = [
        f"gradkeep {__version__}",
        f"command: gradkeep {' '.join(command)}",
        f"python {platform.python_version()}, {platform.platform()}",
        ", ".join(f"{name} {_version(name)}" for name in packages),
        "",
        *_traceback_lines(error),
    ]
    text = head_and_tail("\n".join(lines))
    home = os.path.expanduser("~")
    return (text.replace(home, "~") if len(home) > 1 else text) + "\n"


def _traceback_lines(error: BaseException) -> Iterator[str]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield "Traceback (most recent call last):"
        yield "".join(traceback.extract_tb(current.__traceback__).format()).rstrip()
        message = " ".join(_message(current, 2000).split())[:200]
        yield f"{type(current).__module__}.{type(current).__name__}: {message}"
        hidden = current.__suppress_context__
        current = current.__cause__ or (None if hidden else current.__context__)
        if current is not None:
            yield "\ncaused by, or while handling:\n"


def _version(package: str) -> str:
    loaded = getattr(sys.modules.get(package), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
