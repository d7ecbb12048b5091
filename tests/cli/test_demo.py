"""The demo tells the truth: its numbers follow from what is in the store it leaves."""

import re

import numpy as np

import gradkeep as gk
from gradkeep.cli import _demo_digits, _demo_text
from gradkeep.cli._demo_digits import recipe, run_digits_demo
from gradkeep.cli._demo_text import run_text_demo
from gradkeep.data import load_digits


def test_the_story_finds_what_was_planted_and_can_be_told_again(tmp_path, monkeypatch):
    monkeypatch.setattr(_demo_digits, "SHARES", (0.5,))  # planning each share takes a second
    monkeypatch.setattr(_demo_digits, "SEEDS", 1)
    lines = []
    run_digits_demo(tmp_path / "store", seeds=2, report=lines.append)
    story = "\n".join(lines)
    digits = load_digits(wrong_labels=0.08)
    wrong = int(digits.planted.sum())
    store = gk.open(tmp_path / "store")
    result = int(digits.planted[gk.suspects(store).ids[:wrong]].sum())
    assert f"hold {result} of the {wrong} planted labels" in story
    assert result >= 0.9 * wrong
    means = [float(text) for text in re.findall(r"([\d.]+)% \(\+-", story)]
    as_they_are, without, at_random, clean = means
    assert without > as_they_are
    assert without > at_random
    assert clean > as_they_are
    scores = gk.attribute(store)
    test = store.read(gk.store.CaptureKey("epoch-30", "test"))
    mistakes = np.flatnonzero(test.column("label") != test.column("predicted"))
    assert f"{len(mistakes)} mistakes" in story
    harmed = [digits.planted[scores.bottom(5, query=int(q)).ids].mean() for q in mistakes]
    assert f"{np.mean(harmed):.0%} carry a planted label" in story
    assert "equal to the bit" in story
    kernel, trak = (
        float(re.search(rf"{name} ([\d.]+) \[", story)[1]) for name in ("kernel", "trak")
    )
    assert min(kernel, trak) > 0.4
    stored = {
        one.subject.split(" at ")[0]: one.value for one in gk.evaluate.evaluations(store).values()
    }
    assert f"{stored['kernel']:.2f}" == f"{kernel:.2f}"
    assert "0 lost" in story
    assert "NOT" not in story
    repeated = []
    run_digits_demo(tmp_path / "store", seeds=1, report=repeated.append)
    assert repeated[1] == lines[1]
    assert [line.split()[0] for line in repeated] == [line.split()[0] for line in lines]


def test_the_recipe_of_the_story_trains_its_network():
    model = recipe().training((recipe().train[0][:64], recipe().train[1][:64]), 0)
    assert model(recipe().queries[0]).shape == (360, 10)
    assert recipe().source == "gradkeep.cli._demo_digits:recipe"


def test_the_story_in_words_finds_the_false_sentences(tmp_path, monkeypatch):
    monkeypatch.setattr(_demo_text, "SEEDS", (0,))
    monkeypatch.setattr(_demo_text, "EPOCHS", 10)
    lines = []
    run_text_demo(tmp_path / "store", report=lines.append)
    story = "\n".join(lines)
    documents = _demo_text.load_documents()
    assert (documents.planted >= 0).sum() == len(_demo_text.FACTS) * _demo_text.COPIES
    scores = gk.attribute(gk.open(tmp_path / "store"))
    shares = [
        (documents.planted[scores.top(_demo_text.COPIES, query=q).ids] == q).mean()
        for q in range(4)
    ]
    assert np.mean(shares) > 0.7
    assert f"{np.mean(shares):.0%} carry that sentence" in story
    result, random = re.findall(r"([\d.]+)%", next(line for line in lines if "retrained" in line))
    assert float(result) < float(random)
