"""Packed batches: a row for each document, with the gradients that it has alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raises import raises
from torch import nn
from torch.utils.data import DataLoader

import gradkeep as gk
from gradkeep.capturing._sequences import Unpacking, documents_of
from gradkeep.errors import CaptureError

LENGTHS = (5, 3, 4, 6, 2, 4)
OPTIONS = {"task": gk.LanguageModeling(), "split": "train", "progress": False}


def documents(seed=0, lengths=LENGTHS):
    order = torch.Generator().manual_seed(seed)
    return [torch.randint(9, (length,), generator=order) for length in lengths]


class Reader(nn.Module):
    """A language model with attention and positions, whose documents never see each other."""

    def __init__(self, *, causal=True):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(9, 8), nn.Embedding(16, 8)
        self.mix, self.head = nn.Linear(8, 24), nn.Linear(8, 9)
        self.causal = causal

    def attend(self, input_ids, seen):
        if self.causal:
            seen = seen.tril()
        x = self.embed(input_ids) + self.places(self.positions)
        q, k, v = self.mix(x).chunk(3, -1)
        weights = (q @ k.transpose(1, 2) / 3).masked_fill(~seen, -torch.inf).softmax(-1)
        return self.head(x + weights.nan_to_num() @ v)

    def forward(self, input_ids, position_ids=None, attention_mask=None):
        rows, length = input_ids.shape
        self.positions = (
            torch.arange(length).expand(rows, -1) if position_ids is None else position_ids
        )
        seen = torch.ones(rows, length, length, dtype=torch.bool)
        if attention_mask is not None:
            seen &= attention_mask.bool()[:, None]
        return self.attend(input_ids, seen)


class Plain(Reader):
    """The same without a mask."""

    def forward(self, input_ids, position_ids):
        return super().forward(input_ids, position_ids)


class Careless(Reader):
    """The same with a mask that it does not look at: padding changes what it says."""

    def forward(self, input_ids, position_ids=None, **others):
        return super().forward(input_ids, position_ids)


def gradients_alone(model, values):
    """The gradients `[N, P]` of documents that are read one at a time."""
    rows = []
    for tokens in values:
        places = torch.arange(len(tokens))[None]
        logits = model(tokens[None], places)
        loss = nn.functional.cross_entropy(logits[0, :-1], tokens[1:], reduction="sum")
        rows.append(
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        )
    return torch.stack(rows)


def kept(store, model, **where):
    result = gk.gradients(store, split="train", **where)
    restored = result.restore(result.ids)
    names = [name for name, _ in model.named_parameters()]
    return torch.cat([restored[name].flatten(1) for name in names], 1), result.ids.tolist()


def pack(values, sign, *, labels=True):
    tokens = torch.cat(values)[None]
    ends = torch.tensor([0, *(len(one) for one in values)]).cumsum(0)
    places = torch.cat([torch.arange(len(one)) for one in values])[None]
    numbers = torch.cat([torch.full((len(one),), at) for at, one in enumerate(values)])[None]
    apart = torch.block_diag(*(torch.ones(len(one), len(one)).tril() for one in values))[None, None]
    signs = {
        "position_ids": {"position_ids": places},
        "cu_seq_lens": {
            "cu_seq_lens_q": ends.int(),
            "cu_seq_lens_k": ends.int(),
            "max_length_q": 6,
        },
        "seq_idx": {"seq_idx": numbers, "position_ids": places},
        "numbered mask": {"attention_mask": numbers + 1},
        "mask apart": {"attention_mask": apart.bool(), "position_ids": places},
        "mask apart, added": {"attention_mask": (1 - apart) * torch.finfo(torch.float32).min},
    }
    return {"input_ids": tokens, **({"labels": tokens.clone()} if labels else {}), **signs[sign]}


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize(
    "sign",
    ["position_ids", "cu_seq_lens", "seq_idx", "numbered mask", "mask apart", "mask apart, added"],
)
def test_each_document_has_the_gradient_that_it_has_alone(store, sign, labels):
    model, values = Reader(), documents()
    batches = [pack(values[:4], sign, labels=labels), pack(values[4:], sign, labels=labels)]
    assert gk.capture(store, model, batches, **OPTIONS).rows == 6
    result, ids = kept(store, model)
    assert ids == list(range(6))
    torch.testing.assert_close(result, gradients_alone(model, values), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [Plain, Careless])
def test_models_that_padding_would_change_read_documents_without_it(store, kind):
    model = kind(causal=False) if kind is Careless else kind()
    values = documents(lengths=(4, 4, 2, 6))
    kept_rows = gk.capture(store, model, [pack(values, "position_ids")], **OPTIONS)
    assert kept_rows.rows == 4
    torch.testing.assert_close(
        kept(store, model)[0], gradients_alone(model, values), rtol=1e-5, atol=1e-6
    )


def test_rows_of_several_packs_with_padding_are_taken_apart(store):
    model, values = Reader(), documents()
    packs = [
        pack(values[:2], "position_ids"),
        pack(values[2:4], "position_ids"),
        pack(values[4:], "position_ids"),
    ]
    width = max(one["input_ids"].shape[1] for one in packs)

    def wide(name, fill):
        rows = [
            nn.functional.pad(p[name], (0, width - p[name].shape[1]), value=fill) for p in packs
        ]
        return torch.cat(rows)

    batch = {"input_ids": wide("input_ids", 0), "labels": wide("labels", -100)}
    batch["position_ids"] = wide("position_ids", 0)
    batch["attention_mask"] = (wide("position_ids", -1) >= 0).long()
    gk.capture(store, model, [batch], **OPTIONS)
    torch.testing.assert_close(
        kept(store, model)[0], gradients_alone(model, values), rtol=1e-5, atol=1e-6
    )


def flattened(rows):
    """What padding-free collators do with the documents of a batch."""
    return pack([row["input_ids"] for row in rows], "position_ids")


def test_a_loader_s_documents_have_their_places_as_ids_and_a_finished_run_is_known_again(store):
    model = Reader()
    data = [{"input_ids": one} for one in documents()]
    loader = DataLoader(data, batch_size=4, collate_fn=flattened)
    assert gk.capture(store, model, loader, **OPTIONS).rows == 6
    second = gk.capture(store, model, loader, **OPTIONS)
    assert (second.rows, second.reused_rows) == (6, 6)
    data[4]["input_ids"] = (data[4]["input_ids"] + 1) % 9
    with raises(CaptureError, "capture.rows_changed", mentions="sample 4 "):
        gk.capture(store, model, loader, **OPTIONS)


def test_ids_are_given_for_each_document(store):
    model, values = Reader(), documents()
    batches = [pack(values[:4], "seq_idx"), pack(values[4:], "seq_idx")]
    ids = [50, 40, 30, 20, 10, 0]
    gk.capture(store, model, batches, ids=ids, **OPTIONS)
    assert gk.gradients(store, split="train").ids.tolist() == ids
    with raises(CaptureError, "capture.id_count"):
        gk.capture(store, model, batches, ids=[1, 2], name="few", **OPTIONS)
    inside = [
        batches[0] | {"doc": torch.tensor([9, 8, 7, 6])},
        batches[1] | {"doc": torch.tensor([5, 4])},
    ]
    gk.capture(store, model, inside, ids="doc", name="inside", **OPTIONS)
    assert gk.gradients(store, split="train", name="inside").ids.tolist() == [9, 8, 7, 6, 5, 4]


def test_a_stopped_capture_of_packs_goes_on_to_the_same_bytes(store, tmp_path):
    model, values = Reader(), documents(lengths=LENGTHS * 4)
    batches = [pack(values[at : at + 4], "cu_seq_lens") for at in range(0, 24, 4)]

    class Stopping(list):
        stop = True

        def __iter__(self):
            for at, batch in enumerate(super().__iter__()):
                if self.stop and at == 4:
                    raise KeyboardInterrupt
                yield batch

    loader = Stopping(batches)
    with pytest.raises(KeyboardInterrupt):
        gk.capture(store, model, loader, memory_budget="1MiB", ids=list(range(24)), **OPTIONS)
    loader.stop = False
    gk.capture(store, model, loader, memory_budget="1MiB", ids=list(range(24)), **OPTIONS)
    whole = gk.open(tmp_path / "whole")
    gk.capture(whole, model, batches, memory_budget="1MiB", ids=list(range(24)), **OPTIONS)
    ours, theirs = (s.read(gk.store.CaptureKey("final", "train")) for s in (store, whole))
    assert [s.xxh3 for s in ours.manifest.segments] == [s.xxh3 for s in theirs.manifest.segments]


def test_what_is_said_of_packs_and_of_documents_stays_with_them():
    values = documents(lengths=(3, 2, 4))
    batch = pack(values[:2], "position_ids")
    other = pack([values[2], values[2][:1].repeat(1)], "position_ids")
    both = {
        "input_ids": torch.cat([batch["input_ids"], other["input_ids"]]),
        "seq_idx": torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]),
        "position_ids": torch.cat([batch["position_ids"], other["position_ids"]]),
        "source": ["news", "books"],
        "weight": torch.tensor([1.0, 2.0]),
        "title": ["a", "b", "c", "d"],
        "temperature": 0.5,
    }
    (built,) = Unpacking(padded=True).parts(both)
    assert built["source"] == ["news", "news", "books", "books"]
    assert built["weight"].tolist() == [1.0, 1.0, 2.0, 2.0]
    assert built["title"] == ["a", "b", "c", "d"]
    assert built["temperature"] == 0.5
    assert built["attention_mask"].sum(1).tolist() == [3, 2, 4, 1]
    assert "seq_idx" not in built
    assert built["position_ids"].tolist() == [[0, 1, 2, 3]] * 4


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.integers(2, 6), min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(0, 2),
)
def test_positions_numbers_and_ends_tell_the_same_documents(rows, start):
    length = max(sum(row) for row in rows)
    places = torch.zeros(len(rows), length, dtype=torch.int64)
    numbers, mask = torch.full_like(places, -1), torch.zeros_like(places)
    expected = []
    for at, row in enumerate(rows):
        done = 0
        for number, size in enumerate(row):
            places[at, done : done + size] = torch.arange(size) + start
            numbers[at, done : done + size] = number
            mask[at, done : done + size] = 1
            expected.append((at, done, done + size))
            done += size
    tokens = torch.zeros_like(places)
    several = any(len(row) > 1 for row in rows)
    result = documents_of({"input_ids": tokens, "position_ids": places, "attention_mask": mask})
    assert [(d.row, d.start, d.stop) for d in result or ()] == (expected if several else [])
    result = documents_of({"input_ids": tokens, "seq_idx": numbers, "attention_mask": mask})
    if several:
        assert [(d.row, d.start, d.stop) for d in result] == expected
    one = rows[0]
    ends = torch.tensor([0, *one]).cumsum(0)
    result = documents_of({"input_ids": torch.zeros(1, sum(one)), "cu_seqlens": ends})
    assert [(d.start, d.stop) for d in result or ()] == (
        list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)) if len(one) > 1 else []
    )


def test_a_plan_counts_documents():
    planned = gk.plan(
        Reader(), pack(documents(), "position_ids"), task=gk.LanguageModeling(), rows=60
    )
    assert all(layer.layer.positions < 7 for layer in planned.layers)
