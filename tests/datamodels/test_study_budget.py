"""A study inside a byte budget trains the same models."""

import numpy as np
import pytest
import torch
from raises import raises
from torch import nn

from gradkeep.datamodels import Study, Training, margins
from gradkeep.errors import BudgetError, DatamodelsError


def deep():
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)) for _ in range(6)),
        nn.Linear(16, 3),
    )


def study(folder, budget, **options):
    torch.manual_seed(0)
    x, y = torch.randn(512, 16), torch.arange(512) % 3
    training = Training(deep, epochs=4, batch_size=64, lr=0.05)
    return Study(
        folder,
        (x, y),
        training,
        num_models=3,
        outputs=margins((x[:5], y[:5])),
        keep_models=True,
        memory_budget=budget,
        **options,
    )


def test_models_are_the_same_to_the_bit(tmp_path, monkeypatch):
    plain = study(tmp_path / "plain", None, stacked=False)
    assert plain.run(workers=0).complete
    reports = []
    from gradkeep.remat import MemoryBudget

    leave = MemoryBudget.__exit__

    def noted(self, *error):
        leave(self, *error)
        reports.append(self.report())

    monkeypatch.setattr(MemoryBudget, "__exit__", noted)
    small = study(tmp_path / "small", 0.75)
    assert small.run(workers=0).complete
    assert len(reports) == 3
    assert all(report.planned > 0 for report in reports)
    assert np.array_equal(plain.outputs(), small.outputs())
    for row in range(3):
        for one, other in zip(
            plain.model(row).parameters(), small.model(row).parameters(), strict=True
        ):
            assert torch.equal(one, other)


def test_a_study_may_go_on_with_another_budget(tmp_path):
    assert study(tmp_path, 0.8).run(workers=0).complete
    repeated = study(tmp_path, None, stacked=False)
    assert len(repeated.done()) == 3


def test_what_cannot_be_is_told(tmp_path):
    with raises(DatamodelsError, "datamodels.not_stackable"):
        study(tmp_path / "one", 0.8, stacked=True)
    with pytest.raises(BudgetError, match="floor"):
        study(tmp_path / "two", 0.01).job([0])
