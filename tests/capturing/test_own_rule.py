"""A layer rule from outside: used by its name, proved on the first batch, refused where it is wrong."""

import pytest
import torch
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep.capturing.rules._layers import by_sample
from gradkeep.capturing.rules._rules import layer_rules, unregister_layer_rule
from gradkeep.errors import CaptureError
from gradkeep.factors._dense import Dense, DenseRows
from gradkeep.factors._outer import Outer, OuterRows


class Bilinear(nn.Module):
    """y = (x W) * s: one weight matrix and a scale of its own, which no rule of gradkeep knows."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        return x @ self.mix


def mixing(unit, calls, rows):
    (call,) = calls
    x, g = by_sample(call.input, rows, unit.axis), by_sample(call.suffix(), rows, unit.axis)
    arrays = f"{unit.name}.prefix", f"{unit.name}.suffix"
    form = Outer(unit.parameters, *arrays, d_in=4, d_out=3, transposed=True)
    return gk.LayerGradients(form, OuterRows(x, g))


def wrong(unit, calls, rows):
    built = mixing(unit, calls, rows)
    values = 2 * built.form.restore(built.rows)
    return gk.LayerGradients(Dense(unit.parameters, f"{unit.name}.gradient", 12), DenseRows(values))


@pytest.fixture
def registered():
    names = []

    def register(gradients, name="mixing"):
        rule = gk.LayerRule(name, lambda m: isinstance(m, Bilinear), gradients, weights=None)
        gk.register_layer_rule(rule)
        names.append(name)

    yield register
    for name in names:
        unregister_layer_rule(name)


def capture(tmp_path, *, uncovered="error"):
    torch.manual_seed(0)
    model = nn.Sequential(Bilinear(), nn.Tanh(), nn.Linear(3, 3))
    batch = (torch.randn(6, 4), torch.arange(6) % 3)
    return (
        model,
        batch,
        gk.capture(
            gk.open(tmp_path),
            model,
            [batch],
            task=gk.Classification(),
            split="train",
            uncovered=uncovered,
            progress=False,
        ),
    )


def gradients(model, batch):
    rows = []
    for x, y in zip(*batch, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[None]), y[None]).backward()
        rows.append(model[0].mix.grad.clone())
    return torch.stack(rows)


def test_a_rule_keeps_the_factors_of_its_layer(tmp_path, registered):
    with pytest.raises(CaptureError):
        capture(tmp_path / "without")
    registered(mixing)
    assert layer_rules()[0].name == "mixing"
    model, batch, report = capture(tmp_path / "with")
    assert [layer.storage for layer in report.layers] == ["factors", "factors"]
    result = gk.gradients(tmp_path / "with", split="train").restore(range(6))["0.mix"]
    assert torch.allclose(result, gradients(model, batch), atol=1e-6)


def test_a_wrong_rule_is_not_believed(tmp_path, registered):
    registered(wrong)
    with pytest.raises(CaptureError):
        capture(tmp_path / "strict")
    model, batch, _ = capture(tmp_path / "dense", uncovered="dense")
    result = gk.gradients(tmp_path / "dense", split="train").restore(range(6))["0.mix"]
    assert torch.allclose(result, gradients(model, batch), atol=1e-6)


def test_a_taken_name_and_something_else_are_refused(registered):
    with raises(CaptureError, "capture.rule_exists"):
        registered(mixing, name="linear")
    with raises(CaptureError, "capture.rule_exists"):
        registered(mixing, name="whole")
    with raises(CaptureError, "capture.not_a_rule"):
        gk.register_layer_rule("linear")
