"""Parameters outside of layers: tokens, positions, scales and the projections of attention, in the pass of all others."""

import pytest
import torch
from torch import nn

import gradkeep as gk
from gradkeep.capturing import _proofs, _tracer

ROWS, TOKENS, WIDTH = 11, 5, 8


class Mean(gk.Task):
    """The squared mean of all outputs of a sample."""

    def losses(self, model, batch):
        return model(batch[0]).flatten(1).tanh().sum(1).square()


class Bare(nn.Module):
    """A linear layer behind parameters that a function combines with its input `[B, T, d]`."""

    def __init__(self, combine, **shapes):
        super().__init__()
        self.combine, self.head = combine, nn.Linear(WIDTH, 3)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x):
        return self.head(self.combine(self, x))


def with_prompts(net, x):
    return torch.cat([net.prompts.expand(len(x), -1, -1), x], 1)


class Attention(nn.Module):
    def __init__(self, *, batch_first=True, memory=False, bias=True):
        super().__init__()
        options = {"batch_first": batch_first, "bias": bias}
        self.attention, self.memory = nn.MultiheadAttention(WIDTH, 2, **options), memory
        self.turn = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.turn(x)
        other = x.tanh() if self.memory else x
        return self.head(self.turn(self.attention(x, other, other, need_weights=False)[0]))


class Scale(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return x * self.gamma


def functional(net, x):
    return nn.functional.linear(x, net.weight, net.bias)


MODELS = {
    "class token": lambda: Bare(
        lambda net, x: torch.cat([net.token.expand(len(x), -1, -1), x], 1), token=(1, 1, WIDTH)
    ),
    "class token [d]": lambda: Bare(
        lambda net, x: torch.cat([net.token.expand(len(x), 1, -1), x], 1), token=(WIDTH,)
    ),
    "position [1, T, d]": lambda: Bare(lambda net, x: x + net.at, at=(1, TOKENS, WIDTH)),
    "position [T, d]": lambda: Bare(lambda net, x: x + net.at, at=(TOKENS, WIDTH)),
    "sliced": lambda: Bare(lambda net, x: x + net.at[:, : x.shape[1]], at=(1, 9, WIDTH)),
    "both": lambda: Bare(lambda net, x: (x + net.at) * net.gain, at=(TOKENS, WIDTH), gain=(WIDTH,)),
    "prompts": lambda: Bare(with_prompts, prompts=(1, 4, WIDTH)),
    "scalar": lambda: Bare(lambda net, x: x * net.gain, gain=()),
    "used twice": lambda: Bare(lambda net, x: net.at + torch.tanh(x * net.at), at=(WIDTH,)),
    "functional": lambda: Bare(functional, weight=(WIDTH, WIDTH), bias=(WIDTH,)),
    "scales": lambda: nn.Sequential(
        Scale(WIDTH), nn.Tanh(), Scale(1, 1, WIDTH), nn.Flatten(), Scale(40)
    ),
    "attention": Attention,
    "attention, samples second": lambda: Attention(batch_first=False),
    "attention without biases": lambda: Attention(bias=False),
    "attention to others": lambda: Attention(memory=True),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True),
}


@pytest.fixture
def passes(monkeypatch):
    """Names of the layers that took a pass per sample."""
    names = []

    def counted(original):
        def whole_model_gradients(units, *rest, **options):
            names.extend(unit.name for unit in units)
            return original(units, *rest, **options)

        return whole_model_gradients

    for module in (_proofs, _tracer):
        monkeypatch.setattr(module, "whole_model_gradients", counted(module.whole_model_gradients))
    return names


def capture(store, model, batches, **options):
    task = Mean()
    return gk.capture(store, model, batches, task=task, split="train", progress=False, **options)


def assert_exact(store, model, batches):
    restored = gk.gradients(store, split="train").restore(range(sum(len(b[0]) for b in batches)))
    at = 0
    for (x,) in batches:
        for row in range(len(x)):
            model.zero_grad()
            Mean().losses(model, (x[row : row + 1],)).sum().backward()
            for name, parameter in model.named_parameters():
                actual, expected = restored[name][at], parameter.grad
                assert (actual - expected).norm() <= 1e-5 * expected.norm() + 1e-7, (name, at)
            at += 1


@pytest.mark.parametrize("kind", MODELS)
def test_bare_parameters_take_no_pass_of_their_own(store, kind, passes):
    torch.manual_seed(0)
    model, x = MODELS[kind]().eval(), torch.randn(ROWS, TOKENS, WIDTH)
    batches = [(part,) for part in x.split([4, 6, 1])]  # one row alone is another pattern
    capture(store, model, batches)
    assert passes == []
    assert_exact(store, model, batches)
    for parameter in model.parameters():  # as they were
        assert isinstance(parameter, nn.Parameter)
    assert not any("use" in type(module).__name__.lower() for module in model.modules())


def test_attention_is_stored_as_factors(store):
    torch.manual_seed(0)
    x = torch.randn(6, 2, WIDTH)
    report = capture(store, Attention().eval(), [(x,)])
    layers = {layer.name: layer for layer in report.layers}
    assert layers["attention"].type == "MultiheadAttention"
    assert layers["attention"].storage == layers["attention.out_proj"].storage == "factors"
    assert layers["attention"].positions == 2


@pytest.mark.parametrize("kind", ["attention", "attention, samples second", "encoder"])
def test_a_plan_knows_the_factors_of_attention(store, kind):
    torch.manual_seed(0)
    model, x = MODELS[kind]().eval(), torch.randn(6, 2, WIDTH)
    plan = gk.plan(model, (x,), task=Mean(), rows=6)
    report = capture(store, model, [(x,)])
    planned = {p.layer.name: (p.layer.storage, p.layer.row_bytes) for p in plan.layers}
    assert planned == {one.name: (one.storage, one.row_bytes) for one in report.layers}


def test_a_later_batch_that_slices_the_copies_is_captured_one_by_one(store, passes):
    torch.manual_seed(0)
    model = Bare(lambda net, x: x + net.at[: x.shape[1]], at=(TOKENS, WIDTH)).eval()
    batches = [(torch.randn(4, TOKENS, WIDTH),), (torch.randn(4, 3, WIDTH),)]
    capture(store, model, batches)
    assert_exact(store, model, batches)
    assert set(passes) == {"model"}


def test_samples_that_read_each_others_copies_do_not_pass_the_proof(store, passes):
    torch.manual_seed(0)
    # The last sample's copy would stand for all.
    model = Bare(lambda net, x: x + net.at[-1], at=(1, WIDTH)).eval()
    batches = [(torch.randn(4, TOKENS, WIDTH),)]
    capture(store, model, batches)
    assert_exact(store, model, batches)


def test_an_error_of_the_model_stays_its_own(store):
    def combine(net, x):
        if len(x) == 3:
            raise KeyError("a broken batch")
        return x + net.at

    model = Bare(combine, at=(1, TOKENS, WIDTH)).eval()
    batches = [(torch.randn(4, TOKENS, WIDTH),), (torch.randn(3, TOKENS, WIDTH),)]
    with pytest.raises(KeyError, match="a broken batch"):
        capture(store, model, batches)
    assert isinstance(model.at, nn.Parameter)
