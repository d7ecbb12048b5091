"""A task from outside: in Python, and named in a configuration file that lies beside its module."""

import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import gradkeep as gk
from gradkeep.cli import main

MODULE = '''
from dataclasses import dataclass

import torch

import gradkeep as gk


@dataclass(frozen=True)
class Quantile(gk.Task):
    """The pinball loss of one quantile."""

    level: float = 0.5

    def losses(self, model, batch):
        x, y = batch
        error = y.float() - model(x).squeeze(1)
        return torch.maximum(self.level * error, (self.level - 1) * error)


def rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator)
    return torch.utils.data.TensorDataset(x, x.sum(1))


def network():
    torch.manual_seed(1)
    return torch.nn.Linear(3, 1)
'''
CONFIG = """
store: kept
model: {from: "stranger_tasks:network"}
task: {name: "stranger_tasks:Quantile", level: 0.9}
data:
  train: {from: "stranger_tasks:rows", count: 7}
"""


@dataclass(frozen=True)
class Quantile(gk.Task):
    """The pinball loss of one quantile."""

    level: float = 0.5

    def losses(self, model, batch):
        x, y = batch
        error = y.float() - model(x).squeeze(1)
        return torch.maximum(self.level * error, (self.level - 1) * error)


def truth(level):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, generator=generator)
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    error = x.sum(1) - model(x).squeeze(1).detach()
    slope = torch.where(error > 0, -torch.tensor(level), torch.tensor(1 - level))
    return model, (x, x.sum(1)), slope[:, None] * x


def test_its_losses_and_gradients_are_kept(tmp_path):
    model, batch, expected = truth(0.9)
    gk.capture(tmp_path, model, [batch], task=Quantile(0.9), split="train", progress=False)
    rows = gk.gradients(tmp_path, split="train")
    assert torch.allclose(rows.restore(range(7))["weight"].squeeze(1), expected, atol=1e-6)
    losses = Quantile(0.9).losses(model, batch).detach().numpy()
    assert np.allclose(rows.column("loss"), losses, atol=1e-6)


def test_other_settings_are_another_capture(tmp_path):
    model, batch, _ = truth(0.9)
    gk.capture(tmp_path, model, [batch], task=Quantile(0.9), split="train", progress=False)
    with pytest.raises(gk.GradkeepError, match=r"level=0\.5"):
        gk.capture(tmp_path, model, [batch], task=Quantile(0.5), split="train", progress=False)


def test_a_configuration_names_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "stranger_tasks.py").write_text(MODULE)
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.setattr("sys.argv", ["gradkeep", "capture", str(tmp_path / "config.yaml")])
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.modules.pop("stranger_tasks", None)
    assert ended.value.code in (0, None)
    assert "7 rows" in capsys.readouterr().out
    result = gk.gradients(tmp_path / "kept", split="train").restore(range(7))["weight"]
    assert torch.allclose(result.squeeze(1), truth(0.9)[2], atol=1e-6)
