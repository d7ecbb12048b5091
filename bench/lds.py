"""Which attribution is true: every method's linear datamodeling score, with intervals and cost.

`./x bench lds [SETTING ...]`: models are trained on 100 random halves of the data with 5 seeds each
(MNIST: 60 and 3); a method is scored by how well the sums of its scores over each half rank what
those models say of each test example, averaged over the test examples. Settings: digits, digits64
(larger batches and steps), mnist-logistic, mnist-mlp; all of them by default, MNIST where its files
are there.
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
from bench import _lds_truth as truths
from gradkeep._errors import GradkeepError

RUNS = (1, 5, 10)
MIDDLE = (3, 4, 5, 6, 7)
TOO_LONG = 150.0
"""CPU seconds that a method may take for ten runs, as predicted from one."""
BARS = {("trak", "final"): 0.50, ("kernel", "final"): 0.60, ("kernel", "epochs 3-7"): 0.70}


@dataclass(frozen=True)
class Row:
    """A method as it is asked here."""

    method: str
    at: str = "final"
    options: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        told = ", ".join(f"{name}={value}" for name, value in self.options)
        return f"{self.method}{f' ({told})' if told else ''}, {self.at}"


def rows() -> list[Row]:
    """Every method that needs nothing but a store, and the variants that are worth a line."""
    found = [Row(method.name) for method in gk.methods() if method.about_queries]
    found += [
        Row("kernel", "epochs 3-7"),
        Row("kernel", "final", (("weight", "q(1-q)"),)),
        Row("kernel", "final", (("dim", 512),)),
        Row("trak", "final", (("dim", 512),)),
        Row("trak", "epochs 3-7"),
        Row("tracin", "epochs 3-7"),
        Row("ekfac", "final", (("fisher", "sampled"),)),
        Row("ekfac", "epochs 3-7"),
    ]
    return found


def settings() -> dict[str, object]:
    digits = truths.digits_mlp()
    return {
        "digits": lambda: digits,
        "digits64": lambda: dataclasses.replace(digits, batch_size=64, lr=0.1),
        "mnist-logistic": lambda: truths.mnist("logistic"),
        "mnist-mlp": lambda: truths.mnist("mlp"),
    }


def captured(setting: truths.Setting, runs: int) -> gk.Store:
    """A store with all that the methods may ask for, and what capturing it cost."""
    trained = truths.full_runs(setting, runs, keep=(*MIDDLE, setting.epochs))
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
                store, net, [batch], task=task, checkpoint=sources, embeddings=[last], **common
            )
        drawn = gk.Classification(labels="sampled")
        train = {"split": "train", "run": f"run-{run}", "progress": False, "name": "sampled"}
        gk.capture(store, net, [setting.train], task=drawn, checkpoint=final, **train)
    took = time.process_time() - began
    kept = len(store.captures())
    print(f"  {kept} captures in {took:.1f} CPU s, {took / kept:.3f} each")
    return store


def scored(
    store: gk.Store, row: Row, runs: int, setting: truths.Setting
) -> tuple[np.ndarray, float]:
    """The mean over runs of a method's scores, and the CPU seconds it took."""
    epochs = MIDDLE if row.at == "epochs 3-7" else (setting.epochs,)
    names = [f"epoch-{epoch:02d}" for epoch in epochs]
    over = {method.name: method.over for method in gk.methods()}[row.method]
    every = [f"run-{run}" for run in range(runs)]
    options = dict(row.options)
    began = time.process_time()
    if over == "one":
        # These are about one checkpoint: their mean over runs is taken here.
        parts = [
            gk.attribute(store, method=row.method, run=run, checkpoints=names[-1], **options).values
            for run in every
        ]
        return np.mean(parts, 0), time.process_time() - began
    found = gk.attribute(store, method=row.method, run=every, checkpoints=names, **options)
    return found.values, time.process_time() - began


def compare(name: str, setting: truths.Setting, *, subsets: int, seeds: int) -> None:
    began = time.process_time()
    print(
        f"\n{name}: {setting.name}, {len(setting.train[1])} to train, {len(setting.test[1])} to test"
    )
    found = truths.truth(setting, subsets=subsets, seeds=seeds)
    print(
        f"  {subsets} halves x {seeds} seeds in {time.process_time() - began:.0f} CPU s; "
        f"ceiling {found.ceiling:.3f}"
    )
    store = captured(setting, max(RUNS))
    print(f"  {'method':42} " + " ".join(f"{f'{runs} runs':>22}" for runs in RUNS) + "  CPU s/run")
    for row in rows():
        told, each = [], float("nan")
        for runs in RUNS:
            if runs > 1 and each * max(RUNS) > TOO_LONG:
                told.append("too long")
                continue
            try:
                scores, took = scored(store, row, runs, setting)
            except GradkeepError as error:
                told.append(str(error).splitlines()[0][:40])
                break
            each = took / runs
            mean, low, high = truths.lds(scores, found)
            told.append(f"{mean:.3f} [{low:.3f}, {high:.3f}]")
            bar = BARS.get((row.method, row.at))
            if runs == max(RUNS) and bar is not None and not row.options and "digits" in name:
                told[-1] += f" {'reaches' if mean >= bar else 'MISSES'} {bar:.2f}"
        print(f"  {row!s:42} " + " ".join(f"{text:>22}" for text in told) + f"  {each:.2f}")
        sys.stdout.flush()


def main(wanted: Sequence[str]) -> None:
    known = settings()
    for name in wanted or known:
        if name not in known:
            sys.exit(f"no setting {name!r}; there are {', '.join(known)}")
        if name.startswith("mnist") and not (truths.DATA / "mnist").exists():
            print(f"\n{name}: skipped, no MNIST files under GRADKEEP_DATA")
            continue
        few = name.startswith("mnist")
        compare(name, known[name](), subsets=60 if few else 100, seeds=3 if few else 5)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", gk.CaptureWarning)
    main(sys.argv[1:])
