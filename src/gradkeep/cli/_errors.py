"""Errors of commands: a message and an exit code.

| exit code | meaning |
| --- | --- |
| 0 | done |
| 1 | `verify` found damage |
| 2 | an error that says what to do, or a wrong command line |
| 3 | done in part: trainings or trials failed, or a step does not fit its budget |
| 4 | the code that gradkeep was given (a script, a model, a study) raised; its traceback is shown |
| 70 | an error of gradkeep itself: one line, and a report file to send |
| 130 | interrupted |
| 141 | nobody reads the output any more |
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
from gradkeep._display import head_and_tail
from gradkeep._surroundings import cache_folder
from gradkeep.cli._options import print_json
from gradkeep.errors import GradkeepError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


REFUSED, INCOMPLETE, GIVEN_CODE, OUR_FAULT, INTERRUPTED, UNREAD = 2, 3, 4, 70, 130, 141

_ENVIRONMENT = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
    *(errno.ENOENT, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.ELOOP),
    *(errno.ENAMETOOLONG, errno.EMFILE, errno.ENFILE, errno.ENXIO, errno.EBUSY, errno.ENODEV),
}
"""What a disk or a path is like is the user's to change; other system errors are ours to explain."""

_NOT_GIVEN = {
    *("gradkeep", "torch", "numpy", "yaml", "rich", "typer", "click", "safetensors", "xxhash"),
    *("duckdb", "pandas", "pyarrow", "zstandard", "zarr", "fsspec", "obstore", "matplotlib"),
    *("scipy", "sklearn", "PIL", "ray", "submitit", "cloudpickle"),
}
"""Packages that gradkeep itself calls: what they raise is not the user's code by that alone."""


def exit_code(error: BaseException, command: Sequence[str], *, as_json: bool) -> int:
    """Say what ended a command, in words or as JSON, and return the code to end with."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError) and not given_code(error):
        stop_printing()
        return UNREAD
    if isinstance(error, GradkeepError):
        _tell(str(error), _fields(error), as_json=as_json)
        return REFUSED
    if given_code(error):
        _tell_of_given_code(error, as_json=as_json)
        return GIVEN_CODE
    if isinstance(error, MemoryError):
        _tell(
            "there is not enough memory for this; --memory-budget, fewer rows or fewer workers help",
            {"type": "MemoryError", "message": "not enough memory"},
            as_json=as_json,
        )
        return REFUSED
    if isinstance(error, OSError) and error.errno in _ENVIRONMENT:
        said = os.strerror(error.errno or 0)
        where = "" if error.filename is None else f"{head_and_tail(str(error.filename), 300)}: "
        _tell(
            f"{where}the system said: {said}",
            {"type": type(error).__name__, "message": said, "path": where[:-2] or None},
            as_json=as_json,
        )
        return REFUSED
    _tell_of_our_fault(error, command, as_json=as_json)
    return OUR_FAULT


def given_code(error: BaseException) -> bool:
    """Whether the error came out of code that the user gave, and not of ours or what we call."""
    return any(_is_given(name) for name in _module_names(error))


def given_traceback(error: BaseException) -> str:
    """The traceback from the first frame of the user's on, without the frames of gradkeep."""
    told = traceback.TracebackException.from_exception(error)
    _cut(told, error)
    return head_and_tail("".join(told.format()).rstrip())


def _cut(told: traceback.TracebackException, error: BaseException) -> None:
    kept: list[traceback.FrameSummary] = []
    for frame, name in zip(told.stack, _module_names(error), strict=False):
        if (kept or _is_given(name)) and name.partition(".")[0] != "gradkeep":
            kept.append(frame)
    told.stack = traceback.StackSummary.from_list(kept)
    pairs = ((told.__cause__, error.__cause__), (told.__context__, error.__context__))
    for earlier, its_error in pairs:
        if earlier is not None and its_error is not None:
            _cut(earlier, its_error)


def stop_printing() -> None:
    """Let what is printed from here on vanish; Python flushes once more at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def flush() -> None:
    """Have everything that was printed reach its reader, or raise."""
    sys.stdout.flush()


def prepare_streams() -> None:
    """Let any text be printed: names of files may hold what no encoding has."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _tell(text: str, fields: dict[str, Any], *, as_json: bool) -> None:
    try:
        if as_json:
            print_json({"error": fields})
            flush()
        else:
            print(f"gradkeep: {head_and_tail(text)}", file=sys.stderr)
    except OSError:  # the reader is gone; the exit code still says it
        stop_printing()


