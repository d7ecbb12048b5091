"""Adam's moments by parameter: which number is which, and states that fit no model."""

import pytest
import torch
from raises import raises
from torch import nn

from gradkeep.capturing._weights import read_adam
from gradkeep.errors import CaptureError


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(width)
        self.one = nn.Linear(width, width)
        self.two = nn.Linear(width, width)
        self.last_norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.last_norm(self.two(self.one(self.norm(x)).tanh()))


def trained(model, adam, steps=3):
    for step in range(steps):
        torch.manual_seed(step)
        adam.zero_grad()
        model(torch.randn(6, 4)).square().sum().backward()
        adam.step()
    return adam


def truth(model, adam):
    return {
        name: adam.state[p]["exp_avg_sq"] for name, p in model.named_parameters() if p in adam.state
    }


def grouped(model, last):
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if not last(n, p)], "weight_decay": 0.1},
        {"params": [p for n, p in named if last(n, p)], "weight_decay": 0.0},
    ]


GROUPS = {
    "all": lambda model: model.parameters(),
    "as the Trainer does": lambda model: grouped(model, lambda n, p: "norm" in n or "bias" in n),
    "by dimensions": lambda model: grouped(model, lambda n, p: p.dim() < 2),
    "named": lambda model: reversed(list(model.named_parameters())),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_every_moment_is_found_under_its_parameter_s_name(tmp_path, kind):
    model = Net()
    adam = trained(model, torch.optim.AdamW(GROUPS[kind](model)))
    torch.save(adam.state_dict(), tmp_path / "optimizer.pt")
    result = read_adam(tmp_path, Net())
    expected = truth(model, adam)
    assert result.second.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(result.second[name], value), name
    assert (result.step, result.beta2, result.eps) == (3, 0.999, 1e-8)
    torch.testing.assert_close(result.corrected("one.bias"), expected["one.bias"] / (1 - 0.999**3))


def test_frozen_parameters_have_no_moments_whether_they_were_given_or_not():
    model = Net()
    model.one.requires_grad_(False)
    for values in (model.parameters(), [p for p in model.parameters() if p.requires_grad]):
        adam = trained(model, torch.optim.Adam(values))
        result = read_adam(adam.state_dict(), model).second
        assert result.keys() == truth(model, adam).keys()
        assert all(torch.equal(result[n], v) for n, v in truth(model, adam).items())


def test_groups_of_one_s_own_are_named():
    model = Net()
    order = ["two", "one", "last_norm", "norm"]
    adam = torch.optim.AdamW([{"params": getattr(model, n).parameters()} for n in order])
    trained(model, adam)
    with raises(CaptureError, "capture.optimizer_does_not_fit"):
        read_adam(adam.state_dict(), model)
    names = [f"{n}.{part}" for n in order for part in ("weight", "bias")]
    result = read_adam(adam.state_dict(), model, names=names)
    assert all(torch.equal(result.second[n], v) for n, v in truth(model, adam).items())


def test_two_ways_that_both_fit_are_not_guessed():
    class Odd(
        nn.Module
    ):  # by name the table is undecayed and one vector is not, by shape otherwise
        def __init__(self):
            super().__init__()
            self.a_norm = nn.Parameter(torch.ones(2, 2))
            self.scale = nn.Parameter(torch.ones(2))
            self.table = nn.Parameter(torch.ones(2, 2))
            self.b_norm = nn.Parameter(torch.ones(2))

    model = Odd()
    group = {"betas": (0.9, 0.999), "eps": 1e-8}
    state = {"state": {3: {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2), "step": 1.0}}}
    state["param_groups"] = [{"params": [0, 1], **group}, {"params": [2, 3], **group}]
    with raises(CaptureError, "capture.optimizer_ambiguous"):
        read_adam(state, model)


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ({"state": {}, "param_groups": [{"params": [0]}]}, "capture.no_second_moments"),
        ({"weights": 1}, "capture.not_an_optimizer"),
    ],
)
def test_what_is_no_state_of_adam_is_refused(state, code):
    with raises(CaptureError, code):
        read_adam(state, Net())


def test_states_of_another_model_or_optimizer_and_missing_ones_are_refused(tmp_path):
    model = Net()
    sgd = trained(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    with raises(CaptureError, "capture.no_second_moments", mentions="momentum_buffer"):
        read_adam(sgd.state_dict(), model)
    adam = trained(model, torch.optim.Adam(model.parameters()))
    with raises(CaptureError, "capture.optimizer_does_not_fit"):
        read_adam(adam.state_dict(), Net(5))
    with raises(CaptureError, "capture.no_optimizer"):
        read_adam(tmp_path, model)
    (tmp_path / "optimizer.pt").write_bytes(b"no")
    with raises(CaptureError, "capture.unreadable_checkpoint"):
        read_adam(tmp_path, model)
