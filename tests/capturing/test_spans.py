"""Queries about some tokens: spans add up to the whole, in scores too, and completions are such."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from raises import raises

import gradkeep as gk
from gradkeep.data import GPT
from gradkeep.errors import CaptureError

VOCABULARY, LENGTH = 11, 8


def make_model():
    torch.manual_seed(0)
    return GPT(vocabulary=VOCABULARY, length=LENGTH, dim=8, heads=2, layers=1).eval()


def tokens(rows, seed=0):
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def asked(store, model, batch, span, **options):
    task = gk.LanguageModeling(span=span)
    split = "whole" if span is None else f"span{span[0]}.{span[1]}"
    return gk.capture(
        store, model, [batch], task=task, split=split, progress=False, **options
    ).key.split


SPANS = ((None, 3), (3, -2), (-2, None))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_losses_of_spans_add_up_to_that_of_the_sequence(reduction):
    model, batch = make_model(), {"input_ids": tokens(4)}
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][1, 4] = -100
    whole = gk.LanguageModeling(reduction=reduction).losses(model, batch)
    task = [gk.LanguageModeling(reduction=reduction, span=span) for span in SPANS]
    parts = [one.measure(model, batch) for one in task]
    torch.testing.assert_close(sum(part.losses for part in parts), whole)
    text = torch.stack([(~part.tokens.isnan()).sum(1) for part in parts]).sum(0)
    assert text.tolist() == [7, 6, 7, 7]


def test_a_span_is_of_the_labels_as_they_are_given():
    model, ids = make_model(), tokens(2)
    each = gk.LanguageModeling().measure(model, {"input_ids": ids}).tokens
    one = gk.LanguageModeling(span=(4, 5)).losses(model, {"input_ids": ids})
    torch.testing.assert_close(one, each[:, 3])  # that of token 4, from the place before it
    shifted = gk.LanguageModeling(span=(3, 4)).losses(model, (ids[:, :-1], ids[:, 1:]))
    torch.testing.assert_close(shifted, each[:, 3])


def test_every_row_may_have_its_own_span():
    model, ids = make_model(), tokens(3)
    ends = torch.tensor([[1, 3], [-2, LENGTH], [0, 100]])
    result = gk.LanguageModeling(span="asked").losses(model, {"input_ids": ids, "asked": ends})
    for row, (start, stop) in enumerate([(1, 3), (-2, None), (None, None)]):
        one = gk.LanguageModeling(span=(start, stop)).losses(
            model, {"input_ids": ids[row : row + 1]}
        )
        torch.testing.assert_close(result[row : row + 1], one)


@pytest.mark.parametrize("keep", ["factors", gk.Keep(700, bits=32, rows=16)])
def test_scores_of_spans_add_up_to_those_of_the_query(store, keep):
    model = make_model()
    train, test = [{"input_ids": tokens(16)}], {"input_ids": tokens(3, seed=1)}
    gk.capture(
        store, model, train, task=gk.LanguageModeling(), split="train", keep=keep, progress=False
    )
    small = isinstance(keep, gk.Keep)
    way = "queries" if small else "factors"
    whole = asked(store, model, test, None, keep=way)
    method = "ekfac" if small else "dot"
    expected = gk.attribute(store, queries=whole, method=method).numpy()
    parts = [
        gk.attribute(store, queries=asked(store, model, test, span, keep=way), method=method)
        for span in SPANS
    ]
    result = sum(part.numpy() for part in parts)
    assert np.abs(result - expected).max() <= 1e-5 * np.abs(expected).max()
    assert np.abs(parts[0].numpy()).max() > 1e-3 * np.abs(expected).max()


def test_only_the_span_may_differ_from_the_task_of_the_basis(store):
    model, batch = make_model(), [{"input_ids": tokens(16)}]
    keep = gk.Keep(600, rows=16)
    task = gk.LanguageModeling()
    gk.capture(store, model, batch, task=task, split="train", keep=keep, progress=False)
    other = gk.LanguageModeling(span=(0, 4), reduction="mean")
    with raises(CaptureError, "capture.basis_task"):
        gk.capture(store, model, batch, task=other, split="a", keep="queries", progress=False)


def test_a_task_without_a_span_is_described_as_before():
    text = "gradkeep.LanguageModelling(ignore_index=-100, reduction='sum', shift=True)"
    assert gk.LanguageModeling().describe() == text
    spanned = gk.LanguageModeling(span=(1, None))
    assert spanned.describe() != text
    assert spanned.trained_as() == text
    assert gk.Classification().trained_as() == gk.Classification().describe()


@pytest.mark.parametrize("span", [3, (1,), (1, 2, 3), ("a", 2), (1.5, 2), (True, 4)])
def test_what_is_no_span_is_refused(span):
    with raises(CaptureError, "capture.bad_span"):
        gk.LanguageModeling(span=span)


def test_a_span_without_tokens_is_refused():
    model, batch = make_model(), {"input_ids": tokens(2)}
    for span in ((0, 1), (5, 3), (100, None)):  # nothing predicts the first token
        with raises(CaptureError, "capture.empty_span"):
            gk.LanguageModeling(span=span).losses(model, batch)
    with raises(CaptureError, "capture.no_spans"):
        gk.LanguageModeling(span="asked").losses(model, batch)
    with raises(CaptureError, "capture.no_spans"):
        gk.LanguageModeling(span="asked").losses(model, {**batch, "asked": torch.ones(2, 3)})


def greedy(model, prompt, new):
    ids = prompt
    for _ in range(new):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(2)], 1)
    return ids


def test_a_models_own_completion_is_attributed(store):
    model = make_model()
    prompts = tokens(2)[:, :3]
    ids = greedy(model, prompts, 4)
    batch = gk.completions(prompts, SimpleNamespace(sequences=ids))
    with torch.no_grad():
        logs = model(ids).log_softmax(2)
    expected = [-sum(float(logs[row, t - 1, ids[row, t]]) for t in range(3, 7)) for row in range(2)]
    result = gk.LanguageModeling().losses(model, batch)
    torch.testing.assert_close(result, torch.tensor(expected))
    task = gk.LanguageModeling()
    train = [{"input_ids": tokens(6, seed=2)}]
    gk.capture(store, model, train, task=task, split="train", progress=False)
    gk.capture(store, model, [batch], task=task, split="written", progress=False)
    scores = gk.attribute(store, queries="written", method="dot")
    assert scores.shape == (2, 6)


def test_rows_of_differing_lengths_are_filled_up_at_the_end():
    prompts = torch.tensor([[0, 5, 6], [1, 2, 3]])  # filled up before its begin
    written = torch.tensor([[0, 5, 6, 7, 0, 0], [1, 2, 3, 4, 5, 9]])
    result = gk.completions(prompts, written, pad=0)
    assert result["input_ids"].tolist() == [[5, 6, 7, 0, 0, 0], [1, 2, 3, 4, 5, 9]]
    assert result["labels"].tolist() == [
        [-100, -100, 7, -100, -100, -100],
        [-100, -100, -100, 4, 5, 9],
    ]
    alone = gk.completions([[5, 6], [1, 2, 3]], [[7], [4, 5, 9]], with_prompt=False)
    assert torch.equal(alone["labels"], result["labels"])
    ended = gk.completions([[5]], [[5, 7, 9, 9, 9]], pad=9, eos=9)
    assert ended["input_ids"].tolist() == [[5, 7, 9]]


def test_completions_that_do_not_fit_are_refused():
    with raises(CaptureError, "capture.completion_prompt"):
        gk.completions([[5, 6]], [[7, 8]])
    with raises(CaptureError, "capture.completion_count"):
        gk.completions([[5, 6]], [[5, 6, 8], [5, 6, 7]])
    with raises(CaptureError, "capture.empty_completion"):
        gk.completions([[5, 6]], [[5, 6]])
    with raises(CaptureError, "capture.empty_prompt"):
        gk.completions([[]], [[5, 6]])
    for odd in (3, "text", [[1.5]], [["a"]], torch.tensor(3), [], [[-1]]):
        with raises(CaptureError, "capture.not_token_ids"):
            gk.completions(odd, [[5, 6]])


def test_what_hugging_face_generates_is_taken():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=16, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    prompt = torch.tensor([[1, 2, 3]])
    written = model.generate(
        prompt,
        max_new_tokens=4,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        attention_mask=torch.ones_like(prompt),
    )
    batch = gk.completions(prompt, written, pad=0)
    assert torch.equal(batch["input_ids"][:, :3], prompt)
    assert gk.LanguageModeling().losses(model, batch).isfinite().all()
