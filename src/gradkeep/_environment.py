"""Environment of a process: cache folder, extras, files, enclosing stores and torch threads."""

from __future__ import annotations

import importlib
import os
import secrets
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterator


def cache_folder() -> Path:
    """Return the user's cache folder: below `XDG_CACHE_HOME`, or else `~/.cache`.

    RuntimeError without a home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gradkeep"


def install_hint(extra: str) -> str:
    """Return the command that installs an extra, from a checkout of gradkeep."""
    checkout = Path(__file__).parents[2]
    place = checkout if (checkout / "pyproject.toml").is_file() else Path()
    where = "" if place == checkout else " in a checkout of gradkeep"
    return f"pip install -e '{place}[{extra}]'{where}"


def import_extra(module: str, *, extra: str, what: str) -> Any:
    """Import an optional dependency, or raise with the command that installs it.

    Args:
        module: Module to import.
        extra: Extra of gradkeep that installs it.
        what: Feature that needs it.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{what} needs {module}", found=str(error), fix=install_hint(extra)
        ) from error


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write; it replaces `path`, durably, if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield temp
        _sync(temp)
        os.replace(temp, path)
        _sync(path.parent)
    finally:
        temp.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def enclosing_store(path: str | os.PathLike[str]) -> str | None:
    """Find the store whose folder contains a path, or None.

    Code is never imported from there: a store may come from an untrusted source.

    >>> enclosing_store("/") is None
    True
    """
    for form in (os.path.abspath(path), os.path.realpath(path)):
        for folder in (Path(form), *Path(form).parents):
            if (folder / "STORE.json").is_file():
                return str(folder)
    return None


def forget_stored_folders() -> None:
    """Prevent this process and its children from importing modules of a store they are started in.

    `python -m` and `python -c` search the current directory first.
    """
    if enclosing_store(os.getcwd()) is not None:
        sys.path[:] = [item for item in sys.path if item and enclosing_store(item) is None]
        os.environ["PYTHONSAFEPATH"] = "1"


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of torch threads while the block runs.

    One is best for thousands of short steps: several threads wait for each other after every step, for a long time
    if other processes are running too.

    >>> import torch
    >>> with torch_threads(1):
    ...     torch.get_num_threads()
    1
    """
    import torch  # imported here: commands without a model never load it

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
