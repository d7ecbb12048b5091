"""Malformed command lines, made from the commands' own signatures, and what became of them.

Each line is run in a fork of this process, in a folder of its own with a small real store. What it
leaves behind is compared with a listing from before.
"""

from __future__ import annotations

import gc
import inspect
import os
import random
import signal
import sys
import time
import typing
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from command_fuzz_sandbox import Sandbox

CODES = {0, 1, 2, 3, 4, 130, 141}
"""The exit codes that a command line may end with; 70 would be an error of our own."""
PATIENCE = 5.0
SECOND_PATIENCE = 40.0

WORDS = [
    *("", " ", "\t", "a\nb", "\x1b[31mred", "\udcff\udcfe", "é漢🦊", "a" * 5000, "a" * 200_000),
    *("../outside/victim", "~", ".", "-", "--", "---", "-x", "--no-such", "*", "!"),
    *("[/red]", "[bold", "%s%d{}{0}", "${HOME}", "'; drop table samples; --", "{", "[1", "null"),
    *("true", "[]", "{}", '{"a": 1}', "x=y", "=", "=1", "x=", "damping=nan", 'damping="x"'),
    *(
        "damping=-1",
        "damping=1e999",
        "damping=[1]",
        "dim=99999999999999999999",
        "1,2,,3",
        ",",
        "a,b",
    ),
    *(
        "nan",
        "1,nan",
        "-1",
        "0",
        "99999999999999999999",
        "1" * 5000,
        "1e5000",
        "0x10",
        "2.5",
        "inf",
    ),
    *("no.such.module", "os:system", "json:", ":x", "train_model:study", "train_model:nothing"),
    *(
        "scores/..",
        "a/b/c/..",
        "main/final/train/main/x",
        "s3://",
        "nosuch://x",
        "memory://x",
        "file://",
    ),
]
NUMBERS = [
    *("nan", "inf", "-inf", "1e400", "-1e400", "99999999999999999999", "-99999999999999999999"),
    *("-1", "", "x", "1,2", "0x10", "1e", "--", "\udcff", "1" * 5000, "None", "true", "[]", "½"),
]
NEVER_NUMBERS = {*NUMBERS} - {"-1"}
"""Texts that no option for a number may take, whatever its range."""
PLACES = [
    *(
        "nowhere",
        "file.txt",
        "folder",
        "binary.bin",
        "empty",
        "list.json",
        "number.json",
        "deep.json",
    ),
    *(
        "list.yaml",
        "deep.yaml",
        "loop.yaml",
        "tagged.yaml",
        "latin.txt",
        "pipe",
        "dangling",
        "circle",
    ),
    *(
        "nowhere/below",
        "file.txt/below",
        "broken.log",
        "odd.log",
        "wrong.json",
        "wrong.yaml",
        "syntax.py",
    ),
    *(
        "raising.py",
        "exiting.py",
        "store",
        "store/STORE.json",
        "other",
        "bare",
        "text.npy",
        "broken.npz",
    ),
    # Never a path of the machine: whoever runs this may be allowed to write there.
    *("", "-", "pipe/below", "a" * 5000, "a" * 300),
    *("\udcff", "x\ny", "~", "config.yaml", "spec.json", "step.log", "step.py", "odd-store"),
]
GOOD = {
    "store": "store",
    "config": "config.yaml",
    "spec": "spec.json",
    "log": "step.log",
    "logs": "step.log",
    "script": "step.py",
    "main": "train_model",
    "query": "1",
    "capture": "main",
    "split": "train",
    "folder": "arrays",
    "what": "top",
    "fit": "fitted",
    "save": "saved",
    "targets": "0",
    "remove": "0,1",
    "groups": "groups.txt",
    "study": "train_model:study",
    "sizes": "20,40",
    "budget": "0.6",
    "ratio": "0.6",
    "ratios": "0.5",
    "method": "dot",
    "run": "main",
    "name": None,
    "timeout": "20",
    "time_limit": "2",
    "workers": "1",
    "repeats": "1",
    "recordings": "2",
    "grow": "50",
    "lambdas": "3",
    "heuristic": "dtr-eq",
    "heuristics": "dtr-eq",
}


@dataclass(frozen=True)
class Parameter:
    """One argument or option of a command."""

    name: str
    kind: type
    """bool, int, float, str or Path."""
    options: tuple[str, ...]
    """How it is spelt; an argument without a name has none."""
    required: bool


@dataclass(frozen=True)
class Line:
    """A command line, and why it may not succeed, if it may not."""

    arguments: tuple[str, ...]
    never: str | None = None


@dataclass
class Found:
    """What became of the lines."""

    counts: Counter = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        names = ("tried", "ok", "refused", "wrong", "ugly", "hung")
        return "  ".join(f"{name} {self.counts[name]}" for name in names)


def parameters(function) -> list[Parameter]:
    """The parameters of a command, from its signature."""
    hints = typing.get_type_hints(function, include_extras=True)
    result = []
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        base, about = hint, None
        if typing.get_origin(hint) is typing.Annotated:
            base, about = hint.__origin__, hint.__metadata__[0]
        options = ()
        if type(about).__name__ != "ArgumentInfo":
            declared = getattr(about, "param_decls", None) or (f"--{name.replace('_', '-')}",)
            options = tuple(part for each in declared for part in each.split("/"))
        inner = [part for part in typing.get_args(base) if part is not type(None)] or [base]
        if typing.get_origin(inner[0]) is list:
            inner = list(typing.get_args(inner[0]))
        required = parameter.default is inspect.Parameter.empty
        result.append(Parameter(name, inner[0], options, required))
    return result


