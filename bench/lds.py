"""Linear datamodeling score (LDS) of every method, with intervals and cost.

`./x bench lds [SETTING ...]`: models are trained on 100 random halves of the data with 5 seeds each
(MNIST: 60 and 3). A method's LDS is the rank correlation between the sums of its scores over each
half and the outputs of those models, averaged over the test examples. Settings: digits, digits64
(larger batches and steps; most methods score lower there, and the bars are missed), mnist-logistic,
mnist-mlp; all of them by default, MNIST if its files exist. Three language models run only when
named: gpt, stories260k and large, by method, bytes per row and layers, with bars for the share of the
LDS of exact EK-FAC that 4 and 16 KiB must reach.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

import gradkeep as gk
from bench import _lds_truth, _lm_lds, _lm_truth
from gradkeep.errors import GradkeepError

RUNS = (1, 5, 10)
SAVED_EPOCHS = (3, 4, 5, 6, 7)
MOST_SECONDS = 60.0
"""Most CPU seconds that a method except the kernel may take for ten runs, predicted from one."""
FEW_QUERIES = 20
"""Queries of the methods that solve a system for each query with the model."""
BARS = {("trak", "final"): 0.50, ("kernel", "final"): 0.60, ("kernel", "epochs 3-7"): 0.70}


@dataclass(frozen=True)
class Row:
    """A method with its checkpoints and options."""

    method: str
    at: str = "final"
    options: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options)
        few = f", {FEW_QUERIES} queries" if ("curvature", "ggn") in self.options else ""
        return f"{self.method}{f' ({options})' if options else ''}, {self.at}{few}"


def build_rows() -> list[Row]:
    """Return every method that needs only a store, and selected variants."""
    by_fisher = ("influence", "arnoldi")
    methods = [
        Row(method.name, "final", (("curvature", "fisher"),) if method.name in by_fisher else ())
        for method in gk.methods()
        if method.about_queries
    ]
    methods += [
        Row("kernel", "epochs 3-7"),
        Row("kernel", "final", (("weight", "q(1-q)"),)),
        Row("kernel", "final", (("dim", 512),)),
        Row("trak", "final", (("dim", 512),)),
        Row("trak", "epochs 3-7"),
        Row("tracin", "epochs 3-7"),
        Row("ekfac", "final", (("fisher", "sampled"),)),
        Row("ekfac", "epochs 3-7"),
        Row("influence", "final", (("curvature", "ggn"),)),
        Row("arnoldi", "final", (("curvature", "ggn"),)),
    ]
    return methods


def build_settings() -> dict[str, object]:
    digits = _lds_truth.build_digits_mlp()
    return {
        "digits": lambda: digits,
        "digits64": lambda: dataclasses.replace(digits, batch_size=64, lr=0.1),
        "mnist-logistic": lambda: _lds_truth.build_mnist("logistic"),
        "mnist-mlp": lambda: _lds_truth.build_mnist("mlp"),
    }


@dataclass(frozen=True)
class CapturedRuns:
    """The captures that methods are scored on."""

    setting: _lds_truth.Setting
    store: gk.Store
    states: dict[str, torch.Tensor]
    """Final weights of all runs."""


def capture_runs(setting: _lds_truth.Setting, runs: int) -> CapturedRuns:
    """Capture everything that the methods read, and print the cost."""
    trained = _lds_truth.train_full_runs(setting, runs, keep=(*SAVED_EPOCHS, setting.epochs))
    print(f"  {runs} runs on everything: {trained.accuracy:.1%} of the test examples right")
    store = gk.open(tempfile.mkdtemp(prefix="gradkeep-lds-"), durability="process")
    net = setting.make()
    last = [name for name, part in net.named_modules() if isinstance(part, torch.nn.Linear)][-1]
    began = time.process_time()
    for run in range(runs):
        sources = {
            f"epoch-{epoch:02d}": gk.Weights(
                {name: values[run] for name, values in state.items()}, step=epoch, lr=1.0
            )
            for epoch, state in trained.states.items()
        }
        final = {f"epoch-{setting.epochs:02d}": sources[f"epoch-{setting.epochs:02d}"]}
        for split, batch in (("train", setting.train), ("test", setting.test)):
            common = {"split": split, "run": f"run-{run}", "progress": False}
            task = gk.Classification()
            gk.capture(
                store, net, [batch], task=task, checkpoints=sources, embeddings=[last], **common
            )
        drawn = gk.Classification(labels="sampled")
        train = {"split": "train", "run": f"run-{run}", "progress": False, "name": "sampled"}
        gk.capture(store, net, [setting.train], task=drawn, checkpoints=final, **train)
    took = time.process_time() - began
    count = len(store.captures())
    print(f"  {count} captures in {took:.1f} CPU s, {took / count:.3f} each")
    return CapturedRuns(setting, store, trained.states[setting.epochs])


def score_method(captured: CapturedRuns, row: Row, runs: int) -> tuple[np.ndarray, float]:
    """Return the mean scores of a method over runs, and its CPU seconds."""
    setting, store = captured.setting, captured.store
    epochs = SAVED_EPOCHS if row.at == "epochs 3-7" else (setting.epochs,)
    names = [f"epoch-{epoch:02d}" for epoch in epochs]
    over = {method.name: method.over for method in gk.methods()}[row.method]
    every = [f"run-{run}" for run in range(runs)]
    options = dict(row.options)
    began = time.process_time()
    with_model = options.get("curvature") == "ggn"
    if over == "one" or with_model:
        # These methods read one checkpoint, so the mean over runs is taken here.
        parts = []
        for number, run in enumerate(every):
            if with_model:
                net = setting.make()
                net.load_state_dict({name: w[number] for name, w in captured.states.items()})
                options |= {"model": net, "data": [setting.train], "ids": list(range(FEW_QUERIES))}
            scores = gk.attribute(
                store, method=row.method, run=run, checkpoints=names[-1], **options
            )
            parts.append(scores.values)
        return np.mean(parts, 0), time.process_time() - began
    scores = gk.attribute(store, method=row.method, run=every, checkpoints=names, **options)
    return scores.values, time.process_time() - began


def compare(name: str, setting: _lds_truth.Setting, *, subsets: int, seeds: int) -> None:
    began = time.process_time()
    print(
        f"\n{name}: {setting.name}, {len(setting.train[1])} to train, {len(setting.test[1])} to test"
    )
    truth = _lds_truth.compute_truth(setting, subsets=subsets, seeds=seeds)
    print(
        f"  {subsets} halves x {seeds} seeds in {time.process_time() - began:.0f} CPU s; "
        f"ceiling {truth.ceiling:.3f}"
    )
    captured = capture_runs(setting, max(RUNS))
    print(f"  {'method':42} " + " ".join(f"{f'{runs} runs':>22}" for runs in RUNS) + "  CPU s/run")
    for row in build_rows():
        cells, each = [], float("nan")
        for runs in RUNS:
            if runs > 1 and each * max(RUNS) > MOST_SECONDS and row.method != "kernel":
                cells.append("too long")
                continue
            try:
                scores, took = score_method(captured, row, runs)
            except GradkeepError as error:
                cells.append(str(error).splitlines()[0][:40])
                break
            each = took / runs
            truth_of_queries = dataclasses.replace(truth, margins=truth.margins[:, : len(scores)])
            mean, low, high = _lds_truth.compute_lds(scores, truth_of_queries)
            cells.append(f"{mean:.3f} [{low:.3f}, {high:.3f}]")
            bar = BARS.get((row.method, row.at))
            if runs == max(RUNS) and bar is not None and not row.options and "digits" in name:
                cells[-1] += f" {'reaches' if mean >= bar else 'MISSES'} {bar:.2f}"
        print(f"  {row!s:42} " + " ".join(f"{text:>22}" for text in cells) + f"  {each:.2f}")
        sys.stdout.flush()


def main(names: Sequence[str]) -> int:
    known, missed = build_settings(), False
    for name in names or known:
        if name in _lm_lds.NAMES:
            missed |= _lm_lds.print_table(name, _lm_truth.compute_truth(_lm_lds.NAMES[name]()))
            continue
        if name not in known:
            sys.exit(f"no setting {name!r}; there are {', '.join((*known, *_lm_lds.NAMES))}")
        if name.startswith("mnist") and not (_lds_truth.DATA / "mnist").exists():
            print(f"\n{name}: skipped, no MNIST files under GRADKEEP_DATA")
            continue
        few = name.startswith("mnist")
        compare(name, known[name](), subsets=60 if few else 100, seeds=3 if few else 5)
    return int(missed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", gk.CaptureWarning)
    sys.exit(main(sys.argv[1:]))
