"""Records of runs and checkpoints: checked on their way in, and again when they are read."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from typing import TYPE_CHECKING, Any

from gradkeep.errors import StoreError
from gradkeep.store._document import LARGE_DOCUMENT
from gradkeep.store._fields import LARGEST_WHOLE, read_document
from gradkeep.store._keys import RUNS, Checkpoint, Run, checked_name

if TYPE_CHECKING:
    from gradkeep.store.backends._backend import Backend


def run_folder(run: str) -> str:
    """Where the record of a run lies."""
    return f"{RUNS}/{run}"


def checkpoint_folder(run: str, name: str) -> str:
    """Where the record of a checkpoint lies."""
    return f"{RUNS}/{run}/ckpt/{name}"


def checked_run(run: Run) -> Run:
    """The run as it is recorded; raises `StoreError` if it cannot be."""
    checked_name("run", run.name)
    _check_texts("run", run, "code", "data")
    try:
        config = json.loads(json.dumps(dict(run.config), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(
            f"the config of run {run.name!r} cannot be recorded",
            found=str(error)[:200],
            expected="texts, finite numbers, lists and dictionaries of them",
        ) from None
    return dataclasses.replace(run, config=config)


def checked_checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as it is recorded; raises `StoreError` if it cannot be."""
    checked_name("run", checkpoint.run)
    checked_name("checkpoint", checkpoint.name)
    _check_texts("checkpoint", checkpoint, "parent", "function")
    if not isinstance(checkpoint.weights, str):
        raise _wrong("checkpoint", checkpoint.name, "weights", checkpoint.weights, "a text")
    step, lr = checkpoint.step, checkpoint.lr
    if step is not None:
        step = _whole(checkpoint.name, step)
    if lr is not None:
        try:
            lr = float(lr)
        except (TypeError, ValueError):
            lr = math.nan
        if isinstance(checkpoint.lr, str | bool) or not math.isfinite(lr):
            raise _wrong("checkpoint", checkpoint.name, "lr", checkpoint.lr, "a finite number")
    return dataclasses.replace(checkpoint, step=step, lr=lr)


def _whole(name: str, step: Any) -> int:
    try:
        whole = None if isinstance(step, bool) else operator.index(step)
    except TypeError:
        whole = None
    if whole is None or abs(whole) > LARGEST_WHOLE:
        raise _wrong("checkpoint", name, "step", step, "a whole number below 2**63")
    return whole


def _check_texts(what: str, record: Run | Checkpoint, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if value is not None and not isinstance(value, str):
            raise _wrong(what, record.name, name, value, "a text")


def _wrong(what: str, name: str, field: str, found: object, expected: str) -> StoreError:
    return StoreError(
        f"{field} of {what} {name!r} cannot be recorded",
        found=repr(found)[:200],
        expected=expected,
    )


def read_run(backend: Backend, name: str) -> Run | None:
    """The record of a run; None if there is none."""
    try:
        fields = read_document(backend, f"{run_folder(name)}/run.json", most=LARGE_DOCUMENT)
    except FileNotFoundError:
        return None
    fields.only(part.name for part in dataclasses.fields(Run))
    found = Run(
        fields.text("name"),
        fields.mapping("config"),
        fields.optional_text("code"),
        fields.optional_text("data"),
    )
    if found.name != name:
        raise fields.wrong("the record of another run")
    return found


def read_checkpoint(backend: Backend, run: str, name: str) -> Checkpoint | None:
    """The record of a checkpoint; None if there is none."""
    try:
        fields = read_document(backend, f"{checkpoint_folder(run, name)}/ckpt.json")
    except FileNotFoundError:
        return None
    fields.only(part.name for part in dataclasses.fields(Checkpoint))
    found = Checkpoint(
        fields.text("run"),
        fields.text("name"),
        fields.text("weights"),
        fields.optional_integer("step"),
        fields.optional_number("lr"),
        fields.optional_text("parent"),
        fields.optional_text("function") if "function" in fields.values else None,
    )
    if (found.run, found.name) != (run, name):
        raise fields.wrong("the record of another checkpoint")
    return found
