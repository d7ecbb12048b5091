"""LDS of language models by method and bytes per row, for `bench lds` and `bench lm`.

For each setting of `_lm_truth` and for two epochs, early and last: the LDS against models trained on
halves, on all halves and on those that no recipe was selected on, with 95 % intervals over queries
and halves. Queries are stored unrounded.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer

import gradkeep as gk
from bench import _lm_truth

EARLY_EPOCH = 2
BATCH = 25
NAMES = {
    "gpt": _lm_truth.build_gpt,
    "stories260k": _lm_truth.build_stories,
    "large": _lm_truth.build_large_gpt,
}
SIZES = ("1KiB", "2KiB", "4KiB", "16KiB")
SHARES = {"4KiB": 0.90, "16KiB": 0.95}
"""Required share of the LDS of exact EK-FAC, by `keep`."""


@dataclass(frozen=True, eq=False)
class Row:
    """One line of the table at one epoch."""

    name: str
    bytes: float
    """Bytes per training row; 0 if nothing of the model is stored."""
    scores: np.ndarray
    """`[Q, N]`"""
    seconds: float
    """CPU seconds of the capture."""
    size: str | None = None
    """Value of `keep`, for rows of gradkeep."""


def print_table(name: str, truth: _lm_truth.Truth) -> bool:
    """Print the table of one setting; return True if a bar is missed."""
    setting = truth.setting
    count, length = setting.train.shape
    print(
        f"\n{name}: {setting.name}; {count} rows of {length} tokens, {len(setting.queries)} queries, "
        f"{len(truth.masks)} halves x {setting.seeds} seeds, ceiling {truth.ceiling:.3f}"
    )
    missed = False
    for epoch in (EARLY_EPOCH, setting.epochs):
        print(f"\n  {'epoch ' + str(epoch):34} {'bytes/row':>10} {'LDS, all halves':>22}", end="")
        print(f" {'LDS, report halves':>22} {'of exact: all':>14} {'report':>7}  CPU s of capture")
        exact: tuple[_lm_truth.Lds, _lm_truth.Lds] | None = None
        for row in iter_rows(truth, epoch):
            both = (
                _lm_truth.compute_lds(row.scores, truth),
                _lm_truth.compute_lds(row.scores, truth, truth.reporting_subsets),
            )
            if row.name == "ekfac, exact":
                exact = both
            line = f"  {row.name:34} {row.bytes:>10,.0f} {both[0]!s:>22} {both[1]!s:>22}"
            if exact is not None:
                shares = [one.mean / whole.mean for one, whole in zip(both, exact, strict=True)]
                line += f" {shares[0]:>14.0%} {shares[1]:>7.0%}  {row.seconds:>6.1f}"
                bar = SHARES.get(row.size or "")
                if bar is not None:
                    below = both[0].minus(exact[0])
                    verdict = "reaches" if shares[0] >= bar else "MISSES"
                    line += f"  {verdict} {bar:.0%}; {below} of exact"
                    missed |= shares[0] < bar
            if row.size is not None and row.bytes > gk.Keep(row.size).row_bytes:
                line += "  MISSES the requested bytes"
                missed = True
            print(line, flush=True)
    return missed


def iter_rows(truth: _lm_truth.Truth, epoch: int) -> Iterator[Row]:
    """Iterate over all rows, exact EK-FAC first because the others are compared with it."""
    yield from iter_exact_rows(truth, epoch)
    for size in SIZES:
        yield measure_keep(f"ours, {size}", truth, epoch, gk.Keep(size), size=size)
    for size in ("4KiB", "16KiB"):
        yield from iter_layer_rows(truth, epoch, size)
        yield measure_keep(f"1 bit, folded by 4, {size}", truth, epoch, gk.Keep(size, group=0))
        yield measure_keep(f"4 bits, {size}", truth, epoch, gk.Keep(size, bits=4))
        random = gk.Keep(size, coordinates="random", bits=16)
        yield measure_keep(f"random (LoGra), 16 bits, {size}", truth, epoch, random)
    for name, method in (("bigrams, TF-IDF", tf_idf), ("bigrams, BM25", bm25)):
        setting = truth.setting
        yield Row(name, 0, method(setting.queries, setting.train), 0)


def layer_choices(truth: _lm_truth.Truth) -> dict[str, list[str]]:
    """Return layer selections by name."""
    attention = list(truth.setting.attention)
    return {
        "without attention": [f"!{name}" for name in (*attention, truth.setting.norms)],
        "attention only": attention,
        "all layers": ["*"],
    }


def iter_exact_rows(truth: _lm_truth.Truth, epoch: int) -> Iterator[Row]:
    """Score exact gradients with several methods from one capture."""
    with tempfile.TemporaryDirectory(prefix="gradkeep-lm-") as place:
        store, taken, seconds = capture_splits(place, truth, epoch, "exact", "exact")
        for method in ("ekfac", "dot", "kernel", "random"):
            options = {"damping": 0.1} if method == "ekfac" else {}
            values = gk.attribute(store, method=method, **options).values
            yield Row(f"{method}, exact", taken, values, seconds)
        for name, layers in layer_choices(truth).items():
            if layers != ["*"]:
                values = gk.attribute(store, method="ekfac", damping=0.1, layers=layers).values
                yield Row(f"ekfac, exact, {name}", taken, values, seconds)


def iter_layer_rows(truth: _lm_truth.Truth, epoch: int, size: str) -> Iterator[Row]:
    """Score captures of selected layers."""
    for name, layers in layer_choices(truth).items():
        yield measure_keep(f"ours, {size}, {name}", truth, epoch, gk.Keep(size), layers=layers)


def measure_keep(
    name: str,
    truth: _lm_truth.Truth,
    epoch: int,
    keep: gk.Keep,
    *,
    size: str | None = None,
    layers: list[str] | None = None,
) -> Row:
    """Capture with `keep` and score with EK-FAC, which is best for random coordinates too."""
    with tempfile.TemporaryDirectory(prefix="gradkeep-lm-") as place:
        store, taken, seconds = capture_splits(place, truth, epoch, keep, "queries", layers=layers)
        return Row(name, taken, gk.attribute(store, method="ekfac").values, seconds, size)


def capture_splits(
    place: str,
    truth: _lm_truth.Truth,
    epoch: int,
    keep: object,
    queries: object,
    *,
    layers: list[str] | None = None,
) -> tuple[gk.Store, float, float]:
    """Capture both splits; return the store, bytes per training row and CPU seconds of the
    training split."""
    store = gk.open(place, durability="process")
    setting, model = truth.setting, truth.model(epoch)
    taken = seconds = 0.0
    for split, tokens, how in (
        ("train", setting.train, keep),
        ("test", setting.queries, queries),
    ):
        began = time.process_time()
        report = gk.capture(
            store,
            model,
            list(tokens.split(BATCH)),
            task=gk.LanguageModeling(),
            checkpoints=f"epoch-{epoch}",
            split=split,
            keep=how,
            layers=layers,
            progress=False,
        )
        if split == "train":
            taken, seconds = report.bytes / report.rows, time.process_time() - began
    return store, taken, seconds


def tf_idf(queries: torch.Tensor, train: torch.Tensor) -> np.ndarray:
    """Return cosines `[Q, N]` of weighted counts of token bigrams."""
    counts = TfidfVectorizer(analyzer=_pairs, sublinear_tf=True)
    rows = counts.fit_transform(train.tolist())
    return (counts.transform(queries.tolist()) @ rows.T).toarray()


def bm25(queries: torch.Tensor, train: torch.Tensor, k: float = 1.2) -> np.ndarray:
    """Return BM25 scores `[Q, N]`; all rows have the same length, so it is not normalized."""
    counts = CountVectorizer(analyzer=_pairs)
    rows = counts.fit_transform(train.tolist()).astype(np.float64)
    holding = np.bincount(rows.indices, minlength=rows.shape[1])
    rows.data *= (k + 1) / (rows.data + k)
    rows.data *= np.log1p((len(train) - holding + 0.5) / (holding + 0.5))[rows.indices]
    return (counts.transform(queries.tolist()) @ rows.T).toarray()


def _pairs(tokens: Sequence[int]) -> list[str]:
    return [f"{one} {two}" for one, two in itertools.pairwise(tokens)]
