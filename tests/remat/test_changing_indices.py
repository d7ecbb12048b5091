"""Steps whose indices change their size, whose loss is CTC, or that skip layers are planned."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradkeep as gk
from gradkeep.errors import BudgetWarning


def trained(net, step, steps, budget=None):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def run():
        losses = []
        for number in range(steps):
            optimizer.zero_grad()
            loss = step(net, number)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    if budget is None:
        losses = run()
    else:
        with budget:
            losses = run()
    return [*losses, *(p.detach() for p in net.parameters())]


def assert_same_bits(ours, theirs):
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class Masked(nn.Module):
    """Puts a learned vector where a mask says so, as SpecAugment does."""

    def __init__(self, *, masks):
        super().__init__()
        self.masks = masks
        self.first = nn.Linear(16, 32)
        self.mask = nn.Parameter(torch.randn(32))
        self.body = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)), nn.Linear(32, 5)
        )

    def forward(self, x, places):
        hidden = self.first(x)
        hidden[places if self.masks else places.nonzero(as_tuple=True)] = self.mask
        return self.body(hidden)


def masked_step(net, number):
    draw = torch.Generator().manual_seed(number)
    x = torch.randn(20, 4, 16, generator=draw)
    places = torch.rand(20, 4, generator=draw) < 0.3
    scores = F.log_softmax(net(x, places), -1)
    lengths = torch.full((4,), 20), torch.full((4,), 6)
    return F.ctc_loss(scores, torch.randint(1, 5, (4, 6), generator=draw), *lengths)


@pytest.mark.parametrize("masks", [True, False])
def test_masks_of_changing_size_and_ctc_loss_are_planned(masks):
    torch.manual_seed(0)
    plain, step = Masked(masks=masks), masked_step
    ours = copy.deepcopy(plain)
    budget = gk.memory_budget(0.9, effort=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        outcome = trained(ours, step, 12, budget)
    assert_same_bits(outcome, trained(plain, step, 12))
    report = budget.report()
    assert (report.recorded, report.planned, report.unplanned) == (3, 9, 0)
    assert report.measured_peak <= report.budget


def test_speech_recognition_with_masks_and_dropped_layers_is_planned():
    transformers = pytest.importorskip("transformers")
    np = pytest.importorskip("numpy")
    config = transformers.Wav2Vec2Config(
        vocab_size=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        conv_dim=(16, 16, 16),
        conv_stride=(5, 2, 2),
        conv_kernel=(10, 3, 3),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
    )
    torch.manual_seed(0)
    plain = transformers.Wav2Vec2ForCTC(config).train()
    ours = copy.deepcopy(plain)
    sound, labels = torch.randn(2, 2000), torch.randint(1, 16, (2, 10))

    def step(net, number):
        if number == 0:
            np.random.seed(0)
        return net(sound, labels=labels).loss

    budget = gk.memory_budget(0.8, effort=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        outcome = trained(ours, step, 16, budget)
    assert_same_bits(outcome, trained(plain, step, 16))
    assert budget.report().planned >= 8
    assert budget.report().undone == 0
