"""Models that read one sequence and write another: labels are what the decoder writes."""

from types import SimpleNamespace

import pytest
import torch
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep.errors import CaptureError

VOCABULARY = 11
pytestmark = pytest.mark.filterwarnings("ignore:ranks from what is kept agree only")


class Translator(nn.Module):
    """As Hugging Face's encoder-decoders are called and say what they are."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(is_encoder_decoder=True)
        self.table = nn.Embedding(VOCABULARY, 12)
        self.reads = nn.Linear(12, 12)
        self.writes = nn.Linear(12, 12)
        self.head = nn.Linear(12, VOCABULARY)

    def prepare_decoder_input_ids_from_labels(self, labels):
        before = torch.nn.functional.pad(labels[:, :-1], (1, 0))
        return before.masked_fill(before == -100, 0)

    def forward(self, input_ids, decoder_input_ids, attention_mask=None):
        read = self.reads(self.table(input_ids)).tanh()
        if attention_mask is not None:
            read = read * attention_mask.unsqueeze(2)
        text = self.writes(self.table(decoder_input_ids)).cumsum(1)
        return self.head((text + read.sum(1, keepdim=True)).tanh())


def batch(rows=16, read=7, written=4):
    torch.manual_seed(1)
    labels = torch.randint(1, VOCABULARY, (rows, written))
    labels[1::3, 1:] = -100  # one label, at the place that a shift would lose
    mask = torch.ones(rows, read, dtype=torch.int64)
    mask[::2, 5:] = 0
    tokens = torch.randint(1, VOCABULARY, (rows, read))
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def model():
    torch.manual_seed(0)
    return Translator().eval()


def loss_of(net, one):
    """By hand: the label at each place, from those before it."""
    labels = one["labels"][0]
    before = torch.cat([torch.zeros(1, dtype=torch.int64), labels[:-1]]).clamp(min=0)[None]
    logits = net(one["input_ids"], before, one["attention_mask"])[0].log_softmax(1)
    return -sum(logits[at, label] for at, label in enumerate(labels) if label != -100)


def test_gradients_are_those_of_what_the_decoder_writes(store):
    net, values = model(), batch()
    batches = [{name: value[at : at + 8] for name, value in values.items()} for at in (0, 8)]
    gk.capture(store, net, batches, task=gk.LanguageModeling(), split="train", progress=False)
    result = gk.gradients(store, split="train").restore(range(16))
    for row in range(16):
        net.zero_grad()
        one = {name: value[row : row + 1] for name, value in values.items()}
        loss_of(net, one).backward()
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(result[name][row], parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep", ["exact", "600B"])
def test_it_can_be_asked(store, keep):
    net, values = model(), batch()
    task = gk.LanguageModeling()
    gk.capture(store, net, [values], task=task, split="train", keep=keep, progress=False)
    queries = "queries" if keep == "600B" else keep
    gk.capture(store, net, [values], task=task, split="test", keep=queries, progress=False)
    scores = gk.attribute(store).numpy()
    assert (
        scores.argmax(1) == range(16)
    ).mean() > 0.5  # most rows are best explained by themselves


def test_inputs_of_the_decoder_may_be_given(store):
    net, values = model(), batch()
    task = gk.LanguageModeling()
    before = net.prepare_decoder_input_ids_from_labels(values["labels"])
    text = task.losses(net, {**values, "decoder_input_ids": before})
    torch.testing.assert_close(text, task.losses(net, values))


@pytest.mark.parametrize("remaining", [("labels",), ("labels", "attention_mask")])
def test_without_labels_there_is_nothing_to_write(store, remaining):
    values = {name: value for name, value in batch().items() if name not in remaining}
    with raises(CaptureError, "capture.decoder_without_labels"):
        gk.capture(
            store, model(), [values], task=gk.LanguageModeling(), split="train", progress=False
        )


def test_tokens_of_the_decoder_carry_what_can_be_told_apart(store):
    net, values = model(), batch()
    task = gk.LanguageModeling()
    for split in ("train", "test"):
        gk.capture(store, net, [values], task=task, split=split, keep="factors", progress=False)
    result = gk.attribute_tokens(store, method="dot", ids=[0, 1], train_ids=[2, 3])
    scores = gk.attribute(store, method="dot").numpy()[:2, 2:4]
    assert result.values.shape == (2, 2, 4)
    assert abs(result.sums - scores).max() < 1e-4 * abs(scores).max()
