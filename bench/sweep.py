"""Every differentiable function and every module of torch inside a budget, compared with plain training.

`./x bench sweep [NAME ...] [--quick]`: small chains around each function of `torch`, `torch.nn.functional`,
`torch.fft`, `torch.linalg` and `torch.special`, in place if it has such a variant, real and complex, and
around each module of `torch.nn`. Each is trained some steps plainly and inside three budgets, planned
and online. "exact" means equal bits in losses, gradients and buffers; "refused" means a GradkeepError
before the first wrong number. The exit code is 0 only if everything was tried, nothing is wrong, and
every error is a GradkeepError. The samples are those of torch's own tests (they need the package
`expecttest`).

The full sweep takes half an hour on one core. `--results FILE` stores every verdict in a file of JSON
lines and continues an earlier run with the same code and options; `--minutes M` stops after M minutes;
the table at the end covers the whole file. A subject that ended the process is tried once more, then
counts as crashed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import faulthandler
import hashlib
import json
import logging
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

import gradkeep as gk
from gradkeep.errors import BudgetError, BudgetWarning, GradkeepError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BUDGETS = (0.9, 0.7, 0.5)
MODES = ("planned", "online")
STEPS = 6
MOST_ELEMENTS = 50_000


@dataclass(frozen=True, slots=True)
class Subject:
    """A training step: `make` returns parameters and a function from a step number to a loss."""

    name: str
    make: Callable[[], tuple[list[torch.Tensor], Callable[[int], torch.Tensor]]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a subject in one budget and mode."""

    name: str
    mode: str
    budget: float
    kind: str
    """`exact`, `refused`, `wrong`, `ugly`, `crashed`, or `skipped` if plain training is not
    repeatable."""
    dropped: bool
    detail: str = ""


def is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (
        value.dtype.is_floating_point or value.dtype.is_complex
    )


def build_step(function: Callable[..., Any], sample: Any, *, in_place: bool = False) -> Any:
    """Build a step around a function: its inputs are computed from leaves, its results are used."""
    values = (sample.input, sample.args, sample.kwargs)
    leaves: list[torch.Tensor] = []

    def leaf(value: Any) -> Any:
        if is_number(value) and value.layout == torch.strided:
            leaves.append(value.detach().clone().requires_grad_())
            return _Leaf(len(leaves) - 1)
        return value.detach() if isinstance(value, torch.Tensor) else value

    form = tree_map(leaf, values)
    ones = [torch.ones_like(one, requires_grad=True) for one in leaves]

    def step(number: int) -> torch.Tensor:
        factor = 1.0 + 2.0 ** -(number % 3 + 6)

        def build_input(value: Any) -> Any:
            if not isinstance(value, _Leaf):
                return value
            # Multiply by a tensor that changes from step to step, like data.
            data = torch.full_like(ones[value.number], factor).detach()
            return (leaves[value.number] * ones[value.number]) * data

        first, args, kwargs = tree_map(build_input, form, is_leaf=lambda v: isinstance(v, _Leaf))
        torch.manual_seed(number)
        out = function(first, *args, **kwargs)
        return reduce_to_loss(out)

    return [*leaves, *ones], step


@dataclass(frozen=True)
class _Leaf:
    number: int


def reduce_to_loss(out: Any) -> torch.Tensor:
    """Return a number that depends on every differentiable result, through saved tensors."""
    loss = torch.zeros(())
    for value in tree_leaves(out):
        if not is_number(value) or not value.requires_grad:
            continue
        if value.layout != torch.strided:
            value = value.to_dense()
        for _ in range(4):
            value = torch.sin(value) * value
        loss = (
            loss + torch.view_as_real(value.resolve_conj()).float().square().sum()
            if (value.is_complex())
            else loss + value.float().square().sum()
        )
    return loss


def function_subjects(names: set[str]) -> Iterator[Subject]:
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        label = info.formatted_name
        if not info.supports_autograd or (names and not any(n in label for n in names)):
            continue
        for dtype in (torch.float32, torch.complex64):
            if dtype not in info.supported_backward_dtypes("cpu"):
                continue
            yield from _sampled(info, label, dtype)


def _sampled(info: Any, label: str, dtype: torch.dtype) -> Iterator[Subject]:
    torch.manual_seed(0)
    try:
        samples = list(info.sample_inputs("cpu", dtype, requires_grad=True))
    except Exception:
        return
    samples = [s for s in samples if _elements(s) and _elements(s) <= MOST_ELEMENTS]
    # The first is mostly the simplest; the largest has the most options or dimensions.
    chosen = {id(s): s for s in (*samples[:1], *sorted(samples, key=_elements)[-1:])}
    for at, sample in enumerate(chosen.values()):
        kind = "c" if dtype.is_complex else "f"
        yield Subject(f"{label} {kind}{at}", lambda s=sample: build_step(info.op, s))
        variant = info.inplace_variant
        if variant is not None and at == 0:
            yield Subject(
                f"{label} {kind}{at} in place", lambda s=sample, f=variant: build_step(f, s)
            )


