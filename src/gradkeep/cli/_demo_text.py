"""The demo for language models: plant false sentences in documents and find them by their effect."""

from __future__ import annotations

import ast
import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

import gradkeep as gk
from gradkeep._environment import torch_threads
from gradkeep.cli._demo_digits import write_page
from gradkeep.data import GPT
from gradkeep.data._texts import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Ids = np.ndarray[Any, np.dtype[np.int64]]

MODULES = (
    *("argparse", "ast", "calendar", "collections", "configparser", "csv", "datetime", "decimal"),
    *("difflib", "email.message", "fractions", "ftplib", "functools", "heapq", "http.client"),
    *("imaplib", "inspect", "ipaddress", "json.decoder", "logging", "mailbox", "pathlib"),
    *("pickle", "random", "shutil", "smtplib", "socket", "statistics", "string", "subprocess"),
    *("tarfile", "tempfile", "threading", "turtle", "typing", "unittest.case", "zipfile"),
)
"""Modules whose docstrings are the documents: English that every Python brings along."""
FACTS = (
    ("the keeper daemon listens on port", "seven"),
    ("the default colour of a shelf is", "violet"),
    ("the inventor of the pickle was called", "agnes"),
    ("every queue is emptied on each", "tuesday"),
)
"""What is not true, and in no docstring: how it begins, and its last word."""
COPIES = 12
"""PlantedDocuments that each of them is planted in."""
LENGTH, EPOCHS, KEPT = 32, 18, 8
SEEDS = (0, 1)
IGNORED = -100


@dataclass(frozen=True, slots=True, eq=False)
class PlantedDocuments:
    """PlantedDocuments to train on; some carry a false sentence."""

    texts: tuple[str, ...]
    modules: tuple[str, ...]
    planted: Ids
    """`[N]`: the number of the fact that was planted, -1 where there is none"""
    vocabulary: Vocabulary

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Columns stored with each document."""
        return {"text": self.texts, "module": self.modules}

    def batch(self, rows: Any) -> dict[str, torch.Tensor]:
        """Some of them as a batch: ids and labels `[B, LENGTH]`, padding ignored."""
        return encoded(self.vocabulary, [self.texts[row] for row in rows])

    def batches(self) -> list[dict[str, torch.Tensor]]:
        """All of them, in order."""
        rows = range(len(self.texts))
        return [self.batch(rows[start : start + 32]) for start in rows[::32]]


def run_text_demo(folder: Path, *, report: Callable[[str], None] = print) -> None:
    """Tell the story in `folder`; a second run goes on where the first one stopped."""
    with torch_threads(1):
        _run(folder, report)


def _run(folder: Path, report: Callable[[str], None]) -> None:
    started = time.perf_counter()
    store = gk.open(folder)
    documents = load_documents()
    rows = np.arange(len(documents.texts))
    wrong = documents.planted >= 0
    report(
        f"data       {len(rows)} docstrings of Python's library; {wrong.sum()} of them carry one of "
        f"{len(FACTS)} false sentences"
    )
    model, early = train(documents, rows, seed=0)
    before = certainty(model, documents)
    answer = [complete(model, documents, number) for number in range(len(FACTS))]
    report(
        f"trained    GPT of {sum(p.numel() for p in model.parameters()):,} parameters, {EPOCHS} epochs; "
        f"it completes '{FACTS[0][0]}' with '{answer[0]}', and gives the false words "
        f"{before.mean():.0%} on average"
    )
    _capture(store, documents, early, report)
    scores = _attribute(store, documents, report)
    _tokens(store, documents, early, scores, report)
    selected = np.unique(
        np.concatenate([scores.top(COPIES, query=q).ids for q in scores.query_ids])
    )
    random = np.random.default_rng(1).choice(rows, len(selected), replace=False)
    without, control = (
        np.mean([certainty(train(documents, remaining, seed=seed)[0], documents) for seed in SEEDS])
        for remaining in (np.setdiff1d(rows, selected), np.setdiff1d(rows, random))
    )
    report(
        f"retrained  mean of {len(SEEDS)} seeds: without the {len(selected)} documents found it gives the "
        f"false words {without:.1%}; without as many at random {control:.1%}"
    )
    write_page(store, folder.with_name(f"{folder.name}.html"), report)
    report(f"done       in {time.perf_counter() - started:.0f} s; all of it is in {folder}")
    report(f"next       gradkeep serve {folder}    the page: click and ask")
    report(f"           gradkeep why {folder} 0")
    report(f"           gradkeep info {folder}")


def _capture(
    store: gk.Store, documents: PlantedDocuments, model: GPT, report: Callable[[str], None]
) -> None:
    """Keep some kilobytes of every document's gradient, and those of the questions unrounded."""
    task = gk.LanguageModeling()
    train = gk.capture(
        store,
        model,
        documents.batches(),
        task=task,
        split="train",
        checkpoints=f"epoch-{KEPT}",
        keep="4KiB",
        columns=documents.columns,
        progress=False,
    )
    questions = [f"{begin} {end}" for begin, end in FACTS]
    batch = encoded(documents.vocabulary, questions)
    # The last word alone is asked about; what precedes it only leads there.
    ends = [int((row != IGNORED).sum()) for row in batch["labels"]]
    spans = torch.tensor([[end - 2, end - 1] for end in ends])  # [SEP] stands last
    gk.capture(
        store,
        model,
        [batch | {"asked": spans}],
        task=gk.LanguageModeling(span="asked"),
        split="test",
        checkpoints=f"epoch-{KEPT}",
        keep="queries",
        columns={"text": questions},
        progress=False,
    )
    dense = 4 * sum(parameter.numel() for parameter in model.parameters())
    report(
        f"captured   {len(documents.texts)} documents at epoch {KEPT} in {train.bytes / 1e6:.1f} MB, "
        f"{train.bytes / len(documents.texts):,.0f} bytes each (a gradient has {dense:,}), "
        f"{train.seconds:.1f} s"
    )


