"""Event files and runs say what the store says."""

import numpy as np
import pytest
import torch

import gradkeep as gk
from gradkeep.errors import GradkeepError
from gradkeep.integrations import write_tensorboard, write_wandb


@pytest.fixture
def store(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    batch = (torch.randn(20, 3), torch.arange(20) % 2)
    for step in (5, 9):
        for split in ("train", "test"):
            gk.capture(
                tmp_path / "store",
                model,
                [batch],
                task=gk.Classification(),
                split=split,
                checkpoints=f"step-{step}",
                step=step,
                keep="losses",
            )
        with torch.no_grad():
            model[0].weight += 1
    return gk.open(tmp_path / "store")


def test_event_files_hold_losses_accuracies_and_suspects(store, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    budget = gk.memory_budget(0.9)
    written = write_tensorboard(store, tmp_path / "events", suspected=3, budget=budget)
    events = EventAccumulator(str(tmp_path / "events"), {"histograms": 0})
    events.Reload()
    for split in ("train", "test"):
        for event, step in zip(events.Scalars(f"loss/{split}"), (5, 9), strict=True):
            block = store.read(gk.store.CaptureKey(f"step-{step}", split))
            assert event.step == step
            assert event.value == pytest.approx(np.mean(block.column("loss")), rel=1e-6)
        right = block.column("label") == block.column("predicted")
        assert events.Scalars(f"accuracy/{split}")[-1].value == pytest.approx(np.mean(right))
        assert [one.step for one in events.Histograms(f"losses/{split}")] == [5, 9]
    text = events.Tensors("suspects/text_summary")[0].tensor_proto.string_val[0].decode()
    assert f"| {gk.suspects(store).ids[0]} |" in text
    assert text.count("\n") == 4
    assert events.Scalars("memory/planned steps")[0].value == 0
    scalars = sum(len(events.Scalars(tag)) for tag in events.Tags()["scalars"])
    assert written == scalars + 4 + 1


def test_a_run_of_wandb_is_given_the_same(store, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, project="here") as run:
        assert write_wandb(store, run, suspected=2) > 0
        assert run.summary["loss/train"] == pytest.approx(
            float(np.mean(store.read(gk.store.CaptureKey("step-9", "train")).column("loss")))
        )
        assert run.summary["gradkeep/step"] == 9


def test_bad_input_is_refused(store, tmp_path):
    with pytest.raises(GradkeepError, match=r"wandb\.init"):
        write_wandb(store, "a run")
    with pytest.raises(GradkeepError):
        write_tensorboard(tmp_path / "nothing", tmp_path / "events")
    with pytest.raises(GradkeepError):
        write_tensorboard(store, tmp_path / "events", suspected=-1)
    assert not (tmp_path / "nothing").exists()
