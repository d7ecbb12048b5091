"""Sequences that cannot be captured: refused by row, before anything is kept, and nothing is lost."""

import types

import pytest
import torch
from raises import raises
from torch import nn
from torch.utils.data import DataLoader

import gradkeep as gk
from gradkeep.errors import CaptureError, GradkeepError

OPTIONS = {"task": gk.LanguageModeling(), "split": "train", "progress": False}
KEY = gk.store.CaptureKey("final", "train")


class Speaker(nn.Module):
    """A small language model; `tells` what it can read, as those of transformers do."""

    def __init__(self, *, tells=True):
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.wpe, self.head = nn.Embedding(9, 4), nn.Embedding(6, 4), nn.Linear(4, 9)
        if tells:
            self.config = types.SimpleNamespace(max_position_embeddings=6)
            self.get_input_embeddings = lambda: self.wte

    def forward(self, input_ids, attention_mask=None):
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.head(self.wte(input_ids) + self.wpe(places.expand_as(input_ids)))


def rows(count=8, length=5):
    order = torch.Generator().manual_seed(0)
    tokens = torch.randint(9, (count, length), generator=order)
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def change(data, row, **values):
    return [one | values if at == row else one for at, one in enumerate(data)]


def with_token(data, row, token):
    tokens = data[row]["input_ids"].clone()
    tokens[2] = token
    return change(data, row, input_ids=tokens)


IGNORED = torch.full((5,), -100)
ONLY_FIRST = torch.tensor([3, -100, -100, -100, -100])
CASES = {
    "unknown token": (
        lambda d, r: with_token(d, r, 9),
        "capture.unknown_token",
        "tokenizer",
    ),
    "negative token": (
        lambda d, r: with_token(d, r, -1),
        "capture.unknown_token",
        "tokenizer",
    ),
    "all ignored": (lambda d, r: change(d, r, labels=IGNORED), "capture.no_labels_left", "Leave"),
    "only the first": (
        lambda d, r: change(d, r, labels=ONLY_FIRST),
        "capture.no_labels_left",
        "Leave",
    ),
    "unknown label": (
        lambda d, r: change(d, r, labels=torch.tensor([1, 2, 40, 3, 4])),
        "capture.unknown_label",
        "tokenizer",
    ),
}


@pytest.mark.parametrize("row", [0, 1, 6])
@pytest.mark.parametrize("case", CASES)
def test_the_row_is_named_and_earlier_captures_stay(store, case, row):
    spoil, code, fix = CASES[case]
    gk.capture(store, Speaker(), DataLoader(rows(), 4), name="good", **OPTIONS)
    before = store.read(gk.store.CaptureKey("final", "train", "main", "good")).column("loss")
    loader = DataLoader(spoil(rows(), row), 4)
    with raises(CaptureError, code) as caught:
        gk.capture(store, Speaker(), loader, **OPTIONS)
    assert f"sample {row} " in caught.value.message
    assert fix in caught.value.fix
    after = store.read(gk.store.CaptureKey("final", "train", "main", "good")).column("loss")
    assert before.tolist() == after.tolist()
    with pytest.raises(GradkeepError):
        store.read(KEY)  # what was begun is not finished
    gk.capture(store, Speaker(), DataLoader(rows(), 4), **OPTIONS)  # the repaired data
    assert store.read(KEY).column("loss").tolist() == before.tolist()


def test_the_row_is_named_by_the_id_that_it_was_given(store):
    data = with_token(rows(), 6, 99)
    with raises(CaptureError, "capture.unknown_token", mentions="sample 60 "):
        gk.capture(store, Speaker(), DataLoader(data, 4), ids=list(range(0, 80, 10)), **OPTIONS)


def test_documents_of_packs_are_named_too(store):
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    labels = torch.tensor([[1, 2, 3, -100, -100, -100, 7, 8]])
    batch = {"input_ids": tokens, "labels": labels, "cu_seqlens": torch.tensor([0, 3, 6, 8])}
    with raises(CaptureError, "capture.no_labels_left", mentions="sample 1 "):
        gk.capture(store, Speaker(), [batch], **OPTIONS)


def test_sequences_beyond_the_model_s_positions_are_refused(store):
    batch = {"input_ids": torch.ones(3, 8, dtype=torch.int64)}
    batch["attention_mask"] = torch.tensor([[1] * 4 + [0] * 4, [1] * 7 + [0], [1] * 5 + [0] * 3])
    with raises(CaptureError, "capture.too_long", mentions="sample 1 ") as caught:
        gk.capture(store, Speaker(), [batch], **OPTIONS)
    assert "7 tokens, padded to 8" in caught.value.found
    assert store.captures() == []


def test_models_that_do_not_tell_their_limits_get_no_bare_error(store):
    tokens = torch.randint(9, (4, 5))
    tokens[2, 3] = 11
    with raises(CaptureError, "capture.index_out_of_table", mentions="row 2"):
        gk.capture(store, Speaker(tells=False), [{"input_ids": tokens}], **OPTIONS)
    with raises(CaptureError, "capture.index_out_of_table", mentions="row 0"):
        gk.capture(store, Speaker(tells=False), [{"input_ids": torch.ones(2, 9).long()}], **OPTIONS)
    labels = torch.tensor([[1, 2, 3], [1, 2, 30]])
    with raises(CaptureError, "capture.label_not_a_token", mentions="row 1 "):
        gk.capture(store, Speaker(tells=False), [(labels % 9, labels)], **OPTIONS)
    assert store.captures() == []


class Breaking(Speaker):
    """It says nothing sensible of one token."""

    def forward(self, input_ids, attention_mask=None):
        broken = (input_ids == 8).any(1)[:, None, None]
        return super().forward(input_ids).masked_fill(broken, torch.nan)


@pytest.mark.parametrize("keep", [None, "losses"])
@pytest.mark.parametrize("row", [0, 5])
def test_losses_that_are_no_numbers_are_refused_by_row(store, row, keep):
    data = [{"input_ids": one["input_ids"] % 8} for one in rows()]
    data[row]["input_ids"][1] = 8
    with raises(CaptureError, "capture.not_finite", mentions=f"sample {row} ") as caught:
        gk.capture(store, Breaking(), DataLoader(data, 4), keep=keep, **OPTIONS)
    assert "Check that sample" in caught.value.fix
    data[row]["input_ids"][1] = 0
    done = gk.capture(store, Breaking(), DataLoader(data, 4), keep=keep, name="again", **OPTIONS)
    assert done.rows == 8