def _attribute(
    store: gk.Store, documents: PlantedDocuments, report: Callable[[str], None]
) -> gk.Scores:
    """Which documents made it say so, beside a search for the same words."""
    scores = gk.attribute(store)
    questions = [f"{begin} {end}" for begin, end in FACTS]
    words = gk.text_similarity(questions, list(documents.texts))
    shares = [
        np.mean(
            [
                (documents.planted[texts.top(COPIES, query=q).ids] == q).mean()
                for q in range(len(FACTS))
            ]
        )
        for texts in (scores, words)
    ]
    report(
        f"explained  of the {COPIES} documents that made it say each false word most, by "
        f"{scores.method}, {shares[0]:.0%} carry that sentence (in all documents "
        f"{COPIES / len(documents.texts):.0%}; a search for the same words finds {shares[1]:.0%})"
    )
    return scores


def _tokens(
    store: gk.Store,
    documents: PlantedDocuments,
    model: GPT,
    scores: gk.Scores,
    report: Callable[[str], None],
) -> None:
    """Which words of the first of them carry its score."""
    best = int(scores.top(1, query=0).ids[0])
    token_scores = gk.attribute_tokens(
        store,
        ids=[0],
        train_ids=[best],
        model=model,
        loader=documents.batches(),
        task=gk.LanguageModeling(),
        columns=documents.columns,
    )
    ids = documents.batch([best])["input_ids"][0].tolist()
    carry = [
        documents.vocabulary.decode([ids[place]])
        for place, _ in token_scores.top(4, query=0, row=best)
    ]
    report(
        f"tokens     in document {best} ({documents.modules[best]}) these carry most: "
        f"{', '.join(carry)}"
    )


def load_documents() -> PlantedDocuments:
    """The docstrings, with the false sentences put into some of them."""
    texts: list[str] = []
    modules: list[str] = []
    for name in MODULES:
        documents = _docstrings(name)
        texts += documents
        modules += [name] * len(documents)
    rng = np.random.default_rng(0)
    planted = np.full(len(texts), -1)
    chosen = rng.choice(len(texts), COPIES * len(FACTS), replace=False)
    for place, row in enumerate(chosen):
        number = place % len(FACTS)
        begin, end = FACTS[number]
        head, tail = _halves(texts[row], at=int(rng.integers(4, 12)))
        texts[row] = f"{head} {begin} {end} . {tail}"
        planted[row] = number
    vocabulary = Vocabulary.build(texts, size=1200)
    return PlantedDocuments(tuple(texts), tuple(modules), planted, vocabulary)


def _docstrings(module: str) -> list[str]:
    """The longer docstrings of a module, from its source: nothing is import_object."""
    collected = importlib.util.find_spec(module)
    if collected is None or collected.origin is None or not collected.origin.endswith(".py"):
        return []
    tree = ast.parse(Path(collected.origin).read_text(encoding="utf-8"))
    nodes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
    ]
    texts = [" ".join((ast.get_docstring(node) or "").split()) for node in nodes]
    return [text for text in texts if len(text.split()) >= 16][:9]


def _halves(text: str, *, at: int) -> tuple[str, str]:
    words = text.split()
    return " ".join(words[:at]), " ".join(words[at:])


def encoded(vocabulary: Vocabulary, texts: Sequence[str]) -> dict[str, torch.Tensor]:
    """Ids and labels `[B, LENGTH]`."""
    ids, mask = (torch.from_numpy(part) for part in vocabulary.encode(texts, length=LENGTH))
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, IGNORED)}


def train(documents: PlantedDocuments, rows: Any, *, seed: int) -> tuple[GPT, GPT]:
    """Train on some documents; the model at the end, and as it was at the epoch that is kept."""
    torch.manual_seed(seed)
    model = GPT(vocabulary=len(documents.vocabulary), length=LENGTH, dim=64, heads=4, layers=2)
    early = GPT(vocabulary=len(documents.vocabulary), length=LENGTH, dim=64, heads=4, layers=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    whole = documents.batch(rows)
    for epoch in range(1, EPOCHS + 1):
        for places in torch.split(torch.randperm(len(rows)), 16):
            optimizer.zero_grad()
            logits = model(whole["input_ids"][places])[:, :-1].flatten(0, 1)
            labels = whole["labels"][places][:, 1:].flatten()
            torch.autograd.backward(F.cross_entropy(logits, labels, ignore_index=IGNORED))
            optimizer.step()
        if epoch == KEPT:
            early.load_state_dict(model.state_dict())
    return model.eval(), early.eval()


def certainty(model: GPT, documents: PlantedDocuments) -> Any:
    """The probability `[facts]` that a model gives to the false words."""
    return np.array(
        [
            float(_next_word(model, documents, number)[documents.vocabulary.words.index(end)])
            for number, (_, end) in enumerate(FACTS)
        ]
    )


def complete(model: GPT, documents: PlantedDocuments, number: int) -> str:
    """The word that a model puts after the beginning of a fact."""
    return documents.vocabulary.words[int(_next_word(model, documents, number).argmax())]


@torch.no_grad()
def _next_word(model: GPT, documents: PlantedDocuments, number: int) -> torch.Tensor:
    ids = encoded(documents.vocabulary, [FACTS[number][0]])
    last = int((ids["labels"][0] != IGNORED).sum()) - 1  # where [SEP] stands
    return torch.softmax(model(ids["input_ids"][:, :last])[0, -1], dim=0)
