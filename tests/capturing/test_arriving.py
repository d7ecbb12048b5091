"""Gradients of weights told of one layer at a time: the same as autograd's, and let go."""

import weakref

import pytest
import torch
from torch import nn

from gradkeep.capturing._proofs import backward_per_layer
from gradkeep.capturing.rules._rules import units_of
from gradkeep.data import GPT


class Half(nn.Module):
    """A bias that takes no part, a layer that does not, and a weight that is used twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.spare = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        return (self.first(self.first(x).tanh()) @ self.last.weight.t()).square().sum()


def cases():
    torch.manual_seed(0)
    gpt = GPT(vocabulary=11, length=8, dim=8, heads=2, layers=2, tied=True)
    yield gpt, lambda: gpt(torch.arange(8).view(2, 4)).square().sum()
    half = Half()
    yield half, lambda: half(torch.ones(2, 5))


@pytest.mark.parametrize("case", [0, 1])
def test_they_are_those_of_autograd(case):
    model, target = list(cases())[case]
    units = units_of(model)
    before = {name: torch.full_like(p, 3) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = before[name]
    result = {}
    unused = backward_per_layer(target(), units, lambda unit, flat: result.update({unit: flat}))
    for name, parameter in model.named_parameters():
        assert parameter.grad is before[name]
        assert (parameter.grad == 3).all()
        assert not parameter._post_accumulate_grad_hooks
    expected = torch.autograd.grad(
        target(), [w for unit in units for w in unit.weights], allow_unused=True
    )
    expected = dict(zip((w for unit in units for w in unit.weights), expected, strict=True))
    for unit in units:
        own = [expected[weight] for weight in unit.weights]
        if all(gradient is None for gradient in own):
            assert unit in unused
            continue
        flat = [
            torch.zeros(weight.numel()) if gradient is None else gradient.flatten()
            for weight, gradient in zip(unit.weights, own, strict=True)
        ]
        torch.testing.assert_close(result[unit], torch.cat(flat))
    assert [unit.name for unit in unused] == ([] if case == 0 else ["spare"])
    assert set(result) | set(unused) == set(units)


def test_they_are_held_no_longer_than_they_are_looked_at():
    model, target = next(cases())
    alive, most = [], 0

    def look(unit, flat):
        nonlocal most
        alive.append(weakref.ref(flat))
        most = max(most, sum(one() is not None for one in alive))

    backward_per_layer(target(), units_of(model), look)
    assert len(alive) > 10
    assert most == 1


def test_hooks_and_gradients_are_put_back_after_an_error():
    model, target = next(cases())

    def fail(unit, flat):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        backward_per_layer(target(), units_of(model), fail)
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())
