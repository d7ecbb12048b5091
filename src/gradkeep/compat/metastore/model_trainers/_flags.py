"""The flags that MetaStore's trainers have in common, and errors as messages."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep.compat.metastore._config import WorkingFolder
from gradkeep.errors import CaptureError, GradkeepError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def trainer_flags(
    name: str, *, n_epochs: int, batch_size: int, lr: float, unread: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """A parser with the flags of all trainers; `unread` are taken and do nothing, as they always did."""
    parser = argparse.ArgumentParser(
        prog=f"python -m gradkeep.compat.metastore.model_trainers.{name}"
    )
    parser.add_argument("--n_epochs", type=_count, default=n_epochs)
    parser.add_argument("--batch_size", type=_count, default=batch_size)
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight_decay", type=float, default=5e-4)
    parser.add_argument(
        "--sizes", type=_sizes, default={}, metavar="width=8", help="a smaller model"
    )
    for flag in ("n_cpu", *unread):
        parser.add_argument(f"--{flag}", help="not used, as in MetaStore")
    return parser


def here() -> WorkingFolder:
    """The folder that the trainer is run in."""
    return WorkingFolder(Path.cwd(), Path.cwd())


def ended(train: Callable[[], Any]) -> int:
    """Train; the exit code, and errors as messages."""
    try:
        train()
    except GradkeepError as error:
        print(f"trainer: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"trainer: {error.filename or ''}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # the epochs before are whole
        return 130
    return 0


def refuse_appended(hidden_size: int | None) -> None:
    """Refuse the layer that MetaStore's trainer appends: its own program cannot read such files."""
    if hidden_size is not None:
        raise CaptureError(
            "--hidden_size appends a layer that MetaStore's program has no place for",
            found=hidden_size,
            fix="leave --hidden_size out",
        )


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def _sizes(text: str) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.split(",")]
    return {name: _count(value) for name, _, value in pairs}