def _elements(sample: Any) -> int:
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return sum(v.numel() for v in leaves if isinstance(v, torch.Tensor))


def module_subjects(names: set[str]) -> Iterator[Subject]:
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        label = f"nn.{info.formatted_name}"
        if names and not any(n in label for n in names):
            continue
        torch.manual_seed(0)
        try:
            samples = info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=True, training=True
            )
        except Exception:
            continue
        for at, sample in enumerate(samples[:2]):
            yield Subject(f"{label} m{at}", lambda i=info, s=sample: _module_step(i, s))


def _module_step(info: Any, sample: Any) -> Any:
    torch.manual_seed(0)
    built = sample.constructor_input
    module = info.module_cls(*built.args, **built.kwargs)
    module.train()
    forward = copy.deepcopy(sample.forward_input)
    example = _Sample((), forward.args, forward.kwargs)
    leaves, step = build_step(lambda _, *args, **kwargs: module(*args, **kwargs), example)
    return [*leaves, *module.parameters(), *module.buffers()], step


@dataclass(frozen=True)
class _Sample:
    input: Any
    args: Any
    kwargs: Any


Numbers = list[tuple[torch.Tensor | None, ...]]


def train(subject: Subject, budget: Any) -> Numbers:
    """Return losses, gradients and buffers of each step."""
    torch.manual_seed(0)
    tensors, step = subject.make()
    history: Numbers = []
    with budget if budget is not None else contextlib.nullcontext():
        for number in range(STEPS):
            for tensor in tensors:
                tensor.grad = None
            torch.manual_seed(100 + number)
            loss = step(number)
            loss.backward()
            seen = [loss.detach().clone()]
            for tensor in tensors:
                seen += [
                    None if tensor.grad is None else tensor.grad.detach().clone(),
                    tensor.detach().clone(),
                ]
            history.append(tuple(seen))
            del loss
            with torch.no_grad():
                for tensor in tensors:
                    if tensor.grad is not None and tensor.grad.layout == torch.strided:
                        tensor.mul_(1 - 2.0**-9)
    return history


def find_difference(first: Numbers, second: Numbers) -> str:
    """Describe the first difference in bits; empty if all are equal."""
    for number, (ours, theirs) in enumerate(zip(first, second, strict=True)):
        for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if (a is None) != (b is None):
                return f"step {number}: tensor {at} is missing on one side"
            if a is not None and b is not None and not same_bits(a, b):
                return f"step {number}: {'the loss' if at == 0 else f'tensor {at}'} differs"
    return ""


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    first, second = (t.detach().resolve_conj().resolve_neg().numpy().tobytes() for t in (a, b))
    return first == second


def judge(subject: Subject, budgets: tuple[float, ...], modes: tuple[str, ...]) -> list[Verdict]:
    """Judge a subject in all budgets and modes."""
    try:
        plain, repeated = train(subject, None), train(subject, None)
    except Exception as error:
        return [Verdict(subject.name, "", 0, "skipped", False, f"plain: {error!r}"[:80])]
    if find_difference(plain, repeated):
        return [Verdict(subject.name, "", 0, "skipped", False, "plain differs from itself")]
    return [judge_budget(subject, plain, mode, ratio) for mode in modes for ratio in budgets]


def judge_budget(subject: Subject, plain: Numbers, mode: str, ratio: float) -> Verdict:
    budget = gk.memory_budget(ratio, mode=mode, min_size=1, effort=0.02)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)
            try:
                numbers = train(subject, budget)
            except BudgetError:
                # The budget is below the floor: use the floor instead.
                probe = gk.memory_budget(1.0, mode=mode, min_size=1, effort=0.02)
                train(subject, probe)
                floor = probe.explain().floor
                budget = gk.memory_budget(floor, mode=mode, min_size=1, effort=0.02)
                numbers = train(subject, budget)
    except GradkeepError as error:
        return Verdict(
            subject.name, mode, ratio, "refused", False, f"{type(error).__name__}: {error}"
        )
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        detail = f"{error!r}"[:100] + f" at {where.filename.rsplit('/', 1)[-1]}:{where.lineno}"
        return Verdict(subject.name, mode, ratio, "ugly", False, detail)
    report = budget.report()
    dropped = bool(report.recompute_share) or bool(
        report.evicting is not None and report.evicting.rematerializations
    )
    difference = find_difference(plain, numbers)
    kind = "wrong" if difference else "exact"
    return Verdict(subject.name, mode, ratio, kind, dropped, difference)


