"""The demo tells the truth: its numbers follow from what is in the store it leaves."""

import re

import numpy as np

import gradkeep as gk
from gradkeep.cli._story import tell
from gradkeep.data import load_digits


def test_the_story_finds_what_was_planted_and_can_be_told_again(tmp_path):
    lines = []
    tell(tmp_path / "store", seeds=2, say=lines.append)
    story = "\n".join(lines)
    digits = load_digits(wrong_labels=0.08)
    wrong = int(digits.planted.sum())
    store = gk.open(tmp_path / "store")
    found = int(digits.planted[gk.suspects(store).ids[:wrong]].sum())
    assert f"hold {found} of the {wrong} planted labels" in story
    assert found >= 0.9 * wrong
    means = [float(text) for text in re.findall(r"([\d.]+)% \(\+-", story)]
    as_they_are, without, at_random, clean = means
    assert without > as_they_are
    assert without > at_random
    assert clean > as_they_are
    scores = gk.attribute(store)
    test = store.read(gk.CaptureKey("epoch-30", "test"))
    mistakes = np.flatnonzero(test.column("label") != test.column("predicted"))
    assert f"{len(mistakes)} mistakes" in story
    harmed = [digits.planted[scores.bottom(5, query=int(q)).ids].mean() for q in mistakes]
    assert f"{np.mean(harmed):.0%} carry a planted label" in story
    assert "0 lost" in story
    assert "NOT" not in story
    again = []
    tell(tmp_path / "store", seeds=1, say=again.append)
    assert again[1] == lines[1]
    assert [line.split()[0] for line in again] == [line.split()[0] for line in lines]
