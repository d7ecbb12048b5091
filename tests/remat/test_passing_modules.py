"""Modules that are made anew in every step do not make it another step."""

import torch
from torch import nn

import gradkeep as gk


def test_a_loss_made_anew_in_each_step_is_the_same_step():
    torch.manual_seed(0)
    parts = [part for _ in range(4) for part in (nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))]
    net = nn.Sequential(*parts, nn.Linear(32, 3))
    x, y = torch.randn(128, 32), torch.arange(128) % 3
    budget = gk.memory_budget(0.8)
    with budget:
        for _ in range(6):
            net.zero_grad()
            nn.CrossEntropyLoss()(nn.Identity()(net(x)), y).backward()
    assert budget.report().planned == 3
