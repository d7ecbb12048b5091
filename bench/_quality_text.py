"""The text settings of the quality benchmark: news by topic, and fine-tuned language models."""

from __future__ import annotations

import tempfile
import time

import numpy as np
import torch
from sklearn.feature_extraction.text import TfidfVectorizer

import gradkeep as gk
from bench import _lds_truth, _lm_lds, _lm_truth
from bench import _quality_board as board
from bench._quality_board import Entry, Section
from bench._quality_lds import combine_entries, derive_entry
from bench._quality_settings import evaluate_half_models
from gradkeep.attribution._scores import Scores
from gradkeep.attribution._text_similarity import text_similarity
from gradkeep.evaluate import compare, hybrid
from gradkeep.evaluate._lds import Judgement
from gradkeep.evaluate._truth import GroundTruth

EARLY_EPOCHS = (1, 2, 3)
MIXED = "mean of ekfac, early epochs and bigrams"


def agnews(full: bool) -> Section:
    """Evaluate an MLP on TF-IDF features."""
    texts, labels = _load_news(3500)
    counts = TfidfVectorizer(max_features=1000, sublinear_tf=True)
    train = torch.from_numpy(counts.fit_transform(texts[:3000]).toarray()).float()
    test = torch.from_numpy(counts.transform(texts[3000:]).toarray()).float()
    setting = _lds_truth.Setting(
        "AG News MLP",
        (train, labels[:3000]),
        (test, labels[3000:]),
        _lds_truth.mlp(1000, 64, classes=4),
        epochs=10,
        lr=0.2,
    )
    sizes = (200, 5) if full else (50, 2)
    like = derive_entry(
        "text similarity", [], lambda: text_similarity(texts[3000:], texts[:3000]), peer=True
    )
    return evaluate_half_models("agnews", setting, *sizes, epochs=(2, 3, 5), extra=[like])


def _load_news(count: int) -> tuple[list[str], torch.Tensor]:
    """Return distinct news and their topics."""
    lines = (_lds_truth.DATA / "agnews" / "alps_dev.tsv").read_text(encoding="utf-8").split("\n")
    topic_by_text = dict(line.rpartition("\t")[::2] for line in lines if "\t" in line)
    texts = list(topic_by_text)
    order = np.random.default_rng(5).permutation(len(texts))[:count]
    topics = sorted(set(topic_by_text.values()))
    chosen = [texts[at] for at in order]
    return chosen, torch.tensor([topics.index(topic_by_text[text]) for text in chosen])


def stories(full: bool) -> Section:
    """Evaluate a pretrained Llama of 260K parameters, fine-tuned on plays."""
    return evaluate_language_model("stories260k", _lm_truth.build_stories(), bars=True)


def gpt(full: bool) -> Section:
    """Evaluate a small GPT, pretrained here and fine-tuned on news."""
    return evaluate_language_model("gpt", _lm_truth.build_gpt(), bars=False)


