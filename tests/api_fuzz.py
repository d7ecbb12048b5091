"""Public functions and methods called with one bad argument at a time, and what became of it.

Each call starts from good arguments. One is replaced by something odd; then the call must return, or
raise an error of gradkeep. What no reading of the annotation allows must not be accepted.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import math
import os
import random
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gradkeep as gk
from gradkeep.errors import GradkeepError

PATIENCE, SECOND_PATIENCE = 5, 40
HOME = str(Path(gk.__file__).parent)


class Odd:
    """An object of a class that nobody knows."""

    def __repr__(self) -> str:
        return "an odd object"


def odd_values() -> dict[str, Any]:
    """Everything that people pass by mistake, made anew: some functions keep what they get."""
    return {
        "None": None,
        "True": True,
        "minus one": -1,
        "zero": 0,
        "huge": 10**20,
        "minus huge": -(10**20),
        "a half": 0.5,
        "two and a half": 2.5,
        "nan": math.nan,
        "inf": math.inf,
        "minus inf": -math.inf,
        "complex": 1j,
        "empty text": "",
        "a word": "zzz",
        "a number as text": "3",
        "nul": "a\0b",
        "surrogate": "\ud800",
        "up": "../../up",
        "long": "a" * 5000,
        "bytes": b"abc",
        "empty list": [],
        "texts": ["zzz"],
        "floats": [1.9, math.nan],
        "negative": [-1],
        "far": [10**12],
        "huge list": [10**20],
        "nested": [[1], [1, 2]],
        "tuple": (1, "a", None),
        "dict": {"a": 1},
        "set": {1, 2},
        "range": range(3),
        "object": Odd(),
        "class": Odd,
        "function": len,
        "empty array": np.zeros((0,)),
        "array": np.ones((2, 3, 4)),
        "nan array": np.full((3, 3), np.nan),
        "object array": np.array([None, "a"], object),
        "text array": np.array(["a", "b"]),
        "scalar array": np.array(3.5),
        "tensor": torch.ones(2, 3),
        "whole tensor": torch.ones(2, dtype=torch.int64),
        "scalar tensor": torch.tensor(2.5),
        "empty tensor": torch.ones(0, 4),
        "path": Path("no/such/place"),
        "generator": (n for n in range(3)),
    }


ODD = tuple(odd_values())
FLOATS = ("nan", "inf", "minus inf", "complex", "a word", "empty list", "texts", "dict", "object")
NEVER = {
    "int": (*FLOATS, "two and a half", "huge", "minus huge", "a number as text", "bytes"),
    "float": (*FLOATS, "bytes", "nul", "class"),
    "str": ("minus one", "nan", "empty list", "dict", "object", "bytes", "surrogate", "nul"),
}
"""What an argument annotated so, or so and None, may never take."""


@dataclass(frozen=True)
class Call:
    """A public function, and arguments that it takes."""

    name: str
    function: Callable[..., Any]
    good: Callable[[], dict[str, Any]]
    extra: dict[str, str] = field(default_factory=dict)
    """Annotations of what goes into `**options`."""

    def annotation(self, argument: str) -> str:
        parameters = inspect.signature(self.function).parameters
        if argument in self.extra or argument not in parameters:
            return self.extra.get(argument, "Any")
        written = parameters[argument].annotation
        return written if isinstance(written, str) else "Any"


@dataclass
class Found:
    """What became of the calls."""

    counts: Counter = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        names = ("tried", "ok", "refused", "wrong", "ugly", "hung")
        return "  ".join(f"{name} {self.counts[name]}" for name in names)


def deep_folder(folder: Path) -> Path:
    """A folder so deep that "../../up" from it stays inside of the one that was given."""
    deep = folder / "a" / "b" / "c"
    deep.mkdir(parents=True)
    return deep


CALLED = {"progress", "retrain", "keep_models", "dataset", "train_fn", "job", "model", "engine"}
LONG = {
    *(("farm.run", "workers", "None"), ("Study.run", "workers", "None")),
    *(("capture", "ids", "class"), ("attribute_tokens again", "loader_ids", "class")),
    *(("remat.simulate", "budget", "inf"),),
    *(("remat.simulate", "limit", "inf"), ("Rows.read", "fill", "nan")),
    *(("Rows.claim", "owner", kind) for kind in ("nul", "surrogate")),
    *(("Rows.claim", name, "huge") for name in ("count", "max_attempts")),
    *(("store.Run", name, kind) for name in ("code", "data") for kind in ("nul", "surrogate")),
}
"""What is right, and starts processes that take longer than a bad argument may, or fails by itself."""

REFUSED_AS_THEY_ARE = {
    *("register_method", "data.load_cifar10"),
    *("MemoryBudget.load", "remat.read_log"),
}
"""Calls whose good arguments name data that is not there; one bad argument must be refused as well."""


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError when it takes longer."""

    def late(*_: Any) -> None:
        raise TimeoutError("of the fuzz")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def raised_here(error: BaseException) -> bool:
    """Whether a `raise` statement of gradkeep raised it, and not something that it called."""
    last = list(traceback.walk_tb(error.__traceback__))[-1][0]
    if not last.f_code.co_filename.startswith(HOME):
        return False
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    assert at is not None
    ran = [one for one in dis.get_instructions(last.f_code) if one.offset == at.tb_lasti]
    return bool(ran) and ran[0].opname in ("RAISE_VARARGS", "RERAISE")


