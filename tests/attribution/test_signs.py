"""A positive score helps, for every task and method: the oracle is one gradient step on the row."""

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import nn
from torch.nn import functional as F

import gradkeep as gk

ROWS, INPUTS = 24, 5


class MultiLabel(gk.Task):
    def losses(self, model, batch):
        x, y = batch
        return F.binary_cross_entropy_with_logits(model(x), y, reduction="none").sum(1)


class PairwiseRanking(gk.Task):
    def losses(self, model, batch):
        better, worse = batch
        return F.softplus(model(worse) - model(better)).squeeze(1)


class Exponential(gk.Task):
    """A loss that rises or falls with the output of its sample."""

    def __init__(self, sign):
        self.sign = sign

    def losses(self, model, batch):
        return self.measure(model, batch).losses

    def measure(self, model, batch):
        x, y = batch
        outputs = model(x).squeeze(1) - y
        losses = (self.sign * outputs).exp()
        return gk.Measured(losses=losses, outputs=outputs, slopes=self.sign * losses.detach())


def _x(draw):
    return torch.randn(ROWS, INPUTS, generator=draw)


def _targets(*shape):
    return lambda draw: (_x(draw), torch.randn(ROWS, *shape, generator=draw))


TASKS = {
    "classification": (gk.Classification(), 3, lambda draw: (_x(draw), torch.arange(ROWS) % 3)),
    "one logit": (gk.Classification(), 1, lambda draw: (_x(draw), torch.arange(ROWS) % 2)),
    "regression": (gk.Regression(), 1, _targets()),
    "several outputs": (gk.Regression(), 3, _targets(3)),
    "several labels": (
        MultiLabel(),
        4,
        lambda draw: (_x(draw), (torch.rand(ROWS, 4, generator=draw) > 0.5).float()),
    ),
    "ranking": (PairwiseRanking(), 1, lambda draw: (_x(draw), _x(draw))),
    "rising loss": (Exponential(1), 1, _targets()),
    "falling loss": (Exponential(-1), 1, _targets()),
}
METHODS = {
    "dot": {},
    "cos": {},
    "tracin": {"lrs": [0.1]},
    "kernel": {},
    "trak": {"dim": 128},
    "kfac": {},
    "ekfac": {},
    "logra": {"rank": 4},
    "datainf": {},
    "influence": {"curvature": "fisher"},
}
FIRST_ORDER = ("dot", "cos", "tracin")


def effect_of_steps(task, model, data):
    """Return how much a small step on each row lowers the loss of every row `[queries, train]`."""
    parameters = list(model.parameters())
    losses = task.losses(model, data)
    gradients = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    effects = np.zeros((len(losses), len(losses)))
    rate = 1e-4
    for row, gradient in enumerate(gradients):
        with torch.no_grad():
            for parameter, part in zip(parameters, gradient, strict=True):
                parameter -= rate * part
            effects[:, row] = (losses - task.losses(model, data)).detach() / rate
            for parameter, part in zip(parameters, gradient, strict=True):
                parameter += rate * part
    return effects


@pytest.fixture(scope="module", params=TASKS)
def captured(request, tmp_path_factory):
    task, width, build = TASKS[request.param]
    draw = torch.Generator().manual_seed(3)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, width)).double()
    data = tuple(
        part.double() if part.is_floating_point() else part for part in build(draw)
    )  # float64: the oracle takes differences
    store = gk.open(tmp_path_factory.mktemp("store"))
    for split in ("train", "test"):
        gk.capture(store, model, [data], task=task, split=split, progress=False)
    return store, effect_of_steps(task, model, data)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_on_a_row_with_a_positive_score_lowers_the_loss_of_the_query(captured, method):
    store, effects = captured
    scores = np.asarray(gk.attribute(store, method=method, **METHODS[method]).values)
    assert (scores.diagonal() > 0).all()  # every row helps itself
    if method in FIRST_ORDER:
        clear = abs(effects) > 1e-3 * abs(effects).max()
        assert (np.sign(scores) == np.sign(effects))[clear].all()
    else:  # curvature changes sizes, and some signs of small effects
        assert spearmanr(scores.ravel(), effects.ravel()).statistic > 0.4