def evaluate_language_model(name: str, setting: _lm_truth.Setting, *, bars: bool) -> Section:
    """Evaluate methods on one run on all rows; the ground truth is cached."""
    retrained = _lm_truth.compute_truth(setting)
    # Outputs must increase with quality, so the losses are negated.
    truth = GroundTruth(name, retrained.masks, -retrained.losses)
    place = tempfile.mkdtemp(prefix="gradkeep-")
    store = gk.open(place, durability="process")
    last = setting.epochs
    seconds, row_bytes = {}, {}
    for epoch in (*EARLY_EPOCHS, last):
        seconds[epoch], row_bytes[epoch] = _capture_epoch(store, retrained, epoch)

    def evaluate_method(
        name: str, method: str, epochs: tuple[int, ...], *, peer: bool = False, **options
    ) -> Entry:
        began = time.process_time()
        parts = [
            gk.attribute(store, method=method, checkpoints=f"epoch-{epoch}", **options)
            for epoch in epochs
        ]
        scores = parts[0] if len(parts) == 1 else gk.combine(parts)
        took = time.process_time() - began + sum(seconds[epoch] for epoch in epochs)
        return Entry(name, scores, took, sum(row_bytes[epoch] for epoch in epochs), peer)

    entries = [
        evaluate_method("ekfac, final", "ekfac", (last,), peer=True, damping=0.1),
        evaluate_method("ekfac, epoch 2", "ekfac", (2,), damping=0.1),
        evaluate_method("ekfac, early epochs", "ekfac", EARLY_EPOCHS, damping=0.1),
        evaluate_method("kernel, final", "kernel", (last,)),
        evaluate_method("kernel, epoch 2", "kernel", (2,)),
        evaluate_method("trak, final", "trak", (last,), peer=True),
        evaluate_method("dot, final", "dot", (last,), peer=True),
        evaluate_method("cos, final", "cos", (last,), peer=True),
        _build_entry("random", gk.attribute(store, method="random").values, peer=True),
        _build_entry("Rep-Sim", _compare_representations(retrained, last), peer=True),
        _build_entry("BM25 of bigrams", _lm_lds.bm25(setting.queries, setting.train), peer=True),
        _build_entry("bigrams, TF-IDF", _lm_lds.tf_idf(setting.queries, setting.train), peer=True),
    ]
    by_name = {one.name: one for one in entries}
    entries.append(
        combine_entries(MIXED, [by_name["ekfac, early epochs"], by_name["bigrams, TF-IDF"]])
    )
    entries += [
        derive_entry(f"hybrid of {one.name}", [one], lambda one=one: hybrid(one.scores, truth))
        for one in (by_name["ekfac, early epochs"], entries[-1])
    ]
    judged = board.judge_entries(store, truth, entries)
    ceiling = truth.ceiling()
    count, length = setting.train.shape
    lines = [
        (
            f"{count} rows of {length} tokens, {len(setting.queries)} queries, {len(truth.reporting.masks)} "
            f"subsets for reporting, ceiling {ceiling:.3f}."
        ),
        "",
        *board.format_table(judged, entries),
        "",
        board.compare_with_peers(judged, entries),
    ]
    bar_lines, missed = (
        _check_bars(judged, board.select_own_method(judged, entries)) if bars else ([], False)
    )
    title = (
        f"{setting.name}, {len(truth.masks)} halves x {setting.seeds} seeds; one run on all rows"
    )
    return Section(name, title, (*lines, *bar_lines), missed)


def _check_bars(judged: Judgement, name: str) -> tuple[list[str], bool]:
    """Compare the selected method with EK-FAC, BM25 and representations."""
    figures = {one.name: one.evaluation for one in judged.methods}
    ours, ekfac = figures[name], figures["ekfac, final"]
    assert ours is not None
    assert ekfac is not None
    ratio = ours.value / ekfac.value
    missed = ratio < 1.3
    lines = [
        "",
        (
            f"Target: *{name}* at least 1.3 x *ekfac, final*; "
            f"{'**missed**' if missed else 'reached'} with {ratio:.2f} x."
        ),
    ]
    for peer in ("BM25 of bigrams", "Rep-Sim"):
        other = figures[peer]
        assert other is not None
        difference = compare(ours, other)
        below = difference.value <= 0
        missed |= below
        lines += [
            "",
            (
                f"Target: above {peer}; {'**missed**' if below else 'reached'} with {difference.value:+.3f} "
                f"[{difference.interval[0]:+.3f}, {difference.interval[1]:+.3f}]."
            ),
        ]
    return lines, missed


def _capture_epoch(store: gk.Store, truth: _lm_truth.Truth, epoch: int) -> tuple[float, float]:
    """Return CPU seconds of capturing both splits, and bytes per training row."""
    began, row_bytes = time.process_time(), 0.0
    for split, tokens in (("train", truth.setting.train), ("test", truth.setting.queries)):
        report = gk.capture(
            store,
            truth.model(epoch),
            list(tokens.split(_lm_lds.BATCH)),
            task=gk.LanguageModeling(),
            checkpoints=f"epoch-{epoch}",
            split=split,
            progress=False,
        )
        row_bytes = report.bytes / report.rows if split == "train" else row_bytes
    return time.process_time() - began, row_bytes


def _compare_representations(truth: _lm_truth.Truth, epoch: int) -> np.ndarray:
    """Return cosines `[Q, N]` of the mean over tokens of the head's inputs."""
    model, seen = truth.model(epoch), []
    head = model.head if hasattr(model, "head") else model.lm_head
    handle = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].mean(1)))
    with torch.no_grad():
        for tokens in (truth.setting.queries, truth.setting.train):
            model(tokens)
    handle.remove()
    queries, rows = (torch.nn.functional.normalize(one, dim=1) for one in seen)
    return (queries @ rows.T).numpy()


def _build_entry(name: str, values: np.ndarray, *, peer: bool) -> Entry:
    ids = (np.arange(side) for side in values.shape)
    scores = Scores(values.astype(np.float32), *ids, method=name)
    return Entry(name, scores, 0.0, None, peer)
