"""Every model of the zoo inside memory budgets, compared with plain training.

`./x bench zoo_budgets [NAME ...] [--results FILE]`: own and stock Hugging Face models (`_zoo_models.py`),
each with batches of three shapes in turn, trained with dropout and AdamW in three budgets, planned (the
default mode) and online. The outcomes are

- bitwise: losses, gradients, parameters and buffers equal those of plain training;
- refused: a GradkeepError before the first wrong number; a model whose floor is above the budget is
  tried once more at the floor;
- wrong: different numbers;
- silent: more live bytes than the budget without a `BudgetWarning`, counted by a separate dispatch mode;
- bare: an error that is not a GradkeepError;
- crashed: the process ended.

Models run in subprocesses, many in one; the model that was running when a subprocess ended counts as
crashed. The exit code is 0 only if nothing is wrong, silent, bare or crashed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import logging
import subprocess
import sys
import time
import traceback
import warnings
import weakref
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradkeep as gk
from gradkeep.errors import BudgetError, BudgetWarning, GradkeepError
from gradkeep.remat._tensors import has_storage
from gradkeep.remat.planned._memory_budget import explain_plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench._zoo_models import ZooItem

MODES = ("auto", "online")
RATIOS = (0.8, 0.6, 0.4)
STEPS, WATCHED = 12, 3
"""Three shapes are recorded three times each; live bytes are counted in the last steps."""
REPEATS = 8
"""Repetitions of the rows of each batch, so that activations matter beside parameters."""
BAD = ("wrong", "silent", "bare", "crashed")
Numbers = list[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a model in one mode and budget."""

    name: str
    mode: str
    ratio: float
    kind: str
    detail: str = ""
    floor: bool = False
    """True if the budget was below the floor and this is the result at the floor."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators have seen."""

    def __init__(self, known: Any) -> None:
        super().__init__()
        self._references: dict[int, Any] = {}
        self.peak = 0
        self._see(known)

    def _see(self, tensors: Any) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor) and has_storage(tensor):
                storage = tensor.untyped_storage()
                self._references[id(storage)] = weakref.ref(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see((args, kwargs))
        out = func(*args, **(kwargs or {}))
        self._see(out)
        alive = [storage for ref in self._references.values() if (storage := ref()) is not None]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive))
        return out


@dataclass(frozen=True, slots=True)
class Trained:
    """Final numbers of a training, and the peak bytes of its last steps."""

    numbers: Numbers
    peak: int


