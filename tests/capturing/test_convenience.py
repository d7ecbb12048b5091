"""What `gk.capture` accepts for convenience: data sets, a device, models in train mode."""

import numpy as np
import pytest
import torch
from raises import raises
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradkeep as gk
from gradkeep.errors import AttributionError, CaptureError

ROWS = TensorDataset(torch.randn(10, 4), torch.arange(10) % 3)


class Pairs:
    """A map-style data set that is no torch data set, as Hugging Face's are."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index >= 10:
            raise IndexError(index)
        return ROWS[index]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3)).train()


def losses(store):
    return gk.gradients(store, split="train").block.column("loss")


@pytest.mark.parametrize(
    ("data", "options"),
    [(ROWS, {}), (ROWS, {"batch_size": 3}), (Pairs(), {"batch_size": 4})],
    ids=["default", "batches of 3", "not torch's"],
)
def test_a_data_set_gives_the_rows_of_its_loader(tmp_path, model, data, options):
    task = gk.Classification()
    gk.capture(tmp_path / "a", model, data, task=task, split="train", **options)
    gk.capture(tmp_path / "b", model, DataLoader(ROWS, 5), task=task, split="train")
    np.testing.assert_allclose(losses(tmp_path / "a"), losses(tmp_path / "b"), rtol=1e-6)


def test_batch_size_is_refused_for_loaders(tmp_path, model):
    loader = DataLoader(ROWS, batch_size=5)
    with raises(CaptureError, "capture.batch_size_of_loader", fix="batch_size="):
        gk.capture(tmp_path, model, loader, task=gk.Classification(), split="train", batch_size=2)
    with pytest.raises(CaptureError, match=r"^batch_size must be"):
        gk.capture(tmp_path, model, ROWS, task=gk.Classification(), split="train", batch_size=0)


def test_models_are_captured_in_eval_mode_and_left_in_theirs(tmp_path, model):
    gk.capture(tmp_path / "a", model, ROWS, task=gk.Classification(), split="train")
    assert model.training
    assert model[1].training
    gk.capture(tmp_path / "b", model.eval(), ROWS, task=gk.Classification(), split="train")
    np.testing.assert_array_equal(losses(tmp_path / "a"), losses(tmp_path / "b"))


def test_device_moves_the_model_there_and_back(tmp_path, model):
    gk.capture(tmp_path, model, ROWS, task=gk.Classification(), split="train", device="cpu")
    assert next(model.parameters()).device.type == "cpu"
    with raises(CaptureError, "capture.device"):
        gk.capture(tmp_path, model, ROWS, task=gk.Classification(), split="test", device="cuda:77")


def test_attribute_once_takes_data_sets_and_has_the_default_method_of_attribute(tmp_path, model):
    task = gk.Classification()
    once = gk.attribute_once(model, ROWS, ROWS, task=task, batch_size=4, device="cpu")
    for split in ("train", "test"):
        gk.capture(tmp_path, model, ROWS, task=task, split=split)
    stored = gk.attribute(tmp_path)
    assert once.method == stored.method == "kernel"
    np.testing.assert_allclose(np.asarray(once), np.asarray(stored), rtol=1e-4, atol=1e-6)


def test_scores_behave_like_an_array(tmp_path, model):
    scores = gk.attribute_once(model, ROWS, ROWS, task=gk.Classification(), method="dot")
    assert len(scores) == 10
    np.testing.assert_array_equal(np.asarray(scores), scores.numpy())
    np.testing.assert_array_equal(scores[3], scores.numpy()[3])
    np.testing.assert_array_equal(scores[:, 2], scores.numpy()[:, 2])
    np.testing.assert_array_equal(np.stack(list(scores)), scores.numpy())
    assert np.asarray(scores, np.float64).dtype == np.float64


def test_results_print_short_and_render_as_html(tmp_path, model):
    task = gk.Classification()
    sources = {f"epoch-{n}": model.state_dict() for n in range(12)}
    reports = gk.capture(tmp_path, model, ROWS, task=task, split="train", checkpoints=sources)
    gk.capture(tmp_path, model, ROWS, task=task, split="test", checkpoints=sources)
    scores = gk.attribute(tmp_path)
    deep = nn.Sequential(*(nn.Linear(4, 4) for _ in range(30)))
    plan = gk.plan(deep, ROWS[:4], task=task, rows=100)
    results = [
        reports,
        reports[0],
        plan,
        scores,
        scores.top(10, query=0),
        scores.top(3, query=0),
        gk.suspects(tmp_path),
        gk.methods(),
        gk.groups(scores, 0),
    ]
    for result in results:
        text = repr(result)
        assert text == str(result) or type(result).__name__ == "Scores"
        assert 1 <= len(text.splitlines()) <= 12, text
        assert "array(" not in text
        assert result._repr_html_().startswith("<")


def test_reports_of_captures_can_be_attributed(tmp_path, model):
    task = gk.Classification()
    sources = {"early": model.state_dict(), "late": model.state_dict()}
    common = {"task": task, "checkpoints": sources, "run": "r", "name": "n"}
    train = gk.capture(tmp_path, model, ROWS, split="train", **common)
    query = gk.capture(tmp_path, model, ROWS, split="odd", **common)
    expected = gk.attribute(tmp_path, queries="odd", run="r", name="n")
    for reports in ([train, query], [*train, *query]):
        np.testing.assert_array_equal(np.asarray(gk.attribute(reports)), np.asarray(expected))
    one = gk.attribute([train, query], checkpoints="late", method="dot")
    assert one.checkpoints == ("r/late",)
    with raises(AttributionError, "attribute.captured_splits", fix="split='train'"):
        gk.attribute(train)
    elsewhere = gk.capture(tmp_path / "other", model, ROWS, task=task, split="odd")
    with raises(AttributionError, "attribute.captured_elsewhere"):
        gk.attribute([train, elsewhere])