def never(call: Call, argument: str, kind: str) -> bool:
    """Whether the annotation forbids this kind of value, by a reading of its own."""
    words = [part.strip() for part in call.annotation(argument).split("|")]
    plain = [word for word in words if word != "None"]
    return len(plain) == 1 and kind in NEVER.get(plain[0], ())


def try_call(call: Call, argument: str, kind: str, *, patience: int = PATIENCE) -> tuple[str, str]:
    """`ok`, `refused`, `wrong`, `ugly` or `hung`, and why."""
    values = {**call.good(), argument: odd_values()[kind]}
    try:
        with limited(patience), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call.function(**values)
    except GradkeepError:
        return "refused", ""
    except TimeoutError as error:
        if "of the fuzz" in str(error):
            return "hung", ""
        return "ugly", repr(error)
    except (TypeError, ValueError) as error:
        if raised_here(error):
            return "refused", ""
        return "ugly", _where(error)
    except Exception as error:
        return "ugly", _where(error)
    if never(call, argument, kind):
        return "wrong", f"accepted, though it is annotated {call.annotation(argument)}"
    return "ok", ""


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [one for one in frames if one.filename.startswith(HOME)]
    place = f"{os.path.relpath(ours[-1].filename, HOME)}:{ours[-1].lineno}" if ours else "?"
    return f"{type(error).__name__} at {place}: {str(error)[:120]!r}"


def tries(known: list[Call], count: int | None, seed: int) -> list[tuple[Call, str, str]]:
    """All calls with one bad argument, or so many of them."""
    every = [
        (call, name, kind)
        for call in known
        for name in call.good()
        for kind in ODD
        if not (name in CALLED and kind in ("function", "class"))  # their errors are their own
        and (call.name, name, kind) not in LONG
        and (name, kind) != ("store", "long")  # the system's word on it: a name too long
    ]
    return every if count is None else random.Random(seed).sample(every, min(count, len(every)))


def try_all(
    expected: list[tuple[Call, str, str]], output: Callable[[str], None] | None = None
) -> Found:
    """Try them in turn; a slow one gets a second chance, for the machine may be busy."""
    result = Found()
    for call, argument, kind in expected:
        verdict, why = try_call(call, argument, kind)
        if verdict == "hung":
            verdict, why = try_call(call, argument, kind, patience=SECOND_PATIENCE)
        result.counts["tried"] += 1
        result.counts[verdict] += 1
        if verdict not in ("ok", "refused"):
            result.bad.append(f"{verdict}: {call.name}({argument}= {kind})  {why}")
            if output is not None:
                output(result.bad[-1])
    return result