def _tell_of_given_code(error: BaseException, *, as_json: bool) -> None:
    text = given_traceback(error)
    fields = {"type": type(error).__name__, "message": _short(error), "traceback": text}
    if as_json:
        _tell("", fields, as_json=True)
        return
    print(text, file=sys.stderr)
    _tell("the code that it was given raised this", fields, as_json=False)


def _tell_of_our_fault(error: BaseException, command: Sequence[str], *, as_json: bool) -> None:
    what = f"{type(error).__name__} at {place_of(error)}"
    report = write_report(error, command)
    if report is None:
        sent = "no report could be written: please send this line to the makers of gradkeep"
    else:
        sent = f"please read {report} and send it to the makers of gradkeep, as an issue"
    fields = {"type": type(error).__name__, "message": what, "report": report}
    _tell(f"this is an error of gradkeep itself ({what}); {sent}", fields, as_json=as_json)


def _fields(error: GradkeepError) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "message": error.what,
        "path": error.path,
        "found": None if error.found is None else str(error.found).strip(),
        "expected": None if error.expected is None else str(error.expected),
        "fix": error.fix,
    }


def _short(error: BaseException) -> str:
    try:
        return head_and_tail(str(error), 2000)
    except Exception:
        return ""


def _module_names(error: BaseException) -> list[str]:
    """The modules of the frames that the error passed, outermost first."""
    frames = traceback.walk_tb(error.__traceback__)
    return [str(frame.f_globals.get("__name__", "")) for frame, _ in frames]


def _is_given(module: str) -> bool:
    package = module.partition(".")[0]
    return bool(package) and package not in _NOT_GIVEN and package not in sys.stdlib_module_names


_PACKAGES = ("torch", "numpy", "typer", "rich", "safetensors", "duckdb", "pyarrow", "pandas")


def write_report(error: BaseException, command: Sequence[str]) -> str | None:
    """Write the report into the user's cache folder, or else the one for temporary files.

    It holds the command's name without its arguments, versions, and the traceback: files, lines
    and functions. Values of variables, arguments, the environment and rows are not in it; the
    error's own message is, cut to a line. Gives the path, or None if neither folder takes it.
    """
    text = _report(error, command)
    for folder in _folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"report-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}.txt"
            path.write_text(text, errors="backslashreplace")
            for old in sorted(folder.glob("report-*.txt"))[:-20]:  # the last 20 stay
                old.unlink(missing_ok=True)
        except OSError:  # a full disk, no permission
            continue
        return str(path)
    return None


def place_of(error: BaseException) -> str:
    """The innermost place in gradkeep that the error passed, as file:line."""
    package = str(Path(__file__).parent.parent)
    place = "an unknown place"
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if file.startswith(package):
            place = f"{os.path.relpath(file, package)}:{line}"
    return place


def _folders() -> Iterator[Path]:
    with contextlib.suppress(RuntimeError):  # nobody's home
        yield cache_folder() / "reports"
    yield Path(tempfile.gettempdir()) / "gradkeep-reports"


def _report(error: BaseException, command: Sequence[str]) -> str:
    versions = [f"{name} {_version(name)}" for name in _PACKAGES]
    lines = [
        f"gradkeep {__version__}",
        f"command: gradkeep {' '.join(command)}",
        f"python {platform.python_version()}, {platform.platform()}",
        ", ".join(versions),
        "",
        *_traceback(error),
    ]
    text = head_and_tail("\n".join(lines))
    home = os.path.expanduser("~")
    return (text.replace(home, "~") if len(home) > 1 else text) + "\n"


def _traceback(error: BaseException) -> Iterator[str]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        stack = traceback.extract_tb(one.__traceback__)
        yield "Traceback (most recent call last):"
        yield "".join(stack.format()).rstrip()
        yield f"{type(one).__module__}.{type(one).__name__}: {_message(one)}"
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        if one is not None:
            yield "\nbecause of, or while dealing with:\n"


def _message(error: BaseException) -> str:
    try:
        return " ".join(str(error).split())[:200]
    except Exception:
        return "(its message cannot be shown)"


def _version(package: str) -> str:
    loaded = getattr(sys.modules.get(package), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
