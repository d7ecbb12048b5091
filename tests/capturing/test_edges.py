"""What people hand in: packed sequences, narrow labels, image dicts, wrapped weights, bad arguments."""

import math

import numpy as np
import pytest
import torch
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep.errors import CaptureError, GradkeepError

KEY = gk.store.CaptureKey("final", "train")


def capture(store, model, loader, **options):
    options = {"task": gk.Classification(), "split": "train", "progress": False} | options
    return gk.capture(store, model, loader, **options)


class Speaker(nn.Module):
    """A language model that takes what Hugging Face collators give."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, input_ids, **others):
        return self.head(self.embed(input_ids))


TOKENS = torch.arange(12).remainder(9).view(1, 12)
RESTARTS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])
PACKED = {
    "position_ids": {"position_ids": RESTARTS},
    "cu_seq_lens": {"cu_seq_lens_q": torch.tensor([0, 5, 8, 12], dtype=torch.int32)},
    "cu_seqlens": {"cu_seqlens": torch.tensor([0, 5, 8, 12])},
    "seq_idx": {"seq_idx": torch.tensor([[0] * 5 + [1] * 3 + [2] * 4])},
    "numbered mask": {"attention_mask": torch.tensor([[1] * 5 + [2] * 3 + [3] * 4])},
    "mask that keeps documents apart": {
        "attention_mask": torch.block_diag(*(torch.ones(n, n).tril() for n in (5, 3, 4)))[
            None, None
        ]
    },
}
UNCLEAR = {
    "documents of one token": {
        "position_ids": torch.tensor([[0, 0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7]])
    },
    "padding, or documents of one token": {
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 0, 0]])
    },
    "positions that jump": {"position_ids": torch.tensor([[0, 1, 2, 7, 8, 0, 1, 2, 3, 4, 5, 6]])},
    "ends that fall": {"cu_seqlens": torch.tensor([0, 5, 4, 12])},
    "ends beyond the row": {"cu_seqlens": torch.tensor([0, 5, 8, 13])},
    "labels after the last document": {"cu_seqlens": torch.tensor([0, 5, 8, 11])},
}


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("keep", [None, "losses"])
def test_padding_free_batches_are_one_row_per_document(store, kind, keep):
    batch = {"input_ids": TOKENS, "labels": TOKENS, **PACKED[kind]}
    assert capture(store, Speaker(), [batch], task=gk.LanguageModeling(), keep=keep).rows == 3


@pytest.mark.parametrize("kind", UNCLEAR)
@pytest.mark.parametrize("keep", [None, "losses"])
def test_packs_that_do_not_say_where_documents_begin_are_refused(store, kind, keep):
    batch = {"input_ids": TOKENS, "labels": TOKENS, **UNCLEAR[kind]}
    with raises(CaptureError, "capture.unclear_documents", fix="pad"):
        capture(store, Speaker(), [batch], task=gk.LanguageModeling(), keep=keep)
    assert store.captures() == []


def test_padding_free_batches_may_come_late(store):
    plain = {"input_ids": TOKENS, "labels": TOKENS, "position_ids": torch.arange(12)[None]}
    late = plain | {"position_ids": RESTARTS}
    assert capture(store, Speaker(), [plain, late], task=gk.LanguageModeling()).rows == 4


UNPACKED = {
    "plain": {"position_ids": torch.arange(12)[None]},
    "left padded, as generation does it": {
        "position_ids": torch.tensor([[1, 1, 1, *range(9)]]),
        "attention_mask": torch.tensor([[0] * 3 + [1] * 9]),
    },
    "left padded with zeros": {"position_ids": torch.tensor([[0, 0, 0, *range(9)]])},
    "right padded with zeros": {"position_ids": torch.tensor([[*range(9), 0, 0, 0]])},
    "right padded, counted on": {
        "position_ids": torch.tensor([[*range(9), 0, 1, 2]]),
        "attention_mask": torch.tensor([[1] * 9 + [0] * 3]),
    },
    "one sequence number": {"seq_idx": torch.zeros(1, 12, dtype=torch.int64)},
    "a window": {"position_ids": torch.arange(100, 112)[None]},
    "one position for all": {"position_ids": torch.arange(12)},
    "float mask": {"attention_mask": torch.ones(1, 12)},
}


@pytest.mark.parametrize("kind", UNPACKED)
def test_padded_batches_are_not_mistaken_for_packed_ones(store, kind):
    batch = {"input_ids": TOKENS, "labels": TOKENS, **UNPACKED[kind]}
    assert capture(store, Speaker(), [batch], task=gk.LanguageModeling()).rows == 1


def test_a_task_may_take_a_pack_for_one_sample(store):
    class Packs(gk.LanguageModeling):
        packed = True

    batch = {"input_ids": TOKENS, "labels": TOKENS, "position_ids": RESTARTS}
    assert capture(store, Speaker(), [batch], task=Packs()).rows == 1


@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.uint8, torch.bool])
def test_narrow_labels_are_labels(store, model, kind):
    x, y = torch.randn(6, 4), torch.arange(6) % 2
    capture(store, model, [(x, y.to(kind))], name="narrow")
    capture(store, model, [(x, y)])
    narrow, wide = (
        store.read(gk.store.CaptureKey("final", "train", "main", n)) for n in ("narrow", "main")
    )
    assert (narrow.column("loss") == wide.column("loss")).all()
    assert (narrow.column("label") == wide.column("label")).all()


def test_narrow_tokens_are_tokens(store):
    batch = {"input_ids": TOKENS.int(), "labels": TOKENS.int()}
    net = Speaker()
    capture(store, net, [batch], task=gk.LanguageModeling(), name="narrow")
    capture(store, net, [(TOKENS.int(), TOKENS.int())], task=gk.LanguageModeling(), name="pair")
    assert len(store.captures()) == 2


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(12, 3)

    def forward(self, pixel_values, labels=None, return_dict=True):
        class Answer:
            logits = self.head(pixel_values.flatten(1))

        return Answer()


@pytest.mark.parametrize(
    "net", [Images(), nn.Sequential(nn.Flatten(), nn.Linear(12, 3))], ids=["named", "plain"]
)
def test_image_dicts_reach_models_that_take_one_input(store, net):
    batch = {"pixel_values": torch.randn(5, 3, 2, 2), "labels": torch.arange(5) % 3}
    assert capture(store, net, [batch]).rows == 5
    assert gk.layers(net, batch, task=gk.Classification())[0].parameters == 39


def test_dicts_that_no_model_takes_are_told(store):
    batch = {
        "pixel_values": torch.randn(5, 12),
        "mask": torch.ones(5),
        "labels": torch.arange(5) % 3,
    }
    with raises(CaptureError, "capture.model_arguments") as caught:
        capture(store, nn.Sequential(nn.Linear(12, 3)), [batch])
    assert "pixel_values, mask" in str(caught.value)
    assert "gk.Task" in caught.value.fix


def test_weights_of_data_parallel_without_counters_are_loaded(store):
    def net():
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).eval()

    batch = torch.randn(5, 4), torch.arange(5) % 3
    trained = net()
    wrapped = {f"module.{k}": v for k, v in trained.state_dict().items() if "num_batches" not in k}
    bare = {k.removeprefix("module."): v for k, v in wrapped.items()}
    capture(store, net(), [batch], checkpoints={"a": wrapped, "b": bare, "c": trained.state_dict()})
    losses = [store.read(gk.store.CaptureKey(name, "train")).column("loss") for name in "abc"]
    assert (losses[0] == losses[2]).all()
    assert (losses[1] == losses[2]).all()
    del wrapped["module.2.bias"]
    with raises(CaptureError, "capture.weights_do_not_fit") as caught:
        capture(store, net(), [batch], checkpoints={"d": wrapped})
    assert "missing ['2.bias']" in str(caught.value)


def test_empty_batches_are_passed_over(store, model):
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    loader = [(x[:0], y[:0]), (x[:3], y[:3]), (x[:0], y[:0]), (x[3:], y[3:]), (x[:0], y[:0])]
    assert capture(store, model, loader).rows == 6
    assert capture(store, model, loader).reused_rows == 6
    for nothing in ([], [(x[:0], y[:0])]):
        with raises(CaptureError, "capture.empty_loader"):
            capture(store, model, nothing, name="none")


@pytest.mark.parametrize("keep", [None, "losses"])
def test_models_without_parameters_are_refused(store, keep):
    batch = torch.randn(5, 3), torch.arange(5) % 3
    with raises(CaptureError, "capture.no_parameters"):
        capture(store, nn.Sequential(nn.ReLU()), [batch], keep=keep)
    with raises(CaptureError, "capture.no_trainable_parameter"):
        gk.layers(nn.ReLU(), batch, task=gk.Classification())
    with raises(CaptureError, "capture.no_parameters"):
        gk.plan(nn.ReLU(), batch, task=gk.Classification(), rows=3)
    assert store.captures() == []


BAD = {
    "uncovered": ["zzz", None, 3, True],
    "tolerance": [math.nan, -1e-3, math.inf, "small", None, True, 1.5],
    "of": ["zzz", 1],
    "mode": ["zzz", True],
    "encoding": ["zzz", None, 16],
    "keep": ["zzz", 3, {"0": "zzz"}, {"0": 3}],
    "embeddings": [3, [3], None],
    "memory_budget": [-1, 0, math.nan, "much", [1]],
    "resume": ["no", None, 1],
    "progress": ["no", None, 0],
    "step": [1.5, "x", -1, True],
    "lr": [math.nan, "fast", -1.0, math.inf],
    "split": ["", 3, None, "a/b", "\0"],
    "run": ["", 3, None, "a/b"],
    "name": ["", 3, None, "../x"],
    "checkpoints": ["", 3, None, {}, {"a": 3}, {3: {}}, "a/b"],
    "layers": [3, ["nothing like it"], 1.5],
    "task": [None, gk.Classification, "classification"],
}


@pytest.mark.parametrize("argument", BAD)
def test_bad_arguments_are_refused_at_the_edge(store, model, argument):
    batch = torch.randn(5, 4), torch.arange(5) % 3
    for value in BAD[argument]:
        with pytest.raises(GradkeepError) as caught:
            capture(store, model, [batch], **{argument: value})
        assert caught.value.message
        assert store.captures() == [], (argument, value)
        assert store.checkpoints() == [], (argument, value)


@pytest.mark.parametrize(
    "values", [(3,), ("text",), (torch.randn(3, 4),), ({"x": 1},), (None,), ([3],), ([None],)]
)
def test_what_is_no_loader_is_refused(store, model, values):
    with pytest.raises(GradkeepError):
        capture(store, model, *values)


def test_what_is_no_model_is_refused(store):
    for net in (None, "net", lambda x: x):
        with pytest.raises(CaptureError, match="model"):
            capture(store, net, [(torch.randn(5, 4), torch.arange(5) % 3)])


def test_rank_must_be_cut_by_a_share(store, model):
    batch = torch.randn(5, 4), torch.arange(5) % 3
    assert capture(store, model, [batch], tolerance=np.float32(0.01)).rows == 5
