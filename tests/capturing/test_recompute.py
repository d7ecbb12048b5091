"""Capturing in fewer bytes: the same stored bytes, whatever is dropped and made again."""

import pytest
import torch
from torch import nn

import gradkeep as gk
from gradkeep.capturing import _replay
from gradkeep.capturing._tracer import _earliest, fill, watching
from gradkeep.data import model
from gradkeep.errors import BudgetError


@pytest.fixture
def budgets(monkeypatch):
    """The memory budgets that captures make."""
    built = []
    plain = _replay.remat.memory_budget

    def noted(*args, **kwargs):
        built.append(plain(*args, **kwargs))
        return built[-1]

    monkeypatch.setattr(_replay.remat, "memory_budget", noted)
    return built


@pytest.fixture
def prepared(monkeypatch):
    """What captures found out about the model."""
    result = []
    plain = _replay.prepare_capture

    def noted(*args, **kwargs):
        result.append(plain(*args, **kwargs))
        return result[-1]

    monkeypatch.setattr(_replay, "prepare_capture", noted)
    return result


def segments(store, key):
    return [(entry.file, entry.bytes, entry.xxh3) for entry in store.read(key).manifest.segments]


def test_a_resnet_in_less_than_half_the_memory_gives_the_same_bytes(tmp_path, budgets, prepared):
    torch.manual_seed(0)
    net = model("resnet20").eval()
    data = [(torch.randn(16, 3, 32, 32), torch.arange(16) % 10) for _ in range(6)]
    plain, small = gk.open(tmp_path / "plain"), gk.open(tmp_path / "small")
    task = gk.Classification()
    one = gk.capture(plain, net, data, task=task, split="train", progress=False)
    other = gk.capture(
        small, net, data, task=task, split="train", progress=False, memory_budget=0.6
    )
    assert one.bytes == other.bytes
    assert segments(plain, one.key) == segments(small, other.key)
    (budget,) = budgets
    report = budget.report()
    assert report.planned > 0
    assert report.measured_peak <= report.budget
    # What it takes to hold all inputs and all gradients of outputs until the end.
    whole = gk.memory_budget(1.0, recordings=2)
    for _ in range(2):
        with whole.step(inputs=data[0]):
            prepared[0].tracer.run(data[0])
    assert report.measured_peak <= 0.5 * whole.explain().peak


@pytest.mark.parametrize("shape", ["conv", "tied", "branches"])
def test_layers_are_done_as_the_backward_pass_comes_by(tmp_path, shape):
    """Shared modules, branches and in-place operators: dense gradients are autograd's."""
    torch.manual_seed(1)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 1)
            self.norm = nn.BatchNorm2d(3)
            if shape == "branches":
                self.c = nn.Conv2d(2, 3, 1)
            self.out = nn.Linear(3 * 16, 4)

        def forward(self, x):
            y = torch.relu_(self.norm(self.a(x)))
            if shape == "tied":
                y = self.b(torch.tanh(self.b(y)))
            elif shape == "branches":
                y = self.b(y) + self.c(x)
            else:
                y = self.b(y)
            return self.out(y.flatten(1))

    net = Net().eval()
    batch = (torch.randn(5, 2, 4, 4), torch.arange(5) % 4)
    store = gk.open(tmp_path)
    for name, budget in (("plain", None), ("small", 0.95)):
        gk.capture(
            store,
            net,
            [batch],
            task=gk.Classification(),
            split="train",
            name=name,
            keep="dense",
            memory_budget=budget,
            progress=False,
        )
    for row in range(5):
        net.zero_grad()
        loss = nn.functional.cross_entropy(net(batch[0][row : row + 1]), batch[1][row : row + 1])
        loss.backward()
        for name in ("plain", "small"):
            result = gk.gradients(store, split="train", name=name).restore([row])
            for key, parameter in net.named_parameters():
                if key in result:
                    assert torch.allclose(result[key][0], parameter.grad, atol=1e-5)


def test_a_fraction_below_the_floor_names_the_floor(tmp_path):
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    data = [(torch.randn(8, 8), torch.arange(8) % 3) for _ in range(8)]
    with pytest.raises(BudgetError, match="floor"):
        gk.capture(
            gk.open(tmp_path),
            net,
            data,
            task=gk.Classification(),
            split="train",
            memory_budget=0.01,
            progress=False,
        )


def test_gradients_on_the_way_are_those_at_the_end():
    torch.manual_seed(2)
    net = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    x = torch.randn(3, 4)

    def run():
        remaining, right = net[0](x), net[1](x)
        joined = net[2](torch.tanh(remaining) * right)
        return (net[3](joined) + remaining).square().sum(1)

    with watching(list(net)) as calls:
        target = run()
    fill(calls, target)
    expected = [call.suffix().clone() for call in calls]
    seen = []
    with watching(list(net)) as calls:
        target = run()
    nodes = {call.edges[0].node for call in calls}
    assert {call.module for call in calls if call.edges[0].node in _earliest(nodes)} == {
        net[0],
        net[1],
    }
    fill(calls, target, callback=lambda call: seen.append(call.module))
    assert seen == [net[3], net[2]]
    for call, suffix in zip(calls, expected, strict=True):
        assert torch.equal(call.suffix(), suffix)