def commands() -> dict[tuple[str, ...], list[Parameter]]:
    """The parameters of every command by its words."""
    from gradkeep.cli._app import COMMANDS

    return {
        (c.name,) if c.group is None else (c.group, c.name): parameters(c.load()) for c in COMMANDS
    }


def lines(count: int, seed: int, known=None):
    """So many command lines: every command in turn, with one to three things wrong."""
    known = known or commands()
    draw = random.Random(seed)
    words = list(known)
    for place in range(count):
        command = words[place % len(words)]
        yield _line(draw, command, known[command])


def _line(draw: random.Random, command, known) -> Line:
    arguments: list[str] = []
    never, after = None, False  # after "--" options are arguments
    wrong = {
        part.name for part in draw.sample(known, min(len(known), draw.choice((1, 1, 1, 2, 3))))
    }
    for part in known:
        bad = part.name in wrong
        if not bad and not part.required and not (draw.random() < 0.15 and _good(part)):
            continue
        if bad and part.required and draw.random() < 0.04:
            never = f"{part.name} is missing"
            continue
        spelt = [draw.choice(part.options)] if part.options else []
        if part.kind is bool:
            arguments += spelt
            continue
        value = _bad(draw, part) if bad else _good(part) or "x"
        after = after or (not spelt and value == "--")
        if bad and not after and part.kind in (int, float) and value in NEVER_NUMBERS:
            never = f"{part.name}={value[:60]!r}"
        if not spelt and value.startswith("-") and draw.random() < 0.5:
            spelt, after = ["--"], True
        if spelt and draw.random() < 0.3 and spelt != ["--"]:
            arguments.append(f"{spelt[0]}={value}")
        else:
            arguments += [*spelt, value]
    if command == ("demo",) and never is None:
        arguments += ["--out", "file.txt"]  # a demo that works takes a minute
    if command == ("serve",):
        arguments += ["--host", "192.0.2.1"]  # nobody's address: a page that works does not end
    if draw.random() < 0.05:
        arguments.append(draw.choice(["--no-such-option", "more", "--json=yes", "--help", "-h"]))
        never = None
    return Line((*command, *arguments), never)


def _good(part: Parameter) -> str | None:
    return GOOD.get(part.name, "1" if part.kind in (int, float) else None)


def _bad(draw: random.Random, part: Parameter) -> str:
    if part.kind in (int, float):
        return draw.choice(NUMBERS)
    places = PLACES if part.kind is Path or part.name in ("store", "config", "groups") else []
    if places and draw.random() < 0.8:
        return draw.choice(places)
    return draw.choice(WORDS)


def preload() -> None:
    """Import what commands import, so that each fork finds it."""
    import contextlib
    import importlib

    import torch

    torch.set_num_threads(1)
    for name in ("duckdb", "pandas", "scipy.optimize", "matplotlib.pyplot", "rich.console", "yaml"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import gradkeep as gk

    for name in gk.__all__:
        getattr(gk, name)
    commands()


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int | None
    out: str
    err: str
    seconds: float


def run_forked(arguments, box: Sandbox, patience: float) -> Ended:
    """Run a command line in a fork; `code` is None if it had to be killed."""
    files = [box.root / "stdout", box.root / "stderr"]
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_the_command(arguments, box, files)
    code = _wait(child, patience)
    texts = [path.read_bytes()[:1_000_000].decode("utf-8", "replace") for path in files]
    return Ended(code, *texts, time.monotonic() - began)


def _be_the_command(arguments, box: Sandbox, files) -> None:
    code = 99
    try:
        gc.disable()  # it would copy every page that it looks at
        os.setpgid(0, 0)
        for number, path in enumerate(files, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = os.fdopen(0)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        os.environ.update(box.environment())
        os.chdir(box.work)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["gradkeep", *arguments]
        from gradkeep.cli import main

        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 98
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 255)


def _wait(child: int, patience: float) -> int | None:
    until = time.monotonic() + patience
    pause = 0.001
    while time.monotonic() < until:
        result, status = os.waitpid(child, os.WNOHANG)
        if result:
            _end_group(child)  # workers that it left behind
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
    _end_group(child)
    os.waitpid(child, 0)
    return None


def _end_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def judge(line: Line, ended: Ended, changed: str | None) -> tuple[str, str]:
    """`ok`, `refused`, `wrong`, `ugly` or `hung`, and why."""
    if ended.code is None:
        return "hung", f"after {ended.seconds:.0f} s"
    if changed is not None:
        return "wrong", changed
    if ended.code not in CODES:
        return "ugly", f"exit code {ended.code}: {ended.err.strip()[-300:]}"
    if "Traceback (most recent" in ended.err and ended.code != 4:
        return "ugly", f"a traceback: {ended.err.strip()[-300:]}"
    if ended.code == 0:
        if line.never is not None:
            return "wrong", f"accepted: {line.never}"
        return ("ok", "") if ended.out.strip() else ("wrong", "nothing was said")
    if not (ended.err.strip() or ended.out.strip()):
        return "wrong", f"exit code {ended.code} without a word"
    return "refused", ""


def try_lines(expected, box: Sandbox, *, run=run_forked, output=None) -> Found:
    """Run all lines; a slow one gets a second chance, for the machine may be busy."""
    result = Found()
    for line in expected:
        ended = run(line.arguments, box, PATIENCE)
        changed = box.settle()
        if ended.code is None:
            ended = run(line.arguments, box, SECOND_PATIENCE)
            changed = changed or box.settle()
        verdict, why = judge(line, ended, changed)
        result.counts["tried"] += 1
        result.counts[verdict] += 1
        if verdict not in ("ok", "refused"):
            shown = " ".join(repr(word[:60]) for word in line.arguments)
            result.bad.append(f"{verdict}: gradkeep {shown}\n    {why}")
            if output is not None:
                output(result.bad[-1])
    return result