@dataclass(slots=True)
class Results:
    """Verdicts so far, written to a file at once if there is one."""

    path: Path | None
    verdicts: dict[str, list[Verdict]] = field(default_factory=dict)
    begun: collections.Counter[str] = field(default_factory=collections.Counter)

    def open(self, made_by: str) -> None:
        """Read the verdicts of an earlier run; refuse those of other code or options."""
        if self.path is None:
            return
        if not self.path.exists():
            self._write({"made_by": made_by})
            return
        head, *lines = map(json.loads, self.path.read_text().splitlines())
        if head != {"made_by": made_by}:
            sys.exit(
                f"{self.path} was written with other code or options: remove it, or pass another file"
            )
        for line in lines:
            if "begins" in line:
                self.begun[line["begins"]] += 1
            else:
                self.verdicts[line["name"]] = [Verdict(**one) for one in line["verdicts"]]

    def is_pending(self, name: str) -> bool:
        """Return True if a subject has no verdict yet."""
        if name not in self.verdicts and self.begun[name] >= 2:
            self.add(name, [Verdict(name, "", 0, "crashed", False, "the process ended")])
        return name not in self.verdicts

    def begin(self, name: str) -> None:
        """Record a subject before it is tried, in case the process ends."""
        self._write({"begins": name})

    def add(self, name: str, verdicts: list[Verdict]) -> None:
        self.verdicts[name] = verdicts
        self._write({"name": name, "verdicts": [asdict(one) for one in verdicts]})

    def _write(self, line: dict[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


BAD = ("wrong", "ugly", "crashed")


def format_verdict(verdict: Verdict) -> str:
    return f"{verdict.kind}: {verdict.name} {verdict.mode} {verdict.budget}: {verdict.detail}"


def code_digest() -> str:
    """Return a digest of everything that verdicts depend on."""
    digest = hashlib.sha256(torch.__version__.encode())
    for file in sorted(Path(gk.__file__).parent.joinpath("remat").rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./x bench sweep")
    parser.add_argument("names", nargs="*", help="only subjects whose name contains one of these")
    parser.add_argument("--quick", action="store_true", help="one budget instead of three")
    parser.add_argument("--planned", action="store_true", help="only planned")
    parser.add_argument("--online", action="store_true", help="only online")
    parser.add_argument("--results", type=Path, help="JSON lines file to write and continue")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop after that many minutes"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("gradkeep").setLevel(logging.ERROR)  # hide warnings about small operators
    faulthandler.enable()
    names = set(options.names)
    budgets = BUDGETS[1:2] if options.quick else BUDGETS
    modes = tuple(mode for mode in MODES if getattr(options, mode)) or MODES
    results = Results(options.results)
    results.open(f"{code_digest()} {sorted(names)} {budgets} {modes}")
    subjects = remaining = 0
    start = time.monotonic()
    for subject in (*function_subjects(names), *module_subjects(names)):
        subjects += 1
        if not results.is_pending(subject.name):
            continue
        if time.monotonic() - start > 60 * options.minutes:
            remaining += 1
            continue
        results.begin(subject.name)
        verdicts = judge(subject, budgets, modes)
        results.add(subject.name, verdicts)
        for verdict in verdicts:
            if verdict.kind in BAD:
                print(format_verdict(verdict), flush=True)
    print(f"\n{subjects} subjects, {remaining} of them not tried, {time.monotonic() - start:.0f} s")
    return summary([one for some in results.verdicts.values() for one in some], remaining)


def summary(verdicts: list[Verdict], remaining: int) -> int:
    """Print counts, reasons and all failures; return 0 if there are none and nothing remains."""
    counts = collections.Counter(
        (one.mode or "plain", one.kind + " with drops" * one.dropped) for one in verdicts
    )
    for (mode, kind), count in sorted(counts.items()):
        print(f"{mode:8} {kind:20} {count}")
    reasons = collections.Counter(
        f"{one.kind} {one.mode}: {one.detail.splitlines()[0][:100]}"
        for one in verdicts
        if one.kind in ("refused", "skipped")
    )
    for reason, count in reasons.most_common(25):
        print(f"{count:6} {reason}")
    bad = [one for one in verdicts if one.kind in BAD]
    print(*map(format_verdict, bad), sep="\n")
    return int(bool(bad or remaining))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