def train(item: ZooItem, budget: Any) -> Trained:
    model = item.make().train()
    batches = [repeat_rows(batch) for batch in item.batches()]
    parameters = [p for p in model.parameters() if p.requires_grad]
    sparse = any(getattr(module, "sparse", False) for module in model.modules())
    optimizer = (torch.optim.SGD if sparse else torch.optim.AdamW)(parameters, lr=1e-3)
    losses: list[float] = []
    torch.manual_seed(5)
    counted: LiveBytes | None = None
    with contextlib.ExitStack() as stack:
        if budget is not None:
            stack.enter_context(budget)
        for number in range(STEPS):
            if number == STEPS - WATCHED:
                states = [list(state.values()) for state in optimizer.state.values()]
                counted = stack.enter_context(LiveBytes(states))
            optimizer.zero_grad()
            # Copied without a torch operator, so that batches of other steps are not counted.
            chosen = batches[number % len(batches)].items()
            batch = {name: torch.from_numpy(value.copy()) for name, value in chosen}
            loss = item.task.losses(model, batch).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            del loss, batch
    numbers: Numbers = [torch.tensor(losses, dtype=torch.float64)]
    numbers += [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    numbers += [None if p.grad is None else p.grad.to_dense() for p in parameters]
    assert counted is not None
    return Trained(numbers, counted.peak)


def repeat_rows(batch: Any) -> Any:
    rows = len(next(iter(batch.values())))
    return {
        name: np.concatenate([value.numpy()] * REPEATS) if len(value) == rows else value.numpy()
        for name, value in batch.items()
    }


def same_bits(first: Numbers, second: Numbers) -> bool:
    return all(
        (a is None) == (b is None)
        and (a is None or b is None or (a.shape == b.shape and tensor_bytes(a) == tensor_bytes(b)))
        for a, b in zip(first, second, strict=True)
    )


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


@dataclass(slots=True)
class Judge:
    """Judges one model; the result at its floor is computed once."""

    item: ZooItem
    plain: Trained
    at_floor: Verdict | None = None

    def __call__(self, mode: str, ratio: float) -> Verdict:
        name = self.item.name
        try:
            try:
                return judge_budget(self.item, self.plain, mode, ratio, ratio, floor=False)
            except BudgetError:
                if self.at_floor is None:
                    budget = int(1.05 * find_floor(self.item, mode))
                    self.at_floor = judge_budget(
                        self.item, self.plain, mode, ratio, budget, floor=True
                    )
                return replace(self.at_floor, ratio=ratio)
        except GradkeepError as error:
            detail = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            return Verdict(name, mode, ratio, "refused", detail)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            detail = f"{error!r}"[:160] + f" at {Path(where.filename).name}:{where.lineno}"
            return Verdict(name, mode, ratio, "bare", detail)


def find_floor(item: ZooItem, mode: str) -> int:
    """Return the least budget that has a plan for every batch."""
    probe = gk.memory_budget(1.0, mode=mode, effort=0.02, min_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(item, probe)
    settings = probe._planner.settings
    return max(explain_plan(plan, settings).floor for plan in probe._planner.plans)


def judge_budget(
    item: ZooItem, plain: Trained, mode: str, ratio: float, budget: float, *, floor: bool
) -> Verdict:
    """Train once in a budget and compare."""
    around = gk.memory_budget(budget, mode=mode, effort=0.02, min_size=1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trained = train(item, around)
    warned = any(issubclass(one.category, BudgetWarning) for one in seen)
    report = around.report()
    allowed = [plan.budget for plan in around._planner.plans]
    if report.evicting is not None:
        allowed.append(int(report.evicting.budget))
    detail = (
        f"{report.planned} planned, {report.recorded} recorded, {report.online} online, "
        f"peak {trained.peak} of {max(allowed, default=0)}, plain {plain.peak}, warned {warned}"
    )
    kind = "bitwise"
    if not same_bits(trained.numbers, plain.numbers):
        kind = "wrong"
    elif allowed and trained.peak > max(allowed) and not warned:
        kind = "silent"
    return Verdict(item.name, mode, ratio, kind, detail, floor)


def iter_items(names: list[str]) -> Iterator[ZooItem]:
    """Iterate over one item of each model, with its last pattern: the first is often the
    plainest."""
    from bench._zoo_models import iter_zoo

    chosen = {item.model: item for item in iter_zoo()}
    for item in chosen.values():
        if not names or any(name.lower() in item.name.lower() for name in names):
            yield item


def run_worker(names: list[str], done: set[str], only: list[str]) -> None:
    """Judge the remaining models; print a JSON line for each start and each verdict."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    for item in iter_items(names):
        if item.name in done or (only and item.name not in only):
            continue
        write_message({"begins": item.name})
        try:
            plain, repeated = train(item, None), train(item, None)
            steady = same_bits(plain.numbers, repeated.numbers)
        except Exception as error:
            write_message(asdict(Verdict(item.name, "", 0, "skipped", f"plain: {error!r}"[:120])))
            write_message({"ends": item.name})
            continue
        judge = Judge(item, plain)
        for mode in MODES:
            for ratio in RATIOS:
                if not steady:
                    write_message(
                        asdict(
                            Verdict(
                                item.name,
                                mode,
                                ratio,
                                "skipped",
                                "plain training is not repeatable",
                            )
                        )
                    )
                    continue
                write_message({"begins": item.name, "mode": mode, "ratio": ratio})
                write_message(asdict(judge(mode, ratio)))
        write_message({"ends": item.name})


def write_message(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./x bench zoo_budgets")
    parser.add_argument("names", nargs="*", help="only models whose name contains one of these")
    parser.add_argument("--results", type=Path, help="JSON lines file to write and continue")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", default="0/1", help="part K of N, for parallel runs")
    options = parser.parse_args(arguments)
    if options.work is not None:
        state = json.loads(options.work.read_text())
        run_worker(options.names, set(state["done"]), state["only"])
        return 0
    part, parts = map(int, options.part.split("/"))
    model_names = [item.name for item in iter_items(options.names)][part::parts]
    results = options.results or Path(f"/tmp/zoo_budgets-{time.time_ns()}.jsonl")
    verdicts = [Verdict(**json.loads(line)) for line in read_lines(results)]
    counts = collections.Counter(one.name for one in verdicts)
    ended = {one.name for one in verdicts if one.kind in ("skipped", "crashed")}
    done = {name for name in model_names if counts[name] == len(MODES) * len(RATIOS)} | ended
    verdicts = [one for one in verdicts if one.name in done]
    begin = time.monotonic()
    with results.open("a") as file:
        while set(model_names) - done:
            before = len(verdicts)
            for one in iter_verdicts(options.names, model_names, done):
                file.write(json.dumps(asdict(one)) + "\n")
                file.flush()
                verdicts.append(one)
            done |= {one.name for one in verdicts}
            if len(verdicts) == before:
                sys.exit("a worker ended without a verdict")
    print(f"{len(model_names)} models, {time.monotonic() - begin:.0f} s, verdicts in {results}")
    return summary(verdicts)


def read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def iter_verdicts(names: list[str], model_names: list[str], done: set[str]) -> Iterator[Verdict]:
    """Start a worker on the remaining models; if it dies, the model it was running has crashed."""
    state = Path(f"/tmp/zoo_budgets-{time.time_ns()}.json")
    state.write_text(json.dumps({"done": sorted(done), "only": model_names}))
    command = [sys.executable, "-m", "bench.zoo_budgets", *names, "--work", str(state)]
    began: dict[str, Any] | None = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            message = json.loads(line) if line.startswith("{") else {}
            if "begins" in message:
                began = message
            elif "ends" in message:
                began = None
            elif "kind" in message:
                yield report_bad(Verdict(**message))
    state.unlink()
    if process.returncode and began is not None:
        mode, ratio = began.get("mode", ""), began.get("ratio", 0)
        detail = f"exit code {process.returncode}"
        yield report_bad(Verdict(began["begins"], mode, ratio, "crashed", detail))


def report_bad(one: Verdict) -> Verdict:
    """Print the verdict if it is bad."""
    if one.kind in BAD:
        print(format_verdict(one), flush=True)
    return one


def format_verdict(one: Verdict) -> str:
    floor = " at its floor" if one.floor else ""
    return f"{one.kind}: {one.name} {one.mode} {one.ratio}{floor}: {one.detail}"


def summary(verdicts: list[Verdict]) -> int:
    """Print counts and reasons; return 0 if there is nothing bad."""
    for mode in (*MODES, ""):
        kinds = collections.Counter(
            one.kind + (" at the floor" if one.floor else "")
            for one in verdicts
            if one.mode == mode
        )
        if kinds:
            line = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            print(f"{mode or 'plain':8} {line}")
    reasons = collections.Counter(
        f"{one.kind}: {one.detail[:100]}" for one in verdicts if one.kind in ("refused", "skipped")
    )
    for reason, count in reasons.most_common(12):
        print(f"{count:6} {reason}")
    bad = [one for one in verdicts if one.kind in BAD]
    print(f"bad: {len(bad)}", *map(format_verdict, bad), sep="\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
