"""Scores show themselves in notebooks and at terminals."""

import html.parser
import re

import numpy as np
import pytest
import torch

import gradkeep as gk
from gradkeep.errors import GradkeepError


class Tags(html.parser.HTMLParser):
    """All tags, their attributes and the words between them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def scores_of(values, **more):
    values = np.asarray(values, np.float32)
    return gk.Scores(values, np.arange(10, 10 + len(values)), np.arange(values.shape[1]), **more)


def test_the_rows_are_those_of_top_and_bottom():
    scores = scores_of(
        np.random.default_rng(0).normal(size=(4, 30)), train_labels=np.arange(30) % 3
    )
    shown = gk.show(scores, query=[11, 13], k=4)
    assert [query.id for query in shown.queries] == [11, 13]
    for query in shown.queries:
        assert [row.id for row in query.helped] == scores.top(4, query=query.id).ids.tolist()
        assert [row.id for row in query.harmed] == scores.bottom(4, query=query.id).ids.tolist()
        assert all(row.label == str(row.id % 3) for row in query.helped)


def test_rows_of_the_other_sign_are_not_shown_as_harm():
    (query,) = gk.show(scores_of([[3, 2, 0, 1]])).queries
    assert [row.id for row in query.helped] == [0, 1, 3]
    assert query.harmed == ()
    assert "none" in gk.show(scores_of([[3, 2, 0, 1]])).html


def test_the_page_is_whole_and_escapes_everything():
    evil = "<script>alert(1)</script> & more"
    preview = gk.Preview(text=lambda row: evil, image=lambda row: np.eye(3))
    page = gk.show(scores_of([[1, -1]], method=evil), preview=preview).html
    parsed = Tags(page)
    assert parsed.open == []
    assert {tag for tag, _ in parsed.tags} == {"p", "strong", "div", "em", "br", "img"}
    assert all(one["src"].startswith("data:image/png") for tag, one in parsed.tags if tag == "img")
    assert any(evil in words for words in parsed.words)
    assert "<script" not in page


def test_a_preview_that_raises_is_told_in_place():
    def fails(row):
        raise KeyError("no such picture")

    shown = gk.show(scores_of([[1, -1]]), preview=gk.Preview(image=fails))
    assert "no such picture" in shown.html
    assert "no such picture" in str(shown)


def test_what_was_captured_with_the_rows_is_shown(tmp_path):
    x, y = torch.randn(12, 4), torch.arange(12) % 2
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    for split in ("train", "test"):
        gk.capture(
            tmp_path / "store",
            model,
            [(x, y)],
            task=gk.Classification(),
            split=split,
            columns={"text": [f"{split} text {row}" for row in range(12)]},
            preview=gk.Preview(image=np.random.default_rng(0).random((12, 2, 2))),
        )
    scores = gk.attribute(tmp_path / "store", method="dot")
    shown = gk.show(scores, query=3, k=2)
    best = int(scores.top(1, query=3).ids[0])
    assert f"train text {best}" in str(shown)
    assert "test text 3" in shown.html
    assert len(re.findall("<img ", shown.html)) == 1 + len(shown.queries[0].helped) + len(
        shown.queries[0].harmed
    )
    assert scores._repr_html_() == gk.show(scores).html


def test_a_notebook_takes_the_html():
    formatting = pytest.importorskip("IPython.core.formatters")
    data, _ = formatting.DisplayFormatter().format(scores_of([[1, -1]]))
    assert "helped most" in data["text/html"]


def test_bad_questions_are_refused():
    scores = scores_of([[1, -1]])
    for wrong in ({"query": 99}, {"query": 1.5}, {"k": 0}, {"k": "x"}, {"preview": 3}):
        with pytest.raises(GradkeepError):
            gk.show(scores, **wrong)
    with pytest.raises(GradkeepError):
        gk.show("scores")
